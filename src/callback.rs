//! Host code at a point of a stream: closures made into the driver's callbacks, and the three kinds of them.
//!
//! | kind | the stream waits | may call the API | after a fault |
//! | --- | --- | --- | --- |
//! | `Callback` | yes | no | runs, with the status |
//! | `HostFunction` | yes | no | does not run, its completion has the error |
//! | `Continuation` | no | yes | does not run, its completion has the error |
//!
//! Under the driver's signal all three are queued with `cuStreamAddCallback`. `cuLaunchHostFunc` is not used, because after a
//! fault the driver drops its functions without a word (measured), while a callback then runs once with the status. Under
//! the memory signal they are items of a lane.

use std::any::TypeId;
use std::ffi::c_void;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use cudarc::driver::sys::CUstream;

use crate::api::{Api, callback_scope};
use crate::completion::{self, Completion, Outcome, Promise, shield};
use crate::device::Device;
use crate::error::{Error, Result, Status};
use crate::executor::{CONTINUATIONS, Job};
use crate::lane::{Again, Code, Due, Lane, Once};
use crate::stream::{RawStream, Stream};

/// What is to be done when a stream reaches a point. Consumed by value, so it cannot be done twice.
pub(crate) trait HostCode: Send + 'static {
    /// Whether the stream waits for it.
    const ORDERED: bool;

    /// Whether it enters the interpreter on the thread that runs it.
    fn enters_python() -> bool {
        false
    }

    /// What it is to a stream that cannot take it while it captures, and what to do instead.
    const ACT: &'static str;
    const REMEDY: &'static str;

    /// The stream reached the point with `status`. Called on the driver's callback thread or the polling one, in stream order; the
    /// stream goes on when this returns.
    fn reached(self, status: Status, ticket: Ticket);
}

/// How many pieces of host code of a stream are not resolved yet.
#[derive(Default)]
pub(crate) struct Pending(AtomicUsize);

impl Pending {
    pub(crate) fn count(&self) -> usize {
        self.0.load(Ordering::Acquire)
    }
}

/// Counters of the process: how host code fared since it started.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Stats {
    /// Accepted by an enqueue.
    pub accepted: u64,
    /// Ran to its end.
    pub run: u64,
    /// Ran and panicked, or was not run because of a fault or the end of the process.
    pub failed: u64,
    /// Cancelled before it ran.
    pub cancelled: u64,
}

static ACCEPTED: AtomicU64 = AtomicU64::new(0);
static RUN: AtomicU64 = AtomicU64::new(0);
static FAILED: AtomicU64 = AtomicU64::new(0);
static CANCELLED: AtomicU64 = AtomicU64::new(0);

/// The counters of the process. Each is exact; they are not read at one instant.
#[must_use]
pub fn stats() -> Stats {
    Stats {
        accepted: ACCEPTED.load(Ordering::Relaxed),
        run: RUN.load(Ordering::Relaxed),
        failed: FAILED.load(Ordering::Relaxed),
        cancelled: CANCELLED.load(Ordering::Relaxed),
    }
}

/// Counts one piece of host code as pending from its enqueue until it is resolved, and how it ended.
pub(crate) struct Ticket {
    pending: Arc<Pending>,
}

impl Ticket {
    fn new(pending: &Arc<Pending>) -> Ticket {
        pending.0.fetch_add(1, Ordering::AcqRel);
        Ticket { pending: Arc::clone(pending) }
    }

    /// Records how it ended. Called before the result can be seen, so that whoever sees it sees the counts.
    fn ended(self, outcome: Outcome) {
        count(outcome);
    }
}

fn count(outcome: Outcome) {
    match outcome {
        Outcome::Ran => &RUN,
        Outcome::Failed => &FAILED,
        Outcome::Cancelled => &CANCELLED,
    }
    .fetch_add(1, Ordering::Relaxed);
}

impl Drop for Ticket {
    fn drop(&mut self) {
        self.pending.0.fetch_sub(1, Ordering::AcqRel);
    }
}

/// [`HostCode::ACT`] and [`HostCode::REMEDY`] of callbacks.
const CALLBACK: (&str, &str) = ("take a callback", "Capture a host function, which runs once for each launch");

/// A callback: gets the status, also a bad one.
pub(crate) struct Callback<F, T> {
    pub(crate) f: F,
    pub(crate) promise: Promise<T>,
}

impl<F, T> HostCode for Callback<F, T>
where
    F: FnOnce(Status) -> T + Send + 'static,
    T: Send + 'static,
{
    const ORDERED: bool = true;
    const ACT: &'static str = CALLBACK.0;
    const REMEDY: &'static str = CALLBACK.1;

    fn enters_python() -> bool {
        is_pythons(TypeId::of::<T>())
    }

    fn reached(self, status: Status, ticket: Ticket) {
        let Callback { f, promise } = self;
        promise.reached(status);
        promise.run(move || f(status), |outcome| ticket.ended(outcome));
    }
}

