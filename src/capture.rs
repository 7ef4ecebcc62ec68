//! Stream capture: work that becomes nodes of a graph instead of being executed.
//!
//! [`Stream::begin_capture`] gives a [`Capture`], a guard that offers only what can be captured. Ending it consumes it and
//! gives the [`Graph`]; dropping it abandons the capture. Other streams take part as a [`Branch`].
//!
//! | mode | other threads, while it lasts | must end on its thread |
//! | --- | --- | --- |
//! | [`Global`] | may make no 'potentially unsafe' call (`cuMemAlloc`, `cuEventQuery`, …) | yes: `!Send` |
//! | [`ThreadLocal`] | are free | yes: `!Send` |
//! | [`Relaxed`] | are free, and so is this one | no: `Send` |
//!
//! What rstream calls by itself never counts as unsafe, whatever the mode. [`Device::synchronize`] waits for the whole
//! context, which no capture in it survives.

use std::ffi::c_uint;
use std::marker::PhantomData;
use std::ops::Deref;
use std::ptr;
use std::sync::Arc;
use std::thread::{self, ThreadId};

use cudarc::driver::sys::{CUgraph, CUgraphNode, CUstream};

use crate::api::{Api, in_callback};
use crate::device::Device;
use crate::driver::{Driver, is_forked_child};
use crate::error::{Error, Refused, Result, Status};
use crate::event::Event;
use crate::gate;
use crate::graph::{Captive, Graph, HostNode, Label, Node, Owner};
use crate::memory::{Buffer, Pattern};
use crate::reaper;
use crate::stream::{RawStream, Ready, Stream, broken};

/// Which calls of the process a capture forbids while it lasts (`CUstreamCaptureMode`), and the mode of a thread.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub enum CaptureMode {
    /// Unsafe calls of this thread, and of every thread that is not exempt. What threads begin with.
    #[default]
    Global,
    /// Unsafe calls of the capturing thread.
    ThreadLocal,
    /// None.
    Relaxed,
}

impl CaptureMode {
    pub(crate) fn code(self) -> c_uint {
        self as c_uint
    }
}

/// Whether a stream captures (`CUstreamCaptureStatus`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum CaptureStatus {
    /// It does not.
    None,
    /// It does.
    Active,
    /// It did, and a rule was broken. Only ending the capture makes the stream usable again.
    Invalidated,
}

impl CaptureStatus {
    fn of(code: c_uint) -> CaptureStatus {
        match code {
            0 => CaptureStatus::None,
            1 => CaptureStatus::Active,
            _ => CaptureStatus::Invalidated,
        }
    }
}

/// What [`Stream::capture_info`] knows about the capture that a stream takes part in.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct CaptureInfo {
    /// Its number: that of its graph, which other captures have that go into the same graph, and no others.
    pub id: u64,
    /// The handle of the graph that is captured into (`CUgraph`). The driver owns it: it is gone when the capture breaks.
    pub graph: usize,
    /// The nodes that the next one depends on.
    pub dependencies: Vec<Node>,
}

mod sealed {
    pub trait Sealed {}
}

/// A mode as a type: [`Global`], [`ThreadLocal`] or [`Relaxed`].
pub trait Mode: sealed::Sealed {
    /// The mode.
    const MODE: CaptureMode;
    /// `()`, or a type that is not `Send` when the capture has to end on the thread that began it.
    type Thread;
}

