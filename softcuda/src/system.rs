//! The device's side: streams as queues, and the threads that execute them.
//!
//! One *engine* thread executes device work of all streams of all software devices: each stream is a queue, and its head
//! runs when what it depends on is done. Work that takes time ([`Work::Spin`]) or waits ([`Work::WaitValue`]) only blocks
//! its own stream. Host functions run on one *callback* thread per context, like the real driver's.
//!
//! All state is under one lock, [`SYSTEM`]. Nothing foreign runs under it: copies and host functions run without.

use std::alloc::Layout;
use std::collections::{BTreeMap, BinaryHeap, HashMap, VecDeque};
use std::ffi::c_void;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, LazyLock, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use cudarc::driver::sys::CUstream;

use crate::attributes::Attributes;
use crate::capture::{Capture, Member};
use crate::graph::{Exec, Graph, Kept, NodeWork};
use crate::user_object::ObjectEntry;

/// What an entry point answers: a driver's code as the error.
pub(crate) type Answer<T = ()> = Result<T, u32>;

pub(crate) const INVALID_VALUE: u32 = 1;
pub(crate) const OUT_OF_MEMORY: u32 = 2;
pub(crate) const NOT_INITIALIZED: u32 = 3;
pub(crate) const INVALID_DEVICE: u32 = 101;
pub(crate) const INVALID_CONTEXT: u32 = 201;
pub(crate) const INVALID_HANDLE: u32 = 400;
pub(crate) const ILLEGAL_STATE: u32 = 401;
pub(crate) const NOT_FOUND: u32 = 500;
pub(crate) const NOT_READY: u32 = 600;
pub(crate) const ILLEGAL_ADDRESS: u32 = 700;
pub(crate) const CONTEXT_IS_DESTROYED: u32 = 709;
pub(crate) const NOT_PERMITTED: u32 = 800;
pub(crate) const NOT_SUPPORTED: u32 = 801;
pub(crate) const CAPTURE_UNSUPPORTED: u32 = 900;
pub(crate) const CAPTURE_INVALIDATED: u32 = 901;
pub(crate) const CAPTURE_MERGE: u32 = 902;
pub(crate) const CAPTURE_UNMATCHED: u32 = 903;
pub(crate) const CAPTURE_UNJOINED: u32 = 904;
pub(crate) const CAPTURE_ISOLATION: u32 = 905;
pub(crate) const CAPTURE_IMPLICIT: u32 = 906;
pub(crate) const CAPTURED_EVENT: u32 = 907;
pub(crate) const CAPTURE_WRONG_THREAD: u32 = 908;
pub(crate) const GRAPH_EXEC_UPDATE_FAILURE: u32 = 910;

/// Pending submissions of device work after which a stream's enqueuer blocks; a batch is one (measured on the real driver).
const QUEUE_DEPTH: usize = 1021;

/// A function of the host that the device calls.
#[derive(Clone, Copy)]
pub(crate) enum HostCall {
    /// `cuLaunchHostFunc`: dropped unrun after a fault.
    Function(unsafe extern "C" fn(*mut c_void)),
    /// `cuStreamAddCallback`: runs after a fault too, with its code.
    Callback(unsafe extern "C" fn(CUstream, u32, *mut c_void)),
}

/// A block of bytes that a copy reads: memory, or what was staged at the call.
#[derive(Clone)]
pub(crate) enum Source {
    Memory(u64),
    Staged(Vec<u8>),
}

/// When a wait on memory is over.
#[derive(Clone, Copy)]
pub(crate) struct Condition {
    pub(crate) address: u64,
    pub(crate) wide: bool,
    pub(crate) value: u64,
    /// `CUstreamWaitValue_flags` without the flush bit.
    pub(crate) kind: u32,
}

/// One operation of a stream.
#[derive(Clone)]
pub(crate) enum Work {
    /// Waits for `Op::after` only, and marks a place: events.
    Mark,
    Copy {
        dst: u64,
        src: Source,
        bytes: usize,
    },
    Fill {
        dst: u64,
        value: u32,
        width: usize,
        count: usize,
    },
    Write {
        address: u64,
        wide: bool,
        value: u64,
    },
    WaitValue(Condition),
    Spin(Duration),
    Fault(u32),
    Host {
        call: HostCall,
        handle: usize,
        data: usize,
    },
    Free(u64),
    /// Managed memory changes its association.
    Attach {
        address: u64,
        kind: u32,
        stream: u64,
    },
}

