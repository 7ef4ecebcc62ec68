//! Devices and primary contexts.

use std::cell::Cell;
use std::ffi::{CStr, c_char, c_int, c_uint};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use cudarc::driver::sys::{CUcontext, CUdevice_attribute as Attribute};

use crate::system::{self, Answer, INVALID_CONTEXT, INVALID_DEVICE, INVALID_VALUE, NOT_INITIALIZED, System};
use crate::{call, call_outside, codes, put};

/// CUDA 13.0, the version of the driver whose behaviour this follows.
const VERSION: c_int = 13_000;
pub(crate) const PRIORITIES: (i32, i32) = (0, -5);
/// Enough for green contexts; nothing runs on them.
pub(crate) const MULTIPROCESSORS: c_uint = 16;
pub(crate) const MEM_SYNC_DOMAINS: u8 = 4;
pub(crate) const MOST_WINDOW_BYTES: usize = 128 << 20;
const FIRST_CONTEXT: usize = 0x4_0000_0000;
const CONTEXT_STEP: usize = 0x100;

static INITIALIZED: AtomicBool = AtomicBool::new(false);

thread_local! {
    /// The context, and the green one inside it whose context it was given as; 0 for none.
    static CURRENT: Cell<(usize, usize)> = const { Cell::new((0, 0)) };
}

/// How many devices there are: `RSTREAM_SOFT_DEVICES`, from 1 to 16, or 2.
fn count() -> usize {
    static COUNT: OnceLock<usize> = OnceLock::new();
    *COUNT.get_or_init(|| {
        let asked = std::env::var("RSTREAM_SOFT_DEVICES").ok().and_then(|text| text.parse().ok());
        asked.filter(|number| (1..=16).contains(number)).unwrap_or(2)
    })
}

pub(crate) fn handle_of(ordinal: usize) -> usize {
    FIRST_CONTEXT + ordinal * CONTEXT_STEP
}

pub(crate) fn ordinal_of(context: usize) -> usize {
    (context - FIRST_CONTEXT) / CONTEXT_STEP
}

/// The ordinal of a device that exists.
pub(crate) fn known(dev: c_int) -> Answer<usize> {
    if !INITIALIZED.load(Ordering::Acquire) {
        return Err(NOT_INITIALIZED);
    }
    usize::try_from(dev).ok().filter(|&ordinal| ordinal < count()).ok_or(INVALID_DEVICE)
}

/// The context that is current on this thread.
pub(crate) fn current() -> Answer<usize> {
    match CURRENT.get() {
        (0, _) => Err(INVALID_CONTEXT),
        (context, _) => Ok(context),
    }
}

/// The green context whose context is current on this thread, or 0.
pub(crate) fn current_green() -> usize {
    CURRENT.get().1
}

pub unsafe extern "C" fn cuInit(flags: c_uint) -> c_uint {
    call("cuInit", || {
        if flags != 0 {
            return Err(INVALID_VALUE);
        }
        INITIALIZED.store(true, Ordering::Release);
        Ok(())
    })
}

pub unsafe extern "C" fn cuDriverGetVersion(version: *mut c_int) -> c_uint {
    // SAFETY: the caller's promise, as for every pointer of an entry point in this crate.
    call("cuDriverGetVersion", || unsafe { put(version, VERSION) })
}

pub unsafe extern "C" fn cuDeviceGetCount(out: *mut c_int) -> c_uint {
    call_outside("cuDeviceGetCount", || {
        known(0)?;
        // SAFETY: the caller's promise.
        unsafe { put(out, c_int::try_from(count()).expect("at most 16")) }
    })
}

pub unsafe extern "C" fn cuDeviceGet(out: *mut c_int, ordinal: c_int) -> c_uint {
    call_outside("cuDeviceGet", || {
        known(ordinal)?;
        // SAFETY: the caller's promise.
        unsafe { put(out, ordinal) }
    })
}

