//! One background thread that releases what may not be released where it is dropped.
//!
//! Destroying a stream or an event is a driver call: it is refused inside a callback, it can block, and somebody may be
//! capturing. So handles hand their release to this thread, whose capture mode is RELAXED, in which none of these calls
//! disturbs a capture. Memory is not released here but cached (see [`crate::memory`]): freeing it waits for every stream.
//!
//! The same thread keeps alive what queued work uses: an event is recorded behind the work, and the payload is dropped
//! when that has been reached.

use std::any::Any;
use std::collections::VecDeque;
use std::ptr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, Once, PoisonError};
use std::thread;
use std::time::Duration;

use rustc_hash::FxHashMap;

use crate::api::Api;
use crate::capture::{CaptureMode, exchange_mode};
use crate::completion::shield;
use crate::device::Device;
use crate::driver::{Driver, is_forked_child};
use crate::event::{Outlook, RawEvent};

/// The shortest and longest pause between two looks at the events of queued work.
const PAUSES: (Duration, Duration) = (Duration::from_micros(100), Duration::from_millis(2));

/// Whether it is released, or has to be tried again.
type Release = Box<dyn FnMut() -> bool + Send>;

/// Something that work queued on a stream uses.
struct Kept {
    event: RawEvent,
    payload: Box<dyn Any + Send>,
}

struct Inbox {
    releases: Vec<(Device, Release)>,
    kept: Vec<(u64, Kept)>,
    parked: bool,
}

static INBOX: Mutex<Inbox> = Mutex::new(Inbox { releases: Vec::new(), kept: Vec::new(), parked: false });
static CHANGED: Condvar = Condvar::new();

fn lock() -> MutexGuard<'static, Inbox> {
    // Nothing foreign runs under the lock, so a poisoned one still guards a sound state.
    INBOX.lock().unwrap_or_else(PoisonError::into_inner)
}

fn post(add: impl FnOnce(&mut Inbox)) {
    static START: Once = Once::new();
    if is_forked_child() {
        // What the handle names is the parent's, which will release it.
        return;
    }
    let mut inbox = lock();
    add(&mut inbox);
    if std::mem::take(&mut inbox.parked) {
        CHANGED.notify_one();
    }
    drop(inbox);
    START.call_once(|| {
        // Without the thread nothing would be freed; what is kept stays valid, so this is a leak, not a fault.
        drop(thread::Builder::new().name("rstream-reaper".into()).spawn(run));
    });
}

/// Runs `release` on the background thread with the context of `device` current. Called from any thread, also inside a
/// callback.
pub(crate) fn release(device: Device, release: impl FnOnce() + Send + 'static) {
    let mut release = Some(release);
    release_when(device, move || {
        release.take().into_iter().for_each(|release| release());
        true
    });
}

/// As [`release`], for what may not be possible at the moment: tried again while `release` answers false.
pub(crate) fn release_when(device: Device, release: impl FnMut() -> bool + Send + 'static) {
    post(|inbox| inbox.releases.push((device, Box::new(release))));
}

/// As [`release_when`], but here and now if this thread may call the driver without being blocked, and `release` says that
/// it is done.
pub(crate) fn release_here(device: Device, mut release: impl FnMut() -> bool + Send + 'static) {
    let done = Api::attach(|_| {
        let _relaxed = Relaxed::enter(device.driver());
        MayBlock::nobody_is() && device.with_context(&mut release)
    });
    if !done.unwrap_or(false) {
        release_when(device, release);
    }
}

/// Somebody makes a call that may block, and other threads' calls on the device with it (measured): work for a full queue, a
/// stream or a graph for which there is no room, memory that is freed.
pub(crate) struct MayBlock(());

static MAY_BLOCK: AtomicUsize = AtomicUsize::new(0);

impl MayBlock {
    pub(crate) fn enter() -> MayBlock {
        MAY_BLOCK.fetch_add(1, Ordering::Relaxed);
        MayBlock(())
    }

    fn nobody_is() -> bool {
        MAY_BLOCK.load(Ordering::Relaxed) == 0
    }
}

impl Drop for MayBlock {
    fn drop(&mut self) {
        MAY_BLOCK.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Keeps `payload` until `event`, recorded on the stream with the id `stream`, is reached.
pub(crate) fn keep(stream: u64, event: RawEvent, payload: Box<dyn Any + Send>) {
    post(|inbox| inbox.kept.push((stream, Kept { event, payload })));
}

fn run() {
    // This thread is RELAXED for good, for each driver that it meets: asking an event from another mode would
    // invalidate somebody's GLOBAL capture (measured), as would the releases.
    let mut relaxed: Vec<Relaxed> = Vec::new();
    let mut relax = |device: Device| {
        if !relaxed.iter().any(|guard| ptr::eq(guard.driver, device.driver())) {
            relaxed.push(Relaxed::enter(device.driver()));
        }
    };
    // Per stream, since a stream's events are reached in order: one look at the front answers for all behind it.
    let mut kept: FxHashMap<u64, VecDeque<Kept>> = FxHashMap::default();
    let mut later: Vec<(Device, Release)> = Vec::new();
    let mut pause = PAUSES.0;
    loop {
        let (releases, arrived) = {
            let mut inbox = lock();
            while inbox.releases.is_empty() && inbox.kept.is_empty() {
                if kept.is_empty() && later.is_empty() {
                    inbox.parked = true;
                    inbox = CHANGED.wait(inbox).unwrap_or_else(PoisonError::into_inner);
                } else {
                    inbox = CHANGED.wait_timeout(inbox, pause).unwrap_or_else(PoisonError::into_inner).0;
                    break;
                }
            }
            inbox.parked = false;
            (std::mem::take(&mut inbox.releases), std::mem::take(&mut inbox.kept))
        };
        for (stream, item) in arrived {
            relax(item.event.device());
            kept.entry(stream).or_default().push_back(item);
        }
        let mut progress = false;
        kept.retain(|_, queue| {
            while let Some(outlook) = queue.front().map(|front| front.event.outlook()) {
                if outlook == Outlook::Pending {
                    break;
                }
                progress = true;
                let Kept { event, payload } = queue.pop_front().expect("just seen");
                if outlook == Outlook::Lost {
                    // Leaked, so that it is valid in any case.
                    std::mem::forget(payload);
                    continue;
                }
                shield(|| drop(payload));
                event.device().give_event_back(event);
            }
            !queue.is_empty()
        });
        pause = if progress { PAUSES.0 } else { (pause * 2).min(PAUSES.1) };
        for (device, mut release) in std::mem::take(&mut later).into_iter().chain(releases) {
            relax(device);
            // This thread has no other user, so the context need not be restored. If it cannot be made current it is
            // gone, and what it owned with it; the release then fails without harm.
            drop(device.make_current());
            let mut done = true;
            shield(|| done = release());
            if !done {
                later.push((device, release));
            }
        }
    }
}

/// While it lives, this thread's calls do not count as unsafe for anybody's capture
/// (`cuThreadExchangeStreamCaptureMode`).
pub(crate) struct Relaxed {
    driver: &'static Driver,
    /// The mode before; `None`: the driver could not exchange it, so there is nothing to restore.
    before: Option<u32>,
}

impl Relaxed {
    pub(crate) fn enter(driver: &'static Driver) -> Relaxed {
        Relaxed { driver, before: exchange_mode(driver, CaptureMode::Relaxed.code()).ok() }
    }
}

impl Drop for Relaxed {
    fn drop(&mut self) {
        if let Some(before) = self.before {
            drop(exchange_mode(self.driver, before));
        }
    }
}