impl Op {
    /// Whether it takes a place in the bounded queue of device work: of a batch, the last does.
    fn takes_a_place(&self) -> bool {
        self.work.is_device_work() && !self.more
    }
}

impl Work {
    /// Whether it is bound for the bounded queue of device work.
    fn is_device_work(&self) -> bool {
        !matches!(self, Work::Host { .. } | Work::Mark)
    }
}

/// A place in a stream: reached when the operation that carries it is done.
#[derive(Default)]
pub(crate) struct Place {
    done: AtomicBool,
    pub(crate) time: OnceLock<Instant>,
}

impl Place {
    pub(crate) fn is_done(&self) -> bool {
        self.done.load(Ordering::Acquire)
    }
}

pub(crate) struct Op {
    pub(crate) work: Work,
    pub(crate) after: Vec<Arc<Place>>,
    pub(crate) place: Option<Arc<Place>>,
    /// The next operation belongs to the same submission.
    pub(crate) more: bool,
    /// What has to live until the operation is done: the last of a graph's launch keeps what the graph keeps.
    pub(crate) _kept: Option<Arc<Kept>>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Progress {
    /// Nothing to do, or its head waits for a place of another stream.
    Resting,
    /// In the engine's list.
    Listed,
    /// Its head is being executed, or waits for time, memory or the callback thread.
    Busy,
}

/// A stream: legacy, per-thread or created.
pub(crate) struct StreamState {
    pub(crate) context: usize,
    pub(crate) flags: u32,
    pub(crate) priority: i32,
    pub(crate) attributes: Attributes,
    pub(crate) submitted: u64,
    pub(crate) completed: u64,
    pub(crate) destroyed: bool,
    /// The green context that it was made in.
    pub(crate) green: usize,
    /// Its part in a capture.
    pub(crate) member: Option<Member>,
    device_pending: usize,
    /// Somebody waits for room in its queue of device work.
    pub(crate) crowded: bool,
    queue: VecDeque<Op>,
    progress: Progress,
}

impl StreamState {
    pub(crate) fn is_blocking(&self) -> bool {
        self.flags & 1 == 0
    }

