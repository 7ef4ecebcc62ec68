//! `rstream.Event`.

use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;

use super::awaiting::Await;
use super::completion::CompletionPy;
use super::device::{DevicePy, device_or_default};
use super::errors::PyResultExt as _;
use super::stream::StreamPy;
use super::{call, call_interruptibly, timeout};
use crate::event::{Event, EventOptions};

/// A mark that is recorded in a stream and reached when the work before it is done (`cuEventCreate`).
///
/// `timing`: take timestamps for `elapsed_since`. `blocking_sync`: other libraries' waits for it sleep instead of
/// spinning. `interprocess`: it can be shared; needs `timing=False`, else `InvalidValueError`.
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

    /// The device.
    #[getter]
    fn device(&self) -> DevicePy {
        DevicePy(self.0.device())
    }

    /// Whether it takes timestamps.
    #[getter]
    fn timing(&self) -> bool {
        self.0.options().timing
    }

    /// Whether waits for it in the driver sleep.
    #[getter]
    fn blocking_sync(&self) -> bool {
        self.0.options().blocking_sync
    }

    /// Whether it can be shared with other processes.
    #[getter]
    fn interprocess(&self) -> bool {
        self.0.options().interprocess
    }

    /// The handle (`CUevent`), for other libraries, which may record the event from then on.
    ///
    /// While a completion of it is pending, the first reading makes a stream that waits for it. That may block, and
    /// raises what the driver answers, or `NotPermittedError` in a callback. Raises `ClosedError` on a closed event.
    #[getter]
    fn handle(&self, py: Python<'_>) -> PyResult<usize> {
        py.detach(|| self.0.handle()).py(py)
    }

    /// Whether it was closed.
    #[getter]
    fn closed(&self) -> bool {
        self.0.is_closed()
    }

    /// Record it behind all that is queued on `stream` so far (`cuEventRecord`).
    fn record(&self, py: Python<'_>, stream: &StreamPy) -> PyResult<()> {
        call(py, |api| stream.0.record(api, &self.0))
    }

    /// Whether it was reached, or was never recorded (`cuEventQuery`).
    ///
    /// Raises `DeviceFaultError` after a fault, `CapturedEventError` if it was last recorded in a capture.
    fn query(&self, py: Python<'_>) -> PyResult<bool> {
        call(py, |api| self.0.query(api))
    }

    /// Wait until the record of this moment is reached, at most `timeout` seconds. As `Stream.synchronize`.
    ///
    /// Once `handle` was read, or a graph has the event, a later record takes its place.
    #[pyo3(signature = (timeout=None))]
    fn synchronize(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<()> {
        let limit = self::timeout(timeout).py(py)?;
        call_interruptibly(py, |api, interrupted| self.0.synchronize(api, limit, interrupted))
    }

    /// Milliseconds from `earlier` to this event (`cuEventElapsedTime`); negative if this one was reached first.
    ///
    /// Raises `InvalidValueError` for events without timing, `InvalidHandleError` for one that was not recorded,
    /// `CudaError` (600) for one that was not reached.
    fn elapsed_since(&self, py: Python<'_>, earlier: &EventPy) -> PyResult<f32> {
        call(py, |api| self.0.elapsed_since(api, &earlier.0))
    }

    /// A completion that resolves when the record of this moment is reached; at once if there is none.
    ///
    /// The polling thread asks for it (`cuEventQuery`). Once `handle` was read, or a graph has the event, a stream
    /// of its own waits for it instead (`cuStreamWaitEvent`), since others may record it anew. To make one may block:
    /// see `Device.reserve_streams`.
    fn completion(&self, py: Python<'_>) -> PyResult<CompletionPy> {
        call(py, |api| self.0.completion(api)).map(CompletionPy::notice)
    }

    fn __await__(&self, py: Python<'_>) -> PyResult<Await> {
        Ok(Await::new(Py::new(py, self.completion(py)?)?))
    }

    /// Give the event up (`cuEventDestroy`). Waits that are queued for it are not affected.
    fn close(&self, py: Python<'_>) {
        py.detach(|| self.0.close());
    }

    fn __enter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    #[pyo3(signature = (*_exception))]
    fn __exit__(&self, _exception: &Bound<'_, pyo3::types::PyTuple>) {
        self.close(_exception.py());
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
