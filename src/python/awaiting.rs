//! `await completion`: without suspending the event loop when it is done or about to be, else by a future and an inbox.
//!
//! An event loop has one inbox. Who resolves a completion puts the future that waits for it in there, and rings a bell that
//! the loop watches, a socket, unless it has rung already. That needs no interpreter, so the thread that resolves, which
//! may be the driver's, does it itself.

#[cfg(unix)]
use std::io::{Read as _, Write as _};
#[cfg(unix)]
use std::os::fd::{AsRawFd as _, RawFd};
#[cfg(unix)]
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::thread;
use std::time::Instant;

use pyo3::exceptions::{PyBaseException, PyNotImplementedError, PyRuntimeError, PyStopIteration};
use pyo3::gc::{PyTraverseError, PyVisit};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::{MutexExt as _, PyOnceLock};
use pyo3::types::{PyTuple, PyWeakrefReference};

use super::completion::{CompletionPy, Ending, strand};
use super::errors::{PyResultExt as _, exception};
use super::gate::{self, Buried, drop_attached, in_place};
use crate::api::in_callback;
use crate::completion::{HookId, may_wait};
use crate::error::Error;
use crate::executor::{Job, NEWS};
use crate::poller::{SPIN, WaitPolicy, wait_policy};

/// What `await completion` goes through.
#[pyclass(name = "_Await", module = "rstream", frozen)]
pub(super) struct Await {
    completion: Py<CompletionPy>,
    /// The hook that is to wake the loop up, or `NONE`.
    hook: AtomicU64,
}

const NONE: u64 = u64::MAX;

impl Await {
    pub(super) fn new(completion: Py<CompletionPy>) -> Await {
        Await { completion, hook: AtomicU64::new(NONE) }
    }

    /// Makes the future that the loop waits for.
    fn suspend<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        static RUNNING: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
        gate::refuse_forked()?;
        may_wait().py(py)?;
        if gate::is_closed() {
            return Err(exception(py, &Error::Shutdown));
        }
        let event_loop = RUNNING.import(py, "asyncio", "get_running_loop")?.call0()?;
        let inbox = Arc::downgrade(&Inbox::of(&event_loop)?);
        let future = event_loop.call_method0(intern!(py, "create_future"))?;
        future.setattr(intern!(py, "_asyncio_future_blocking"), true)?;
        let due = Buried::new(future.clone().unbind());
        // Without its loop the inbox is gone, and with them everybody who could have waited.
        let tell = move || {
            if let Some(inbox) = inbox.upgrade() {
                inbox.put([due]);
            }
        };
        if let Some(id) = self.completion.get().on_done(tell) {
            self.hook.store(id.number(), Ordering::Relaxed);
        }
        Ok(future)
    }

    /// An await that was given up leaves nothing behind.
    fn forget(&self, py: Python<'_>) {
        let number = self.hook.swap(NONE, Ordering::Relaxed);
        if number != NONE && !self.completion.get().is_done() {
            in_place(py, || self.completion.get().remove_hook(HookId::from_number(number)));
        }
    }
}

impl Drop for Await {
    fn drop(&mut self) {
        if self.hook.load(Ordering::Relaxed) != NONE && !gate::is_forked() {
            // `Some`: the interpreter drops this.
            Python::try_attach(|py| self.forget(py));
        }
    }
}

#[pymethods]
impl Await {
    fn __iter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    fn __next__<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyAny>>> {
        let completion = self.completion.get();
        self.forget(py);
        // Host code of Python's needs the GIL, which a spin would keep from it; a callback does not wait at all.
        let may_spin = completion.is_notice() && !in_callback();
        let is_done = completion.is_done() || may_spin && spin(|| completion.is_done());
        if !is_done {
            return self.suspend(py).map(Some);
        }
        match completion.end(py) {
            Ending::Value(value) if value.is_none(py) => Ok(None),
            Ending::Value(value) => Err(PyStopIteration::new_err((value,))),
            Ending::Error(_) if completion.cancelled() => {
                static CANCELLED: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
                Err(PyErr::from_value(CANCELLED.import(py, "asyncio", "CancelledError")?.call0()?))
            }
            Ending::Error(error) if error.is_instance_of::<PyStopIteration>(py) => {
                // From here it would be the value.
                let wrapped = PyRuntimeError::new_err("host code raised StopIteration");
                wrapped.set_cause(py, Some(error));
                Err(wrapped)
            }
            Ending::Error(error) => Err(error),
        }
    }

