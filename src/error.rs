//! Codes of the driver, and the one error type.

use std::borrow::Cow;
use std::fmt;
use std::time::Duration;

/// A code of the driver (`CUresult`), kept as a number: a driver newer than this crate may answer one without a name.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Status(u32);

impl Status {
    /// 0: no error.
    pub const SUCCESS: Status = Status(0);
    /// 1: an argument is out of its range.
    pub const INVALID_VALUE: Status = Status(1);
    /// 2: no memory is left.
    pub const OUT_OF_MEMORY: Status = Status(2);
    /// 4: the driver is shutting down.
    pub const DEINITIALIZED: Status = Status(4);
    /// 36: the call needs a newer driver.
    pub const CALL_REQUIRES_NEWER_DRIVER: Status = Status(36);
    /// 100: there is no device.
    pub const NO_DEVICE: Status = Status(100);
    /// 400: a handle is not valid.
    pub const INVALID_HANDLE: Status = Status(400);
    /// 401: not possible in the state that the object is in.
    pub const ILLEGAL_STATE: Status = Status(401);
    /// 600: the work is not done yet. An answer, not an error.
    pub const NOT_READY: Status = Status(600);
    /// 700: a kernel used an address that it may not use.
    pub const ILLEGAL_ADDRESS: Status = Status(700);
    /// 709: the context is gone.
    pub const CONTEXT_IS_DESTROYED: Status = Status(709);
    /// 800: a call of the API inside a callback.
    pub const NOT_PERMITTED: Status = Status(800);
    /// 801: the device or system cannot do it.
    pub const NOT_SUPPORTED: Status = Status(801);
    /// 900: the stream is capturing.
    pub const STREAM_CAPTURE_UNSUPPORTED: Status = Status(900);
    /// 901: the capture broke earlier.
    pub const STREAM_CAPTURE_INVALIDATED: Status = Status(901);
    /// 902: two captures would have been joined.
    pub const STREAM_CAPTURE_MERGE: Status = Status(902);
    /// 903: the capture was begun on another stream.
    pub const STREAM_CAPTURE_UNMATCHED: Status = Status(903);
    /// 904: a branch of the capture was not joined.
    pub const STREAM_CAPTURE_UNJOINED: Status = Status(904);
    /// 905: captured work would have depended on work outside.
    pub const STREAM_CAPTURE_ISOLATION: Status = Status(905);
    /// 906: the legacy default stream would have depended on a capture.
    pub const STREAM_CAPTURE_IMPLICIT: Status = Status(906);
    /// 907: the event was last recorded in a capture.
    pub const CAPTURED_EVENT: Status = Status(907);
    /// 908: the capture was begun on another thread.
    pub const STREAM_CAPTURE_WRONG_THREAD: Status = Status(908);
    /// 909: a wait ran out of time.
    pub const TIMEOUT: Status = Status(909);
    /// 910: an executable graph cannot be updated from this graph.
    pub const GRAPH_EXEC_UPDATE_FAILURE: Status = Status(910);
    /// 999: the driver cannot say.
    pub const UNKNOWN: Status = Status(999);

    /// The status with the number `code`.
    #[must_use]
    pub const fn new(code: u32) -> Status {
        Status(code)
    }

    /// The number.
    #[must_use]
    pub const fn code(self) -> u32 {
        self.0
    }

    /// Whether this is `CUDA_SUCCESS`.
    #[must_use]
    pub const fn ok(self) -> bool {
        self.0 == 0
    }

    /// Whether the context is lost: every later call that involves it answers the same code.
    #[must_use]
    pub const fn sticky(self) -> bool {
        matches!(self.0, 214 | 220 | 226 | 700 | 702 | 710 | 714..=719 | 721 | 911)
    }

    /// Whether queued work is over because its context or the driver is: it uses nothing any more.
    pub(crate) fn ends_all_work(self) -> bool {
        self.sticky() || matches!(self, Status::CONTEXT_IS_DESTROYED | Status::DEINITIALIZED)
    }

    /// The name in `cuda.h`, `CUDA_ERROR_ILLEGAL_ADDRESS`; `CUDA_ERROR_12345` for a code that has none here.
    #[must_use]
    pub fn name(self) -> Cow<'static, str> {
        match softcuda::error_name(self.0) {
            Some(name) => name.to_string_lossy(),
            None => Cow::Owned(format!("CUDA_ERROR_{}", self.0)),
        }
    }

    /// What the driver says about the code, in a sentence without a full stop.
    #[must_use]
    pub fn description(self) -> Cow<'static, str> {
        match softcuda::error_text(self.0) {
            Some(text) => text.to_string_lossy(),
            None => Cow::Borrowed("an error code that this version does not know"),
        }
    }
}

