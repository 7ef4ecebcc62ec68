//! `rstream.Graph`, `GraphExec`, `Node` and `HostNode`.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use pyo3::exceptions::PyTypeError;
use pyo3::gc::{PyTraverseError, PyVisit};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};

use super::call;
use super::device::{DevicePy, device_or_default};
use super::errors::exception;
use super::event::EventPy;
use super::gate::{Buried, drop_attached, refuse_forked};
use super::region::{filled, regions};
use super::stream::StreamPy;
use super::worker::{Handler, HostErrors, Repeated};
use crate::api::Api;
use crate::error::{Error, Refused};
use crate::graph::{Graph, GraphExec, HostNode, Label, Node};

/// A node of a graph (`CUgraphNode`).
#[pyclass(name = "Node", module = "rstream", frozen, subclass, eq, hash)]
#[derive(PartialEq, Eq, Hash)]
pub(super) struct NodePy(pub(super) Node);

#[pymethods]
impl NodePy {
    /// What it does: `"kernel"`, `"memcpy"`, `"host"` and so on, as in `CUgraphNodeType`.
    #[getter]
    fn kind(&self) -> &'static str {
        self.0.kind().name()
    }

    /// The handle (`CUgraphNode`).
    #[getter]
    fn handle(&self) -> usize {
        self.0.handle()
    }

    fn __repr__(&self) -> String {
        format!("<rstream.Node {} {:#x}>", self.0.kind().name(), self.0.handle())
    }

    fn __reduce__(&self) -> PyResult<()> {
        Err(PyTypeError::new_err("a Node belongs to this process and cannot be pickled"))
    }
}

/// A host function in a graph. This object does not keep the function alive; the graph does.
#[pyclass(name = "HostNode", module = "rstream", frozen, extends = NodePy)]
pub(super) struct HostNodePy {
    node: HostNode,
    errors: Option<Arc<HostErrors>>,
}

impl HostNodePy {
    fn make(py: Python<'_>, node: HostNode) -> PyResult<Py<HostNodePy>> {
        let errors = node.tag().and_then(|tag| tag.downcast::<HostErrors>().ok());
        let base = PyClassInitializer::from(NodePy(node.node()));
        Py::new(py, base.add_subclass(HostNodePy { node, errors }))
    }
}

#[pymethods]
impl HostNodePy {
    /// The function's name.
    #[getter]
    fn name(&self) -> &str {
        self.node.name()
    }

    /// How often it was run, by all launches of all executables that have it.
    #[getter]
    fn runs(&self) -> u64 {
        self.node.runs()
    }

    /// What its runs raised: the last 100. The frames of their tracebacks are cleared, so that they hold nothing.
    #[getter]
    fn errors(&self, py: Python<'_>) -> Vec<Py<PyAny>> {
        self.errors.as_ref().map_or(Vec::new(), |errors| errors.raised(py))
    }

    fn __repr__(&self) -> String {
        let node = self.node.node();
        format!("<rstream.HostNode {} {:#x}, runs={}>", self.node.name(), node.handle(), self.node.runs())
    }
}

/// Nodes that Python gives: one, or an iterable of them.
pub(super) fn nodes_of(nodes: &Bound<'_, PyAny>) -> PyResult<Vec<Node>> {
    if let Ok(node) = nodes.cast::<NodePy>() {
        return Ok(vec![node.get().0]);
    }
    nodes
        .try_iter()?
        .map(|node| {
            let node = node?;
            match node.cast::<NodePy>() {
                Ok(node) => Ok(node.get().0),
                Err(_) => Err(PyTypeError::new_err(format!("{} is no Node", node.repr()?))),
            }
        })
        .collect()
}

fn optional(nodes: Option<&Bound<'_, PyAny>>) -> PyResult<Vec<Node>> {
    nodes.map_or(Ok(Vec::new()), nodes_of)
}