    pub(crate) fn is_idle(&self) -> bool {
        self.queue.is_empty()
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum MemoryKind {
    Device,
    Pinned,
    Managed,
}

/// The bytes of an allocation, on the host's heap, zeroed, and aligned as device memory is.
pub(crate) struct Block {
    base: NonNull<u8>,
    layout: Layout,
}

// SAFETY: the block is owned, and nothing is read or written through this type.
unsafe impl Send for Block {}

impl Block {
    /// What the real driver aligns allocations to, at least.
    const ALIGNMENT: usize = 256;

    /// Room for `size` bytes, which is not 0; `None` when the host has not got it.
    pub(crate) fn new(size: usize) -> Option<Block> {
        // With room to align by hand: the heap gives zeroed pages that cost nothing until they are touched only for
        // its own alignment.
        let layout = Layout::from_size_align(size.checked_add(Block::ALIGNMENT)?, align_of::<u128>()).ok()?;
        // SAFETY: the size is not 0.
        let base = NonNull::new(unsafe { std::alloc::alloc_zeroed(layout) })?;
        Some(Block { base, layout })
    }

    pub(crate) fn address(&self) -> u64 {
        (self.base.as_ptr().expose_provenance().next_multiple_of(Block::ALIGNMENT)) as u64
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout, and this is the owner.
        unsafe { std::alloc::dealloc(self.base.as_ptr(), self.layout) };
    }
}

/// Who an allocation belongs to.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Owner {
    Caller,
    /// A graph, from the capture on. It is `live` from a launch that allocates it until it is freed.
    Graph {
        live: bool,
    },
}

/// An allocation.
pub(crate) struct Allocation {
    pub(crate) context: usize,
    pub(crate) kind: MemoryKind,
    pub(crate) owner: Owner,
    pub(crate) len: usize,
    /// Freed with the allocation.
    pub(crate) _block: Block,
    /// Managed memory: the kind of association it was made with, and the one that it has.
    pub(crate) attached_at_first: u32,
    pub(crate) attached: (u32, u64),
}

pub(crate) struct EventState {
    pub(crate) context: usize,
    pub(crate) flags: u32,
    pub(crate) place: Option<Arc<Place>>,
    /// Last recorded in a capture: which, and the nodes that it stands for.
    pub(crate) captured: Option<(u64, Vec<usize>)>,
}

/// A primary context.
pub(crate) struct ContextState {
    pub(crate) legacy: u64,
    pub(crate) fault: Option<u32>,
    pub(crate) retained: u32,
    calls: VecDeque<u64>,
    callback_thread: bool,
    running_call: bool,
    /// Created streams that are not destroyed.
    pub(crate) made_streams: usize,
    /// Blocks of memory for created streams; the first comes with the context, and all stay.
    stream_blocks: usize,
}

#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct Alarm(std::cmp::Reverse<Instant>, u64);

#[derive(Default)]
pub(crate) struct System {
    pub(crate) contexts: HashMap<usize, ContextState>,
    pub(crate) streams: HashMap<u64, StreamState>,
    /// Handles of created streams.
    pub(crate) handles: HashMap<usize, u64>,
    pub(crate) events: HashMap<usize, EventState>,
    pub(crate) memory: BTreeMap<u64, Allocation>,
    /// The captures that are going on, by a number that none before had.
    pub(crate) captures: BTreeMap<u64, Capture>,
    pub(crate) captures_begun: u64,
    pub(crate) graphs_made: u64,
    pub(crate) graphs: HashMap<usize, Graph>,
    /// The graph of each node.
    pub(crate) nodes: HashMap<usize, usize>,
    pub(crate) execs: HashMap<usize, Exec>,
    pub(crate) objects: HashMap<usize, ObjectEntry>,
    /// The device of each green context.
    pub(crate) green: HashMap<usize, usize>,
    ready: VecDeque<u64>,
    /// Streams whose head waits for a place.
    resting: Vec<u64>,
    alarms: BinaryHeap<Alarm>,
    watched: Vec<(u64, Condition)>,
    engine: bool,
    engine_sleeps: bool,
    host_waits: usize,
}

static SYSTEM: LazyLock<Mutex<System>> = LazyLock::new(Mutex::default);
/// There is something for the engine.
static ENGINE: Condvar = Condvar::new();
/// There is something for a callback thread.
static CALLS: Condvar = Condvar::new();
/// An operation completed: for threads of the host that wait.
static DONE: Condvar = Condvar::new();

pub(crate) fn lock() -> MutexGuard<'static, System> {
    // Nothing foreign runs under the lock, so a poisoned one still guards a sound state.
    SYSTEM.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A number that no handle, stream or event of this process had before.
pub(crate) fn fresh() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

/// A handle that looks like a pointer and is never followed.
pub(crate) fn fresh_handle() -> usize {
    0x5_0000_0000 + usize::try_from(fresh()).expect("64 bits") * 16
}

/// A device's submission lock. It is held while an enqueuer waits for room in a queue, so that other threads' calls on
/// the context wait as well: the real driver does that (measured), but for questions about other streams and events.
pub(crate) fn submission(context: usize) -> MutexGuard<'static, ()> {
    const MOST_DEVICES: usize = 16;
    static LOCKS: [Mutex<()>; MOST_DEVICES] = [const { Mutex::new(()) }; MOST_DEVICES];
    LOCKS[crate::device::ordinal_of(context) % MOST_DEVICES].lock().unwrap_or_else(PoisonError::into_inner)
}

/// As [`submission`], for the context of a stream.
pub(crate) fn submission_of(stream: u64) -> Option<MutexGuard<'static, ()>> {
    let context = lock().streams.get(&stream)?.context;
    Some(submission(context))
}

impl System {
    pub(crate) fn new_stream(&mut self, context: usize, flags: u32, priority: i32) -> u64 {
        let id = fresh();
        self.streams.insert(
            id,
            StreamState {
                context,
                flags,
                priority,
                attributes: Attributes::default(),
                submitted: 0,
                completed: 0,
                destroyed: false,
                green: 0,
                member: None,
                device_pending: 0,
                crowded: false,
                queue: VecDeque::new(),
                progress: Progress::Resting,
            },
        );
        id
    }

    pub(crate) fn new_context(&mut self, handle: usize) {
        let legacy = self.new_stream(handle, 0, 0);
        let context = ContextState {
            legacy,
            fault: None,
            retained: 0,
            calls: VecDeque::new(),
            callback_thread: false,
            running_call: false,
            made_streams: 0,
            stream_blocks: 1,
        };
        self.contexts.insert(handle, context);
    }