pub unsafe extern "C" fn cuDeviceGetName(name: *mut c_char, len: c_int, dev: c_int) -> c_uint {
    call_outside("cuDeviceGetName", || {
        let ordinal = known(dev)?;
        let room = usize::try_from(len).unwrap_or(0);
        if name.is_null() || room == 0 {
            return Err(INVALID_VALUE);
        }
        let text = format!("Software device {ordinal}");
        let used = text.len().min(room - 1);
        // SAFETY: the caller has room for `len` bytes; `used` and the NUL fit.
        unsafe {
            std::ptr::copy_nonoverlapping(text.as_ptr(), name.cast::<u8>(), used);
            name.cast::<u8>().add(used).write(0);
        }
        Ok(())
    })
}

/// What `cuDeviceGetAttribute` answers; 0 for the features that software does not have.
const ATTRIBUTES: &[(Attribute, c_int)] = &[
    (Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, 9),
    (Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, 0),
    (Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, MULTIPROCESSORS as c_int),
    (Attribute::CU_DEVICE_ATTRIBUTE_WARP_SIZE, 32),
    (Attribute::CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK, 1024),
    (Attribute::CU_DEVICE_ATTRIBUTE_CONCURRENT_KERNELS, 1),
    (Attribute::CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT, 1),
    (Attribute::CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING, 1),
    (Attribute::CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY, 1),
    (Attribute::CU_DEVICE_ATTRIBUTE_STREAM_PRIORITIES_SUPPORTED, 1),
    (Attribute::CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY, 1),
    (Attribute::CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS, 1),
    (Attribute::CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS, 1),
    (Attribute::CU_DEVICE_ATTRIBUTE_CAN_USE_STREAM_WAIT_VALUE_NOR, 1),
    (Attribute::CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED, 1),
    (Attribute::CU_DEVICE_ATTRIBUTE_MEM_SYNC_DOMAIN_COUNT, MEM_SYNC_DOMAINS as c_int),
    (Attribute::CU_DEVICE_ATTRIBUTE_MAX_ACCESS_POLICY_WINDOW_SIZE, MOST_WINDOW_BYTES as c_int),
    (Attribute::CU_DEVICE_ATTRIBUTE_MAX_PERSISTING_L2_CACHE_SIZE, 32 << 20),
];

pub unsafe extern "C" fn cuDeviceGetAttribute(out: *mut c_int, attribute: c_uint, dev: c_int) -> c_uint {
    call("cuDeviceGetAttribute", || {
        known(dev)?;
        if attribute == 0 || attribute >= Attribute::CU_DEVICE_ATTRIBUTE_MAX as c_uint {
            return Err(INVALID_VALUE);
        }
        let known = ATTRIBUTES.iter().find(|(known, _)| *known as c_uint == attribute);
        // SAFETY: the caller's promise.
        unsafe { put(out, known.map_or(0, |row| row.1)) }
    })
}

pub unsafe extern "C" fn cuDevicePrimaryCtxRetain(out: *mut CUcontext, dev: c_int) -> c_uint {
    call_outside("cuDevicePrimaryCtxRetain", || {
        let handle = handle_of(known(dev)?);
        // SAFETY: the caller's promise.
        unsafe { put(out, handle as CUcontext) }?;
        retain(handle);
        Ok(())
    })
}

pub(crate) fn retain(handle: usize) {
    let mut system = system::lock();
    if !system.contexts.contains_key(&handle) {
        system.new_context(handle);
    }
    system.contexts.get_mut(&handle).expect("made above").retained += 1;
}

pub(crate) fn release(handle: usize) -> Answer {
    let last = {
        let mut system = system::lock();
        let context = system.contexts.get_mut(&handle).ok_or(INVALID_CONTEXT)?;
        context.retained = context.retained.checked_sub(1).ok_or(INVALID_CONTEXT)?;
        context.retained == 0
    };
    if last {
        reset(handle);
    }
    Ok(())
}