/// Adds a Python callable to a graph by `add`.
pub(super) fn add_host_node<F: Send>(
    function: &Bound<'_, PyAny>,
    args: &Bound<'_, PyTuple>,
    kwargs: Option<&Bound<'_, PyDict>>,
    add: impl FnOnce(&Api<'_>, Run, Label) -> Result<HostNode, Refused<F>> + Send,
) -> PyResult<Py<HostNodePy>> {
    let py = function.py();
    refuse_forked()?;
    let repeated = Arc::new(Repeated::new(function, args, kwargs)?);
    let name = match function.getattr_opt("__qualname__")? {
        Some(name) => name.to_string(),
        None => function.get_type().qualname()?.to_string(),
    };
    let label = Label { name, tag: Some(repeated.errors()) };
    let mut run: Option<Run> = Some(Box::new(move || repeated.run()));
    let added = py.detach(|| Api::attach(|api| add(api, run.take().expect("this is called once"), label)));
    let error = match added {
        Ok(Ok(node)) => return HostNodePy::make(py, node),
        Ok(Err(Refused { error, returned })) => {
            drop_attached(py, returned);
            error
        }
        Err(error) => error,
    };
    drop_attached(py, run);
    Err(exception(py, &error))
}

/// Where memory of nodes is used, in errors.
const PLACE: &str = "in a graph";

/// A host function of a graph, as the core takes it.
pub(super) type Run = Box<dyn Fn() + Send + Sync>;

/// A graph (`CUgraph`): work as nodes and edges, made by capture or by hand, that is launched as often as one likes.
///
/// What its nodes use (functions, arrays, events) lives as long as the graph, an executable made from it, or a pending
/// launch. Methods that add a node take `dependencies`, a node or several, and raise `InvalidValueError` for nodes of
/// another graph.
///
/// `device` says where the memory of its copies and fills is. Its launches may go to streams of other devices of the
/// same driver.
#[pyclass(name = "Graph", module = "rstream", frozen, weakref, eq, hash)]
#[derive(PartialEq, Eq, Hash)]
pub(super) struct GraphPy(pub(super) Graph);

#[pymethods]
impl GraphPy {
    #[new]
    #[pyo3(signature = (device=None))]
    fn new(py: Python<'_>, device: Option<&Bound<'_, PyAny>>) -> PyResult<GraphPy> {
        let device = device_or_default(device, py)?;
        call(py, move |api| Graph::new(api, device)).map(GraphPy)
    }

    /// The device.
    #[getter]
    fn device(&self) -> DevicePy {
        DevicePy(self.0.device())
    }

    /// The handle (`CUgraph`). Raises `CaptureError` while it is captured into.
    #[getter]
    fn handle(&self, py: Python<'_>) -> PyResult<usize> {
        call(py, |_| self.0.handle())
    }

    /// The nodes, in no particular order; host functions of rstream are `HostNode`s (`cuGraphGetNodes`).
    #[getter]
    fn nodes(&self, py: Python<'_>) -> PyResult<Vec<Py<NodePy>>> {
        let (nodes, hosts) = call(py, |api| Ok((self.0.nodes(api)?, self.0.host_nodes(api)?)))?;
        let hosts: HashMap<Node, HostNode> = hosts.into_iter().map(|host| (host.node(), host)).collect();
        let object = |node: Node| match hosts.get(&node) {
            Some(host) => Ok(HostNodePy::make(py, host.clone())?.into_bound(py).into_super().unbind()),
            None => Py::new(py, NodePy(node)),
        };
        nodes.into_iter().map(object).collect()
    }

    /// The edges: the second node of each pair depends on the first (`cuGraphGetEdges`).
    #[getter]
    fn edges(&self, py: Python<'_>) -> PyResult<Vec<(NodePy, NodePy)>> {
        let edges = call(py, |api| self.0.edges(api))?;
        Ok(edges.into_iter().map(|(from, to)| (NodePy(from), NodePy(to))).collect())
    }

    /// Add a host function: `fn(*args, **kwargs)` runs once for each launch (`cuGraphAddHostNode`).
    ///
    /// It must not call the API. What it raises is in `HostNode.errors`, and told to `GraphExec.on_error` or else to
    /// `sys.unraisablehook`; the launch goes on.
    #[pyo3(signature = (r#fn, /, *args, dependencies=None, **kwargs))]
    fn add_host_node(
        &self,
        r#fn: &Bound<'_, PyAny>,
        args: &Bound<'_, PyTuple>,
        dependencies: Option<&Bound<'_, PyAny>>,
        kwargs: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<Py<HostNodePy>> {
        let nodes = optional(dependencies)?;
        add_host_node(r#fn, args, kwargs, |api, run, label| self.0.add_labelled_host_node(api, &nodes, run, label))
    }

    /// Add a node that does nothing (`cuGraphAddEmptyNode`).
    #[pyo3(signature = (*, dependencies=None))]
    fn add_empty_node(&self, py: Python<'_>, dependencies: Option<&Bound<'_, PyAny>>) -> PyResult<NodePy> {
        let nodes = optional(dependencies)?;
        call(py, |api| self.0.add_empty_node(api, &nodes)).map(NodePy)
    }

    /// Add a copy of all bytes of `src` to `dst` (`cuGraphAddMemcpyNode`). Arrays as for `Stream.copy`.
    ///
    /// Work that another library has queued on the arrays is waited for now.
    #[pyo3(signature = (dst, src, *, dependencies=None))]
    fn add_memcpy_node(
        &self,
        dst: &Bound<'_, PyAny>,
        src: &Bound<'_, PyAny>,
        dependencies: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<NodePy> {
        let (py, device) = (dst.py(), self.0.device());
        let nodes = optional(dependencies)?;
        let (to, from) = regions(device, PLACE, dst, src)?;
        to.synchronize_producer(py, device)?;
        from.synchronize_producer(py, device)?;
        call(py, |api| {
            let keep = Buried::new((to.keep, from.keep));
            // SAFETY: both are contiguous memory of that size, and kept alive by references to their owners, which the
            // graph owns. Who else uses them while a launch runs is the caller's concern, as documented.
            unsafe { self.0.add_memcpy_node_raw(api, &nodes, to.address, from.address, to.bytes, keep) }
        })
        .map(NodePy)
    }

    /// Add that every element of `dst` is set to `value` (`cuGraphAddMemsetNode`). As for `Stream.fill`.
    #[pyo3(signature = (dst, value, *, dependencies=None))]
    fn add_memset_node(
        &self,
        dst: &Bound<'_, PyAny>,
        value: &Bound<'_, PyAny>,
        dependencies: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<NodePy> {
        let (py, device) = (dst.py(), self.0.device());
        let nodes = optional(dependencies)?;
        let (to, pattern) = filled(device, PLACE, dst, value)?;
        to.synchronize_producer(py, device)?;
        let count = to.bytes / pattern.len();
        call(py, |api| {
            // SAFETY: as for a copy.
            unsafe { self.0.add_memset_node_raw(api, &nodes, to.address, pattern, count, Buried::new(to.keep)) }
        })
        .map(NodePy)
    }

    /// Add a node that records `event` at each launch (`cuGraphAddEventRecordNode`).
    #[pyo3(signature = (event, *, dependencies=None))]
    fn add_event_record_node(
        &self,
        py: Python<'_>,
        event: &EventPy,
        dependencies: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<NodePy> {
        let nodes = optional(dependencies)?;
        call(py, |api| self.0.add_event_record_node(api, &nodes, &event.0)).map(NodePy)
    }

    /// Add a node that waits at each launch for `event`, as it is recorded then (`cuGraphAddEventWaitNode`).
    #[pyo3(signature = (event, *, dependencies=None))]
    fn add_event_wait_node(
        &self,
        py: Python<'_>,
        event: &EventPy,
        dependencies: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<NodePy> {
        let nodes = optional(dependencies)?;
        call(py, |api| self.0.add_event_wait_node(api, &nodes, &event.0)).map(NodePy)
    }

    /// Add a copy of `graph` as a node (`cuGraphAddChildGraphNode`).
    #[pyo3(signature = (graph, *, dependencies=None))]
    fn add_child_graph(
        &self,
        py: Python<'_>,
        graph: &GraphPy,
        dependencies: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<NodePy> {
        let nodes = optional(dependencies)?;
        call(py, |api| self.0.add_child_graph(api, &nodes, &graph.0)).map(NodePy)
    }

    /// Add edges: the second node of each pair will depend on the first (`cuGraphAddDependencies`).
    ///
    /// Raises `InvalidValueError` for a node and itself, and for an edge that exists.
    fn add_dependencies(&self, py: Python<'_>, edges: &Bound<'_, PyAny>) -> PyResult<()> {
        let edge = |edge: PyResult<Bound<'_, PyAny>>| {
            let (from, to) = edge?.extract::<(Bound<'_, NodePy>, Bound<'_, NodePy>)>()?;
            Ok((from.get().0, to.get().0))
        };
        let edges = edges.try_iter()?.map(edge).collect::<PyResult<Vec<_>>>()?;
        call(py, |api| self.0.add_dependencies(api, &edges))
    }

    /// A copy of the graph, which shares the functions (`cuGraphClone`).
    fn clone(&self, py: Python<'_>) -> PyResult<GraphPy> {
        call(py, |api| self.0.clone_graph(api)).map(GraphPy)
    }

    /// The node of this clone that `original` became (`cuGraphNodeFindInClone`).
    fn find_in_clone(&self, py: Python<'_>, original: &NodePy) -> PyResult<NodePy> {
        let original = original.0;
        call(py, |api| self.0.find_in_clone(api, original)).map(NodePy)
    }

    /// The graph in the DOT language of Graphviz.
    fn to_dot(&self, py: Python<'_>) -> PyResult<String> {
        call(py, |api| self.0.to_dot(api))
    }

    /// A drawing, as SVG. For graphs of some hundred nodes at most.
    fn to_svg(&self, py: Python<'_>) -> PyResult<String> {
        call(py, |api| self.0.to_svg(api))
    }

    /// A drawing for notebooks, of graphs that are small enough to be looked at.
    fn _repr_svg_(&self, py: Python<'_>) -> PyResult<Option<String>> {
        const MOST_NODES: usize = 100;
        call(py, |api| if self.0.nodes(api)?.len() <= MOST_NODES { self.0.to_svg(api).map(Some) } else { Ok(None) })
    }

    /// Give it up (`cuGraphDestroy`, on a background thread). Executables made from it go on.
    ///
    /// Needed when a function in it refers to the graph or an executable: the driver owns the function, so the garbage
    /// collector cannot see such a cycle.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        call(py, |_| self.0.close())
    }

    fn __enter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    #[pyo3(signature = (*_exception))]
    fn __exit__(&self, py: Python<'_>, _exception: &Bound<'_, PyTuple>) -> PyResult<()> {
        self.close(py)
    }

    /// Make it executable (`cuGraphInstantiateWithFlags`). Raises `InvalidValueError` when it has a cycle.
    fn instantiate(&self, py: Python<'_>) -> PyResult<GraphExecPy> {
        let exec = call(py, |api| self.0.instantiate(api))?;
        Ok(GraphExecPy { exec, handlers: Mutex::default() })
    }

    fn __repr__(&self) -> String {
        format!("<rstream.Graph on device {}>", self.0.device())
    }

    fn __reduce__(&self) -> PyResult<()> {
        Err(PyTypeError::new_err("a Graph belongs to this process and cannot be pickled"))
    }
}

/// A graph that can be launched (`CUgraphExec`), made by `Graph.instantiate`. Launches of one never overlap.
#[pyclass(name = "GraphExec", module = "rstream", frozen, weakref)]
pub(super) struct GraphExecPy {
    exec: GraphExec,
    handlers: Mutex<Vec<Arc<Handler>>>,
}

impl GraphExecPy {
    /// What is known about the host functions that the executable has now.
    fn errors(&self) -> Vec<Arc<HostErrors>> {
        self.exec.tags().into_iter().filter_map(|tag| tag.downcast::<HostErrors>().ok()).collect()
    }

    fn handlers(&self) -> MutexGuard<'_, Vec<Arc<Handler>>> {
        self.handlers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Lets the handlers hear of all of them.
    fn tell_handlers(&self) {
        let handlers = self.handlers();
        for errors in self.errors() {
            handlers.iter().for_each(|handler| errors.tell(handler));
        }
    }
}

#[pymethods]
impl GraphExecPy {
    /// The device.
    #[getter]
    fn device(&self) -> DevicePy {
        DevicePy(self.exec.device())
    }

    /// The handle (`CUgraphExec`). Raises `ClosedError`.
    #[getter]
    fn handle(&self, py: Python<'_>) -> PyResult<usize> {
        call(py, |_| self.exec.handle())
    }

    /// Whether it was closed.
    #[getter]
    fn closed(&self) -> bool {
        self.exec.is_closed()
    }

    /// Launch it behind what is queued on `stream` (`cuGraphLaunch`).
    ///
    /// After a device fault of earlier work its host functions do not run; `stream.completion()` behind the launch
    /// tells. Raises `CaptureUnsupportedError` on a stream that captures.
    fn launch(&self, py: Python<'_>, stream: &StreamPy) -> PyResult<()> {
        call(py, |api| self.exec.launch(api, &stream.0))
    }

    /// Bring what it needs to the device, so that the first launch is not slower (`cuGraphUpload`).
    fn upload(&self, py: Python<'_>, stream: &StreamPy) -> PyResult<()> {
        call(py, |api| self.exec.upload(api, &stream.0))
    }

    /// Make later launches do what `graph` says (`cuGraphExecUpdate`).
    ///
    /// Raises `GraphUpdateError` when its nodes or edges are others; nothing is changed then.
    fn update(&self, py: Python<'_>, graph: &GraphPy) -> PyResult<()> {
        let before = self.errors();
        call(py, |api| self.exec.update(api, &graph.0))?;
        for errors in before {
            self.handlers().iter().for_each(|handler| errors.untell(handler));
        }
        self.tell_handlers();
        Ok(())
    }

    /// Have `fn(exception)` called for what host functions of its graph raise, on the thread that ran them.
    ///
    /// `fn` must not call the API. Held as long as this object.
    fn on_error(&self, r#fn: &Bound<'_, PyAny>) -> PyResult<()> {
        if self.exec.is_closed() {
            return Err(exception(r#fn.py(), &Error::Closed { what: "GraphExec" }));
        }
        let handler = Handler::new(r#fn)?;
        self.handlers().push(handler);
        self.tell_handlers();
        Ok(())
    }

    /// Give it up (`cuGraphExecDestroy`, on a background thread). Launches that are pending still run.
    fn close(&self) {
        self.exec.close();
    }

    fn __enter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    #[pyo3(signature = (*_exception))]
    fn __exit__(&self, _exception: &Bound<'_, PyTuple>) {
        self.exec.close();
    }

    /// For the garbage collector: handlers are all that it can see.
    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        // Who holds the lock is using the object.
        let Ok(handlers) = self.handlers.try_lock() else { return Ok(()) };
        handlers.iter().try_for_each(|handler| handler.visit(&visit))
    }

    fn __clear__(&self) {
        let handlers = std::mem::take(&mut *self.handlers());
        drop(handlers);
    }

    fn __repr__(&self) -> String {
        let closed = if self.exec.is_closed() { " closed" } else { "" };
        format!("<rstream.GraphExec on device {}{closed}>", self.exec.device())
    }

    fn __reduce__(&self) -> PyResult<()> {
        Err(PyTypeError::new_err("a GraphExec belongs to this process and cannot be pickled"))
    }
}