    fn send<'py>(&self, py: Python<'py>, _value: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        self.__next__(py)?.ok_or_else(|| PyStopIteration::new_err(()))
    }

    /// As a generator's: with an exception, or with a class, a value and a traceback.
    #[pyo3(signature = (kind, value=None, traceback=None))]
    fn throw<'py>(
        &self,
        kind: Bound<'py, PyAny>,
        value: Option<Bound<'py, PyAny>>,
        traceback: Option<Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        self.forget(kind.py());
        let error = match value {
            None => kind,
            Some(value) if value.is_instance_of::<PyBaseException>() => value,
            Some(value) => kind.call1((value,))?,
        };
        if let Some(traceback) = traceback {
            error.call_method1("with_traceback", (traceback,))?;
        }
        Err(PyErr::from_value(error))
    }

    fn close(&self, py: Python<'_>) {
        self.forget(py);
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        visit.call(&self.completion)
    }
}

/// Waits for a moment for what is about to be: to suspend an event loop and to wake it up takes as long.
/// When that was in vain the next one is left out, then the next two, and so on.
fn spin(is_done: impl Fn() -> bool) -> bool {
    const MOST_LEFT_OUT: u32 = 64;
    /// How many are left out after a failure.
    static PENALTY: AtomicU32 = AtomicU32::new(1);
    /// How many are still to be left out.
    static LEFT_OUT: AtomicU32 = AtomicU32::new(0);
    static ALONE: OnceLock<bool> = OnceLock::new();

    if wait_policy() == WaitPolicy::Sleep {
        return false;
    }
    // Threads that do this at the same time may lose a count, which is only a guess.
    let left_out = LEFT_OUT.load(Ordering::Relaxed);
    if left_out > 0 {
        LEFT_OUT.store(left_out - 1, Ordering::Relaxed);
        return false;
    }
    if *ALONE.get_or_init(|| thread::available_parallelism().map_or(1, usize::from) == 1) {
        return false;
    }
    let started = Instant::now();
    while started.elapsed() < SPIN {
        for _ in 0..16 {
            if is_done() {
                PENALTY.store(1, Ordering::Relaxed);
                return true;
            }
            std::hint::spin_loop();
        }
    }
    let penalty = PENALTY.load(Ordering::Relaxed);
    LEFT_OUT.store(penalty, Ordering::Relaxed);
    PENALTY.store((penalty * 2).min(MOST_LEFT_OUT), Ordering::Relaxed);
    false
}

/// What is due for an event loop: it is woken up once for all of it.
struct Inbox {
    /// Freed without running code of Python's, so wherever it is dropped.
    event_loop: Py<PyWeakrefReference>,
    /// `None`: the loop watches no sockets, and a worker tells it.
    bell: Option<Bell>,
    /// Futures. The first of them rings the bell.
    due: Mutex<Vec<Buried<Py<PyAny>>>>,
}

/// What the loop calls when the bell has rung. The loop has it, and the inbox with it, until it is closed.
#[pyclass(name = "_Inbox", module = "rstream", frozen)]
struct InboxPy(Arc<Inbox>);

impl Inbox {
    /// The inbox of `event_loop`, which runs on this thread.
    fn of(event_loop: &Bound<'_, PyAny>) -> PyResult<Arc<Inbox>> {
        static ALL: Mutex<Vec<Weak<Inbox>>> = Mutex::new(Vec::new());
        let py = event_loop.py();
        // Detached while it waits: to look at a weak reference may run a finalizer, and that other threads.
        let all = || ALL.lock_py_attached(py).unwrap_or_else(PoisonError::into_inner);
        let is_its = |inbox: &Arc<Inbox>| inbox.event_loop.bind(py).upgrade().is_some_and(|of| of.is(event_loop));
        let known = all().iter().filter_map(Weak::upgrade).find(is_its);
        if let Some(inbox) = known {
            return Ok(inbox);
        }
        let inbox = Inbox::new(event_loop)?;
        let mut all = all();
        all.retain(|inbox| inbox.strong_count() > 0);
        all.push(Arc::downgrade(&inbox));
        Ok(inbox)
    }

