//! Lanes: the memory signal. A stream writes a number into pinned memory where host code is due, and, if it has to wait for
//! it, waits on a second word until that has been acknowledged. The threads that watch are the [`crate::poller`]'s.
//!
//! A lane belongs to a stream's id, not to its handle. Its words are never freed, and numbers only grow, so that a word
//! may serve another stream later: what an old wait asks for is true for good.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Instant;

use cudarc::driver::sys::{CUstreamBatchMemOpParams, CUstreamWaitValue_flags};
use rustc_hash::{FxBuildHasher, FxHashMap};

use crate::api::{Api, callback_scope};
use crate::capture::{self, CaptureStatus};
use crate::completion::shield;
use crate::device::Device;
use crate::driver::is_forked_child;
use crate::error::{Error, Result, Status};
use crate::executor;
use crate::gate::Gate;
use crate::memory::Buffer;
use crate::poller;
use crate::reaper::Relaxed;
use crate::stream::{RawStream, query};

/// How many streams of a device wait on memory at the same time, at most. Beyond that the driver's callback is used: every
/// stream that waits takes one of the hardware's channels, and when all are taken other streams stall (measured).
fn most_waiting() -> usize {
    static MOST: std::sync::OnceLock<usize> = std::sync::OnceLock::new();
    *MOST.get_or_init(|| {
        let connections = std::env::var("CUDA_DEVICE_MAX_CONNECTIONS").ok().and_then(|text| text.parse().ok());
        connections.unwrap_or(8_usize).clamp(1, 32).saturating_sub(2).max(1)
    })
}

/// How many pieces of host code a lane queues. Beyond that the driver's callback is used: its queue has room for hundreds of
/// thousands, while operations on memory are device work, and who queues more than 1,020 pieces of that on one stream
/// blocks (measured). With a kernel before each, 510 fit in.
const DEEPEST: usize = 500;

/// Host code that runs once, as a lane carries it.
pub(crate) trait Once: Send {
    fn reached(self: Box<Self>, status: Status);
}

/// Host code that may be queued many times.
pub(crate) trait Again: Send + Sync {
    fn reached(&self, status: Status);
}

pub(crate) enum Code {
    Once(Box<dyn Once>),
    Again(Arc<dyn Again>),
}

/// What a lane runs when it is due.
pub(crate) struct Due {
    pub(crate) code: Code,
    /// The stream waits for it.
    pub(crate) ordered: bool,
    /// It enters the interpreter, so that several of them are run under one entry.
    pub(crate) python: bool,
}

struct Item {
    number: u64,
    due: Due,
}

/// Two words in pinned memory, on cache lines of their own.
struct Words {
    /// Keeps the memory.
    slab: Buffer,
    offset: u64,
    /// The last number that was given out.
    last: u64,
}

impl Words {
    const LINE: u64 = 128;
    const EACH: u64 = 2 * Words::LINE;
    const SLAB: usize = 64 * 1024;

    fn flag_address(&self) -> u64 {
        self.slab.ptr() + self.offset
    }

    fn ack_address(&self) -> u64 {
        self.flag_address() + Words::LINE
    }

    fn word(&self, address: u64) -> &AtomicU64 {
        // SAFETY: the slab is pinned memory that lives as long as `self`; the address is one of the two above, inside of
        // it and aligned. Host and device only use it by whole words.
        unsafe { AtomicU64::from_ptr(address as *mut u64) }
    }

    fn flag(&self) -> &AtomicU64 {
        self.word(self.flag_address())
    }

    fn ack(&self) -> &AtomicU64 {
        self.word(self.ack_address())
    }
}

/// Words that no lane uses, by device.
static FREE: Mutex<Vec<(Device, Words)>> = Mutex::new(Vec::new());

fn free_words() -> MutexGuard<'static, Vec<(Device, Words)>> {
    FREE.lock().unwrap_or_else(PoisonError::into_inner)
}

fn take_words(api: &Api<'_>, device: Device) -> Result<Words> {
    let find = |free: &mut Vec<(Device, Words)>| {
        let index = free.iter().position(|(of, _)| *of == device)?;
        Some(free.swap_remove(index).1)
    };
    if let Some(words) = find(&mut free_words()) {
        return Ok(words);
    }
    let slab = Buffer::pinned(api, device, Words::SLAB)?;
    let mut free = free_words();
    for index in 0..Words::SLAB as u64 / Words::EACH {
        let words = Words { slab: slab.clone(), offset: index * Words::EACH, last: 0 };
        words.flag().store(0, Ordering::Relaxed);
        words.ack().store(0, Ordering::Relaxed);
        free.push((device, words));
    }
    Ok(find(&mut free).expect("just added"))
}

