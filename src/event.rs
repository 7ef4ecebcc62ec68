//! Events: marks in a stream.

use std::ffi::c_uint;
use std::ptr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use cudarc::driver::sys::CUevent;

use crate::api::Api;
use crate::callback;
use crate::completion::{self, Completion, Promise};
use crate::device::Device;
use crate::driver::is_forked_child;
use crate::error::{Error, Result, Status};
use crate::graph::Sequence;
use crate::poller;
use crate::reaper::{self, Relaxed};
use crate::stream::{Stream, StreamOptions, poll_until_done};

/// How an [`Event`] is made (`cuEventCreate`'s flags).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct EventOptions {
    /// Take timestamps, for [`Event::elapsed_since`].
    pub timing: bool,
    /// A thread that waits for it in the driver sleeps instead of spinning (`CU_EVENT_BLOCKING_SYNC`). rstream's own
    /// waits never spin for long; the flag is for other libraries that use the handle.
    pub blocking_sync: bool,
    /// It can be shared with other processes (`CU_EVENT_INTERPROCESS`); excludes `timing`.
    pub interprocess: bool,
}

impl EventOptions {
    fn flags(self) -> c_uint {
        let flag = |on: bool, flag: c_uint| if on { flag } else { 0 };
        flag(!self.timing, RawEvent::DISABLE_TIMING)
            | flag(self.blocking_sync, RawEvent::BLOCKING_SYNC)
            | flag(self.interprocess, RawEvent::INTERPROCESS)
    }
}

/// An event handle that this owns. Dropped, it is destroyed on the background thread.
pub(crate) struct RawEvent {
    device: Device,
    handle: CUevent,
    /// Held while the host asks for it, which never blocks: nobody records it in a capture meanwhile, where asking breaks that.
    mark: Mutex<Mark>,
    /// To be told when the record that it has is reached. The polling thread asks for it: a stream that waits for an event takes
    /// a hardware channel, and to make one may mean to wait for all others. Held while the polling thread asks.
    waiting: Mutex<Vec<Promise<()>>>,
    /// How many wait for the record that it has, so that it must not be recorded anew. Counted up under `mark`.
    awaited: AtomicUsize,
}

/// What an event of the driver's stands for.
struct Mark {
    record: Record,
    /// Not only rstream records it: its handle was given out, or a graph has it. So it stays its [`Event`]'s.
    shared: bool,
}

impl Mark {
    /// For the host to ask for it under the lock.
    fn refuse_captured(&self) -> Result<()> {
        if let Record::Captured(_) = self.record {
            return Err(Error::capture(
                Status::CAPTURED_EVENT,
                "the event was last recorded in a capture, so it stands for work that never runs by itself, and asking \
                 for it would break the capture: record it outside, or use another event as an external one",
            ));
        }
        Ok(())
    }
}

// SAFETY: events may be used from any thread (driver reference 3.15).
unsafe impl Send for RawEvent {}
// SAFETY: as for Send.
unsafe impl Sync for RawEvent {}

impl RawEvent {
    const BLOCKING_SYNC: c_uint = 1;
    pub(crate) const DISABLE_TIMING: c_uint = 2;
    const INTERPROCESS: c_uint = 4;

    /// The context of `device` has to be current.
    pub(crate) fn new(device: Device, flags: c_uint) -> Result<RawEvent> {
        let mut handle: CUevent = ptr::null_mut();
        // SAFETY: writes one handle.
        unsafe { device.driver().cuEventCreate(&raw mut handle, flags) }?;
        let mark = Mutex::new(Mark { record: Record::Never, shared: false });
        Ok(RawEvent { device, handle, mark, waiting: Mutex::default(), awaited: AtomicUsize::new(0) })
    }

