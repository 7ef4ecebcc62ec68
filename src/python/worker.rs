//! Python callables as host code.
//!
//! A callback or host function in Python does not run on the driver's thread: that thread hands it to a worker, which is
//! attached to the interpreter, and waits for the result without ever asking for the GIL. A continuation runs on a worker
//! anyway.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use pyo3::exceptions::{PyBaseException, PyTypeError};
use pyo3::gc::{PyTraverseError, PyVisit};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyDict, PyTuple};

use super::gate::{self, Buried, Debt, Objects, Slot, drop_attached};
use crate::api::callback_scope;
use crate::error::Status;
use crate::executor::{CALLBACKS, Job as Task, is_own};

static RAISED: AtomicU64 = AtomicU64::new(0);

/// How many callables raised.
pub(super) fn raised() -> u64 {
    RAISED.load(Ordering::Relaxed)
}

/// What became of a callable.
pub(crate) enum Outcome {
    Returned(Py<PyAny>),
    /// The exception, as an object: to copy it is to count a reference, which runs no Python code.
    Raised(Py<PyBaseException>),
    /// The interpreter is going, so it was not called.
    Shutdown,
}

/// Runs several pieces of Python host code under one entry into the interpreter; without one when it is going.
pub(super) fn batch(all: &mut dyn FnMut()) {
    if gate::enter(|py| gate::in_place(py, &mut *all)).is_none() {
        all();
    }
}

/// A callable with its arguments.
pub(super) struct Job {
    call: Buried<Call>,
    debt: Debt,
}

/// Where the driver's thread waits for an outcome. Dropped without one, as when there is no thread to run the job, it says
/// that the job was not run.
struct Unrun<T>(Option<Arc<Slot<Option<T>>>>);

impl<T> Unrun<T> {
    fn put(mut self, outcome: T) {
        if let Some(slot) = self.0.take() {
            slot.put(Some(outcome));
        }
    }
}

impl<T> Drop for Unrun<T> {
    fn drop(&mut self) {
        if let Some(slot) = self.0.take() {
            slot.put(None);
        }
    }
}

/// Has a worker run `job` as a callback, and waits for it. Called on a callback thread of the driver's. `None`: it was not
/// run, or the interpreter is going.
fn run_ordered<T: Send + 'static>(job: impl FnOnce() -> T + Send + 'static) -> Option<T> {
    // One for each callback thread, which waits for its job: so at most one job is in a strand.
    static NEXT: AtomicU64 = AtomicU64::new(0);
    thread_local! {
        static STRAND: u64 = NEXT.fetch_add(1, Ordering::Relaxed);
    }
    let strand = STRAND.with(|strand| *strand);
    let slot = Arc::new(Slot::new());
    let unrun = Unrun(Some(Arc::clone(&slot)));
    CALLBACKS.submit(strand, Task::new(true, move || unrun.put(callback_scope(job))));
    slot.wait().flatten()
}

struct Call {
    function: Py<PyAny>,
    args: Py<PyTuple>,
    kwargs: Option<Py<PyDict>>,
}

impl Objects for Call {
    fn each(self, take: &mut dyn FnMut(Py<PyAny>)) {
        take(self.function);
        take(self.args.into_any());
        self.kwargs.map(Py::into_any).into_iter().for_each(take);
    }
}

