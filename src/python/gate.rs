//! The border between rstream's threads and the interpreter: who may enter, and how it closes.
//!
//! A thread of rstream's enters the interpreter only through [`enter`], which answers `None` once the gate is closed. The
//! package registers [`_at_exit`] with `atexit`: it waits some time for host code that is due, then closes the gate. After
//! that no thread of rstream's touches the interpreter, and a thread of the driver that waits for Python is let go.
//!
//! A thread that is *inside* while the interpreter finalizes is ended by CPython (before 3.14) when it next takes the
//! GIL, by `pthread_exit`, whose forced unwinding must not cross frames of Rust that cannot unwind. PyO3 parks the thread
//! in its own calls; [`call`] does it for the code that is called.

use std::cell::Cell;
use std::ffi::c_void;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use pyo3::exceptions::PyRuntimeError;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};

use crate::completion::INTERRUPT_CHECK;
use crate::executor::CONTINUATIONS;

static CLOSED: AtomicBool = AtomicBool::new(false);
static FORKED: AtomicBool = AtomicBool::new(false);
/// Threads between asking for entry and having the GIL.
static ENTERING: AtomicUsize = AtomicUsize::new(0);
/// Python host code that was accepted and has not ended.
static OWED: Mutex<usize> = Mutex::new(0);
static CHANGED: Condvar = Condvar::new();

fn owed() -> MutexGuard<'static, usize> {
    OWED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// One piece of Python host code between its acceptance and its end: the exit waits for it.
pub(super) struct Debt(());

impl Debt {
    pub(super) fn new() -> Debt {
        *owed() += 1;
        Debt(())
    }
}

impl Drop for Debt {
    fn drop(&mut self) {
        let mut owed = owed();
        *owed -= 1;
        if *owed == 0 {
            CHANGED.notify_all();
        }
    }
}

/// A rendezvous of a thread that waits with one that works, which the closing gate breaks.
pub(super) struct Slot<T>(Mutex<Option<T>>);

impl<T> Slot<T> {
    pub(super) fn new() -> Slot<T> {
        Slot(Mutex::new(None))
    }

    pub(super) fn put(&self, value: T) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(value);
        // Under the lock that waiters sleep with, so that none is missed.
        drop(owed());
        CHANGED.notify_all();
    }

    /// What was put; `None` when the gate closed before.
    pub(super) fn wait(&self) -> Option<T> {
        let mut guard = owed();
        loop {
            if let Some(value) = self.0.lock().unwrap_or_else(PoisonError::into_inner).take() {
                return Some(value);
            }
            if CLOSED.load(Ordering::Acquire) {
                return None;
            }
            guard = CHANGED.wait(guard).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

/// Runs `f` attached to the interpreter, from a thread of rstream's. `None`: the gate is closed, `f` was not called.
pub(super) fn enter<R>(f: impl FnOnce(Python<'_>) -> R) -> Option<R> {
    ENTERING.fetch_add(1, Ordering::AcqRel);
    if CLOSED.load(Ordering::Acquire) {
        ENTERING.fetch_sub(1, Ordering::AcqRel);
        return None;
    }
    keep_thread_state();
    Python::try_attach(|py| {
        ENTERING.fetch_sub(1, Ordering::AcqRel);
        f(py)
    })
    .or_else(|| {
        ENTERING.fetch_sub(1, Ordering::AcqRel);
        None
    })
}

/// Something of Python's that is dropped on a worker that is attached, wherever it is let go of. Dropped detached, PyO3
/// would keep it until somebody attaches again, which may be long after.
pub(super) struct Buried<T: Send + 'static>(Option<T>);

thread_local! {
    static IN_PLACE: Cell<bool> = const { Cell::new(false) };
}

/// Drops `value`, and what is [`Buried`] in it, here: this thread is attached.
pub(super) fn drop_attached<T>(_attached: Python<'_>, value: T) {
    let before = IN_PLACE.replace(true);
    drop(value);
    IN_PLACE.set(before);
}

static GRAVE: Mutex<Vec<Box<dyn Send>>> = Mutex::new(Vec::new());

fn grave() -> MutexGuard<'static, Vec<Box<dyn Send>>> {
    GRAVE.lock().unwrap_or_else(PoisonError::into_inner)
}

impl<T: Send + 'static> Buried<T> {
    pub(super) fn new(value: T) -> Buried<T> {
        Buried(Some(value))
    }

    /// Takes it back, to be dropped by the caller, who is attached.
    pub(super) fn into_inner(mut self, _attached: Python<'_>) -> T {
        self.0.take().expect("taken by this call and by the drop only")
    }
}

impl<T: Send + 'static> std::ops::Deref for Buried<T> {
    type Target = T;

    fn deref(&self) -> &T {
        self.0.as_ref().expect("taken by the drop only")
    }
}

