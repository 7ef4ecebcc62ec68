//! `rstream.GreenContext`.

use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;

use super::call;
use super::device::{DevicePy, device_or_default, with_room_for_torch};
use super::stream::{StreamPy, clamped};
use crate::green::GreenContext;

/// A part of a device's multiprocessors, with streams of its own (`cuGreenCtxCreate`).
///
/// `multiprocessors` is how many it has at least; the driver rounds up, on most devices to a multiple of 8. It lives as
/// long as this object or a stream made in it. Raises `InvalidValueError` for more than the device has,
/// `DriverTooOldError` before CUDA 12.5.
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

    /// A new stream in it, which is non-blocking always (`cuGreenCtxStreamCreate`).
    #[pyo3(signature = (*, priority=0))]
    fn create_stream(&self, py: Python<'_>, priority: i64) -> PyResult<StreamPy> {
        with_room_for_torch(py, self.0.device(), |api| self.0.create_stream(api, clamped(priority))).map(StreamPy)
    }

    /// The device.
    #[getter]
    fn device(&self) -> DevicePy {
        DevicePy(self.0.device())
    }

    /// How many multiprocessors it has.
    #[getter]
    fn multiprocessors(&self) -> u32 {
        self.0.multiprocessors()
    }

    /// The handle (`CUgreenCtx`).
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
