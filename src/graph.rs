//! Graphs: work as nodes and edges, made by capture or by hand, launched as often as one likes.
//!
//! What a node uses (a closure, buffers, an event) is owned by the graph through a CUDA user object: it lives as long as
//! the graph, an executable made from it, or a launch that is pending.

use std::any::Any;
use std::ffi::{c_uint, c_void};
use std::fmt::Write as _;
use std::hash::{Hash, Hasher};
use std::panic::{self, AssertUnwindSafe};
use std::ptr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};

use cudarc::driver::sys::{
    CUDA_HOST_NODE_PARAMS, CUDA_MEMCPY3D, CUDA_MEMSET_NODE_PARAMS, CUgraph, CUgraphEdgeData, CUgraphExec,
    CUgraphExecUpdateResultInfo, CUgraphNode, CUmemorytype, CUstream, CUuserObject,
};
use rustc_hash::{FxBuildHasher, FxHashMap};

use crate::api::{Api, callback_scope};
use crate::completion::{panic_message, shield};
use crate::device::Device;
use crate::drawing;
use crate::driver::{Driver, Kind};
use crate::error::{Error, Refused, Result, Status};
use crate::event::Event;
use crate::memory::{Buffer, Pattern, same_size, unfillable};
use crate::reaper::{self, MayBlock, Relaxed};
use crate::stream::Stream;

/// Whose a [`Node`] is: a graph, or the capture that makes one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Owner(u64);

/// A capture into a graph that existed before.
struct Into {
    kind: Kind,
    id: u64,
    owner: Owner,
    serial: u64,
}

/// Those that are going on.
static CAPTURED_INTO: Mutex<Vec<Into>> = Mutex::new(Vec::new());

fn captured_into() -> MutexGuard<'static, Vec<Into>> {
    CAPTURED_INTO.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The one that goes on under the number `id`, if it goes into a graph that existed before.
fn with_captured_into<R>(device: Device, id: u64, look: impl FnOnce(Option<&Into>) -> R) -> R {
    look(captured_into().iter().find(|into| (into.kind, into.id) == (device.kind(), id)))
}

/// One capture: captures into one graph, one after the other, have one number (measured).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Sequence {
    id: u64,
    /// 0 of one that made its graph.
    serial: u64,
}

impl Sequence {
    pub(crate) fn id(self) -> u64 {
        self.id
    }

    /// The capture that goes on under the number `id`.
    pub(crate) fn of(device: Device, id: u64) -> Sequence {
        Sequence { id, serial: with_captured_into(device, id, |into| into.map_or(0, |into| into.serial)) }
    }
}

impl Owner {
    pub(crate) fn fresh() -> Owner {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        Owner(NEXT.fetch_add(1, Ordering::Relaxed))
    }

    /// The graph of a capture, by the capture's number.
    pub(crate) fn capture(device: Device, id: u64) -> Owner {
        Owner(1 << 63 | u64::from(device.is_software()) << 62 | id)
    }

    /// As [`Owner::capture`], when it may go into a graph that existed before.
    pub(crate) fn of_capture(device: Device, id: u64) -> Owner {
        with_captured_into(device, id, |into| into.map_or(Owner::capture(device, id), |into| into.owner))
    }

    /// The handles of nodes that have to be this owner's.
    pub(crate) fn handles_of(self, nodes: &[Node]) -> Result<Vec<CUgraphNode>> {
        nodes.iter().map(|node| self.handle_of(*node)).collect()
    }

    fn handle_of(self, node: Node) -> Result<CUgraphNode> {
        if node.owner == self {
            Ok(node.handle as CUgraphNode)
        } else {
            Err(Error::invalid(format!("{node:?} is of another graph")))
        }
    }
}

/// What a node does (`CUgraphNodeType`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum NodeKind {
    /// A kernel.
    Kernel,
    /// A copy.
    Memcpy,
    /// A fill.
    Memset,
    /// A host function.
    Host,
    /// A graph inside.
    Graph,
    /// Nothing: an order between others.
    Empty,
    /// A wait for an event, as it is recorded at the launch.
    WaitEvent,
    /// The record of an event.
    EventRecord,
    /// Another kind, by its number.
    Other(u32),
}

impl NodeKind {
    fn of(code: u32) -> NodeKind {
        match code {
            0 => NodeKind::Kernel,
            1 => NodeKind::Memcpy,
            2 => NodeKind::Memset,
            3 => NodeKind::Host,
            4 => NodeKind::Graph,
            5 => NodeKind::Empty,
            6 => NodeKind::WaitEvent,
            7 => NodeKind::EventRecord,
            other => NodeKind::Other(other),
        }
    }

    /// Its name in `cuda.h`, in lower case and without the prefix: `memcpy`, `wait_event`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            NodeKind::Kernel => "kernel",
            NodeKind::Memcpy => "memcpy",
            NodeKind::Memset => "memset",
            NodeKind::Host => "host",
            NodeKind::Graph => "graph",
            NodeKind::Empty => "empty",
            NodeKind::WaitEvent => "wait_event",
            NodeKind::EventRecord => "event_record",
            NodeKind::Other(8) => "ext_semas_signal",
            NodeKind::Other(9) => "ext_semas_wait",
            NodeKind::Other(10) => "mem_alloc",
            NodeKind::Other(11) => "mem_free",
            NodeKind::Other(12) => "batch_mem_op",
            NodeKind::Other(13) => "conditional",
            NodeKind::Other(_) => "unknown",
        }
    }
}

/// A node of a graph (`CUgraphNode`): a name for it, of no use after the graph is gone.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Node {
    owner: Owner,
    handle: usize,
    kind: NodeKind,
}

impl std::fmt::Debug for Node {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "<Node {} {:#x}>", self.kind.name(), self.handle)
    }
}

impl Node {
    /// The node with this handle, which exists.
    pub(crate) fn of(driver: &Driver, owner: Owner, node: CUgraphNode) -> Result<Node> {
        let mut code: c_uint = 0;
        // SAFETY: the node exists (the caller's promise); writes one enum of C's int size.
        unsafe { driver.cuGraphNodeGetType(node, &raw mut code) }?;
        Ok(Node { owner, handle: node as usize, kind: NodeKind::of(code) })
    }

    /// Its handle (`CUgraphNode`), for other libraries.
    #[must_use]
    pub fn handle(self) -> usize {
        self.handle
    }

    /// What it does.
    #[must_use]
    pub fn kind(self) -> NodeKind {
        self.kind
    }
}