impl Status {
    /// What a code stands for beside the call that got it, and what to do.
    fn remedy(self) -> Option<&'static str> {
        Some(match self {
            Status::STREAM_CAPTURE_UNSUPPORTED => {
                "The call is not possible while a stream captures, and has broken the capture: make it before or after. \
                 Calls that concern no capturing stream, such as an allocation, are possible under the relaxed capture \
                 mode"
            }
            Status::STREAM_CAPTURE_INVALIDATED => {
                "A call that a capture does not permit was made while it lasted, by this thread or, in global mode, by \
                 any other: the capture has to be begun anew without it"
            }
            Status::STREAM_CAPTURE_MERGE => "Two captures cannot be joined: end the one before the other's work waits",
            Status::STREAM_CAPTURE_UNMATCHED => "A capture ends on the stream that it began on",
            Status::STREAM_CAPTURE_UNJOINED => {
                "Before the end, the stream that the capture began on has to wait for every stream that took part"
            }
            Status::STREAM_CAPTURE_ISOLATION => {
                "Captured work cannot depend on work outside of the capture: record the event inside, or wait for it as \
                 an external one"
            }
            Status::STREAM_CAPTURE_IMPLICIT => {
                "The legacy default stream waits for all blocking streams, and one of them captures: capture on a \
                 non-blocking stream, or leave the legacy default stream alone"
            }
            Status::CAPTURED_EVENT => {
                "The event stands for captured work, which never runs by itself: nobody can wait for it"
            }
            Status::STREAM_CAPTURE_WRONG_THREAD => {
                "A capture ends on the thread that began it, unless its mode is relaxed"
            }
            Status::INVALID_HANDLE => "It was never a handle of this device, or what it stood for was destroyed",
            _ if self.sticky() => {
                "Earlier work of the device has failed, and no call works on it until the process ends"
            }
            _ => return None,
        })
    }

    /// Writes what `teller` says: the code and what to do.
    fn told_by(self, f: &mut fmt::Formatter<'_>, teller: &str) -> fmt::Result {
        write!(f, "{teller}: {self}")?;
        self.remedy().map_or(Ok(()), |remedy| write!(f, ". {remedy}"))
    }
}

impl fmt::Debug for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Status({} {})", self.0, self.name())
    }
}

impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({}): {}", self.name(), self.0, self.description())
    }
}

/// What can go wrong. Each variant has the driver's code that fits it best: [`Error::status`].
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Error {
    /// The driver answered a call with a code.
    Driver {
        /// The code.
        status: Status,
        /// The driver's function.
        function: &'static str,
    },
    /// The driver answered with a code when it was asked whether the stream can take work, which comes before the call.
    Unusable {
        /// The code.
        status: Status,
    },
    /// There is no memory for a buffer.
    OutOfMemory {
        /// The driver's function.
        function: &'static str,
        /// How many bytes were asked for.
        bytes: usize,
    },
    /// Work that was queued before failed on the device, so this host code was not run.
    Fault {
        /// The code of the failure.
        status: Status,
    },
    /// Work that was queued before failed on the device, so this point of the stream was not reached.
    NotReached {
        /// The code of the failure.
        status: Status,
    },
    /// There is no real driver on this machine, or it refuses to start.
    NoDriver {
        /// What is missing.
        reason: String,
    },
    /// The driver does not have the function.
    DriverTooOld {
        /// The driver's function.
        function: &'static str,
        /// The first CUDA version that has it: 12030 is CUDA 12.3.
        needed: u32,
        /// The CUDA version of this driver.
        found: u32,
    },
    /// A call of the API on a thread that is running a callback or host function.
    NotPermitted {
        /// What was refused, and why.
        what: String,
    },
    /// An argument was refused before any call of the driver.
    InvalidValue {
        /// The value and the rule.
        what: String,
    },
    /// The device or this version cannot do it.
    NotSupported {
        /// What, and why.
        what: String,
    },
    /// The object was closed.
    Closed {
        /// The kind of object: "Stream", "Event".
        what: &'static str,
    },
    /// Refused before the call because it would have broken a capture.
    Capture {
        /// The code that the driver would have answered.
        status: Status,
        /// Which rule, and what to do.
        what: String,
    },
    /// An executable graph cannot be updated from a graph: nodes and edges have to be the same.
    GraphUpdate {
        /// `CUgraphExecUpdateResult`.
        reason: u32,
    },
    /// A wait ran out of time. What was waited for goes on.
    Timeout {
        /// How long the wait lasted.
        waited: Duration,
    },
    /// The caller's `interrupted` closure ended a wait. What was waited for goes on.
    Interrupted,
    /// Host code panicked.
    Panicked {
        /// The panic's message.
        message: String,
    },
    /// The host code was cancelled before it ran.
    Cancelled,
    /// The host code was not run because the process or its interpreter is shutting down.
    Shutdown,
}

