//! Graphs: nodes and edges, executable graphs, and their launches.
//!
//! A launch lays the nodes out on streams of its own, one for each branch, and on the launching stream itself for the
//! first branch: a graph that is a chain costs no other stream.

use std::collections::HashMap;
use std::ffi::{CStr, c_char, c_uint, c_ulonglong, c_void};
use std::fmt::Write as _;
use std::sync::Arc;

use cudarc::driver::sys::{
    CUDA_HOST_NODE_PARAMS, CUDA_MEMCPY3D, CUDA_MEMSET_NODE_PARAMS, CUcontext, CUevent, CUgraph, CUgraphEdgeData,
    CUgraphExec, CUgraphExecUpdateResultInfo, CUgraphNode, CUstream,
};

use crate::system::{
    self, Answer, GRAPH_EXEC_UPDATE_FAILURE, HostCall, INVALID_HANDLE, INVALID_VALUE, NOT_SUPPORTED, Op, Owner, Place,
    Source, System, Work,
};
use crate::user_object::{GraphMemory, UserObject};
use crate::{call_outside, device, memory, put, stream};

/// `CUgraphNodeType`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum NodeType {
    Kernel = 0,
    Memcpy = 1,
    Memset = 2,
    Host = 3,
    Graph = 4,
    Empty = 5,
    WaitEvent = 6,
    EventRecord = 7,
    MemAlloc = 10,
    MemFree = 11,
    BatchMemOp = 12,
}

/// What a node does when it is launched.
#[derive(Clone)]
pub(crate) enum NodeWork {
    Empty,
    /// Operations that nothing comes between.
    Works(NodeType, Vec<Work>),
    Record(usize),
    Wait(usize),
    /// A graph inside, which the node owns.
    Child(usize),
    /// Memory of the graph, which exists from the capture on.
    Alloc(Arc<GraphMemory>),
}

impl NodeWork {
    /// The node that operations of a stream become when it captures; `None` for what cannot be captured.
    pub(crate) fn of(works: &[Work]) -> Option<NodeWork> {
        let kind = match works.first()? {
            Work::Spin(_) | Work::Fault(_) => NodeType::Kernel,
            Work::Copy { .. } => NodeType::Memcpy,
            Work::Fill { .. } => NodeType::Memset,
            Work::Host { call: HostCall::Function(_), .. } => NodeType::Host,
            Work::Write { .. } | Work::WaitValue(_) => NodeType::BatchMemOp,
            Work::Free(_) => NodeType::MemFree,
            Work::Host { .. } | Work::Attach { .. } | Work::Mark => return None,
        };
        Some(NodeWork::Works(kind, works.to_vec()))
    }

    fn kind(&self) -> NodeType {
        match self {
            NodeWork::Empty => NodeType::Empty,
            NodeWork::Works(kind, _) => *kind,
            NodeWork::Record(_) => NodeType::EventRecord,
            NodeWork::Wait(_) => NodeType::WaitEvent,
            NodeWork::Child(_) => NodeType::Graph,
            NodeWork::Alloc(_) => NodeType::MemAlloc,
        }
    }
}

pub(crate) struct Node {
    handle: usize,
    work: NodeWork,
    pub(crate) dependencies: Vec<usize>,
}

/// A graph: a template, which nothing executes.
#[derive(Default)]
pub(crate) struct Graph {
    pub(crate) id: u64,
    nodes: Vec<Node>,
    objects: Vec<Arc<UserObject>>,
    /// Of a clone: the node that each node of the original became.
    clones: HashMap<usize, usize>,
    /// Whether a node of another graph owns it.
    is_child: bool,
}

impl Graph {
    /// Whether it has memory of its own, which must not be there twice.
    fn has_memory(&self) -> bool {
        self.nodes.iter().any(|node| matches!(node.work.kind(), NodeType::MemAlloc | NodeType::MemFree))
    }

    pub(crate) fn node(&self, handle: usize) -> Option<&Node> {
        self.nodes.iter().find(|node| node.handle == handle)
    }

    fn position(&self, handle: usize) -> Option<usize> {
        self.nodes.iter().position(|node| node.handle == handle)
    }
}

/// What has to live as long as an executable graph or a launch of it.
pub(crate) struct Kept {
    _objects: Vec<Arc<UserObject>>,
    _memory: Vec<Arc<GraphMemory>>,
}

/// A node of an executable graph, after those of its branch.
#[derive(Clone)]
struct Step {
    work: StepWork,
    after: Vec<usize>,
}

#[derive(Clone)]
enum StepWork {
    Works(Vec<Work>),
    Record(usize),
    Wait(usize),
}

/// A graph ready to be launched.
pub(crate) struct Exec {
    /// What it was made of.
    graph: usize,
    steps: Vec<Step>,
    /// The memory that a launch allocates and leaves, and that it frees without having allocated it.
    allocates: Vec<u64>,
    frees: Vec<u64>,
    /// A launch frees what an earlier one left.
    auto_free: bool,
    /// What an update has to have in common.
    shape: Vec<(NodeType, Vec<usize>)>,
    kept: Arc<Kept>,
    /// The end of its last launch: launches of one executable do not overlap.
    last: Option<Arc<Place>>,
}