    /// The code of the fault that the context has, as an error. A primary context that nobody retains is gone.
    pub(crate) fn sound(&self, context: usize) -> Answer {
        match self.contexts.get(&context) {
            Some(state) if state.retained == 0 => Err(CONTEXT_IS_DESTROYED),
            Some(state) => state.fault.map_or(Ok(()), Err),
            None => Err(INVALID_CONTEXT),
        }
    }

    /// As [`System::sound`], for the context of a stream.
    pub(crate) fn sound_stream(&self, stream: u64) -> Answer {
        let state = self.streams.get(&stream).ok_or(INVALID_HANDLE)?;
        crate::green::alive(self, state.green)?;
        self.sound(state.context)
    }

    /// The allocation that has the byte at `address`, with its own address.
    pub(crate) fn allocation_at(&self, address: u64) -> Option<(u64, &Allocation)> {
        let (&base, allocation) = self.memory.range(..=address).next_back()?;
        (address - base < allocation.len as u64).then_some((base, allocation))
    }

    /// Memory of a graph was allocated by a launch, or freed. The bytes stay until the graph goes.
    pub(crate) fn set_live(&mut self, address: u64, live: bool) {
        if let Some(allocation) = self.memory.get_mut(&address) {
            allocation.owner = Owner::Graph { live };
        }
    }

    /// The place at the end of a stream's queue; `None` if nothing is pending.
    fn tail(&mut self, stream: u64) -> Option<Arc<Place>> {
        let last = self.streams.get_mut(&stream)?.queue.back_mut()?;
        Some(Arc::clone(last.place.get_or_insert_default()))
    }

    /// The places that an operation of the legacy stream, or of a blocking one, has to wait for.
    fn implicit(&mut self, stream: u64) -> Vec<Arc<Place>> {
        let Some(state) = self.streams.get(&stream) else { return Vec::new() };
        let Some(legacy) = self.contexts.get(&state.context).map(|context| context.legacy) else { return Vec::new() };
        if stream == legacy {
            self.blocking_streams(state.context).into_iter().filter_map(|other| self.tail(other)).collect()
        } else if state.is_blocking() {
            self.tail(legacy).into_iter().collect()
        } else {
            Vec::new()
        }
    }

    /// The blocking streams of a context, without the legacy one.
    pub(crate) fn blocking_streams(&self, context: usize) -> Vec<u64> {
        let legacy = self.contexts[&context].legacy;
        let mine = |(&id, state): (&u64, &StreamState)| {
            (state.context == context && state.is_blocking() && id != legacy).then_some(id)
        };
        self.streams.iter().filter_map(mine).collect()
    }

    /// Whether all that was submitted to the stream is done. For the legacy stream: to the blocking ones too.
    pub(crate) fn all_done(&self, stream: u64) -> bool {
        let Some(state) = self.streams.get(&stream) else { return true };
        state.is_idle()
            && (self.contexts.get(&state.context).is_none_or(|context| context.legacy != stream)
                || self.blocking_streams(state.context).iter().all(|other| self.streams[other].is_idle()))
    }

    /// Puts a stream into the engine's list if its head may be able to run.
    fn list(&mut self, stream: u64) {
        let Some(state) = self.streams.get_mut(&stream) else { return };
        if state.progress == Progress::Resting && !state.queue.is_empty() {
            state.progress = Progress::Listed;
            self.ready.push_back(stream);
            self.wake_engine();
        }
    }

    fn wake_engine(&mut self) {
        if !self.engine {
            self.engine = true;
            thread::Builder::new().name("softcuda-engine".into()).spawn(engine).expect("a thread for the engine");
        } else if std::mem::take(&mut self.engine_sleeps) {
            ENGINE.notify_one();
        }
    }

    /// Takes the head of `stream`, which is done, off its queue, and tells who waits for it.
    fn finish_head(&mut self, stream: u64) {
        let Some(state) = self.streams.get_mut(&stream) else { return };
        let Some(op) = state.queue.pop_front() else { return };
        state.completed += 1;
        state.device_pending -= usize::from(op.takes_a_place());
        state.progress = Progress::Resting;
        if state.destroyed && state.queue.is_empty() {
            self.forget(stream);
        }
        if let Some(place) = op.place {
            let _first = place.time.set(Instant::now());
            place.done.store(true, Ordering::Release);
            for other in std::mem::take(&mut self.resting) {
                self.list(other);
            }
        }
        if self.host_waits > 0 {
            DONE.notify_all();
        }
    }

