//! `rstream.Completion`.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use pyo3::exceptions::{PyBaseException, PyException, PyTypeError};
use pyo3::gc::{PyTraverseError, PyVisit};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyTuple;

use super::awaiting::Await;
use super::errors::{PyResultExt as _, exception};
use super::gate::{Buried, Debt, Objects};
use super::worker::{Outcome, refuse_coroutine, status_object};
use super::{gate, interruptibly, timeout, worker};
use crate::completion::{Completion, HookId, INTERRUPT_CHECK, may_wait};
use crate::error::{Error, Result};
use crate::executor::{CONTINUATIONS, Executor, Job, NEWS};

/// The two things that a completion of the core can carry for Python.
enum Inner {
    Call(Completion<Outcome>),
    Notice(Completion<()>),
}

/// How a completion ended, in Python's terms.
pub(super) enum Ending {
    Value(Py<PyAny>),
    Error(PyErr),
}

/// The result of host code, or of reaching a point of a stream. It resolves exactly once.
///
/// `await` it, wait for it with `result`, or ask for a call with `add_done_callback`. A failure that nobody retrieves
/// is reported through `sys.unraisablehook`. Dropping a completion cancels nothing.
#[pyclass(name = "Completion", module = "rstream", frozen, weakref)]
pub(super) struct CompletionPy {
    inner: Arc<Inner>,
    /// Somebody has seen how it ended, so a failure is not lost.
    retrieved: AtomicBool,
}

impl Inner {
    fn is_done(&self) -> bool {
        match self {
            Inner::Call(completion) => completion.is_done(),
            Inner::Notice(completion) => completion.is_done(),
        }
    }

    fn on_done(&self, hook: impl FnOnce() + Send + 'static) -> Option<HookId> {
        match self {
            Inner::Call(completion) => completion.on_done(hook),
            Inner::Notice(completion) => completion.on_done(hook),
        }
    }

    fn remove_hook(&self, id: HookId) {
        match self {
            Inner::Call(completion) => completion.remove_hook(id),
            Inner::Notice(completion) => completion.remove_hook(id),
        }
    }

    fn wait_done(&self, limit: Option<Duration>, interrupted: &mut dyn FnMut() -> bool) -> Result<()> {
        match self {
            Inner::Call(completion) => completion.wait_done(limit, interrupted),
            Inner::Notice(completion) => completion.wait_done(limit, interrupted),
        }
    }

    /// How it ended; `None` while it has not. Under the completion's lock nothing of Python's runs: references are
    /// counted, and exceptions are made afterwards.
    fn ending(&self, py: Python<'_>) -> Option<Ending> {
        enum Copy {
            Value(Py<PyAny>),
            Raised(Py<PyBaseException>),
            Error(Error),
        }
        let copy = match self {
            Inner::Call(completion) => completion.peek(|result| match result {
                Ok(Outcome::Returned(value)) => Copy::Value(value.clone_ref(py)),
                Ok(Outcome::Raised(error)) => Copy::Raised(error.clone_ref(py)),
                Ok(Outcome::Shutdown) => Copy::Error(Error::Shutdown),
                Err(error) => Copy::Error(error.clone()),
            }),
            Inner::Notice(completion) => completion.peek(|result| match result {
                Ok(()) => Copy::Value(py.None()),
                Err(error) => Copy::Error(error.clone()),
            }),
        }?;
        Some(match copy {
            Copy::Value(value) => Ending::Value(value),
            Copy::Raised(error) => Ending::Error(PyErr::from_value(error.into_bound(py).into_any())),
            Copy::Error(error) => Ending::Error(exception(py, &error)),
        })
    }

    /// Whether it ended with something that somebody has to hear of. Needs no interpreter.
    fn is_failure(&self) -> bool {
        let told = |error: &Error| !matches!(error, Error::Cancelled | Error::Shutdown);
        match self {
            Inner::Call(completion) => completion.peek(|result| match result {
                Ok(outcome) => matches!(outcome, Outcome::Raised(_)),
                Err(error) => told(error),
            }),
            Inner::Notice(completion) => completion.peek(|result| result.as_ref().err().is_some_and(told)),
        }
        .unwrap_or(false)
    }