impl<T: Send + 'static> Drop for Buried<T> {
    fn drop(&mut self) {
        /// The key of the strand that buries; streams' ids are far from it.
        const STRAND: u64 = 1 << 61;
        let Some(value) = self.0.take() else { return };
        if IN_PLACE.get() {
            return drop(value);
        }
        let mut waiting = grave();
        waiting.push(Box::new(value));
        if waiting.len() == 1 {
            drop(waiting);
            // One entry for all that comes until it has the GIL.
            CONTINUATIONS.submit(STRAND, || {
                enter(|_py| {
                    let dead = std::mem::take(&mut *grave());
                    drop(dead);
                });
            });
        }
    }
}

/// Whether no thread of rstream's enters any more.
pub(super) fn is_closed() -> bool {
    CLOSED.load(Ordering::Acquire)
}

/// Gives this thread a thread state of the interpreter for good, so that attaching does not make and destroy one each
/// time.
fn keep_thread_state() {
    thread_local! {
        static KEPT: Cell<bool> = const { Cell::new(false) };
    }
    if !KEPT.replace(true) {
        // SAFETY: the interpreter lives: `enter` saw the gate open, and the exit waits for those who are entering. The
        // state is never released, on purpose: the interpreter frees it with itself.
        unsafe {
            ffi::PyGILState_Ensure();
            ffi::PyEval_SaveThread();
        }
    }
}

/// Calls `callable` from a thread of rstream's. If the interpreter ends this thread inside the call, it is parked for ever
/// instead: the process goes on to exit without it.
pub(super) fn call<'py>(
    callable: &Bound<'py, PyAny>,
    args: &Bound<'py, PyTuple>,
    kwargs: Option<&Bound<'py, PyDict>>,
) -> PyResult<Bound<'py, PyAny>> {
    struct Park;
    impl Drop for Park {
        fn drop(&mut self) {
            loop {
                thread::park();
            }
        }
    }
    type Call =
        unsafe extern "C-unwind" fn(*mut ffi::PyObject, *mut ffi::PyObject, *mut ffi::PyObject) -> *mut ffi::PyObject;
    // Hidden from the optimizer: it knows the function as one that does not unwind, and would leave the guard out.
    let entry = std::hint::black_box(ffi::PyObject_Call as *const c_void);
    // SAFETY: the same function with the same arguments; "C-unwind" only says that it may unwind, which it does in one
    // case: `pthread_exit` inside of it.
    let entry: Call = unsafe { std::mem::transmute::<*const c_void, Call>(entry) };
    let park = Park;
    // SAFETY: attached, as `Bound` proves; the three objects live through the call; kwargs may be NULL. The result is a
    // new reference, or NULL with an exception set.
    let result = unsafe {
        let raw = entry(callable.as_ptr(), args.as_ptr(), kwargs.map_or(std::ptr::null_mut(), Bound::as_ptr));
        Bound::from_owned_ptr_or_err(callable.py(), raw)
    };
    // The call returned, so this thread was not ended.
    std::mem::forget(park);
    result
}

/// Raises in a child of `fork`: the driver, and rstream's threads, exist in the parent only.
pub(super) fn refuse_forked() -> PyResult<()> {
    if FORKED.load(Ordering::Relaxed) {
        return Err(PyRuntimeError::new_err(
            "rstream cannot be used in a forked child process, as CUDA cannot: start it with the 'spawn' method",
        ));
    }
    Ok(())
}

/// For `os.register_at_fork`: marks the child.
#[pyfunction]
pub(super) fn _after_fork() {
    FORKED.store(true, Ordering::Relaxed);
    CLOSED.store(true, Ordering::Release);
}

/// For `atexit`: waits up to `seconds` for accepted host code, then closes the gate. Returns how many were left. Ctrl-C
/// ends the wait.
#[pyfunction]
pub(super) fn _at_exit(py: Python<'_>, seconds: f64) -> PyResult<usize> {
    if FORKED.load(Ordering::Relaxed) {
        return Ok(0);
    }
    let started = Instant::now();
    // More than a Duration holds is as good as no limit.
    let limit = Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX);
    let waited = super::interruptibly(py, |interrupted| {
        let mut guard = owed();
        while *guard > 0 && started.elapsed() < limit {
            let slice = INTERRUPT_CHECK.min(limit.saturating_sub(started.elapsed()));
            guard = CHANGED.wait_timeout(guard, slice).unwrap_or_else(PoisonError::into_inner).0;
            if *guard > 0 {
                drop(guard);
                if interrupted() {
                    return Err(crate::Error::Interrupted);
                }
                guard = owed();
            }
        }
        Ok(())
    });
    let left = py.detach(|| {
        let guard = owed();
        CLOSED.store(true, Ordering::Release);
        CHANGED.notify_all();
        let left = *guard;
        drop(guard);
        // Who was let in before needs the GIL, which is free now.
        while ENTERING.load(Ordering::Acquire) > 0 {
            thread::yield_now();
        }
        left
    });
    waited.map(|()| left)
}
