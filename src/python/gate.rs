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

/// For `atexit`: waits up to `seconds` for accepted host code, then closes the gate. Returns how many were left.
#[pyfunction]
pub(super) fn _at_exit(py: Python<'_>, seconds: f64) -> usize {
    if FORKED.load(Ordering::Relaxed) {
        return 0;
    }
    py.detach(|| {
        let limit = Duration::try_from_secs_f64(seconds).unwrap_or(Duration::ZERO);
        let started = Instant::now();
        let mut guard = owed();
        while *guard > 0 && started.elapsed() < limit {
            let left = limit.saturating_sub(started.elapsed());
            guard = CHANGED.wait_timeout(guard, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        let left = *guard;
        CLOSED.store(true, Ordering::Release);
        CHANGED.notify_all();
        drop(guard);
        // Who was let in before needs the GIL, which is free now.
        while ENTERING.load(Ordering::Acquire) > 0 {
            thread::yield_now();
        }
        left
    })
}
