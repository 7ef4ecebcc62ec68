//! Modules, as far as device work for tests needs them: one kernel that is known by its name,
//! `rstream_work(u64 nanoseconds, u32 code)`. It keeps its stream busy for that long, then loses the context with the code
//! if that is not 0.

use std::collections::HashMap;
use std::ffi::{CStr, c_char, c_uint, c_void};
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use cudarc::driver::sys::{CUfunction, CUmodule, CUstream};

use crate::system::{self, INVALID_HANDLE, INVALID_VALUE, NOT_FOUND, Work};
use crate::{call_outside, device, put, stream};

#[derive(Default)]
struct Modules {
    /// The text of each module.
    images: HashMap<usize, String>,
    /// The function of each module that was asked for it.
    functions: HashMap<usize, usize>,
}

static MODULES: LazyLock<Mutex<Modules>> = LazyLock::new(Mutex::default);

fn modules() -> MutexGuard<'static, Modules> {
    MODULES.lock().unwrap_or_else(PoisonError::into_inner)
}

pub unsafe extern "C" fn cuModuleLoadData(out: *mut CUmodule, image: *const c_void) -> c_uint {
    call_outside("cuModuleLoadData", || {
        if image.is_null() {
            return Err(INVALID_VALUE);
        }
        system::lock().sound(device::current()?)?;
        // SAFETY: the image is PTX, a string that ends in NUL: the caller's promise.
        let text = unsafe { CStr::from_ptr(image.cast()) }.to_string_lossy().into_owned();
        let handle = system::fresh_handle();
        // SAFETY: the caller's promise.
        unsafe { put(out, handle as CUmodule) }?;
        modules().images.insert(handle, text);
        Ok(())
    })
}

pub unsafe extern "C" fn cuModuleGetFunction(out: *mut CUfunction, module: CUmodule, name: *const c_char) -> c_uint {
    call_outside("cuModuleGetFunction", || {
        if name.is_null() {
            return Err(INVALID_VALUE);
        }
        // SAFETY: a string that ends in NUL: the caller's promise.
        let name = unsafe { CStr::from_ptr(name) }.to_str().map_err(|_| NOT_FOUND)?;
        let mut modules = modules();
        let image = modules.images.get(&(module as usize)).ok_or(INVALID_HANDLE)?;
        if name != "rstream_work" || !image.contains(&format!(".entry {name}(")) {
            return Err(NOT_FOUND);
        }
        let handle = *modules.functions.entry(module as usize).or_insert_with(system::fresh_handle);
        // SAFETY: the caller's promise.
        unsafe { put(out, handle as CUfunction) }
    })
}

pub unsafe extern "C" fn cuModuleUnload(module: CUmodule) -> c_uint {
    call_outside("cuModuleUnload", || {
        system::lock().unsafe_call()?;
        let mut modules = modules();
        modules.functions.remove(&(module as usize));
        modules.images.remove(&(module as usize)).map(drop).ok_or(INVALID_HANDLE)
    })
}

#[allow(clippy::too_many_arguments, reason = "the signature is CUDA's")]
pub unsafe extern "C" fn cuLaunchKernel(
    function: CUfunction,
    grid_x: c_uint,
    grid_y: c_uint,
    grid_z: c_uint,
    block_x: c_uint,
    block_y: c_uint,
    block_z: c_uint,
    _shared: c_uint,
    stream: CUstream,
    params: *mut *mut c_void,
    _extra: *mut *mut c_void,
) -> c_uint {
    call_outside("cuLaunchKernel", || {
        if !modules().functions.values().any(|&known| known == function as usize) {
            return Err(INVALID_HANDLE);
        }
        if [grid_x, grid_y, grid_z, block_x, block_y, block_z].contains(&0) || params.is_null() {
            return Err(INVALID_VALUE);
        }
        // SAFETY: pointers to the kernel's two arguments: the caller's promise.
        let (nanoseconds, code) = unsafe {
            (params.read().cast::<u64>().read_unaligned(), params.add(1).read().cast::<u32>().read_unaligned())
        };
        let mut works = vec![Work::Spin(Duration::from_nanos(nanoseconds))];
        if code != 0 {
            works.push(Work::Fault(code));
        }
        system::submit(stream::resolve(stream)?, works)
    })
}
