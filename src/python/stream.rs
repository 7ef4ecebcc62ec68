//! `rstream.Stream`.

use std::any::Any;
use std::ffi::c_void;

use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyDict, PyTuple};

use super::attributes::StreamAttributesPy;
use super::awaiting::Await;
use super::call;
use super::capture::{CapturePy, status_name};
use super::completion::CompletionPy;
use super::device::{DevicePy, device_or_default, with_room_for_torch};
use super::errors::{PyResultExt as _, exception};
use super::event::{EventPy, python_bool};
use super::gate::{Buried, drop_attached, refuse_forked};
use super::graph::{GraphPy, NodePy, add_host_node};
use super::memory::MemoryPy;
use super::region::{filled, regions};
use super::worker::{Job, Outcome};
use super::{call_interruptibly, timeout};
use crate::api::Api;
use crate::completion::Completion;
use crate::error::{Error, Refused, Result, Status};
use crate::event::{Event, EventOptions};
use crate::memory::Attach;
use crate::stream::{Signal, Stream, StreamOptions};

/// A priority as the driver takes it, which clamps it to its range; this makes the number fit its int.
pub(super) fn clamped(priority: i64) -> i32 {
    i32::try_from(priority).unwrap_or(if priority < 0 { i32::MIN } else { i32::MAX })
}

/// A queue of work for a device (`cuStreamCreateWithPriority`).
///
/// `device` is a `Device` or what `Device()` takes; by default `default_device()`. A stream is non-blocking unless
/// asked otherwise: it does not synchronize with the legacy default stream. `priority` is clamped to
/// `device.priority_range`. `signal` says how the host is told that a point was reached: `"memory"` by a number that
/// the stream writes, `"driver"` by the driver's own callbacks, `"auto"` by the first on a GPU that can.
///
/// What a stream knows about itself is read once, so its properties, `repr`, `==` and `hash` never call the driver.
/// Every method that calls the driver releases the GIL, and raises `NotPermittedError` inside a callback or host
/// function, `ClosedError` on a closed stream and, where it has no form in a capture, `CaptureUnsupportedError`
/// while the stream captures.
#[pyclass(name = "Stream", module = "rstream", frozen, weakref)]
pub(super) struct StreamPy(pub(super) Stream);

/// Where memory of copies and fills is used, in errors.
const PLACE: &str = "on a stream";

/// What `add_native_callback` calls.
type NativeFunction = unsafe extern "C" fn(*mut c_void);
type NativeCallback = unsafe extern "C" fn(u32, *mut c_void);

/// The address of a function, as an integer.
fn native_address(function: &Bound<'_, PyAny>) -> PyResult<usize> {
    let py = function.py();
    function.extract().map_err(|error: PyErr| {
        if !error.is_instance_of::<PyTypeError>(py) {
            return error;
        }
        let kind = function.get_type().name().map_or_else(|_| "this".into(), |name| name.to_string());
        PyTypeError::new_err(format!(
            "a {kind} is no address: expected an integer, of a ctypes function f ctypes.cast(f, ctypes.c_void_p).value"
        ))
    })
}

