//! Python callables as host code.
//!
//! A callback or host function in Python does not run on the driver's thread: that thread hands it to a worker, which is
//! attached to the interpreter, and waits for the result without ever asking for the GIL. A continuation runs on a worker
//! anyway.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use pyo3::exceptions::{PyBaseException, PyTypeError};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyDict, PyTuple};

use super::gate::{self, Buried, Debt, Objects, Slot};
use crate::api::callback_scope;
use crate::device::Device;
use crate::error::Status;
use crate::executor::CALLBACKS;

static RAISED: AtomicU64 = AtomicU64::new(0);

/// How many callables raised.
pub(super) fn raised() -> u64 {
    RAISED.load(Ordering::Relaxed)
}

/// What became of a callable.
pub(super) enum Outcome {
    Returned(Py<PyAny>),
    /// The exception, as an object: to copy it is to count a reference, which runs no Python code.
    Raised(Py<PyBaseException>),
    /// The interpreter is going, so it was not called.
    Shutdown,
}

/// A callable with its arguments.
pub(super) struct Job {
    call: Buried<Call>,
    debt: Debt,
}

/// Where the driver's thread waits for an outcome. Dropped without one, as when there is no thread to run the job, it says
/// that the job was not run.
struct Unrun(Option<Arc<Slot<Outcome>>>);

impl Unrun {
    fn put(mut self, outcome: Outcome) {
        if let Some(slot) = self.0.take() {
            slot.put(outcome);
        }
    }
}

impl Drop for Unrun {
    fn drop(&mut self) {
        if let Some(slot) = self.0.take() {
            slot.put(Outcome::Shutdown);
        }
    }
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
        if !function.is_callable() {
            return Err(PyTypeError::new_err(format!("{} is not callable", function.repr()?)));
        }
        let call = Buried::new(Call {
            function: function.clone().unbind(),
            args: args.clone().unbind(),
            kwargs: kwargs.map(|kwargs| kwargs.clone().unbind()),
        });
        Ok(Job { call, debt: Debt::new() })
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

    /// Has a worker run the callable as a callback, and waits for it. Called on the callback thread of `device`.
    pub(super) fn run_ordered(self, device: Device, status: Option<Status>) -> Outcome {
        // The driver has one callback thread per context, so at most one job is in a strand.
        let strand = u64::from(device.ordinal()) * 2 + u64::from(device.is_software());
        let slot = Arc::new(Slot::new());
        let result = Arc::clone(&slot);
        let unrun = Unrun(Some(result));
        CALLBACKS.submit(strand, move || unrun.put(callback_scope(|| self.run(status))));
        slot.wait().unwrap_or(Outcome::Shutdown)
    }
}

impl Call {
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
        gate::call(self.function.bind(py), args, kwargs).map(Bound::unbind)
    }
}

/// An `rstream.Status`.
pub(super) fn status_object(py: Python<'_>, status: Status) -> PyResult<Bound<'_, PyAny>> {
    static CLASS: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
    static SUCCESS: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
    let make = || CLASS.import(py, "rstream._status", "Status")?.call1((status.code(),));
    if status.ok() { Ok(SUCCESS.get_or_try_init(py, || make().map(Bound::unbind))?.bind(py).clone()) } else { make() }
}