/// A host function of graphs: the closure, and what became of its runs.
pub(crate) struct HostCode {
    f: Box<dyn Fn() + Send + Sync>,
    record: Arc<HostRecord>,
}

/// What is known about a host function also when the closure is gone.
struct HostRecord {
    label: Label,
    runs: AtomicU64,
    /// Messages of its panics, the last [`HostNode::MOST_PANICS`] of them.
    panics: Mutex<Vec<String>>,
}

/// The host functions that live, by the address that graphs have for them.
static HOST_CODES: Mutex<FxHashMap<usize, Weak<HostRecord>>> = Mutex::new(FxHashMap::with_hasher(FxBuildHasher));

fn host_codes<R>(look: impl FnOnce(&mut FxHashMap<usize, Weak<HostRecord>>) -> R) -> R {
    look(&mut HOST_CODES.lock().unwrap_or_else(PoisonError::into_inner))
}

impl Drop for HostCode {
    fn drop(&mut self) {
        host_codes(|codes| codes.remove(&(ptr::from_ref(self) as usize)));
    }
}

impl HostCode {
    fn boxed(f: impl Fn() + Send + Sync + 'static, label: Label) -> Box<HostCode> {
        let record = Arc::new(HostRecord { label, runs: AtomicU64::new(0), panics: Mutex::default() });
        let code = Box::new(HostCode { f: Box::new(f), record });
        host_codes(|codes| codes.insert(ptr::from_ref(&*code) as usize, Arc::downgrade(&code.record)));
        code
    }

    fn run(&self) {
        self.record.runs.fetch_add(1, Ordering::AcqRel);
        if let Err(payload) = panic::catch_unwind(AssertUnwindSafe(&self.f)) {
            let mut panics = self.record.panics.lock().unwrap_or_else(PoisonError::into_inner);
            if panics.len() == HostNode::MOST_PANICS {
                panics.remove(0);
            }
            panics.push(panic_message(payload));
        }
    }
}

/// The function of every host node.
unsafe extern "C" fn run_host_code(data: *mut c_void) {
    // SAFETY: `data` is the `HostCode` of the node, which a user object keeps alive as long as a graph, an executable or
    // a launch has the node. Several launches may run it at the same time: it is `Sync`.
    let code = unsafe { &*data.cast::<HostCode>() };
    callback_scope(|| code.run());
}

/// A host function in a graph. It says how its runs went; it does not keep the function alive.
#[derive(Clone)]
pub struct HostNode {
    node: Node,
    record: Arc<HostRecord>,
}

impl std::fmt::Debug for HostNode {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("HostNode").field("node", &self.node).field("runs", &self.runs()).finish_non_exhaustive()
    }
}

impl HostNode {
    /// How many messages of panics are kept.
    pub const MOST_PANICS: usize = 16;

    /// The node, as its graph knows it.
    #[must_use]
    pub fn node(&self) -> Node {
        self.node
    }

    /// What it was called when it was added; may be empty.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.record.label.name
    }

    /// What it was tagged with.
    #[cfg(feature = "python")]
    pub(crate) fn tag(&self) -> Option<Arc<dyn Any + Send + Sync>> {
        self.record.label.tag.clone()
    }

    /// How often the function was run, by all launches of all executables that have it.
    #[must_use]
    pub fn runs(&self) -> u64 {
        self.record.runs.load(Ordering::Acquire)
    }

    /// The messages of its panics, of the last [`HostNode::MOST_PANICS`]. A panic ends the run, not the launch.
    #[must_use]
    pub fn panics(&self) -> Vec<String> {
        self.record.panics.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// A payload that graphs own: dropped by the driver, on a thread of its own, when none of them needs it any more.
unsafe extern "C" fn drop_payload<T>(data: *mut c_void) {
    // SAFETY: `data` is the box that `own` made, and the driver calls once.
    let payload = unsafe { Box::from_raw(data.cast::<T>()) };
    // The driver permits no call of the API here. A panic of a destructor ends here; the panic hook has told of it.
    shield(|| callback_scope(|| drop(payload)));
}

/// Makes `graph` the owner of `payload` (`cuUserObjectCreate`, `cuGraphRetainUserObject`), which the node that `add` adds
/// uses. The payload is dropped when that fails.
///
/// # Safety
/// The graph exists.
unsafe fn own<T, R>(
    driver: &Driver,
    graph: CUgraph,
    payload: Box<T>,
    add: impl FnOnce(*mut T) -> Result<R>,
) -> Result<R> {
    const NO_DESTRUCTOR_SYNC: c_uint = 1;
    const MOVE: c_uint = 1;
    let data = Box::into_raw(payload);
    let mut object: CUuserObject = ptr::null_mut();
    // SAFETY: writes one handle. The destructor fits the data, and is called once, when the last reference is gone.
    let made = unsafe {
        driver.cuUserObjectCreate(&raw mut object, data.cast(), Some(drop_payload::<T>), 1, NO_DESTRUCTOR_SYNC)
    };
    if let Err(error) = made {
        // SAFETY: there is no object, so the box is still ours alone.
        drop(unsafe { Box::from_raw(data) });
        return Err(error);
    }
    // SAFETY: the graph exists (the caller's promise; one whose capture breaks at this very moment answers 1, measured),
    // and this call has a reference to the object, which it gives to the graph.
    if let Err(error) = unsafe { driver.cuGraphRetainUserObject(graph, object, 1, MOVE) } {
        // SAFETY: the reference was not taken. The payload goes with the object.
        drop(unsafe { driver.cuUserObjectRelease(object, 1) });
        return Err(error);
    }
    add(data).inspect_err(|_| {
        // SAFETY: as above. If the graph is gone, so is the object, and this answers an error.
        drop(unsafe { driver.cuGraphReleaseUserObject(graph, object, 1) });
    })
}

/// As [`own`], for a payload that is only kept.
///
/// # Safety
/// As [`own`].
pub(crate) unsafe fn own_payload<R>(
    driver: &Driver,
    graph: CUgraph,
    payload: Box<dyn Any + Send>,
    add: impl FnOnce() -> Result<R>,
) -> Result<R> {
    // SAFETY: the caller's promise.
    unsafe { own(driver, graph, Box::new(payload), |_| add()) }
}

/// What a host function is called in drawings, and what its adder wants to find again.
#[derive(Clone, Default)]
pub(crate) struct Label {
    pub(crate) name: String,
    #[cfg(feature = "python")]
    pub(crate) tag: Option<Arc<dyn Any + Send + Sync>>,
}

/// Adds a host function to `graph` by `add`, which gets the node's parameters; `find` then says which node it is.
///
/// # Safety
/// As [`own`].
pub(crate) unsafe fn add_host_code<F, A>(
    driver: &Driver,
    graph: CUgraph,
    owner: Owner,
    f: F,
    label: Label,
    add: impl FnOnce(CUDA_HOST_NODE_PARAMS) -> Result<A>,
    find: impl FnOnce(A) -> Result<CUgraphNode>,
) -> Result<HostNode, Refused<F>>
where
    F: Fn() + Send + Sync + 'static,
{
    // A refused closure has to come back, though the object that was to own it may be destroyed by then, on a thread of
    // the driver's, or be owned by a node that nobody can name. So the object gets it when nothing can fail any more,
    // before anybody can launch the graph; without it the node does nothing.
    let slot = Arc::new(OnceLock::<F>::new());
    let inside = Arc::clone(&slot);
    let code = HostCode::boxed(move || inside.get().into_iter().for_each(|f| f()), label);
    let record = Arc::clone(&code.record);
    let put = |data: *mut HostCode| add(CUDA_HOST_NODE_PARAMS { fn_: Some(run_host_code), userData: data.cast() });
    // SAFETY: the caller's promise.
    let added = unsafe { own(driver, graph, code, put) };
    match added.and_then(find).and_then(|node| Node::of(driver, owner, node)) {
        Ok(node) => {
            drop(slot.set(f));
            Ok(HostNode { node, record })
        }
        Err(error) => Err(Refused { error, returned: f }),
    }
}

/// A graph handle of the driver's.
enum Handle {
    Alive(CUgraph),
    /// Captured into: only the capture may use it.
    Captured(CUgraph),
    /// Gone with a capture that broke.
    Gone,
    Closed,
}

struct Inner {
    device: Device,
    owner: Owner,
    /// Graphs are not synchronized by the driver: this lock is held for each call.
    handle: Mutex<Handle>,
    /// Host functions in graphs inside of this one.
    inside: Mutex<Vec<Weak<HostRecord>>>,
    /// Of a clone.
    original: Option<Weak<Inner>>,
}

// SAFETY: a graph may be used from any thread, by one at a time, which the lock sees to.
unsafe impl Send for Inner {}
// SAFETY: as for Send.
unsafe impl Sync for Inner {}

impl Drop for Inner {
    fn drop(&mut self) {
        let handle = self.handle.get_mut().unwrap_or_else(PoisonError::into_inner);
        if let Handle::Alive(graph) = *handle {
            destroy(self.device, graph);
        }
    }
}

/// Destroys a graph that this was the owner of.
fn destroy(device: Device, graph: CUgraph) {
    let graph = graph as usize;
    reaper::release(device, move || {
        // SAFETY: nobody else has the handle. A failure means that the driver is gone, and the graph with it.
        drop(unsafe { device.driver().cuGraphDestroy(graph as CUgraph) });
    });
}

/// A graph (`CUgraph`): a template of work. A cheap, shared handle.
#[derive(Clone)]
pub struct Graph {
    inner: Arc<Inner>,
}

impl std::fmt::Debug for Graph {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Graph").field("device", &self.inner.device).finish_non_exhaustive()
    }
}

