//! Stream capture: which calls become nodes of a graph, which are refused, and which end a capture badly.

use std::cell::Cell;
use std::collections::HashSet;
use std::ffi::c_uint;

use cudarc::driver::sys::{CUgraph, CUgraphEdgeData, CUgraphNode, CUstream};

use crate::graph::{NodeWork, list};
use crate::stream::{self, LEGACY};
use crate::system::{
    self, Answer, CAPTURE_IMPLICIT, CAPTURE_INVALIDATED, CAPTURE_ISOLATION, CAPTURE_MERGE, CAPTURE_UNJOINED,
    CAPTURE_UNMATCHED, CAPTURE_UNSUPPORTED, CAPTURE_WRONG_THREAD, CAPTURED_EVENT, ILLEGAL_STATE, INVALID_HANDLE,
    INVALID_VALUE, System,
};
use crate::{call, call_outside, put};

const GLOBAL: c_uint = 0;
const RELAXED: c_uint = 2;

const NONE: c_uint = 0;
const ACTIVE: c_uint = 1;
const INVALIDATED: c_uint = 2;

/// A capture that is going on.
pub(crate) struct Capture {
    pub(crate) context: usize,
    /// What the caller knows it by: the number of its graph, which other captures into that have too (measured).
    number: u64,
    origin: u64,
    mode: c_uint,
    /// The thread that began it.
    thread: u64,
    /// The graph that nodes go to. It goes with a capture that fails, at its end.
    graph: usize,
    invalidated: bool,
    /// What members that were destroyed had captured last.
    left: Vec<usize>,
    /// The nodes that were taken out of a member's dependencies: the end does not ask for them to be joined.
    dropped: HashSet<usize>,
}

/// A stream's part in a capture.
pub(crate) struct Member {
    capture: u64,
    /// The nodes that the next one depends on, without duplicates.
    dependencies: Vec<usize>,
    /// As many edges without data, for `cuStreamGetCaptureInfo`.
    edges: Vec<u64>,
}

impl Member {
    fn new(capture: u64, dependencies: Vec<usize>) -> Member {
        Member { capture, dependencies, edges: Vec::new() }
    }

    fn add(&mut self, nodes: impl IntoIterator<Item = usize>) {
        for node in nodes {
            if !self.dependencies.contains(&node) {
                self.dependencies.push(node);
            }
        }
    }
}

thread_local! {
    static MODE: Cell<c_uint> = const { Cell::new(GLOBAL) };
    static THREAD: Cell<u64> = const { Cell::new(0) };
}

/// A number for this thread that no other has.
fn this_thread() -> u64 {
    if THREAD.get() == 0 {
        THREAD.set(system::fresh());
    }
    THREAD.get()
}

impl System {
    pub(crate) fn is_member(&self, stream: u64) -> bool {
        self.streams.get(&stream).is_some_and(|state| state.member.is_some())
    }

    fn capture_of(&self, stream: u64) -> Option<u64> {
        Some(self.streams.get(&stream)?.member.as_ref()?.capture)
    }

    /// A capture breaks. It stays until it is ended.
    fn invalidate(&mut self, capture: u64) {
        if let Some(state) = self.captures.get_mut(&capture) {
            state.invalidated = true;
        }
    }

    pub(crate) fn is_active(&self, capture: u64) -> bool {
        self.captures.get(&capture).is_some_and(|state| !state.invalidated)
    }

    /// All members of a capture are free again. Gives the graph that was captured into.
    fn end_capture(&mut self, capture: u64) -> usize {
        for state in self.streams.values_mut() {
            if state.member.as_ref().is_some_and(|member| member.capture == capture) {
                state.member = None;
            }
        }
        self.captures.remove(&capture).map_or(0, |state| state.graph)
    }

    /// Ends a capture without a result: its graph goes.
    pub(crate) fn drop_capture(&mut self, capture: u64) {
        let graph = self.end_capture(capture);
        self.forget_graph(graph);
    }

    /// What a call answers that has no form in a capture, on a member: the capture breaks if it has not already.
    pub(crate) fn refuse_on_member(&mut self, stream: u64) -> Answer {
        let Some(capture) = self.capture_of(stream) else { return Ok(()) };
        self.invalidate(capture);
        Err(CAPTURE_UNSUPPORTED)
    }