impl StreamPy {
    /// Queues a Python callable by `enqueue`. When that is refused the callable and its arguments are let go of before
    /// the exception is raised.
    fn queue<F: Send>(
        &self,
        function: &Bound<'_, PyAny>,
        args: &Bound<'_, PyTuple>,
        kwargs: Option<&Bound<'_, PyDict>>,
        enqueue: impl FnOnce(&Api<'_>, &Stream, Job) -> Result<Completion<Outcome>, Refused<F>> + Send,
    ) -> PyResult<CompletionPy> {
        self.try_queue(function, args, kwargs, enqueue)?.py(function.py())
    }

    fn try_queue<F: Send>(
        &self,
        function: &Bound<'_, PyAny>,
        args: &Bound<'_, PyTuple>,
        kwargs: Option<&Bound<'_, PyDict>>,
        enqueue: impl FnOnce(&Api<'_>, &Stream, Job) -> Result<Completion<Outcome>, Refused<F>> + Send,
    ) -> PyResult<Result<CompletionPy>> {
        let py = function.py();
        refuse_forked()?;
        // Left here when this thread may not call at all.
        let mut job = Some(Job::new(function, args, kwargs)?);
        let queued = py.detach(|| {
            Api::attach(|api| enqueue(api, &self.0, job.take().expect("put there above, and this is called once")))
        });
        let error = match queued {
            Ok(Ok(completion)) => return Ok(Ok(CompletionPy::call(completion))),
            Ok(Err(Refused { error, returned })) => {
                drop_attached(py, returned);
                error
            }
            Err(error) => error,
        };
        drop_attached(py, job);
        Ok(Err(error))
    }
}

#[pymethods]
impl StreamPy {
    #[new]
    #[pyo3(signature = (device=None, *, non_blocking=true, priority=0, signal="auto"))]
    fn new(
        py: Python<'_>,
        device: Option<&Bound<'_, PyAny>>,
        non_blocking: bool,
        priority: i64,
        signal: &str,
    ) -> PyResult<StreamPy> {
        let priority = clamped(priority);
        let signal = match signal {
            "auto" => Ok(Signal::Auto),
            "driver" => Ok(Signal::Driver),
            "memory" => Ok(Signal::Memory),
            other => Err(Error::invalid(format!("signal={other:?}: expected \"auto\", \"memory\" or \"driver\""))),
        }
        .py(py)?;
        let device = device_or_default(device, py)?;
        let options = StreamOptions { non_blocking, priority, signal };
        with_room_for_torch(py, device, move |api| Stream::new(api, device, options)).map(StreamPy)
    }

    /// The legacy default stream (`CU_STREAM_LEGACY`), which blocking streams and it wait for each other.
    #[staticmethod]
    #[pyo3(signature = (device=None))]
    fn legacy_default(py: Python<'_>, device: Option<&Bound<'_, PyAny>>) -> PyResult<StreamPy> {
        let device = device_or_default(device, py)?;
        with_room_for_torch(py, device, move |api| Stream::legacy_default(api, device)).map(StreamPy)
    }

    /// The default stream of this thread (`CU_STREAM_PER_THREAD`).
    ///
    /// Use on another thread raises `InvalidValueError`.
    #[staticmethod]
    #[pyo3(signature = (device=None))]
    fn per_thread_default(py: Python<'_>, device: Option<&Bound<'_, PyAny>>) -> PyResult<StreamPy> {
        let device = device_or_default(device, py)?;
        with_room_for_torch(py, device, move |api| Stream::per_thread_default(api, device)).map(StreamPy)
    }

    /// A stream of another library, which is kept alive and never destroyed by rstream.
    ///
    /// `obj` has `__cuda_stream__`, or is a stream of torch, CuPy or Numba, or a handle as an integer, which then has
    /// to stay valid. Raises `TypeError` for what is no stream, `InvalidValueError` for a stream of another context
    /// than the device's primary one.
    #[staticmethod]
    #[pyo3(signature = (obj, device=None))]
    pub(super) fn from_external<'py>(
        py: Python<'py>,
        obj: &Bound<'py, PyAny>,
        device: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        static ADOPT: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
        ADOPT.import(py, "rstream._interop", "adopt")?.call1((obj, device))
    }

    /// A stream by its handle; `keep` lives as long as it.
    #[staticmethod]
    fn _adopt(py: Python<'_>, handle: usize, device: &DevicePy, keep: Py<PyAny>) -> PyResult<StreamPy> {
        let device = device.0;
        let keep: Box<dyn Any + Send + Sync> = Box::new(keep);
        // SAFETY: that the handle is alive as long as `keep` is what the protocols say that it was read from, and for a
        // bare number the documented duty of the caller.
        with_room_for_torch(py, device, move |api| unsafe { Stream::from_raw(api, device, handle, Some(keep)) })
            .map(StreamPy)
    }

    /// The handle (`CUstream`). Raises `ClosedError` on a closed stream.
    #[getter]
    fn handle(&self, py: Python<'_>) -> PyResult<usize> {
        self.0.handle().py(py)
    }

    /// A number that no other stream of the process ever has (`cuStreamGetId`).
    #[getter]
    fn id(&self) -> u64 {
        self.0.id()
    }

    /// The device.
    #[getter]
    fn device(&self) -> DevicePy {
        DevicePy(self.0.device())
    }

    /// The priority, as the driver clamped it (`cuStreamGetPriority`).
    #[getter]
    fn priority(&self) -> i32 {
        self.0.priority()
    }

    /// Whether it does not synchronize with the legacy default stream (`cuStreamGetFlags`).
    #[getter]
    fn non_blocking(&self) -> bool {
        self.0.non_blocking()
    }

    /// The handle of its context (`cuStreamGetCtx_v2`).
    #[getter]
    fn context_handle(&self) -> usize {
        self.0.context_handle()
    }

    /// The handle of its green context, if it is of one (`cuStreamGetCtx_v2`).
    #[getter]
    fn green_context(&self) -> Option<usize> {
        self.0.green_context()
    }

    /// How the host is told that a point was reached; never `"auto"`. The same for all handles of a stream.
    #[getter]
    fn signal(&self) -> &'static str {
        match self.0.signal() {
            Signal::Auto => "auto",
            Signal::Memory => "memory",
            Signal::Driver => "driver",
        }
    }