impl PartialEq for Graph {
    /// Whether it is the same graph.
    fn eq(&self, other: &Graph) -> bool {
        Arc::ptr_eq(&self.inner, &other.inner)
    }
}

impl Eq for Graph {}

impl Hash for Graph {
    fn hash<H: Hasher>(&self, state: &mut H) {
        Arc::as_ptr(&self.inner).hash(state);
    }
}

/// A graph that is captured into, until the capture gives it back.
pub(crate) struct Captive(Graph);

impl Captive {
    pub(crate) fn owner(&self) -> Owner {
        self.0.inner.owner
    }

    /// The capture has this number.
    pub(crate) fn named(&self, id: u64) {
        static SERIAL: AtomicU64 = AtomicU64::new(1);
        let serial = SERIAL.fetch_add(1, Ordering::Relaxed);
        captured_into().push(Into { kind: self.0.inner.device.kind(), id, owner: self.owner(), serial });
    }

    /// The capture is over; `whole`: it ended well. The driver has destroyed the graph otherwise.
    pub(crate) fn release(self, whole: bool) -> Graph {
        captured_into().retain(|into| into.owner != self.owner());
        let mut handle = self.0.lock();
        if let Handle::Captured(graph) = *handle {
            *handle = if whole { Handle::Alive(graph) } else { Handle::Gone };
        }
        drop(handle);
        self.0
    }
}

/// The nodes of a graph, and its edges, by the nodes' positions.
struct Shape {
    nodes: Vec<Node>,
    edges: Vec<(usize, usize)>,
}

impl Shape {
    fn has_cycle(&self) -> bool {
        let mut placed = 0;
        drawing::in_order(self.nodes.len(), &self.edges, |_, _| placed += 1);
        placed < self.nodes.len()
    }
}

/// Asks for the shape of a graph.
///
/// # Safety
/// The graph exists, and no other thread uses it meanwhile.
unsafe fn shape(driver: &Driver, graph: CUgraph, owner: Owner) -> Result<Shape> {
    let (mut count, mut edge_count) = (0_usize, 0_usize);
    let none = ptr::null_mut();
    // SAFETY: the caller's promise. Without arrays the counts are written, then the arrays, which have that many places.
    let (nodes, from, to) = unsafe {
        driver.cuGraphGetNodes(graph, none, &raw mut count)?;
        let mut nodes = vec![ptr::null_mut(); count];
        if count > 0 {
            driver.cuGraphGetNodes(graph, nodes.as_mut_ptr(), &raw mut count)?;
        }
        driver.cuGraphGetEdges_v2(graph, none, none, ptr::null_mut(), &raw mut edge_count)?;
        let (mut from, mut to) = (vec![ptr::null_mut(); edge_count], vec![ptr::null_mut(); edge_count]);
        let mut data: Vec<CUgraphEdgeData> = vec![std::mem::zeroed(); edge_count];
        if edge_count > 0 {
            let (from, to) = (from.as_mut_ptr(), to.as_mut_ptr());
            driver.cuGraphGetEdges_v2(graph, from, to, data.as_mut_ptr(), &raw mut edge_count)?;
        }
        (nodes, from, to)
    };
    let positions: FxHashMap<CUgraphNode, usize> = nodes.iter().enumerate().map(|(at, &node)| (node, at)).collect();
    let position = |node| positions.get(&node).copied().ok_or_else(|| Error::invalid("the graph changes meanwhile"));
    Ok(Shape {
        nodes: nodes.into_iter().map(|node| Node::of(driver, owner, node)).collect::<Result<_>>()?,
        edges: from
            .into_iter()
            .zip(to)
            .map(|(from, to)| Ok((position(from)?, position(to)?)))
            .collect::<Result<_>>()?,
    })
}