impl Job {
    pub(super) fn new(
        function: &Bound<'_, PyAny>,
        args: &Bound<'_, PyTuple>,
        kwargs: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<Job> {
        Ok(Job { call: Call::new(function, args, kwargs)?, debt: Debt::of_callable() })
    }

    /// Calls the callable on this thread, one of rstream's, with `status` as the first argument if there is one.
    fn run(self, status: Option<Status>) -> Outcome {
        let Job { call, debt } = self;
        let called = gate::enter(move |py| {
            // Let go of here, attached, so that what the callable holds is freed before its result can be seen.
            let call = call.into_inner(py);
            let outcome = call.run(py, status);
            gate::let_go(py, call);
            match outcome {
                Ok(value) => Outcome::Returned(value),
                Err(error) => {
                    RAISED.fetch_add(1, Ordering::Relaxed);
                    Outcome::Raised(error.into_value(py))
                }
            }
        });
        drop(debt);
        called.unwrap_or(Outcome::Shutdown)
    }

    /// As `run`, off the stream: a continuation.
    pub(super) fn run_free(self) -> Outcome {
        self.run(None)
    }

    /// As `run`, as a callback. On a thread of rstream's own, here; on the driver's callback thread, by a worker.
    pub(super) fn run_ordered(self, status: Option<Status>) -> Outcome {
        if is_own() {
            return self.run(status);
        }
        run_ordered(move || self.run(status)).unwrap_or(Outcome::Shutdown)
    }
}

impl Call {
    fn new(
        function: &Bound<'_, PyAny>,
        args: &Bound<'_, PyTuple>,
        kwargs: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<Buried<Call>> {
        if !function.is_callable() {
            return Err(PyTypeError::new_err(format!("{} is not callable", function.repr()?)));
        }
        Ok(Buried::new(Call {
            function: function.clone().unbind(),
            args: args.clone().unbind(),
            kwargs: kwargs.map(|kwargs| kwargs.clone().unbind()),
        }))
    }

    fn run(&self, py: Python<'_>, status: Option<Status>) -> PyResult<Py<PyAny>> {
        let args = self.args.bind(py);
        let with_status;
        let args = match status {
            Some(status) => {
                let first = [status_object(py, status)?];
                with_status = PyTuple::new(py, first.into_iter().chain(args.iter()).collect::<Vec<_>>())?;
                &with_status
            }
            None => args,
        };
        let kwargs = self.kwargs.as_ref().map(|kwargs| kwargs.bind(py));
        call(self.function.bind(py), args, kwargs).map(Bound::unbind)
    }
}

/// Calls host code: as [`gate::call`], and refuses a coroutine function.
pub(super) fn call<'py>(
    function: &Bound<'py, PyAny>,
    args: &Bound<'py, PyTuple>,
    kwargs: Option<&Bound<'py, PyDict>>,
) -> PyResult<Bound<'py, PyAny>> {
    gate::call(function, args, kwargs).and_then(|result| refuse_coroutine(function, result))
}

/// The result of host code, unless it is the coroutine of a coroutine function, which nobody would await. To ask the
/// function before it is queued would cost every other one more.
pub(super) fn refuse_coroutine<'py>(
    function: &Bound<'py, PyAny>,
    result: Bound<'py, PyAny>,
) -> PyResult<Bound<'py, PyAny>> {
    static COROUTINE: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
    static NOT_AWAITED: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
    let py = function.py();
    if result.get_type_ptr().cast() != COROUTINE.import(py, "types", "CoroutineType")?.as_ptr() {
        return Ok(result);
    }
    let args = PyTuple::new(py, [function, &result])?;
    let error = gate::call(NOT_AWAITED.import(py, "rstream._errors", "not_awaited")?, &args, None)?;
    if error.is_none() { Ok(result) } else { Err(PyErr::from_value(error)) }
}

/// Gets the exceptions of host functions of graphs. Held by the executable that it was given to.
pub(super) struct Handler(Buried<Py<PyAny>>);

impl Handler {
    pub(super) fn visit(&self, visit: &PyVisit<'_>) -> Result<(), PyTraverseError> {
        visit.call(&*self.0)
    }

    pub(super) fn new(function: &Bound<'_, PyAny>) -> PyResult<Arc<Handler>> {
        if !function.is_callable() {
            return Err(PyTypeError::new_err(format!("{} is not callable", function.repr()?)));
        }
        Ok(Arc::new(Handler(Buried::new(function.clone().unbind()))))
    }
}

/// What the runs of a host function in graphs raised, and who is told. It does not keep the callable alive.
#[derive(Default)]
pub(super) struct HostErrors {
    /// The last [`HostErrors::MOST`].
    raised: Mutex<Vec<Buried<Py<PyAny>>>>,
    handlers: Mutex<Vec<Weak<Handler>>>,
}

