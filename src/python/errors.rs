//! Errors of the core as Python exceptions. The classes are Python's, in `rstream._errors`.

use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;

use crate::error::{Error, Result};

/// The kind that `rstream._errors` chooses a class by; an empty one means by the code.
fn kind(error: &Error) -> &'static str {
    match error {
        Error::NoDriver { .. } => "no_driver",
        Error::DriverTooOld { .. } => "too_old",
        Error::Closed { .. } => "closed",
        Error::Timeout { .. } => "timeout",
        Error::Cancelled => "cancelled",
        Error::Shutdown => "shutdown",
        _ => "",
    }
}

/// The exception for an error of the core.
pub(super) fn exception(py: Python<'_>, error: &Error) -> PyErr {
    static BUILD: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
    let build = BUILD.import(py, "rstream._errors", "build");
    match build.and_then(|build| build.call1((kind(error), error.status().code(), error.to_string()))) {
        Ok(value) => PyErr::from_value(value),
        Err(error) => error,
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