impl System {
    pub(crate) fn new_graph(&mut self) -> usize {
        let handle = system::fresh_handle();
        self.graphs_made += 1;
        self.graphs.insert(handle, Graph { id: self.graphs_made, ..Graph::default() });
        handle
    }

    pub(crate) fn forget_graph(&mut self, handle: usize) {
        let Some(graph) = self.graphs.remove(&handle) else { return };
        for node in graph.nodes {
            self.nodes.remove(&node.handle);
            if let NodeWork::Child(child) = node.work {
                self.forget_graph(child);
            }
        }
    }

    /// The dependencies are nodes of the graph, which exists.
    pub(crate) fn add_node(&mut self, graph: usize, dependencies: Vec<usize>, work: NodeWork) -> usize {
        let handle = system::fresh_handle();
        self.graphs.get_mut(&graph).expect("its caller found it").nodes.push(Node { handle, work, dependencies });
        self.nodes.insert(handle, graph);
        handle
    }

    fn graph_of(&self, node: usize) -> Answer<&Graph> {
        self.nodes.get(&node).and_then(|graph| self.graphs.get(graph)).ok_or(INVALID_VALUE)
    }

    fn node_of(&self, node: usize) -> Answer<&Node> {
        self.graph_of(node)?.node(node).ok_or(INVALID_VALUE)
    }

    fn clone_graph(&mut self, graph: usize, is_child: bool) -> Answer<usize> {
        let original = self.graphs.get(&graph).ok_or(INVALID_VALUE)?;
        if original.has_memory() {
            return Err(NOT_SUPPORTED);
        }
        let nodes: Vec<(usize, NodeWork, Vec<usize>)> =
            original.nodes.iter().map(|node| (node.handle, node.work.clone(), node.dependencies.clone())).collect();
        let objects = original.objects.clone();
        let clone = self.new_graph();
        let mut clones = HashMap::new();
        for (handle, work, _) in &nodes {
            let work = match work {
                NodeWork::Child(child) => NodeWork::Child(self.clone_graph(*child, true)?),
                work => work.clone(),
            };
            clones.insert(*handle, self.add_node(clone, Vec::new(), work));
        }
        let state = self.graphs.get_mut(&clone).expect("made above");
        for (node, (_, _, dependencies)) in state.nodes.iter_mut().zip(&nodes) {
            node.dependencies = dependencies.iter().map(|dependency| clones[dependency]).collect();
        }
        (state.objects, state.clones, state.is_child) = (objects, clones, is_child);
        Ok(clone)
    }

    /// The positions of a graph's nodes, each behind those that it depends on. A cycle has no such order.
    fn order(graph: &Graph) -> Answer<Vec<usize>> {
        let positions: HashMap<usize, usize> =
            graph.nodes.iter().enumerate().map(|(position, node)| (node.handle, position)).collect();
        let mut missing: Vec<usize> = graph.nodes.iter().map(|node| node.dependencies.len()).collect();
        let mut dependents = vec![Vec::new(); graph.nodes.len()];
        for (position, node) in graph.nodes.iter().enumerate() {
            for dependency in &node.dependencies {
                dependents[positions[dependency]].push(position);
            }
        }
        let mut order: Vec<usize> = (0..graph.nodes.len()).filter(|&position| missing[position] == 0).collect();
        let mut next = 0;
        while let Some(&position) = order.get(next) {
            next += 1;
            for &dependent in &dependents[position] {
                missing[dependent] -= 1;
                if missing[dependent] == 0 {
                    order.push(dependent);
                }
            }
        }
        if order.len() == graph.nodes.len() { Ok(order) } else { Err(INVALID_VALUE) }
    }

    /// Appends the steps of a graph, the first ones behind `after`. Gives the steps that nothing of it comes behind.
    fn flatten(&self, graph: usize, after: &[usize], exec: &mut Flat) -> Answer<Vec<usize>> {
        let graph = self.graphs.get(&graph).ok_or(INVALID_VALUE)?;
        exec.objects.extend(graph.objects.iter().cloned());
        let mut ends: HashMap<usize, Vec<usize>> = HashMap::new();
        let mut leaves: Vec<usize> = graph.nodes.iter().map(|node| node.handle).collect();
        for position in System::order(graph)? {
            let node = &graph.nodes[position];
            let mut before: Vec<usize> = node.dependencies.iter().flat_map(|node| ends[node].iter().copied()).collect();
            if node.dependencies.is_empty() {
                before.extend(after);
            }
            let work = match &node.work {
                NodeWork::Child(child) => {
                    let child_ends = self.flatten(*child, &before, exec)?;
                    // An empty graph inside passes on what it depends on.
                    ends.insert(node.handle, if child_ends.is_empty() { before } else { child_ends });
                    continue;
                }
                NodeWork::Empty => StepWork::Works(vec![Work::Mark]),
                NodeWork::Alloc(memory) => {
                    exec.memory.push(Arc::clone(memory));
                    StepWork::Works(vec![Work::Mark])
                }
                // The memory of a graph stays its own.
                NodeWork::Works(NodeType::MemFree, works) => {
                    exec.freed.extend(works.iter().filter_map(|work| match work {
                        Work::Free(address) => Some(*address),
                        _ => None,
                    }));
                    StepWork::Works(vec![Work::Mark])
                }
                NodeWork::Works(_, works) => StepWork::Works(works.clone()),
                NodeWork::Record(event) => StepWork::Record(*event),
                NodeWork::Wait(event) => StepWork::Wait(*event),
            };
            ends.insert(node.handle, vec![exec.steps.len()]);
            exec.steps.push(Step { work, after: before });
        }
        for node in &graph.nodes {
            leaves.retain(|leaf| !node.dependencies.contains(leaf));
        }
        Ok(leaves.into_iter().flat_map(|leaf| ends.remove(&leaf).expect("all are in the order")).collect())
    }