    /// The head of `stream` is done: the engine goes on with the next.
    fn complete(&mut self, stream: u64) {
        self.finish_head(stream);
        self.list(stream);
    }

    /// Destroys a stream: what it has still runs, then it is forgotten.
    pub(crate) fn retire(&mut self, stream: u64) {
        if let Some(state) = self.streams.get_mut(&stream) {
            state.destroyed = true;
            if state.is_idle() {
                self.forget(stream);
            }
        }
    }

    /// Takes away all that belongs to a context, which starts anew.
    pub(crate) fn clear_context(&mut self, handle: usize) {
        let Some(context) = self.contexts.get_mut(&handle) else { return };
        context.fault = None;
        context.made_streams = 0;
        context.stream_blocks = 1;
        let legacy = context.legacy;
        self.streams.retain(|&id, state| state.context != handle || id == legacy);
        let captures: Vec<u64> =
            self.captures.iter().filter_map(|(&id, capture)| (capture.context == handle).then_some(id)).collect();
        for capture in captures {
            self.drop_capture(capture);
        }
        let streams = &self.streams;
        self.handles.retain(|_, id| streams.contains_key(id));
        self.events.retain(|_, event| event.context != handle);
        self.memory.retain(|_, allocation| allocation.context != handle);
    }

    /// A destroyed stream has nothing left to do.
    pub(crate) fn forget(&mut self, stream: u64) {
        for allocation in self.memory.values_mut().filter(|allocation| allocation.attached.1 == stream) {
            allocation.attached = (allocation.attached_at_first, 0);
        }
        self.streams.remove(&stream);
    }

    /// The context is lost: everything that waits goes on, to be dropped or told.
    pub(crate) fn fail(&mut self, context: usize, code: u32) {
        let Some(state) = self.contexts.get_mut(&context) else { return };
        state.fault.get_or_insert(code);
        let streams = &self.streams;
        let of_context = |stream: u64| streams.get(&stream).is_some_and(|state| state.context == context);
        let mut freed: Vec<u64> = Vec::new();
        self.watched.retain(|&(stream, _)| {
            !of_context(stream) || {
                freed.push(stream);
                false
            }
        });
        self.alarms.retain(|&Alarm(_, stream)| {
            !of_context(stream) || {
                freed.push(stream);
                false
            }
        });
        for stream in freed {
            self.complete(stream);
        }
        for other in std::mem::take(&mut self.resting) {
            self.list(other);
        }
        DONE.notify_all();
    }
}

/// Gives operations to a stream, which nothing comes between: the one way in which work reaches a stream.
///
/// While the stream captures they become a node of its graph. Blocks while the stream's queue of device work is full.
pub(crate) fn submit(stream: u64, works: Vec<Work>) -> Answer {
    let context = {
        let mut system = lock();
        system.respect_legacy(stream)?;
        if system.is_member(stream) {
            let work = NodeWork::of(&works);
            let Some(work) = work else { return system.refuse_on_member(stream) };
            return system.capture_node(stream, work);
        }
        system.streams.get(&stream).ok_or(INVALID_HANDLE)?.context
    };
    let _submission = submission(context);
    let last = works.len().saturating_sub(1);
    let mut numbered = works.into_iter().enumerate();
    numbered.try_for_each(|(index, work)| append(stream, context, work, Vec::new(), None, index != last))
}

/// Marks a place in a stream that does not capture: it is reached when what the stream has now, and `after`, is done.
pub(crate) fn mark(stream: u64, after: Vec<Arc<Place>>, place: Option<Arc<Place>>) -> Answer {
    let context = lock().streams.get(&stream).ok_or(INVALID_HANDLE)?.context;
    let _submission = submission(context);
    append(stream, context, Work::Mark, after, place, false)
}

/// As [`submit`], for one operation of a stream that does not capture; `place` is reached when it is done.
pub(crate) fn submit_uncaptured(stream: u64, work: Work, place: Option<Arc<Place>>) -> Answer {
    let context = lock().streams.get(&stream).ok_or(INVALID_HANDLE)?.context;
    let _submission = submission(context);
    append(stream, context, work, Vec::new(), place, false)
}