    /// Tells `sys.unraisablehook` of the failure, then lets go of it.
    fn report(&self, py: Python<'_>) {
        if let Some(Ending::Error(error)) = self.ending(py) {
            let what = intern!(py, "host code whose result nobody asked for");
            gate::report(py, error, Some(what.as_any()));
        }
        self.objects(&mut |object| gate::let_go(py, object));
    }

    /// Takes the result's object out, if there is one.
    fn objects(&self, take: &mut dyn FnMut(Py<PyAny>)) {
        let Inner::Call(completion) = self else { return };
        match completion.take() {
            Some(Ok(Outcome::Returned(value))) => take(value),
            Some(Ok(Outcome::Raised(error))) => take(error.into_any()),
            Some(Ok(Outcome::Shutdown) | Err(_)) | None => {}
        }
    }
}

impl Objects for Arc<Inner> {
    /// Only when nobody else holds it.
    fn each(self, take: &mut dyn FnMut(Py<PyAny>)) {
        if let Ok(inner) = Arc::try_unwrap(self) {
            inner.objects(take);
        }
    }
}

/// A strand of its own for each thing to tell: they need no order, and must not wait for one another.
pub(super) fn strand() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1 << 62);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

impl CompletionPy {
    pub(super) fn call(completion: Completion<Outcome>) -> CompletionPy {
        CompletionPy { inner: Arc::new(Inner::Call(completion)), retrieved: AtomicBool::new(false) }
    }

    pub(super) fn notice(completion: Completion<()>) -> CompletionPy {
        CompletionPy { inner: Arc::new(Inner::Notice(completion)), retrieved: AtomicBool::new(false) }
    }

    fn wait(&self, py: Python<'_>, seconds: Option<f64>) -> PyResult<Ending> {
        let limit = timeout(seconds).py(py)?;
        if !self.inner.is_done() {
            gate::refuse_forked()?;
            interruptibly(py, |interrupted| self.inner.wait_done(limit, interrupted))?;
        }
        Ok(self.end(py))
    }

    /// How it ended, for somebody who is to hear of it. It is done.
    pub(super) fn end(&self, py: Python<'_>) -> Ending {
        self.retrieved.store(true, Ordering::Relaxed);
        // Only the garbage collector takes the result out, of a completion that is seen again by a finalizer at most.
        self.inner.ending(py).unwrap_or_else(|| Ending::Error(exception(py, &Error::Shutdown)))
    }

    pub(super) fn is_done(&self) -> bool {
        self.inner.is_done()
    }

    /// Whether it resolves without Python code of its own.
    pub(super) fn is_notice(&self) -> bool {
        matches!(*self.inner, Inner::Notice(_))
    }

    pub(super) fn on_done(&self, hook: impl FnOnce() + Send + 'static) -> Option<HookId> {
        self.inner.on_done(hook)
    }

    pub(super) fn remove_hook(&self, id: HookId) {
        self.inner.remove_hook(id);
    }
}

impl Drop for CompletionPy {
    fn drop(&mut self) {
        if gate::is_forked() {
            // The parent has it too, and its threads.
            return;
        }
        let told = self.retrieved.load(Ordering::Relaxed);
        let last_words = gate::is_closed();
        if self.inner.is_done() && (told || last_words || !self.inner.is_failure()) {
            // `Some`: the interpreter drops this. With the gate closed there is no worker left to tell of the failure.
            Python::try_attach(|py| {
                if !told && last_words && self.inner.is_failure() {
                    self.inner.report(py);
                } else {
                    self.inner.objects(&mut |object| gate::let_go(py, object));
                }
            });
            return;
        }
        // So that the exit waits for the report too. That a point is reached is nothing to wait for.
        let debt = matches!(*self.inner, Inner::Call(_)).then(Debt::of_news);
        let inner = Buried::new(Arc::clone(&self.inner));
        self.inner.on_done(move || {
            if inner.is_failure() {
                let debt = debt.unwrap_or_else(Debt::of_news);
                CONTINUATIONS.submit(
                    strand(),
                    Job::new(true, move || {
                        gate::enter(move |py| inner.report(py));
                        drop(debt);
                    }),
                );
            }
        });
    }
}