    fn shape(&self, graph: usize) -> Answer<Vec<(NodeType, Vec<usize>)>> {
        let graph = self.graphs.get(&graph).ok_or(INVALID_VALUE)?;
        let row = |node: &Node| {
            (node.work.kind(), node.dependencies.iter().filter_map(|&node| graph.position(node)).collect())
        };
        Ok(graph.nodes.iter().map(row).collect())
    }

    fn executable(&self, graph: usize, auto_free: bool) -> Answer<Exec> {
        let mut flat = Flat::default();
        self.flatten(graph, &[], &mut flat)?;
        let allocated: Vec<u64> = flat.memory.iter().map(|memory| memory.0).collect();
        let without = |some: &[u64], others: &[u64]| some.iter().copied().filter(|one| !others.contains(one)).collect();
        let (allocates, frees) = (without(&allocated, &flat.freed), without(&flat.freed, &allocated));
        let kept = Arc::new(Kept { _objects: flat.objects, _memory: flat.memory });
        let shape = self.shape(graph)?;
        Ok(Exec { graph, steps: flat.steps, allocates, frees, auto_free, shape, kept, last: None })
    }

    /// Whether the device itself may launch a graph.
    fn is_for_the_device(&self, graph: usize) -> bool {
        let good = |node: &Node| match node.work {
            NodeWork::Child(child) => self.is_for_the_device(child),
            _ => matches!(node.work.kind(), NodeType::Kernel | NodeType::Memcpy | NodeType::Memset),
        };
        self.graphs.get(&graph).is_some_and(|graph| graph.nodes.iter().all(good))
    }

    /// Memory that a launch allocates must not be left from an earlier one.
    fn allocate_for_launch(&mut self, exec: usize) -> Answer {
        let exec = self.execs.get(&exec).ok_or(INVALID_VALUE)?;
        let (allocates, frees) = (exec.allocates.clone(), exec.frees.clone());
        let is_left =
            |address| self.memory.get(address).is_some_and(|memory| memory.owner == Owner::Graph { live: true });
        if !exec.auto_free && allocates.iter().any(is_left) {
            return Err(INVALID_VALUE);
        }
        for address in frees {
            self.set_live(address, false);
        }
        for address in allocates {
            self.set_live(address, true);
        }
        Ok(())
    }

    /// Puts a launch into `stream` and streams of its own.
    fn launch(&mut self, exec: usize, stream: u64) -> Answer {
        let context = self.streams.get(&stream).ok_or(INVALID_HANDLE)?.context;
        self.sound(context)?;
        self.allocate_for_launch(exec)?;
        let state = self.execs.get_mut(&exec).ok_or(INVALID_VALUE)?;
        let (steps, kept) = (state.steps.clone(), Arc::clone(&state.kept));
        let end = Arc::new(Place::default());
        let before = state.last.replace(Arc::clone(&end));
        let start = Arc::new(Place::default());
        let begin = Op {
            work: Work::Mark,
            after: before.into_iter().collect(),
            place: Some(Arc::clone(&start)),
            more: false,
            _kept: None,
        };
        self.push(stream, begin)?;
        // The last step of each branch; the first branch is the launching stream itself.
        let mut tails: Vec<(u64, Option<usize>)> = vec![(stream, None)];
        let mut places: Vec<Arc<Place>> = Vec::with_capacity(steps.len());
        for (index, step) in steps.into_iter().enumerate() {
            let fits = |tail: Option<usize>| match tail {
                None => step.after.is_empty(),
                Some(tail) => step.after.contains(&tail),
            };
            let branch = tails.iter().position(|&(_, tail)| fits(tail)).unwrap_or_else(|| {
                tails.push((self.new_stream(context, 1, 0), None));
                tails.len() - 1
            });
            tails[branch].1 = Some(index);
            let mut after: Vec<Arc<Place>> = step.after.iter().map(|&step| Arc::clone(&places[step])).collect();
            after.push(Arc::clone(&start));
            let place = Arc::new(Place::default());
            places.push(Arc::clone(&place));
            let works = match step.work {
                StepWork::Works(works) => works,
                StepWork::Record(event) => {
                    if let Some(event) = self.events.get_mut(&event) {
                        event.place = Some(Arc::clone(&place));
                        event.captured = None;
                    }
                    vec![Work::Mark]
                }
                StepWork::Wait(event) => {
                    after.extend(self.events.get(&event).and_then(|event| event.place.clone()));
                    vec![Work::Mark]
                }
            };
            let last = works.len() - 1;
            for (number, work) in works.into_iter().enumerate() {
                let place = (number == last).then(|| Arc::clone(&place));
                self.push(
                    tails[branch].0,
                    Op { work, after: std::mem::take(&mut after), place, more: false, _kept: None },
                )?;
            }
        }
        self.push(stream, Op { work: Work::Mark, after: places, place: Some(end), more: false, _kept: Some(kept) })?;
        for &(branch, _) in &tails[1..] {
            self.retire(branch);
        }
        Ok(())
    }
}