/// The caller holds the submission lock of `context`.
fn append(
    stream: u64,
    context: usize,
    work: Work,
    after: Vec<Arc<Place>>,
    place: Option<Arc<Place>>,
    more: bool,
) -> Answer {
    let mut system = lock();
    system.sound(context)?;
    if work.is_device_work() {
        system.host_waits += 1;
        while let Some(state) = system.streams.get_mut(&stream) {
            state.crowded = state.device_pending >= QUEUE_DEPTH;
            if !state.crowded {
                break;
            }
            system = DONE.wait(system).unwrap_or_else(PoisonError::into_inner);
        }
        system.host_waits -= 1;
        system.sound(context)?;
    }
    system.push(stream, Op { work, after, place, more, _kept: None })
}

impl System {
    /// Appends to a stream's queue, behind what the stream has to wait for.
    pub(crate) fn push(&mut self, stream: u64, mut op: Op) -> Answer {
        op.after.extend(self.implicit(stream));
        op.after.retain(|place| !place.is_done());
        let state = self.streams.get_mut(&stream).ok_or(INVALID_HANDLE)?;
        state.submitted += 1;
        state.device_pending += usize::from(op.takes_a_place());
        state.queue.push_back(op);
        // A host call on a stream that rests goes to the callback thread without the engine.
        if state.queue.len() == 1 && state.progress == Progress::Resting {
            self.start_or_list(stream);
        }
        Ok(())
    }
}

impl System {
    /// A host call at the head of a resting stream goes to its thread without the detour over the engine.
    fn start_or_list(&mut self, stream: u64) {
        let head = self.streams.get(&stream).and_then(|state| state.queue.front());
        let call = |op: &Op| matches!(op.work, Work::Host { .. }) && op.after.iter().all(|place| place.is_done());
        if head.is_some_and(call) {
            self.hand_to_callback_thread(stream);
        } else {
            self.list(stream);
        }
    }

    fn hand_to_callback_thread(&mut self, stream: u64) {
        let Some(state) = self.streams.get_mut(&stream) else { return };
        state.progress = Progress::Busy;
        let handle = state.context;
        let Some(context) = self.contexts.get_mut(&handle) else { return };
        context.calls.push_back(stream);
        if !context.callback_thread {
            context.callback_thread = true;
            thread::Builder::new()
                .name("softcuda-callback".into())
                .spawn(move || call_back(handle))
                .expect("a thread for callbacks");
        } else if !context.running_call {
            CALLS.notify_all();
        }
    }
}

/// Waits until `done`, without the lock's holder being disturbed.
pub(crate) fn wait_until(
    mut system: MutexGuard<'static, System>,
    mut done: impl FnMut(&System) -> bool,
) -> MutexGuard<'static, System> {
    system.host_waits += 1;
    while !done(&system) {
        system = DONE.wait(system).unwrap_or_else(PoisonError::into_inner);
    }
    system.host_waits -= 1;
    system
}

/// The operations that a stream has at the moment, as a condition: all of them are done.
pub(crate) fn drained(system: &System, mut choose: impl FnMut(u64, &StreamState) -> bool) -> Vec<(u64, u64)> {
    let chosen =
        |(&id, state): (&u64, &StreamState)| (!state.is_idle() && choose(id, state)).then_some((id, state.submitted));
    system.streams.iter().filter_map(chosen).collect()
}

/// Whether each stream completed as many operations as the list says.
pub(crate) fn reached(system: &System, targets: &[(u64, u64)]) -> bool {
    targets.iter().all(|(id, target)| system.streams.get(id).is_none_or(|state| state.completed >= *target))
}

/// How many created streams fit into so many blocks: 35, 78, 121, 163, 206, 249, 291 (measured on the real driver).
fn streams_in(blocks: usize) -> usize {
    const IN_BLOCK: usize = 128;
    const OF_THE_CONTEXT: usize = 21;
    const OF_A_STREAM: usize = 3;
    (IN_BLOCK * blocks - OF_THE_CONTEXT) / OF_A_STREAM
}

/// Makes room for one more created stream of a context that exists. A new block waits for all work of the context, for
/// running callbacks and for waits on memory too, and with the submission lock, which the caller holds (measured on the real
/// driver).
pub(crate) fn make_room_for_a_stream(
    mut system: MutexGuard<'static, System>,
    context: usize,
) -> MutexGuard<'static, System> {
    let state = system.contexts.get_mut(&context).expect("it exists");
    if state.made_streams < streams_in(state.stream_blocks) {
        return system;
    }
    state.stream_blocks += 1;
    let targets = drained(&system, |_, stream| stream.context == context);
    wait_until(system, |system| system.sound(context).is_err() || reached(system, &targets))
}

