//! `rstream.Capture`.

use std::sync::{Mutex, MutexGuard, PoisonError};

use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};

use super::errors::{PyResultExt as _, exception};
use super::graph::{GraphPy, HostNodePy, NodePy, add_host_node, nodes_of};
use super::stream::StreamPy;
use super::{call, gate};
use crate::capture::{self, CaptureMode, CaptureStatus, RawCapture, Update};
use crate::driver::Driver;
use crate::error::{Error, Status};
use crate::graph::{Graph, Node, Owner};
use crate::stream::Stream;

const MODES: [(&str, CaptureMode); 3] =
    [("global", CaptureMode::Global), ("thread_local", CaptureMode::ThreadLocal), ("relaxed", CaptureMode::Relaxed)];

pub(super) fn status_name(status: CaptureStatus) -> &'static str {
    match status {
        CaptureStatus::None => "none",
        CaptureStatus::Active => "active",
        CaptureStatus::Invalidated => "invalidated",
    }
}

enum State {
    Unbegun,
    /// By another thread, at this moment.
    Beginning,
    Active(RawCapture),
    Ended(Graph),
    /// Abandoned, or broken.
    Over,
}

/// A capture of a stream into a graph, made by `Stream.capture` and begun by `with`.
///
/// Left without an exception it ends, and `graph` is the result; with one it is abandoned. It ends on the thread that
/// began it, unless its mode is relaxed.
#[pyclass(name = "Capture", module = "rstream", frozen, weakref)]
pub(super) struct CapturePy {
    stream: Stream,
    mode: CaptureMode,
    into: Option<(Graph, Vec<Node>)>,
    state: Mutex<State>,
}

impl Drop for CapturePy {
    fn drop(&mut self) {
        // Not here: the call could block, and this thread may have the GIL.
        let state = self.state.get_mut().unwrap_or_else(PoisonError::into_inner);
        if let State::Active(raw) = std::mem::replace(state, State::Over) {
            raw.abandon_later();
        }
    }
}