    /// What a call answers that has a form in a capture, on a member of one that is broken.
    pub(crate) fn refuse_when_invalidated(&self, stream: u64) -> Answer {
        if self.capture_of(stream).is_none_or(|capture| self.is_active(capture)) {
            Ok(())
        } else {
            Err(CAPTURE_INVALIDATED)
        }
    }

    /// The captures that a blocking stream of a context takes part in.
    fn blocking_captures(&self, context: usize) -> HashSet<u64> {
        self.blocking_streams(context).into_iter().filter_map(|stream| self.capture_of(stream)).collect()
    }

    fn is_legacy(&self, stream: u64) -> Option<usize> {
        let context = self.streams.get(&stream)?.context;
        (self.contexts.get(&context)?.legacy == stream).then_some(context)
    }

    /// Using the legacy stream while a blocking stream captures breaks that capture.
    pub(crate) fn respect_legacy(&mut self, stream: u64) -> Answer {
        let Some(context) = self.is_legacy(stream) else { return Ok(()) };
        let captures = self.blocking_captures(context);
        for &capture in &captures {
            self.invalidate(capture);
        }
        if captures.is_empty() { Ok(()) } else { Err(CAPTURE_IMPLICIT) }
    }

    /// A 'potentially unsafe call' of this thread: what forbids it breaks.
    pub(crate) fn unsafe_call(&mut self) -> Answer {
        self.break_captures(|mode, mine, thread_mode| {
            thread_mode != RELAXED && (mine && mode != RELAXED || !mine && mode == GLOBAL && thread_mode == GLOBAL)
        })
    }

    /// A call that no capture of the context survives.
    pub(crate) fn conflicts_with_captures(&mut self, context: usize) -> Answer {
        let captures: Vec<u64> =
            self.captures.iter().filter_map(|(&id, capture)| (capture.context == context).then_some(id)).collect();
        for &capture in &captures {
            self.invalidate(capture);
        }
        if captures.is_empty() { Ok(()) } else { Err(CAPTURE_UNSUPPORTED) }
    }

    fn break_captures(&mut self, forbids: impl Fn(c_uint, bool, c_uint) -> bool) -> Answer {
        if self.captures.is_empty() {
            return Ok(());
        }
        let (thread, thread_mode) = (this_thread(), MODE.get());
        let forbidding = |(&id, capture): (&u64, &Capture)| {
            forbids(capture.mode, capture.thread == thread, thread_mode).then_some(id)
        };
        let captures: Vec<u64> = self.captures.iter().filter_map(forbidding).collect();
        for &capture in &captures {
            self.invalidate(capture);
        }
        if captures.is_empty() { Ok(()) } else { Err(CAPTURE_UNSUPPORTED) }
    }

    /// As [`System::unsafe_call`], for the query of a stream or the wait for it, which a member itself never permits.
    pub(crate) fn host_asks(&mut self, stream: u64) -> Answer {
        self.respect_legacy(stream)?;
        self.refuse_on_member(stream)?;
        self.unsafe_call()
    }

    /// A node at the end of what a member captured.
    pub(crate) fn capture_node(&mut self, stream: u64, work: NodeWork) -> Answer {
        self.refuse_when_invalidated(stream)?;
        let member = self.streams.get(&stream).and_then(|state| state.member.as_ref()).ok_or(INVALID_HANDLE)?;
        let graph = self.captures[&member.capture].graph;
        let node = self.add_node(graph, member.dependencies.clone(), work);
        self.streams.get_mut(&stream).and_then(|state| state.member.as_mut()).expect("just seen").dependencies =
            vec![node];
        Ok(())
    }

    /// Whether there is a capture into `graph`.
    pub(crate) fn is_captured_into(&self, graph: usize) -> bool {
        self.captures.values().any(|capture| capture.graph == graph)
    }

    /// Breaks the captures into `graph`.
    pub(crate) fn break_captures_into(&mut self, graph: usize) {
        let captures: Vec<u64> =
            self.captures.iter().filter_map(|(&id, capture)| (capture.graph == graph).then_some(id)).collect();
        for capture in captures {
            self.invalidate(capture);
        }
    }

