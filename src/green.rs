//! Green contexts: streams that run on a part of a device's multiprocessors.

use std::ptr;
use std::sync::Arc;

use cudarc::driver::sys::{CUdevResource, CUdevResourceDesc, CUdevResourceType, CUgreenCtx, CUstream};

use crate::api::Api;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::reaper::{self, MayBlock, Relaxed};
use crate::stream::Stream;

/// The handle, which this owns.
struct RawGreen {
    device: Device,
    handle: CUgreenCtx,
}

// SAFETY: the handle is used to make streams and to be destroyed only, which any thread may do.
unsafe impl Send for RawGreen {}
// SAFETY: as for Send.
unsafe impl Sync for RawGreen {}

impl Drop for RawGreen {
    fn drop(&mut self) {
        let (device, handle) = (self.device, self.handle as usize);
        // Behind the streams in it, which hold this: after it their handles would be dead (driver reference 5.14).
        reaper::release(device, move || {
            // SAFETY: this was the owner.
            drop(unsafe { device.driver().cuGreenCtxDestroy(handle as CUgreenCtx) });
        });
    }
}

/// A part of a device's multiprocessors, with streams of its own (`CUgreenCtx`). A cheap, shared handle.
///
/// It lives as long as a handle to it or a stream made in it. Streams share the memory of the device's primary context.
#[derive(Clone)]
pub struct GreenContext {
    raw: Arc<RawGreen>,
    multiprocessors: u32,
}

impl std::fmt::Debug for GreenContext {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("GreenContext")
            .field("device", &self.raw.device)
            .field("multiprocessors", &self.multiprocessors)
            .finish_non_exhaustive()
    }
}

impl GreenContext {
    /// A green context with at least `multiprocessors` of `device` (`cuDeviceGetDevResource`,
    /// `cuDevSmResourceSplitByCount`, `cuGreenCtxCreate`). The driver rounds the number up, on most devices to a multiple
    /// of 8.
    ///
    /// # Errors
    /// [`Error::InvalidValue`] for 0, and for more than the device has; [`Error::DriverTooOld`] before CUDA 12.5; what the
    /// driver answers.
    pub fn new(api: &Api<'_>, device: Device, multiprocessors: u32) -> Result<GreenContext> {
        /// `CU_GREEN_CTX_DEFAULT_STREAM`, without which the driver makes none.
        const DEFAULT_STREAM: u32 = 1;
        let _bound = device.bind(api)?;
        let driver = device.driver();
        // It is no part of anybody's capture, so it must not break one.
        let _relaxed = Relaxed::enter(driver);
        let mut all = std::mem::MaybeUninit::<CUdevResource>::zeroed();
        let mut part = std::mem::MaybeUninit::<CUdevResource>::zeroed();
        let mut groups = 1_u32;
        let sm = CUdevResourceType::CU_DEV_RESOURCE_TYPE_SM as u32;
        // SAFETY: the structure is the driver's, zeroed, and written by the call; the count is read from where every
        // version has it. One group is asked for, so the array of results has one place.
        let (there, given) = unsafe {
            driver.cuDeviceGetDevResource(device.cu_device(), all.as_mut_ptr(), sm)?;
            let there = (*all.as_ptr()).__bindgen_anon_1.sm.smCount;
            if multiprocessors == 0 || multiprocessors > there {
                return Err(Error::invalid(format!(
                    "{multiprocessors} multiprocessors of device {device}: expected 1 to {there}"
                )));
            }
            driver.cuDevSmResourceSplitByCount(
                part.as_mut_ptr(),
                &raw mut groups,
                all.as_ptr(),
                ptr::null_mut(),
                0,
                multiprocessors,
            )?;
            (there, (*part.as_ptr()).__bindgen_anon_1.sm.smCount)
        };
        if groups == 0 {
            return Err(Error::invalid(format!(
                "{multiprocessors} of {there} multiprocessors of device {device} cannot be split off"
            )));
        }
        let mut desc: CUdevResourceDesc = ptr::null_mut();
        let mut handle: CUgreenCtx = ptr::null_mut();
        // SAFETY: the resource was written above; each call writes one handle.
        unsafe {
            driver.cuDevResourceGenerateDesc(&raw mut desc, part.as_mut_ptr(), 1)?;
            driver.cuGreenCtxCreate(&raw mut handle, desc, device.cu_device(), DEFAULT_STREAM)?;
        }
        Ok(GreenContext { raw: Arc::new(RawGreen { device, handle }), multiprocessors: given })
    }

    /// A new stream in it (`cuGreenCtxStreamCreate`), which is non-blocking always.
    ///
    /// # Errors
    /// What the driver answers.
    pub fn create_stream(&self, api: &Api<'_>, priority: i32) -> Result<Stream> {
        const NON_BLOCKING: u32 = 1;
        let device = self.raw.device;
        let _bound = device.bind(api)?;
        let _may_block = MayBlock::enter();
        let mut stream: CUstream = ptr::null_mut();
        // SAFETY: the green context is alive; writes one handle.
        unsafe {
            device.driver().cuGreenCtxStreamCreate(&raw mut stream, self.raw.handle, NON_BLOCKING, priority)?;
        }
        Stream::own(api, device, stream, Box::new(Arc::clone(&self.raw)))
    }

    /// Its device.
    #[must_use]
    pub fn device(&self) -> Device {
        self.raw.device
    }

    /// How many multiprocessors it has.
    #[must_use]
    pub fn multiprocessors(&self) -> u32 {
        self.multiprocessors
    }

    /// Its handle (`CUgreenCtx`), for other libraries. It is valid as long as this or a stream made in it.
    #[must_use]
    pub fn handle(&self) -> usize {
        self.raw.handle as usize
    }
}
