//! Streams: handles that own or adopt a `CUstream`, and what can be queued on one.

use std::any::Any;
use std::ffi::{c_int, c_uint};
use std::hash::{Hash, Hasher};
use std::ptr;
use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, RwLockReadGuard, RwLockWriteGuard};
use std::thread::{self, ThreadId};
use std::time::{Duration, Instant};

use cudarc::driver::sys::{CUDA_HOST_NODE_PARAMS, CUcontext, CUgreenCtx, CUstream};

use crate::api::Api;
use crate::callback::{self, Callback, Continuation, HostCode, HostFunction, Notice, Pending, ReusableCallback};
use crate::capture::{self, CaptureStatus};
use crate::completion::{self, Completion, INTERRUPT_CHECK};
use crate::device::{Bound, Device};
use crate::driver::Driver;
use crate::error::{Error, Refused, Result, Status};
use crate::event::{Event, RawEvent, Record};
use crate::gate::{self, Gate};
use crate::graph::{self, HostNode, Label, Owner, Sequence};
use crate::lane::Lane;
use crate::reaper::{self, MayBlock, Relaxed};

/// How the host is told that a stream reached a point.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Signal {
    /// [`Signal::Memory`] on a GPU where it can be used, else [`Signal::Driver`]; [`SIGNAL_VARIABLE`] can say otherwise.
    #[default]
    Auto,
    /// A number that the stream writes into memory, seen by a thread that polls, and a wait on memory for what it has to
    /// wait for (`cuStreamBatchMemOp`). The quickest; see [`crate::poller`] for its cost.
    Memory,
    /// The driver's own callbacks (`cuStreamAddCallback`).
    Driver,
}

/// How a [`Stream`] is made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StreamOptions {
    /// No implicit synchronization with the legacy default stream (`CU_STREAM_NON_BLOCKING`).
    pub non_blocking: bool,
    /// Lower goes first. Clamped to [`Device::priority_range`] by the driver.
    pub priority: i32,
    /// How the host is told.
    pub signal: Signal,
}

impl Default for StreamOptions {
    fn default() -> StreamOptions {
        StreamOptions { non_blocking: true, priority: 0, signal: Signal::Auto }
    }
}

/// `CU_EVENT_RECORD_EXTERNAL` and `CU_EVENT_WAIT_EXTERNAL`.
const EXTERNAL: c_uint = 1;
const LEGACY: usize = 1;
const PER_THREAD: usize = 2;

/// A stream handle. Owned ones are destroyed on the background thread when this is dropped, so that it may be dropped
/// anywhere; work queued on them still runs.
pub(crate) struct RawStream {
    device: Device,
    handle: CUstream,
    owned: bool,
    /// Only this thread may use the handle: `CU_STREAM_PER_THREAD` names another stream on every thread.
    thread: Option<ThreadId>,
    /// What has to outlive it: the owner of an adopted stream, or a green context.
    _keep: Option<Box<dyn Any + Send + Sync>>,
}

impl RawStream {
    pub(crate) fn handle(&self) -> CUstream {
        self.handle
    }
}

// SAFETY: streams may be used from any thread (driver reference 3.15); `thread` keeps the exception to its thread.
unsafe impl Send for RawStream {}
// SAFETY: as for Send.
unsafe impl Sync for RawStream {}

impl RawStream {
    /// What destroys the stream; false while it takes part in a capture, whose end that would break (measured).
    fn destroy(&self) -> impl FnMut() -> bool + Send + 'static {
        let (device, handle) = (self.device, self.handle as usize);
        move || {
            let (driver, handle) = (device.driver(), handle as CUstream);
            // SAFETY: called once with success, by its owner, so the stream is alive. A failure means that the context is
            // gone, and the stream with it.
            unsafe {
                let busy = capture::status(driver, handle).is_ok_and(|status| status != CaptureStatus::None);
                if !busy {
                    drop(driver.cuStreamDestroy_v2(handle));
                }
                !busy
            }
        }
    }
}

impl Drop for RawStream {
    fn drop(&mut self) {
        if self.owned {
            reaper::release_when(self.device, self.destroy());
        }
    }
}

struct Inner {
    device: Device,
    /// The address, to be shown. Use goes through `raw`.
    address: usize,
    id: u64,
    non_blocking: bool,
    /// As the driver clamped it; follows the attribute when that is set here.
    priority: AtomicI32,
    context: usize,
    green_context: Option<usize>,
    pending: Arc<Pending>,
    gate: Arc<Gate>,
    /// It has the memory signal.
    by_memory: bool,
    /// Its lane, from the first host code on.
    lane: OnceLock<Arc<Lane>>,
    raw: Mutex<Option<Arc<RawStream>>>,
}

/// A stream: a queue of work for a device. A cheap, shared handle.
///
/// What it knows about itself is read once, when it is made or adopted, so none of the accessors calls the driver. Two are
/// equal when they are the same stream of the same driver.
#[derive(Clone)]
pub struct Stream {
    inner: Arc<Inner>,
}

impl PartialEq for Stream {
    fn eq(&self, other: &Stream) -> bool {
        self.inner.id == other.inner.id && self.inner.device == other.inner.device
    }
}

impl Eq for Stream {}

impl Hash for Stream {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.inner.id.hash(state);
        self.inner.device.hash(state);
    }
}

impl std::fmt::Debug for Stream {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Stream")
            .field("id", &self.inner.id)
            .field("device", &self.inner.device)
            .field("priority", &self.priority())
            .field("non_blocking", &self.inner.non_blocking)
            .field("closed", &self.is_closed())
            .finish_non_exhaustive()
    }
}

