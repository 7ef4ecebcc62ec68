//! The threads that run continuations: in order per strand, without one strand's slow job holding up another's.
//!
//! A strand is a queue of jobs under a key, the stream's id. One worker serves all strands in short turns, so that a
//! flood of quick jobs needs one thread, and enters the interpreter once for many. A second worker stands by; it takes a
//! strand only when that has waited for half a millisecond while no worker took its next turn, which means that a job is slow
//! or blocked. It then leaves a new stand-by behind, which has half of that patience, and so on until a worker comes back from
//! its jobs: where many block, the next is soon found out.
//!
//! Here is also what makes a thread one of rstream's own, which may enter the interpreter, and how it runs several pieces
//! of Python host code under one entry.

use std::cell::Cell;
use std::collections::VecDeque;
use std::io;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use rustc_hash::{FxBuildHasher, FxHashMap};

use crate::completion::shield;

/// How long a strand waits for a busy worker before the stand-by takes it, at most and at least.
const PATIENCE: Duration = Duration::from_micros(500);
const LEAST_PATIENCE: Duration = Duration::from_micros(15);
/// How long a worker stays with one strand while others are ready.
const TURN: Duration = Duration::from_micros(200);
/// How long a worker serves strands before it lets go of the interpreter, which it may have to wait for again: another thread
/// that computes in Python gives it up every 5 ms.
const ENTRY: Duration = Duration::from_millis(1);
/// In a flood Python jobs come as soon as this one after another.
const NEAR: Duration = Duration::from_micros(30);
/// How long it may take whoever queues a flood to go on after waiting for the GIL, which is to be woken up.
const GRACE: Duration = Duration::from_micros(100);
/// How long a worker lets a flood come before it takes its turn.
const LONGEST: Duration = Duration::from_micros(400);
/// Continuations may block on one another; this many can at the same time.
const MOST_THREADS: usize = 256;
/// More workers than these would only wait for the interpreter behind one another.
const MOST_ENTERING: usize = 8;
/// Workers beyond these end when they find nothing to do.
const KEPT_IDLE: usize = 2;

thread_local! {
    static OWN: Cell<bool> = const { Cell::new(false) };
}

/// Starts a thread of rstream's own.
pub(crate) fn spawn(name: &str, run: impl FnOnce() + Send + 'static) -> io::Result<()> {
    let run = || {
        OWN.set(true);
        run();
    };
    thread::Builder::new().name(name.into()).spawn(run).map(drop)
}

/// Whether this is a thread of rstream's own that runs host code, and none of the driver's.
#[cfg(feature = "python")]
pub(crate) fn is_own() -> bool {
    OWN.get()
}

type Batch = fn(&mut dyn FnMut());
static BATCH: OnceLock<Batch> = OnceLock::new();

/// Says how to run several pieces of Python host code under one entry into the interpreter.
#[cfg(feature = "python")]
pub(crate) fn set_batch(batch: Batch) {
    BATCH.get_or_init(|| batch);
}

/// Runs `all`, which runs several pieces of Python host code.
pub(crate) fn batch(all: &mut dyn FnMut()) {
    match BATCH.get() {
        Some(batch) if OWN.get() => batch(all),
        _ => all(),
    }
}

/// A piece of work for a worker.
pub(crate) struct Job {
    run: Box<dyn FnOnce() + Send>,
    /// It enters the interpreter.
    python: bool,
}

impl Job {
    /// `python`: it enters the interpreter.
    pub(crate) fn new(python: bool, run: impl FnOnce() + Send + 'static) -> Job {
        Job { run: Box::new(run), python }
    }
}

struct Pool {
    strands: FxHashMap<u64, VecDeque<Job>>,
    /// Strands with jobs that no worker serves, and since when.
    ready: VecDeque<(u64, Instant)>,
    threads: usize,
    idle: usize,
    /// An idle worker waits with a time limit for the strand at the front.
    watched: bool,
    last_turn: Option<Instant>,
    /// How long the stand-by waits now.
    patience: Duration,
}

/// What there is for a worker that has nothing to do.
enum Next {
    Strand(u64, VecDeque<Job>),
    /// Perhaps a strand, when so much time has passed without another worker's turn.
    After(Duration),
    Nothing,
}

/// Strands and the threads that serve them.
pub struct Executor {
    pool: Mutex<Pool>,
    changed: Condvar,
    /// How many Python jobs have come.
    arrived: AtomicU64,
    /// How many workers wait for the interpreter.
    entering: AtomicUsize,
    /// Jobs may come by the thousand, and nothing on the device waits for them.
    floods: bool,
}

/// For continuations, which may block on one another, on callbacks, and for as long as they like.
pub static CONTINUATIONS: Executor = Executor::new(true);

/// For callbacks that do not run on the driver's thread: never short of a thread because continuations block.
pub static CALLBACKS: Executor = Executor::new(false);

/// For news of completions, which continuations and callbacks may wait for.
#[cfg(feature = "python")]
pub static NEWS: Executor = Executor::new(true);