    /// Records an event on a member: what the stream depends on now.
    pub(crate) fn capture_event(&mut self, event: usize, stream: u64) -> Answer {
        self.refuse_when_invalidated(stream)?;
        let member = self.streams.get(&stream).and_then(|state| state.member.as_ref()).ok_or(INVALID_HANDLE)?;
        let captured = Some((member.capture, member.dependencies.clone()));
        let state = self.events.get_mut(&event).ok_or(INVALID_HANDLE)?;
        state.captured = captured;
        state.place = None;
        Ok(())
    }

    /// What the host gets that asks for an event: an error if it was last recorded in a capture.
    pub(crate) fn ask_event(&mut self, event: usize) -> Answer {
        let state = self.events.get(&event).ok_or(INVALID_HANDLE)?;
        let Some((capture, _)) = state.captured else { return self.unsafe_call() };
        if !self.is_active(capture) {
            return Err(INVALID_VALUE);
        }
        self.invalidate(capture);
        Err(CAPTURED_EVENT)
    }

    /// A stream waits on an event, and one of them has to do with a capture. `None`: neither has.
    pub(crate) fn capture_wait(&mut self, stream: u64, event: usize) -> Option<Answer> {
        let mine = self.capture_of(stream);
        let Some(state) = self.events.get(&event) else {
            // An event that does not exist breaks the capture of a member.
            mine.into_iter().for_each(|capture| self.invalidate(capture));
            return Some(Err(INVALID_HANDLE));
        };
        let captured = state.captured.clone();
        let recorded = state.place.is_some();
        if let Err(code) = self.refuse_when_invalidated(stream) {
            return Some(Err(code));
        }
        match (mine, captured) {
            (None, None) => None,
            (Some(_), None) if !recorded => Some(Ok(())),
            (Some(capture), None) => {
                self.invalidate(capture);
                Some(Err(CAPTURE_ISOLATION))
            }
            (mine, Some((theirs, nodes))) => {
                if !self.is_active(theirs) {
                    mine.into_iter().for_each(|capture| self.invalidate(capture));
                    return Some(Err(INVALID_VALUE));
                }
                if self.is_legacy(stream).is_some() {
                    self.invalidate(theirs);
                    return Some(Err(CAPTURE_IMPLICIT));
                }
                if let Some(capture) = mine.filter(|&capture| capture != theirs) {
                    self.invalidate(capture);
                    self.invalidate(theirs);
                    return Some(Err(CAPTURE_MERGE));
                }
                let member = &mut self.streams.get_mut(&stream).expect("asked by its caller").member;
                member.get_or_insert_with(|| Member::new(theirs, Vec::new())).add(nodes);
                Some(Ok(()))
            }
        }
    }

    /// A stream is destroyed: the origin takes its capture with it, a member leaves what it captured behind.
    pub(crate) fn leave_capture(&mut self, stream: u64) {
        let Some(member) = self.streams.get_mut(&stream).and_then(|state| state.member.take()) else { return };
        let Some(capture) = self.captures.get_mut(&member.capture) else { return };
        if capture.origin == stream {
            self.drop_capture(member.capture);
        } else {
            capture.left.extend(member.dependencies);
        }
    }

    /// Whether everything that the members captured comes before where the origin ended.
    fn is_joined(&self, capture: u64) -> bool {
        let state = &self.captures[&capture];
        let Some(graph) = self.graphs.get(&state.graph) else { return true };
        let members = self.streams.iter().filter_map(|(&id, stream)| Some((id, stream.member.as_ref()?)));
        let (mut ends, mut pending) = (state.left.clone(), Vec::new());
        for (id, member) in members.filter(|(_, member)| member.capture == capture) {
            if id == state.origin {
                pending.extend(&member.dependencies);
            } else {
                ends.extend(&member.dependencies);
            }
        }
        let mut before = HashSet::new();
        while let Some(node) = pending.pop() {
            if before.insert(node) {
                pending.extend(graph.node(node).into_iter().flat_map(|node| &node.dependencies));
            }
        }
        ends.iter().all(|node| before.contains(node) || state.dropped.contains(node))
    }
}