    // Nothing foreign runs under either lock, so a poisoned one still guards a sound state.
    fn mark(&self) -> MutexGuard<'_, Mark> {
        self.mark.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn waiting(&self) -> MutexGuard<'_, Vec<Promise<()>>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// How it was recorded last.
    pub(crate) fn record(&self) -> Record {
        self.mark().record
    }

    /// Has the polling thread tell these when the record that it has is reached. Called under `mark`, if others have it.
    fn watch(self: &Arc<Self>, promises: Vec<Promise<()>>) {
        self.awaited.fetch_add(promises.len(), Ordering::Relaxed);
        let mut waiting = self.waiting();
        let new = waiting.is_empty();
        waiting.extend(promises);
        drop(waiting);
        if new {
            poller::ask(Arc::clone(self));
        }
    }

    /// Those whom the polling thread would tell.
    fn take(&self, waiting: &mut Vec<Promise<()>>) -> Vec<Promise<()>> {
        self.awaited.fetch_sub(waiting.len(), Ordering::Release);
        std::mem::take(waiting)
    }

    /// Asks it, for those who wait: they are to be told the status. `None`: not yet. Called by the polling thread.
    pub(crate) fn ask(&self) -> Option<(Status, Vec<Promise<()>>)> {
        let mut waiting = self.waiting();
        if waiting.is_empty() {
            // They have been told otherwise, and the event may be recorded in a capture by now, which must not be asked.
            return Some((Status::SUCCESS, Vec::new()));
        }
        let status = match self.query() {
            Ok(true) => Status::SUCCESS,
            Err(error) if error.status().ends_all_work() || is_lost(error.status()) => error.status(),
            // Any other refusal says nothing about the work before it.
            Ok(false) | Err(_) => return None,
        };
        Some((status, self.take(&mut waiting)))
    }

    /// Whether it is reached, for anybody.
    fn is_reached(&self) -> Result<bool> {
        let mark = self.mark();
        mark.refuse_captured()?;
        self.query()
    }

    pub(crate) fn device(&self) -> Device {
        self.device
    }

    pub(crate) fn handle(&self) -> CUevent {
        self.handle
    }

    fn query(&self) -> Result<bool> {
        // A question is no part of anybody's capture, so it must not break one.
        let _relaxed = Relaxed::enter(self.device.driver());
        // SAFETY: the handle is alive as long as this is.
        match unsafe { self.device.driver().cuEventQuery(self.handle) } {
            Ok(()) => Ok(true),
            Err(error) if error.status() == Status::NOT_READY => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// What is to be expected from it.
    pub(crate) fn outlook(&self) -> Outlook {
        match self.query() {
            Ok(true) => Outlook::Reached,
            Ok(false) => Outlook::Pending,
            Err(error) if error.status().ends_all_work() => Outlook::Reached,
            Err(error) if is_lost(error.status()) => Outlook::Lost,
            // Any other refusal says nothing about the work before it, which may still use what is kept for it.
            Err(_) => Outlook::Pending,
        }
    }
}

/// Whether nobody can say any more when an event is reached: another library's capture took the record, or the context is a
/// new one.
fn is_lost(status: Status) -> bool {
    matches!(status, Status::CAPTURED_EVENT | Status::INVALID_VALUE | Status::INVALID_HANDLE)
}

/// What is to be expected from an event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Outlook {
    Pending,
    /// Nothing more: it was reached, or the context failed.
    Reached,
    /// Nothing, and nobody can say whether the work before it is done: another library's capture took the record.
    Lost,
}

impl RawEvent {
    fn destroy(&self) -> impl FnMut() -> bool + Send + 'static {
        let (device, handle) = (self.device, self.handle as usize);
        move || {
            // SAFETY: called once, by its owner. A failure means that the context is gone, and the event with it.
            drop(unsafe { device.driver().cuEventDestroy_v2(handle as CUevent) });
            true
        }
    }
}

impl Drop for RawEvent {
    fn drop(&mut self) {
        reaper::release_when(self.device, self.destroy());
    }
}