/// A stream that can be used: alive, on the right thread, its context current; from [`Stream::ready`], not capturing.
pub(crate) struct Ready<'a> {
    raw: Arc<RawStream>,
    strand: u64,
    /// The capture that it takes part in, if that was asked for.
    capture: Option<capture::State>,
    /// Nothing else is captured meanwhile.
    _capturing: Option<MutexGuard<'static, ()>>,
    /// No capture begins or ends meanwhile.
    _gate: Option<RwLockReadGuard<'a, ()>>,
    _may_block: Option<MayBlock>,
    _bound: Bound<'a>,
}

impl Ready<'_> {
    pub(crate) fn handle(&self) -> CUstream {
        self.raw.handle
    }

    pub(crate) fn raw(&self) -> &Arc<RawStream> {
        &self.raw
    }

    /// Asks for the capture that work goes to. The caller holds the gate.
    fn look_for_capture(&mut self) -> Result<()> {
        let driver = self.raw.device.driver();
        // SAFETY: the stream is alive, and its context is current.
        let capture = unsafe { capture::state(driver, self.raw.handle) }?;
        match capture.status {
            CaptureStatus::None => return Ok(()),
            CaptureStatus::Active => self.capture = Some(capture),
            CaptureStatus::Invalidated => {
                return Err(invalidated());
            }
        }
        self._capturing = Some(driver.capturing.lock().unwrap_or_else(PoisonError::into_inner));
        Ok(())
    }

    /// The capture that work goes to, from [`Stream::capturable`].
    pub(crate) fn capture(&self) -> Option<&capture::State> {
        self.capture.as_ref()
    }

    /// Queues or captures work by `enqueue`, and keeps `payload` until it is done, or as long as the graph needs it.
    pub(crate) fn submit(
        &self,
        payload: Box<dyn Any + Send>,
        enqueue: impl FnOnce(&Driver, CUstream) -> Result<()>,
    ) -> Result<()> {
        let driver = self.raw.device.driver();
        match &self.capture {
            // SAFETY: the graph of a capture that is going on exists.
            Some(capture) => unsafe {
                graph::own_payload(driver, capture.graph, payload, || enqueue(driver, self.raw.handle))
            },
            None => {
                enqueue(driver, self.raw.handle)?;
                self.keep(payload);
                Ok(())
            }
        }
    }

    /// An event of the device's pool, recorded behind all that was queued so far.
    fn record_event(&self) -> Result<RawEvent> {
        let device = self.raw.device;
        let event = device.take_event()?;
        // SAFETY: event and stream are alive and of one context.
        unsafe { device.driver().cuEventRecord(event.handle(), self.raw.handle) }?;
        Ok(event)
    }

    /// Keeps `payload` until the stream has passed all that was queued so far.
    pub(crate) fn keep(&self, payload: Box<dyn Any + Send>) {
        let recorded = self.record_event();
        // SAFETY: the stream is alive, and its context is current.
        let status = unsafe { capture::status(self.raw.device.driver(), self.raw.handle) };
        match recorded {
            // Another library has begun a capture just now: the event may be part of it, and must not be asked.
            Ok(_) if status.is_ok_and(|status| status != CaptureStatus::None) => std::mem::forget(payload),
            Ok(event) => reaper::keep(self.strand, event, payload),
            Err(error) if error.status().ends_all_work() => drop(payload),
            // Without an event nobody learns when the work is done, and to wait for it here could be for ever: the
            // payload is leaked, so that it is valid in any case.
            Err(_) => std::mem::forget(payload),
        }
    }
}

/// A new stream of the driver's (`cuStreamCreateWithPriority`). The context is current.
fn create(device: Device, options: StreamOptions) -> Result<CUstream> {
    let mut handle: CUstream = ptr::null_mut();
    let flags = c_uint::from(options.non_blocking);
    let _may_block = MayBlock::enter();
    // SAFETY: writes one handle.
    unsafe { device.driver().cuStreamCreateWithPriority(&raw mut handle, flags, options.priority) }?;
    Ok(handle)
}

impl Device {
    /// How many streams [`Device::reserve_streams`] makes room for at most.
    pub const MOST_RESERVED_STREAMS: usize = 4096;

    /// Makes room in the driver for `count` streams more than there are, by making that many at once and destroying them
    /// (`cuStreamCreateWithPriority`, `cuStreamDestroy`). Waits for all work of the context if there is none.
    ///
    /// Without room, whoever makes a stream waits for all work of the context, for callbacks that run and for waits on
    /// memory too, and meanwhile other threads' calls wait for that one. The driver has room for 35 at first and makes it
    /// for about 43 more at a time; a stream takes about 0.6 MiB of device memory, which it keeps (measured on one H200).
    ///
    /// # Errors
    /// [`Error::InvalidValue`] for more than [`Device::MOST_RESERVED_STREAMS`]; what the driver answers.
    pub fn reserve_streams(self, api: &Api<'_>, count: usize) -> Result<()> {
        if count > Device::MOST_RESERVED_STREAMS {
            let most = Device::MOST_RESERVED_STREAMS;
            return Err(Error::invalid(format!("room for {count} streams: at most {most} can be reserved")));
        }
        let _bound = self.bind(api)?;
        let _may_block = MayBlock::enter();
        let mut streams = Vec::with_capacity(count);
        let made = (0..count).try_for_each(|_| create(self, StreamOptions::default()).map(|made| streams.push(made)));
        for stream in streams {
            // SAFETY: made above, and nobody else has it. A failure means that the context is gone, and the stream with it.
            drop(unsafe { self.driver().cuStreamDestroy_v2(stream) });
        }
        made
    }
}

