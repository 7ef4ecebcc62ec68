//! `rstream.Stream`.

use std::any::Any;

use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyDict, PyTuple};

use super::attributes::StreamAttributesPy;
use super::call;
use super::capture::{CapturePy, status_name};
use super::completion::CompletionPy;
use super::device::{DevicePy, device_or_default};
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

#[pyclass(name = "Stream", module = "rstream", frozen, weakref)]
pub(super) struct StreamPy(pub(super) Stream);

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
        call(py, move |api| Stream::new(api, device, options)).map(StreamPy)
    }

    #[staticmethod]
    #[pyo3(signature = (device=None))]
    fn legacy_default(py: Python<'_>, device: Option<&Bound<'_, PyAny>>) -> PyResult<StreamPy> {
        let device = device_or_default(device, py)?;
        call(py, move |api| Stream::legacy_default(api, device)).map(StreamPy)
    }

    #[staticmethod]
    #[pyo3(signature = (device=None))]
    fn per_thread_default(py: Python<'_>, device: Option<&Bound<'_, PyAny>>) -> PyResult<StreamPy> {
        let device = device_or_default(device, py)?;
        call(py, move |api| Stream::per_thread_default(api, device)).map(StreamPy)
    }

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
        call(py, move |api| unsafe { Stream::from_raw(api, device, handle, Some(keep)) }).map(StreamPy)
    }

    #[getter]
    fn handle(&self, py: Python<'_>) -> PyResult<usize> {
        self.0.handle().py(py)
    }

    #[getter]
    fn id(&self) -> u64 {
        self.0.id()
    }

    #[getter]
    fn device(&self) -> DevicePy {
        DevicePy(self.0.device())
    }

    #[getter]
    fn priority(&self) -> i32 {
        self.0.priority()
    }

    #[getter]
    fn non_blocking(&self) -> bool {
        self.0.non_blocking()
    }

    #[getter]
    fn context_handle(&self) -> usize {
        self.0.context_handle()
    }

    #[getter]
    fn green_context(&self) -> Option<usize> {
        self.0.green_context()
    }

    #[getter]
    fn signal(&self) -> &'static str {
        match self.0.signal() {
            Signal::Auto => "auto",
            Signal::Memory => "memory",
            Signal::Driver => "driver",
        }
    }

    #[getter]
    fn attributes(&self) -> StreamAttributesPy {
        StreamAttributesPy(self.0.clone())
    }

    fn copy_attributes(&self, py: Python<'_>, from_stream: &StreamPy) -> PyResult<()> {
        call(py, |api| self.0.copy_attributes(api, &from_stream.0))
    }

    #[getter]
    fn closed(&self) -> bool {
        self.0.is_closed()
    }

    #[getter]
    fn pending(&self) -> usize {
        self.0.pending()
    }

    fn query(&self, py: Python<'_>) -> PyResult<bool> {
        call(py, |api| self.0.query(api))
    }

    #[pyo3(signature = (timeout=None))]
    fn synchronize(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<()> {
        let limit = self::timeout(timeout).py(py)?;
        call_interruptibly(py, |api, interrupted| self.0.synchronize(api, limit, interrupted))
    }

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
                adopted = StreamPy::from_external(py, event_or_stream, Some(&device))?.cast_into::<StreamPy>()?;
                &adopted
            }
        };
        let other = other.get();
        call(py, |api| self.0.wait_stream(api, &other.0))
    }

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

    #[getter]
    fn capture_status(&self, py: Python<'_>) -> PyResult<&'static str> {
        call(py, |api| self.0.capture_status(api)).map(status_name)
    }

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

    #[pyo3(signature = (r#fn, /, *args, **kwargs))]
    fn add_callback(
        &self,
        r#fn: &Bound<'_, PyAny>,
        args: &Bound<'_, PyTuple>,
        kwargs: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<CompletionPy> {
        let device = self.0.device();
        self.queue(r#fn, args, kwargs, move |api, stream, job| {
            stream.add_callback(api, move |status: Status| job.run_ordered(device, Some(status)))
        })
    }

    #[pyo3(signature = (r#fn, /, *args, **kwargs))]
    fn launch_host_func(
        &self,
        r#fn: &Bound<'_, PyAny>,
        args: &Bound<'_, PyTuple>,
        kwargs: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<Py<PyAny>> {
        let (py, device) = (r#fn.py(), self.0.device());
        let queued = self.try_queue(r#fn, args, kwargs, move |api, stream, job| {
            stream.launch_host_func(api, move || job.run_ordered(device, None))
        })?;
        match queued {
            // The stream captures: the function becomes a node.
            Err(Error::Capture { status: Status::STREAM_CAPTURE_UNSUPPORTED, .. }) => {
                let node = add_host_node(r#fn, args, kwargs, device, |api, run, label| {
                    self.0.capture_host_func(api, run, label)
                })?;
                Ok(node.into_any())
            }
            queued => Ok(Py::new(py, queued.py(py)?)?.into_any()),
        }
    }

    #[pyo3(signature = (r#fn, /, *args, **kwargs))]
    fn then(
        &self,
        r#fn: &Bound<'_, PyAny>,
        args: &Bound<'_, PyTuple>,
        kwargs: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<CompletionPy> {
        self.queue(r#fn, args, kwargs, |api, stream, job| stream.then(api, move |_api: &Api<'_>| job.run_free()))
    }

    fn completion(&self, py: Python<'_>) -> PyResult<CompletionPy> {
        call(py, |api| self.0.completion(api)).map(CompletionPy::notice)
    }

    fn __await__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        Bound::new(py, self.completion(py)?)?.call_method0("__await__")
    }

    fn copy(slf: &Bound<'_, Self>, dst: &Bound<'_, PyAny>, src: &Bound<'_, PyAny>) -> PyResult<()> {
        let py = slf.py();
        let stream = &slf.get().0;
        let (to, from) = regions(stream.device(), dst, src)?;
        to.wait_for_producer(slf)?;
        from.wait_for_producer(slf)?;
        call(py, move |api| {
            // SAFETY: both are contiguous memory of that size, and kept alive by references to their owners. Who else
            // reads or writes them meanwhile is the caller's concern, as documented, like for any asynchronous copy.
            unsafe { stream.copy_raw(api, to.address, from.address, to.bytes, Buried::new((to.keep, from.keep))) }
        })
    }

    fn fill(slf: &Bound<'_, Self>, dst: &Bound<'_, PyAny>, value: &Bound<'_, PyAny>) -> PyResult<()> {
        let py = slf.py();
        let stream = &slf.get().0;
        let (to, pattern) = filled(stream.device(), dst, value)?;
        to.wait_for_producer(slf)?;
        let count = to.bytes / pattern.len();
        // SAFETY: as in `copy`.
        call(py, move |api| unsafe { stream.fill_raw(api, to.address, pattern, count, Buried::new(to.keep)) })
    }

    fn close(&self) {
        self.0.close();
    }

    fn __enter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    #[pyo3(signature = (*_exception))]
    fn __exit__(&self, _exception: &Bound<'_, PyTuple>) {
        self.0.close();
    }

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