fn begin(handle: CUstream, mode: c_uint, into: Option<(CUgraph, Answer<Vec<usize>>)>) -> Answer {
    if mode > RELAXED || into.as_ref().is_some_and(|(graph, _)| graph.is_null()) {
        return Err(INVALID_VALUE);
    }
    if (handle as usize) <= LEGACY {
        return Err(CAPTURE_UNSUPPORTED);
    }
    let stream = stream::resolve(handle)?;
    let mut system = system::lock();
    if system.is_member(stream) {
        return Err(ILLEGAL_STATE);
    }
    let (graph, dependencies) = match into {
        None => (system.new_graph(), Vec::new()),
        Some((graph, nodes)) => {
            let (graph, nodes) = (graph as usize, nodes?);
            if !system.graphs.contains_key(&graph) || nodes.iter().any(|node| system.nodes.get(node) != Some(&graph)) {
                return Err(INVALID_VALUE);
            }
            if system.is_captured_into(graph) {
                return Err(ILLEGAL_STATE);
            }
            (graph, nodes)
        }
    };
    system.captures_begun += 1;
    let id = system.captures_begun;
    let number = system.graphs[&graph].id;
    let state = system.streams.get_mut(&stream).ok_or(INVALID_HANDLE)?;
    let mut member = Member::new(id, Vec::new());
    member.add(dependencies);
    state.member = Some(member);
    let context = state.context;
    let capture = Capture {
        context,
        number,
        origin: stream,
        mode,
        thread: this_thread(),
        graph,
        invalidated: false,
        left: Vec::new(),
        dropped: HashSet::new(),
    };
    system.captures.insert(id, capture);
    Ok(())
}

pub unsafe extern "C" fn cuStreamBeginCapture_v2(stream: CUstream, mode: c_uint) -> c_uint {
    call_outside("cuStreamBeginCapture_v2", || begin(stream, mode, None))
}

pub unsafe extern "C" fn cuStreamBeginCaptureToGraph(
    stream: CUstream,
    graph: CUgraph,
    nodes: *const CUgraphNode,
    _edges: *const CUgraphEdgeData,
    count: usize,
    mode: c_uint,
) -> c_uint {
    // SAFETY: the caller's promise.
    call_outside("cuStreamBeginCaptureToGraph", || begin(stream, mode, Some((graph, unsafe { list(nodes, count) }))))
}

pub unsafe extern "C" fn cuStreamEndCapture(stream: CUstream, out: *mut CUgraph) -> c_uint {
    call_outside("cuStreamEndCapture", || {
        if !out.is_null() {
            // SAFETY: the caller's promise, here and below.
            unsafe { put(out, std::ptr::null_mut()) }?;
        }
        let id = stream::resolve(stream)?;
        let mut system = system::lock();
        let capture = system.capture_of(id).ok_or(ILLEGAL_STATE)?;
        let state = &system.captures[&capture];
        let result = if state.origin != id {
            system.invalidate(capture);
            // Only its origin ends it.
            Err(CAPTURE_UNMATCHED)
        } else {
            let result = if state.invalidated {
                Err(CAPTURE_INVALIDATED)
            } else if state.mode != RELAXED && state.thread != this_thread() {
                Err(CAPTURE_WRONG_THREAD)
            } else if !system.is_joined(capture) {
                Err(CAPTURE_UNJOINED)
            } else {
                Ok(())
            };
            let graph = system.end_capture(capture);
            if result.is_err() {
                system.forget_graph(graph);
            }
            result.map(|()| graph)
        };
        let graph = result?;
        if !out.is_null() {
            // SAFETY: as above.
            unsafe { put(out, graph as CUgraph) }?;
        }
        Ok(())
    })
}

/// The stream's state in a capture, and why the legacy stream has no answer.
fn status(system: &System, stream: u64) -> Answer<c_uint> {
    if system.is_legacy(stream).is_some_and(|context| !system.blocking_captures(context).is_empty()) {
        return Err(CAPTURE_IMPLICIT);
    }
    Ok(system.capture_of(stream).map_or(NONE, |id| if system.is_active(id) { ACTIVE } else { INVALIDATED }))
}

