//! `rstream._core.Memory`: the bytes below the arrays of the package.

use std::ffi::{c_int, c_void};

use pyo3::exceptions::{PyBufferError, PyTypeError};
use pyo3::ffi;
use pyo3::prelude::*;

use super::call;
use super::device::{DevicePy, device_or_default};
use super::errors::PyResultExt as _;
use crate::error::Error;
use crate::memory::{Buffer, BufferKind, ManagedAttach};

/// Bytes in pinned, managed or device memory; the arrays of the package are made of it.
#[pyclass(name = "Memory", module = "rstream._core", frozen, weakref)]
pub(super) struct MemoryPy(pub(super) Buffer);

pub(super) fn kind_name(kind: BufferKind) -> &'static str {
    match kind {
        BufferKind::Pinned => "pinned",
        BufferKind::Managed => "managed",
        BufferKind::Device => "device",
    }
}

#[pymethods]
impl MemoryPy {
    #[new]
    #[pyo3(signature = (kind, nbytes, device=None, attach="global"))]
    fn new(
        py: Python<'_>,
        kind: &str,
        nbytes: usize,
        device: Option<&Bound<'_, PyAny>>,
        attach: &str,
    ) -> PyResult<MemoryPy> {
        let device = device_or_default(device, py)?;
        let attach = match attach {
            "global" => Ok(ManagedAttach::Global),
            "host" => Ok(ManagedAttach::Host),
            other => Err(Error::invalid(format!("attach={other:?}: expected \"global\" or \"host\""))),
        }
        .py(py)?;
        let unknown = Error::invalid(format!("no kind of memory: {kind:?}"));
        call(py, |api| match kind {
            "pinned" => Buffer::pinned(api, device, nbytes),
            "managed" => Buffer::managed(api, device, nbytes, attach),
            "device" => Buffer::device_memory(api, device, nbytes),
            _ => Err(unknown),
        })
        .map(MemoryPy)
    }

    /// Where the bytes are.
    #[getter]
    fn kind(&self) -> &'static str {
        kind_name(self.0.kind())
    }

    /// The address; 0 for no bytes.
    #[getter]
    fn ptr(&self) -> u64 {
        self.0.ptr()
    }

    /// The number of bytes.
    #[getter]
    fn nbytes(&self) -> usize {
        self.0.len()
    }

    /// The device that they were allocated for.
    #[getter]
    fn device(&self) -> DevicePy {
        DevicePy(self.0.device())
    }

    /// The bytes as a writable buffer. It keeps this object, and with it the memory, alive.
    ///
    /// # Safety
    /// `view` is a buffer of the interpreter's.
    unsafe fn __getbuffer__(slf: Bound<'_, Self>, view: *mut ffi::Py_buffer, flags: c_int) -> PyResult<()> {
        let buffer = &slf.get().0;
        if buffer.kind() == BufferKind::Device {
            return Err(PyBufferError::new_err("device memory cannot be read by the host: use to_host()"));
        }
        let len = isize::try_from(buffer.len()).expect("an allocation is no larger than isize::MAX");
        // SAFETY: `view` is valid (the caller's promise). The bytes are host memory of that length, writable, and live as
        // long as `slf`, to which the view takes a reference. Python's rule for shared buffers is that of any array:
        // who writes and reads at the same time sees either.
        let filled = unsafe { ffi::PyBuffer_FillInfo(view, slf.as_ptr(), buffer.ptr() as *mut c_void, len, 0, flags) };
        if filled == 0 { Ok(()) } else { Err(PyErr::fetch(slf.py())) }
    }

    fn __reduce__(&self) -> PyResult<()> {
        Err(PyTypeError::new_err("memory of a device cannot be pickled: pickle a NumPy copy"))
    }
}

/// Kind and device number of an address (`cuPointerGetAttribute`); `None` for plain host memory.
#[pyfunction]
pub(super) fn pointer_info(py: Python<'_>, device: &DevicePy, address: u64) -> PyResult<Option<(&'static str, u32)>> {
    let device = device.0;
    let info = call(py, move |api| crate::memory::pointer_info(api, device, address))?;
    Ok(info.map(|info| (kind_name(info.kind), info.ordinal)))
}