    fn new(event_loop: &Bound<'_, PyAny>) -> PyResult<Arc<Inbox>> {
        static KEPT: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
        let py = event_loop.py();
        let make = |bell| {
            let event_loop = PyWeakrefReference::new(event_loop)?.unbind();
            PyResult::Ok(Arc::new(Inbox { event_loop, bell, due: Mutex::default() }))
        };
        if let Some((bell, socket)) = Bell::new() {
            let inbox = make(Some(bell))?;
            match event_loop.call_method1(intern!(py, "add_reader"), (socket, InboxPy(Arc::clone(&inbox)))) {
                Ok(_) => return Ok(inbox),
                Err(error) if error.is_instance_of::<PyNotImplementedError>(py) => {}
                Err(error) => return Err(error),
            }
        }
        let inbox = make(None)?;
        KEPT.import(py, "rstream._waiting", "inboxes")?.set_item(event_loop, InboxPy(Arc::clone(&inbox)))?;
        Ok(inbox)
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Buried<Py<PyAny>>>> {
        // Nothing foreign runs under the lock, so a poisoned one still guards a sound state.
        self.due.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds futures to what is due. Needs no interpreter.
    fn put(self: &Arc<Self>, futures: impl IntoIterator<Item = Buried<Py<PyAny>>>) {
        let mut due = self.lock();
        let rung = !due.is_empty();
        due.extend(futures);
        drop(due);
        if rung {
            return;
        }
        match &self.bell {
            Some(bell) => bell.ring(),
            None => {
                let inbox = Arc::clone(self);
                let tell = move || {
                    gate::enter(|py| inbox.tell(py));
                };
                // Continuations may wait for what the loop does.
                NEWS.submit(strand(), Job::new(true, tell));
            }
        }
    }

    /// Wakes the loop up from a worker.
    fn tell(self: &Arc<Self>, py: Python<'_>) {
        let Some(event_loop) = self.event_loop.bind(py).upgrade() else { return };
        let told = event_loop.getattr(intern!(py, "call_soon_threadsafe")).and_then(|call| {
            let args = PyTuple::new(py, [Bound::new(py, InboxPy(Arc::clone(self)))?])?;
            gate::call(&call, &args, None)
        });
        match told {
            Ok(handle) => gate::let_go(py, handle.unbind()),
            Err(error) => {
                let due = std::mem::take(&mut *self.lock());
                drop_attached(py, due);
                // It is closed, and with it everybody who could have waited.
                if !error.is_instance_of::<PyRuntimeError>(py) {
                    gate::report(py, error, Some(&event_loop));
                }
            }
        }
        gate::let_go(py, event_loop.unbind());
    }
}

#[pymethods]
impl InboxPy {
    /// On the loop's thread: lets the tasks go on that wait for what is due.
    fn __call__(&self, py: Python<'_>) -> PyResult<()> {
        static DECIDED: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
        if let Some(bell) = &self.0.bell {
            bell.hush();
        }
        // After the bell is quiet, so that what comes from now on rings it.
        let mut due = std::mem::take(&mut *self.0.lock()).into_iter();
        while let Some(future) = due.next() {
            let future = future.into_inner(py).into_bound(py);
            let Err(error) = future.call_method1(intern!(py, "set_result"), (py.None(),)) else { continue };
            // It was cancelled, or else a signal handler has raised, and the rest is for the next time.
            if !error.matches(py, DECIDED.import(py, "asyncio", "InvalidStateError")?)? {
                self.0.put(due);
                return Err(error);
            }
        }
        Ok(())
    }
}

/// Wakes an event loop up, without the interpreter.
#[cfg(unix)]
struct Bell {
    rope: UnixStream,
    /// What the loop watches.
    clapper: UnixStream,
}

#[cfg(unix)]
impl Bell {
    /// With the socket to watch. `None`: the system has none to give.
    fn new() -> Option<(Bell, RawFd)> {
        let (rope, clapper) = UnixStream::pair().ok()?;
        rope.set_nonblocking(true).and_then(|()| clapper.set_nonblocking(true)).ok()?;
        let socket = clapper.as_raw_fd();
        Some((Bell { rope, clapper }, socket))
    }

    fn ring(&self) {
        // Both ends are open, and few bytes are on their way: this cannot fail.
        _ = (&self.rope).write_all(&[1]);
    }

    fn hush(&self) {
        _ = (&self.clapper).read(&mut [0; 16]);
    }
}

/// There are no sockets here that both sides could use.
#[cfg(not(unix))]
enum Bell {}

#[cfg(not(unix))]
impl Bell {
    fn new() -> Option<(Bell, i32)> {
        None
    }

    fn ring(&self) {
        match *self {}
    }

    fn hush(&self) {
        match *self {}
    }
}
