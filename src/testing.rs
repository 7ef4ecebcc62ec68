//! Device work and faults on demand, for tests of programs that use rstream.

use std::ffi::{CStr, c_void};
use std::ptr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use cudarc::driver::sys::{CUfunction, CUmodule};

use crate::api::Api;
use crate::device::Device;
use crate::driver::Driver;
use crate::error::{Error, Result, Status};
use crate::memory::Buffer;
use crate::reaper::MayBlock;
use crate::stream::{Stream, StreamOptions};

/// A kernel in PTX, which every GPU since 7.0 takes, so that no compiler is needed: it lasts for some time, then fails if
/// it is asked to: `rstream_work(u64 nanoseconds, u32 code)`, for `cuModuleLoadData`. softcuda has a kernel of the same
/// name.
pub const KERNEL: &CStr = c"\
.version 7.0
.target sm_70
.address_size 64
.visible .entry rstream_work(.param .u64 nanoseconds, .param .u32 code)
{
    .reg .u64 start, now, passed, limit, address;
    .reg .u32 value;
    .reg .pred more, good;
    ld.param.u64 limit, [nanoseconds];
    ld.param.u32 value, [code];
    mov.u64 start, %globaltimer;
again:
    mov.u64 now, %globaltimer;
    sub.u64 passed, now, start;
    setp.lt.u64 more, passed, limit;
    @more bra again;
    setp.eq.u32 good, value, 0;
    @good bra done;
    mov.u64 address, 16;
    st.global.u32 [address], value;
done:
    ret;
}
";

/// The kernel on the device of `stream`, loaded and run once by the first call. Loading waits for all work of the device,
/// so it has to come before anything that holds a stream.
fn kernel(api: &Api<'_>, device: Device) -> Result<CUfunction> {
    static LOADED: Mutex<Vec<(Device, usize)>> = Mutex::new(Vec::new());
    let mut loaded = LOADED.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(&(_, function)) = loaded.iter().find(|(of, _)| *of == device) {
        return Ok(function as CUfunction);
    }
    let mut module: CUmodule = ptr::null_mut();
    let mut function: CUfunction = ptr::null_mut();
    {
        let _bound = device.bind(api)?;
        let _may_block = MayBlock::enter();
        // SAFETY: each call writes one handle; image and name end in NUL. The module is never unloaded.
        unsafe {
            device.driver().cuModuleLoadData(&raw mut module, KERNEL.as_ptr().cast())?;
            device.driver().cuModuleGetFunction(&raw mut function, module, c"rstream_work".as_ptr())?;
        }
    }
    let first = Stream::new(api, device, StreamOptions::default())?;
    launch(api, &first, function, 0, 0)?;
    first.synchronize(api, None, &mut || false)?;
    loaded.push((device, function as usize));
    Ok(function)
}

fn launch(api: &Api<'_>, stream: &Stream, function: CUfunction, nanoseconds: u64, code: u32) -> Result<()> {
    let ready = stream.capturable(api)?;
    let (mut nanoseconds, mut code) = (nanoseconds, code);
    let mut arguments: [*mut c_void; 2] = [(&raw mut nanoseconds).cast(), (&raw mut code).cast()];
    let (parameters, none) = (arguments.as_mut_ptr(), ptr::null_mut());
    // SAFETY: the function is the kernel above, which takes these two arguments; they are read by the call.
    unsafe { stream.device().driver().cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, ready.handle(), parameters, none) }
}

/// Queues device work that lasts for `duration`; captured, a kernel node.
///
/// # Errors
/// What the driver answers.
pub fn spin(api: &Api<'_>, stream: &Stream, duration: Duration) -> Result<()> {
    let nanoseconds = u64::try_from(duration.as_nanos())
        .map_err(|_| Error::invalid(format!("{} s are more than 584 years", duration.as_secs())))?;
    launch(api, stream, kernel(api, stream.device())?, nanoseconds, 0)
}

/// Queues work that fails with `code`, which loses the context of the device for the rest of the process.
///
/// # Errors
/// [`Error::InvalidValue`] for a code that is not sticky, and for another than 700 (`CUDA_ERROR_ILLEGAL_ADDRESS`) on a
/// GPU; what the driver answers.
pub fn fault(api: &Api<'_>, stream: &Stream, code: u32) -> Result<()> {
    let status = Status::new(code);
    if !status.sticky() {
        return Err(Error::invalid(format!("{code} is not the code of a device fault")));
    }
    if !stream.device().is_software() && status != Status::ILLEGAL_ADDRESS {
        return Err(Error::invalid(format!("only code 700 can be caused on a GPU, not {code}")));
    }
    launch(api, stream, kernel(api, stream.device())?, 0, code)
}

/// A stream that waits until this is released or dropped.
pub struct Hold {
    word: Buffer,
}

impl std::fmt::Debug for Hold {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Hold").finish_non_exhaustive()
    }
}

/// Makes `stream` wait, by a wait on memory (`cuStreamWaitValue64`), until the [`Hold`] is released.
///
/// # Errors
/// What the driver answers: [`Status::NOT_SUPPORTED`] on a device without 64-bit stream memory operations.
pub fn hold(api: &Api<'_>, stream: &Stream) -> Result<Hold> {
    const AT_LEAST: u32 = 0;
    kernel(api, stream.device())?;
    let word = Buffer::pinned(api, stream.device(), size_of::<AtomicU64>())?;
    let hold = Hold { word };
    hold.flag().store(0, Ordering::Release);
    let ready = stream.ready(api, "be held", "Hold it before the capture begins")?;
    // SAFETY: the stream is alive; the word is, until the stream has passed the wait.
    unsafe { stream.device().driver().cuStreamWaitValue64_v2(ready.handle(), hold.word.ptr(), 1, AT_LEAST) }?;
    ready.keep(Box::new(hold.word.clone()));
    Ok(hold)
}

impl Hold {
    fn flag(&self) -> &AtomicU64 {
        // SAFETY: the buffer is pinned host memory of this size, aligned by the driver, and lives as long as `self`.
        // The device only reads it.
        unsafe { AtomicU64::from_ptr(self.word.ptr() as *mut u64) }
    }

    /// Lets the stream go on. Calls no driver function, so it may be called anywhere.
    pub fn release(&self) {
        self.flag().store(1, Ordering::Release);
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        self.release();
    }
}

/// One call of a function of the software driver that will fail. Dropped, it is taken back.
#[derive(Debug)]
pub struct Injection(softcuda::control::InjectionId);

/// Makes the `nth` call from now of `function` (the driver's symbol, `"cuStreamAddCallback"`), on any software device,
/// answer `code` and do nothing else.
///
/// # Errors
/// [`Error::InvalidValue`] for a function that the software driver does not have, for the code 0, and for `nth` 0.
pub fn inject(function: &str, code: u32, nth: u32) -> Result<Injection> {
    // Started first, so that only what the caller does is struck.
    Driver::soft();
    if !softcuda::control::known_function(function) {
        return Err(Error::invalid(format!("the software driver has no function {function:?}")));
    }
    if code == 0 || nth == 0 {
        return Err(Error::invalid(format!("code {code} and nth {nth}: both have to be at least 1")));
    }
    Ok(Injection(softcuda::control::inject(function, code, nth)))
}

impl Injection {
    /// Whether the call that fails has been made.
    #[must_use]
    pub fn is_used(&self) -> bool {
        !softcuda::control::is_pending(self.0)
    }
}

impl Drop for Injection {
    fn drop(&mut self) {
        softcuda::control::clear(self.0);
    }
}
