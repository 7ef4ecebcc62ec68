//! Events: marks in a stream.

use std::ffi::c_uint;
use std::ptr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use cudarc::driver::sys::CUevent;

use crate::api::Api;
use crate::callback::{self, Notice};
use crate::completion::{self, Completion, Promise};
use crate::device::Device;
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
    /// Who waits for the record that it has. The polling thread asks for it: a stream that waits for an event takes a hardware
    /// channel, and to make one may mean to wait for all others. Held while the event is asked, which never blocks.
    waiting: Mutex<Vec<Promise<()>>>,
    /// There is somebody, so it must not be recorded anew.
    watched: AtomicBool,
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
        Ok(RawEvent { device, handle, waiting: Mutex::default(), watched: AtomicBool::new(false) })
    }

    fn waiting(&self) -> MutexGuard<'_, Vec<Promise<()>>> {
        // Nothing foreign runs under the lock, so a poisoned one still guards a sound state.
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Tells these when the record that it has now is reached.
    fn watch(self: &Arc<Self>, promises: Vec<Promise<()>>) {
        let mut waiting = self.waiting();
        let new = waiting.is_empty();
        waiting.extend(promises);
        self.watched.store(true, Ordering::Release);
        drop(waiting);
        if new {
            poller::ask(Arc::clone(self));
        }
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

    fn take(&self, waiting: &mut Vec<Promise<()>>) -> Vec<Promise<()>> {
        self.watched.store(false, Ordering::Release);
        std::mem::take(waiting)
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

struct Inner {
    device: Device,
    options: EventOptions,
    raw: Mutex<Option<Arc<RawEvent>>>,
    record: Mutex<Record>,
    /// Not only rstream records it: its handle was given out, or a graph has it.
    shared: AtomicBool,
    /// Held while it gets another handle, and while it becomes shared.
    renewing: Mutex<()>,
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
            inner: Arc::new(Inner {
                device,
                options,
                raw: Mutex::new(Some(Arc::new(raw))),
                record: Mutex::new(Record::Never),
                shared: AtomicBool::new(false),
                renewing: Mutex::new(()),
            }),
        })
    }

    pub(crate) fn raw(&self) -> Result<Arc<RawEvent>> {
        self.inner.raw.lock().unwrap_or_else(PoisonError::into_inner).clone().ok_or(Error::Closed { what: "Event" })
    }

    pub(crate) fn record(&self) -> Record {
        *self.inner.record.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records it by `record`, which gets the handle. Who waits for the record of now keeps the handle that has it.
    pub(crate) fn record_by(&self, how: Record, record: impl Fn(CUevent) -> Result<()>) -> Result<()> {
        // Said before it is so, since nobody may ask an event that is captured.
        let before = self.say_recorded(how);
        let recorded = self
            .raw()
            .and_then(|raw| if self.must_be_renewed(&raw) { self.record_afresh(record) } else { record(raw.handle) });
        recorded.inspect_err(|_| {
            self.say_recorded(before);
        })
    }

    fn must_be_renewed(&self, raw: &RawEvent) -> bool {
        raw.watched.load(Ordering::Acquire) && !self.inner.shared.load(Ordering::Acquire)
    }

    #[cold]
    fn record_afresh(&self, record: impl Fn(CUevent) -> Result<()>) -> Result<()> {
        let device = self.inner.device;
        let _renewing = self.inner.renewing.lock().unwrap_or_else(PoisonError::into_inner);
        let known = self.raw()?;
        if !self.must_be_renewed(&known) {
            return record(known.handle);
        }
        let fresh = device.with_context(|| RawEvent::new(device, self.inner.options.flags()))?;
        record(fresh.handle)?;
        // After the record: what was never recorded is reached.
        let mut raw = self.inner.raw.lock().unwrap_or_else(PoisonError::into_inner);
        if self.inner.shared.load(Ordering::Acquire) {
            drop(raw);
            // A callback, which waits for no lock, has read the handle meanwhile.
            return record(known.handle);
        }
        // Unless it was closed. What goes is dropped without the lock.
        let before = raw.as_mut().map(|raw| std::mem::replace(raw, Arc::new(fresh)));
        drop(raw);
        drop(before);
        Ok(())
    }

    fn say_recorded(&self, record: Record) -> Record {
        std::mem::replace(&mut *self.inner.record.lock().unwrap_or_else(PoisonError::into_inner), record)
    }

    /// Others know its handle from now on, and may record it: a stream tells those who wait for the record of now.
    pub(crate) fn share(&self, api: &Api<'_>) -> Result<()> {
        let _renewing = self.inner.renewing.lock().unwrap_or_else(PoisonError::into_inner);
        let raw = self.raw()?;
        {
            // Whoever comes to wait holds it.
            let _record = self.inner.record.lock().unwrap_or_else(PoisonError::into_inner);
            self.inner.shared.store(true, Ordering::Release);
        }
        if !raw.watched.load(Ordering::Acquire) {
            return Ok(());
        }
        let promises = raw.take(&mut raw.waiting());
        let notice = match self.notice_stream(api) {
            Ok(notice) => notice,
            Err(error) => {
                raw.watch(promises);
                return Err(error);
            }
        };
        let mut promises = promises.into_iter();
        while let Some(promise) = promises.next() {
            if let Err((error, Notice { promise })) = notice.enqueue(api, Notice { promise }) {
                raw.watch(std::iter::once(promise).chain(promises).collect());
                return Err(error);
            }
        }
        Ok(())
    }

    /// Launches of a graph record it. Until one has, it is what it was.
    pub(crate) fn recorded_at_launches(&self) {
        let mut record = self.inner.record.lock().unwrap_or_else(PoisonError::into_inner);
        if *record == Record::Never {
            *record = Record::Ordinary;
        }
    }

    /// The event, for the host to ask for it.
    fn raw_to_ask(&self) -> Result<Arc<RawEvent>> {
        self.raw_with(self.record())
    }

    fn raw_with(&self, record: Record) -> Result<Arc<RawEvent>> {
        let raw = self.raw()?;
        if let Record::Captured(_) = record {
            return Err(Error::capture(
                Status::CAPTURED_EVENT,
                "the event was last recorded in a capture, so it stands for work that never runs by itself, and asking \
                 for it would break the capture: record it outside, or use another event as an external one",
            ));
        }
        Ok(raw)
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

    /// Its handle (`CUevent`), for other libraries. It is valid until the event is closed and its last clone dropped. Calls the
    /// driver, and may block, only while a completion of this event is pending. Inside a callback it does neither, and a pending
    /// completion may then be of a record that another library makes.
    ///
    /// # Errors
    /// [`Error::Closed`].
    pub fn handle(&self) -> Result<usize> {
        // Where this thread may not call, or the driver refuses, the polling thread goes on asking.
        drop(Api::attach(|api| self.share(api)));
        self.inner.shared.store(true, Ordering::Release);
        Ok(self.raw()?.handle as usize)
    }

    /// Whether it was closed.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        self.raw().is_err()
    }

    /// Gives the event up (`cuEventDestroy`; on the background thread inside a callback, and while something uses it or
    /// gives work to a stream).
    /// Waits that are queued for it are not affected. A second close does nothing.
    pub fn close(&self) {
        let raw = self.inner.raw.lock().unwrap_or_else(PoisonError::into_inner).take();
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
        let raw = self.raw_to_ask()?;
        let _bound = self.inner.device.bind(api)?;
        raw.query()
    }

    /// Waits until it was reached. Returns at once if it was never recorded.
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
        let raw = self.raw_to_ask()?;
        let _bound = self.inner.device.bind(api)?;
        poll_until_done(timeout, interrupted, || raw.query())
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
        let (start, end) = (earlier.raw_to_ask()?, self.raw_to_ask()?);
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
    /// anew, a stream of its own waits for it (`cuStreamWaitEvent`).
    ///
    /// # Errors
    /// As [`Event::query`]; what the driver answers.
    pub fn completion(&self, api: &Api<'_>) -> Result<Completion<()>> {
        let watches = poller::is_started();
        let bound = self.inner.device.bind(api)?;
        // Held, so that it is not recorded in a capture meanwhile, where it must not be asked. No call here blocks.
        let record = self.inner.record.lock().unwrap_or_else(PoisonError::into_inner);
        let raw = self.raw_with(*record)?;
        if raw.query()? {
            return Ok(callback::reached_already());
        }
        if watches && !self.inner.shared.load(Ordering::Acquire) {
            let (promise, completion) = completion::channel();
            raw.watch(vec![promise]);
            return Ok(completion);
        }
        drop((record, bound));
        self.notice_stream(api)?.completion(api)
    }

    /// A stream that waits for the record of now.
    fn notice_stream(&self, api: &Api<'_>) -> Result<Stream> {
        let notice = Stream::new(api, self.inner.device, StreamOptions::default())?;
        notice.wait_event(api, self)?;
        Ok(notice)
    }
}
