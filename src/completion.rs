//! [`Completion`]: the one-shot result of host code, or of reaching a point of a stream.

use std::any::Any;
use std::future::Future;
use std::panic::{self, AssertUnwindSafe};
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use crate::api::in_callback;
use crate::error::{Error, Result, Status};

/// How often a wait asks its caller whether to go on. Python answers Ctrl-C within this.
pub(crate) const INTERRUPT_CHECK: Duration = Duration::from_millis(50);

type Hook = Box<dyn FnOnce() + Send>;

/// Names a hook that has not run, for [`Completion::remove_hook`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HookId(u64);

#[cfg(feature = "python")]
impl HookId {
    pub(crate) fn number(self) -> u64 {
        self.0
    }

    pub(crate) fn from_number(number: u64) -> HookId {
        HookId(number)
    }
}

enum Phase<T> {
    /// Queued. It can still be cancelled.
    Pending,
    /// The host code runs.
    Running,
    Done(Result<T>),
    /// Done, and the result was moved out.
    Taken,
}

struct State<T> {
    phase: Phase<T>,
    status: Option<Status>,
    hooks: Vec<(HookId, Hook)>,
    next_hook: u64,
    waker: Option<Waker>,
    /// How many threads wait: without one, to wake them would be a system call for nothing.
    waiting: usize,
}

struct Shared<T> {
    state: Mutex<State<T>>,
    /// As the state says, for those who look often.
    resolved: AtomicBool,
    done: Condvar,
}

impl<T> Shared<T> {
    fn new(phase: Phase<T>, status: Option<Status>) -> Shared<T> {
        let resolved = AtomicBool::new(matches!(phase, Phase::Done(_)));
        let state = State { phase, status, hooks: Vec::new(), next_hook: 0, waker: None, waiting: 0 };
        Shared { state: Mutex::new(state), resolved, done: Condvar::new() }
    }

    /// Nothing that runs under the lock can panic, so a poisoned lock still guards a sound state.
    fn lock(&self) -> MutexGuard<'_, State<T>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<T> State<T> {
    fn is_done(&self) -> bool {
        matches!(self.phase, Phase::Done(_) | Phase::Taken)
    }
}

/// The result of a callback, host function or continuation, or of a point of a stream that was reached.
///
/// It resolves exactly once: with what the host code returned, or with the [`Error`] that says why it did not run or
/// how it ended. Dropping a `Completion` cancels nothing. It is also a [`Future`].
#[must_use = "a completion carries the error of its host code"]
pub struct Completion<T> {
    shared: Arc<Shared<T>>,
}

/// The side that resolves a [`Completion`]. Dropped unresolved, it resolves it with [`Error::Shutdown`].
pub(crate) struct Promise<T> {
    shared: Arc<Shared<T>>,
}

/// Whether this thread may wait for a completion that is not done.
pub(crate) fn may_wait() -> Result<()> {
    if in_callback() {
        let what = "a callback must not wait for a completion: what it waits for may be queued behind it";
        return Err(Error::NotPermitted { what: what.into() });
    }
    Ok(())
}

pub(crate) fn channel<T>() -> (Promise<T>, Completion<T>) {
    let shared = Arc::new(Shared::new(Phase::Pending, None));
    (Promise { shared: Arc::clone(&shared) }, Completion { shared })
}

/// One that has its result.
pub(crate) fn resolved<T>(status: Status, value: T) -> Completion<T> {
    Completion { shared: Arc::new(Shared::new(Phase::Done(Ok(value)), Some(status))) }
}

impl<T> Completion<T> {
    /// Whether it is resolved. Never blocks and never calls the driver.
    #[must_use]
    pub fn is_done(&self) -> bool {
        self.shared.resolved.load(Ordering::Acquire)
    }

    /// The status that the driver gave at this point of the stream; `None` until then, and after a cancellation.
    #[must_use]
    pub fn status(&self) -> Option<Status> {
        self.shared.lock().status
    }