/// An executable graph in the making.
#[derive(Default)]
struct Flat {
    steps: Vec<Step>,
    objects: Vec<Arc<UserObject>>,
    memory: Vec<Arc<GraphMemory>>,
    /// The addresses of its free nodes.
    freed: Vec<u64>,
}

pub unsafe extern "C" fn cuGraphCreate(out: *mut CUgraph, flags: c_uint) -> c_uint {
    call_outside("cuGraphCreate", || {
        if out.is_null() || flags != 0 {
            return Err(INVALID_VALUE);
        }
        let graph = system::lock().new_graph();
        // SAFETY: the caller's promise.
        unsafe { put(out, graph as CUgraph) }
    })
}

pub unsafe extern "C" fn cuGraphDestroy(graph: CUgraph) -> c_uint {
    call_outside("cuGraphDestroy", || {
        let mut system = system::lock();
        if system.graphs.get(&(graph as usize)).is_none_or(|graph| graph.is_child) {
            return Err(INVALID_VALUE);
        }
        system.break_captures_into(graph as usize);
        system.forget_graph(graph as usize);
        Ok(())
    })
}

/// Fills an array of the caller's as all functions of graphs do: without one only the count is given; a larger one is
/// filled up with NULL.
///
/// # Safety
/// `count` is NULL or valid; each of `arrays` is NULL or has room for `*count` handles.
unsafe fn give(rows: &[Vec<usize>], arrays: &[*mut CUgraphNode], count: *mut usize) -> Answer {
    if count.is_null() {
        return Err(INVALID_VALUE);
    }
    let there = rows.first().map_or(0, Vec::len);
    // SAFETY: the caller's promise.
    unsafe {
        if arrays.iter().all(|array| array.is_null()) {
            count.write(there);
            return Ok(());
        }
        let room = count.read();
        for (&array, row) in arrays.iter().zip(rows).filter(|(array, _)| !array.is_null()) {
            for index in 0..room {
                array.add(index).write(row.get(index).copied().unwrap_or(0) as CUgraphNode);
            }
        }
        count.write(there.min(room));
    }
    Ok(())
}

pub unsafe extern "C" fn cuGraphGetNodes(graph: CUgraph, nodes: *mut CUgraphNode, count: *mut usize) -> c_uint {
    call_outside("cuGraphGetNodes", || {
        let system = system::lock();
        let graph = system.graphs.get(&(graph as usize)).ok_or(INVALID_VALUE)?;
        let handles = graph.nodes.iter().map(|node| node.handle).collect();
        // SAFETY: the caller's promise.
        unsafe { give(&[handles], &[nodes], count) }
    })
}

pub unsafe extern "C" fn cuGraphGetEdges_v2(
    graph: CUgraph,
    from: *mut CUgraphNode,
    to: *mut CUgraphNode,
    edges: *mut CUgraphEdgeData,
    count: *mut usize,
) -> c_uint {
    call_outside("cuGraphGetEdges_v2", || {
        if from.is_null() != to.is_null() {
            return Err(INVALID_VALUE);
        }
        let system = system::lock();
        let graph = system.graphs.get(&(graph as usize)).ok_or(INVALID_VALUE)?;
        let mut rows = vec![Vec::new(), Vec::new()];
        for node in &graph.nodes {
            for &dependency in &node.dependencies {
                rows[0].push(dependency);
                rows[1].push(node.handle);
            }
        }
        // SAFETY: the caller's promise.
        unsafe {
            give(&rows, &[from, to], count)?;
            clear_edges(edges, from.is_null(), count.read());
        }
        Ok(())
    })
}

/// No edge has data.
///
/// # Safety
/// `edges` is NULL or has room for `count`.
unsafe fn clear_edges(edges: *mut CUgraphEdgeData, only_counted: bool, count: usize) {
    if !edges.is_null() && !only_counted {
        // SAFETY: the caller's promise.
        unsafe { std::ptr::write_bytes(edges, 0, count) };
    }
}

pub unsafe extern "C" fn cuGraphNodeGetType(node: CUgraphNode, kind: *mut c_uint) -> c_uint {
    call_outside("cuGraphNodeGetType", || {
        let value = system::lock().node_of(node as usize)?.work.kind() as c_uint;
        // SAFETY: the caller's promise.
        unsafe { put(kind, value) }
    })
}