pub unsafe extern "C" fn cuStreamIsCapturing(stream: CUstream, out: *mut c_uint) -> c_uint {
    call("cuStreamIsCapturing", || {
        let id = stream::resolve(stream)?;
        // SAFETY: the caller's promise.
        unsafe { put(out, status(&system::lock(), id)?) }
    })
}

pub unsafe extern "C" fn cuStreamGetCaptureInfo_v3(
    stream: CUstream,
    out: *mut c_uint,
    capture_id: *mut u64,
    graph: *mut CUgraph,
    nodes: *mut *const CUgraphNode,
    edges: *mut *const CUgraphEdgeData,
    count: *mut usize,
) -> c_uint {
    /// Writes an output that the caller may leave out.
    ///
    /// # Safety
    /// `to` is NULL or valid for a write.
    unsafe fn put_if_asked<T>(to: *mut T, value: T) {
        if !to.is_null() {
            // SAFETY: not NULL, so valid: the caller's promise.
            unsafe { to.write(value) };
        }
    }
    call("cuStreamGetCaptureInfo_v3", || {
        if out.is_null() || !edges.is_null() && nodes.is_null() {
            return Err(INVALID_VALUE);
        }
        let id = stream::resolve(stream)?;
        let mut system = system::lock();
        let status = status(&system, id)?;
        // SAFETY: the caller's promise, here and below.
        unsafe { put(out, status) }?;
        if status != ACTIVE {
            return Ok(());
        }
        let capture = system.capture_of(id).expect("it is active");
        let (captured, number) = (system.captures[&capture].graph, system.captures[&capture].number);
        let member = system.streams.get_mut(&id).and_then(|state| state.member.as_mut()).expect("it is active");
        member.edges.resize(member.dependencies.len(), 0);
        // SAFETY: as above. The arrays stay where they are until the next call on the stream.
        unsafe {
            put_if_asked(capture_id, number);
            put_if_asked(graph, captured as CUgraph);
            put_if_asked(nodes, member.dependencies.as_ptr().cast());
            put_if_asked(edges, member.edges.as_ptr().cast());
            put_if_asked(count, member.dependencies.len());
        }
        Ok(())
    })
}

pub unsafe extern "C" fn cuStreamUpdateCaptureDependencies_v2(
    stream: CUstream,
    nodes: *mut CUgraphNode,
    _edges: *const CUgraphEdgeData,
    count: usize,
    flags: c_uint,
) -> c_uint {
    const SET: c_uint = 1;
    call("cuStreamUpdateCaptureDependencies_v2", || {
        if flags > SET {
            return Err(INVALID_VALUE);
        }
        // SAFETY: the caller's promise.
        let nodes = unsafe { list(nodes, count) }?;
        let id = stream::resolve(stream)?;
        let mut system = system::lock();
        let capture = system.capture_of(id).ok_or(ILLEGAL_STATE)?;
        system.refuse_when_invalidated(id)?;
        let graph = system.captures[&capture].graph;
        if nodes.iter().any(|node| system.nodes.get(node) != Some(&graph)) {
            return Err(INVALID_VALUE);
        }
        let member = system.streams.get_mut(&id).and_then(|state| state.member.as_mut()).expect("it captures");
        let mut dropped = Vec::new();
        if flags == SET {
            dropped = std::mem::take(&mut member.dependencies);
        }
        member.add(nodes);
        dropped.retain(|node| !member.dependencies.contains(node));
        system.captures.get_mut(&capture).expect("it captures").dropped.extend(dropped);
        Ok(())
    })
}

pub unsafe extern "C" fn cuThreadExchangeStreamCaptureMode(mode: *mut c_uint) -> c_uint {
    call("cuThreadExchangeStreamCaptureMode", || {
        if mode.is_null() {
            return Err(INVALID_VALUE);
        }
        // SAFETY: not NULL, so valid: the caller's promise. A mode that does not exist is taken, as in the real driver.
        unsafe { mode.write(MODE.replace(mode.read())) };
        Ok(())
    })
}