    /// Asks that the host code be not run. True when it will not, because it had not started: the completion is then
    /// resolved with [`Error::Cancelled`]. The stream's order is not changed.
    pub fn cancel(&self) -> bool {
        let pending = matches!(self.shared.lock().phase, Phase::Pending);
        pending && self.shared.resolve(|phase| matches!(phase, Phase::Pending), Err(Error::Cancelled))
    }

    /// Calls `hook` once when this is resolved, at once if it is already. `None`: it was called at once.
    ///
    /// The hook runs on the thread that resolves, which may be the driver's callback thread: it must be quick, must not
    /// block and must not call the driver.
    pub fn on_done(&self, hook: impl FnOnce() + Send + 'static) -> Option<HookId> {
        let mut state = self.shared.lock();
        if state.is_done() {
            drop(state);
            hook();
            return None;
        }
        let id = HookId(state.next_hook);
        state.next_hook += 1;
        state.hooks.push((id, Box::new(hook)));
        Some(id)
    }

    /// Takes a hook back that was not called yet.
    pub fn remove_hook(&self, id: HookId) {
        let mut state = self.shared.lock();
        let index = state.hooks.iter().position(|(hook, _)| *hook == id);
        let removed = index.map(|index| state.hooks.remove(index));
        drop(state);
        drop(removed);
    }

    /// Waits until this is resolved.
    ///
    /// `timeout` is the longest wait, without limit if `None`. `interrupted` is asked about every 50 ms whether to give
    /// up.
    ///
    /// # Errors
    /// [`Error::Timeout`], [`Error::Interrupted`]; [`Error::NotPermitted`] inside a callback when the wait would block: a
    /// callback must not wait for work that may be queued behind it.
    pub fn wait_done(&self, timeout: Option<Duration>, interrupted: &mut dyn FnMut() -> bool) -> Result<()> {
        let mut state = self.shared.lock();
        if state.is_done() {
            return Ok(());
        }
        may_wait()?;
        let started = Instant::now();
        loop {
            let elapsed = started.elapsed();
            let slice = match timeout {
                Some(timeout) if elapsed >= timeout => return Err(Error::Timeout { waited: timeout }),
                Some(timeout) => INTERRUPT_CHECK.min(timeout - elapsed),
                None => INTERRUPT_CHECK,
            };
            state.waiting += 1;
            let (guard, waited) = self.shared.done.wait_timeout(state, slice).unwrap_or_else(PoisonError::into_inner);
            state = guard;
            state.waiting -= 1;
            if state.is_done() {
                return Ok(());
            }
            if waited.timed_out() {
                drop(state);
                if interrupted() {
                    return Err(Error::Interrupted);
                }
                state = self.shared.lock();
                if state.is_done() {
                    return Ok(());
                }
            }
        }
    }

    /// Calls `f` with the result, if there is one. `f` must not use this completion.
    pub fn peek<R>(&self, f: impl FnOnce(&Result<T>) -> R) -> Option<R> {
        match &self.shared.lock().phase {
            Phase::Done(result) => Some(f(result)),
            _ => None,
        }
    }

    /// Waits for the result and moves it out.
    ///
    /// # Errors
    /// The error of the host code, or one of [`Completion::wait_done`]'s. After a time-out the completion is gone; use
    /// [`Completion::wait_done`] to wait in several steps.
    pub fn into_result(self, timeout: Option<Duration>) -> Result<T> {
        self.wait_done(timeout, &mut || false)?;
        self.take().expect("resolved, and only this call moves the result out")
    }

    /// Moves the result out, if there is one.
    pub(crate) fn take(&self) -> Option<Result<T>> {
        let mut state = self.shared.lock();
        match std::mem::replace(&mut state.phase, Phase::Taken) {
            Phase::Done(result) => Some(result),
            other => {
                state.phase = other;
                None
            }
        }
    }
}

impl<T> Future for Completion<T> {
    type Output = Result<T>;

    /// # Panics
    /// When it is polled again after it gave its result.
    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Result<T>> {
        // Cloned before, and the old one dropped after, since both run foreign code.
        let waker = context.waker().clone();
        let mut state = self.shared.lock();
        match state.phase {
            Phase::Pending | Phase::Running => {
                let before = state.waker.replace(waker);
                drop(state);
                drop(before);
                return Poll::Pending;
            }
            Phase::Done(_) => {}
            Phase::Taken => panic!("a Completion was polled after it gave its result"),
        }
        drop(state);
        Poll::Ready(self.take().expect("done, and polling has exclusive access"))
    }
}