impl Executor {
    const fn new(floods: bool) -> Executor {
        let pool = Pool {
            strands: FxHashMap::with_hasher(FxBuildHasher),
            ready: VecDeque::new(),
            threads: 0,
            idle: 0,
            watched: false,
            last_turn: None,
            patience: PATIENCE,
        };
        Executor {
            pool: Mutex::new(pool),
            changed: Condvar::new(),
            arrived: AtomicU64::new(0),
            entering: AtomicUsize::new(0),
            floods,
        }
    }

    fn lock(&self) -> MutexGuard<'_, Pool> {
        // No job runs under the lock, so a poisoned one still guards a sound state.
        self.pool.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs `job` on a worker thread, after every job that was submitted under the same `strand` before. Drops it when
    /// the system cannot start even one thread.
    pub(crate) fn submit(&'static self, strand: u64, job: Job) {
        if job.python {
            self.arrived.fetch_add(1, Ordering::Relaxed);
        }
        let mut pool = self.lock();
        if let Some(queue) = pool.strands.get_mut(&strand) {
            queue.push_back(job);
        } else {
            pool.strands.insert(strand, VecDeque::from([job]));
            pool.ready.push_back((strand, Instant::now()));
            self.call_a_worker(&mut pool);
        }
        if pool.threads == 0 {
            // The system has no thread for the first worker. To drop the jobs is to resolve what waits for them.
            pool.ready.clear();
            let lost = std::mem::take(&mut pool.strands);
            drop(pool);
            drop(lost);
        }
    }

    /// There is a ready strand: sees to it that a worker takes it, now or when the stand-by's patience ends.
    fn call_a_worker(&'static self, pool: &mut Pool) {
        if pool.idle > 0 {
            if !pool.watched || pool.idle == pool.threads {
                self.changed.notify_one();
            }
        } else if pool.threads < MOST_THREADS {
            pool.threads += 1;
            if spawn("rstream-worker", || self.work()).is_err() {
                // The system has no thread to give; the workers that there are will come to it.
                pool.threads -= 1;
            }
        }
    }

    fn work(&'static self) {
        let mut was_busy = false;
        let mut pool = self.lock();
        loop {
            let next = if was_busy { self.take(&mut pool) } else { self.take_if_stalled(&mut pool) };
            match next {
                Next::Strand(strand, jobs) => {
                    drop(pool);
                    let before = self.arrived.load(Ordering::Relaxed);
                    let python = self.serve(strand, jobs);
                    if python && self.floods && self.arrived.load(Ordering::Relaxed) != before {
                        self.let_them_come();
                    }
                    was_busy = true;
                    pool = self.lock();
                    continue;
                }
                Next::Nothing if pool.idle >= KEPT_IDLE => {
                    pool.threads -= 1;
                    return;
                }
                Next::After(time) if !pool.watched => {
                    pool.idle += 1;
                    pool.watched = true;
                    pool = self.changed.wait_timeout(pool, time).unwrap_or_else(PoisonError::into_inner).0;
                    pool.watched = false;
                }
                Next::After(_) | Next::Nothing => {
                    pool.idle += 1;
                    pool = self.changed.wait(pool).unwrap_or_else(PoisonError::into_inner);
                }
            }
            was_busy = false;
            pool.idle -= 1;
        }
    }

    /// The next strand for a worker that comes from another.
    fn take(&'static self, pool: &mut Pool) -> Next {
        pool.patience = PATIENCE;
        self.take_ready(pool, 0)
    }

    /// The next strand for a worker that stands by: one that nobody else is at.
    fn take_if_stalled(&'static self, pool: &mut Pool) -> Next {
        let Some(&(_, since)) = pool.ready.front() else { return Next::Nothing };
        let mut index = 0;
        if pool.idle + 1 < pool.threads {
            let since = pool.last_turn.map_or(since, |turn| turn.max(since));
            let left = pool.patience.saturating_sub(since.elapsed());
            if !left.is_zero() {
                return Next::After(left);
            }
            if self.entering.load(Ordering::Relaxed) >= MOST_ENTERING {
                let others = pool.ready.iter().position(|(strand, _)| !pool.is_python(*strand));
                let Some(other) = others else { return Next::After(PATIENCE) };
                index = other;
            }
            pool.patience = (pool.patience / 2).max(LEAST_PATIENCE);
        }
        self.take_ready(pool, index)
    }

    /// Takes a ready strand; another worker is called for the one after it.
    fn take_ready(&'static self, pool: &mut Pool, index: usize) -> Next {
        let Some((strand, _)) = pool.ready.remove(index) else { return Next::Nothing };
        pool.last_turn = Some(Instant::now());
        let jobs = std::mem::take(pool.strands.get_mut(&strand).expect("a ready strand has jobs"));
        if pool.idle == 0 && pool.threads < MOST_THREADS || !pool.ready.is_empty() {
            self.call_a_worker(pool);
        }
        Next::Strand(strand, jobs)
    }