/// How an event was recorded last, by rstream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Record {
    Never,
    Ordinary,
    /// In this capture: it stands for nodes, and asking for it would break the capture.
    Captured(Sequence),
}

const CLOSED: Error = Error::Closed { what: "Event" };

struct Inner {
    device: Device,
    options: EventOptions,
    raw: Mutex<Option<Arc<RawEvent>>>,
    /// Held while it is recorded, which may block.
    recording: Mutex<()>,
}

/// A mark that is recorded in a stream, and reached when the work before it is done. A cheap, shared handle.
#[derive(Clone)]
pub struct Event {
    inner: Arc<Inner>,
}

impl std::fmt::Debug for Event {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Event")
            .field("device", &self.inner.device)
            .field("options", &self.inner.options)
            .field("closed", &self.is_closed())
            .finish()
    }
}

impl Event {
    /// A new event (`cuEventCreate`).
    ///
    /// # Errors
    /// [`Error::InvalidValue`] for `interprocess` with `timing`, which the driver does not have.
    pub fn new(api: &Api<'_>, device: Device, options: EventOptions) -> Result<Event> {
        if options.interprocess && options.timing {
            return Err(Error::invalid("an interprocess event has no timing: leave timing out"));
        }
        let _bound = device.bind(api)?;
        let raw = RawEvent::new(device, options.flags())?;
        Ok(Event {
            inner: Arc::new(Inner { device, options, raw: Mutex::new(Some(Arc::new(raw))), recording: Mutex::new(()) }),
        })
    }

    fn slot(&self) -> MutexGuard<'_, Option<Arc<RawEvent>>> {
        self.inner.raw.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn raw(&self) -> Result<Arc<RawEvent>> {
        self.slot().clone().ok_or(CLOSED)
    }