#[pymethods]
impl CompletionPy {
    /// `Completion[int]`, for annotations.
    #[classmethod]
    fn __class_getitem__<'py>(
        class: &Bound<'py, pyo3::types::PyType>,
        item: &Bound<'py, PyAny>,
    ) -> PyResult<Bound<'py, PyAny>> {
        class.py().import("types")?.getattr("GenericAlias")?.call1((class, item))
    }

    /// Whether it is resolved. Never blocks, and may be called inside a callback.
    fn done(&self) -> bool {
        self.inner.is_done()
    }

    /// Wait at most `timeout` seconds and return what the host code returned, or raise what it raised.
    ///
    /// Raises `DeviceFaultError` for host code that did not run because of a fault, `CancelledError` after a
    /// cancellation, `ShutdownError` if the interpreter was going, `WaitTimeoutError` when the time runs out, and
    /// `NotPermittedError` inside a callback when the wait would block. Ctrl-C ends the wait.
    #[pyo3(signature = (timeout=None))]
    fn result(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<Py<PyAny>> {
        match self.wait(py, timeout)? {
            Ending::Value(value) => Ok(value),
            Ending::Error(error) => Err(error),
        }
    }

    /// As `result`, but returns the exception, or `None`.
    #[pyo3(signature = (timeout=None))]
    fn exception(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<Option<Py<PyAny>>> {
        Ok(match self.wait(py, timeout)? {
            Ending::Value(_) => None,
            Ending::Error(error) => Some(error.into_value(py).into_any()),
        })
    }

    /// The status that the driver gave at this point of the stream; `None` until then.
    #[getter]
    fn status<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyAny>>> {
        let status = match &*self.inner {
            Inner::Call(completion) => completion.status(),
            Inner::Notice(completion) => completion.status(),
        };
        status.map(|status| status_object(py, status)).transpose()
    }

    /// Ask that the host code be not run. True when it had not started: `result` then raises `CancelledError`.
    fn cancel(&self, py: Python<'_>) -> bool {
        // Done callbacks of other completions' owners may run in here.
        py.detach(|| match &*self.inner {
            Inner::Call(completion) => completion.cancel(),
            Inner::Notice(completion) => completion.cancel(),
        })
    }

    /// Whether it was cancelled.
    pub(super) fn cancelled(&self) -> bool {
        let cancelled = |error: Option<&Error>| matches!(error, Some(Error::Cancelled));
        match &*self.inner {
            Inner::Call(completion) => completion.peek(|result| cancelled(result.as_ref().err())),
            Inner::Notice(completion) => completion.peek(|result| cancelled(result.as_ref().err())),
        }
        .unwrap_or(false)
    }

    /// Call `function(completion)` once when this is resolved, on a worker thread; at once, here, if it is already.
    ///
    /// On a worker the call may use the API, and an exception goes to `sys.unraisablehook`. Functions that are added to
    /// one completion may be called in any order.
    fn add_done_callback(slf: &Bound<'_, Self>, function: &Bound<'_, PyAny>) -> PyResult<()> {
        CompletionPy::call_when_done(slf, function, &CONTINUATIONS).map(drop)
    }

    /// `add_done_callback` for futures, which continuations may wait for: it does not need one of their workers. The number
    /// that is returned takes it back. `None`: it was called.
    fn _add_waiter(slf: &Bound<'_, Self>, function: &Bound<'_, PyAny>) -> PyResult<Option<u64>> {
        CompletionPy::call_when_done(slf, function, &NEWS)
    }

    fn _remove_waiter(&self, py: Python<'_>, number: u64) {
        if gate::is_forked() {
            // Who had the lock may not be here.
            return;
        }
        py.detach(|| self.inner.remove_hook(HookId::from_number(number)));
    }

    fn __await__(slf: Py<Self>) -> Await {
        Await::new(slf)
    }

    /// A `concurrent.futures.Future` that gets the same result.
    fn future<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        static WRAP: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
        WRAP.import(slf.py(), "rstream._waiting", "concurrent_future")?.call1((slf,))
    }

    fn __repr__(&self, py: Python<'_>) -> String {
        let state = match self.inner.ending(py) {
            None => "pending",
            Some(Ending::Value(_)) => "done",
            Some(Ending::Error(_)) if self.cancelled() => "cancelled",
            Some(Ending::Error(_)) => "failed",
        };
        format!("<rstream.Completion {state}>")
    }

    /// Waits for the lock, so that all passes of a collection see the same: nobody who has it waits for the interpreter.
    /// A result may refer to this object: an exception does, by the frames of its traceback.
    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        let Inner::Call(completion) = &*self.inner else { return Ok(()) };
        completion
            .peek(|result| match result {
                Ok(Outcome::Returned(value)) => visit.call(value),
                Ok(Outcome::Raised(error)) => visit.call(error),
                Ok(Outcome::Shutdown) | Err(_) => Ok(()),
            })
            .unwrap_or(Ok(()))
    }

    fn __clear__(&self) {
        if let Inner::Call(completion) = &*self.inner {
            // Dropped here, without the lock.
            drop(completion.take());
        }
    }

    fn __reduce__(&self) -> PyResult<()> {
        Err(PyTypeError::new_err("a Completion belongs to this process and cannot be pickled"))
    }
}