pub unsafe extern "C" fn cuGraphNodeGetDependencies_v2(
    node: CUgraphNode,
    nodes: *mut CUgraphNode,
    edges: *mut CUgraphEdgeData,
    count: *mut usize,
) -> c_uint {
    call_outside("cuGraphNodeGetDependencies_v2", || {
        let dependencies = system::lock().node_of(node as usize)?.dependencies.clone();
        // SAFETY: the caller's promise.
        unsafe {
            give(&[dependencies], &[nodes], count)?;
            clear_edges(edges, nodes.is_null(), count.read());
        }
        Ok(())
    })
}

pub unsafe extern "C" fn cuGraphAddDependencies_v2(
    graph: CUgraph,
    from: *const CUgraphNode,
    to: *const CUgraphNode,
    _edges: *const CUgraphEdgeData,
    count: usize,
) -> c_uint {
    call_outside("cuGraphAddDependencies_v2", || {
        let mut system = system::lock();
        let graph = system.graphs.get_mut(&(graph as usize)).ok_or(INVALID_VALUE)?;
        // SAFETY: the caller's promise.
        let (from, to) = unsafe { (list(from, count)?, list(to, count)?) };
        for (&from, &to) in from.iter().zip(&to) {
            graph.position(from).ok_or(INVALID_VALUE)?;
            let node = graph.position(to).ok_or(INVALID_VALUE)?;
            if from == to || graph.nodes[node].dependencies.contains(&from) {
                return Err(INVALID_VALUE);
            }
        }
        for (from, to) in from.into_iter().zip(to) {
            let node = graph.position(to).expect("checked above");
            graph.nodes[node].dependencies.push(from);
        }
        Ok(())
    })
}

/// # Safety
/// `nodes` is NULL or has `count` handles.
pub(crate) unsafe fn list(nodes: *const CUgraphNode, count: usize) -> Answer<Vec<usize>> {
    if count == 0 {
        return Ok(Vec::new());
    }
    if nodes.is_null() {
        return Err(INVALID_VALUE);
    }
    // SAFETY: not NULL, so it has `count` handles: the caller's promise.
    Ok(unsafe { std::slice::from_raw_parts(nodes, count) }.iter().map(|&node| node as usize).collect())
}

/// Adds the node that `work` makes, if graph and dependencies are right.
///
/// # Safety
/// `out` is NULL or valid for a write, `nodes` NULL or `count` handles.
unsafe fn add(
    out: *mut CUgraphNode,
    graph: CUgraph,
    nodes: *const CUgraphNode,
    count: usize,
    work: impl FnOnce(&mut System) -> Answer<NodeWork>,
) -> Answer {
    let mut system = system::lock();
    let graph = graph as usize;
    if out.is_null() || !system.graphs.contains_key(&graph) {
        return Err(INVALID_VALUE);
    }
    // SAFETY: the caller's promise.
    let dependencies = unsafe { list(nodes, count) }?;
    let mut seen = std::collections::HashSet::new();
    if dependencies.iter().any(|node| system.nodes.get(node) != Some(&graph) || !seen.insert(*node)) {
        return Err(INVALID_VALUE);
    }
    let work = work(&mut system)?;
    let node = system.add_node(graph, dependencies, work);
    // SAFETY: the caller's promise.
    unsafe { put(out, node as CUgraphNode) }
}

pub unsafe extern "C" fn cuGraphAddEmptyNode(
    out: *mut CUgraphNode,
    graph: CUgraph,
    nodes: *const CUgraphNode,
    count: usize,
) -> c_uint {
    // SAFETY: the caller's promise.
    call_outside("cuGraphAddEmptyNode", || unsafe { add(out, graph, nodes, count, |_| Ok(NodeWork::Empty)) })
}

pub unsafe extern "C" fn cuGraphAddHostNode(
    out: *mut CUgraphNode,
    graph: CUgraph,
    nodes: *const CUgraphNode,
    count: usize,
    params: *const CUDA_HOST_NODE_PARAMS,
) -> c_uint {
    call_outside("cuGraphAddHostNode", || {
        if params.is_null() {
            return Err(INVALID_VALUE);
        }
        // SAFETY: the caller's promise, here and below.
        let params = unsafe { params.read() };
        let function = params.fn_.ok_or(INVALID_VALUE)?;
        let work = Work::Host { call: HostCall::Function(function), handle: 0, data: params.userData as usize };
        // SAFETY: as above.
        unsafe { add(out, graph, nodes, count, |_| Ok(NodeWork::Works(NodeType::Host, vec![work]))) }
    })
}