macro_rules! modes {
    ($($(#[$doc:meta])* $mode:ident: $thread:ty;)*) => {
        $($(#[$doc])*
        #[derive(Debug)]
        pub enum $mode {}
        impl sealed::Sealed for $mode {}
        impl Mode for $mode {
            const MODE: CaptureMode = CaptureMode::$mode;
            type Thread = $thread;
        })*
    };
}

modes! {
    /// `CU_STREAM_CAPTURE_MODE_GLOBAL`.
    Global: *mut ();
    /// `CU_STREAM_CAPTURE_MODE_THREAD_LOCAL`.
    ThreadLocal: *mut ();
    /// `CU_STREAM_CAPTURE_MODE_RELAXED`.
    Relaxed: ();
}

/// What the driver says about a stream in a capture.
pub(crate) struct State {
    pub(crate) status: CaptureStatus,
    /// Of an active one.
    pub(crate) id: u64,
    pub(crate) graph: CUgraph,
}

/// Asks whether a stream captures. Harmless in every mode (measured).
///
/// # Safety
/// The stream is alive, and its context is current.
pub(crate) unsafe fn status(driver: &Driver, stream: CUstream) -> Result<CaptureStatus> {
    let mut status: c_uint = 0;
    // SAFETY: the stream is alive (the caller's promise); writes one enum of C's int size.
    match unsafe { driver.cuStreamIsCapturing(stream, &raw mut status) } {
        // Older than captures: there is none.
        Err(Error::DriverTooOld { .. }) => Ok(CaptureStatus::None),
        // Nobody who meant another call has heard of this function.
        Err(Error::Driver { status, .. }) => Err(Error::Unusable { status }),
        other => other.map(|()| CaptureStatus::of(status)),
    }
}

/// Asks about a capture. Harmless in every mode (measured).
///
/// # Safety
/// As [`status`].
pub(crate) unsafe fn state(driver: &Driver, stream: CUstream) -> Result<State> {
    // SAFETY: the caller's promise.
    let status = unsafe { status(driver, stream) }?;
    if status != CaptureStatus::Active {
        return Ok(State { status, id: 0, graph: ptr::null_mut() });
    }
    // SAFETY: as above.
    unsafe { info(driver, stream, None) }
}

/// The nodes that the next one depends on.
///
/// # Safety
/// As [`status`]; nobody else captures meanwhile.
unsafe fn next_depends_on(driver: &Driver, stream: CUstream) -> Result<Vec<CUgraphNode>> {
    let mut nodes = Vec::new();
    // SAFETY: the caller's promise.
    unsafe { info(driver, stream, Some(&mut nodes)) }?;
    Ok(nodes)
}

/// # Safety
/// As [`status`]; with `wanted` nobody else captures meanwhile: the driver's array is good until the next call.
unsafe fn info(driver: &Driver, stream: CUstream, wanted: Option<&mut Vec<CUgraphNode>>) -> Result<State> {
    let mut state = State { status: CaptureStatus::None, id: 0, graph: ptr::null_mut() };
    let (mut status, mut nodes, mut edges, mut count) = (0 as c_uint, ptr::null(), ptr::null(), 0_usize);
    let none = (ptr::null_mut(), ptr::null_mut(), ptr::null_mut());
    let arrays = wanted.as_ref().map_or(none, |_| (&raw mut nodes, &raw mut edges, &raw mut count));
    // SAFETY: the stream is alive (the caller's promise); writes one value of each type, or none. The array is copied at
    // once. Edges with data are made by kernels only, and need not be told apart here.
    unsafe {
        driver.cuStreamGetCaptureInfo_v3(
            stream,
            &raw mut status,
            &raw mut state.id,
            &raw mut state.graph,
            arrays.0,
            arrays.1,
            arrays.2,
        )?;
        state.status = CaptureStatus::of(status);
        if let Some(wanted) = wanted.filter(|_| state.status == CaptureStatus::Active && count > 0) {
            *wanted = std::slice::from_raw_parts::<CUgraphNode>(nodes, count).to_vec();
        }
    }
    Ok(state)
}

/// A capture that was begun and not ended yet, without a lifetime or a type for its mode.
pub(crate) struct RawCapture {
    stream: Stream,
    raw: Arc<RawStream>,
    mode: CaptureMode,
    thread: ThreadId,
    id: u64,
    /// The graph of the caller's that is captured into.
    into: Option<Captive>,
    ended: bool,
}

impl RawCapture {
    /// Begins a capture (`cuStreamBeginCapture`, or `cuStreamBeginCaptureToGraph` with the nodes of `into` that the first
    /// captured one depends on).
    pub(crate) fn begin(
        api: &Api<'_>,
        stream: &Stream,
        mode: CaptureMode,
        into: Option<(&Graph, &[Node])>,
    ) -> Result<RawCapture> {
        let driver = stream.device().driver();
        let gate = stream.gate().write();
        let ready = stream.alive(api)?;
        let handle = ready.handle();
        if stream.is_legacy_default() {
            return Err(Error::capture(
                Status::STREAM_CAPTURE_UNSUPPORTED,
                "the legacy default stream cannot capture: use another stream",
            ));
        }
        // SAFETY: the stream is alive, and its context is current.
        if unsafe { status(driver, handle) }? != CaptureStatus::None {
            return Err(Error::capture(
                Status::ILLEGAL_STATE,
                "the stream takes part in a capture already: end that first",
            ));
        }
        let into = match into {
            None => {
                // SAFETY: as above.
                unsafe { driver.cuStreamBeginCapture_v2(handle, mode.code()) }?;
                None
            }
            Some((graph, nodes)) => Some(graph.capture_into(stream.device(), nodes, |graph, nodes| {
                // SAFETY: as above; the nodes are the graph's.
                unsafe {
                    driver.cuStreamBeginCaptureToGraph(
                        handle,
                        graph,
                        nodes.as_ptr(),
                        ptr::null(),
                        nodes.len(),
                        mode.code(),
                    )
                }
            })?),
        };
        let raw = Arc::clone(ready.raw());
        let thread = thread::current().id();
        // SAFETY: as above.
        let begun = unsafe { state(driver, handle) };
        drop(gate);
        let mut capture = RawCapture { stream: stream.clone(), raw, mode, thread, id: 0, into, ended: false };
        capture.id = begun?.id;
        if let Some(into) = &capture.into {
            into.named(capture.id);
        }
        Ok(capture)
    }

    pub(crate) fn id(&self) -> u64 {
        self.id
    }

    /// Whose the captured nodes are.
    pub(crate) fn owner(&self) -> Owner {
        self.into.as_ref().map_or(Owner::capture(self.stream.device(), self.id), Captive::owner)
    }

    /// Whether it has to end on another thread than this one.
    fn is_elsewhere(&self) -> bool {
        self.mode != CaptureMode::Relaxed && self.thread != thread::current().id()
    }

    /// Ends it (`cuStreamEndCapture`). Refused on another thread than the one that began it, if its mode says so: it goes
    /// on then, and is given back.
    pub(crate) fn end(mut self, api: &Api<'_>) -> Result<Graph, (Error, Option<Box<RawCapture>>)> {
        if self.is_elsewhere() {
            return Err((wrong_thread(), Some(Box::new(self))));
        }
        match self.finish(api) {
            Ok(graph) => Ok(graph),
            Err(error) if self.ended => Err((error, None)),
            Err(error) => Err((error, Some(Box::new(self)))),
        }
    }

    fn key(&self) -> gate::Key {
        (self.stream.device().kind(), self.id)
    }

    /// Ends it. If the driver could not, and it is still going on, it can be ended again.
    fn finish(&mut self, api: &Api<'_>) -> Result<Graph> {
        let device = self.stream.device();
        let _bound = device.bind(api)?;
        let mut graph: CUgraph = ptr::null_mut();
        let handle = self.raw.handle();
        let (ended, goes_on) = gate::leave(self.key(), self.stream.gate(), true, || {
            // SAFETY: the stream is alive as long as `raw`, and its context is current; writes one handle.
            let ended = unsafe { device.driver().cuStreamEndCapture(handle, &raw mut graph) };
            // SAFETY: as above.
            let status = || unsafe { status(device.driver(), handle) };
            let goes_on = ended.is_err() && status().is_ok_and(|status| status != CaptureStatus::None);
            ((ended, goes_on), !goes_on)
        })
        .expect("it waits");
        if goes_on {
            return Err(ended.expect_err("it goes on"));
        }
        self.ended = true;
        match (self.into.take(), ended) {
            // A capture that broke has taken the caller's graph with it.
            (Some(into), ended) => {
                let graph = into.release(ended.is_ok());
                ended.map(|()| graph)
            }
            (None, Err(error)) => Err(error),
            (None, Ok(())) => Ok(Graph::adopt(device, graph, Owner::capture(device, self.id))),
        }
    }

    /// What abandons it, for a caller that holds the gates for writing: what was captured is dropped. `None` when there is
    /// nothing to do.
    fn abandoning(&mut self) -> Option<impl FnOnce() + Send + 'static> {
        // A forked child has no driver; the parent ends its capture itself.
        if std::mem::replace(&mut self.ended, true) || is_forked_child() {
            return None;
        }
        let (device, raw, into) = (self.stream.device(), Arc::clone(&self.raw), self.into.take());
        Some(move || {
            let mut graph: CUgraph = ptr::null_mut();
            // SAFETY: as in `finish`. On another thread than the one that began it the driver answers 908, and the
            // capture is over all the same (measured).
            let ended = unsafe { device.driver().cuStreamEndCapture(raw.handle(), &raw mut graph) };
            match into {
                Some(into) => drop(into.release(ended.is_ok())),
                None if ended.is_ok() => drop(Graph::adopt(device, graph, Owner::fresh())),
                None => {}
            }
        })
    }

    /// Abandons it on the background thread, for a thread that must not block.
    #[cfg(feature = "python")]
    pub(crate) fn abandon_later(mut self) {
        self.post_abandon();
    }

    fn post_abandon(&mut self) {
        let (device, key, gate) = (self.stream.device(), self.key(), Arc::clone(self.stream.gate()));
        let mut abandon = self.abandoning();
        reaper::release_when(device, move || {
            // Tried again later, so that the thread is not held up by work that blocks in the driver.
            gate::leave(key, &gate, false, || (abandon.take().into_iter().for_each(|abandon| abandon()), true))
                .is_some()
        });
    }

    /// Abandons it. Refused on another thread than the one that began it, if its mode says so and it goes into a graph of
    /// the caller's, which would be lost: it goes on then, and is given back.
    #[cfg(feature = "python")]
    pub(crate) fn abandon(mut self) -> Result<(), (Error, Box<RawCapture>)> {
        if self.is_elsewhere() && self.into.is_some() {
            return Err((wrong_thread(), Box::new(self)));
        }
        self.abandon_now();
        Ok(())
    }

    fn abandon_now(&mut self) {
        let (device, key, gate) = (self.stream.device(), self.key(), Arc::clone(self.stream.gate()));
        if let Some(abandon) = self.abandoning() {
            // At once, so that the stream can be used by whoever sees that it was abandoned.
            gate::leave(key, &gate, true, || (device.with_context(abandon), true));
        }
    }
}

impl Drop for RawCapture {
    fn drop(&mut self) {
        if self.ended {
            return;
        }
        if in_callback() {
            self.post_abandon();
        } else {
            self.abandon_now();
        }
    }
}

fn wrong_thread() -> Error {
    Error::capture(
        Status::STREAM_CAPTURE_WRONG_THREAD,
        "a capture ends on the thread that began it, unless its mode is relaxed: end it there",
    )
}

/// A capture that is going on: a guard over its stream. See the [module](self).
///
/// Ending it consumes it; dropped, the capture is abandoned. What it can do to its stream is what a [`Branch`] can.
///
/// ```compile_fail
/// # use rstream::{Api, Stream, capture::Global};
/// # fn f(api: &Api<'_>, stream: &Stream) {
/// let capture = stream.begin_capture::<Global>(api).unwrap();
/// // error: a capture of this mode ends on the thread that began it, so it is not `Send`
/// std::thread::scope(|scope| { scope.spawn(move || drop(capture)); });
/// # }
/// ```
#[must_use = "dropped, the capture is abandoned"]
pub struct Capture<'s, M: Mode> {
    raw: RawCapture,
    branch: Branch<'s>,
    thread: PhantomData<M::Thread>,
}

impl<M: Mode> std::fmt::Debug for Capture<'_, M> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Capture").field("mode", &M::MODE).field("stream", self.branch.stream).finish_non_exhaustive()
    }
}

