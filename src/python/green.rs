//! `rstream.GreenContext`.

use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;

use super::call;
use super::device::{DevicePy, device_or_default};
use super::stream::{StreamPy, clamped};
use crate::green::GreenContext;

#[pyclass(name = "GreenContext", module = "rstream", frozen, weakref)]
pub(super) struct GreenContextPy(GreenContext);

#[pymethods]
impl GreenContextPy {
    #[new]
    #[pyo3(signature = (device=None, *, multiprocessors))]
    fn new(py: Python<'_>, device: Option<&Bound<'_, PyAny>>, multiprocessors: u32) -> PyResult<GreenContextPy> {
        let device = device_or_default(device, py)?;
        call(py, move |api| GreenContext::new(api, device, multiprocessors)).map(GreenContextPy)
    }

    #[pyo3(signature = (*, priority=0))]
    fn create_stream(&self, py: Python<'_>, priority: i64) -> PyResult<StreamPy> {
        call(py, |api| self.0.create_stream(api, clamped(priority))).map(StreamPy)
    }

    #[getter]
    fn device(&self) -> DevicePy {
        DevicePy(self.0.device())
    }

    #[getter]
    fn multiprocessors(&self) -> u32 {
        self.0.multiprocessors()
    }

    #[getter]
    fn handle(&self) -> usize {
        self.0.handle()
    }

    fn __repr__(&self) -> String {
        format!("<rstream.GreenContext of {} multiprocessors on device {}>", self.0.multiprocessors(), self.0.device())
    }

    fn __reduce__(&self) -> PyResult<()> {
        Err(PyTypeError::new_err("a GreenContext belongs to this process and cannot be pickled"))
    }
}
