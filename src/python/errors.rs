//! Errors of the core as Python exceptions. The classes are Python's, in `rstream._errors`.

use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyTuple;

use super::gate;
use crate::error::{Error, Result};

/// The kind that `rstream._errors` chooses a class by; an empty one means by the code.
fn kind(error: &Error) -> &'static str {
    match error {
        Error::NoDriver { .. } => "no_driver",
        Error::DriverTooOld { .. } => "too_old",
        Error::Closed { .. } => "closed",
        Error::Capture { .. } => "capture",
        Error::Timeout { .. } => "timeout",
        Error::Cancelled => "cancelled",
        Error::Shutdown => "shutdown",
        _ => "",
    }
}

/// The exception for an error of the core.
pub(super) fn exception(py: Python<'_>, error: &Error) -> PyErr {
    static BUILD: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
    let build = || {
        let args: Bound<'_, PyTuple> = (kind(error), error.status().code(), error.to_string()).into_pyobject(py)?;
        gate::call(BUILD.import(py, "rstream._errors", "build")?, &args, None)
    };
    match build() {
        Ok(value) => PyErr::from_value(value),
        // The last report of all comes when the interpreter has no modules any more.
        Err(_) if gate::is_closed() => PyRuntimeError::new_err(error.to_string()),
        Err(failure) => failure,
    }
}

/// A core's result as Python's.
pub(super) trait PyResultExt<T> {
    fn py(self, py: Python<'_>) -> PyResult<T>;
}

impl<T> PyResultExt<T> for Result<T> {
    fn py(self, py: Python<'_>) -> PyResult<T> {
        self.map_err(|error| exception(py, &error))
    }
}