/// The result of a call of the API.
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl Error {
    pub(crate) fn driver(status: Status, function: &'static str) -> Error {
        Error::Driver { status, function }
    }

    pub(crate) fn capture(status: Status, what: impl Into<String>) -> Error {
        Error::Capture { status, what: what.into() }
    }

    pub(crate) fn invalid(what: impl Into<String>) -> Error {
        Error::InvalidValue { what: what.into() }
    }

    /// The driver's code for this error, or the one that fits it best.
    #[must_use]
    pub fn status(&self) -> Status {
        match self {
            Error::Driver { status, .. }
            | Error::Unusable { status }
            | Error::Fault { status }
            | Error::NotReached { status }
            | Error::Capture { status, .. } => *status,
            Error::OutOfMemory { .. } => Status::OUT_OF_MEMORY,
            Error::NoDriver { .. } => Status::NO_DEVICE,
            Error::DriverTooOld { .. } => Status::CALL_REQUIRES_NEWER_DRIVER,
            Error::NotPermitted { .. } => Status::NOT_PERMITTED,
            Error::InvalidValue { .. } => Status::INVALID_VALUE,
            Error::NotSupported { .. } => Status::NOT_SUPPORTED,
            Error::Closed { .. } => Status::INVALID_HANDLE,
            Error::GraphUpdate { .. } => Status::GRAPH_EXEC_UPDATE_FAILURE,
            Error::Timeout { .. } => Status::TIMEOUT,
            Error::Shutdown => Status::DEINITIALIZED,
            Error::Interrupted | Error::Panicked { .. } | Error::Cancelled => Status::UNKNOWN,
        }
    }
}

/// A CUDA version as people write it: 12030 is 12.3.
struct Version(u32);

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.0 / 1000, self.0 % 1000 / 10)
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::Driver { status, function } => status.told_by(f, function),
            Error::Unusable { status } => status.told_by(f, "the stream cannot be used"),
            Error::OutOfMemory { function, bytes } => {
                write!(f, "{function}: {}. {bytes} bytes were asked for", Status::OUT_OF_MEMORY)
            }
            Error::GraphUpdate { reason } => {
                let changed = match reason {
                    2 => "its nodes or edges are others",
                    3 => "a node has another type",
                    5 => "a node has parameters that cannot be changed",
                    8 => "a node has attributes that cannot be changed",
                    _ => "a node cannot be updated",
                };
                write!(
                    f,
                    "the executable cannot be updated from this graph: {changed} (result {reason}). Instantiate it"
                )
            }
            Error::Fault { status } => write!(f, "not run, since earlier work failed: {status}"),
            Error::NotReached { status } => write!(f, "not reached, since earlier work failed: {status}"),
            Error::NoDriver { reason } => {
                write!(f, "{reason}. For the software device use Device(\"soft\"), or set RSTREAM_DEVICE=soft")
            }
            Error::DriverTooOld { function, needed, found } => {
                write!(f, "{function} needs a driver of CUDA {} or newer; this one has ", Version(*needed))?;
                if found >= needed {
                    write!(f, "CUDA {} and lacks it", Version(*found))
                } else {
                    write!(f, "CUDA {}", Version(*found))
                }
            }
            Error::NotPermitted { what }
            | Error::InvalidValue { what }
            | Error::NotSupported { what }
            | Error::Capture { what, .. } => f.write_str(what),
            Error::Closed { what } => write!(f, "this {what} is closed"),
            Error::Timeout { waited } => write!(f, "not done after {} s", waited.as_secs_f64()),
            Error::Interrupted => f.write_str("the wait was interrupted"),
            Error::Panicked { message } => write!(f, "the host code panicked: {message}"),
            Error::Cancelled => f.write_str("the host code was cancelled before it ran"),
            Error::Shutdown => f.write_str("not run: the process is shutting down"),
        }
    }
}

impl std::error::Error for Error {}

/// A failed enqueue: the error, and the closure that was not enqueued.
pub struct Refused<F> {
    /// Why.
    pub error: Error,
    /// The closure, untouched.
    pub returned: F,
}

impl<F> fmt::Debug for Refused<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Refused").field("error", &self.error).finish_non_exhaustive()
    }
}

impl<F> fmt::Display for Refused<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.error.fmt(f)
    }
}

impl<F> std::error::Error for Refused<F> {}

impl<F> From<Refused<F>> for Error {
    fn from(refused: Refused<F>) -> Error {
        refused.error
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unknown_code_keeps_its_number() {
        let status = Status::new(12345);
        assert_eq!(status.code(), 12345);
        assert_eq!(status.name(), "CUDA_ERROR_12345");
        assert!(!status.ok() && !status.sticky());
    }

    #[test]
    fn a_too_old_driver_is_told_with_both_versions() {
        let error = Error::DriverTooOld { function: "cuStreamGetDevice", needed: 12080, found: 11040 };
        assert_eq!(error.to_string(), "cuStreamGetDevice needs a driver of CUDA 12.8 or newer; this one has CUDA 11.4");
        assert_eq!(error.status(), Status::CALL_REQUIRES_NEWER_DRIVER);
    }
}