/// How many lanes of a device have a stream that may be waiting.
static WAITING: Mutex<Vec<(Device, Arc<AtomicUsize>)>> = Mutex::new(Vec::new());

fn waiting(device: Device) -> Arc<AtomicUsize> {
    let mut all = WAITING.lock().unwrap_or_else(PoisonError::into_inner);
    match all.iter().find(|(of, _)| *of == device) {
        Some((_, count)) => Arc::clone(count),
        None => {
            let count = Arc::new(AtomicUsize::new(0));
            all.push((device, Arc::clone(&count)));
            count
        }
    }
}

#[derive(Default)]
struct Queue {
    items: VecDeque<Item>,
    /// How many of them the stream waits for.
    ordered: usize,
    /// The poller has the lane.
    watched: bool,
    /// The stream, while something is queued: to be asked how it is.
    stream: Option<Arc<RawStream>>,
}

/// The lane of a stream.
pub(crate) struct Lane {
    device: Device,
    words: Words,
    /// The number that was given out last. Held while work is given to the stream, which may block.
    last: Mutex<u64>,
    /// Held for moments.
    queue: Mutex<Queue>,
    /// The number of the first item in the queue, or none that comes.
    front: AtomicU64,
    /// Held by whoever runs what is due, so that it runs in order.
    turn: Mutex<()>,
    asked: Mutex<Instant>,
    /// Held by whoever asks, which may take as long as the queue of the stream is full.
    asking: Mutex<()>,
    gate: Arc<Gate>,
    /// The thread that has the turn is in the interpreter.
    in_python: AtomicBool,
    waiting: Arc<AtomicUsize>,
}

static LANES: Mutex<FxHashMap<u64, Weak<Lane>>> = Mutex::new(FxHashMap::with_hasher(FxBuildHasher));

impl Drop for Lane {
    fn drop(&mut self) {
        // In a forked child the memory and the locks are the parent's.
        if is_forked_child() {
            return;
        }
        let last = *self.last.get_mut().unwrap_or_else(PoisonError::into_inner);
        // After a fault numbers were given out that never come: such words are not used again.
        if self.words.flag().load(Ordering::Acquire) == last {
            let Words { slab, offset, .. } = &self.words;
            free_words().push((self.device, Words { slab: slab.clone(), offset: *offset, last }));
        } else {
            std::mem::forget(self.words.slab.clone());
        }
    }
}

/// The interpreter goes, and threads that are in it do not come back: their streams wait no more.
#[cfg(feature = "python")]
pub(crate) fn let_go_of_python() {
    let lanes = LANES.lock().unwrap_or_else(PoisonError::into_inner);
    for lane in lanes.values().filter_map(Weak::upgrade) {
        if lane.in_python.load(Ordering::Acquire) {
            lane.words.ack().store(i64::MAX.cast_unsigned(), Ordering::Release);
        }
    }
}

impl Lane {
    /// The lane of the stream with the id `strand`.
    pub(crate) fn of(api: &Api<'_>, device: Device, strand: u64) -> Result<Arc<Lane>> {
        let known = |lanes: &FxHashMap<u64, Weak<Lane>>| lanes.get(&strand).and_then(Weak::upgrade);
        let lanes = || LANES.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(lane) = known(&lanes()) {
            return Ok(lane);
        }
        let words = take_words(api, device)?;
        let last = words.last;
        let lane = Arc::new(Lane {
            device,
            words,
            last: Mutex::new(last),
            queue: Mutex::default(),
            front: AtomicU64::new(u64::MAX),
            turn: Mutex::new(()),
            asked: Mutex::new(Instant::now()),
            asking: Mutex::new(()),
            gate: Gate::of(strand),
            in_python: AtomicBool::new(false),
            waiting: waiting(device),
        });
        let mut lanes = lanes();
        if let Some(other) = known(&lanes) {
            return Ok(other);
        }
        if lanes.len() >= 64 && lanes.len().is_power_of_two() {
            lanes.retain(|_, lane| lane.strong_count() > 0);
        }
        lanes.insert(strand, Arc::downgrade(&lane));
        Ok(lane)
    }

    fn queue(&self) -> MutexGuard<'_, Queue> {
        // Nothing foreign runs under the lock, so a poisoned one still guards a sound state.
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// After each change of the queue, under its lock.
    fn front_changed(&self, queue: &Queue) {
        self.front.store(queue.items.front().map_or(u64::MAX, |item| item.number), Ordering::Release);
    }

