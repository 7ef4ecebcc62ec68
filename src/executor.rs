//! The threads that run continuations: in order per strand, without one strand's slow job holding up another's.
//!
//! A strand is a queue of jobs under a key, the stream's id. One worker serves all strands in short turns, so that a
//! flood of quick jobs needs one thread. A second worker stands by; it takes a strand only when that has waited for
//! half a millisecond while no worker took its next turn, which means that a job is slow or blocked. It then leaves a new
//! stand-by behind.

use std::collections::{HashMap, VecDeque};
use std::panic::{self, AssertUnwindSafe};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

/// How long a strand waits for a busy worker before the stand-by takes it.
const PATIENCE: Duration = Duration::from_micros(500);
/// How long a worker stays with one strand while others are ready.
const TURN: Duration = Duration::from_micros(200);
/// Continuations may block on one another; this many can at the same time.
const MOST_THREADS: usize = 256;
/// Workers beyond these end when they find nothing to do.
const KEPT_IDLE: usize = 2;

type Job = Box<dyn FnOnce() + Send>;

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

static POOL: Mutex<Option<Pool>> = Mutex::new(None);
static CHANGED: Condvar = Condvar::new();

fn lock() -> MutexGuard<'static, Option<Pool>> {
    // No job runs under the lock, so a poisoned one still guards a sound state.
    POOL.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Runs `job` on a worker thread, after every job that was submitted under the same `strand` before.
pub fn submit(strand: u64, job: impl FnOnce() + Send + 'static) {
    let mut guard = lock();
    let pool = guard.get_or_insert_default();
    let idle_strand = match pool.strands.get_mut(&strand) {
        Some(queue) => {
            queue.push_back(Box::new(job));
            false
        }
        None => {
            pool.strands.insert(strand, VecDeque::from([Box::new(job) as Job]));
            true
        }
    };
    if idle_strand {
        pool.ready.push_back((strand, Instant::now()));
        pool.call_a_worker();
    }
}

impl Pool {
    /// There is a ready strand: sees to it that a worker takes it, now or after [`PATIENCE`].
    fn call_a_worker(&mut self) {
        if self.idle > 0 {
            if !self.watched || self.idle == self.threads {
                CHANGED.notify_one();
            }
        } else if self.threads < MOST_THREADS {
            self.threads += 1;
            let started = thread::Builder::new().name("rstream-worker".into()).spawn(work);
            if started.is_err() {
                // The system has no thread to give; the workers that there are will come to it.
                self.threads -= 1;
                assert!(self.threads > 0, "the system cannot start the first worker thread");
            }
        }
    }

    /// The next strand for a worker. Busy workers take the next at once; an idle one only if nobody else is at it.
    fn next(&mut self, was_busy: bool) -> Option<(u64, VecDeque<Job>)> {
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
        Some((strand, jobs))
    }
}

fn work() {
    let mut was_busy = false;
    let mut guard = lock();
    loop {
        let pool = guard.as_mut().expect("the pool exists before its first worker");
        if let Some((strand, mut jobs)) = pool.next(was_busy) {
            if pool.idle == 0 && pool.threads < MOST_THREADS || !pool.ready.is_empty() {
                pool.call_a_worker();
            }
            drop(guard);
            let turn = Instant::now();
            while let Some(job) = jobs.pop_front() {
                // A continuation catches its own panics; this keeps the worker alive whatever comes.
                drop(panic::catch_unwind(AssertUnwindSafe(job)));
                if turn.elapsed() >= TURN {
                    break;
                }
            }
            was_busy = true;
            guard = lock();
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
            guard = CHANGED.wait(guard).unwrap_or_else(PoisonError::into_inner);
            guard.as_mut().expect("never taken away").idle -= 1;
        } else {
            pool.watched = true;
            guard = CHANGED.wait_timeout(guard, PATIENCE).unwrap_or_else(PoisonError::into_inner).0;
            let pool = guard.as_mut().expect("never taken away");
            pool.watched = false;
            pool.idle -= 1;
        }
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
            submit(1_000_000 + number % 7, move || send.send(number).expect("the test waits"));
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
            submit(2_000_000, move || {
                receive.recv().expect("released by the chain");
                done.send(()).expect("the test waits");
            });
            send
        };
        for strand in 1..CHAIN {
            let (send, receive) = channel::<()>();
            submit(2_000_000 + strand, move || {
                receive.recv().expect("released by the one after");
                next.send(()).expect("the one before waits");
            });
            next = send;
        }
        next.send(()).expect("the last waits");
        finished.recv().expect("the first ends");
    }

    #[test]
    fn a_panic_costs_no_worker() {
        let (send, receive) = channel();
        submit(3_000_000, || panic!("on purpose"));
        submit(3_000_000, move || send.send(()).expect("the test waits"));
        receive.recv().expect("the strand goes on");
    }
}
