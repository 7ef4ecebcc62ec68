//! Memory of arrays, as copies and fills take it.

use numpy::npyffi::NPY_ARRAY_WRITEABLE;
use numpy::{PyArrayDescrMethods as _, PyUntypedArray, PyUntypedArrayMethods as _};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;

use super::device::DevicePy;
use super::errors::exception;
use super::memory::MemoryPy;
use super::stream::StreamPy;
use crate::device::Device;
use crate::error::Error;
use crate::memory::{BufferKind, Pattern};

/// Contiguous memory of an array: where, how much, and what keeps it alive.
pub(super) struct Region {
    pub(super) address: u64,
    pub(super) bytes: usize,
    writable: bool,
    pub(super) keep: Py<PyAny>,
    /// The stream of another library whose work has to be waited for before it is used.
    producer: Option<usize>,
}

impl Region {
    /// Memory of `object` for work of `device`, whose place is "on a stream" or "in a graph"; `role` is the object's name in
    /// errors.
    fn of(device: Device, place: &str, object: &Bound<'_, PyAny>, role: &str) -> PyResult<Region> {
        let py = object.py();
        let refuse = |what: String| Err(exception(py, &Error::invalid(what)));
        let keep = object.clone().unbind();
        if let Ok(array) = object.cast::<PyUntypedArray>() {
            if !array.is_c_contiguous() {
                return refuse(format!("{role}: a NumPy array of shape {:?} that is not C-contiguous", array.shape()));
            }
            if array.dtype().has_object() {
                return refuse(format!("{role}: an array of dtype {} has no bytes to copy", array.dtype()));
            }
            // SAFETY: the array is alive; reads two fields of its header.
            let (data, flags) = unsafe { ((*array.as_array_ptr()).fields.data, (*array.as_array_ptr()).fields.flags) };
            return Ok(Region {
                address: data as u64,
                bytes: array.len() * array.dtype().itemsize(),
                writable: flags & NPY_ARRAY_WRITEABLE != 0,
                keep,
                producer: None,
            });
        }
        let memory = object.getattr_opt("_memory")?;
        if let Some(memory) = memory.as_ref().and_then(|memory| memory.cast::<MemoryPy>().ok()) {
            let buffer = &memory.get().0;
            let its = buffer.device();
            if its.kind() != device.kind() || buffer.kind() == BufferKind::Device && its != device {
                return refuse(format!("{role}: memory of device {its} {place} of device {device}"));
            }
            // The memory itself is kept, whatever becomes of the array.
            let keep = memory.clone().into_any().unbind();
            return Ok(Region { address: buffer.ptr(), bytes: buffer.len(), writable: true, keep, producer: None });
        }
        static DESCRIBE: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
        let describe = DESCRIBE.import(py, "rstream._interop", "describe")?;
        let (address, bytes, writable, producer): (u64, usize, bool, Option<usize>) =
            describe.call1((DevicePy(device), place, object, role))?.extract()?;
        Ok(Region { address, bytes, writable, keep, producer })
    }

    /// Makes `stream` wait for what the array's owner has queued.
    pub(super) fn wait_for_producer(&self, stream: &Bound<'_, StreamPy>) -> PyResult<()> {
        self.producer.map_or(Ok(()), |producer| stream.call_method1("wait", (producer,)).map(drop))
    }

    /// Waits for what the array's owner has queued, where there is no stream to wait.
    pub(super) fn synchronize_producer(&self, py: Python<'_>, device: Device) -> PyResult<()> {
        let Some(producer) = self.producer else { return Ok(()) };
        let (producer, device) = (producer.into_pyobject(py)?.into_any(), Bound::new(py, DevicePy(device))?.into_any());
        StreamPy::from_external(py, &producer, Some(&device))?.call_method0("synchronize").map(drop)
    }
}

/// The two sides of a copy.
pub(super) fn regions(
    device: Device,
    place: &str,
    dst: &Bound<'_, PyAny>,
    src: &Bound<'_, PyAny>,
) -> PyResult<(Region, Region)> {
    let (to, from) = (Region::of(device, place, dst, "dst")?, Region::of(device, place, src, "src")?);
    let refusal = if !to.writable {
        "dst is read-only".to_owned()
    } else if to.bytes != from.bytes {
        format!("dst has {} bytes and src has {}", to.bytes, from.bytes)
    } else {
        return Ok((to, from));
    };
    Err(exception(dst.py(), &Error::invalid(refusal)))
}

/// What a fill writes to, and with what.
pub(super) fn filled(
    device: Device,
    place: &str,
    dst: &Bound<'_, PyAny>,
    value: &Bound<'_, PyAny>,
) -> PyResult<(Region, Pattern)> {
    static PATTERN: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
    let py = dst.py();
    let (width, bits): (usize, u32) =
        PATTERN.import(py, "rstream._arrays", "pattern")?.call1((dst, value))?.extract()?;
    let to = Region::of(device, place, dst, "dst")?;
    if !to.writable {
        return Err(exception(py, &Error::invalid("dst is read-only")));
    }
    let low = bits.to_le_bytes();
    let pattern = match width {
        1 => Pattern::U8(low[0]),
        2 => Pattern::U16(u16::from_le_bytes([low[0], low[1]])),
        _ => Pattern::U32(bits),
    };
    Ok((to, pattern))
}