    /// Queues `due` at the end of the stream (`cuStreamBatchMemOp`). Gives it back when the driver refuses, and, with no
    /// error, when too many streams wait on memory already or too much is queued.
    ///
    /// The context of the device is current, and the stream alive and not capturing.
    pub(crate) fn enqueue(
        self: &Arc<Self>,
        stream: &Arc<RawStream>,
        due: Due,
    ) -> std::result::Result<(), (Option<Error>, Due)> {
        if !poller::is_started() {
            return Err((None, due));
        }
        let ordered = due.ordered;
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        let number = *last + 1;
        let watched = {
            let mut queue = self.queue();
            if queue.items.len() >= DEEPEST {
                return Err((None, due));
            }
            if ordered && queue.ordered == 0 {
                let took = self.waiting.fetch_update(Ordering::AcqRel, Ordering::Relaxed, |count| {
                    (count < most_waiting()).then_some(count + 1)
                });
                if took.is_err() {
                    return Err((None, due));
                }
            }
            queue.ordered += usize::from(ordered);
            queue.items.push_back(Item { number, due });
            self.front_changed(&queue);
            if queue.stream.is_none() {
                queue.stream = Some(Arc::clone(stream));
            }
            std::mem::replace(&mut queue.watched, true)
        };
        if !watched {
            // Before the signal, so that a thread that has to wake up does so meanwhile.
            *self.asked.lock().unwrap_or_else(PoisonError::into_inner) = Instant::now();
            poller::watch(Arc::clone(self));
        }
        // Given out for good: the driver may answer with the error of earlier work though it has taken this.
        *last = number;
        let Err(error) = self.signal(stream, number, ordered) else { return Ok(()) };
        let mut queue = self.queue();
        if queue.items.back().is_none_or(|item| item.number != number) {
            // It was told of a fault meanwhile, with all that was queued: it has had its end.
            return Ok(());
        }
        let item = queue.items.pop_back().expect("just seen");
        self.front_changed(&queue);
        if ordered {
            self.no_longer_ordered(&mut queue);
        }
        // The one that was pushed above, since `last` is locked.
        Err((Some(error), item.due))
    }

    /// The stream does not wait for one item any more.
    fn no_longer_ordered(&self, queue: &mut Queue) {
        queue.ordered -= 1;
        if queue.ordered == 0 {
            self.waiting.fetch_sub(1, Ordering::AcqRel);
        }
    }

    /// Has the stream write the number and, if it is to wait, wait for its acknowledgement.
    fn signal(&self, stream: &RawStream, number: u64, wait: bool) -> Result<()> {
        const WAIT_VALUE_64: u32 = 4;
        const WRITE_VALUE_64: u32 = 5;
        const GEQ: u32 = CUstreamWaitValue_flags::CU_STREAM_WAIT_VALUE_GEQ as u32;
        let operation = |kind: u32, address: u64, flags: u32| {
            let mut params = std::mem::MaybeUninit::<CUstreamBatchMemOpParams>::zeroed();
            // SAFETY: both operations have the layout of `CUstreamMemOpWaitValueParams`: the kind at 0, the address at 8,
            // the value at 16, the flags at 24, all inside the union, whose other bytes stay zero.
            unsafe {
                let to = params.as_mut_ptr().cast::<u8>();
                to.cast::<u32>().write(kind);
                to.add(8).cast::<u64>().write(address);
                to.add(16).cast::<u64>().write(number);
                to.add(24).cast::<u32>().write(flags);
            }
            params
        };
        let mut operations = [
            operation(WRITE_VALUE_64, self.words.flag_address(), 0),
            operation(WAIT_VALUE_64, self.words.ack_address(), GEQ),
        ];
        let count = if wait { 2 } else { 1 };
        // SAFETY: the stream is alive; `count` operations are initialized as their kinds say; the words are never freed.
        unsafe { self.device.driver().cuStreamBatchMemOp_v2(stream.handle(), count, operations.as_mut_ptr().cast(), 0) }
    }

    /// Whether nothing is queued, and nothing runs.
    pub(crate) fn is_quiet(&self) -> bool {
        // In this order: what has left the queue runs under the turn.
        self.front.load(Ordering::Acquire) == u64::MAX && self.turn.try_lock().is_ok()
    }

    /// Whether something is due.
    pub(crate) fn is_due(&self) -> bool {
        self.words.flag().load(Ordering::Acquire) >= self.front.load(Ordering::Acquire)
    }