impl<M: Mode> Capture<'_, M> {
    /// Ends the capture (`cuStreamEndCapture`), and gives the graph.
    ///
    /// # Errors
    /// [`Status::STREAM_CAPTURE_INVALIDATED`] when a rule was broken while it lasted,
    /// [`Status::STREAM_CAPTURE_UNJOINED`] when a branch has work that was not joined. The capture is over in any case.
    pub fn end(self, api: &Api<'_>) -> Result<Graph> {
        self.raw.end(api).map_err(|(error, _)| error)
    }

    /// Abandons the capture: as dropping it, by name.
    pub fn abandon(self) {}
}

impl<'s, M: Mode> Deref for Capture<'s, M> {
    type Target = Branch<'s>;

    fn deref(&self) -> &Branch<'s> {
        &self.branch
    }
}

/// A stream that takes part in a capture: what can be done to it now.
pub struct Branch<'s> {
    stream: &'s Stream,
    id: u64,
    owner: Owner,
}

impl std::fmt::Debug for Branch<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Branch").field("stream", self.stream).field("capture", &self.id).finish_non_exhaustive()
    }
}

impl<'s> Branch<'s> {
    /// The number of the capture: see [`CaptureInfo::id`].
    #[must_use]
    pub fn id(&self) -> u64 {
        self.id
    }