impl HostErrors {
    const MOST: usize = 100;

    fn lock<T>(of: &Mutex<T>) -> MutexGuard<'_, T> {
        of.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn raised(&self, py: Python<'_>) -> Vec<Py<PyAny>> {
        HostErrors::lock(&self.raised).iter().map(|error| error.clone_ref(py)).collect()
    }

    pub(super) fn tell(&self, handler: &Arc<Handler>) {
        let mut handlers = HostErrors::lock(&self.handlers);
        let new = Arc::downgrade(handler);
        handlers.retain(|known| known.strong_count() > 0 && !known.ptr_eq(&new));
        handlers.push(new);
    }

    /// The function is not in the handler's executable any more.
    pub(super) fn untell(&self, handler: &Arc<Handler>) {
        let gone = Arc::downgrade(handler);
        HostErrors::lock(&self.handlers).retain(|known| !known.ptr_eq(&gone));
    }

    /// An exception is kept, and told to the handlers; without one, to `sys.unraisablehook`.
    fn failed(&self, py: Python<'_>, error: PyErr, function: &Bound<'_, PyAny>) {
        // With its traceback.
        let value = error.into_value(py).into_bound(py).into_any();
        let dropped = {
            let mut raised = HostErrors::lock(&self.raised);
            raised.push(Buried::new(value.clone().unbind()));
            (raised.len() > HostErrors::MOST).then(|| raised.remove(0))
        };
        drop_attached(py, dropped);
        let handlers: Vec<_> = HostErrors::lock(&self.handlers).iter().filter_map(Weak::upgrade).collect();
        if handlers.is_empty() {
            gate::report(py, PyErr::from_value(value.clone()), Some(function));
        }
        for handler in handlers {
            let told = PyTuple::new(py, [&value]).and_then(|args| call(handler.0.bind(py), &args, None));
            if let Err(error) = told {
                gate::report(py, error, Some(handler.0.bind(py)));
            }
            drop_attached(py, handler);
        }
        // The frames of the traceback hold what the function worked with, and nobody would see to them here.
        static CLEAR: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
        let cleared = value.getattr("__traceback__").and_then(|traceback| {
            let args = PyTuple::new(py, [traceback])?;
            gate::call(CLEAR.import(py, "traceback", "clear_frames")?, &args, None)
        });
        drop(cleared);
    }
}

/// A callable in graphs, which is called once for each launch.
pub(super) struct Repeated {
    call: Buried<Call>,
    errors: Arc<HostErrors>,
}

impl Repeated {
    pub(super) fn new(
        function: &Bound<'_, PyAny>,
        args: &Bound<'_, PyTuple>,
        kwargs: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<Repeated> {
        Ok(Repeated { call: Call::new(function, args, kwargs)?, errors: Arc::default() })
    }

    pub(super) fn errors(&self) -> Arc<HostErrors> {
        Arc::clone(&self.errors)
    }

    /// Calls it. On a callback thread of the driver's.
    pub(super) fn run(self: &Arc<Self>) {
        let this = Arc::clone(self);
        let debt = Debt::of_callable();
        run_ordered(move || {
            gate::enter(|py| {
                match this.call.run(py, None) {
                    Ok(value) => gate::let_go(py, value),
                    Err(error) => this.errors.failed(py, error, this.call.function.bind(py)),
                }
                drop_attached(py, this);
            });
        });
        drop(debt);
    }
}

/// An `rstream.Status`.
pub(super) fn status_object(py: Python<'_>, status: Status) -> PyResult<Bound<'_, PyAny>> {
    static CLASS: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
    static SUCCESS: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
    let make = || CLASS.import(py, "rstream._status", "Status")?.call1((status.code(),));
    if status.ok() { Ok(SUCCESS.get_or_try_init(py, || make().map(Bound::unbind))?.bind(py).clone()) } else { make() }
}
