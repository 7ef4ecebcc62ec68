//! Modules, as far as device work for tests needs them: three kernels that are known by their names.

use std::collections::HashMap;
use std::ffi::{CStr, c_char, c_uint, c_void};
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use cudarc::driver::sys::{CUfunction, CUmodule, CUstream};

use crate::system::{self, INVALID_HANDLE, INVALID_VALUE, NOT_FOUND, Work};
use crate::{call_outside, device, put, stream};

#[derive(Clone, Copy)]
enum Kernel {
    /// `rstream_nop()`
    Nop,
    /// `rstream_spin(u64 nanoseconds)`: keeps its stream busy for that long.
    Spin,
    /// `rstream_fault(u32 code)`: loses the context with that code.
    Fault,
}

#[derive(Default)]
struct Modules {
    /// The text of each module.
    images: HashMap<usize, String>,
    functions: HashMap<usize, Kernel>,
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
        if !image.contains(&format!(".entry {name}(")) {
            return Err(NOT_FOUND);
        }
        let kernel = match name {
            "rstream_nop" => Kernel::Nop,
            "rstream_spin" => Kernel::Spin,
            "rstream_fault" => Kernel::Fault,
            _ => return Err(NOT_FOUND),
        };
        let handle = system::fresh_handle();
        // SAFETY: the caller's promise.
        unsafe { put(out, handle as CUfunction) }?;
        modules.functions.insert(handle, kernel);
        Ok(())
    })
}

pub unsafe extern "C" fn cuModuleUnload(module: CUmodule) -> c_uint {
    call_outside("cuModuleUnload", || modules().images.remove(&(module as usize)).map(drop).ok_or(INVALID_HANDLE))
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
        let kernel = *modules().functions.get(&(function as usize)).ok_or(INVALID_HANDLE)?;
        if [grid_x, grid_y, grid_z, block_x, block_y, block_z].contains(&0) {
            return Err(INVALID_VALUE);
        }
        let argument = || {
            // SAFETY: NULL, or an array of pointers to the kernel's arguments: the caller's promise.
            let first = if params.is_null() { std::ptr::null_mut() } else { unsafe { params.read() } };
            if first.is_null() { Err(INVALID_VALUE) } else { Ok(first) }
        };
        let work = match kernel {
            Kernel::Nop => Work::Spin(Duration::ZERO),
            // SAFETY: the argument is the kernel's: the caller's promise.
            Kernel::Spin => Work::Spin(Duration::from_nanos(unsafe { argument()?.cast::<u64>().read_unaligned() })),
            // SAFETY: as above.
            Kernel::Fault => Work::Fault(unsafe { argument()?.cast::<u32>().read_unaligned() }),
        };
        system::submit(stream::resolve(stream)?, work, Vec::new(), None)
    })
}