    /// The stream.
    #[must_use]
    pub fn stream(&self) -> &'s Stream {
        self.stream
    }

    /// Captures a host function: a node of the graph, which runs `f` once for each launch. It may not call the API. The
    /// graph, every executable made from it and every launch that is pending keep `f` alive (a CUDA user object).
    ///
    /// # Errors
    /// The closure comes back, untouched, with the error.
    pub fn launch_host_func<F>(&self, api: &Api<'_>, f: F) -> Result<HostNode, Refused<F>>
    where
        F: Fn() + Send + Sync + 'static,
    {
        self.stream.capture_host_func(api, f, Label::default())
    }

    /// Captures a copy of all of `src` to `dst` (`cuMemcpyAsync`). The graph keeps both alive.
    ///
    /// # Errors
    /// As [`Stream::copy`].
    pub fn copy(&self, api: &Api<'_>, dst: &Buffer, src: &Buffer) -> Result<()> {
        self.stream.copy(api, dst, src)
    }

    /// Captures that all of `dst` is filled with `pattern`. The graph keeps it alive.
    ///
    /// # Errors
    /// As [`Stream::fill`].
    pub fn fill(&self, api: &Api<'_>, dst: &Buffer, pattern: Pattern) -> Result<()> {
        self.stream.fill(api, dst, pattern)
    }

    /// Makes `event` stand for what was captured on this stream so far (`cuEventRecord`): nothing is recorded at a launch.
    ///
    /// # Errors
    /// What the driver answers.
    pub fn record(&self, api: &Api<'_>, event: &Event) -> Result<()> {
        self.stream.record(api, event)
    }

    /// Captures a node that records `event` at each launch (`CU_EVENT_RECORD_EXTERNAL`).
    ///
    /// # Errors
    /// What the driver answers.
    pub fn record_external(&self, api: &Api<'_>, event: &Event) -> Result<()> {
        self.stream.record_external(api, event)
    }

    /// Makes what is captured later depend on what `event` stands for in this capture (`cuStreamWaitEvent`).
    ///
    /// # Errors
    /// [`Error::Capture`] for an event that was recorded outside, or in another capture.
    pub fn wait_event(&self, api: &Api<'_>, event: &Event) -> Result<()> {
        self.stream.wait_event(api, event)
    }

    /// Captures a node that waits at each launch for `event`, as it is recorded then (`CU_EVENT_WAIT_EXTERNAL`).
    ///
    /// # Errors
    /// What the driver answers.
    pub fn wait_external(&self, api: &Api<'_>, event: &Event) -> Result<()> {
        self.stream.wait_external(api, event)
    }

    /// Lets `stream` take part in the capture, behind what was captured on this one so far. It has to be joined before
    /// the end, if anything is captured on it.
    ///
    /// # Errors
    /// [`Error::Capture`] for a stream of another capture and for the legacy default stream.
    pub fn fork<'o>(&self, api: &Api<'_>, stream: &'o Stream) -> Result<Branch<'o>> {
        stream.wait_stream(api, self.stream)?;
        Ok(Branch { stream, id: self.id, owner: self.owner })
    }

    /// Makes what is captured later on this stream depend on what was captured on `other` so far.
    ///
    /// # Errors
    /// [`Error::Capture`] for a branch of another capture.
    pub fn join(&self, api: &Api<'_>, other: &Branch<'_>) -> Result<()> {
        self.stream.wait_stream(api, other.stream)
    }

    /// Whether the capture is going on, or broke.
    ///
    /// # Errors
    /// What the driver answers.
    pub fn status(&self, api: &Api<'_>) -> Result<CaptureStatus> {
        self.stream.capture_status(api)
    }

    /// The nodes that the next one captured here depends on (`cuStreamGetCaptureInfo`).
    ///
    /// # Errors
    /// [`Error::Capture`] when the capture broke.
    pub fn dependencies(&self, api: &Api<'_>) -> Result<Vec<Node>> {
        dependencies(api, self.stream, (self.id, self.owner))
    }

    /// Adds nodes to those that the next one depends on (`cuStreamUpdateCaptureDependencies`).
    ///
    /// # Errors
    /// [`Error::InvalidValue`] for a node of another graph; what the driver answers.
    pub fn add_dependencies(&self, api: &Api<'_>, nodes: &[Node]) -> Result<()> {
        update_dependencies(api, self.stream, (self.id, self.owner), nodes, Update::Add)
    }

    /// Makes the next node depend on these alone (`cuStreamUpdateCaptureDependencies`).
    ///
    /// # Errors
    /// As [`Branch::add_dependencies`].
    pub fn set_dependencies(&self, api: &Api<'_>, nodes: &[Node]) -> Result<()> {
        update_dependencies(api, self.stream, (self.id, self.owner), nodes, Update::Set)
    }
}

