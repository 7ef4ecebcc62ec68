//! The threads that watch lanes, and events that somebody waits for, and how they wait.
//!
//! One thread polls. It runs what is due itself; while it is in foreign code a stand-by thread looks at the clock, and takes
//! the polling over when that has lasted for half a millisecond, so that one stream's slow callback does not hold up
//! another's. With nothing queued all of them sleep, at no cost.
//!
//! | policy | the polling thread | latency | cost while something is queued |
//! | --- | --- | --- | --- |
//! | [`WaitPolicy::Adaptive`] | spins for 50 µs, then sleeps for an eighth of the time waited, at most 2 ms | lowest for quick work, at most an eighth of the wait | a core for 50 µs, then less and less |
//! | [`WaitPolicy::Spin`] | spins | lowest | a core |
//! | [`WaitPolicy::Sleep`] | sleeps from the start | 50 µs to 2 ms | little |

use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, LazyLock, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use crate::callback;
use crate::event::RawEvent;
use crate::executor;
use crate::lane::Lane;

/// How the polling thread waits while host code is queued.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub enum WaitPolicy {
    /// Spins for a moment, then sleeps in growing steps.
    #[default]
    Adaptive = 0,
    /// Spins.
    Spin = 1,
    /// Sleeps from the start.
    Sleep = 2,
}

static POLICY: AtomicU8 = AtomicU8::new(WaitPolicy::Adaptive as u8);

/// Sets how the polling thread waits, for the whole process.
pub fn set_wait_policy(policy: WaitPolicy) {
    POLICY.store(policy as u8, Ordering::Relaxed);
}

/// How the polling thread waits.
#[must_use]
pub fn wait_policy() -> WaitPolicy {
    match POLICY.load(Ordering::Relaxed) {
        1 => WaitPolicy::Spin,
        2 => WaitPolicy::Sleep,
        _ => WaitPolicy::Adaptive,
    }
}

/// How long foreign code may keep the polling thread.
const PATIENCE: Duration = Duration::from_micros(500);
pub(crate) const SPIN: Duration = Duration::from_micros(50);
const SHORTEST: Duration = Duration::from_micros(20);
const LONGEST: Duration = Duration::from_millis(2);
/// For so long after the last work the stand-by looks at the clock on its own.
const HOT: Duration = Duration::from_millis(5);
/// Callbacks that block keep a thread each; beyond these nobody takes over.
const MOST_THREADS: usize = 64;

/// So many events are asked before the polling thread looks at the lanes again, about half a microsecond each.
const ASKED_AT_ONCE: usize = 16;

/// What the polling thread looks at.
struct Sights {
    lanes: Vec<Arc<Lane>>,
    events: Vec<Arc<RawEvent>>,
}

impl Sights {
    const fn new() -> Sights {
        Sights { lanes: Vec::new(), events: Vec::new() }
    }

    fn is_empty(&self) -> bool {
        self.lanes.is_empty() && self.events.is_empty()
    }

    fn append(&mut self, other: &mut Sights) {
        self.lanes.append(&mut other.lanes);
        self.events.append(&mut other.events);
    }

    fn copy_from(&mut self, other: &Sights) {
        self.lanes.clone_from(&other.lanes);
        self.events.clone_from(&other.events);
    }
}

struct Watched {
    /// New ones for the polling thread.
    arrived: Sights,
    /// What a thread that was taken over from had.
    sights: Sights,
    /// The polling thread sleeps until something arrives.
    parked: bool,
    threads: usize,
    standing_by: usize,
}

static WATCHED: Mutex<Watched> =
    Mutex::new(Watched { arrived: Sights::new(), sights: Sights::new(), parked: false, threads: 0, standing_by: 0 });
static ARRIVED: Condvar = Condvar::new();
static STAND_BY: Condvar = Condvar::new();
/// Who polls: the thread that has this number.
static TURN: AtomicU64 = AtomicU64::new(0);
/// Since when the polling thread is where it may be kept, in nanoseconds; 0: it is not. Whoever changes it from that to 0 has
/// the turn: the thread itself when it comes back, or a stand-by that takes over.
static BUSY: AtomicU64 = AtomicU64::new(0);
/// Something has arrived.
static NEWS: AtomicBool = AtomicBool::new(false);
/// The stand-by looks at the clock on its own.
static HOT_NOW: AtomicBool = AtomicBool::new(false);

