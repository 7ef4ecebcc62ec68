//! A lock for each stream, which is read while work is given to the stream, and written while the stream enters or leaves a
//! capture: so work is either queued or captured for sure, and what it uses is kept accordingly.
//!
//! It belongs to the stream's id, not to a handle. An enqueue may block in the driver, and then holds up the captures of
//! its own stream only. Who needs several takes them in the order of their streams' ids.
//!
//! Here is also what else all handles of a stream have in common: its signal.

use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard, TryLockError, Weak};

use rustc_hash::{FxBuildHasher, FxHashMap};

use crate::driver::Kind;

/// The lock of a stream.
pub(crate) struct Gate {
    strand: u64,
    lock: RwLock<()>,
    /// [`BY_DRIVER`] or [`BY_MEMORY`], as the handle that owns the stream has it; 0 for a stream of another library.
    signal: AtomicU8,
}

const BY_DRIVER: u8 = 1;
const BY_MEMORY: u8 = 2;

impl Gate {
    /// The lock of the stream with the id `strand`.
    pub(crate) fn of(strand: u64) -> Arc<Gate> {
        static GATES: Mutex<FxHashMap<u64, Weak<Gate>>> = Mutex::new(FxHashMap::with_hasher(FxBuildHasher));
        let mut gates = GATES.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(gate) = gates.get(&strand).and_then(Weak::upgrade) {
            return gate;
        }
        if gates.len() >= 64 && gates.len().is_power_of_two() {
            gates.retain(|_, gate| gate.strong_count() > 0);
        }
        let gate = Arc::new(Gate { strand, lock: RwLock::new(()), signal: AtomicU8::new(0) });
        gates.insert(strand, Arc::downgrade(&gate));
        gate
    }

    pub(crate) fn strand(&self) -> u64 {
        self.strand
    }

    /// Whether the handle that owns the stream has the memory signal, if there is one.
    pub(crate) fn owner_by_memory(&self) -> Option<bool> {
        let signal = self.signal.load(Ordering::Acquire);
        (signal != 0).then_some(signal == BY_MEMORY)
    }

    /// Before anybody else knows the stream. With a driver that has no ids, the handle may have been another stream's.
    pub(crate) fn set_owner_by_memory(&self, by_memory: bool) {
        self.signal.store(if by_memory { BY_MEMORY } else { BY_DRIVER }, Ordering::Release);
    }

    /// No capture begins or ends for the stream while this is held.
    pub(crate) fn read(&self) -> RwLockReadGuard<'_, ()> {
        self.lock.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// As [`Gate::read`], unless somebody waits to write.
    pub(crate) fn try_read(&self) -> Option<RwLockReadGuard<'_, ()>> {
        match self.lock.try_read() {
            Ok(guard) => Some(guard),
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    /// The stream may enter a capture while this is held.
    pub(crate) fn write(&self) -> RwLockWriteGuard<'_, ()> {
        self.lock.write().unwrap_or_else(PoisonError::into_inner)
    }

    fn try_write(&self) -> Option<RwLockWriteGuard<'_, ()>> {
        match self.lock.try_write() {
            Ok(guard) => Some(guard),
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }
}

/// A capture that is going on: a driver, and the capture's number there.
pub(crate) type Key = (Kind, u64);

/// The streams that have joined captures.
static MEMBERS: Mutex<Vec<(Key, Arc<Gate>)>> = Mutex::new(Vec::new());

fn members() -> MutexGuard<'static, Vec<(Key, Arc<Gate>)>> {
    MEMBERS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A stream has joined a capture. Its lock is written.
pub(crate) fn joined(key: Key, gate: &Arc<Gate>) {
    let mut members = members();
    if !members.iter().any(|(of, known)| *of == key && known.strand == gate.strand) {
        members.push((key, Arc::clone(gate)));
    }
}

/// A stream is not in the capture after all.
pub(crate) fn not_joined(key: Key, gate: &Arc<Gate>) {
    members().retain(|(of, known)| *of != key || known.strand != gate.strand);
}

/// The locks of all streams of a capture, in order.
fn gates_of(key: Key, origin: &Arc<Gate>) -> Vec<Arc<Gate>> {
    let mut gates = vec![Arc::clone(origin)];
    gates.extend(members().iter().filter(|(of, _)| *of == key).map(|(_, gate)| Arc::clone(gate)));
    gates.sort_by_key(|gate| gate.strand);
    gates.dedup_by_key(|gate| gate.strand);
    gates
}

/// Ends the capture `key` by `end`, which says whether it is over, while no stream of it is given work. With `patient` false
/// it answers `None` when one is.
pub(crate) fn leave<R>(key: Key, origin: &Arc<Gate>, patient: bool, end: impl FnOnce() -> (R, bool)) -> Option<R> {
    loop {
        let gates = gates_of(key, origin);
        let mut guards = Vec::with_capacity(gates.len());
        for gate in &gates {
            guards.push(if patient { gate.write() } else { gate.try_write()? });
        }
        // Another may have joined before all were held.
        if gates_of(key, origin).len() == gates.len() {
            let (result, over) = end();
            if over {
                members().retain(|(of, _)| *of != key);
            }
            return Some(result);
        }
    }
}