    /// To record it, one at a time, so that what is said of it is what the driver did last. Taken before any gate.
    pub(crate) fn recording(&self) -> Recording<'_> {
        Recording { event: self, _turn: self.inner.recording.lock().unwrap_or_else(PoisonError::into_inner) }
    }

    /// Others may record it from now on: a stream tells those who wait for the record of now.
    pub(crate) fn share(&self, api: &Api<'_>) -> Result<()> {
        loop {
            let Err(Awaited(raw)) = &self.share_idle()? else { return Ok(()) };
            // What may block or fail comes first, and nothing has changed then.
            let follower = self.new_stream(api)?;
            follower.wait_raw_event(api, raw)?;
            let behind = follower.record_raw_event(api)?;
            let slot = self.slot();
            if slot.as_ref().is_some_and(|now| Arc::ptr_eq(now, raw)) {
                let mut mark = raw.mark();
                let promises = raw.take(&mut raw.waiting());
                mark.shared = true;
                drop(mark);
                drop(slot);
                Arc::new(behind).watch(promises);
                return Ok(());
            }
        }
    }

    /// Others may record it from now on, if nobody is to be told of the record of now: gives its handle. Otherwise the driver's
    /// event, which keeps that record.
    fn share_idle(&self) -> Result<std::result::Result<CUevent, Awaited>> {
        // Held, so that it gets no other meanwhile.
        let slot = self.slot();
        let raw = slot.as_ref().ok_or(CLOSED)?;
        let mut mark = raw.mark();
        if mark.shared || raw.waiting().is_empty() {
            mark.shared = true;
            return Ok(Ok(raw.handle));
        }
        Ok(Err(Awaited::new(raw, &mark)))
    }

    /// Launches of a graph record it. Until one has, it is what it was.
    pub(crate) fn recorded_at_launches(&self) {
        let Ok(raw) = self.raw() else { return };
        let mut mark = raw.mark();
        if mark.record == Record::Never {
            mark.record = Record::Ordinary;
        }
    }

    /// Its device.
    #[must_use]
    pub fn device(&self) -> Device {
        self.inner.device
    }

    /// How it was made.
    #[must_use]
    pub fn options(&self) -> EventOptions {
        self.inner.options
    }

    /// Its handle (`CUevent`), for other libraries. It is valid until the event is closed and its last clone dropped.
    ///
    /// While a completion of it is pending, the first call hands that over to a stream, which may block.
    ///
    /// # Errors
    /// [`Error::Closed`]; if a completion is pending, [`Error::NotPermitted`] inside a callback, and what the driver answers.
    pub fn handle(&self) -> Result<usize> {
        if !is_forked_child()
            && let Ok(handle) = self.share_idle()?
        {
            return Ok(handle as usize);
        }
        Api::attach(|api| self.share(api))??;
        Ok(self.raw()?.handle as usize)
    }

    /// Whether it was closed.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        // Who had the lock may not be in the child.
        is_forked_child() || self.slot().is_none()
    }

    /// Gives the event up (`cuEventDestroy`; on the background thread inside a callback, while something uses it, and while
    /// another call of rstream's may block). In a forked child it does nothing.
    /// Waits that are queued for it are not affected. A second close does nothing.
    pub fn close(&self) {
        if is_forked_child() {
            return;
        }
        let raw = self.slot().take();
        if let Some(raw) = raw.and_then(Arc::into_inner) {
            reaper::release_here(self.inner.device, raw.destroy());
            // Destroyed, or about to be.
            std::mem::forget(raw);
        }
    }

    /// Whether it was reached, or was never recorded (`cuEventQuery`).
    ///
    /// # Errors
    /// The code of a fault; [`Error::Closed`]; [`Error::Capture`] when it was last recorded in a capture.
    pub fn query(&self, api: &Api<'_>) -> Result<bool> {
        let _bound = self.inner.device.bind(api)?;
        self.raw()?.is_reached()
    }

    /// Waits until the record of this moment is reached. Returns at once if there is none. If others may record the event too
    /// ([`Event::handle`]), a later record takes its place.
    ///
    /// `timeout` is the longest wait, without limit if `None`. `interrupted` is asked about every 50 ms whether to give
    /// up.
    ///
    /// # Errors
    /// As [`Event::query`]; [`Error::Timeout`], [`Error::Interrupted`].
    pub fn synchronize(
        &self,
        api: &Api<'_>,
        timeout: Option<Duration>,
        interrupted: &mut dyn FnMut() -> bool,
    ) -> Result<()> {
        let _bound = self.inner.device.bind(api)?;
        let raw = self.raw()?;
        let awaited = Awaited::new(&raw, &raw.mark());
        poll_until_done(timeout, interrupted, || awaited.0.is_reached())
    }

    /// The time from `earlier` to this event in milliseconds, about 0.5 us exact (`cuEventElapsedTime`). Negative when
    /// this one was reached first.
    ///
    /// # Errors
    /// [`Error::InvalidValue`] for events without timing or of another device; [`Status::NOT_READY`] when one was not
    /// reached, [`Status::INVALID_HANDLE`] when one was not recorded.
    pub fn elapsed_since(&self, api: &Api<'_>, earlier: &Event) -> Result<f32> {
        if earlier.inner.device != self.inner.device {
            return Err(Error::invalid(format!(
                "the events are of different devices, {} and {}",
                earlier.inner.device, self.inner.device
            )));
        }
        if !self.inner.options.timing || !earlier.inner.options.timing {
            return Err(Error::invalid("elapsed time: both events have to be made with timing"));
        }
        // The one question that breaks no capture.
        let (start, end) = (earlier.raw()?, self.raw()?);
        start.mark().refuse_captured()?;
        end.mark().refuse_captured()?;
        let _bound = self.inner.device.bind(api)?;
        let _relaxed = Relaxed::enter(self.inner.device.driver());
        let mut milliseconds = 0.0_f32;
        // SAFETY: both handles are alive; writes one float.
        unsafe { self.inner.device.driver().cuEventElapsedTime_v2(&raw mut milliseconds, start.handle, end.handle) }?;
        Ok(milliseconds)
    }

    /// A completion that resolves when the record of this moment is reached; at once if there is none.
    ///
    /// The polling thread asks for it (`cuEventQuery`), on any device and whatever the signal; but if others may record the event
    /// anew, a stream of its own waits for it (`cuStreamWaitEvent`), and to make that may block: see [`Device::reserve_streams`].
    ///
    /// # Errors
    /// As [`Event::query`]; what the driver answers.
    pub fn completion(&self, api: &Api<'_>) -> Result<Completion<()>> {
        let watches = poller::is_started();
        let _bound = self.inner.device.bind(api)?;
        let raw = self.raw()?;
        {
            let mark = raw.mark();
            mark.refuse_captured()?;
            if raw.query()? {
                return Ok(callback::reached_already());
            }
            if watches && !mark.shared {
                let (promise, completion) = completion::channel();
                raw.watch(vec![promise]);
                return Ok(completion);
            }
        }
        let follower = self.new_stream(api)?;
        {
            // So that it does not come to wait for what is captured.
            let _recording = self.recording();
            raw.mark().refuse_captured()?;
            follower.wait_raw_event(api, &raw)?;
        }
        follower.completion(api)
    }

    fn new_stream(&self, api: &Api<'_>) -> Result<Stream> {
        Stream::new(api, self.inner.device, StreamOptions::default())
    }
}

