//! `rstream.Device`.

use pyo3::exceptions::PyTypeError;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyDict, PyMappingProxy};

use super::call;
use super::errors::PyResultExt as _;
use crate::api::Api;
use crate::device::Device;
use crate::error::{Error, Result};

/// A GPU (`Device(0)`) or a software device (`Device("soft")`, `Device("soft:1")`).
///
/// The first use retains the device's primary context (`cuDevicePrimaryCtxRetain`), the one that torch and CuPy
/// use, and keeps it for the life of the process. Devices are equal when they are the same device, and can be
/// hashed and pickled.
///
/// Raises `DriverNotFoundError` without a driver, `InvalidValueError` for a device that there is not, `TypeError`
/// for what names no device.
#[pyclass(name = "Device", module = "rstream", frozen, eq, hash, weakref)]
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct DevicePy(pub(super) Device);

/// The device of an optional argument: a `Device`, what `Device()` takes, or `None` for the default.
pub(super) fn device_or_default(device: Option<&Bound<'_, PyAny>>, py: Python<'_>) -> PyResult<Device> {
    match device {
        None => call(py, Device::default),
        Some(object) => match object.cast::<DevicePy>() {
            Ok(device) => Ok(device.get().0),
            Err(_) => DevicePy::new(object).map(|device| device.0),
        },
    }
}