fn lock() -> MutexGuard<'static, Watched> {
    // Nothing foreign runs under the lock, so a poisoned one still guards a sound state.
    WATCHED.lock().unwrap_or_else(PoisonError::into_inner)
}

fn nanoseconds(now: Instant) -> u64 {
    static START: LazyLock<Instant> = LazyLock::new(Instant::now);
    u64::try_from(now.saturating_duration_since(*START).as_nanos()).unwrap_or(u64::MAX).max(1)
}

/// Whether there is a thread that polls, or one can be started now.
pub(crate) fn is_started() -> bool {
    static STARTED: AtomicBool = AtomicBool::new(false);
    if STARTED.load(Ordering::Acquire) {
        return true;
    }
    let mut watched = lock();
    if watched.threads == 0 {
        start(&mut watched);
    }
    STARTED.store(watched.threads > 0, Ordering::Release);
    watched.threads > 0
}

/// Watches a lane until it is over. There is a thread that polls.
pub(crate) fn watch(lane: Arc<Lane>) {
    arrive(|arrived| arrived.lanes.push(lane));
}

/// Asks an event until it is reached. There is a thread that polls.
pub(crate) fn ask(event: Arc<RawEvent>) {
    arrive(|arrived| arrived.events.push(event));
}

fn arrive(push: impl FnOnce(&mut Sights)) {
    let mut watched = lock();
    push(&mut watched.arrived);
    NEWS.store(true, Ordering::Release);
    if std::mem::take(&mut watched.parked) {
        ARRIVED.notify_one();
    }
}

fn start(watched: &mut Watched) {
    if executor::spawn("rstream-poller", stand_by).is_ok() {
        watched.threads += 1;
    }
}

/// A thread that waits for its turn to poll.
fn stand_by() {
    let mut watched = lock();
    loop {
        let turn = TURN.load(Ordering::Acquire);
        let nobody = turn == 0;
        let busy = BUSY.load(Ordering::Acquire);
        let late = busy != 0 && nanoseconds(Instant::now()).saturating_sub(busy) > PATIENCE.as_nanos() as u64;
        let taken = late && BUSY.compare_exchange(busy, 0, Ordering::AcqRel, Ordering::Relaxed).is_ok();
        if nobody || taken {
            let sights = std::mem::replace(&mut watched.sights, Sights::new());
            TURN.store(turn + 1, Ordering::Release);
            // There may be another that stands by and was not told to look at the clock: this one was.
            HOT_NOW.store(false, Ordering::Release);
            if watched.standing_by == 0 && watched.threads < MOST_THREADS {
                start(&mut watched);
            }
            drop(watched);
            poll(turn + 1, sights);
            watched = lock();
            if watched.standing_by > 0 {
                watched.threads -= 1;
                return;
            }
            continue;
        }
        watched.standing_by += 1;
        watched = if HOT_NOW.load(Ordering::Acquire) || busy != 0 {
            STAND_BY.wait_timeout(watched, PATIENCE).unwrap_or_else(PoisonError::into_inner).0
        } else {
            STAND_BY.wait(watched).unwrap_or_else(PoisonError::into_inner)
        };
        watched.standing_by -= 1;
    }
}