pub unsafe extern "C" fn cuDevicePrimaryCtxRelease_v2(dev: c_int) -> c_uint {
    call_outside("cuDevicePrimaryCtxRelease_v2", || release(handle_of(known(dev)?)))
}

pub unsafe extern "C" fn cuDevicePrimaryCtxReset_v2(dev: c_int) -> c_uint {
    call_outside("cuDevicePrimaryCtxReset_v2", || {
        reset(handle_of(known(dev)?));
        Ok(())
    })
}

/// Waits until the context has no work, then takes all that belongs to it away. The handle stays the same.
///
/// What other threads submit meanwhile is waited for too: it must neither be lost nor use memory that is gone.
fn reset(handle: usize) {
    let idle = |system: &System| system.streams.values().all(|stream| stream.context != handle || stream.is_idle());
    system::wait_until(system::lock(), idle).clear_context(handle);
}

pub unsafe extern "C" fn cuCtxGetCurrent(out: *mut CUcontext) -> c_uint {
    call_outside("cuCtxGetCurrent", || {
        let (context, green) = CURRENT.get();
        // SAFETY: the caller's promise.
        unsafe { put(out, if green == 0 { context } else { green } as CUcontext) }
    })
}

pub unsafe extern "C" fn cuCtxSetCurrent(ctx: CUcontext) -> c_uint {
    call_outside("cuCtxSetCurrent", || {
        let handle = ctx as usize;
        let system = system::lock();
        CURRENT.set(match system.green.get(&handle) {
            Some(&ordinal) => (handle_of(ordinal), handle),
            None if handle == 0 || system.contexts.contains_key(&handle) => (handle, 0),
            None => return Err(INVALID_CONTEXT),
        });
        Ok(())
    })
}

pub unsafe extern "C" fn cuCtxGetDevice(out: *mut c_int) -> c_uint {
    call_outside("cuCtxGetDevice", || {
        let ordinal = ordinal_of(current()?);
        // SAFETY: the caller's promise.
        unsafe { put(out, c_int::try_from(ordinal).expect("at most 16")) }
    })
}

pub unsafe extern "C" fn cuCtxSynchronize() -> c_uint {
    call_outside("cuCtxSynchronize", || {
        let context = current()?;
        let mut system = system::lock();
        system.conflicts_with_captures(context)?;
        let targets = system::drained(&system, |_, stream| stream.context == context);
        let system =
            system::wait_until(system, |system| system.sound(context).is_err() || system::reached(system, &targets));
        system.sound(context)
    })
}

pub unsafe extern "C" fn cuCtxGetStreamPriorityRange(least: *mut c_int, greatest: *mut c_int) -> c_uint {
    call("cuCtxGetStreamPriorityRange", || {
        current()?;
        for (out, value) in [(least, PRIORITIES.0), (greatest, PRIORITIES.1)] {
            if !out.is_null() {
                // SAFETY: the caller's promise.
                unsafe { put(out, value) }?;
            }
        }
        Ok(())
    })
}

pub unsafe extern "C" fn cuGetErrorName(code: c_uint, out: *mut *const c_char) -> c_uint {
    // SAFETY: the caller's promise.
    call("cuGetErrorName", || unsafe { put_text(out, codes::error_name(code)) })
}

pub unsafe extern "C" fn cuGetErrorString(code: c_uint, out: *mut *const c_char) -> c_uint {
    // SAFETY: the caller's promise.
    call("cuGetErrorString", || unsafe { put_text(out, codes::error_text(code)) })
}

/// NULL and an invalid value for a code that is not known.
///
/// # Safety
/// As [`put`].
unsafe fn put_text(out: *mut *const c_char, text: Option<&'static CStr>) -> Answer {
    // SAFETY: the caller's promise.
    unsafe { put(out, text.map_or(std::ptr::null(), CStr::as_ptr)) }?;
    text.map(drop).ok_or(INVALID_VALUE)
}