impl Graph {
    /// An empty graph (`cuGraphCreate`).
    ///
    /// # Errors
    /// What the driver answers.
    pub fn new(api: &Api<'_>, device: Device) -> Result<Graph> {
        let _bound = device.bind(api)?;
        let mut graph: CUgraph = ptr::null_mut();
        // SAFETY: writes one handle.
        unsafe { device.driver().cuGraphCreate(&raw mut graph, 0) }?;
        Ok(Graph::adopt(device, graph, Owner::fresh()))
    }

    /// Takes over a graph that nobody else owns.
    pub(crate) fn adopt(device: Device, graph: CUgraph, owner: Owner) -> Graph {
        Graph::make(device, graph, owner, None)
    }

    fn make(device: Device, graph: CUgraph, owner: Owner, original: Option<Weak<Inner>>) -> Graph {
        let handle = Mutex::new(Handle::Alive(graph));
        Graph { inner: Arc::new(Inner { device, owner, handle, inside: Mutex::default(), original }) }
    }

    fn lock(&self) -> MutexGuard<'_, Handle> {
        // Nothing foreign runs under the lock, so a poisoned one still guards a sound state.
        self.inner.handle.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn inside(&self) -> MutexGuard<'_, Vec<Weak<HostRecord>>> {
        self.inner.inside.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Calls `f` with the driver and the handle, one thread at a time.
    fn with<R>(&self, api: &Api<'_>, f: impl FnOnce(&'static Driver, CUgraph) -> Result<R>) -> Result<R> {
        let _bound = self.inner.device.bind(api)?;
        let handle = self.lock();
        f(self.inner.device.driver(), usable(&handle)?)
    }

    /// Lets a capture that `begin` begins have the graph.
    pub(crate) fn capture_into(
        &self,
        device: Device,
        dependencies: &[Node],
        begin: impl FnOnce(CUgraph, &[CUgraphNode]) -> Result<()>,
    ) -> Result<Captive> {
        self.refuse_foreign(device)?;
        let nodes = self.dependencies(dependencies)?;
        let mut handle = self.lock();
        let graph = usable(&handle)?;
        begin(graph, &nodes)?;
        *handle = Handle::Captured(graph);
        drop(handle);
        Ok(Captive(self.clone()))
    }

    fn refuse_foreign(&self, device: Device) -> Result<()> {
        if self.inner.device.kind() == device.kind() {
            return Ok(());
        }
        Err(Error::invalid(format!("a graph of device {} and an object of device {device}", self.inner.device)))
    }

    /// Its device.
    #[must_use]
    pub fn device(&self) -> Device {
        self.inner.device
    }

    /// Gives the graph up (`cuGraphDestroy`, later, on the background thread). Executables made from it go on.
    ///
    /// # Errors
    /// [`Error::Capture`] while it is captured into.
    pub fn close(&self) -> Result<()> {
        let mut handle = self.lock();
        match *handle {
            Handle::Captured(_) => return usable(&handle).map(drop),
            Handle::Alive(graph) => destroy(self.inner.device, graph),
            Handle::Gone | Handle::Closed => {}
        }
        *handle = Handle::Closed;
        Ok(())
    }

    /// Its handle (`CUgraph`), for other libraries. It is valid as long as this graph.
    ///
    /// # Errors
    /// [`Error::Capture`] while it is captured into, and when it is gone with a capture that broke.
    pub fn handle(&self) -> Result<usize> {
        usable(&self.lock()).map(|graph| graph as usize)
    }

    fn shape(&self, api: &Api<'_>) -> Result<Shape> {
        // SAFETY: the graph exists, and the lock keeps other threads away.
        self.with(api, |driver, graph| unsafe { shape(driver, graph, self.inner.owner) })
    }

    /// The nodes, in no particular order (`cuGraphGetNodes`).
    ///
    /// # Errors
    /// What the driver answers.
    pub fn nodes(&self, api: &Api<'_>) -> Result<Vec<Node>> {
        self.shape(api).map(|shape| shape.nodes)
    }

    /// The edges: the second node of each pair depends on the first (`cuGraphGetEdges`).
    ///
    /// # Errors
    /// What the driver answers.
    pub fn edges(&self, api: &Api<'_>) -> Result<Vec<(Node, Node)>> {
        let Shape { nodes, edges } = self.shape(api)?;
        Ok(edges.into_iter().map(|(from, to)| (nodes[from], nodes[to])).collect())
    }

    /// Adds edges: the second node of each pair will depend on the first (`cuGraphAddDependencies`).
    ///
    /// # Errors
    /// [`Error::InvalidValue`] for nodes of another graph, for a node and itself, and for an edge that exists.
    pub fn add_dependencies(&self, api: &Api<'_>, edges: &[(Node, Node)]) -> Result<()> {
        let owner = self.inner.owner;
        let from = edges.iter().map(|edge| owner.handle_of(edge.0)).collect::<Result<Vec<_>>>()?;
        let to = edges.iter().map(|edge| owner.handle_of(edge.1)).collect::<Result<Vec<_>>>()?;
        let there = self.edges(api)?;
        for (index, edge) in edges.iter().enumerate() {
            if edge.0 == edge.1 {
                return Err(Error::invalid(format!("{:?} cannot depend on itself", edge.0)));
            }
            if there.contains(edge) || edges[..index].contains(edge) {
                return Err(Error::invalid(format!("{:?} depends on {:?} already", edge.1, edge.0)));
            }
        }
        self.with(api, |driver, graph| {
            // SAFETY: the graph exists, and the nodes are its own.
            unsafe { driver.cuGraphAddDependencies_v2(graph, from.as_ptr(), to.as_ptr(), ptr::null(), from.len()) }
        })
    }

    /// Adds a node by `add`, which gets the place for its handle, the graph, and the nodes that it depends on.
    fn add(
        &self,
        api: &Api<'_>,
        dependencies: &[Node],
        add: impl FnOnce(&Driver, *mut CUgraphNode, CUgraph, &[CUgraphNode]) -> Result<()>,
    ) -> Result<Node> {
        let dependencies = self.dependencies(dependencies)?;
        self.with(api, |driver, graph| {
            let mut node: CUgraphNode = ptr::null_mut();
            add(driver, &raw mut node, graph, &dependencies)?;
            Node::of(driver, self.inner.owner, node)
        })
    }

    /// Nodes that a new one depends on: of this graph, each once.
    fn dependencies(&self, nodes: &[Node]) -> Result<Vec<CUgraphNode>> {
        let handles = self.inner.owner.handles_of(nodes)?;
        match nodes.iter().enumerate().find(|(index, node)| nodes[..*index].contains(node)) {
            Some((_, twice)) => Err(Error::invalid(format!("{twice:?} is given twice as a dependency"))),
            None => Ok(handles),
        }
    }

    /// As [`Graph::add`], for a node that uses `payload`, which the graph owns from then on.
    fn add_with(
        &self,
        api: &Api<'_>,
        dependencies: &[Node],
        payload: impl Any + Send,
        add: impl FnOnce(&Driver, *mut CUgraphNode, CUgraph, &[CUgraphNode]) -> Result<()>,
    ) -> Result<Node> {
        self.add(api, dependencies, |driver, node, graph, dependencies| {
            // SAFETY: the graph exists.
            unsafe { own_payload(driver, graph, Box::new(payload), || add(driver, node, graph, dependencies)) }
        })
    }

    /// Adds a node that does nothing (`cuGraphAddEmptyNode`).
    ///
    /// # Errors
    /// [`Error::InvalidValue`] for dependencies of another graph, or given twice; what the driver answers.
    pub fn add_empty_node(&self, api: &Api<'_>, dependencies: &[Node]) -> Result<Node> {
        self.add(api, dependencies, |driver, node, graph, dependencies| {
            // SAFETY: writes one handle; the graph exists, and the dependencies are its own.
            unsafe { driver.cuGraphAddEmptyNode(node, graph, dependencies.as_ptr(), dependencies.len()) }
        })
    }

    /// Adds a host function (`cuGraphAddHostNode`), which runs once for each launch and may not call the API.
    ///
    /// # Errors
    /// The closure comes back, untouched, with the error: as [`Graph::add_empty_node`].
    pub fn add_host_node<F>(&self, api: &Api<'_>, dependencies: &[Node], f: F) -> Result<HostNode, Refused<F>>
    where
        F: Fn() + Send + Sync + 'static,
    {
        self.add_labelled_host_node(api, dependencies, f, Label::default())
    }

    /// As [`Graph::add_host_node`], with a name for drawings.
    ///
    /// # Errors
    /// As [`Graph::add_host_node`].
    pub fn add_named_host_node<F>(
        &self,
        api: &Api<'_>,
        dependencies: &[Node],
        f: F,
        name: &str,
    ) -> Result<HostNode, Refused<F>>
    where
        F: Fn() + Send + Sync + 'static,
    {
        let mut label = Label::default();
        name.clone_into(&mut label.name);
        self.add_labelled_host_node(api, dependencies, f, label)
    }

    pub(crate) fn add_labelled_host_node<F>(
        &self,
        api: &Api<'_>,
        dependencies: &[Node],
        f: F,
        label: Label,
    ) -> Result<HostNode, Refused<F>>
    where
        F: Fn() + Send + Sync + 'static,
    {
        let mut f = Some(f);
        let added = self.dependencies(dependencies).and_then(|dependencies| {
            self.with(api, |driver, graph| {
                let add = |params: CUDA_HOST_NODE_PARAMS| {
                    let mut node: CUgraphNode = ptr::null_mut();
                    let (nodes, count) = (dependencies.as_ptr(), dependencies.len());
                    // SAFETY: writes one handle; the graph exists, and the dependencies are its own.
                    unsafe { driver.cuGraphAddHostNode(&raw mut node, graph, nodes, count, &raw const params) }
                        .map(|()| node)
                };
                let code = f.take().expect("this is called once");
                // SAFETY: the graph exists.
                let node = unsafe { add_host_code(driver, graph, self.inner.owner, code, label, add, Ok) };
                node.map_err(|refused| {
                    f = Some(refused.returned);
                    refused.error
                })
            })
        });
        added.map_err(|error| Refused { error, returned: f.expect("given back by every failure") })
    }

    /// Adds a copy of all of `src` to `dst` (`cuGraphAddMemcpyNode`). The graph keeps both alive.
    ///
    /// # Errors
    /// [`Error::InvalidValue`] when the sizes differ or are 0; as [`Graph::add_empty_node`].
    pub fn add_memcpy_node(&self, api: &Api<'_>, dependencies: &[Node], dst: &Buffer, src: &Buffer) -> Result<Node> {
        same_size(dst, src)?;
        self.refuse_foreign(dst.device())?;
        self.refuse_foreign(src.device())?;
        let keep = (dst.clone(), src.clone());
        // SAFETY: both buffers have that many bytes, are memory of this driver, and are kept.
        unsafe { self.add_memcpy_node_raw(api, dependencies, dst.ptr(), src.ptr(), dst.len(), keep) }
    }

    /// Adds a copy between any two addresses: host, pinned, managed or device memory (`cuGraphAddMemcpyNode`).
    ///
    /// # Safety
    /// Both ranges are valid, and nobody else uses them in a conflicting way while a launch runs the node; `keep`, which
    /// the graph owns, is how to see to the first.
    ///
    /// # Errors
    /// [`Error::InvalidValue`] for no bytes; as [`Graph::add_empty_node`].
    pub unsafe fn add_memcpy_node_raw(
        &self,
        api: &Api<'_>,
        dependencies: &[Node],
        dst: u64,
        src: u64,
        bytes: usize,
        keep: impl Any + Send,
    ) -> Result<Node> {
        if bytes == 0 {
            return Err(Error::invalid("a copy of 0 bytes is no node"));
        }
        self.add_with(api, dependencies, keep, |driver, node, graph, dependencies| {
            let mut params = std::mem::MaybeUninit::<CUDA_MEMCPY3D>::zeroed();
            // By their addresses, which say by themselves where they are.
            let kind = CUmemorytype::CU_MEMORYTYPE_UNIFIED;
            // SAFETY: the fields are inside the structure. Its two enums, for which zero is no value, are written; zero is
            // a value of all other fields.
            let params = unsafe {
                let to = params.as_mut_ptr();
                (&raw mut (*to).srcMemoryType).write(kind);
                (&raw mut (*to).dstMemoryType).write(kind);
                let mut params = params.assume_init();
                (params.srcDevice, params.dstDevice) = (src, dst);
                (params.WidthInBytes, params.Height, params.Depth) = (bytes, 1, 1);
                params
            };
            let (nodes, count) = (dependencies.as_ptr(), dependencies.len());
            let context = self.inner.device.context_handle() as _;
            // SAFETY: writes one handle; graph, dependencies and context exist; the ranges are the caller's promise.
            unsafe { driver.cuGraphAddMemcpyNode(node, graph, nodes, count, &raw const params, context) }
        })
    }

    /// Adds that all of `dst` is filled with `pattern` (`cuGraphAddMemsetNode`). The graph keeps it alive.
    ///
    /// # Errors
    /// [`Error::InvalidValue`] when the pattern does not divide the size, or that is 0; as [`Graph::add_empty_node`].
    pub fn add_memset_node(
        &self,
        api: &Api<'_>,
        dependencies: &[Node],
        dst: &Buffer,
        pattern: Pattern,
    ) -> Result<Node> {
        let count = pattern.times(dst.len())?;
        self.refuse_foreign(dst.device())?;
        // SAFETY: the buffer has that many bytes, is memory of this driver, and is kept.
        unsafe { self.add_memset_node_raw(api, dependencies, dst.ptr(), pattern, count, dst.clone()) }
    }

    /// Adds that `count` patterns are written from `dst` on (`cuGraphAddMemsetNode`).
    ///
    /// # Safety
    /// As [`Graph::add_memcpy_node_raw`].
    ///
    /// # Errors
    /// As [`Graph::add_memset_node`].
    pub unsafe fn add_memset_node_raw(
        &self,
        api: &Api<'_>,
        dependencies: &[Node],
        dst: u64,
        pattern: Pattern,
        count: usize,
        keep: impl Any + Send,
    ) -> Result<Node> {
        if count == 0 {
            return Err(Error::invalid("a fill of 0 bytes is no node"));
        }
        let value = match pattern {
            Pattern::U8(value) => u32::from(value),
            Pattern::U16(value) => u32::from(value),
            Pattern::U32(value) => value,
        };
        let element_size = u32::try_from(pattern.len()).expect("at most four");
        let params =
            CUDA_MEMSET_NODE_PARAMS { dst, pitch: 0, value, elementSize: element_size, width: count, height: 1 };
        self.add_with(api, dependencies, keep, |driver, node, graph, dependencies| {
            let (nodes, count) = (dependencies.as_ptr(), dependencies.len());
            let context = self.inner.device.context_handle() as _;
            // SAFETY: as for a copy.
            unsafe { driver.cuGraphAddMemsetNode(node, graph, nodes, count, &raw const params, context) }
        })
        .map_err(|error| unfillable(api, self.inner.device, dst, error))
    }

    /// Adds a node that records `event` at each launch (`cuGraphAddEventRecordNode`). The graph keeps it alive.
    ///
    /// # Errors
    /// As [`Graph::add_empty_node`].
    pub fn add_event_record_node(&self, api: &Api<'_>, dependencies: &[Node], event: &Event) -> Result<Node> {
        self.refuse_foreign(event.device())?;
        event.share(api)?;
        let raw = event.raw()?;
        let handle = raw.handle();
        let node = self.add_with(api, dependencies, raw, |driver, node, graph, dependencies| {
            // SAFETY: writes one handle; graph and dependencies exist; the graph keeps the event.
            unsafe { driver.cuGraphAddEventRecordNode(node, graph, dependencies.as_ptr(), dependencies.len(), handle) }
        })?;
        event.recorded_at_launches();
        Ok(node)
    }

    /// Adds a node that waits at each launch for `event`, as it is recorded then (`cuGraphAddEventWaitNode`). The graph
    /// keeps it alive.
    ///
    /// # Errors
    /// As [`Graph::add_empty_node`].
    pub fn add_event_wait_node(&self, api: &Api<'_>, dependencies: &[Node], event: &Event) -> Result<Node> {
        self.refuse_foreign(event.device())?;
        // The graph waits for what is recorded later, too.
        event.share(api)?;
        let raw = event.raw()?;
        let handle = raw.handle();
        self.add_with(api, dependencies, raw, |driver, node, graph, dependencies| {
            // SAFETY: as for a record.
            unsafe { driver.cuGraphAddEventWaitNode(node, graph, dependencies.as_ptr(), dependencies.len(), handle) }
        })
    }

    /// Adds a copy of `child` as a node (`cuGraphAddChildGraphNode`).
    ///
    /// # Errors
    /// [`Error::InvalidValue`] for the graph itself; as [`Graph::add_empty_node`].
    pub fn add_child_graph(&self, api: &Api<'_>, dependencies: &[Node], child: &Graph) -> Result<Node> {
        self.refuse_foreign(child.inner.device)?;
        if self == child {
            return Err(Error::invalid("a graph cannot be inside of itself: add a clone"));
        }
        let records = child.host_records(api)?;
        // A clone of one's own, so that the two graphs' locks are never held at once.
        let copy = child.clone_graph(api)?;
        let node = copy.with(api, |_, inner| {
            self.add(api, dependencies, |driver, node, graph, dependencies| {
                let (nodes, count) = (dependencies.as_ptr(), dependencies.len());
                // SAFETY: writes one handle; both graphs and the dependencies exist.
                unsafe { driver.cuGraphAddChildGraphNode(node, graph, nodes, count, inner) }
            })
        })?;
        self.inside().extend(records.iter().map(Arc::downgrade));
        Ok(node)
    }

    /// A copy of the graph (`cuGraphClone`). It shares the host functions, and keeps alive what they use.
    ///
    /// # Errors
    /// What the driver answers.
    pub fn clone_graph(&self, api: &Api<'_>) -> Result<Graph> {
        self.with(api, |driver, graph| {
            let mut clone: CUgraph = ptr::null_mut();
            // SAFETY: writes one handle; the graph exists.
            unsafe { driver.cuGraphClone(&raw mut clone, graph) }?;
            let clone = Graph::make(self.inner.device, clone, Owner::fresh(), Some(Arc::downgrade(&self.inner)));
            clone.inside().extend(self.inside().iter().cloned());
            Ok(clone)
        })
    }

    /// The node of a clone that `original`, of the graph that was cloned, became (`cuGraphNodeFindInClone`).
    ///
    /// # Errors
    /// [`Error::InvalidValue`] when this is no clone of that graph.
    pub fn find_in_clone(&self, api: &Api<'_>, original: Node) -> Result<Node> {
        let Some(graph) = &self.inner.original else {
            return Err(Error::invalid("this graph is no clone"));
        };
        let gone = || Error::invalid("the graph that this is a clone of is gone");
        let graph = Graph { inner: graph.upgrade().ok_or_else(gone)? };
        let original = graph.inner.owner.handle_of(original)?;
        // The original has to exist for the driver to look it up.
        let handle = graph.lock();
        usable(&handle)?;
        let found = self.with(api, |driver, clone| {
            let mut node: CUgraphNode = ptr::null_mut();
            // SAFETY: writes one handle; the clone exists, and the original, which is locked.
            unsafe { driver.cuGraphNodeFindInClone(&raw mut node, original, clone) }?;
            Node::of(driver, self.inner.owner, node)
        });
        drop(handle);
        found
    }

    /// What is known about the host functions in the graph and in the graphs inside of it.
    fn host_records(&self, api: &Api<'_>) -> Result<Vec<Arc<HostRecord>>> {
        self.with(api, |driver, graph| {
            // SAFETY: the graph exists, and the lock keeps other threads away.
            let shape = unsafe { shape(driver, graph, self.inner.owner) }?;
            Ok(self.records_of(driver, &shape))
        })
    }

    fn records_of(&self, driver: &Driver, shape: &Shape) -> Vec<Arc<HostRecord>> {
        let mut records: Vec<_> = shape.nodes.iter().filter_map(|&node| host_record(driver, node)).collect();
        records.extend(self.inside().iter().filter_map(Weak::upgrade));
        records
    }

    /// The host functions in the graph that rstream added, without those of graphs inside of it.
    ///
    /// # Errors
    /// What the driver answers.
    pub fn host_nodes(&self, api: &Api<'_>) -> Result<Vec<HostNode>> {
        self.with(api, |driver, graph| {
            // SAFETY: the graph exists, and the lock keeps other threads away.
            let nodes = unsafe { shape(driver, graph, self.inner.owner) }?.nodes;
            let found = |node| host_record(driver, node).map(|record| HostNode { node, record });
            Ok(nodes.into_iter().filter_map(found).collect())
        })
    }

    /// The graph in the DOT language of Graphviz: a box for each node with what it does, an arrow for each edge.
    ///
    /// # Errors
    /// What the driver answers.
    pub fn to_dot(&self, api: &Api<'_>) -> Result<String> {
        self.with(api, |driver, graph| {
            // SAFETY: the graph exists, and the lock keeps other threads away.
            let shape = unsafe { shape(driver, graph, self.inner.owner) }?;
            let mut text = String::from("digraph graph_1 {\n    node [shape=box]\n");
            for (number, &node) in shape.nodes.iter().enumerate() {
                let label = label(driver, node).replace('\\', "\\\\").replace('"', "\\\"");
                writeln!(text, "    n{number} [label=\"{label}\"]").expect("a string grows");
            }
            for (from, to) in shape.edges {
                writeln!(text, "    n{from} -> n{to}").expect("a string grows");
            }
            text.push_str("}\n");
            Ok(text)
        })
    }

    /// The graph as a drawing: a document in SVG. For graphs that a person can read, of some hundred nodes at most.
    ///
    /// # Errors
    /// What the driver answers.
    pub fn to_svg(&self, api: &Api<'_>) -> Result<String> {
        self.with(api, |driver, graph| {
            // SAFETY: the graph exists, and the lock keeps other threads away.
            let shape = unsafe { shape(driver, graph, self.inner.owner) }?;
            let labels: Vec<String> = shape.nodes.iter().map(|&node| label(driver, node)).collect();
            Ok(drawing::svg(&labels, &shape.edges))
        })
    }

    /// Makes the graph executable (`cuGraphInstantiateWithFlags`). Later changes of the graph do not matter to it.
    ///
    /// # Errors
    /// [`Error::InvalidValue`] for a graph with a cycle; [`Error::Capture`] while it is captured into.
    pub fn instantiate(&self, api: &Api<'_>) -> Result<GraphExec> {
        self.with(api, |driver, graph| {
            // SAFETY: the graph exists, and the lock keeps other threads away.
            let shape = unsafe { shape(driver, graph, self.inner.owner) }?;
            if shape.has_cycle() {
                return Err(Error::invalid("the graph has a cycle: some nodes depend on one another"));
            }
            let records = self.records_of(driver, &shape);
            // It is no part of anybody's capture, so it must not break one.
            let _relaxed = Relaxed::enter(driver);
            let _may_block = MayBlock::enter();
            let mut exec: CUgraphExec = ptr::null_mut();
            // SAFETY: writes one handle; the graph exists.
            unsafe { driver.cuGraphInstantiateWithFlags(&raw mut exec, graph, 0) }?;
            let device = self.inner.device;
            let raw = Mutex::new(Some(Arc::new(RawExec { device, handle: exec, turn: Mutex::new(()) })));
            Ok(GraphExec { inner: Arc::new(ExecInner { device, raw, records: Mutex::new(records) }) })
        })
    }
}