/// A host function: runs only if the work before it went well.
pub(crate) struct HostFunction<F, T> {
    pub(crate) f: F,
    pub(crate) promise: Promise<T>,
}

impl<F, T> HostCode for HostFunction<F, T>
where
    F: FnOnce() -> T + Send + 'static,
    T: Send + 'static,
{
    const ORDERED: bool = true;
    const ACT: &'static str = "take a function that runs once";
    const REMEDY: &'static str = CALLBACK.1;

    fn enters_python() -> bool {
        is_pythons(TypeId::of::<T>())
    }

    fn reached(self, status: Status, ticket: Ticket) {
        let HostFunction { f, promise } = self;
        promise.reached(status);
        if status.ok() {
            promise.run(f, |outcome| ticket.ended(outcome));
        } else {
            drop(f);
            fail(promise, ticket, Error::Fault { status });
        }
    }
}

/// A continuation: runs off the stream, on a worker thread, and may call the API.
pub(crate) struct Continuation<F, T> {
    pub(crate) f: F,
    pub(crate) promise: Promise<T>,
    /// The stream's id: its continuations run in order.
    pub(crate) strand: u64,
}

impl<F, T> HostCode for Continuation<F, T>
where
    F: FnOnce(&Api<'_>) -> T + Send + 'static,
    T: Send + 'static,
{
    const ORDERED: bool = false;

    fn enters_python() -> bool {
        is_pythons(TypeId::of::<T>())
    }

    const ACT: &'static str = "take a continuation";
    const REMEDY: &'static str = "Queue it behind a launch of the graph";

    fn reached(self, status: Status, ticket: Ticket) {
        let Continuation { f, promise, strand } = self;
        promise.reached(status);
        // The closure is dropped on the worker as well: what it owns may want to block.
        let run = move || {
            if !status.ok() {
                drop(f);
                return fail(promise, ticket, Error::Fault { status });
            }
            let run = move || Api::attach(f).expect("a worker runs no callbacks");
            promise.run(run, |outcome| ticket.ended(outcome));
        };
        CONTINUATIONS.submit(strand, Job::new(Self::enters_python(), run));
    }
}

/// Nothing to run: the point of the stream itself.
pub(crate) struct Notice {
    pub(crate) promise: Promise<()>,
}

impl HostCode for Notice {
    const ORDERED: bool = false;
    const ACT: &'static str = "say when it is reached";
    const REMEDY: &'static str = "Ask behind a launch of the graph";

    fn reached(self, status: Status, ticket: Ticket) {
        self.promise.reached(status);
        if status.ok() {
            self.promise.run(|| (), |outcome| ticket.ended(outcome));
        } else {
            fail(self.promise, ticket, Error::NotReached { status });
        }
    }
}

/// The point of a stream that is idle.
#[inline]
pub(crate) fn reached_already() -> Completion<()> {
    ACCEPTED.fetch_add(1, Ordering::Relaxed);
    count(Outcome::Ran);
    completion::resolved(Status::SUCCESS, ())
}

/// Tells somebody who waits for what no stream was asked to tell.
pub(crate) fn tell(promise: Promise<()>, status: Status) {
    ACCEPTED.fetch_add(1, Ordering::Relaxed);
    shield(|| callback_scope(|| Notice { promise }.reached(status, Ticket::new(&Arc::default()))));
}

fn fail<T>(promise: Promise<T>, ticket: Ticket, error: Error) {
    promise.fail(error, |outcome| ticket.ended(outcome));
}

/// What the driver or a lane carries: one allocation for each piece of host code.
pub(crate) struct Packet<C> {
    code: C,
    ticket: Ticket,
}

impl<C: HostCode> Once for Packet<C> {
    fn reached(self: Box<Self>, status: Status) {
        let Packet { code, ticket } = *self;
        code.reached(status, ticket);
    }
}

/// Whether a result is that of a Python callable.
fn is_pythons(result: TypeId) -> bool {
    #[cfg(feature = "python")]
    let outcome = Some(TypeId::of::<crate::python::Outcome>());
    #[cfg(not(feature = "python"))]
    let outcome = None;
    outcome == Some(result)
}

/// Queues `code` by the memory signal: see [`crate::lane`]. As [`enqueue`] otherwise.
pub(crate) fn enqueue_on_lane<C: HostCode>(
    lane: &Arc<Lane>,
    device: Device,
    stream: &Arc<RawStream>,
    pending: &Arc<Pending>,
    code: C,
) -> Result<(), (Error, C)> {
    let packet = Box::new(Packet { code, ticket: Ticket::new(pending) });
    // A continuation enters the interpreter on its worker, not on the polling thread.
    let python = C::ORDERED && C::enters_python();
    let due = Due { code: Code::Once(packet), ordered: C::ORDERED, python };
    let (error, due) = match lane.enqueue(stream, due) {
        Ok(()) => {
            ACCEPTED.fetch_add(1, Ordering::Relaxed);
            return Ok(());
        }
        Err(refused) => refused,
    };
    let Code::Once(packet) = due.code else { unreachable!("what was passed comes back") };
    // SAFETY: what was passed comes back, and that is a packet of this type.
    let Packet { code, ticket } = *unsafe { Box::from_raw(Box::into_raw(packet).cast::<Packet<C>>()) };
    match error {
        Some(error) => Err((error, code)),
        // The stream must not wait on memory now: the driver's callback does it, behind what is due in the lane.
        None => {
            let behind = Behind { lane: Arc::clone(lane), last: lane.last_number(), code };
            enqueue_ticket(device, stream.handle(), ticket, behind).map_err(|(error, behind)| (error, behind.code))
        }
    }
}

/// Host code that runs behind what is due in a lane.
struct Behind<C> {
    lane: Arc<Lane>,
    /// The lane's last number when this was queued.
    last: u64,
    code: C,
}

impl<C: HostCode> HostCode for Behind<C> {
    const ORDERED: bool = C::ORDERED;
    const ACT: &'static str = C::ACT;
    const REMEDY: &'static str = C::REMEDY;

    fn reached(self, status: Status, ticket: Ticket) {
        self.lane.run_due_before(status, self.last);
        self.code.reached(status, ticket);
    }
}

/// Queues `code` on `stream` (`cuStreamAddCallback`). Gives it back, untouched, when the driver refuses.
///
/// The context of `device` is current, and `stream` is an alive stream of it that does not capture.
pub(crate) fn enqueue<C: HostCode>(
    device: Device,
    stream: CUstream,
    pending: &Arc<Pending>,
    code: C,
) -> Result<(), (Error, C)> {
    enqueue_ticket(device, stream, Ticket::new(pending), code)
}

fn enqueue_ticket<C: HostCode>(device: Device, stream: CUstream, ticket: Ticket, code: C) -> Result<(), (Error, C)> {
    let packet = Box::into_raw(Box::new(Packet { code, ticket }));
    // SAFETY: the stream is alive (the caller's promise). `trampoline::<C>` expects a `Box<Packet<C>>`, which this is,
    // and the driver calls it exactly once if it accepts, also after a fault and after the stream was destroyed
    // (measured).
    let accepted =
        unsafe { device.driver().cuStreamAddCallback(stream, Some(trampoline::<C>), packet.cast::<c_void>(), 0) };
    match accepted {
        Ok(()) => {
            ACCEPTED.fetch_add(1, Ordering::Relaxed);
            Ok(())
        }
        Err(error) => {
            // SAFETY: the driver refused, so it will not call the trampoline: the packet is still ours alone.
            let packet = unsafe { Box::from_raw(packet) };
            Err((error, packet.code))
        }
    }
}

/// The driver's callback. `status` is a number, because the driver may know codes that this crate does not.
unsafe extern "C" fn trampoline<C: HostCode>(_stream: CUstream, status: u32, data: *mut c_void) {
    // SAFETY: `data` is the packet of `enqueue`, and the driver calls once, so nobody else takes it.
    let packet = unsafe { Box::from_raw(data.cast::<Packet<C>>()) };
    let Packet { code, ticket } = *packet;
    // Host code's own panics were caught and became its result; one that comes this far is from a destructor. It must
    // not unwind into the driver, and the panic hook has told of it.
    shield(|| callback_scope(|| code.reached(Status::new(status), ticket)));
}

/// What a [`ReusableCallback`] and its queued runs share.
pub(crate) struct Reusable {
    f: Box<dyn Fn(Status) + Send + Sync>,
    pending: Arc<Pending>,
    runs: AtomicU64,
    panics: AtomicU64,
}

impl Reusable {
    fn run(&self, status: Status) -> Outcome {
        let (own, outcome) = match catch_unwind(AssertUnwindSafe(|| (self.f)(status))) {
            Ok(()) => (&self.runs, Outcome::Ran),
            Err(payload) => {
                // The panic hook has told of it. Its drop could panic again.
                std::mem::forget(payload);
                (&self.panics, Outcome::Failed)
            }
        };
        own.fetch_add(1, Ordering::Release);
        outcome
    }
}

impl Again for Reusable {
    fn reached(&self, status: Status) {
        count(self.run(status));
        self.pending.0.fetch_sub(1, Ordering::AcqRel);
    }
}

/// One run of a [`ReusableCallback`], where it goes the way of other host code.
struct OneRun(Arc<Reusable>);

impl HostCode for OneRun {
    const ORDERED: bool = true;
    const ACT: &'static str = CALLBACK.0;
    const REMEDY: &'static str = CALLBACK.1;

    fn reached(self, status: Status, ticket: Ticket) {
        ticket.ended(self.0.run(status));
    }
}

/// A callback that is made once and queued any number of times, each time without an allocation
/// ([`Stream::reusable_callback`]).
///
/// Its closure is dropped with the last of this and of what is queued. A cheap, shared handle.
#[derive(Clone)]
pub struct ReusableCallback {
    stream: Stream,
    shared: Arc<Reusable>,
}

impl ReusableCallback {
    pub(crate) fn new(stream: Stream, pending: Arc<Pending>, f: Box<dyn Fn(Status) + Send + Sync>) -> ReusableCallback {
        let (runs, panics) = (AtomicU64::new(0), AtomicU64::new(0));
        let shared = Reusable { f, pending, runs, panics };
        ReusableCallback { stream, shared: Arc::new(shared) }
    }

    /// Queues one run: as [`Stream::add_callback`], with no result.
    ///
    /// # Errors
    /// What the driver answers; as [`Stream::add_callback`].
    pub fn enqueue(&self, api: &Api<'_>) -> Result<()> {
        let lane = self.stream.lane(api)?;
        let ready = self.stream.ready(api, CALLBACK.0, CALLBACK.1)?;
        let (device, shared) = (self.stream.device(), &self.shared);
        // Given up again when it is refused.
        shared.pending.0.fetch_add(1, Ordering::AcqRel);
        let queued = match lane {
            Some(lane) => {
                let due = Due { code: Code::Again(Arc::clone(shared) as _), ordered: true, python: false };
                lane.enqueue(ready.raw(), due).map_err(|(error, _)| error)
            }
            None => queue_again(device, ready.handle(), shared).map_err(Some),
        };
        let Err(error) = queued else {
            ACCEPTED.fetch_add(1, Ordering::Relaxed);
            return Ok(());
        };
        shared.pending.0.fetch_sub(1, Ordering::AcqRel);
        match (error, lane) {
            // As in `enqueue_on_lane`.
            (None, Some(lane)) => {
                let code = OneRun(Arc::clone(shared));
                let behind = Behind { lane: Arc::clone(lane), last: lane.last_number(), code };
                let ticket = Ticket::new(&shared.pending);
                enqueue_ticket(device, ready.handle(), ticket, behind).map_err(|(error, _)| error)
            }
            (error, _) => Err(error.expect("without a lane there is one")),
        }
    }

    /// How many runs have ended well.
    #[must_use]
    pub fn runs(&self) -> u64 {
        self.shared.runs.load(Ordering::Acquire)
    }

    /// How many runs have panicked.
    #[must_use]
    pub fn panics(&self) -> u64 {
        self.shared.panics.load(Ordering::Acquire)
    }
}

impl std::fmt::Debug for ReusableCallback {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ReusableCallback")
            .field("stream", &self.stream)
            .field("runs", &self.runs())
            .field("panics", &self.panics())
            .finish()
    }
}

/// Queues a run by the driver's callback, without an allocation.
fn queue_again(device: Device, stream: CUstream, shared: &Arc<Reusable>) -> Result<()> {
    let data = Arc::into_raw(Arc::clone(shared));
    // SAFETY: the stream is alive (the caller's promise). `run_again` expects a counted pointer to a `Reusable`, which this
    // is, and the driver calls it exactly once if it accepts, as in `enqueue_ticket`.
    let accepted = unsafe {
        let data = data.cast_mut().cast::<c_void>();
        device.driver().cuStreamAddCallback(stream, Some(run_again), data, 0)
    };
    if accepted.is_err() {
        // SAFETY: the driver refused, so the pointer is still counted here.
        drop(unsafe { Arc::from_raw(data) });
    }
    accepted
}

/// As [`trampoline`], for one run of a [`ReusableCallback`].
unsafe extern "C" fn run_again(_stream: CUstream, status: u32, data: *mut c_void) {
    // SAFETY: `data` is the counted pointer of `queue_again`, and the driver calls once for it.
    let shared = unsafe { Arc::from_raw(data.cast::<Reusable>()) };
    shield(|| {
        callback_scope(|| {
            shared.reached(Status::new(status));
            drop(shared);
        });
    });
}