impl Stream {
    /// A new stream (`cuStreamCreateWithPriority`).
    ///
    /// Waits for all work of the context when the driver has to make room first: see [`Device::reserve_streams`].
    ///
    /// # Errors
    /// What the driver answers.
    pub fn new(api: &Api<'_>, device: Device, options: StreamOptions) -> Result<Stream> {
        let _bound = device.bind(api)?;
        let handle = create(device, options)?;
        Stream::describe(RawStream { device, handle, owned: true, thread: None, _keep: None }, options.signal)
    }

    /// The legacy default stream of the device (`CU_STREAM_LEGACY`, also called the NULL stream). Work in it waits for
    /// all blocking streams, and they for it.
    ///
    /// # Errors
    /// What the driver answers.
    pub fn legacy_default(api: &Api<'_>, device: Device) -> Result<Stream> {
        Stream::adopt(api, device, LEGACY, None)
    }

    /// The default stream of this thread (`CU_STREAM_PER_THREAD`). Use on another thread is refused, since the handle
    /// names another stream there.
    ///
    /// # Errors
    /// What the driver answers.
    pub fn per_thread_default(api: &Api<'_>, device: Device) -> Result<Stream> {
        Stream::adopt(api, device, PER_THREAD, None)
    }

    /// A stream of another library, by its handle. It is never destroyed by rstream; `keep` is dropped with the last use
    /// of it. 0 is the legacy default stream. Of a stream that rstream made, it has the signal that was asked for there.
    ///
    /// # Safety
    /// `handle` is a stream of the primary context of `device`, alive as long as `keep`, or for good.
    ///
    /// # Errors
    /// [`Error::InvalidValue`] when the stream belongs to another context; [`Error::Capture`] while it captures, since
    /// asking for its id would break that; what the driver answers.
    pub unsafe fn from_raw(
        api: &Api<'_>,
        device: Device,
        handle: usize,
        keep: Option<Box<dyn Any + Send + Sync>>,
    ) -> Result<Stream> {
        Stream::adopt(api, device, if handle == 0 { LEGACY } else { handle }, keep)
    }

    fn adopt(api: &Api<'_>, device: Device, handle: usize, keep: Option<Box<dyn Any + Send + Sync>>) -> Result<Stream> {
        let _bound = device.bind(api)?;
        let thread = (handle == PER_THREAD).then(|| thread::current().id());
        let raw = RawStream { device, handle: handle as CUstream, owned: false, thread, _keep: keep };
        Stream::describe(raw, Signal::Auto)
    }

    /// Asks the driver once for what the stream is. The context is current.
    fn describe(raw: RawStream, signal: Signal) -> Result<Stream> {
        let RawStream { device, handle, owned, .. } = raw;
        if !owned {
            refuse_capture(device, handle, "be adopted", "Adopt it before the capture begins")?;
        }
        let driver = device.driver();
        let mut context: CUcontext = ptr::null_mut();
        let mut green: CUgreenCtx = ptr::null_mut();
        let (mut flags, mut priority, mut id) = (0 as c_uint, 0 as c_int, 0_u64);
        // SAFETY: the stream is alive; each call writes one value of its type. Before the driver has green contexts and
        // ids, the plain context and the handle stand in.
        unsafe {
            match driver.cuStreamGetCtx_v2(handle, &raw mut context, &raw mut green) {
                Err(Error::DriverTooOld { .. }) => driver.cuStreamGetCtx(handle, &raw mut context),
                other => other,
            }?;
            match driver.cuStreamGetId(handle, &raw mut id) {
                Err(Error::DriverTooOld { .. }) => id = handle as u64,
                other => other?,
            }
            driver.cuStreamGetFlags(handle, &raw mut flags)?;
            driver.cuStreamGetPriority(handle, &raw mut priority)?;
        }
        if context as usize != device.context_handle() {
            return Err(Error::invalid(format!(
                "the stream {:#x} belongs to the context {context:?}, not to the primary context of device {device}, \
                 {:#x}",
                handle as usize,
                device.context_handle()
            )));
        }
        let gate = Gate::of(strand(device, id));
        // All handles of a stream have one signal: under two, the driver's callback of one would come before what is due
        // in the lane of the other. Only an owner can ask for one, and it is there before any other handle.
        let known = if owned { None } else { gate.owner_by_memory() };
        let by_memory = match known {
            Some(by_memory) => by_memory,
            None => signal.by_memory(device, handle as usize)?,
        };
        if owned {
            gate.set_owner_by_memory(by_memory);
        }
        Ok(Stream {
            inner: Arc::new(Inner {
                device,
                gate,
                by_memory,
                lane: OnceLock::new(),
                address: handle as usize,
                id,
                non_blocking: flags & 1 != 0,
                priority: AtomicI32::new(priority),
                context: context as usize,
                green_context: (!green.is_null()).then_some(green as usize),
                pending: Arc::default(),
                raw: Mutex::new(Some(Arc::new(raw))),
            }),
        })
    }

    /// A stream of a green context, which `keep` holds. The primary context of the device is current.
    pub(crate) fn own(
        _api: &Api<'_>,
        device: Device,
        handle: CUstream,
        keep: Box<dyn Any + Send + Sync>,
    ) -> Result<Stream> {
        let raw = RawStream { device, handle, owned: true, thread: None, _keep: Some(keep) };
        Stream::describe(raw, Signal::Auto)
    }

    pub(crate) fn gate(&self) -> &Arc<Gate> {
        &self.inner.gate
    }

    /// Whether this is the legacy default stream, by its handle.
    pub(crate) fn is_legacy_default(&self) -> bool {
        self.inner.address == LEGACY
    }

    /// The id, told apart from those of the other driver.
    fn strand(&self) -> u64 {
        strand(self.inner.device, self.inner.id)
    }

