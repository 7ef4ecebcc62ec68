//! User objects: what of the host has to live as long as graphs need it.
//!
//! An object is counted by its holders, as an [`Arc`]: the caller's references, graphs, executable graphs and launches.
//! The last one that lets go hands it to a thread of its own, since destructors are the caller's code.

use std::ffi::{c_uint, c_void};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, LazyLock, Weak};
use std::thread;

use cudarc::driver::sys::{CUgraph, CUhostFn, CUuserObject};

use crate::system::{self, Answer, INVALID_VALUE, System};
use crate::{call_outside, put};

pub(crate) struct UserObject {
    pub(crate) handle: usize,
    destroy: unsafe extern "C" fn(*mut c_void),
    data: usize,
}

impl Drop for UserObject {
    fn drop(&mut self) {
        bury(Remains::Object { handle: self.handle, destroy: self.destroy, data: self.data });
    }
}

/// An object as the caller's handle names it.
pub(crate) struct ObjectEntry {
    object: Weak<UserObject>,
    /// The caller's own references: as many as `count`, held by this one.
    owned: Option<Arc<UserObject>>,
    count: usize,
}

impl ObjectEntry {
    fn change(&mut self, object: Arc<UserObject>, count: usize) {
        self.count = count;
        self.owned = (count > 0).then_some(object);
    }
}

enum Remains {
    Object { handle: usize, destroy: unsafe extern "C" fn(*mut c_void), data: usize },
    Memory(u64),
}

/// Hands what nobody holds any more to the thread that destroys it: this may be noticed anywhere, also under the
/// system's lock.
fn bury(remains: Remains) {
    static QUEUE: LazyLock<Sender<Remains>> = LazyLock::new(|| {
        let (sender, receiver) = channel::<Remains>();
        let run = move || {
            system::enter_callback();
            for remains in receiver {
                remains.destroy();
            }
        };
        thread::Builder::new().name("softcuda-destroyer".into()).spawn(run).expect("a thread for destructors");
        sender
    });
    QUEUE.send(remains).expect("its thread never ends");
}

/// Memory of a graph, freed with the last graph, executable and launch that has its node.
pub(crate) struct GraphMemory(pub(crate) u64);

impl Drop for GraphMemory {
    fn drop(&mut self) {
        bury(Remains::Memory(self.0));
    }
}

impl Remains {
    fn destroy(self) {
        match self {
            Remains::Object { handle, destroy, data } => {
                system::lock().objects.remove(&handle);
                // SAFETY: the caller gave the function with its data, for one call.
                unsafe { destroy(data as *mut c_void) };
            }
            Remains::Memory(address) => {
                let freed = system::lock().memory.remove(&address);
                drop(freed);
            }
        }
    }
}

/// A count that the functions of user objects take.
fn count_of(count: c_uint) -> Answer<usize> {
    i32::try_from(count).ok().filter(|&count| count > 0).map(|count| count as usize).ok_or(INVALID_VALUE)
}

fn entry(system: &mut System, object: CUuserObject) -> Answer<(&mut ObjectEntry, Arc<UserObject>)> {
    let entry = system.objects.get_mut(&(object as usize)).ok_or(INVALID_VALUE)?;
    let alive = entry.object.upgrade().ok_or(INVALID_VALUE)?;
    Ok((entry, alive))
}

pub unsafe extern "C" fn cuUserObjectCreate(
    out: *mut CUuserObject,
    data: *mut c_void,
    destroy: CUhostFn,
    count: c_uint,
    flags: c_uint,
) -> c_uint {
    const NO_DESTRUCTOR_SYNC: c_uint = 1;
    call_outside("cuUserObjectCreate", || {
        let good = !out.is_null() && flags == NO_DESTRUCTOR_SYNC && count > 0;
        let destroy = destroy.filter(|_| good).ok_or(INVALID_VALUE)?;
        // Unlike the other functions it takes counts above those of an `i32` (measured).
        let count = count as usize;
        let handle = system::fresh_handle();
        let object = Arc::new(UserObject { handle, destroy, data: data as usize });
        let weak = Arc::downgrade(&object);
        system::lock().objects.insert(handle, ObjectEntry { object: weak, owned: Some(object), count });
        // SAFETY: the caller's promise.
        unsafe { put(out, handle as CUuserObject) }
    })
}

pub unsafe extern "C" fn cuUserObjectRetain(object: CUuserObject, count: c_uint) -> c_uint {
    call_outside("cuUserObjectRetain", || {
        let count = count_of(count)?;
        let mut system = system::lock();
        let (entry, alive) = entry(&mut system, object)?;
        entry.change(alive, entry.count + count);
        Ok(())
    })
}

pub unsafe extern "C" fn cuUserObjectRelease(object: CUuserObject, count: c_uint) -> c_uint {
    call_outside("cuUserObjectRelease", || {
        let count = count_of(count)?;
        let mut system = system::lock();
        let (entry, alive) = entry(&mut system, object)?;
        entry.change(alive, entry.count.checked_sub(count).ok_or(INVALID_VALUE)?);
        Ok(())
    })
}

pub unsafe extern "C" fn cuGraphRetainUserObject(
    graph: CUgraph,
    object: CUuserObject,
    count: c_uint,
    flags: c_uint,
) -> c_uint {
    const MOVE: c_uint = 1;
    call_outside("cuGraphRetainUserObject", || {
        let count = count_of(count)?;
        let mut system = system::lock();
        if flags > MOVE || !system.graphs.contains_key(&(graph as usize)) {
            return Err(INVALID_VALUE);
        }
        let (entry, alive) = entry(&mut system, object)?;
        if flags == MOVE {
            entry.change(Arc::clone(&alive), entry.count.checked_sub(count).ok_or(INVALID_VALUE)?);
        }
        system.graphs.get_mut(&(graph as usize)).expect("seen above").retain(&alive, count);
        Ok(())
    })
}

pub unsafe extern "C" fn cuGraphReleaseUserObject(graph: CUgraph, object: CUuserObject, count: c_uint) -> c_uint {
    call_outside("cuGraphReleaseUserObject", || {
        let count = count_of(count)?;
        let mut system = system::lock();
        entry(&mut system, object)?;
        let graph = system.graphs.get_mut(&(graph as usize)).ok_or(INVALID_VALUE)?;
        graph.release(object as usize, count);
        Ok(())
    })
}