impl<T> std::fmt::Debug for Completion<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Completion").field("done", &self.is_done()).field("status", &self.status()).finish()
    }
}

impl<T> Shared<T> {
    /// Resolves with `result` if the phase passes `when`, then tells everybody who waits. False: it did not pass.
    fn resolve(&self, when: impl FnOnce(&Phase<T>) -> bool, result: Result<T>) -> bool {
        let mut state = self.lock();
        if !when(&state.phase) {
            return false;
        }
        state.phase = Phase::Done(result);
        self.resolved.store(true, Ordering::Release);
        let hooks = std::mem::take(&mut state.hooks);
        let waker = state.waker.take();
        if state.waiting > 0 {
            self.done.notify_all();
        }
        drop(state);
        // A hook's panic must not keep the others from being told, nor reach the driver.
        let shielded = |tell: Hook| shield(tell);
        hooks.into_iter().map(|(_, hook)| hook).for_each(shielded);
        if let Some(waker) = waker {
            shielded(Box::new(move || waker.wake()));
        }
        true
    }
}

impl<T> Promise<T> {
    /// The point of the stream is reached with `status`.
    pub(crate) fn reached(&self, status: Status) {
        let mut state = self.shared.lock();
        if matches!(state.phase, Phase::Pending) {
            state.status = Some(status);
        }
    }

    /// Runs `f` and resolves with what it returns, or with its panic. Does nothing if it was cancelled. `ended` is told
    /// how it went before anybody can see the result.
    pub(crate) fn run(self, f: impl FnOnce() -> T, ended: impl FnOnce(Outcome)) {
        if !self.start() {
            return ended(Outcome::Cancelled);
        }
        let result = panic::catch_unwind(AssertUnwindSafe(f))
            .map_err(|payload| Error::Panicked { message: panic_message(payload) });
        ended(if result.is_ok() { Outcome::Ran } else { Outcome::Failed });
        self.resolve(result);
    }

    /// Resolves with an error instead of running. As [`Promise::run`].
    pub(crate) fn fail(self, error: Error, ended: impl FnOnce(Outcome)) {
        if !self.start() {
            return ended(Outcome::Cancelled);
        }
        ended(Outcome::Failed);
        self.resolve(Err(error));
    }

    /// From now on it cannot be cancelled. False: it was.
    fn start(&self) -> bool {
        let mut state = self.shared.lock();
        let pending = matches!(state.phase, Phase::Pending);
        if pending {
            state.phase = Phase::Running;
        }
        pending
    }

    /// Resolves without running anything.
    pub(crate) fn resolve(self, result: Result<T>) {
        self.shared.resolve(|phase| matches!(phase, Phase::Pending | Phase::Running), result);
    }
}

/// What a panic says. Its payload is forgotten, since its drop could panic again.
pub(crate) fn panic_message(payload: Box<dyn Any + Send>) -> String {
    let message = payload
        .downcast_ref::<&str>()
        .map(|text| (*text).to_owned())
        .or_else(|| payload.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "a panic without a message".into());
    std::mem::forget(payload);
    message
}

/// Runs `f`, whose panic ends here. The payload is forgotten, since its drop could panic again.
pub(crate) fn shield(f: impl FnOnce()) {
    if let Err(payload) = panic::catch_unwind(AssertUnwindSafe(f)) {
        std::mem::forget(payload);
    }
}

/// How a piece of host code ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Outcome {
    Ran,
    Failed,
    Cancelled,
}