/// Polls until another thread has taken the turn.
fn poll(turn: u64, mut sights: Sights) {
    let mut quiet_since = Instant::now();
    let mut spins = 0_u32;
    // The event that was asked last.
    let mut asked = 0;
    let mut changed = true;
    loop {
        if changed || NEWS.load(Ordering::Acquire) {
            let mut watched = lock();
            if TURN.load(Ordering::Acquire) != turn {
                return;
            }
            NEWS.store(false, Ordering::Release);
            if !watched.arrived.is_empty() {
                // What is old does not make what is new wait.
                (quiet_since, spins) = (Instant::now(), 0);
            }
            sights.append(&mut watched.arrived);
            // For whoever takes over.
            watched.sights.copy_from(&sights);
            changed = false;
        }
        let mut ran = false;
        for lane in &sights.lanes {
            if !lane.is_due() {
                continue;
            }
            have_stood_by();
            let Some(due) = away(|| lane.run_due()) else { return };
            ran |= due;
        }
        let events = sights.events.len();
        let Some(told) = ask_events(&mut sights, &mut asked) else { return };
        ran |= told;
        changed |= sights.events.len() != events;
        let now = Instant::now();
        if ran {
            (quiet_since, spins) = (now, 0);
            continue;
        }
        let before = sights.lanes.len();
        sights.lanes.retain(|lane| !lane.is_over());
        if sights.lanes.len() != before {
            changed = true;
            continue;
        }
        let quiet = now.saturating_duration_since(quiet_since);
        if quiet > HOT {
            HOT_NOW.store(false, Ordering::Release);
        }
        for lane in &sights.lanes {
            if lane.is_to_be_asked(now) {
                // The driver may block here, as when somebody enqueues more than there is room for.
                have_stood_by();
                if away(|| lane.look_after()).is_none() {
                    return;
                }
            }
        }
        spins = spins.wrapping_add(1);
        let policy = wait_policy();
        let spinning = match policy {
            WaitPolicy::Spin => !sights.is_empty(),
            WaitPolicy::Adaptive => quiet < SPIN,
            WaitPolicy::Sleep => false,
        };
        if spinning {
            // Cores may be fewer than threads that spin.
            if spins.is_multiple_of(16) {
                thread::yield_now()
            } else {
                std::hint::spin_loop()
            }
            continue;
        }
        let mut watched = lock();
        if !watched.arrived.is_empty() {
            continue;
        }
        watched.parked = true;
        if sights.is_empty() {
            HOT_NOW.store(false, Ordering::Release);
            watched = ARRIVED.wait(watched).unwrap_or_else(PoisonError::into_inner);
            quiet_since = Instant::now();
        } else {
            let pause = (quiet / 8).clamp(SHORTEST, LONGEST);
            watched = ARRIVED.wait_timeout(watched, pause).unwrap_or_else(PoisonError::into_inner).0;
        }
        watched.parked = false;
    }
}

/// Asks the events, each once and in turn, from behind `asked` on. True: somebody was told, or there is something new. `None`: a
/// stand-by has taken the turn meanwhile.
fn ask_events(Sights { lanes, events }: &mut Sights, asked: &mut usize) -> Option<bool> {
    // Somebody else runs what is due now.
    let kept = !events.is_empty() && lanes.iter().any(|lane| lane.is_due());
    let mut told = false;
    for count in 1..=events.len() {
        *asked = (*asked + 1) % events.len();
        if let Some((status, promises)) = events[*asked].ask() {
            drop(events.swap_remove(*asked));
            told = true;
            have_stood_by();
            away(|| promises.into_iter().for_each(|promise| callback::tell(promise, status)))?;
        }
        // It takes a call of the driver, so after some of them the lanes come first again.
        let due = || NEWS.load(Ordering::Acquire) || !kept && lanes.iter().any(|lane| lane.is_due());
        if count % ASKED_AT_ONCE == 0 && due() {
            return Some(true);
        }
    }
    Some(told)
}

/// Has the stand-by look at the clock from now on.
fn have_stood_by() {
    if !HOT_NOW.load(Ordering::Acquire) && !HOT_NOW.swap(true, Ordering::AcqRel) {
        drop(lock());
        STAND_BY.notify_one();
    }
}

/// Runs `f`, which may keep this thread: foreign code, or the driver. `None`: a stand-by has taken the turn meanwhile.
fn away<R>(f: impl FnOnce() -> R) -> Option<R> {
    let since = nanoseconds(Instant::now());
    BUSY.store(since, Ordering::Release);
    let result = f();
    BUSY.compare_exchange(since, 0, Ordering::AcqRel, Ordering::Relaxed).is_ok().then_some(result)
}