/// Reserves PyTorch's streams before the first stream of a device that Python gets, where PyTorch is loaded; then `open`.
///
/// PyTorch makes all its streams, 128 of them, when the first is asked for, and holds the GIL. If the driver had to make
/// room for them, it would wait for the callbacks of all streams, and a Python callback for the GIL (seen with a callback
/// of rstream's, and with one of CuPy's).
pub(super) fn with_room_for_torch<T: Send>(
    py: Python<'_>,
    device: Device,
    open: impl FnOnce(&Api<'_>) -> Result<T> + Send,
) -> PyResult<T> {
    /// And some more, which fit into the same memory.
    const STREAMS: usize = 160;
    static MODULES: PyOnceLock<Py<PyDict>> = PyOnceLock::new();
    let modules = MODULES.get_or_try_init(py, || {
        Ok::<_, PyErr>(py.import("sys")?.getattr("modules")?.cast_into::<PyDict>()?.unbind())
    })?;
    let loaded = modules.bind(py).get_item(intern!(py, "torch"))?.is_some_and(|torch| !torch.is_none());
    call(py, move |api| {
        if loaded {
            // What is wrong with the device when there is no room, `open` says.
            device.reserve_streams_once(api, STREAMS);
        }
        open(api)
    })
}

#[pymethods]
impl DevicePy {
    #[new]
    fn new(spec: &Bound<'_, PyAny>) -> PyResult<DevicePy> {
        let py = spec.py();
        if let Ok(device) = spec.cast::<DevicePy>() {
            return Ok(*device.get());
        }
        if let Ok(text) = spec.extract::<String>() {
            return call(py, move |api| Device::parse(api, &text)).map(DevicePy);
        }
        // A number of NumPy's will do; bool is an int to Python, but no device.
        if spec.is_instance_of::<pyo3::types::PyBool>() || !spec.hasattr("__index__")? {
            return Err(PyTypeError::new_err(format!(
                "{} is no device: expected a GPU's number, \"soft\" or \"soft:<number>\"",
                spec.repr()?
            )));
        }
        let ordinal = spec.extract::<u32>().ok();
        let shown = spec.to_string();
        call(py, move |api| match ordinal {
            Some(ordinal) => Device::gpu(api, ordinal),
            None => Err(Error::invalid(format!("no GPU {shown}"))),
        })
        .map(DevicePy)
    }

    /// The name (`cuDeviceGetName`).
    #[getter]
    fn name(&self) -> &'static str {
        self.0.name()
    }

    /// The number among the devices of its driver.
    #[getter]
    fn ordinal(&self) -> u32 {
        self.0.ordinal()
    }

    /// Whether it is a software device.
    #[getter]
    fn is_software(&self) -> bool {
        self.0.is_software()
    }

    /// The newest CUDA version that the driver supports, `(13, 0)` (`cuDriverGetVersion`).
    #[getter]
    fn driver_version(&self) -> (u32, u32) {
        let version = self.0.driver_version();
        (version / 1000, version % 1000 / 10)
    }

    /// Major and minor compute capability, `(9, 0)`.
    #[getter]
    fn compute_capability(&self) -> (i32, i32) {
        self.0.compute_capability()
    }

    /// Least and greatest priority of a stream; lower numbers go first (`cuCtxGetStreamPriorityRange`).
    #[getter]
    fn priority_range(&self) -> (i32, i32) {
        self.0.priority_range()
    }

    /// The handle of the primary context (`CUcontext`).
    #[getter]
    fn context_handle(&self) -> usize {
        self.0.context_handle()
    }

    /// The attributes that matter to streams, by name (`cuDeviceGetAttribute`).
    #[getter]
    fn attributes<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyMappingProxy>> {
        let device = self.0;
        let dict = PyDict::new(py);
        for (name, value) in call(py, move |api| device.attributes(api))? {
            dict.set_item(name, value)?;
        }
        Ok(PyMappingProxy::new(py, dict.as_mapping()))
    }

    /// Free and total memory in bytes (`cuMemGetInfo`).
    fn memory_info(&self, py: Python<'_>) -> PyResult<(usize, usize)> {
        let device = self.0;
        call(py, move |api| device.memory_info(api))
    }

    /// Give memory that collected arrays left in rstream's cache back to the driver; returns its size in bytes.
    ///
    /// Waits for all work that is queued on the device (`cuMemFree`, `cuMemFreeHost`).
    fn free_cached_memory(&self, py: Python<'_>) -> PyResult<usize> {
        let device = self.0;
        call(py, move |api| device.free_cached_memory(api))
    }

    /// Make room in the driver for `count` streams more than there are, 0 to 4096.
    ///
    /// Without room, whoever makes a stream waits for all work of the device, callbacks included, and so do other
    /// threads' calls meanwhile. The driver has room for 35 streams at first; a stream takes about 0.6 MiB, which the
    /// driver keeps (measured on one H200). Where PyTorch is loaded, rstream reserves 160 before the first stream. This
    /// makes that many streams and destroys them, and waits itself if there is no room (`cuStreamCreateWithPriority`,
    /// `cuStreamDestroy`).
    fn reserve_streams(&self, py: Python<'_>, count: i64) -> PyResult<()> {
        let device = self.0;
        let count = usize::try_from(count)
            .map_err(|_| Error::invalid(format!("room for {count} streams: expected 0 or more")))
            .py(py)?;
        call(py, move |api| device.reserve_streams(api, count))
    }

    /// Wait for all work of the context (`cuCtxSynchronize`).
    ///
    /// Releases the GIL, but blocks in the driver: Ctrl-C takes effect afterwards. Raises `DeviceFaultError` after a
    /// fault.
    fn synchronize(&self, py: Python<'_>) -> PyResult<()> {
        let device = self.0;
        call(py, move |api| device.synchronize(api))
    }

    fn __repr__(&self) -> String {
        if self.0.is_software() { format!("Device(\"{}\")", self.0) } else { format!("Device({})", self.0) }
    }

    fn __reduce__<'py>(&self, py: Python<'py>) -> PyResult<(Bound<'py, PyAny>, (Py<PyAny>,))> {
        let spec = if self.0.is_software() {
            self.0.to_string().into_pyobject(py)?.into_any().unbind()
        } else {
            self.0.ordinal().into_pyobject(py)?.into_any().unbind()
        };
        Ok((py.get_type::<DevicePy>().into_any(), (spec,)))
    }
}

/// Every device: the GPUs, if there is a driver, then the software devices.
#[pyfunction]
pub(super) fn devices(py: Python<'_>) -> PyResult<Vec<DevicePy>> {
    Ok(call(py, Device::all)?.into_iter().map(DevicePy).collect())
}

/// The device of the environment variable `RSTREAM_DEVICE`, else GPU 0.
///
/// The software device is never chosen unasked: without a driver, `DriverNotFoundError` names it as a way out.
#[pyfunction]
pub(super) fn default_device(py: Python<'_>) -> PyResult<DevicePy> {
    call(py, Device::default).map(DevicePy)
}