impl CompletionPy {
    /// Has a worker of `executor` call `function` with the completion when it is done; called here if it is.
    fn call_when_done(
        slf: &Bound<'_, Self>,
        function: &Bound<'_, PyAny>,
        executor: &'static Executor,
    ) -> PyResult<Option<u64>> {
        let py = slf.py();
        if !function.is_callable() {
            return Err(PyTypeError::new_err(format!("{} is not callable", function.repr()?)));
        }
        let inner = Arc::clone(&slf.get().inner);
        if inner.is_done() {
            match function.call1((slf,)).and_then(|result| refuse_coroutine(function, result)) {
                // What is no error of the function's, such as Ctrl-C, is its caller's.
                Err(error) if !error.is_instance_of::<PyException>(py) => return Err(error),
                Err(error) => gate::report(py, error, Some(function)),
                Ok(_) => {}
            }
            return Ok(None);
        }
        gate::refuse_forked()?;
        if gate::is_closed() {
            // Nobody would be told any more: better an error than a wait without end.
            return Err(exception(py, &Error::Shutdown));
        }
        let both = Buried::new((slf.clone().unbind(), function.clone().unbind()));
        let debt = Debt::of_news();
        let id = py.detach(|| {
            inner.on_done(move || {
                let run = move || {
                    gate::enter(|py| CompletionPy::call_back(py, both.into_inner(py)));
                    drop(debt);
                };
                executor.submit(strand(), Job::new(true, run));
            })
        });
        Ok(id.map(HookId::number))
    }

    fn call_back(py: Python<'_>, (completion, function): (Py<CompletionPy>, Py<PyAny>)) {
        let called = PyTuple::new(py, [&completion]).and_then(|args| worker::call(function.bind(py), &args, None));
        match called {
            Ok(value) => gate::let_go(py, value.unbind()),
            Err(error) => gate::report(py, error, Some(function.bind(py))),
        }
        gate::let_go(py, (completion, function));
    }
}

/// Some completions, by their numbers in the order in which they are done, for whoever waits for the next. The thread that
/// resolves puts the number there: no worker, no interpreter.
#[pyclass(name = "_Finished", module = "rstream", frozen)]
pub(super) struct Finished {
    numbers: Arc<Numbers>,
    /// What tells of those that were not done.
    hooks: Mutex<Vec<(Weak<Inner>, HookId)>>,
}

#[derive(Default)]
struct Numbers {
    numbers: Mutex<VecDeque<usize>>,
    more: Condvar,
}