pub unsafe extern "C" fn cuGraphHostNodeGetParams(node: CUgraphNode, params: *mut CUDA_HOST_NODE_PARAMS) -> c_uint {
    call_outside("cuGraphHostNodeGetParams", || {
        let system = system::lock();
        let NodeWork::Works(NodeType::Host, works) = &system.node_of(node as usize)?.work else {
            return Err(INVALID_VALUE);
        };
        let Some(&Work::Host { call: HostCall::Function(function), data, .. }) = works.first() else {
            return Err(INVALID_VALUE);
        };
        // SAFETY: the caller's promise.
        unsafe { put(params, CUDA_HOST_NODE_PARAMS { fn_: Some(function), userData: data as *mut c_void }) }
    })
}

/// The address of one side of a copy: its kind, host and device pointers, and the offset in bytes.
fn side(kind: c_uint, host: *const c_void, device: u64, offset: usize) -> Answer<u64> {
    const HOST: c_uint = 1;
    const DEVICE: c_uint = 2;
    const UNIFIED: c_uint = 4;
    match kind {
        HOST => Ok(host as u64 + offset as u64),
        DEVICE | UNIFIED => Ok(device + offset as u64),
        _ => Err(NOT_SUPPORTED),
    }
}

pub unsafe extern "C" fn cuGraphAddMemcpyNode(
    out: *mut CUgraphNode,
    graph: CUgraph,
    nodes: *const CUgraphNode,
    count: usize,
    params: *const CUDA_MEMCPY3D,
    _context: CUcontext,
) -> c_uint {
    call_outside("cuGraphAddMemcpyNode", || {
        if params.is_null() {
            return Err(INVALID_VALUE);
        }
        // SAFETY: the caller's promise, here and below. The enums of the structure are read as integers: a wrong one is
        // an error and not undefined.
        let (params, kinds) = unsafe {
            let from = (&raw const (*params).srcMemoryType).cast::<c_uint>().read();
            let to = (&raw const (*params).dstMemoryType).cast::<c_uint>().read();
            (&*params.cast::<Copy3d>(), (from, to))
        };
        if params.rows == 0 || params.planes == 0 || params.bytes == 0 {
            return Err(INVALID_VALUE);
        }
        if params.rows > 1 || params.planes > 1 {
            // Copies of boxes are not what streams are tested with.
            return Err(NOT_SUPPORTED);
        }
        let bytes = params.bytes;
        let src = side(kinds.0, params.from.host, params.from.device, params.from.x)?;
        let dst = side(kinds.1, params.to.host, params.to.device, params.to.x)?;
        memory::kind_of_range(src, bytes)?;
        memory::kind_of_range(dst, bytes)?;
        let work = Work::Copy { dst, src: Source::Memory(src), bytes };
        // SAFETY: as above.
        unsafe { add(out, graph, nodes, count, |_| Ok(NodeWork::Works(NodeType::Memcpy, vec![work]))) }
    })
}

/// One side of `CUDA_MEMCPY3D`, with its enum as an integer.
#[repr(C)]
struct Side {
    x: usize,
    _y_z_lod: [usize; 3],
    _kind: c_uint,
    host: *const c_void,
    device: u64,
    _array_reserved_pitch_height: [usize; 4],
}

/// `CUDA_MEMCPY3D`.
#[repr(C)]
struct Copy3d {
    from: Side,
    to: Side,
    bytes: usize,
    rows: usize,
    planes: usize,
}

const _: () = assert!(size_of::<Copy3d>() == size_of::<CUDA_MEMCPY3D>());

pub unsafe extern "C" fn cuGraphAddMemsetNode(
    out: *mut CUgraphNode,
    graph: CUgraph,
    nodes: *const CUgraphNode,
    count: usize,
    params: *const CUDA_MEMSET_NODE_PARAMS,
    _context: CUcontext,
) -> c_uint {
    call_outside("cuGraphAddMemsetNode", || {
        if params.is_null() {
            return Err(INVALID_VALUE);
        }
        // SAFETY: the caller's promise, here and below.
        let params = unsafe { params.read() };
        let width = params.elementSize as usize;
        if !matches!(width, 1 | 2 | 4) || params.width == 0 || params.height == 0 {
            return Err(INVALID_VALUE);
        }
        let row = |index: usize| Work::Fill {
            dst: params.dst + (index * params.pitch) as u64,
            value: params.value,
            width,
            count: params.width,
        };
        let bytes = params.width * width + (params.height - 1) * params.pitch;
        if !params.dst.is_multiple_of(width as u64) || memory::kind_of_range(params.dst, bytes)?.is_none() {
            return Err(INVALID_VALUE);
        }
        let works = (0..params.height).map(row).collect();
        // SAFETY: as above.
        unsafe { add(out, graph, nodes, count, |_| Ok(NodeWork::Works(NodeType::Memset, works))) }
    })
}

/// A node of an event, which exists.
fn event_node(system: &System, event: CUevent, make: fn(usize) -> NodeWork) -> Answer<NodeWork> {
    let event = event as usize;
    if system.events.contains_key(&event) { Ok(make(event)) } else { Err(INVALID_VALUE) }
}

pub unsafe extern "C" fn cuGraphAddEventRecordNode(
    out: *mut CUgraphNode,
    graph: CUgraph,
    nodes: *const CUgraphNode,
    count: usize,
    event: CUevent,
) -> c_uint {
    call_outside("cuGraphAddEventRecordNode", || {
        // SAFETY: the caller's promise.
        unsafe { add(out, graph, nodes, count, |system| event_node(system, event, NodeWork::Record)) }
    })
}