/// The right to record an event, which may block.
pub(crate) struct Recording<'a> {
    event: &'a Event,
    _turn: MutexGuard<'a, ()>,
}

impl Recording<'_> {
    /// Records it by `record`, which gets the handle. Who waits for the record of now keeps the handle that has it.
    pub(crate) fn record(&self, how: Record, record: impl Fn(CUevent) -> Result<()>) -> Result<()> {
        let raw = self.event.raw()?;
        let mut mark = raw.mark();
        if !mark.shared && raw.awaited.load(Ordering::Acquire) > 0 {
            drop(mark);
            if self.record_afresh(&raw, how, &record)? {
                return Ok(());
            }
            mark = raw.mark();
        }
        let before = mark.record;
        // What must not be asked is said before it is so, and what may be asked after.
        let meanwhile = if matches!(how, Record::Captured(_)) { how } else { before };
        mark.record = meanwhile;
        drop(mark);
        let recorded = record(raw.handle);
        let now = if recorded.is_ok() { how } else { before };
        if now != meanwhile {
            raw.mark().record = now;
        }
        recorded
    }

    /// Records another event of the driver's, which the event has instead of `known` from now on. False: others have come to know
    /// that, so it has to be recorded.
    #[cold]
    fn record_afresh(&self, known: &RawEvent, how: Record, record: impl Fn(CUevent) -> Result<()>) -> Result<bool> {
        let Inner { device, options, .. } = *self.event.inner;
        let fresh = device.with_context(|| RawEvent::new(device, options.flags()))?;
        record(fresh.handle)?;
        fresh.mark().record = how;
        let fresh = Arc::new(fresh);
        let mut slot = self.event.slot();
        if known.mark().shared {
            return Ok(false);
        }
        // Unless it was closed. What goes is dropped without the lock.
        let before = slot.as_mut().map(|raw| std::mem::replace(raw, Arc::clone(&fresh)));
        drop(slot);
        drop(before);
        Ok(true)
    }
}

/// Waits for the record that an event has.
struct Awaited(Arc<RawEvent>);

impl Awaited {
    fn new(raw: &Arc<RawEvent>, _mark: &Mark) -> Awaited {
        raw.awaited.fetch_add(1, Ordering::Relaxed);
        Awaited(Arc::clone(raw))
    }
}

impl Drop for Awaited {
    fn drop(&mut self) {
        self.0.awaited.fetch_sub(1, Ordering::Release);
    }
}