impl CapturePy {
    pub(super) fn new(
        py: Python<'_>,
        stream: Stream,
        mode: &str,
        graph: Option<&GraphPy>,
        dependencies: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<CapturePy> {
        let Some(&(_, mode)) = MODES.iter().find(|(name, _)| *name == mode) else {
            let what = format!("mode={mode:?}: expected \"global\", \"thread_local\" or \"relaxed\"");
            return Err(exception(py, &Error::invalid(what)));
        };
        let dependencies = dependencies.map_or(Ok(Vec::new()), nodes_of)?;
        if graph.is_none() && !dependencies.is_empty() {
            return Err(exception(py, &Error::invalid("dependencies are nodes of a graph: give that as well")));
        }
        let into = graph.map(|graph| (graph.0.clone(), dependencies));
        Ok(CapturePy { stream, mode, into, state: Mutex::new(State::Unbegun) })
    }

    /// Held for moments only, and never across a call of the driver.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes the capture out to end it.
    fn take(&self) -> Result<RawCapture, Error> {
        let mut state = self.lock();
        match std::mem::replace(&mut *state, State::Over) {
            State::Active(raw) => Ok(raw),
            other => {
                *state = other;
                Err(Error::capture(Status::ILLEGAL_STATE, "this capture is not going on"))
            }
        }
    }

    /// Whether this thread may call, asked before the capture is taken out.
    fn may_call(py: Python<'_>) -> PyResult<()> {
        call(py, |_| Ok(()))
    }

    fn finish(&self, py: Python<'_>) -> PyResult<GraphPy> {
        CapturePy::may_call(py)?;
        let raw = self.take().py(py)?;
        let mut left = None;
        let ended = call(py, |api| {
            raw.end(api).map_err(|(error, raw)| {
                left = raw;
                error
            })
        });
        *self.lock() = match (&ended, left) {
            (Ok(graph), _) => State::Ended(graph.clone()),
            // Refused before the call: it goes on.
            (Err(_), Some(raw)) => State::Active(*raw),
            (Err(_), None) => State::Over,
        };
        ended.map(GraphPy)
    }

    /// The number of the capture, and whose its nodes are.
    fn owner(&self) -> Result<(u64, Owner), Error> {
        match &*self.lock() {
            State::Active(raw) => Ok((raw.id(), raw.owner())),
            _ => Err(Error::capture(Status::ILLEGAL_STATE, "this capture is not going on")),
        }
    }

    fn update(&self, py: Python<'_>, nodes: &Bound<'_, PyAny>, update: Update) -> PyResult<()> {
        let nodes = nodes_of(nodes)?;
        let owner = self.owner().py(py)?;
        call(py, |api| capture::update_dependencies(api, &self.stream, owner, &nodes, update))
    }
}

#[pymethods]
impl CapturePy {
    fn __enter__(slf: Bound<'_, Self>) -> PyResult<Bound<'_, Self>> {
        let (py, this) = (slf.py(), slf.get());
        let first = {
            let mut state = this.lock();
            let first = matches!(*state, State::Unbegun);
            if first {
                *state = State::Beginning;
            }
            first
        };
        if !first {
            return Err(exception(py, &Error::capture(Status::ILLEGAL_STATE, "a capture is begun once: make another")));
        }
        let into = this.into.as_ref().map(|(graph, nodes)| (graph, nodes.as_slice()));
        match call(py, |api| RawCapture::begin(api, &this.stream, this.mode, into)) {
            Ok(raw) => {
                *this.lock() = State::Active(raw);
                Ok(slf)
            }
            Err(error) => {
                *this.lock() = State::Unbegun;
                Err(error)
            }
        }
    }

    #[pyo3(signature = (*exception))]
    fn __exit__(&self, py: Python<'_>, exception: &Bound<'_, PyTuple>) -> PyResult<()> {
        if !matches!(*self.lock(), State::Active(_)) {
            return Ok(());
        }
        let failed = !exception.is_empty() && !exception.get_item(0)?.is_none();
        if failed { self.abandon(py) } else { self.finish(py).map(drop) }
    }

    /// End the capture (`cuStreamEndCapture`) and return the graph.
    ///
    /// Raises `CaptureInvalidatedError` when a rule was broken while it lasted, `CaptureUnjoinedError` when another
    /// stream that took part has work that this one did not wait for; the capture is over then. Raises
    /// `CaptureWrongThreadError` on another thread: it goes on then.
    fn end(&self, py: Python<'_>) -> PyResult<GraphPy> {
        self.finish(py)
    }

    /// End the capture and drop what was captured; what went into a graph of the caller's stays there.
    ///
    /// Any thread may. Raises `CaptureWrongThreadError` on another thread when it goes into a graph of the caller's,
    /// which would be lost; it goes on then.
    fn abandon(&self, py: Python<'_>) -> PyResult<()> {
        CapturePy::may_call(py)?;
        let raw = self.take().py(py)?;
        let mut left = None;
        let abandoned = call(py, |_| {
            raw.abandon().map_err(|(error, raw)| {
                left = Some(raw);
                error
            })
        });
        if let Some(raw) = left {
            *self.lock() = State::Active(*raw);
        }
        abandoned
    }

    /// Capture a host function: `fn(*args, **kwargs)` runs once for each launch (`cuLaunchHostFunc`).
    ///
    /// It must not call the API. The graph, every executable made from it and every pending launch keep it alive.
    #[pyo3(signature = (r#fn, /, *args, **kwargs))]
    fn launch_host_func(
        &self,
        r#fn: &Bound<'_, PyAny>,
        args: &Bound<'_, PyTuple>,
        kwargs: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<Py<HostNodePy>> {
        self.owner().py(r#fn.py())?;
        add_host_node(r#fn, args, kwargs, |api, run, label| self.stream.capture_host_func(api, run, label))
    }

    /// The graph. Raises `CaptureError` before the end.
    #[getter]
    fn graph(&self, py: Python<'_>) -> PyResult<GraphPy> {
        // Not under the lock: an exception is made by Python code, which may let another thread ask.
        let graph = match &*self.lock() {
            State::Ended(graph) => Ok(graph.clone()),
            State::Unbegun | State::Beginning => Err("the capture has not begun"),
            State::Active(_) => Err("the capture has not ended"),
            State::Over => Err("the capture was abandoned, or broke"),
        };
        graph
            .map(GraphPy)
            .map_err(|why| exception(py, &Error::capture(Status::ILLEGAL_STATE, format!("there is no graph: {why}"))))
    }

    /// The stream.
    #[getter]
    fn stream(&self) -> StreamPy {
        StreamPy(self.stream.clone())
    }

    /// The mode.
    #[getter]
    fn mode(&self) -> &'static str {
        MODES.iter().find(|(_, mode)| *mode == self.mode).map_or("global", |(name, _)| name)
    }

    /// Its number, that of its graph: captures into one graph share it. None when it is not going on.
    #[getter]
    fn id(&self) -> Option<u64> {
        match &*self.lock() {
            State::Active(raw) => Some(raw.id()),
            _ => None,
        }
    }

    /// Whether it goes on, or broke (`cuStreamIsCapturing`).
    #[getter]
    fn status(&self, py: Python<'_>) -> PyResult<&'static str> {
        if self.id().is_none() {
            return Ok("none");
        }
        call(py, |api| self.stream.capture_status(api)).map(status_name)
    }

    /// The nodes that the next one depends on (`cuStreamGetCaptureInfo`).
    #[getter]
    fn dependencies(&self, py: Python<'_>) -> PyResult<Vec<NodePy>> {
        let owner = self.owner().py(py)?;
        let nodes = call(py, |api| capture::dependencies(api, &self.stream, owner))?;
        Ok(nodes.into_iter().map(NodePy).collect())
    }

    /// Add nodes to those that the next one depends on (`cuStreamUpdateCaptureDependencies`).
    ///
    /// Raises `InvalidValueError` for a node of another graph.
    fn add_dependencies(&self, py: Python<'_>, nodes: &Bound<'_, PyAny>) -> PyResult<()> {
        self.update(py, nodes, Update::Add)
    }

    /// Make the next node depend on these alone (`cuStreamUpdateCaptureDependencies`).
    fn set_dependencies(&self, py: Python<'_>, nodes: &Bound<'_, PyAny>) -> PyResult<()> {
        self.update(py, nodes, Update::Set)
    }

    fn __repr__(&self) -> String {
        let state = match &*self.lock() {
            State::Unbegun | State::Beginning => "not begun",
            State::Active(_) => "active",
            State::Ended(_) => "ended",
            State::Over => "over",
        };
        format!("<rstream.Capture of stream {}, mode={:?}, {state}>", self.stream.id(), self.mode())
    }

    fn __reduce__(&self) -> PyResult<()> {
        Err(PyTypeError::new_err("a Capture belongs to this process and cannot be pickled"))
    }
}

/// Sets the capture mode of this thread, by its number, for the driver of a device. Returns the one before.
#[pyfunction]
pub(super) fn _exchange_capture_mode(py: Python<'_>, device: &super::device::DevicePy, mode: u32) -> PyResult<u32> {
    gate::refuse_forked()?;
    let driver: &'static Driver = device.0.driver();
    // Without a token: the mode has to be restored in any state of the thread.
    py.detach(|| capture::exchange_mode(driver, mode)).py(py)
}
