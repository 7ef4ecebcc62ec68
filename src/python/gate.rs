//! The border between rstream's threads and the interpreter: who may enter, and how it closes.
//!
//! A thread of rstream's enters the interpreter only through [`enter`], which answers `None` once the gate is closed. The
//! package registers [`_at_exit`] with `atexit`: it waits some time for host code that is due, then closes the gate. After
//! that no thread of rstream's touches the interpreter, and a thread of the driver that waits for Python is let go.
//!
//! A thread that is *inside* while the interpreter finalizes is ended by CPython (before 3.14) when it next takes the
//! GIL, by `pthread_exit`, whose forced unwinding must not cross frames of Rust that cannot unwind: it would abort the
//! process. PyO3 parks the thread in its own waits for the GIL. Here [`call`], [`let_go`] and [`report`] do it for the
//! three ways in which a worker runs foreign Python code: a call, a finalizer, and `sys.unraisablehook`.

use std::cell::{Cell, RefCell};
use std::ffi::c_void;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use pyo3::exceptions::{PyRuntimeError, PySystemExit};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};

use crate::completion::INTERRUPT_CHECK;
use crate::executor::{CONTINUATIONS, Job, is_own};

/// A function of CPython's as one that may unwind, which it does in one case: `pthread_exit` inside of it. Hidden from the
/// optimizer: it knows the function as one that does not, and would leave the guard out.
macro_rules! unwinding {
    ($function:path: fn($($argument:ty),*) $(-> $result:ty)?) => {{
        type Function = unsafe extern "C-unwind" fn($($argument),*) $(-> $result)?;
        let hidden = std::hint::black_box($function as *const c_void);
        // SAFETY: the same function with the same arguments; "C-unwind" only says that it may unwind.
        unsafe { std::mem::transmute::<*const c_void, Function>(hidden) }
    }};
}

static CLOSED: AtomicBool = AtomicBool::new(false);
static FORKED: AtomicBool = AtomicBool::new(false);
/// Threads between asking for entry and having the GIL.
static ENTERING: AtomicUsize = AtomicUsize::new(0);
/// Python host code that was accepted and has not ended.
static CALLABLES: AtomicUsize = AtomicUsize::new(0);
/// News of it that somebody is to get.
static NEWS: AtomicUsize = AtomicUsize::new(0);
/// Somebody waits for both to become 0.
static EXITING: AtomicBool = AtomicBool::new(false);
/// What waiters sleep with.
static SLEEP: Mutex<()> = Mutex::new(());
static CHANGED: Condvar = Condvar::new();

fn sleep_lock() -> MutexGuard<'static, ()> {
    SLEEP.lock().unwrap_or_else(PoisonError::into_inner)
}

