//! The threads that run continuations: in order per strand, without one strand's slow job holding up another's.
//!
//! A strand is a queue of jobs under a key, the stream's id. One worker serves all strands in short turns, so that a
//! flood of quick jobs needs one thread. A second worker stands by; it takes a strand only when that has waited for
//! half a millisecond while no worker took its next turn, which means that a job is slow or blocked. It then leaves a new
//! stand-by behind.
//!
//! Here is also what makes a thread one of rstream's own, which may enter the interpreter, and how it runs several pieces
//! of Python host code under one entry.

use std::cell::Cell;
use std::collections::{HashMap, VecDeque};
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use crate::completion::shield;

/// How long a strand waits for a busy worker before the stand-by takes it.
const PATIENCE: Duration = Duration::from_micros(500);
/// How long a worker stays with one strand while others are ready.
const TURN: Duration = Duration::from_micros(200);
/// Jobs that come as soon as this after the last turn may belong to a flood: whoever queues them may have waited for the
/// GIL, and to be woken up.
const RECENT: Duration = Duration::from_millis(1);
/// Those of a flood come as soon as this one after another.
const NEAR: Duration = Duration::from_micros(20);
/// Continuations may block on one another; this many can at the same time.
const MOST_THREADS: usize = 256;
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
    /// Whether its stream has been given more since, which will come here too.
    more: Option<Follow>,
}

/// A piece of host code among those of a stream: how many had been offered with it, and have been by now.
pub(crate) struct Follow {
    pub(crate) number: u64,
    pub(crate) offered: Arc<AtomicU64>,
}

impl Job {
    pub(crate) fn new(run: impl FnOnce() + Send + 'static) -> Job {
        Job { run: Box::new(run), python: false, more: None }
    }

    /// One that enters the interpreter.
    #[cfg(feature = "python")]
    pub(crate) fn python(run: impl FnOnce() + Send + 'static) -> Job {
        Job { python: true, ..Job::new(run) }
    }

    /// A continuation of a stream.
    pub(crate) fn of_stream(python: bool, more: Follow, run: impl FnOnce() + Send + 'static) -> Job {
        Job { python, more: Some(more), ..Job::new(run) }
    }

    fn more_is_to_come(&self) -> bool {
        self.more.as_ref().is_some_and(|follow| follow.offered.load(Ordering::Relaxed) > follow.number)
    }
}

#[derive(Default)]
struct Pool {
    strands: HashMap<u64, VecDeque<Job>>,
    /// Strands with jobs that no worker serves, and since when.
    ready: VecDeque<(u64, Instant)>,
    threads: usize,
    idle: usize,
    /// An idle worker waits with a time limit for the strand at the front.
    watched: bool,
    last_turn: Option<Instant>,
}

/// Strands and the threads that serve them.
pub struct Executor {
    pool: Mutex<Option<Pool>>,
    changed: Condvar,
}

/// For continuations, which may block on one another, on callbacks, and for as long as they like.
pub static CONTINUATIONS: Executor = Executor::new();

/// For callbacks that do not run on the driver's thread: never short of a thread because continuations block.
pub static CALLBACKS: Executor = Executor::new();

impl Executor {
    const fn new() -> Executor {
        Executor { pool: Mutex::new(None), changed: Condvar::new() }
    }

    fn lock(&self) -> MutexGuard<'_, Option<Pool>> {
        // No job runs under the lock, so a poisoned one still guards a sound state.
        self.pool.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs `job` on a worker thread, after every job that was submitted under the same `strand` before. Drops it when
    /// the system cannot start even one thread.
    pub(crate) fn submit(&'static self, strand: u64, job: Job) {
        let mut guard = self.lock();
        let pool = guard.get_or_insert_default();
        if let Some(queue) = pool.strands.get_mut(&strand) {
            queue.push_back(job);
        } else {
            pool.strands.insert(strand, VecDeque::from([job]));
            pool.ready.push_back((strand, Instant::now()));
            self.call_a_worker(pool);
        }
        if pool.threads == 0 {
            // The system has no thread for the first worker. To drop the jobs is to resolve what waits for them.
            pool.ready.clear();
            let lost = std::mem::take(&mut pool.strands);
            drop(guard);
            drop(lost);
        }
    }

