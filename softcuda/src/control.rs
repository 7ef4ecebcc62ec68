//! What the real driver has not: failures on demand.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::{FUNCTIONS, device, system};

/// Names an injection, for [`clear`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct InjectionId(u64);

struct Injection {
    id: InjectionId,
    function: String,
    code: u32,
    /// How many calls until the one that fails, that one included.
    left: u32,
}

static INJECTIONS: Mutex<Vec<Injection>> = Mutex::new(Vec::new());
/// Whether there is any, so that ordinary calls pay for one load.
static ANY: AtomicBool = AtomicBool::new(false);

fn injections() -> MutexGuard<'static, Vec<Injection>> {
    INJECTIONS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Whether the software driver has an entry point of this name.
#[must_use]
pub fn known_function(function: &str) -> bool {
    FUNCTIONS.contains(&function)
}

/// Makes the `nth` call of `function` from now answer `code` and do nothing else. `nth` counts from 1.
pub fn inject(function: &str, code: u32, nth: u32) -> InjectionId {
    let id = InjectionId(system::fresh());
    let mut injections = injections();
    injections.push(Injection { id, function: function.to_owned(), code, left: nth.max(1) });
    ANY.store(true, Ordering::Release);
    id
}

/// Whether an injection has neither been used nor taken back.
#[must_use]
pub fn is_pending(id: InjectionId) -> bool {
    injections().iter().any(|injection| injection.id == id)
}

/// Takes an injection back. False: it was used.
pub fn clear(id: InjectionId) -> bool {
    let mut injections = injections();
    let before = injections.len();
    injections.retain(|injection| injection.id != id);
    ANY.store(!injections.is_empty(), Ordering::Release);
    injections.len() < before
}

pub(crate) fn injected(name: &str) -> Option<u32> {
    if !ANY.load(Ordering::Acquire) {
        return None;
    }
    let mut injections = injections();
    for injection in injections.iter_mut().filter(|injection| injection.function == name) {
        injection.left = injection.left.saturating_sub(1);
    }
    // Two that are due at one call strike one after the other.
    let due = injections.iter().position(|injection| injection.function == name && injection.left == 0)?;
    let used = injections.remove(due);
    ANY.store(!injections.is_empty(), Ordering::Release);
    Some(used.code)
}

/// Destroys the primary context of the device `ordinal`, as if another library had: pending callbacks are told 709
/// (`CUDA_ERROR_CONTEXT_IS_DESTROYED`), and so is every later call.
pub fn destroy_context(ordinal: u32) {
    system::lock().fail(device::handle_of(ordinal as usize), system::CONTEXT_IS_DESTROYED);
}