/// The handle, for whom may use it.
fn usable(handle: &Handle) -> Result<CUgraph> {
    match *handle {
        Handle::Alive(graph) => Ok(graph),
        Handle::Closed => Err(Error::Closed { what: "Graph" }),
        Handle::Captured(_) => Err(Error::capture(
            Status::STREAM_CAPTURE_UNSUPPORTED,
            "the graph is being captured into: end the capture first, or use the capture",
        )),
        Handle::Gone => Err(Error::capture(
            Status::STREAM_CAPTURE_INVALIDATED,
            "the graph is gone: a capture into it ended badly, and the driver destroyed it",
        )),
    }
}

/// What a node is called in drawings, on one line.
fn label(driver: &Driver, node: Node) -> String {
    let name = host_record(driver, node).map(|record| record.label.name.clone()).unwrap_or_default();
    let text = [node.kind.name(), &name].join(if name.is_empty() { "" } else { " " });
    text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect()
}

/// What is known about the host function of a node, which exists, if it is one of this crate's.
fn host_record(driver: &Driver, node: Node) -> Option<Arc<HostRecord>> {
    if node.kind != NodeKind::Host {
        return None;
    }
    let mut params = CUDA_HOST_NODE_PARAMS { fn_: None, userData: ptr::null_mut() };
    // SAFETY: the node exists; writes one structure.
    unsafe { driver.cuGraphHostNodeGetParams(node.handle as CUgraphNode, &raw mut params) }.ok()?;
    let ours: unsafe extern "C" fn(*mut c_void) = run_host_code;
    if params.fn_.map(|function| function as usize) != Some(ours as usize) {
        return None;
    }
    host_codes(|codes| codes.get(&(params.userData as usize)).and_then(Weak::upgrade))
}