/// One piece of Python host code between its acceptance and its end, or the news of it that somebody is to get: the exit
/// waits for it.
pub(super) struct Debt(&'static AtomicUsize);

impl Debt {
    pub(super) fn of_callable() -> Debt {
        Debt::on(&CALLABLES)
    }

    pub(super) fn of_news() -> Debt {
        Debt::on(&NEWS)
    }

    fn on(count: &'static AtomicUsize) -> Debt {
        count.fetch_add(1, Ordering::SeqCst);
        Debt(count)
    }

    fn is_any() -> bool {
        CALLABLES.load(Ordering::SeqCst) > 0 || NEWS.load(Ordering::SeqCst) > 0
    }
}

impl Drop for Debt {
    fn drop(&mut self) {
        // Either this sees that the exit waits, or the exit sees the 0.
        if self.0.fetch_sub(1, Ordering::SeqCst) == 1 && EXITING.load(Ordering::SeqCst) {
            drop(sleep_lock());
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
        drop(sleep_lock());
        CHANGED.notify_all();
    }

    /// What was put; `None` when the gate closed before.
    pub(super) fn wait(&self) -> Option<T> {
        let mut guard = sleep_lock();
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
    // Either this sees the closed gate, or the exit sees this.
    ENTERING.fetch_add(1, Ordering::SeqCst);
    if CLOSED.load(Ordering::SeqCst) {
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

/// What is made of Python objects and can be taken apart into them. Needs no interpreter.
pub(super) trait Objects: Send + 'static {
    fn each(self, take: &mut dyn FnMut(Py<PyAny>));
}

impl Objects for Py<PyAny> {
    fn each(self, take: &mut dyn FnMut(Py<PyAny>)) {
        take(self);
    }
}

impl<A: 'static, B: 'static> Objects for (Py<A>, Py<B>) {
    fn each(self, take: &mut dyn FnMut(Py<PyAny>)) {
        take(self.0.into_any());
        take(self.1.into_any());
    }
}

/// Something of Python's that is let go of on a worker that is attached, wherever it is dropped. Dropped detached, PyO3
/// would keep it until somebody attaches again, which may be long after.
pub(super) struct Buried<T: Objects>(Option<T>);

thread_local! {
    static IN_PLACE: Cell<bool> = const { Cell::new(false) };
}

/// Runs `f`. What is [`Buried`] and dropped by it is let go of here: this thread is attached.
pub(super) fn in_place<R>(_attached: Python<'_>, f: impl FnOnce() -> R) -> R {
    struct Restore(bool);
    impl Drop for Restore {
        fn drop(&mut self) {
            IN_PLACE.set(self.0);
        }
    }
    let _restore = Restore(IN_PLACE.replace(true));
    f()
}

/// Drops `value`, and what is [`Buried`] in it, here: this thread is attached.
pub(super) fn drop_attached<T>(attached: Python<'_>, value: T) {
    in_place(attached, || drop(value));
}

static GRAVE: Mutex<Vec<Py<PyAny>>> = Mutex::new(Vec::new());

fn grave() -> MutexGuard<'static, Vec<Py<PyAny>>> {
    GRAVE.lock().unwrap_or_else(PoisonError::into_inner)
}

impl<T: Objects> Buried<T> {
    pub(super) fn new(value: T) -> Buried<T> {
        Buried(Some(value))
    }

    /// Takes it back, to be dropped by the caller, who is attached.
    pub(super) fn into_inner(mut self, _attached: Python<'_>) -> T {
        self.0.take().expect("taken by this call and by the drop only")
    }
}

impl<T: Objects> std::ops::Deref for Buried<T> {
    type Target = T;

    fn deref(&self) -> &T {
        self.0.as_ref().expect("taken by the drop only")
    }
}

impl<T: Objects> Drop for Buried<T> {
    fn drop(&mut self) {
        /// The key of the strand that buries; streams' ids are far from it.
        const STRAND: u64 = 1 << 61;
        let Some(value) = self.0.take() else { return };
        if IN_PLACE.get() {
            // `Some`: `in_place` says that this thread is attached.
            Python::try_attach(|py| let_go(py, value));
            return;
        }
        if is_closed() {
            // Nobody may touch the interpreter any more, and in a forked child there are no workers.
            return std::mem::forget(value);
        }
        let mut waiting = grave();
        let first = waiting.is_empty();
        value.each(&mut |object| waiting.push(object));
        if first && !waiting.is_empty() {
            drop(waiting);
            // One entry for all that comes until it has the GIL.
            CONTINUATIONS.submit(
                STRAND,
                Job::new(true, || {
                    enter(|py| {
                        let dead = std::mem::take(&mut *grave());
                        dead.into_iter().for_each(|object| let_go(py, object));
                    });
                }),
            );
        }
    }
}

/// Whether no thread of rstream's enters any more: the interpreter is going, or this is a forked child.
pub(super) fn is_closed() -> bool {
    CLOSED.load(Ordering::Acquire)
}

/// A thread state of the interpreter that a worker keeps while it lives, so that attaching does not make and destroy one
/// each time.
struct ThreadState {
    state: *mut ffi::PyThreadState,
    before: ffi::PyGILState_STATE,
}

/// Gives this thread its thread state.
fn keep_thread_state() {
    thread_local! {
        static KEPT: RefCell<Option<ThreadState>> = const { RefCell::new(None) };
    }
    KEPT.with_borrow_mut(|kept| {
        kept.get_or_insert_with(|| {
            // SAFETY: the interpreter lives: `enter` saw the gate open, and the exit waits for those who are entering.
            unsafe {
                let before = ffi::PyGILState_Ensure();
                ThreadState { before, state: ffi::PyEval_SaveThread() }
            }
        });
    });
}

impl Drop for ThreadState {
    /// The thread ends.
    fn drop(&mut self) {
        ENTERING.fetch_add(1, Ordering::SeqCst);
        if !CLOSED.load(Ordering::SeqCst) {
            let release = unwinding!(ffi::PyGILState_Release: fn(ffi::PyGILState_STATE));
            // SAFETY: the interpreter lives, as in `keep_thread_state`; it is this thread's own state, saved there.
            unsafe { ffi::PyEval_RestoreThread(self.state) };
            ENTERING.fetch_sub(1, Ordering::SeqCst);
            // SAFETY: attached by the line above. What the state held may run finalizers.
            or_park(|| unsafe { release(self.before) });
        } else {
            // The interpreter frees it with itself.
            ENTERING.fetch_sub(1, Ordering::SeqCst);
        }
    }
}

/// Runs `inside`, which calls a function of CPython's that may run Python code. If the interpreter ends this thread in
/// there, it is parked for ever instead: the process goes on to exit without it.
///
/// Every frame between here and CPython's has to be able to unwind, so the function is called as [`unwinding`] has it.
fn or_park<R>(inside: impl FnOnce() -> R) -> R {
    struct Park;
    impl Drop for Park {
        fn drop(&mut self) {
            loop {
                thread::park();
            }
        }
    }
    // What foreign code drops, in calls of this API too, is not rstream's to let go of in place.
    let in_place = IN_PLACE.replace(false);
    let park = Park;
    let result = inside();
    // It returned, so this thread was not ended.
    std::mem::forget(park);
    IN_PLACE.set(in_place);
    result
}

/// Lets go of `objects`, whose finalizers run here.
pub(super) fn let_go(_attached: Python<'_>, objects: impl Objects) {
    let release = unwinding!(ffi::Py_DecRef: fn(*mut ffi::PyObject));
    objects.each(&mut |object| {
        let raw = object.into_ptr();
        // SAFETY: attached, as the token proves; the reference is owned, and given up here.
        or_park(|| unsafe { release(raw) });
    });
}

/// Gives `error` to `sys.unraisablehook`.
pub(super) fn report(py: Python<'_>, error: PyErr, about: Option<&Bound<'_, PyAny>>) {
    let write = unwinding!(ffi::PyErr_WriteUnraisable: fn(*mut ffi::PyObject));
    error.restore(py);
    // SAFETY: attached, as the token proves, and an exception is set; the object lives through the call and may be NULL.
    or_park(|| unsafe { write(about.map_or(std::ptr::null_mut(), Bound::as_ptr)) });
}

/// Calls `callable`.
pub(super) fn call<'py>(
    callable: &Bound<'py, PyAny>,
    args: &Bound<'py, PyTuple>,
    kwargs: Option<&Bound<'py, PyDict>>,
) -> PyResult<Bound<'py, PyAny>> {
    let entry = unwinding!(
        ffi::PyObject_Call: fn(*mut ffi::PyObject, *mut ffi::PyObject, *mut ffi::PyObject) -> *mut ffi::PyObject
    );
    let kwargs = kwargs.map_or(std::ptr::null_mut(), Bound::as_ptr);
    // SAFETY: attached, as `Bound` proves; the three objects live through the call; kwargs may be NULL.
    let raw = or_park(|| unsafe { entry(callable.as_ptr(), args.as_ptr(), kwargs) });
    // SAFETY: the result is a new reference, or NULL with an exception set.
    let result = unsafe { Bound::from_owned_ptr_or_err(callable.py(), raw) };
    #[cfg(unix)]
    if is_forked() && is_own() {
        end_child(callable, result.map(drop));
    }
    result
}

/// Ends a child that was forked by host code, when that has returned in it: the thread has nothing to go on with there, nor
/// any other to wait for it. Without the handlers of an exit, which are the parent's.
#[cfg(unix)]
fn end_child(callable: &Bound<'_, PyAny>, result: PyResult<()>) -> ! {
    let py = callable.py();
    let status = match result {
        Ok(()) => 0,
        Err(error) if error.is_instance_of::<PySystemExit>(py) => {
            let code = error.value(py).getattr("code");
            code.map_or(1, |code| if code.is_none() { 0 } else { code.extract().unwrap_or(1) })
        }
        Err(error) => {
            report(py, error, Some(callable));
            1
        }
    };
    // SAFETY: ends the process.
    unsafe { libc::_exit(status) }
}

/// Whether this process is a child of `fork`, in which rstream does nothing.
pub(super) fn is_forked() -> bool {
    FORKED.load(Ordering::Relaxed)
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

/// For `atexit`: waits up to `seconds` for accepted host code, then closes the gate. Returns how many callables were left. Ctrl-C
/// ends the wait.
#[pyfunction]
pub(super) fn _at_exit(py: Python<'_>, seconds: f64) -> PyResult<usize> {
    if FORKED.load(Ordering::Relaxed) {
        return Ok(0);
    }
    let started = Instant::now();
    // More than a Duration holds is as good as no limit.
    let limit = Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX);
    EXITING.store(true, Ordering::SeqCst);
    let waited = super::interruptibly(py, |interrupted| {
        let mut guard = sleep_lock();
        while Debt::is_any() && started.elapsed() < limit {
            let slice = INTERRUPT_CHECK.min(limit.saturating_sub(started.elapsed()));
            guard = CHANGED.wait_timeout(guard, slice).unwrap_or_else(PoisonError::into_inner).0;
            if Debt::is_any() {
                drop(guard);
                if interrupted() {
                    return Err(crate::Error::Interrupted);
                }
                guard = sleep_lock();
            }
        }
        Ok(())
    });
    let left = py.detach(|| {
        let guard = sleep_lock();
        CLOSED.store(true, Ordering::SeqCst);
        CHANGED.notify_all();
        drop(guard);
        crate::lane::let_go_of_python();
        let left = CALLABLES.load(Ordering::SeqCst);
        // Who was let in before needs the GIL, which is free now.
        while ENTERING.load(Ordering::SeqCst) > 0 {
            thread::yield_now();
        }
        left
    });
    waited.map(|()| left)
}