    /// There is a ready strand: sees to it that a worker takes it, now or after [`PATIENCE`].
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
        let mut last = Instant::now();
        let mut guard = self.lock();
        loop {
            let pool = guard.as_mut().expect("the pool exists before its first worker");
            if let Some((strand, since, mut jobs)) = pool.next(was_busy) {
                if pool.idle == 0 && pool.threads < MOST_THREADS || !pool.ready.is_empty() {
                    self.call_a_worker(pool);
                }
                drop(guard);
                if since.saturating_duration_since(last) < RECENT {
                    self.gather(strand, &mut jobs);
                }
                let turn = Instant::now();
                while !jobs.is_empty() && turn.elapsed() < TURN {
                    if jobs[0].python {
                        batch(&mut || run_while(&mut jobs, turn, |job| job.python));
                    } else {
                        run_while(&mut jobs, turn, |job| !job.python);
                    }
                }
                (was_busy, last) = (true, Instant::now());
                guard = self.lock();
                let pool = guard.as_mut().expect("never taken away");
                let queue = pool.strands.get_mut(&strand).expect("a strand stays while a worker serves it");
                jobs.append(queue);
                *queue = jobs;
                if queue.is_empty() {
                    pool.strands.remove(&strand);
                } else {
                    pool.ready.push_back((strand, Instant::now()));
                }
                continue;
            }
            was_busy = false;
            if pool.idle >= KEPT_IDLE && pool.ready.is_empty() {
                pool.threads -= 1;
                return;
            }
            pool.idle += 1;
            if pool.ready.is_empty() || pool.watched {
                guard = self.changed.wait(guard).unwrap_or_else(PoisonError::into_inner);
                guard.as_mut().expect("never taken away").idle -= 1;
            } else {
                pool.watched = true;
                guard = self.changed.wait_timeout(guard, PATIENCE).unwrap_or_else(PoisonError::into_inner).0;
                let pool = guard.as_mut().expect("never taken away");
                pool.watched = false;
                pool.idle -= 1;
            }
        }
    }
}

impl Executor {
    /// Waits for more jobs of a flood. Else the interpreter is entered for each of them: the thread that queues them then
    /// has to wait for the GIL each time, and both for one another to wake up.
    fn gather(&self, strand: u64, jobs: &mut VecDeque<Job>) {
        const LONGEST: Duration = Duration::from_micros(100);
        let started = Instant::now();
        let mut arrived = started;
        while jobs.back().is_some_and(|job| job.python && job.more_is_to_come()) {
            for _ in 0..64 {
                std::hint::spin_loop();
            }
            let before = jobs.len();
            if let Some(pool) = self.lock().as_mut() {
                if !pool.ready.is_empty() {
                    return;
                }
                jobs.append(pool.strands.get_mut(&strand).expect("a strand stays while a worker serves it"));
            }
            let now = Instant::now();
            if jobs.len() > before {
                arrived = now;
            }
            if now.saturating_duration_since(arrived) > NEAR || now.saturating_duration_since(started) > LONGEST {
                break;
            }
        }
    }
}

/// Runs the jobs from the front on that fit, until the turn is over, and at least one.
fn run_while(jobs: &mut VecDeque<Job>, turn: Instant, fits: impl Fn(&Job) -> bool) {
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
    /// The next strand for a worker. Busy workers take the next at once; an idle one only if nobody else is at it.
    fn next(&mut self, was_busy: bool) -> Option<(u64, Instant, VecDeque<Job>)> {
        let &(_, since) = self.ready.front()?;
        let busy_workers = self.threads - self.idle - usize::from(!was_busy);
        if !was_busy && busy_workers > 0 {
            let stalled = |at: Instant| at.elapsed() >= PATIENCE;
            if !stalled(since) || !self.last_turn.is_none_or(stalled) {
                return None;
            }
        }
        let (strand, _) = self.ready.pop_front()?;
        self.last_turn = Some(Instant::now());
        let jobs = std::mem::take(self.strands.get_mut(&strand)?);
        Some((strand, since, jobs))
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
            CONTINUATIONS.submit(1_000_000 + number % 7, Job::new(move || send.send(number).expect("the test waits")));
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
            CONTINUATIONS.submit(2_000_000, Job::new(run));
            send
        };
        for strand in 1..CHAIN {
            let (send, receive) = channel::<()>();
            let run = move || {
                receive.recv().expect("released by the one after");
                next.send(()).expect("the one before waits");
            };
            CONTINUATIONS.submit(2_000_000 + strand, Job::new(run));
            next = send;
        }
        next.send(()).expect("the last waits");
        finished.recv().expect("the first ends");
    }

    #[test]
    fn a_panic_costs_no_worker() {
        let (send, receive) = channel();
        CONTINUATIONS.submit(3_000_000, Job::new(|| panic!("on purpose")));
        CONTINUATIONS.submit(3_000_000, Job::new(move || send.send(()).expect("the test waits")));
        receive.recv().expect("the strand goes on");
    }
}