/// An executable's handle, which this owns.
struct RawExec {
    device: Device,
    handle: CUgraphExec,
    /// Executables are not synchronized by the driver: this lock is held for each call.
    turn: Mutex<()>,
}

// SAFETY: an executable may be used from any thread, by one at a time, which `turn` sees to.
unsafe impl Send for RawExec {}
// SAFETY: as for Send.
unsafe impl Sync for RawExec {}

impl Drop for RawExec {
    fn drop(&mut self) {
        let (device, exec) = (self.device, self.handle as usize);
        reaper::release(device, move || {
            // SAFETY: this was the owner. Launches that are pending still run (measured).
            drop(unsafe { device.driver().cuGraphExecDestroy(exec as CUgraphExec) });
        });
    }
}

struct ExecInner {
    device: Device,
    raw: Mutex<Option<Arc<RawExec>>>,
    /// Its host functions.
    records: Mutex<Vec<Arc<HostRecord>>>,
}

/// A graph that can be launched (`CUgraphExec`). A cheap, shared handle.
#[derive(Clone)]
pub struct GraphExec {
    inner: Arc<ExecInner>,
}

impl std::fmt::Debug for GraphExec {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("GraphExec").field("device", &self.inner.device).field("closed", &self.is_closed()).finish()
    }
}

