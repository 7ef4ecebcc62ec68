//! Green contexts: a part of a device's multiprocessors, as far as streams need it. Nothing here runs on fewer.

use std::ffi::{c_int, c_uint};

use cudarc::driver::sys::{CUcontext, CUdevResource, CUdevResourceDesc, CUgreenCtx, CUstream};

use crate::device::{self, MULTIPROCESSORS};
use crate::system::{self, Answer, CONTEXT_IS_DESTROYED, INVALID_CONTEXT, INVALID_VALUE};
use crate::{call_outside, put, stream};

/// `CU_DEV_RESOURCE_TYPE_SM`.
const SM: c_uint = 1;
/// `CUDA_ERROR_INVALID_RESOURCE_TYPE`, `CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION`.
const INVALID_RESOURCE_TYPE: u32 = 914;
const INVALID_RESOURCE_CONFIGURATION: u32 = 915;
/// Groups have a multiple of this many multiprocessors, as on a device of compute capability 9.
const STEP: c_uint = 8;
/// The type, and where the count of multiprocessors is, in `CUdevResource`.
const COUNT_AT: usize = 96;

/// # Safety
/// `resource` is valid for a write.
unsafe fn write(resource: *mut CUdevResource, count: c_uint) {
    // SAFETY: the caller's promise; both fields are inside the structure.
    unsafe {
        resource.cast::<c_uint>().write(SM);
        resource.cast::<u8>().add(COUNT_AT).cast::<c_uint>().write(count);
    }
}

/// # Safety
/// `resource` is NULL or valid.
unsafe fn read(resource: *const CUdevResource) -> Answer<c_uint> {
    if resource.is_null() {
        return Err(INVALID_VALUE);
    }
    // SAFETY: the caller's promise; both fields are inside the structure.
    unsafe {
        if resource.cast::<c_uint>().read() != SM {
            return Err(INVALID_RESOURCE_TYPE);
        }
        Ok(resource.cast::<u8>().add(COUNT_AT).cast::<c_uint>().read())
    }
}

pub unsafe extern "C" fn cuDeviceGetDevResource(dev: c_int, resource: *mut CUdevResource, kind: c_uint) -> c_uint {
    call_outside("cuDeviceGetDevResource", || {
        device::known(dev)?;
        if resource.is_null() {
            return Err(INVALID_VALUE);
        }
        if kind != SM {
            return Err(INVALID_RESOURCE_TYPE);
        }
        // SAFETY: the caller's promise.
        unsafe { write(resource, MULTIPROCESSORS) };
        Ok(())
    })
}

pub unsafe extern "C" fn cuDevSmResourceSplitByCount(
    result: *mut CUdevResource,
    groups: *mut c_uint,
    input: *const CUdevResource,
    remaining: *mut CUdevResource,
    _flags: c_uint,
    min: c_uint,
) -> c_uint {
    call_outside("cuDevSmResourceSplitByCount", || {
        // SAFETY: the caller's promise, here and below.
        let there = unsafe { read(input) }?;
        let each = min.max(1).checked_next_multiple_of(STEP).ok_or(INVALID_RESOURCE_CONFIGURATION)?;
        if groups.is_null() {
            return Err(INVALID_VALUE);
        }
        if each > there {
            return Err(INVALID_RESOURCE_CONFIGURATION);
        }
        // SAFETY: as above; `result` has room for as many as `groups` says.
        unsafe {
            let most = there / each;
            if result.is_null() {
                groups.write(most);
                return Ok(());
            }
            let made = groups.read().min(most);
            for group in 0..made {
                write(result.add(group as usize), each);
            }
            groups.write(made);
            if !remaining.is_null() {
                write(remaining, there - made * each);
            }
        }
        Ok(())
    })
}

pub unsafe extern "C" fn cuDevResourceGenerateDesc(
    desc: *mut CUdevResourceDesc,
    resources: *mut CUdevResource,
    count: c_uint,
) -> c_uint {
    call_outside("cuDevResourceGenerateDesc", || {
        if count == 0 {
            return Err(INVALID_RESOURCE_CONFIGURATION);
        }
        // SAFETY: the caller's promise.
        let multiprocessors = unsafe { read(resources) }?;
        // Nothing of the description is looked at again but that it is one.
        // SAFETY: the caller's promise.
        unsafe { put(desc, multiprocessors as usize as CUdevResourceDesc) }
    })
}

pub unsafe extern "C" fn cuGreenCtxCreate(
    out: *mut CUgreenCtx,
    _desc: CUdevResourceDesc,
    dev: c_int,
    flags: c_uint,
) -> c_uint {
    const DEFAULT_STREAM: c_uint = 1;
    call_outside("cuGreenCtxCreate", || {
        let ordinal = device::known(dev)?;
        // NULL for the description is no error (measured).
        if out.is_null() || flags != DEFAULT_STREAM {
            return Err(INVALID_VALUE);
        }
        device::retain(device::handle_of(ordinal));
        let handle = system::fresh_handle();
        system::lock().green.insert(handle, ordinal);
        // SAFETY: the caller's promise.
        unsafe { put(out, handle as CUgreenCtx) }
    })
}

pub unsafe extern "C" fn cuGreenCtxDestroy(green: CUgreenCtx) -> c_uint {
    call_outside("cuGreenCtxDestroy", || {
        let ordinal = system::lock().green.remove(&(green as usize)).ok_or(INVALID_CONTEXT)?;
        device::release(device::handle_of(ordinal))
    })
}

pub unsafe extern "C" fn cuCtxFromGreenCtx(out: *mut CUcontext, green: CUgreenCtx) -> c_uint {
    call_outside("cuCtxFromGreenCtx", || {
        if !system::lock().green.contains_key(&(green as usize)) {
            return Err(INVALID_CONTEXT);
        }
        // SAFETY: the caller's promise.
        unsafe { put(out, green.cast()) }
    })
}

pub unsafe extern "C" fn cuGreenCtxStreamCreate(
    out: *mut CUstream,
    green: CUgreenCtx,
    flags: c_uint,
    priority: c_int,
) -> c_uint {
    const NON_BLOCKING: c_uint = 1;
    call_outside("cuGreenCtxStreamCreate", || {
        if out.is_null() || flags != NON_BLOCKING {
            return Err(INVALID_VALUE);
        }
        let ordinal = *system::lock().green.get(&(green as usize)).ok_or(INVALID_CONTEXT)?;
        let handle = stream::new_handle(device::handle_of(ordinal), green as usize, flags, priority)?;
        // SAFETY: the caller's promise.
        unsafe { put(out, handle as CUstream) }
    })
}

/// What a call on a stream of a destroyed green context answers.
pub(crate) fn alive(system: &system::System, green: usize) -> Answer {
    if green == 0 || system.green.contains_key(&green) { Ok(()) } else { Err(CONTEXT_IS_DESTROYED) }
}