pub unsafe extern "C" fn cuGraphAddEventWaitNode(
    out: *mut CUgraphNode,
    graph: CUgraph,
    nodes: *const CUgraphNode,
    count: usize,
    event: CUevent,
) -> c_uint {
    call_outside("cuGraphAddEventWaitNode", || {
        // SAFETY: the caller's promise.
        unsafe { add(out, graph, nodes, count, |system| event_node(system, event, NodeWork::Wait)) }
    })
}

pub unsafe extern "C" fn cuGraphAddChildGraphNode(
    out: *mut CUgraphNode,
    graph: CUgraph,
    nodes: *const CUgraphNode,
    count: usize,
    child: CUgraph,
) -> c_uint {
    call_outside("cuGraphAddChildGraphNode", || {
        // A graph inside itself crashes the real driver; an invalid value is kinder.
        if child == graph {
            return Err(INVALID_VALUE);
        }
        // SAFETY: the caller's promise.
        unsafe {
            add(out, graph, nodes, count, |system| Ok(NodeWork::Child(system.clone_graph(child as usize, true)?)))
        }
    })
}

pub unsafe extern "C" fn cuGraphDestroyNode(node: CUgraphNode) -> c_uint {
    call_outside("cuGraphDestroyNode", || {
        let handle = node as usize;
        let mut system = system::lock();
        let graph = *system.nodes.get(&handle).ok_or(INVALID_VALUE)?;
        let graph = system.graphs.get_mut(&graph).ok_or(INVALID_VALUE)?;
        if graph.has_memory() {
            return Err(NOT_SUPPORTED);
        }
        let removed = graph.nodes.remove(graph.position(handle).ok_or(INVALID_VALUE)?);
        for node in &mut graph.nodes {
            node.dependencies.retain(|&dependency| dependency != handle);
        }
        system.nodes.remove(&handle);
        if let NodeWork::Child(child) = removed.work {
            system.forget_graph(child);
        }
        Ok(())
    })
}

pub unsafe extern "C" fn cuGraphClone(out: *mut CUgraph, graph: CUgraph) -> c_uint {
    call_outside("cuGraphClone", || {
        if out.is_null() {
            return Err(INVALID_VALUE);
        }
        let clone = system::lock().clone_graph(graph as usize, false)?;
        // SAFETY: the caller's promise.
        unsafe { put(out, clone as CUgraph) }
    })
}

pub unsafe extern "C" fn cuGraphNodeFindInClone(
    out: *mut CUgraphNode,
    original: CUgraphNode,
    clone: CUgraph,
) -> c_uint {
    call_outside("cuGraphNodeFindInClone", || {
        let system = system::lock();
        let graph = system.graphs.get(&(clone as usize)).ok_or(INVALID_VALUE)?;
        let found = graph.clones.get(&(original as usize)).copied().filter(|&node| graph.node(node).is_some());
        // SAFETY: the caller's promise.
        unsafe { put(out, found.ok_or(INVALID_VALUE)? as CUgraphNode) }
    })
}

pub unsafe extern "C" fn cuGraphInstantiateWithFlags(
    out: *mut CUgraphExec,
    graph: CUgraph,
    flags: c_ulonglong,
) -> c_uint {
    const AUTO_FREE: c_ulonglong = 1;
    const DEVICE_LAUNCH: c_ulonglong = 4;
    const USE_NODE_PRIORITY: c_ulonglong = 8;
    /// `UPLOAD`, which is not among them, needs a stream.
    const FLAGS: c_ulonglong = AUTO_FREE | DEVICE_LAUNCH | USE_NODE_PRIORITY;
    call_outside("cuGraphInstantiateWithFlags", || {
        let graph = graph as usize;
        let mut system = system::lock();
        let has_memory = system.graphs.get(&graph).map(Graph::has_memory);
        let has_memory = has_memory.filter(|_| !out.is_null() && flags & !FLAGS == 0).ok_or(INVALID_VALUE)?;
        system.unsafe_call()?;
        system.sound(device::current()?)?;
        if flags & DEVICE_LAUNCH != 0 && !system.is_for_the_device(graph) {
            return Err(INVALID_VALUE);
        }
        if has_memory && system.execs.values().any(|exec| exec.graph == graph) {
            return Err(NOT_SUPPORTED);
        }
        let exec = system.executable(graph, flags & AUTO_FREE != 0)?;
        let handle = system::fresh_handle();
        system.execs.insert(handle, exec);
        // SAFETY: the caller's promise.
        unsafe { put(out, handle as CUgraphExec) }
    })
}

pub unsafe extern "C" fn cuGraphExecDestroy(exec: CUgraphExec) -> c_uint {
    call_outside("cuGraphExecDestroy", || {
        let mut system = system::lock();
        if !system.execs.contains_key(&(exec as usize)) {
            return Err(INVALID_VALUE);
        }
        system.unsafe_call()?;
        system.execs.remove(&(exec as usize));
        Ok(())
    })
}