/// `CUstreamUpdateCaptureDependencies_flags`.
#[derive(Clone, Copy)]
pub(crate) enum Update {
    Add = 0,
    Set = 1,
}

/// The stream, in the capture with the number `id`, which is going on.
fn in_capture<'a>(api: &'a Api<'_>, stream: &'a Stream, id: u64) -> Result<Ready<'a>> {
    let ready = stream.capturable(api)?;
    if ready.capture().is_some_and(|capture| capture.id == id) { Ok(ready) } else { Err(broken()) }
}

pub(crate) fn dependencies(api: &Api<'_>, stream: &Stream, (id, owner): (u64, Owner)) -> Result<Vec<Node>> {
    let ready = in_capture(api, stream, id)?;
    let driver = stream.device().driver();
    // SAFETY: the stream is alive, its context current, and `ready` keeps others from capturing.
    let nodes = unsafe { next_depends_on(driver, ready.handle()) }?;
    nodes.into_iter().map(|node| Node::of(driver, owner, node)).collect()
}

pub(crate) fn update_dependencies(
    api: &Api<'_>,
    stream: &Stream,
    (id, owner): (u64, Owner),
    nodes: &[Node],
    update: Update,
) -> Result<()> {
    let mut nodes = owner.handles_of(nodes)?;
    let ready = in_capture(api, stream, id)?;
    // SAFETY: the stream is alive and its context current. The nodes are of the graph that is captured into, whose nodes
    // are never removed.
    unsafe {
        stream.device().driver().cuStreamUpdateCaptureDependencies_v2(
            ready.handle(),
            nodes.as_mut_ptr(),
            ptr::null(),
            nodes.len(),
            update as c_uint,
        )
    }
}