    /// Runs what is due, in order, unless somebody does. True: something ran.
    pub(crate) fn run_due(&self) -> bool {
        let Ok(_turn) = self.turn.try_lock() else { return false };
        self.run_in_turn()
    }

    /// As [`Lane::run_due`], after whoever does it: for a callback of the driver's that comes behind what is due.
    /// With a bad status what was queued before, up to a number, is not reached any more.
    pub(crate) fn run_due_before(&self, status: Status, up_to: u64) {
        let _turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        self.run_in_turn();
        if !status.ok() {
            self.fail_in_turn(status, up_to);
        }
    }

    /// The number that was given out last.
    pub(crate) fn last_number(&self) -> u64 {
        *self.last.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn run_in_turn(&self) -> bool {
        let mut ran = false;
        while let Some(item) = self.take_due(|_| true) {
            ran = true;
            if item.due.python {
                let mut next = Some(item);
                self.in_python.store(true, Ordering::Release);
                executor::batch(&mut || {
                    while let Some(item) = next.take() {
                        self.run(item, Status::SUCCESS);
                        next = self.take_due(|item| item.due.python);
                    }
                });
                self.in_python.store(false, Ordering::Release);
            } else {
                self.run(item, Status::SUCCESS);
            }
        }
        ran
    }

    fn take_due(&self, fits: impl FnOnce(&Item) -> bool) -> Option<Item> {
        let flag = self.words.flag().load(Ordering::Acquire);
        self.take(|item| item.number <= flag && fits(item))
    }

    /// Takes the first item off the queue, if it fits.
    fn take(&self, fits: impl FnOnce(&Item) -> bool) -> Option<Item> {
        let mut queue = self.queue();
        queue.items.front().filter(|item| fits(item))?;
        let item = queue.items.pop_front();
        self.front_changed(&queue);
        item
    }

    /// Runs one item, which is off the queue, and lets the stream go on.
    fn run(&self, item: Item, status: Status) {
        let Item { number, due: Due { code, ordered, .. } } = item;
        shield(|| {
            callback_scope(|| match code {
                Code::Once(code) => code.reached(status),
                Code::Again(code) => code.reached(status),
            });
        });
        if ordered {
            self.words.ack().fetch_max(number, Ordering::Release);
            self.no_longer_ordered(&mut self.queue());
        }
    }

    /// Whether nothing is queued; the poller gives it up then.
    pub(crate) fn is_over(&self) -> bool {
        if self.front.load(Ordering::Acquire) != u64::MAX {
            return false;
        }
        let mut queue = self.queue();
        if !queue.items.is_empty() {
            return false;
        }
        queue.watched = false;
        let stream = queue.stream.take();
        drop(queue);
        drop(stream);
        true
    }

    /// Whether it is time to ask the stream how it is.
    pub(crate) fn is_to_be_asked(&self, now: Instant) -> bool {
        const EACH: std::time::Duration = std::time::Duration::from_millis(20);
        let mut asked = self.asked.lock().unwrap_or_else(PoisonError::into_inner);
        let due = now.saturating_duration_since(*asked) >= EACH;
        if due {
            *asked = now;
        }
        due
    }

    /// Asks the stream how it is: after a fault no number comes, and what is queued is told. May block in the driver.
    pub(crate) fn look_after(&self) {
        // One thread that is kept here is enough.
        let Ok(_asking) = self.asking.try_lock() else { return };
        // Somebody may be about to begin a capture, which the query would break.
        let Some(_gate) = self.gate.try_read() else { return };
        let Some(stream) = self.queue().stream.clone() else { return };
        let driver = self.device.driver();
        let _relaxed = Relaxed::enter(driver);
        // SAFETY: the stream is alive as long as `stream`. Without its context nothing can be asked, which is an answer.
        let health = self.device.make_current().and_then(|()| unsafe { capture::status(driver, stream.handle()) });
        let health = match health {
            // A query would break the capture that another library has begun meanwhile.
            Ok(status) if status != CaptureStatus::None => return,
            Ok(_) => query(&stream).map(drop),
            Err(error) => Err(error),
        };
        if let Err(error) = health
            && error.status().ends_all_work()
            && let Ok(_turn) = self.turn.try_lock()
        {
            self.run_in_turn();
            self.fail_in_turn(error.status(), u64::MAX);
        }
    }

    /// Tells what is queued up to a number that it is not reached.
    fn fail_in_turn(&self, status: Status, up_to: u64) {
        while let Some(item) = self.take(|item| item.number <= up_to) {
            self.run(item, status);
        }
    }
}
