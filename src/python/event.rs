//! `rstream.Event`.

use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;

use super::completion::CompletionPy;
use super::device::{DevicePy, device_or_default};
use super::errors::PyResultExt as _;
use super::stream::StreamPy;
use super::{call, call_interruptibly, timeout};
use crate::event::{Event, EventOptions};

#[pyclass(name = "Event", module = "rstream", frozen, weakref)]
pub(super) struct EventPy(pub(super) Event);

#[pymethods]
impl EventPy {
    #[new]
    #[pyo3(signature = (device=None, *, timing=false, blocking_sync=false, interprocess=false))]
    fn new(
        py: Python<'_>,
        device: Option<&Bound<'_, PyAny>>,
        timing: bool,
        blocking_sync: bool,
        interprocess: bool,
    ) -> PyResult<EventPy> {
        let device = device_or_default(device, py)?;
        let options = EventOptions { timing, blocking_sync, interprocess };
        call(py, move |api| Event::new(api, device, options)).map(EventPy)
    }

    #[getter]
    fn device(&self) -> DevicePy {
        DevicePy(self.0.device())
    }

    #[getter]
    fn timing(&self) -> bool {
        self.0.options().timing
    }

    #[getter]
    fn blocking_sync(&self) -> bool {
        self.0.options().blocking_sync
    }

    #[getter]
    fn interprocess(&self) -> bool {
        self.0.options().interprocess
    }

    #[getter]
    fn handle(&self, py: Python<'_>) -> PyResult<usize> {
        self.0.handle().py(py)
    }

    #[getter]
    fn closed(&self) -> bool {
        self.0.is_closed()
    }

    fn record(&self, py: Python<'_>, stream: &StreamPy) -> PyResult<()> {
        call(py, |api| stream.0.record(api, &self.0))
    }

    fn query(&self, py: Python<'_>) -> PyResult<bool> {
        call(py, |api| self.0.query(api))
    }

    #[pyo3(signature = (timeout=None))]
    fn synchronize(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<()> {
        let limit = self::timeout(timeout).py(py)?;
        call_interruptibly(py, |api, interrupted| self.0.synchronize(api, limit, interrupted))
    }

    fn elapsed_since(&self, py: Python<'_>, earlier: &EventPy) -> PyResult<f32> {
        call(py, |api| self.0.elapsed_since(api, &earlier.0))
    }

    fn completion(&self, py: Python<'_>) -> PyResult<CompletionPy> {
        call(py, |api| self.0.completion(api)).map(CompletionPy::notice)
    }

    fn __await__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        Bound::new(py, self.completion(py)?)?.call_method0("__await__")
    }

    fn close(&self) {
        self.0.close();
    }

    fn __enter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    #[pyo3(signature = (*_exception))]
    fn __exit__(&self, _exception: &Bound<'_, pyo3::types::PyTuple>) {
        self.0.close();
    }

    fn __repr__(&self) -> String {
        let options = self.0.options();
        let closed = if self.0.is_closed() { " closed" } else { "" };
        format!("<rstream.Event on device {}, timing={}{closed}>", self.0.device(), python_bool(options.timing))
    }

    fn __reduce__(&self) -> PyResult<()> {
        Err(PyTypeError::new_err("an Event belongs to this process and cannot be pickled"))
    }
}

pub(super) fn python_bool(value: bool) -> &'static str {
    if value { "True" } else { "False" }
}