/// The node that was captured last on a stream.
///
/// # Safety
/// As [`status`]; nobody else captures meanwhile.
pub(crate) unsafe fn last_node(driver: &Driver, stream: CUstream) -> Result<CUgraphNode> {
    // SAFETY: the caller's promise.
    unsafe { next_depends_on(driver, stream) }?.last().copied().ok_or_else(broken)
}

impl Stream {
    /// Begins a capture: what is queued on the stream becomes nodes of a graph (`cuStreamBeginCapture`).
    ///
    /// # Errors
    /// [`Error::Capture`] when the stream takes part in a capture already, and for the legacy default stream.
    ///
    /// # Examples
    /// ```
    /// # use std::sync::{Arc, atomic::{AtomicU32, Ordering}};
    /// # use rstream::{Api, Device, Stream, StreamOptions, capture::Global};
    /// # Api::attach(|api| {
    /// # let stream = Stream::new(api, Device::soft(api, 0)?, StreamOptions::default())?;
    /// let runs = Arc::new(AtomicU32::new(0));
    /// let counter = Arc::clone(&runs);
    /// let capture = stream.begin_capture::<Global>(api)?;
    /// capture.launch_host_func(api, move || { counter.fetch_add(1, Ordering::Relaxed); })?;
    /// let exec = capture.end(api)?.instantiate(api)?;
    /// exec.launch(api, &stream)?;
    /// exec.launch(api, &stream)?;
    /// stream.synchronize(api, None, &mut || false)?;
    /// assert_eq!(runs.load(Ordering::Relaxed), 2);
    /// # Ok::<(), rstream::Error>(()) })??; Ok::<(), rstream::Error>(())
    /// ```
    pub fn begin_capture<M: Mode>(&self, api: &Api<'_>) -> Result<Capture<'_, M>> {
        self.guard(RawCapture::begin(api, self, M::MODE, None)?)
    }

    /// Begins a capture into a graph that exists; the first captured nodes depend on `dependencies`
    /// (`cuStreamBeginCaptureToGraph`).
    ///
    /// Until it ends the graph can be used through the capture only. Nodes that were captured before it is abandoned stay
    /// in the graph. If the capture breaks, or ends with branches that were not joined, the graph is gone.
    ///
    /// # Errors
    /// As [`Stream::begin_capture`]; [`Error::InvalidValue`] for nodes of another graph.
    pub fn begin_capture_to_graph<M: Mode>(
        &self,
        api: &Api<'_>,
        graph: &Graph,
        dependencies: &[Node],
    ) -> Result<Capture<'_, M>> {
        self.guard(RawCapture::begin(api, self, M::MODE, Some((graph, dependencies)))?)
    }

