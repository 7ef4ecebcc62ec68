//! The extension module `rstream._core`: PyO3 only. The core compiles and is tested without it.
//!
//! Every call that reaches the driver goes through [`call`]: without the GIL, and refused inside a callback. The richer
//! half of the package (arrays, exceptions, waiting for many) is Python, in `python/rstream/`.

mod attributes;
mod awaiting;
mod capture;
mod completion;
mod device;
mod errors;
mod event;
mod gate;
mod graph;
mod green;
mod memory;
mod region;
mod stream;
mod testing;
mod worker;

use std::time::Duration;

use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::api::Api;
use crate::error::{Error, Result};
use crate::poller::{self, WaitPolicy};
use errors::PyResultExt as _;
pub(crate) use worker::Outcome;

/// Calls the driver: with the GIL released, and with a token for this thread.
fn call<T: Send>(py: Python<'_>, f: impl FnOnce(&Api<'_>) -> Result<T> + Send) -> PyResult<T> {
    gate::refuse_forked()?;
    py.detach(|| Api::attach(f).and_then(|result| result)).py(py)
}

/// As [`call`], for waits: `f` gets the closure that looks for Ctrl-C.
fn call_interruptibly<T: Send>(
    py: Python<'_>,
    f: impl FnOnce(&Api<'_>, &mut dyn FnMut() -> bool) -> Result<T> + Send,
) -> PyResult<T> {
    gate::refuse_forked()?;
    interruptibly(py, |interrupted| Api::attach(|api| f(api, interrupted)).and_then(|result| result))
}

/// Runs a wait without the GIL. When Python's signal handler raises meanwhile, the wait ends with that exception.
fn interruptibly<T: Send>(
    py: Python<'_>,
    wait: impl FnOnce(&mut dyn FnMut() -> bool) -> Result<T> + Send,
) -> PyResult<T> {
    let mut raised = None;
    let result = py.detach(|| {
        wait(&mut || {
            raised = Python::try_attach(|py| py.check_signals().err()).flatten();
            raised.is_some()
        })
    });
    match raised {
        Some(error) => Err(error),
        None => result.py(py),
    }
}

/// A time-out in seconds, as Python has it. `None` and infinity: no limit.
fn timeout(seconds: Option<f64>) -> Result<Option<Duration>> {
    match seconds {
        Some(seconds) if seconds.is_nan() || seconds < 0.0 => {
            // As Python writes it: "nan", "-inf".
            let shown = format!("{seconds}").to_lowercase();
            Err(Error::invalid(format!("timeout={shown}: expected seconds of at least 0, or None")))
        }
        // More than a Duration holds is as good as no limit.
        Some(seconds) => Ok(Duration::try_from_secs_f64(seconds).ok()),
        None => Ok(None),
    }
}

#[pymodule(gil_used = false)]
mod _core {
    #[pymodule_export]
    #[allow(non_upper_case_globals, reason = "the name is Python's")]
    const __version__: &str = env!("CARGO_PKG_VERSION");

    #[pymodule_init]
    fn init(_module: &super::Bound<'_, super::PyModule>) -> super::PyResult<()> {
        crate::executor::set_batch(super::worker::batch);
        Ok(())
    }

    #[pymodule_export]
    use super::attributes::StreamAttributesPy;
    #[pymodule_export]
    use super::capture::{_exchange_capture_mode, CapturePy};
    #[pymodule_export]
    use super::completion::CompletionPy;
    #[pymodule_export]
    use super::completion::Finished;
    #[pymodule_export]
    use super::device::{DevicePy, default_device, devices};
    #[pymodule_export]
    use super::event::EventPy;
    #[pymodule_export]
    use super::gate::{_after_fork, _at_exit};
    #[pymodule_export]
    use super::graph::{GraphExecPy, GraphPy, HostNodePy, NodePy};
    #[pymodule_export]
    use super::green::GreenContextPy;
    #[pymodule_export]
    use super::memory::{MemoryPy, pointer_info};
    #[pymodule_export]
    use super::stats;
    #[pymodule_export]
    use super::status_text;
    #[pymodule_export]
    use super::stream::StreamPy;
    #[pymodule_export]
    use super::testing::{HoldPy, InjectionPy, fault, hold, inject, spin};
    #[pymodule_export]
    use super::{in_callback, set_wait_policy, wait_policy};
}

const POLICIES: [(&str, WaitPolicy); 3] =
    [("adaptive", WaitPolicy::Adaptive), ("spin", WaitPolicy::Spin), ("sleep", WaitPolicy::Sleep)];

/// Set how the thread that polls for the memory signal waits, for the whole process.
///
/// `"adaptive"` spins for 50 us, then sleeps for an eighth of the time waited so far, at most 2 ms; `"spin"` spins,
/// which takes a core while host code is queued; `"sleep"` never spins. With nothing queued it sleeps under each. An
/// `await` spins for up to 50 us too before it suspends the event loop, but under `"sleep"`. The environment variable
/// `RSTREAM_WAIT_POLICY` sets it for a process. Raises `InvalidValueError` for another.
#[pyfunction]
fn set_wait_policy(py: Python<'_>, policy: &str) -> PyResult<()> {
    let Some((_, policy)) = POLICIES.iter().find(|(name, _)| *name == policy) else {
        let what = format!("policy={policy:?}: expected \"adaptive\", \"spin\" or \"sleep\"");
        return Err(errors::exception(py, &Error::invalid(what)));
    };
    poller::set_wait_policy(*policy);
    Ok(())
}

/// How that thread waits: see `set_wait_policy`.
#[pyfunction]
fn wait_policy() -> &'static str {
    let now = poller::wait_policy();
    POLICIES.iter().find(|(_, policy)| *policy == now).map_or("adaptive", |(name, _)| name)
}

/// Whether this thread runs a callback or a host function, in which no calls of the API are permitted.
#[pyfunction]
fn in_callback() -> bool {
    crate::api::in_callback()
}

/// Name, description and stickiness of a code.
#[pyfunction]
fn status_text(code: u32) -> (String, String, bool) {
    let status = crate::Status::new(code);
    (status.name().into_owned(), status.description().into_owned(), status.sticky())
}

/// Counters of the process: host code that was `accepted`, has `run`, has `failed` or was `cancelled`.
#[pyfunction]
fn stats(py: Python<'_>) -> PyResult<Bound<'_, PyDict>> {
    let stats = crate::callback::stats();
    // To the core, host code that raised a Python exception has run. One that raises at this moment may be counted here
    // and not there yet.
    let raised = worker::raised();
    let dict = PyDict::new(py);
    dict.set_item("accepted", stats.accepted)?;
    dict.set_item("run", stats.run.saturating_sub(raised))?;
    dict.set_item("failed", stats.failed + raised)?;
    dict.set_item("cancelled", stats.cancelled)?;
    Ok(dict)
}
