//! What `rstream.testing` is made of.

use std::sync::Mutex;
use std::time::Duration;

use pyo3::prelude::*;

use super::call;
use super::errors::PyResultExt as _;
use super::stream::StreamPy;
use crate::error::Error;
use crate::testing::{self, Hold, Injection};

fn number(name: &str, value: i64) -> crate::Result<u32> {
    u32::try_from(value).map_err(|_| Error::invalid(format!("{name}={value}: expected 0 to {}", u32::MAX)))
}

/// `rstream.testing.spin`.
#[pyfunction]
pub(super) fn spin(py: Python<'_>, stream: &StreamPy, microseconds: f64) -> PyResult<()> {
    let bad = |_| Error::invalid(format!("microseconds={microseconds}: expected at least 0"));
    let duration = Duration::try_from_secs_f64(microseconds * 1e-6).map_err(bad).py(py)?;
    call(py, |api| testing::spin(api, &stream.0, duration))
}

/// `rstream.testing.fault`.
#[pyfunction]
#[pyo3(signature = (stream, code=700))]
pub(super) fn fault(py: Python<'_>, stream: &StreamPy, code: i64) -> PyResult<()> {
    let code = number("code", code).py(py)?;
    call(py, |api| testing::fault(api, &stream.0, code))
}

/// `rstream.testing.hold`.
#[pyfunction]
pub(super) fn hold(py: Python<'_>, stream: &StreamPy) -> PyResult<HoldPy> {
    call(py, |api| testing::hold(api, &stream.0)).map(HoldPy)
}

/// A stream that waits until this is released.
#[pyclass(name = "Hold", module = "rstream.testing", frozen)]
pub(super) struct HoldPy(Hold);

#[pymethods]
impl HoldPy {
    /// Let the stream go on. May be called anywhere.
    fn release(&self) {
        self.0.release();
    }

    fn __enter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    #[pyo3(signature = (*_exception))]
    fn __exit__(&self, _exception: &Bound<'_, pyo3::types::PyTuple>) {
        self.0.release();
    }
}

/// `rstream.testing.inject`.
#[pyfunction]
#[pyo3(signature = (function, code, nth=1))]
pub(super) fn inject(py: Python<'_>, function: &str, code: i64, nth: i64) -> PyResult<InjectionPy> {
    let (code, nth) = (number("code", code).py(py)?, number("nth", nth).py(py)?);
    testing::inject(function, code, nth).map(|injection| InjectionPy(Mutex::new(Some(injection)))).py(py)
}

/// A failure of the software driver that is to come.
#[pyclass(name = "Injection", module = "rstream.testing", frozen)]
pub(super) struct InjectionPy(Mutex<Option<Injection>>);

#[pymethods]
impl InjectionPy {
    /// Take it back.
    fn close(&self) {
        self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner).take();
    }

    fn __enter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    #[pyo3(signature = (*_exception))]
    fn __exit__(&self, _exception: &Bound<'_, pyo3::types::PyTuple>) {
        self.close();
    }
}