    /// Serves a strand, and further ones: those that enter the interpreter, which is the answer, under one entry.
    fn serve(&'static self, mut strand: u64, mut jobs: VecDeque<Job>) -> bool {
        let python = jobs.front().is_some_and(|job| job.python);
        let mut serve = || {
            if python {
                self.entering.fetch_sub(1, Ordering::Relaxed);
            }
            // From here on: it may have taken long to enter.
            let entry = Instant::now();
            loop {
                run_while(&mut jobs, |job| job.python == python);
                let mut pool = self.lock();
                pool.put_back(strand, std::mem::take(&mut jobs));
                let same = pool.ready.front().is_some_and(|(strand, _)| pool.is_python(*strand) == python);
                if !same || entry.elapsed() >= ENTRY {
                    return;
                }
                let Next::Strand(next, its) = self.take(&mut pool) else { return };
                (strand, jobs) = (next, its);
            }
        };
        if python {
            self.entering.fetch_add(1, Ordering::Relaxed);
            batch(&mut serve)
        } else {
            serve()
        }
        python
    }

    /// Waits while a flood comes. Else the interpreter is entered for each job: the thread that queues them then has to wait
    /// for the GIL each time, and both for one another to wake up.
    fn let_them_come(&self) {
        let started = Instant::now();
        // The stand-by need not think that this worker is blocked.
        let mut pool = self.lock();
        (pool.last_turn, pool.patience) = (Some(started), PATIENCE);
        drop(pool);
        let (mut seen, mut came) = (self.arrived.load(Ordering::Relaxed), None);
        loop {
            // Cores may be fewer than threads.
            thread::yield_now();
            let arrived = self.arrived.load(Ordering::Relaxed);
            let now = Instant::now();
            if arrived != seen {
                (seen, came) = (arrived, Some(now));
            }
            let waited = now.saturating_duration_since(started);
            if waited >= LONGEST {
                return;
            }
            if came.is_some_and(|came| now.saturating_duration_since(came) < NEAR) {
                continue;
            }
            if waited >= GRACE || !self.lock().ready.is_empty() {
                return;
            }
        }
    }
}

/// Runs the jobs from the front on that fit, for a turn, and at least one.
fn run_while(jobs: &mut VecDeque<Job>, fits: impl Fn(&Job) -> bool) {
    let turn = Instant::now();
    while jobs.front().is_some_and(&fits) {
        let job = jobs.pop_front().expect("just seen");
        // A continuation catches its own panics; this keeps the worker alive whatever comes.
        shield(job.run);
        if turn.elapsed() >= TURN {
            return;
        }
    }
}

impl Pool {
    /// A worker is done with a strand, but for `jobs`.
    fn put_back(&mut self, strand: u64, mut jobs: VecDeque<Job>) {
        let queue = self.strands.get_mut(&strand).expect("a strand stays while a worker serves it");
        jobs.append(queue);
        if jobs.is_empty() {
            self.strands.remove(&strand);
        } else {
            *queue = jobs;
            self.ready.push_back((strand, Instant::now()));
        }
    }

    /// Whether the next job of a strand enters the interpreter.
    fn is_python(&self, strand: u64) -> bool {
        self.strands.get(&strand).and_then(VecDeque::front).is_some_and(|job| job.python)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::channel;

    #[test]
    fn jobs_of_a_strand_run_in_order_and_every_one() {
        let (send, receive) = channel();
        for number in 0..10_000_u64 {
            let send = send.clone();
            CONTINUATIONS
                .submit(1_000_000 + number % 7, Job::new(false, move || send.send(number).expect("the test waits")));
        }
        let mut last = [None; 7];
        for _ in 0..10_000 {
            let number = receive.recv().expect("every job runs");
            let slot = &mut last[usize::try_from(number % 7).expect("small")];
            assert!(slot.is_none_or(|before| before < number));
            *slot = Some(number);
        }
    }

    #[test]
    fn a_blocked_strand_does_not_hold_up_others_even_if_they_wait_for_one_another() {
        const CHAIN: u64 = 40;
        let (done, finished) = channel();
        let mut next = {
            let (send, receive) = channel::<()>();
            let run = move || {
                receive.recv().expect("released by the chain");
                done.send(()).expect("the test waits");
            };
            CONTINUATIONS.submit(2_000_000, Job::new(false, run));
            send
        };
        for strand in 1..CHAIN {
            let (send, receive) = channel::<()>();
            let run = move || {
                receive.recv().expect("released by the one after");
                next.send(()).expect("the one before waits");
            };
            CONTINUATIONS.submit(2_000_000 + strand, Job::new(false, run));
            next = send;
        }
        next.send(()).expect("the last waits");
        finished.recv().expect("the first ends");
    }

    #[test]
    fn a_panic_costs_no_worker() {
        let (send, receive) = channel();
        CONTINUATIONS.submit(3_000_000, Job::new(false, || panic!("on purpose")));
        CONTINUATIONS.submit(3_000_000, Job::new(false, move || send.send(()).expect("the test waits")));
        receive.recv().expect("the strand goes on");
    }
}