impl Numbers {
    fn lock(&self) -> MutexGuard<'_, VecDeque<usize>> {
        // Nothing foreign runs under the lock, so a poisoned one still guards a sound state.
        self.numbers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn put(&self, number: usize) {
        let mut numbers = self.lock();
        numbers.push_back(number);
        let first = numbers.len() == 1;
        drop(numbers);
        // Who waits, one thread at a time, found none before. To wake nobody up is a system call too.
        if first {
            self.more.notify_one();
        }
    }

    /// The next number; `None` when there is none after `limit`. For one thread at a time.
    fn wait(&self, limit: Option<Duration>, interrupted: &mut dyn FnMut() -> bool) -> Result<Option<usize>> {
        let started = Instant::now();
        loop {
            let numbers = self.lock();
            let slice =
                limit.map_or(INTERRUPT_CHECK, |limit| limit.saturating_sub(started.elapsed()).min(INTERRUPT_CHECK));
            let none = |numbers: &mut VecDeque<usize>| numbers.is_empty();
            let waited = self.more.wait_timeout_while(numbers, slice, none);
            let (mut numbers, _) = waited.unwrap_or_else(PoisonError::into_inner);
            if let Some(number) = numbers.pop_front() {
                return Ok(Some(number));
            }
            drop(numbers);
            if limit.is_some_and(|limit| started.elapsed() >= limit) {
                return Ok(None);
            }
            if interrupted() {
                return Err(Error::Interrupted);
            }
        }
    }
}

impl Finished {
    /// Leaves nothing behind with those that are not done.
    fn forget(&self) {
        if gate::is_forked() {
            // Who had a lock may not be here.
            return;
        }
        let hooks = std::mem::take(&mut *self.hooks.lock().unwrap_or_else(PoisonError::into_inner));
        for (inner, id) in hooks {
            if let Some(inner) = inner.upgrade().filter(|inner| !inner.is_done()) {
                inner.remove_hook(id);
            }
        }
    }
}

impl Drop for Finished {
    fn drop(&mut self) {
        self.forget();
    }
}

#[pymethods]
impl Finished {
    /// In one call, so that no signal handler comes between.
    #[new]
    fn new(completions: Vec<Bound<'_, CompletionPy>>) -> PyResult<Finished> {
        if completions.iter().any(|completion| !completion.get().is_done()) {
            gate::refuse_forked()?;
        }
        let numbers = Arc::<Numbers>::default();
        let mut hooks = Vec::new();
        for (number, completion) in completions.iter().enumerate() {
            let inner = &completion.get().inner;
            let numbers = Arc::clone(&numbers);
            if let Some(id) = inner.on_done(move || numbers.put(number)) {
                hooks.push((Arc::downgrade(inner), id));
            }
        }
        Ok(Finished { numbers, hooks: Mutex::new(hooks) })
    }

    /// The number of the next that is done; `None` when there is none after `seconds`.
    fn get(&self, py: Python<'_>, seconds: Option<f64>) -> PyResult<Option<usize>> {
        let limit = timeout(seconds).py(py)?;
        // In a forked child, who had the lock may not be here.
        let number = if gate::is_forked() {
            self.numbers.numbers.try_lock().ok().and_then(|mut numbers| numbers.pop_front())
        } else {
            self.numbers.lock().pop_front()
        };
        if number.is_some() {
            return Ok(number);
        }
        gate::refuse_forked()?;
        may_wait().py(py)?;
        if gate::is_closed() {
            // What is to run Python code may never be done any more: better an error than a wait without end.
            return Err(exception(py, &Error::Shutdown));
        }
        interruptibly(py, |interrupted| self.numbers.wait(limit, interrupted))
    }

    /// Whether none is done that was not got.
    fn empty(&self) -> bool {
        self.numbers.lock().is_empty()
    }

    fn __enter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    #[pyo3(signature = (*_exception))]
    fn __exit__(&self, _exception: &Bound<'_, PyTuple>) {
        self.forget();
    }
}