    /// Its attributes, to be read and set (`cuStreamGetAttribute`, `cuStreamSetAttribute`).
    #[getter]
    fn attributes(&self) -> StreamAttributesPy {
        StreamAttributesPy(self.0.clone())
    }

    /// Take over all attributes of another stream, its priority included (`cuStreamCopyAttributes`).
    ///
    /// Raises `InvalidValueError` for a stream of another device.
    fn copy_attributes(&self, py: Python<'_>, from_stream: &StreamPy) -> PyResult<()> {
        call(py, |api| self.0.copy_attributes(api, &from_stream.0))
    }

    /// Whether it was closed.
    #[getter]
    fn closed(&self) -> bool {
        self.0.is_closed()
    }

    /// How many pieces of host code were queued through this object and have not ended.
    ///
    /// A cancelled one ends when the stream gets there.
    #[getter]
    fn pending(&self) -> usize {
        self.0.pending()
    }

    /// Whether all queued work is done (`cuStreamQuery`). Raises `DeviceFaultError` after a fault.
    fn query(&self, py: Python<'_>) -> PyResult<bool> {
        call(py, |api| self.0.query(api))
    }

    /// Wait until all work queued so far is done.
    ///
    /// `timeout` is in seconds; when it runs out, `WaitTimeoutError` (a `TimeoutError`) is raised, and the stream can
    /// be waited for again. Ctrl-C ends the wait. Raises `InvalidValueError` for a negative time-out,
    /// `DeviceFaultError` after a fault.
    #[pyo3(signature = (timeout=None))]
    fn synchronize(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<()> {
        let limit = self::timeout(timeout).py(py)?;
        call_interruptibly(py, |api, interrupted| self.0.synchronize(api, limit, interrupted))
    }

    /// Make later work wait for an event, or for all that is queued on another stream so far (`cuStreamWaitEvent`).
    ///
    /// If the other stream captures, or the event was recorded in a capture, this stream takes part in that capture
    /// from then on. A stream that captures can wait for what is in its own capture only, or with `external=True` for
    /// an event as it is recorded at each launch of the graph (`CU_EVENT_WAIT_EXTERNAL`). Raises a `CaptureError` that
    /// says which rule would have been broken.
    #[pyo3(signature = (event_or_stream, *, external=false))]
    fn wait(&self, py: Python<'_>, event_or_stream: &Bound<'_, PyAny>, external: bool) -> PyResult<()> {
        if let Ok(event) = event_or_stream.cast::<EventPy>() {
            let event = &event.get().0;
            return call(
                py,
                |api| {
                    if external { self.0.wait_external(api, event) } else { self.0.wait_event(api, event) }
                },
            );
        }
        if external {
            return Err(PyTypeError::new_err("external=True is for events"));
        }
        let adopted;
        let other = match event_or_stream.cast::<StreamPy>() {
            Ok(stream) => stream,
            Err(_) => {
                let device = Bound::new(py, DevicePy(self.0.device()))?.into_any();
                let found = StreamPy::from_external(py, event_or_stream, Some(&device)).map_err(|error| {
                    if !error.is_instance_of::<PyTypeError>(py) {
                        return error;
                    }
                    let kind = event_or_stream.get_type();
                    let name = kind.name().map_or_else(|_| "this".into(), |name| name.to_string());
                    PyTypeError::new_err(format!(
                        "cannot wait for a {name}: expected an Event, a Stream, a stream of another library, or a handle"
                    ))
                });
                adopted = found?.cast_into::<StreamPy>()?;
                &adopted
            }
        };
        let other = other.get();
        call(py, |api| self.0.wait_stream(api, &other.0))
    }

    /// Record `event`, or a new one, behind all that is queued so far (`cuEventRecord`), and return it.
    ///
    /// While the stream captures, the event stands for what was captured so far: streams can wait for it, the host
    /// cannot. With `external=True` it is recorded at each launch of the graph (`CU_EVENT_RECORD_EXTERNAL`). Raises
    /// `InvalidValueError` for an event of another device.
    #[pyo3(signature = (event=None, *, external=false))]
    fn record<'py>(
        &self,
        py: Python<'py>,
        event: Option<Bound<'py, EventPy>>,
        external: bool,
    ) -> PyResult<Bound<'py, EventPy>> {
        let event = match event {
            Some(event) => event,
            None => {
                let device = self.0.device();
                Bound::new(py, EventPy(call(py, move |api| Event::new(api, device, EventOptions::default()))?))?
            }
        };
        let raw = &event.get().0;
        call(py, |api| if external { self.0.record_external(api, raw) } else { self.0.record(api, raw) })?;
        Ok(event)
    }

    /// A capture of this stream, to be begun by `with`: what is queued inside becomes nodes of a graph.
    ///
    /// `mode` says which 'potentially unsafe' calls (`cudaMalloc`, `cudaEventQuery`, …) break the capture while it
    /// lasts: those of this thread and of others (`"global"`), of this thread (`"thread_local"`), or none
    /// (`"relaxed"`). What rstream itself calls never does. With `graph`, nodes go into that graph, the first ones
    /// behind its nodes `dependencies`. Those that were captured before it is abandoned stay; if the capture breaks, or
    /// ends with work that was not joined, that graph is gone (`cuStreamBeginCapture`, `cuStreamBeginCaptureToGraph`).
    #[pyo3(signature = (*, mode="global", graph=None, dependencies=None))]
    fn capture(
        &self,
        py: Python<'_>,
        mode: &str,
        graph: Option<&GraphPy>,
        dependencies: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<CapturePy> {
        CapturePy::new(py, self.0.clone(), mode, graph, dependencies)
    }

    /// Whether the stream takes part in a capture, whoever began it (`cuStreamIsCapturing`). Never disturbs one.
    ///
    /// Raises `CaptureImplicitError` for the legacy default stream while a blocking stream captures.
    #[getter]
    fn capture_status(&self, py: Python<'_>) -> PyResult<&'static str> {
        call(py, |api| self.0.capture_status(api)).map(status_name)
    }

    /// The capture that the stream takes part in (`cuStreamGetCaptureInfo`), or None. Never disturbs one.
    #[getter]
    fn capture_info(&self, py: Python<'_>) -> PyResult<Option<Py<PyAny>>> {
        static CLASS: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
        let Some(info) = call(py, |api| self.0.capture_info(api))? else { return Ok(None) };
        let nodes =
            info.dependencies.into_iter().map(|node| Py::new(py, NodePy(node))).collect::<PyResult<Vec<_>>>()?;
        let nodes = PyTuple::new(py, nodes)?;
        let class = CLASS.import(py, "rstream._capture", "CaptureInfo")?;
        class.call1((info.id, info.graph, nodes)).map(|info| Some(info.unbind()))
    }

    /// Say to whom managed memory belongs from this point of the stream on (`cuStreamAttachMemAsync`).
    ///
    /// `"single"`: to this stream alone, `"global"`: to all, `"host"`: to none on a device without concurrent managed
    /// access. The driver takes it back when the stream goes, and rstream when the array does. On every device, memory
    /// that is attached to one stream may be read and written inside that stream's callbacks, as NumPy. Raises
    /// `InvalidValueError` for `"single"` on the legacy default stream, `TypeError` for another array.
    fn attach(&self, py: Python<'_>, array: &Bound<'_, PyAny>, attach: &str) -> PyResult<()> {
        let to = match attach {
            "global" => Attach::Global,
            "host" => Attach::Host,
            "single" => Attach::Single,
            other => {
                let what = format!("attach={other:?}: expected \"global\", \"host\" or \"single\"");
                return Err(exception(py, &Error::invalid(what)));
            }
        };
        let memory = array.getattr_opt("_memory")?;
        let Some(memory) = memory.as_ref().and_then(|memory| memory.cast::<MemoryPy>().ok()) else {
            return Err(PyTypeError::new_err(format!(
                "{} cannot be attached: expected a ManagedArray (managed_empty)",
                array.get_type().name()?
            )));
        };
        let buffer = memory.get().0.clone();
        call(py, move |api| self.0.attach_memory(api, &buffer, to))
    }

    /// Queue a callback: `fn(status, *args, **kwargs)` runs once when all work before is done.
    ///
    /// Later work waits until it returns. After a device fault it runs too, with the fault's status. It must not call
    /// the API (`cuStreamAddCallback`). When the enqueue fails, its references are dropped before the exception is
    /// raised.
    #[pyo3(signature = (r#fn, /, *args, **kwargs))]
    fn add_callback(
        &self,
        r#fn: &Bound<'_, PyAny>,
        args: &Bound<'_, PyTuple>,
        kwargs: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<CompletionPy> {
        self.queue(r#fn, args, kwargs, move |api, stream, job| {
            stream.add_callback(api, move |status: Status| job.run_ordered(Some(status)))
        })
    }

    /// Queue a host function: `fn(*args, **kwargs)` runs once when all work before is done.
    ///
    /// Later work waits until it returns. It must not call the API. After a device fault it does not run, and its
    /// completion raises the error (`cuStreamAddCallback`, since `cuLaunchHostFunc` would not tell).
    ///
    /// While the stream captures, whoever began that, it becomes a node instead, which runs once for each launch, and a
    /// `HostNode` is returned: as by `Capture.launch_host_func`.
    #[pyo3(signature = (r#fn, /, *args, **kwargs))]
    fn launch_host_func(
        &self,
        r#fn: &Bound<'_, PyAny>,
        args: &Bound<'_, PyTuple>,
        kwargs: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<Py<PyAny>> {
        let py = r#fn.py();
        let queued = self.try_queue(r#fn, args, kwargs, move |api, stream, job| {
            stream.launch_host_func(api, move || job.run_ordered(None))
        })?;
        match queued {
            // The stream captures: the function becomes a node.
            Err(Error::Capture { status: Status::STREAM_CAPTURE_UNSUPPORTED, .. }) => {
                let node =
                    add_host_node(r#fn, args, kwargs, |api, run, label| self.0.capture_host_func(api, run, label))?;
                Ok(node.into_any())
            }
            queued => Ok(Py::new(py, queued.py(py)?)?.into_any()),
        }
    }

    /// Queue a continuation: `fn(*args, **kwargs)` runs once on a worker thread when all work before is done.
    ///
    /// The stream does not wait for it, and it may call the API. The continuations of a stream run in order. After a
    /// device fault it does not run, and its completion raises the error.
    #[pyo3(signature = (r#fn, /, *args, **kwargs))]
    fn then(
        &self,
        r#fn: &Bound<'_, PyAny>,
        args: &Bound<'_, PyTuple>,
        kwargs: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<CompletionPy> {
        self.queue(r#fn, args, kwargs, |api, stream, job| stream.then(api, move |_api: &Api<'_>| job.run_free()))
    }

    /// Queue a native function: it runs once when all work before is done, without the GIL.
    ///
    /// `address` is that of a C function `void f(void *user_data)`, or with `status=True` `void f(uint32_t status, void
    /// *user_data)`: from ctypes, cffi, a Numba `@cfunc` or a library. Later work waits until it returns. It must not
    /// call the API. With `status` it runs after a device fault too, with the code of the fault; without, it does not
    /// run then, and its completion raises the error. `keep_alive` is kept until it has run. A wrong address crashes
    /// the process. Raises `InvalidValueError` for address 0.
    #[pyo3(signature = (address, user_data=0, *, keep_alive=None, status=false))]
    fn add_native_callback(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = native_address)] address: usize,
        user_data: usize,
        keep_alive: Option<Py<PyAny>>,
        status: bool,
    ) -> PyResult<CompletionPy> {
        if address == 0 {
            return Err(exception(py, &Error::invalid("address=0 is no function")));
        }
        let keep = keep_alive.map(Buried::new);
        let queued = call(py, move |api| {
            if status {
                let run = move |status: Status| {
                    // SAFETY: the address is that of such a function, which is the caller's duty, as documented.
                    let f: NativeCallback = unsafe { std::mem::transmute(address) };
                    // SAFETY: as above.
                    unsafe { f(status.code(), user_data as *mut c_void) };
                    drop(keep);
                };
                Ok(self.0.add_callback(api, run)?)
            } else {
                let run = move || {
                    // SAFETY: the address is that of such a function, which is the caller's duty, as documented.
                    let f: NativeFunction = unsafe { std::mem::transmute(address) };
                    // SAFETY: as above.
                    unsafe { f(user_data as *mut c_void) };
                    drop(keep);
                };
                Ok(self.0.launch_host_func(api, run)?)
            }
        });
        queued.map(CompletionPy::notice)
    }

    /// A completion that resolves when all work queued so far is done: at once if it is (`cuStreamQuery`).
    fn completion(&self, py: Python<'_>) -> PyResult<CompletionPy> {
        call(py, |api| self.0.completion(api)).map(CompletionPy::notice)
    }

    fn __await__(&self, py: Python<'_>) -> PyResult<Await> {
        Ok(Await::new(Py::new(py, self.completion(py)?)?))
    }

    /// Queue a copy of all bytes of `src` to `dst` (`cuMemcpyAsync`).
    ///
    /// Both are kept alive until it is done, or, while the stream captures, as long as the graph.
    ///
    /// Each is a C-contiguous NumPy array, an array of rstream, or an object with `__cuda_array_interface__`; they have
    /// the same number of bytes, whatever their shapes and dtypes. A copy from ordinary (pageable) NumPy memory reads
    /// it before the call returns or soon after; one into it returns when the copy is done. Raises `InvalidValueError`
    /// for sizes that differ, a read-only `dst`, memory that is not contiguous or of another device; `TypeError` for
    /// another object.
    fn copy(slf: &Bound<'_, Self>, dst: &Bound<'_, PyAny>, src: &Bound<'_, PyAny>) -> PyResult<()> {
        let py = slf.py();
        let stream = &slf.get().0;
        let (to, from) = regions(stream.device(), PLACE, dst, src)?;
        to.wait_for_producer(slf)?;
        from.wait_for_producer(slf)?;
        call(py, move |api| {
            // SAFETY: both are contiguous memory of that size, and kept alive by references to their owners. Who else
            // reads or writes them meanwhile is the caller's concern, as documented, like for any asynchronous copy.
            unsafe { stream.copy_raw(api, to.address, from.address, to.bytes, Buried::new((to.keep, from.keep))) }
        })
    }

    /// Queue that every element of `dst` is set to `value`, cast to its dtype (`cuMemsetD8Async` and its kin).
    ///
    /// The element's bytes have to be one value of 1, 2 or 4 bytes, or repeat it. Raises `InvalidValueError` otherwise.
    fn fill(slf: &Bound<'_, Self>, dst: &Bound<'_, PyAny>, value: &Bound<'_, PyAny>) -> PyResult<()> {
        let py = slf.py();
        let stream = &slf.get().0;
        let (to, pattern) = filled(stream.device(), PLACE, dst, value)?;
        to.wait_for_producer(slf)?;
        let count = to.bytes / pattern.len();
        // SAFETY: as in `copy`.
        call(py, move |api| unsafe { stream.fill_raw(api, to.address, pattern, count, Buried::new(to.keep)) })
    }

    /// Give the stream up (`cuStreamDestroy`), without waiting: queued work still runs.
    fn close(&self, py: Python<'_>) {
        py.detach(|| self.0.close());
    }

    fn __enter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    #[pyo3(signature = (*_exception))]
    fn __exit__(&self, _exception: &Bound<'_, PyTuple>) {
        self.close(_exception.py());
    }

    /// The protocol by which other libraries take the stream: `(0, handle)`.
    fn __cuda_stream__(&self, py: Python<'_>) -> PyResult<(u32, usize)> {
        Ok((0, self.0.handle().py(py)?))
    }

    fn __eq__(&self, other: &Bound<'_, PyAny>) -> bool {
        other.cast::<StreamPy>().is_ok_and(|other| other.get().0 == self.0)
    }

    fn __hash__(&self) -> u64 {
        // The id is unique in a driver, and streams of two drivers may share a hash.
        self.0.id()
    }

    fn __repr__(&self) -> String {
        format!(
            "<rstream.Stream {} on device {}, priority={}, non_blocking={}{}>",
            self.0.id(),
            self.0.device(),
            self.0.priority(),
            python_bool(self.0.non_blocking()),
            if self.0.is_closed() { " closed" } else { "" }
        )
    }

    fn __reduce__(&self) -> PyResult<()> {
        Err(PyTypeError::new_err("a Stream belongs to this process and cannot be pickled"))
    }
}