/// The engine's thread.
fn engine() {
    const PAUSES: (Duration, Duration) = (Duration::from_micros(10), Duration::from_micros(500));
    let mut pause = PAUSES.0;
    let mut system = lock();
    loop {
        let mut progress = false;
        // What is listed now; what that lists comes after the alarms and the waits on memory.
        for _ in 0..system.ready.len() {
            let Some(stream) = system.ready.pop_front() else { break };
            progress = true;
            system = step(system, stream);
        }
        let now = Instant::now();
        while system.alarms.peek().is_some_and(|alarm| alarm.0.0 <= now) {
            let Alarm(_, stream) = system.alarms.pop().expect("just seen");
            system.complete(stream);
        }
        let over: Vec<u64> =
            system.watched.iter().filter(|(_, condition)| condition.holds()).map(|&(stream, _)| stream).collect();
        system.watched.retain(|(stream, _)| !over.contains(stream));
        for &stream in &over {
            system.complete(stream);
        }
        if progress || !over.is_empty() {
            pause = PAUSES.0;
        }
        if !system.ready.is_empty() {
            continue;
        }
        let alarm = system.alarms.peek().map(|alarm| alarm.0.0.saturating_duration_since(now));
        let poll = (!system.watched.is_empty()).then_some(pause);
        system.engine_sleeps = true;
        system = match alarm.into_iter().chain(poll).min() {
            Some(limit) => ENGINE.wait_timeout(system, limit).unwrap_or_else(PoisonError::into_inner).0,
            None => ENGINE.wait(system).unwrap_or_else(PoisonError::into_inner),
        };
        system.engine_sleeps = false;
        pause = (pause * 2).min(PAUSES.1);
    }
}