/// The stream that a graph goes to, which does not capture.
fn target(system: &mut System, exec: CUgraphExec, id: u64) -> Answer {
    if !system.execs.contains_key(&(exec as usize)) {
        return Err(INVALID_VALUE);
    }
    system.respect_legacy(id)?;
    system.refuse_on_member(id)
}

pub unsafe extern "C" fn cuGraphLaunch(exec: CUgraphExec, stream: CUstream) -> c_uint {
    call_outside("cuGraphLaunch", || {
        let id = stream::resolve(stream)?;
        target(&mut system::lock(), exec, id)?;
        let context = system::lock().streams.get(&id).ok_or(INVALID_HANDLE)?.context;
        let _submission = system::submission(context);
        system::lock().launch(exec as usize, id)
    })
}

pub unsafe extern "C" fn cuGraphUpload(exec: CUgraphExec, stream: CUstream) -> c_uint {
    call_outside("cuGraphUpload", || {
        let id = stream::resolve(stream)?;
        target(&mut system::lock(), exec, id)
    })
}

pub unsafe extern "C" fn cuGraphExecUpdate_v2(
    exec: CUgraphExec,
    graph: CUgraph,
    info: *mut CUgraphExecUpdateResultInfo,
) -> c_uint {
    const SUCCESS: c_uint = 0;
    const TOPOLOGY_CHANGED: c_uint = 2;
    const TYPE_CHANGED: c_uint = 3;
    call_outside("cuGraphExecUpdate_v2", || {
        let mut system = system::lock();
        if info.is_null() || !system.execs.contains_key(&(exec as usize)) {
            return Err(INVALID_VALUE);
        }
        let shape = system.shape(graph as usize)?;
        let old = &system.execs[&(exec as usize)].shape;
        let nodes = &system.graphs[&(graph as usize)].nodes;
        let (result, node) = if old.len() != shape.len() {
            (TOPOLOGY_CHANGED, 0)
        } else {
            let changed = old.iter().zip(&shape).zip(nodes).find(|((old, new), _)| old != new);
            changed.map_or((SUCCESS, 0), |((old, new), node)| {
                (if old.0 == new.0 { TOPOLOGY_CHANGED } else { TYPE_CHANGED }, node.handle)
            })
        };
        // SAFETY: valid for a write: the caller's promise. The enum is written as the integer that it is.
        unsafe {
            (&raw mut (*info).result).cast::<c_uint>().write(result);
            (&raw mut (*info).errorNode).write(node as CUgraphNode);
            (&raw mut (*info).errorFromNode).write(std::ptr::null_mut());
        }
        if result != SUCCESS {
            return Err(GRAPH_EXEC_UPDATE_FAILURE);
        }
        let auto_free = system.execs[&(exec as usize)].auto_free;
        let mut updated = system.executable(graph as usize, auto_free)?;
        let exec = system.execs.get_mut(&(exec as usize)).expect("found above");
        updated.last = exec.last.take();
        *exec = updated;
        Ok(())
    })
}

pub unsafe extern "C" fn cuGraphDebugDotPrint(graph: CUgraph, path: *const c_char, _flags: c_uint) -> c_uint {
    const OPERATING_SYSTEM: u32 = 304;
    call_outside("cuGraphDebugDotPrint", || {
        if path.is_null() {
            return Err(INVALID_VALUE);
        }
        let mut text = String::from("digraph dot {\n");
        {
            let system = system::lock();
            let graph = system.graphs.get(&(graph as usize)).ok_or(INVALID_VALUE)?;
            for (index, node) in graph.nodes.iter().enumerate() {
                writeln!(text, "\"node_{index}\"[label=\"{:?}\"];", node.work.kind()).expect("a string grows");
                for dependency in node.dependencies.iter().filter_map(|&node| graph.position(node)) {
                    writeln!(text, "\"node_{dependency}\" -> \"node_{index}\";").expect("a string grows");
                }
            }
        }
        text.push_str("}\n");
        // SAFETY: a string that ends in NUL: the caller's promise.
        let path = unsafe { CStr::from_ptr(path) }.to_str().map_err(|_| OPERATING_SYSTEM)?;
        std::fs::write(path, text).map_err(|_| OPERATING_SYSTEM)
    })
}

impl Graph {
    pub(crate) fn retain(&mut self, object: &Arc<UserObject>, count: usize) {
        self.objects.extend(std::iter::repeat_n(Arc::clone(object), count));
    }

    /// Takes up to `count` references of an object back.
    pub(crate) fn release(&mut self, object: usize, count: usize) {
        let mut left = count;
        self.objects.retain(|held| {
            let taken = held.handle == object && left > 0;
            left -= usize::from(taken);
            !taken
        });
    }
}

/// A member allocates: the memory exists from now on, and goes with the last that has the node.
pub(crate) fn capture_allocation(id: u64, address: u64) -> Answer {
    system::lock().capture_node(id, NodeWork::Alloc(Arc::new(GraphMemory(address))))
}