    fn raw(&self) -> Result<Arc<RawStream>> {
        let raw = self.inner.raw.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let raw = raw.ok_or(Error::Closed { what: "Stream" })?;
        if raw.thread.is_some_and(|thread| thread != thread::current().id()) {
            return Err(Error::invalid(
                "this is the per-thread default stream of another thread: make one on this thread",
            ));
        }
        Ok(raw)
    }

    /// The stream, ready to be given work that has no form in a capture: `act` says what, and `remedy` what to do instead.
    pub(crate) fn ready<'a>(&'a self, api: &'a Api<'_>, act: &str, remedy: &str) -> Result<Ready<'a>> {
        let mut ready = self.ready_behind(api, self.inner.gate.read(), act, remedy)?;
        ready._may_block = Some(MayBlock::enter());
        Ok(ready)
    }

    fn ready_behind<'a>(
        &'a self,
        api: &'a Api<'_>,
        gate: RwLockReadGuard<'a, ()>,
        act: &str,
        remedy: &str,
    ) -> Result<Ready<'a>> {
        let mut ready = self.alive(api)?;
        ready._gate = Some(gate);
        refuse_capture(ready.raw.device, ready.raw.handle, act, remedy)?;
        Ok(ready)
    }

    /// The stream, ready to be given work that becomes a node while it captures.
    pub(crate) fn capturable<'a>(&'a self, api: &'a Api<'_>) -> Result<Ready<'a>> {
        let mut ready = self.alive(api)?;
        ready._gate = Some(self.inner.gate.read());
        ready.look_for_capture()?;
        ready._may_block = Some(MayBlock::enter());
        Ok(ready)
    }

    /// The stream, for calls that are allowed while it captures.
    pub(crate) fn alive<'a>(&self, api: &'a Api<'_>) -> Result<Ready<'a>> {
        let raw = self.raw()?;
        let bound = self.inner.device.bind(api)?;
        Ok(Ready {
            raw,
            strand: self.strand(),
            capture: None,
            _capturing: None,
            _gate: None,
            _may_block: None,
            _bound: bound,
        })
    }

    /// Its handle (`CUstream`), for other libraries. It is valid until the stream is closed and its last clone dropped.
    ///
    /// # Errors
    /// [`Error::Closed`].
    pub fn handle(&self) -> Result<usize> {
        if self.is_closed() { Err(Error::Closed { what: "Stream" }) } else { Ok(self.inner.address) }
    }

    /// Its number, which no other stream of the process ever has (`cuStreamGetId`).
    #[must_use]
    pub fn id(&self) -> u64 {
        self.inner.id
    }

    /// Its device.
    #[must_use]
    pub fn device(&self) -> Device {
        self.inner.device
    }

    /// Its priority, as the driver clamped it (`cuStreamGetPriority`).
    #[must_use]
    pub fn priority(&self) -> i32 {
        self.inner.priority.load(Ordering::Relaxed)
    }

    pub(crate) fn priority_changed(&self, priority: i32) {
        self.inner.priority.store(priority, Ordering::Relaxed);
    }

    /// Whether it does not synchronize with the legacy default stream (`cuStreamGetFlags`).
    #[must_use]
    pub fn non_blocking(&self) -> bool {
        self.inner.non_blocking
    }

    /// The handle of its context (`cuStreamGetCtx`).
    #[must_use]
    pub fn context_handle(&self) -> usize {
        self.inner.context
    }

    /// The handle of its green context, if it is of one (`cuStreamGetCtx_v2`).
    #[must_use]
    pub fn green_context(&self) -> Option<usize> {
        self.inner.green_context
    }

    /// How the host is told: never [`Signal::Auto`]. The same for all handles of a stream.
    #[must_use]
    pub fn signal(&self) -> Signal {
        if self.inner.by_memory { Signal::Memory } else { Signal::Driver }
    }

    /// How many pieces of host code were queued through this handle and its clones and have not ended. One that was
    /// cancelled has when the stream gets there.
    #[must_use]
    pub fn pending(&self) -> usize {
        self.inner.pending.count()
    }

    /// Whether it was closed.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        self.inner.raw.lock().unwrap_or_else(PoisonError::into_inner).is_none()
    }

    /// Gives the stream up (`cuStreamDestroy`; on the background thread inside a callback, while something uses it, and while
    /// another call of rstream's may block).
    /// Does not wait for what is queued, which still runs. A second close does nothing.
    pub fn close(&self) {
        let raw = self.inner.raw.lock().unwrap_or_else(PoisonError::into_inner).take();
        // A stream that was just destroyed is quickest to be made anew, so this is worth a call here.
        if let Some(mut raw) = raw.and_then(Arc::into_inner)
            && std::mem::take(&mut raw.owned)
        {
            reaper::release_here(self.inner.device, raw.destroy());
        }
    }

    /// Whether all queued work is done (`cuStreamQuery`).
    ///
    /// # Errors
    /// The code of a fault; [`Error::Closed`]; [`Error::Capture`] while the stream captures.
    pub fn query(&self, api: &Api<'_>) -> Result<bool> {
        let ready = self.ready_behind(api, self.inner.gate.read(), "be queried", "End the capture first")?;
        query(&ready.raw)
    }

    /// Waits until all work queued so far is done.
    ///
    /// `timeout` is the longest wait, without limit if `None`. `interrupted` is asked about every 50 ms whether to give
    /// up. The wait spins for some microseconds, then sleeps a fraction of the time waited so far, at most 1 ms.
    ///
    /// # Errors
    /// As [`Stream::query`]; [`Error::Timeout`], [`Error::Interrupted`]: the work goes on.
    pub fn synchronize(
        &self,
        api: &Api<'_>,
        timeout: Option<Duration>,
        interrupted: &mut dyn FnMut() -> bool,
    ) -> Result<()> {
        // Asked anew each time: the wait must neither hold up a capture that begins meanwhile, nor break it.
        poll_until_done(timeout, interrupted, || {
            // Somebody who waits to begin a capture of it waits for work that is being given to it, which may take long.
            let Some(gate) = self.inner.gate.try_read() else { return Ok(false) };
            let ready = self.ready_behind(api, gate, "be waited for", "End the capture first")?;
            query(&ready.raw)
        })
    }

    fn refuse_other_driver(&self, device: Device, what: &str) -> Result<()> {
        if device.kind() == self.inner.device.kind() {
            return Ok(());
        }
        let mine = self.inner.device;
        Err(Error::invalid(format!("a stream of device {mine} cannot wait for {what} of device {device}")))
    }

    /// Makes later work wait until `event`, as it is recorded now, is reached (`cuStreamWaitEvent`). The event may be of
    /// another device of the same driver.
    ///
    /// An event that was recorded in a capture lets this stream take part in it, behind the work that the event stands
    /// for.
    ///
    /// # Errors
    /// [`Error::InvalidValue`] for an event of another driver; [`Error::Capture`] when one of the two is in a capture that
    /// the other cannot take part in; what the driver answers.
    pub fn wait_event(&self, api: &Api<'_>, event: &Event) -> Result<()> {
        self.refuse_other_driver(event.device(), "an event")?;
        let raw = event.raw()?;
        let record = raw.record();
        let mut ready = self.alive(api)?;
        let _gate = Entry::take(&self.inner.gate, matches!(record, Record::Captured(_)));
        ready.look_for_capture()?;
        let mine = ready.capture().map(|capture| Sequence::of(self.inner.device, capture.id));
        match (mine, record) {
            (Some(_), Record::Ordinary) => {
                return Err(Error::capture(
                    Status::STREAM_CAPTURE_ISOLATION,
                    "a stream that is capturing cannot wait for an event that was recorded outside of the capture: \
                     record it inside, or wait for it as an external one",
                ));
            }
            (Some(mine), Record::Captured(theirs)) if mine != theirs => return Err(merge()),
            (None, Record::Captured(_)) if self.is_legacy_default() => return Err(legacy()),
            _ => {}
        }
        let captured = matches!(record, Record::Captured(_));
        self.wait_raw(&ready, &raw).map_err(|error| {
            if captured && error.status() == Status::INVALID_VALUE {
                Error::invalid("the event was last recorded in a capture that is over: record it anew")
            } else {
                error
            }
        })?;
        // Somebody may have recorded it in a capture meanwhile.
        let record = if captured { record } else { raw.record() };
        if let (None, Record::Captured(theirs)) = (mine, record) {
            let key = (self.inner.device.kind(), theirs.id());
            gate::joined(key, &self.inner.gate);
            // The capture may have ended before that was known.
            if self.capture_status(api)? == CaptureStatus::None {
                gate::not_joined(key, &self.inner.gate);
            }
        }
        Ok(())
    }

    /// Makes later work of a stream that nobody else knows wait for `event`.
    pub(crate) fn wait_raw_event(&self, api: &Api<'_>, event: &RawEvent) -> Result<()> {
        self.wait_raw(&self.alive(api)?, event)
    }

    /// An event of the device's pool, recorded in a stream that nobody else knows.
    pub(crate) fn record_raw_event(&self, api: &Api<'_>) -> Result<RawEvent> {
        let ready = self.alive(api)?;
        let _may_block = MayBlock::enter();
        ready.record_event()
    }

    fn wait_raw(&self, ready: &Ready<'_>, event: &RawEvent) -> Result<()> {
        let _may_block = MayBlock::enter();
        // SAFETY: both handles are alive.
        unsafe { self.inner.device.driver().cuStreamWaitEvent(ready.handle(), event.handle(), 0) }
    }

    /// Captures a node that waits at each launch for `event`, as it is recorded then (`cuStreamWaitEvent` with
    /// `CU_EVENT_WAIT_EXTERNAL`). The graph keeps the event alive.
    ///
    /// # Errors
    /// [`Error::Capture`] on a stream that does not capture; as [`Stream::wait_event`].
    pub fn wait_external(&self, api: &Api<'_>, event: &Event) -> Result<()> {
        self.refuse_other_driver(event.device(), "an event")?;
        // The graph waits for what is recorded later, too.
        event.share(api)?;
        let raw = event.raw()?;
        let handle = raw.handle();
        self.external(api)?.submit(Box::new(raw), |driver, stream| {
            // SAFETY: both handles are alive, the event as long as the graph.
            unsafe { driver.cuStreamWaitEvent(stream, handle, EXTERNAL) }
        })
    }

    /// The stream, which has to be capturing.
    fn external<'a>(&'a self, api: &'a Api<'_>) -> Result<Ready<'a>> {
        let ready = self.capturable(api)?;
        if ready.capture().is_none() {
            return Err(Error::capture(
                Status::ILLEGAL_STATE,
                "external records and waits are for streams that capture: leave external out",
            ));
        }
        Ok(ready)
    }

    /// Makes later work wait for all that is queued on `other` so far. If `other` captures, this stream takes part in its
    /// capture from then on; if both do, this one's later work depends on the other's.
    ///
    /// # Errors
    /// [`Error::InvalidValue`] for a stream of another driver; [`Error::Capture`] when one of the two is in a capture that
    /// the other cannot take part in; what the driver answers.
    pub fn wait_stream(&self, api: &Api<'_>, other: &Stream) -> Result<()> {
        self.refuse_other_driver(other.inner.device, "a stream")?;
        let mut joins = other.capture_status(api)? != CaptureStatus::None;
        while !self.try_to_wait(api, other, joins)? {
            // It has begun to capture meanwhile.
            joins = true;
        }
        Ok(())
    }

    /// False: `other` captures, so this stream would join, for which `joins` has to be true.
    fn try_to_wait(&self, api: &Api<'_>, other: &Stream, joins: bool) -> Result<bool> {
        let device = other.inner.device;
        let mut mine = self.alive(api)?;
        let (first, second) = (&self.inner.gate, &other.inner.gate);
        let same = first.strand() == second.strand();
        // In the order of their ids. Of the other stream nothing changes.
        let (_mine, _theirs);
        if same || first.strand() < second.strand() {
            _mine = Entry::take(first, joins);
            _theirs = (!same).then(|| second.read());
        } else {
            _theirs = Some(second.read());
            _mine = Entry::take(first, joins);
        }
        mine.look_for_capture()?;
        let mut entered = None;
        let event = {
            // In its own scope, since the handle of a default stream means the one of the current context.
            let mut theirs = other.alive(api)?;
            if let Some(mine) = mine.capture() {
                // SAFETY: the stream is alive, and its context is current.
                let state = unsafe { capture::state(device.driver(), theirs.handle()) }?;
                match state.status {
                    CaptureStatus::Active if mine.id == state.id => {}
                    CaptureStatus::None => {
                        return Err(Error::capture(
                            Status::STREAM_CAPTURE_ISOLATION,
                            "a stream that is capturing cannot wait for a stream outside of the capture: let that one \
                             wait for this one first, which makes it take part",
                        ));
                    }
                    CaptureStatus::Active => return Err(merge()),
                    CaptureStatus::Invalidated => return Err(invalidated()),
                }
            } else {
                theirs.look_for_capture()?;
                entered = theirs.capture().map(|capture| (device.kind(), capture.id));
                if entered.is_some() && self.is_legacy_default() {
                    return Err(legacy());
                }
                if entered.is_some() && !joins {
                    return Ok(false);
                }
                // Held until this stream has joined.
                mine._capturing = theirs._capturing.take();
            }
            let _may_block = MayBlock::enter();
            theirs.record_event()?
        };
        let waited = self.wait_raw(&mine, &event);
        // The wait keeps the record of this moment, so the event can be recorded anew.
        device.give_event_back(event);
        waited?;
        if let Some(key) = entered {
            gate::joined(key, &self.inner.gate);
        }
        Ok(true)
    }

    fn refuse_other_device(&self, event: &Event) -> Result<()> {
        if event.device() == self.inner.device {
            return Ok(());
        }
        Err(Error::invalid(format!(
            "an event of device {} cannot be recorded in a stream of device {}",
            event.device(),
            self.inner.device
        )))
    }

    /// Records `event` behind all that is queued so far (`cuEventRecord`). While the stream captures, the event stands for
    /// what was captured so far: streams can wait for it, the host cannot.
    ///
    /// # Errors
    /// [`Error::InvalidValue`] for an event of another device; what the driver answers.
    pub fn record(&self, api: &Api<'_>, event: &Event) -> Result<()> {
        self.refuse_other_device(event)?;
        let recording = event.recording();
        let ready = self.capturable(api)?;
        let captured = |capture: &capture::State| Record::Captured(Sequence::of(self.inner.device, capture.id));
        recording.record(ready.capture().map_or(Record::Ordinary, captured), |handle| {
            // SAFETY: both handles are alive and of one context.
            unsafe { self.inner.device.driver().cuEventRecord(handle, ready.handle()) }
        })
    }

    /// Captures a node that records `event` at each launch (`cuEventRecordWithFlags` with `CU_EVENT_RECORD_EXTERNAL`). The
    /// graph keeps the event alive.
    ///
    /// # Errors
    /// [`Error::Capture`] on a stream that does not capture; as [`Stream::record`].
    pub fn record_external(&self, api: &Api<'_>, event: &Event) -> Result<()> {
        self.refuse_other_device(event)?;
        event.share(api)?;
        let raw = event.raw()?;
        let handle = raw.handle();
        self.external(api)?.submit(Box::new(raw), |driver, stream| {
            // SAFETY: both handles are alive, the event as long as the graph.
            unsafe { driver.cuEventRecordWithFlags(handle, stream, EXTERNAL) }
        })?;
        event.recorded_at_launches();
        Ok(())
    }

    /// Captures a host function: see [`crate::capture::Branch::launch_host_func`].
    pub(crate) fn capture_host_func<F>(&self, api: &Api<'_>, f: F, label: Label) -> Result<HostNode, Refused<F>>
    where
        F: Fn() + Send + Sync + 'static,
    {
        let ready = match self.external(api) {
            Ok(ready) => ready,
            Err(error) => return Err(Refused { error, returned: f }),
        };
        let capture = ready.capture().expect("it captures");
        let driver = self.inner.device.driver();
        let owner = Owner::of_capture(self.inner.device, capture.id);
        let add = |params: CUDA_HOST_NODE_PARAMS| {
            // SAFETY: the stream is alive, and the graph keeps what the function uses.
            unsafe { driver.cuLaunchHostFunc(ready.handle(), params.fn_, params.userData) }
        };
        // SAFETY: as above, and `ready` keeps others from capturing.
        let find = |()| unsafe { capture::last_node(driver, ready.handle()) };
        // SAFETY: the graph of a capture that is going on exists.
        unsafe { graph::add_host_code(driver, capture.graph, owner, f, label, add, find) }
    }

    /// Queues a callback: `f` runs once when all work before is done, with the status of that, also a bad one. Later
    /// work waits until it returns. It may not call the API.
    ///
    /// # Errors
    /// The closure comes back, untouched, with the error.
    ///
    /// # Examples
    /// ```
    /// # use rstream::{Api, Device, Status, Stream, StreamOptions};
    /// # Api::attach(|api| {
    /// let stream = Stream::new(api, Device::soft(api, 0)?, StreamOptions::default())?;
    /// let answer = stream.add_callback(api, |status: Status| if status.ok() { 42 } else { 0 })?;
    /// assert_eq!(answer.into_result(None)?, 42);
    /// # Ok::<(), rstream::Error>(()) })??; Ok::<(), rstream::Error>(())
    /// ```
    pub fn add_callback<F, T>(&self, api: &Api<'_>, f: F) -> Result<Completion<T>, Refused<F>>
    where
        F: FnOnce(Status) -> T + Send + 'static,
        T: Send + 'static,
    {
        let (promise, completion) = completion::channel();
        match self.enqueue(api, Callback { f, promise }) {
            Ok(()) => Ok(completion),
            Err((error, code)) => Err(Refused { error, returned: code.f }),
        }
    }

    /// Queues a host function: `f` runs once when all work before is done. Later work waits until it returns. It may not
    /// call the API. After a fault it does not run and its completion has the error.
    ///
    /// # Errors
    /// The closure comes back, untouched, with the error.
    pub fn launch_host_func<F, T>(&self, api: &Api<'_>, f: F) -> Result<Completion<T>, Refused<F>>
    where
        F: FnOnce() -> T + Send + 'static,
        T: Send + 'static,
    {
        let (promise, completion) = completion::channel();
        match self.enqueue(api, HostFunction { f, promise }) {
            Ok(()) => Ok(completion),
            Err((error, code)) => Err(Refused { error, returned: code.f }),
        }
    }

    /// Queues a continuation: `f` runs once on a worker thread when all work before is done, after this stream's earlier
    /// continuations. The stream does not wait for it, and it may call the API. After a fault it does not run and its
    /// completion has the error.
    ///
    /// # Errors
    /// The closure comes back, untouched, with the error.
    pub fn then<F, T>(&self, api: &Api<'_>, f: F) -> Result<Completion<T>, Refused<F>>
    where
        F: FnOnce(&Api<'_>) -> T + Send + 'static,
        T: Send + 'static,
    {
        let (promise, completion) = completion::channel();
        match self.enqueue(api, Continuation { f, promise, strand: self.strand() }) {
            Ok(()) => Ok(completion),
            Err((error, code)) => Err(Refused { error, returned: code.f }),
        }
    }

    /// A completion that resolves when all work queued so far is done: at once if it is (`cuStreamQuery`).
    ///
    /// # Errors
    /// What the driver answers.
    pub fn completion(&self, api: &Api<'_>) -> Result<Completion<()>> {
        let (lane, ready) = self.ready_for::<Notice>(api)?;
        // A blocking stream may have to wait for the legacy default stream, of which its query does not tell.
        let is_alone = self.inner.non_blocking || self.is_legacy_default();
        if is_alone && lane.is_none_or(|lane| lane.is_quiet()) && query(&ready.raw).unwrap_or(false) {
            return Ok(callback::reached_already());
        }
        let (promise, completion) = completion::channel();
        self.enqueue_ready(lane, &ready, Notice { promise }).map(|()| completion).map_err(|(error, _)| error)
    }

    /// A callback for this stream that is made once and queued any number of times, without an allocation for each.
    ///
    /// # Examples
    /// ```
    /// # use rstream::{Api, Device, Stream, StreamOptions};
    /// # Api::attach(|api| {
    /// let stream = Stream::new(api, Device::soft(api, 0)?, StreamOptions::default())?;
    /// let tick = stream.reusable_callback(|_status| ());
    /// for _ in 0..3 {
    ///     tick.enqueue(api)?;
    /// }
    /// stream.synchronize(api, None, &mut || false)?;
    /// assert_eq!(tick.runs(), 3);
    /// # Ok::<(), rstream::Error>(()) })??; Ok::<(), rstream::Error>(())
    /// ```
    #[must_use]
    pub fn reusable_callback(&self, f: impl Fn(Status) + Send + Sync + 'static) -> ReusableCallback {
        ReusableCallback::new(self.clone(), Arc::clone(&self.inner.pending), Box::new(f))
    }

    /// Its lane, if it has the memory signal.
    pub(crate) fn lane(&self, api: &Api<'_>) -> Result<Option<&Arc<Lane>>> {
        let Inner { by_memory: true, lane, device, .. } = &*self.inner else { return Ok(None) };
        if lane.get().is_none() {
            // Two that come here at once are given the same one.
            drop(lane.set(Lane::of(api, *device, self.strand())?));
        }
        Ok(lane.get())
    }

    pub(crate) fn enqueue<C: HostCode>(&self, api: &Api<'_>, code: C) -> Result<(), (Error, C)> {
        match self.ready_for::<C>(api) {
            Ok((lane, ready)) => self.enqueue_ready(lane, &ready, code),
            Err(error) => Err((error, code)),
        }
    }

    /// The stream, ready to be given host code, and its lane.
    #[inline]
    fn ready_for<'a, C: HostCode>(&'a self, api: &'a Api<'_>) -> Result<(Option<&'a Arc<Lane>>, Ready<'a>)> {
        let lane = self.lane(api)?;
        Ok((lane, self.ready(api, C::ACT, C::REMEDY)?))
    }

    fn enqueue_ready<C: HostCode>(
        &self,
        lane: Option<&Arc<Lane>>,
        ready: &Ready<'_>,
        code: C,
    ) -> Result<(), (Error, C)> {
        let Inner { device, pending, .. } = &*self.inner;
        match lane {
            Some(lane) => callback::enqueue_on_lane(lane, *device, &ready.raw, pending, code),
            None => callback::enqueue(*device, ready.handle(), pending, code),
        }
    }
}

/// The gate of a stream, as somebody needs it.
enum Entry<'a> {
    Read(#[expect(dead_code, reason = "held")] RwLockReadGuard<'a, ()>),
    Write(#[expect(dead_code, reason = "held")] RwLockWriteGuard<'a, ()>),
}

impl Entry<'_> {
    /// `joins`: the stream may enter a capture.
    fn take(gate: &Gate, joins: bool) -> Entry<'_> {
        if joins { Entry::Write(gate.write()) } else { Entry::Read(gate.read()) }
    }
}

fn invalidated() -> Error {
    Error::capture(
        Status::STREAM_CAPTURE_INVALIDATED,
        "the capture that the stream takes part in is broken: end or abandon it first",
    )
}

/// What is asked of a stream whose capture is over or broken.
pub(crate) fn broken() -> Error {
    Error::capture(
        Status::STREAM_CAPTURE_INVALIDATED,
        "the stream takes no part in the capture any more: it has ended, or broke and has to be ended",
    )
}

fn merge() -> Error {
    Error::capture(
        Status::STREAM_CAPTURE_MERGE,
        "the two take part in two captures, which cannot be joined: end one of them first",
    )
}

fn legacy() -> Error {
    Error::capture(
        Status::STREAM_CAPTURE_IMPLICIT,
        "the legacy default stream cannot take part in a capture: use another stream",
    )
}

/// The id of a stream, told apart from those of the other driver.
fn strand(device: Device, id: u64) -> u64 {
    id | u64::from(device.is_software()) << 60
}

/// The environment variable that says what [`Signal::Auto`] is: `memory`, where that can be used, or `driver`. Read once.
/// Without it, the software device has the driver's.
pub const SIGNAL_VARIABLE: &str = "RSTREAM_SIGNAL";

impl Signal {
    /// Whether a stream is to use the memory signal.
    fn by_memory(self, device: Device, handle: usize) -> Result<bool> {
        let asked = match self {
            Signal::Driver => return Ok(false),
            Signal::Memory => true,
            // The software device's waits on memory are slower than its callbacks: a thread has to look for them.
            Signal::Auto if !auto_is_memory()?.unwrap_or(!device.is_software()) => return Ok(false),
            Signal::Auto => false,
        };
        let lacks = if handle <= PER_THREAD {
            "a default stream"
        } else if !device.has_memory_signal() {
            "a device without 64-bit stream memory operations or concurrent managed access"
        } else {
            return Ok(true);
        };
        if asked {
            return Err(Error::NotSupported { what: format!("{lacks} has no memory signal: use the driver's") });
        }
        Ok(false)
    }
}

/// What [`SIGNAL_VARIABLE`] said when it was first asked for.
fn auto_is_memory() -> Result<Option<bool>> {
    static SAID: OnceLock<std::result::Result<Option<bool>, String>> = OnceLock::new();
    let said = SAID.get_or_init(|| match std::env::var(SIGNAL_VARIABLE).as_deref() {
        Err(_) | Ok("") => Ok(None),
        Ok("memory") => Ok(Some(true)),
        Ok("driver") => Ok(Some(false)),
        Ok(other) => Err(other.to_owned()),
    });
    said.clone().map_err(|other| Error::invalid(format!("{SIGNAL_VARIABLE}={other}: expected memory or driver")))
}

pub(crate) fn query(raw: &RawStream) -> Result<bool> {
    // A question is no part of anybody's capture, so it must not break one.
    let _relaxed = Relaxed::enter(raw.device.driver());
    // SAFETY: the handle is alive as long as this is.
    match unsafe { raw.device.driver().cuStreamQuery(raw.handle) } {
        Ok(()) => Ok(true),
        Err(Error::Driver { status: Status::NOT_READY, .. }) => Ok(false),
        Err(error) => Err(error),
    }
}

/// Refuses what would invalidate a capture of the stream. The question itself is harmless in every mode (measured).
fn refuse_capture(device: Device, stream: CUstream, act: &str, remedy: &str) -> Result<()> {
    // SAFETY: the stream is alive, and its context is current.
    match unsafe { capture::status(device.driver(), stream) }? {
        CaptureStatus::None => Ok(()),
        CaptureStatus::Active => Err(Error::capture(
            Status::STREAM_CAPTURE_UNSUPPORTED,
            format!("a stream that is capturing cannot {act}: the capture would be invalidated. {remedy}"),
        )),
        CaptureStatus::Invalidated => Err(Error::capture(
            Status::STREAM_CAPTURE_INVALIDATED,
            format!("a stream whose capture is broken cannot {act}: end or abandon the capture first"),
        )),
    }
}

/// Asks `done` until it says yes: first without a pause, then with sleeps that grow with the time waited.
pub(crate) fn poll_until_done(
    timeout: Option<Duration>,
    interrupted: &mut dyn FnMut() -> bool,
    mut done: impl FnMut() -> Result<bool>,
) -> Result<()> {
    const SPIN: Duration = Duration::from_micros(20);
    const LONGEST: Duration = Duration::from_millis(1);
    if done()? {
        return Ok(());
    }
    let started = Instant::now();
    let mut next_check = INTERRUPT_CHECK;
    loop {
        let waited = started.elapsed();
        if let Some(timeout) = timeout.filter(|&timeout| waited >= timeout) {
            return Err(Error::Timeout { waited: timeout });
        }
        if waited >= next_check {
            if interrupted() {
                return Err(Error::Interrupted);
            }
            next_check = waited + INTERRUPT_CHECK;
        }
        if waited < SPIN {
            std::hint::spin_loop();
        } else {
            let left = timeout.map_or(LONGEST, |timeout| timeout - waited);
            thread::sleep((waited / 8).clamp(SPIN, LONGEST).min(left));
        }
        if done()? {
            return Ok(());
        }
    }
}