impl GraphExec {
    fn raw(&self) -> Result<Arc<RawExec>> {
        let raw = self.inner.raw.lock().unwrap_or_else(PoisonError::into_inner).clone();
        raw.ok_or(Error::Closed { what: "GraphExec" })
    }

    fn records(&self) -> MutexGuard<'_, Vec<Arc<HostRecord>>> {
        self.inner.records.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Calls `f` with the handles, one thread at a time.
    fn on_stream(
        &self,
        api: &Api<'_>,
        stream: &Stream,
        f: impl FnOnce(&Driver, CUgraphExec, CUstream) -> Result<()>,
    ) -> Result<()> {
        if stream.device().kind() != self.inner.device.kind() {
            let (mine, its) = (self.inner.device, stream.device());
            return Err(Error::invalid(format!("a graph of device {mine} on a stream of device {its}")));
        }
        let ready = stream.ready(api, "launch a graph", "Add the graph as a node of another (add_child_graph)")?;
        let raw = self.raw()?;
        let _turn = raw.turn.lock().unwrap_or_else(PoisonError::into_inner);
        f(self.inner.device.driver(), raw.handle, ready.handle())
    }

    /// Its device.
    #[must_use]
    pub fn device(&self) -> Device {
        self.inner.device
    }

    /// Its handle (`CUgraphExec`), for other libraries.
    ///
    /// # Errors
    /// [`Error::Closed`].
    pub fn handle(&self) -> Result<usize> {
        self.raw().map(|raw| raw.handle as usize)
    }

