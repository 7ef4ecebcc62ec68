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
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use cudarc::driver::sys::CUstream;

use crate::api::{Api, callback_scope};
use crate::completion::{Outcome, Promise, shield};
use crate::device::Device;
use crate::error::{Error, Result, Status};
use crate::executor::CONTINUATIONS;
use crate::lane::{Due, Lane};
use crate::stream::RawStream;

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

    /// The stream reached the point with `status`. Called on the driver's callback thread, in stream order; the stream
    /// goes on when this returns.
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
        match outcome {
            Outcome::Ran => &RUN,
            Outcome::Failed => &FAILED,
            Outcome::Cancelled => &CANCELLED,
        }
        .fetch_add(1, Ordering::Relaxed);
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        self.pending.0.fetch_sub(1, Ordering::AcqRel);
    }
}

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
    const ACT: &'static str = "take a callback";
    const REMEDY: &'static str = "Capture a host function, which runs once for each launch";

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
    const REMEDY: &'static str = "Capture a host function, which runs once for each launch";

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
    const ACT: &'static str = "take a continuation";
    const REMEDY: &'static str = "Queue it behind a launch of the graph";

    fn reached(self, status: Status, ticket: Ticket) {
        let Continuation { f, promise, strand } = self;
        promise.reached(status);
        // The closure is dropped on the worker as well: what it owns may want to block.
        CONTINUATIONS.submit(strand, move || {
            if !status.ok() {
                drop(f);
                return fail(promise, ticket, Error::Fault { status });
            }
            let run = move || Api::attach(f).expect("a worker runs no callbacks");
            promise.run(run, |outcome| ticket.ended(outcome));
        });
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
            fail(self.promise, ticket, Error::Fault { status });
        }
    }
}

fn fail<T>(promise: Promise<T>, ticket: Ticket, error: Error) {
    ticket.ended(Outcome::Failed);
    promise.resolve(Err(error));
}

/// What the driver or a lane carries: one allocation for each piece of host code.
pub(crate) struct Packet<C> {
    code: C,
    ticket: Ticket,
}

impl<C: HostCode> Due for Packet<C> {
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
    match lane.enqueue(stream, packet) {
        Ok(()) => {
            ACCEPTED.fetch_add(1, Ordering::Relaxed);
            Ok(())
        }
        Err((Some(error), packet)) => Err((error, packet.code)),
        // The stream must not wait on memory now: the driver's callback does it, behind what is due in the lane.
        Err((None, packet)) => {
            let Packet { code, ticket } = *packet;
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