impl<T> Drop for Promise<T> {
    fn drop(&mut self) {
        self.shared.resolve(|phase| matches!(phase, Phase::Pending | Phase::Running), Err(Error::Shutdown));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicU32;

    #[test]
    fn hooks_run_once_each_before_and_after_the_result() {
        let (promise, completion) = channel();
        let told = Arc::new(AtomicU32::new(0));
        let tell = |told: &Arc<AtomicU32>| {
            let told = Arc::clone(told);
            move || {
                told.fetch_add(1, Ordering::Relaxed);
            }
        };
        completion.on_done(tell(&told));
        let removed = completion.on_done(|| panic!("must not run")).expect("not done yet");
        completion.remove_hook(removed);
        promise.run(|| 7, |outcome| assert_eq!(outcome, Outcome::Ran));
        completion.on_done(tell(&told));
        assert_eq!(told.load(Ordering::Relaxed), 2);
        assert_eq!(completion.on_done(tell(&told)), None);
        assert_eq!(completion.into_result(None), Ok(7));
    }

    #[test]
    fn a_cancelled_closure_does_not_run() {
        let (promise, completion) = channel();
        assert!(completion.cancel());
        assert!(!completion.cancel());
        promise.reached(Status::SUCCESS);
        assert_eq!(completion.status(), None);
        promise.run(|| panic!("must not run"), |outcome| assert_eq!(outcome, Outcome::Cancelled));
        assert_eq!(completion.into_result(None), Err::<(), _>(Error::Cancelled));
    }

    #[test]
    fn running_host_code_cannot_be_cancelled() {
        let (promise, completion) = channel();
        let completion = Arc::new(completion);
        let inside = Arc::clone(&completion);
        promise.run(move || assert!(!inside.cancel()), |_| ());
        assert_eq!(completion.peek(Result::is_ok), Some(true));
    }

    #[test]
    fn a_dropped_promise_resolves() {
        let (promise, completion) = channel::<()>();
        drop(promise);
        assert_eq!(completion.into_result(None), Err(Error::Shutdown));
    }

    #[test]
    fn a_panic_becomes_an_error() {
        let (promise, completion) = channel::<()>();
        promise.run(|| panic!("number {}", 5), |outcome| assert_eq!(outcome, Outcome::Failed));
        assert_eq!(completion.into_result(None), Err(Error::Panicked { message: "number 5".into() }));
    }

    #[test]
    fn a_payload_whose_drop_panics_does_no_harm() {
        struct Bomb;
        impl Drop for Bomb {
            fn drop(&mut self) {
                panic!("in the drop of a payload");
            }
        }
        let (promise, completion) = channel::<()>();
        promise.run(|| panic::panic_any(Bomb), |outcome| assert_eq!(outcome, Outcome::Failed));
        assert!(matches!(completion.into_result(None), Err(Error::Panicked { .. })));
        shield(|| panic::panic_any(Bomb));
    }

    #[test]
    fn a_wait_ends_by_time_and_by_interruption_and_can_be_repeated() {
        let (promise, completion) = channel();
        let timeout = Duration::from_millis(1);
        assert_eq!(completion.wait_done(Some(timeout), &mut || false), Err(Error::Timeout { waited: timeout }));
        assert_eq!(completion.wait_done(None, &mut || true), Err(Error::Interrupted));
        promise.resolve(Ok(()));
        assert_eq!(completion.wait_done(None, &mut || true), Ok(()));
    }

    #[test]
    fn a_callback_may_look_but_not_wait() {
        let (promise, completion) = channel();
        crate::api::callback_scope(|| {
            assert!(matches!(completion.wait_done(None, &mut || false), Err(Error::NotPermitted { .. })));
            promise.resolve(Ok(()));
            assert_eq!(completion.wait_done(None, &mut || false), Ok(()));
        });
    }

    #[test]
    fn it_is_a_future() {
        struct Count(AtomicU32);
        impl std::task::Wake for Count {
            fn wake(self: Arc<Self>) {
                self.0.fetch_add(1, Ordering::Relaxed);
            }
        }
        let count = Arc::new(Count(AtomicU32::new(0)));
        let waker = Waker::from(Arc::clone(&count));
        let mut context = Context::from_waker(&waker);
        let (promise, mut completion) = channel();
        assert!(Pin::new(&mut completion).poll(&mut context).is_pending());
        promise.resolve(Ok(3));
        assert_eq!(count.0.load(Ordering::Relaxed), 1);
        assert_eq!(Pin::new(&mut completion).poll(&mut context), Poll::Ready(Ok(3)));
    }
}