    /// Whether it was closed.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        self.raw().is_err()
    }

    /// The messages of panics of its host functions: of each the last [`HostNode::MOST_PANICS`].
    #[must_use]
    pub fn panics(&self) -> Vec<String> {
        let kept = |record: &Arc<HostRecord>| record.panics.lock().unwrap_or_else(PoisonError::into_inner).clone();
        self.records().iter().flat_map(kept).collect()
    }

    /// What its host functions were tagged with.
    #[cfg(feature = "python")]
    pub(crate) fn tags(&self) -> Vec<Arc<dyn Any + Send + Sync>> {
        self.records().iter().filter_map(|record| record.label.tag.clone()).collect()
    }

    /// Launches it behind what is queued on `stream` (`cuGraphLaunch`). Launches of one executable never overlap. After a
    /// fault of earlier work its host functions do not run.
    ///
    /// # Errors
    /// [`Error::Capture`] on a stream that captures; [`Error::Closed`]; what the driver answers.
    pub fn launch(&self, api: &Api<'_>, stream: &Stream) -> Result<()> {
        self.on_stream(api, stream, |driver, exec, stream| {
            // SAFETY: both handles are alive.
            unsafe { driver.cuGraphLaunch(exec, stream) }
        })
    }

    /// Brings what it needs to the device, so that the first launch is not slower than the others (`cuGraphUpload`).
    ///
    /// # Errors
    /// As [`GraphExec::launch`].
    pub fn upload(&self, api: &Api<'_>, stream: &Stream) -> Result<()> {
        self.on_stream(api, stream, |driver, exec, stream| {
            // SAFETY: both handles are alive.
            unsafe { driver.cuGraphUpload(exec, stream) }
        })
    }

    /// Makes later launches do what `graph` says, which has to have the same nodes and edges (`cuGraphExecUpdate`).
    ///
    /// # Errors
    /// [`Status::GRAPH_EXEC_UPDATE_FAILURE`] when it has not: nothing is changed then.
    pub fn update(&self, api: &Api<'_>, graph: &Graph) -> Result<()> {
        graph.refuse_foreign(self.inner.device)?;
        let records = graph.host_records(api)?;
        let raw = self.raw()?;
        graph.with(api, |driver, graph| {
            let _turn = raw.turn.lock().unwrap_or_else(PoisonError::into_inner);
            let _relaxed = Relaxed::enter(driver);
            let _may_block = MayBlock::enter();
            let mut info = std::mem::MaybeUninit::<CUgraphExecUpdateResultInfo>::zeroed();
            // SAFETY: both handles are alive; writes one structure, which nobody reads as such: a result that the
            // bindings do not know would be no value of their enum.
            let updated = unsafe { driver.cuGraphExecUpdate_v2(raw.handle, graph, info.as_mut_ptr()) };
            updated.map_err(|error| {
                // SAFETY: written, or zeroed above; read as the integer that it is in C.
                let reason = unsafe { (&raw const (*info.as_ptr()).result).cast::<c_uint>().read() };
                let refused = error.status() == Status::GRAPH_EXEC_UPDATE_FAILURE;
                if refused { Error::GraphUpdate { reason } } else { error }
            })
        })?;
        // Dropped after the lock is released: what they hold may run foreign code.
        let before = std::mem::replace(&mut *self.records(), records);
        drop(before);
        Ok(())
    }

    /// Gives it up (`cuGraphExecDestroy`, later, on the background thread). Launches that are pending still run.
    pub fn close(&self) {
        let raw = self.inner.raw.lock().unwrap_or_else(PoisonError::into_inner).take();
        drop(raw);
    }
}