    fn guard<M: Mode>(&self, raw: RawCapture) -> Result<Capture<'_, M>> {
        let branch = Branch { stream: self, id: raw.id(), owner: raw.owner() };
        Ok(Capture { raw, branch, thread: PhantomData })
    }

    /// Whether the stream takes part in a capture, whoever began it (`cuStreamIsCapturing`). Never disturbs one.
    ///
    /// # Errors
    /// [`Status::STREAM_CAPTURE_IMPLICIT`] for the legacy default stream while a blocking stream captures.
    pub fn capture_status(&self, api: &Api<'_>) -> Result<CaptureStatus> {
        let ready = self.alive(api)?;
        // SAFETY: the stream is alive, and its context is current.
        unsafe { status(self.device().driver(), ready.handle()) }
    }

    /// The capture that the stream takes part in (`cuStreamGetCaptureInfo`); `None` when there is none or it broke.
    /// Never disturbs one.
    ///
    /// # Errors
    /// As [`Stream::capture_status`].
    pub fn capture_info(&self, api: &Api<'_>) -> Result<Option<CaptureInfo>> {
        let ready = match self.capturable(api) {
            Err(error) if error.status() == Status::STREAM_CAPTURE_INVALIDATED => return Ok(None),
            other => other?,
        };
        let Some(capture) = ready.capture() else { return Ok(None) };
        let owner = Owner::of_capture(self.device(), capture.id);
        let dependencies = {
            let driver = self.device().driver();
            // SAFETY: the stream is alive, its context current, and `ready` keeps others from capturing.
            let nodes = unsafe { next_depends_on(driver, ready.handle()) }?;
            nodes.into_iter().map(|node| Node::of(driver, owner, node)).collect::<Result<Vec<Node>>>()?
        };
        Ok(Some(CaptureInfo { id: capture.id, graph: capture.graph as usize, dependencies }))
    }
}

/// While it lives, 'potentially unsafe' calls of this thread are judged by another mode
/// (`cuThreadExchangeStreamCaptureMode`): under [`CaptureMode::Relaxed`] none breaks anybody's capture.
///
/// Guards of one thread have to be dropped in the reverse order of their making, as blocks do it.
#[must_use = "dropped, the mode before is back"]
pub struct CaptureModeGuard<'a> {
    driver: &'static Driver,
    before: c_uint,
    /// The mode is this thread's.
    thread: PhantomData<*mut &'a ()>,
}

impl std::fmt::Debug for CaptureModeGuard<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CaptureModeGuard").finish_non_exhaustive()
    }
}

/// Gives this thread another capture mode until the guard is dropped. The mode is one for all devices of a driver.
///
/// # Errors
/// What the driver answers.
pub fn capture_mode<'a>(_api: &'a Api<'_>, device: Device, mode: CaptureMode) -> Result<CaptureModeGuard<'a>> {
    let driver = device.driver();
    Ok(CaptureModeGuard { driver, before: exchange_mode(driver, mode.code())?, thread: PhantomData })
}

/// The one call that is right in every state of a thread, also inside a callback.
pub(crate) fn exchange_mode(driver: &Driver, mut mode: c_uint) -> Result<c_uint> {
    // SAFETY: reads and writes one enum of C's int size.
    unsafe { driver.cuThreadExchangeStreamCaptureMode(&raw mut mode) }.map(|()| mode)
}

impl Drop for CaptureModeGuard<'_> {
    fn drop(&mut self) {
        drop(exchange_mode(self.driver, self.before));
    }
}
