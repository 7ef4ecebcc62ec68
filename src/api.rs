//! [`Api`]: the right of a thread to call the driver.

use std::cell::Cell;
use std::marker::PhantomData;

use crate::driver::is_forked_child;
use crate::error::{Error, Result};

/// Says that *this thread may call the driver now*. Every call that reaches the driver takes one.
///
/// `Api<'_>` is to the driver what `Python<'py>` is to the interpreter: a token of no size that cannot leave its
/// thread. A callback (`FnOnce(Status) + Send + 'static`) cannot capture one, because it is neither `Send` nor
/// `'static`, and is given none; [`Api::attach`] refuses on a thread that is running one. So CUDA's rule that a callback
/// makes no API calls is kept by the compiler where it can be, and by an error where it cannot.
///
/// ```compile_fail
/// # use rstream::{Api, Device, Stream, StreamOptions};
/// # fn f(api: &Api<'_>, stream: &Stream) {
/// let other = stream.clone();
/// // error: `Api` cannot be sent between threads safely
/// stream.add_callback(api, move |_status| other.query(api));
/// # }
/// ```
pub struct Api<'a> {
    _thread: NoCudaCallsInCallbacks<'a>,
}

/// Neither `Send` nor `Sync`, and invariant in `'a`. Its name is in what the compiler says to a callback that uses the API.
struct NoCudaCallsInCallbacks<'a>(PhantomData<*mut &'a ()>);

thread_local! {
    static CALLBACKS: Cell<u32> = const { Cell::new(0) };
}

impl Api<'_> {
    /// Calls `f` with a token for this thread.
    ///
    /// # Errors
    /// [`Error::NotPermitted`] on a thread that is running a callback or a host function, and in a forked child of the
    /// process that started the driver. `f` is not called then.
    ///
    /// # Examples
    /// ```
    /// # use rstream::{Api, Device};
    /// let name = Api::attach(|api| Device::soft(api, 0).map(|device| device.name().to_owned()))??;
    /// # Ok::<(), rstream::Error>(())
    /// ```
    pub fn attach<R>(f: impl FnOnce(&Api<'_>) -> R) -> Result<R> {
        if in_callback() {
            return Err(Error::NotPermitted {
                what: "no CUDA calls inside a callback or host function: \
                       use a continuation (`then`), which may make them"
                    .into(),
            });
        }
        if is_forked_child() {
            return Err(Error::NotPermitted {
                what: "no CUDA calls in a forked child process: the driver belongs to the parent".into(),
            });
        }
        Ok(f(&Api { _thread: NoCudaCallsInCallbacks(PhantomData) }))
    }
}

/// Whether this thread is running a callback or a host function.
#[must_use]
pub fn in_callback() -> bool {
    CALLBACKS.get() > 0
}

/// Runs `f` as a callback: until it returns, this thread gets no [`Api`].
///
/// For code that runs a callback's body on a thread of its own while the driver's thread waits for it.
pub fn callback_scope<R>(f: impl FnOnce() -> R) -> R {
    struct Leave;
    impl Drop for Leave {
        fn drop(&mut self) {
            CALLBACKS.set(CALLBACKS.get() - 1);
        }
    }
    CALLBACKS.set(CALLBACKS.get() + 1);
    let _leave = Leave;
    f()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_token_inside_a_callback_and_again_after_it() {
        callback_scope(|| {
            callback_scope(|| ());
            assert!(matches!(Api::attach(|_| ()), Err(Error::NotPermitted { .. })));
        });
        assert!(Api::attach(|_| ()).is_ok());
    }

    #[test]
    fn a_panic_in_a_callback_gives_the_thread_its_right_back() {
        assert!(std::panic::catch_unwind(|| callback_scope(|| panic!("on purpose"))).is_err());
        assert!(Api::attach(|_| ()).is_ok());
    }
}