/// Executes the head of a listed stream, if it can be.
fn step(mut system: MutexGuard<'static, System>, stream: u64) -> MutexGuard<'static, System> {
    let Some(state) = system.streams.get_mut(&stream) else { return system };
    let context = state.context;
    let Some(op) = state.queue.front_mut() else { return system };
    op.after.retain(|place| !place.is_done());
    let waits = !op.after.is_empty();
    let call = matches!(op.work, Work::Host { .. });
    let failed = system.contexts.get(&context).is_none_or(|context| context.fault.is_some());
    let state = system.streams.get_mut(&stream).expect("just seen");
    if waits && !failed {
        state.progress = Progress::Resting;
        system.resting.push(stream);
        return system;
    }
    if call {
        system.hand_to_callback_thread(stream);
        return system;
    }
    state.progress = Progress::Busy;
    let op = state.queue.front_mut().expect("just seen");
    if failed {
        // After a fault nothing is executed any more.
        system.complete(stream);
        return system;
    }
    // Taken out to be executed without the lock; the place in the queue stays, so that nothing overtakes it.
    match std::mem::replace(&mut op.work, Work::Mark) {
        Work::Mark => {}
        Work::Spin(duration) => {
            op.work = Work::Spin(duration);
            system.alarms.push(Alarm(std::cmp::Reverse(Instant::now() + duration), stream));
            return system;
        }
        Work::WaitValue(condition) => {
            op.work = Work::WaitValue(condition);
            if !condition.holds() {
                system.watched.push((stream, condition));
                return system;
            }
        }
        Work::Fault(code) => {
            op.work = Work::Fault(code);
            system.complete(stream);
            system.fail(context, code);
            return system;
        }
        Work::Free(address) => {
            op.work = Work::Free(address);
            let freed = system.memory.remove(&address);
            system.complete(stream);
            drop(system);
            drop(freed);
            return lock();
        }
        Work::Attach { address, kind, stream: to } => {
            op.work = Work::Attach { address, kind, stream: to };
            if let Some(allocation) = system.memory.get_mut(&address) {
                allocation.attached = (kind, to);
            }
        }
        Work::Host { .. } => unreachable!("handed to the callback thread above"),
        work @ (Work::Copy { .. } | Work::Fill { .. } | Work::Write { .. }) => {
            drop(system);
            // SAFETY: the addresses were checked at the call against the allocations that exist, which live until the
            // streams that may use them have passed (`cuMemFree` waits); plain host memory is the caller's promise.
            unsafe { execute(&work) };
            system = lock();
            if let Some(op) = system.streams.get_mut(&stream).and_then(|state| state.queue.front_mut()) {
                op.work = work;
            }
        }
    }
    system.complete(stream);
    system
}

/// # Safety
/// The addresses are valid for the bytes that the work reads and writes.
unsafe fn execute(work: &Work) {
    match work {
        Work::Copy { dst, src, bytes } => {
            let from = match src {
                Source::Memory(address) => *address as *const u8,
                Source::Staged(bytes) => bytes.as_ptr(),
            };
            // SAFETY: the caller's promise. Ranges may overlap.
            unsafe { std::ptr::copy(from, *dst as *mut u8, *bytes) };
        }
        Work::Fill { dst, value, width, count } => {
            let pattern = value.to_le_bytes();
            // SAFETY: the caller's promise; the pattern has at most four bytes.
            unsafe {
                if *width == 1 {
                    std::ptr::write_bytes(*dst as *mut u8, pattern[0], *count);
                } else {
                    for index in 0..*count {
                        let to = (*dst as *mut u8).add(index * width);
                        std::ptr::copy_nonoverlapping(pattern.as_ptr(), to, *width);
                    }
                }
            }
        }
        Work::Write { address, wide, value } => write(*address, *wide, *value),
        _ => {}
    }
}

fn write(address: u64, wide: bool, value: u64) {
    // SAFETY: the address was checked for alignment and validity at the call; the host may read it at the same time, so
    // the write is atomic.
    unsafe {
        if wide {
            AtomicU64::from_ptr(address as *mut u64).store(value, Ordering::Release);
        } else {
            let narrow = std::sync::atomic::AtomicU32::from_ptr(address as *mut u32);
            narrow.store((value & u64::from(u32::MAX)) as u32, Ordering::Release);
        }
    }
}

impl Condition {
    fn holds(&self) -> bool {
        // SAFETY: as in `write`.
        unsafe {
            if self.wide {
                let now = AtomicU64::from_ptr(self.address as *mut u64).load(Ordering::Acquire);
                self.compare(now, now.wrapping_sub(self.value).cast_signed() >= 0, u64::MAX)
            } else {
                let now = std::sync::atomic::AtomicU32::from_ptr(self.address as *mut u32).load(Ordering::Acquire);
                let value = (self.value & u64::from(u32::MAX)) as u32;
                self.compare(u64::from(now), now.wrapping_sub(value).cast_signed() >= 0, u64::from(u32::MAX))
            }
        }
    }

    fn compare(&self, now: u64, at_least: bool, mask: u64) -> bool {
        let value = self.value & mask;
        match self.kind {
            0 => at_least,
            1 => now == value,
            2 => now & value != 0,
            _ => !(now | value) & mask != 0,
        }
    }
}

thread_local! {
    static IN_CALLBACK: std::cell::Cell<bool> = const { std::cell::Cell::new(false) };
}

/// This thread runs code of the host's for the device from now on.
pub(crate) fn enter_callback() {
    IN_CALLBACK.set(true);
}

/// Whether this thread runs a callback, so that most calls answer 800.
pub(crate) fn in_callback() -> bool {
    IN_CALLBACK.get()
}

/// A context's callback thread.
fn call_back(handle: usize) {
    enter_callback();
    let mut system = lock();
    loop {
        let Some(context) = system.contexts.get_mut(&handle) else { return };
        let Some(stream) = context.calls.pop_front() else {
            context.running_call = false;
            system = CALLS.wait(system).unwrap_or_else(PoisonError::into_inner);
            continue;
        };
        context.running_call = true;
        let status = context.fault.unwrap_or(0);
        let head = system.streams.get(&stream).and_then(|state| state.queue.front()).map(|op| &op.work);
        let Some(&Work::Host { call, handle: seen, data }) = head else { continue };
        drop(system);
        // SAFETY: the enqueuer gave the function with its data, for one call.
        unsafe {
            match call {
                HostCall::Function(function) if status == 0 => function(data as *mut c_void),
                HostCall::Function(_) => {}
                HostCall::Callback(function) => function(seen as CUstream, status, data as *mut c_void),
            }
        }
        system = lock();
        // A host call behind a host call stays with this thread.
        system.finish_head(stream);
        system.start_or_list(stream);
    }
}
