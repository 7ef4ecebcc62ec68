//! Devices and their primary contexts.

use std::ffi::{c_char, c_int};
use std::fmt;
use std::hash::{Hash, Hasher};
use std::ptr;
use std::sync::{Mutex, PoisonError};

use cudarc::driver::sys::{CUcontext, CUdevice_attribute as Attribute};
use rustc_hash::{FxBuildHasher, FxHashMap};

use crate::api::Api;
use crate::driver::{Driver, Kind};
use crate::error::{Error, Result, Status};
use crate::event::RawEvent;
use crate::reaper::MayBlock;

/// The environment variable that names the default device.
pub const DEVICE_VARIABLE: &str = "RSTREAM_DEVICE";

struct Inner {
    driver: &'static Driver,
    ordinal: u32,
    handle: c_int,
    /// The primary context, retained for the life of the process.
    context: CUcontext,
    name: String,
    compute_capability: (i32, i32),
    priority_range: (i32, i32),
    /// Streams can signal by memory.
    memory_signal: bool,
    /// Events without timing that nobody uses at the moment.
    events: Mutex<Vec<RawEvent>>,
    /// How often streams may still be reserved before the first of Python's: no more once it has worked.
    #[cfg(feature = "python")]
    reservations: Mutex<u32>,
}

// SAFETY: a context handle may be used from any thread (driver reference 3.15); everything else is plain data or locked.
unsafe impl Send for Inner {}
// SAFETY: as for Send.
unsafe impl Sync for Inner {}

/// A GPU, or a software device. Cheap to copy; two are equal when they are the same device.
///
/// The first use of a device retains its primary context (`cuDevicePrimaryCtxRetain`), the one that the CUDA runtime,
/// PyTorch and CuPy use. It is kept for the life of the process: giving a context up while a stream waits would hang.
#[derive(Clone, Copy)]
pub struct Device(&'static Inner);

impl PartialEq for Device {
    fn eq(&self, other: &Device) -> bool {
        ptr::eq(self.0, other.0)
    }
}

impl Eq for Device {}

impl Hash for Device {
    fn hash<H: Hasher>(&self, state: &mut H) {
        (self.kind(), self.0.ordinal).hash(state);
    }
}

impl fmt::Display for Device {
    /// As [`Device::parse`] reads it: `0`, `soft:0`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.kind() {
            Kind::Cuda => write!(f, "{}", self.0.ordinal),
            Kind::Soft => write!(f, "soft:{}", self.0.ordinal),
        }
    }
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Device({self}, {:?})", self.0.name)
    }
}

macro_rules! attributes {
    ($($name:literal => $attribute:ident),* $(,)?) => {
        &[$(($name, Attribute::$attribute as u32)),*]
    };
}

/// The attributes that matter to streams and to sizing work for a device (`CUdevice_attribute`).
const ATTRIBUTES: &[(&str, u32)] = attributes! {
    "multiprocessor_count" => CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT,
    "warp_size" => CU_DEVICE_ATTRIBUTE_WARP_SIZE,
    "max_threads_per_block" => CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK,
    "clock_rate" => CU_DEVICE_ATTRIBUTE_CLOCK_RATE,
    "memory_clock_rate" => CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE,
    "global_memory_bus_width" => CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH,
    "l2_cache_size" => CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE,
    "async_engine_count" => CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT,
    "concurrent_kernels" => CU_DEVICE_ATTRIBUTE_CONCURRENT_KERNELS,
    "integrated" => CU_DEVICE_ATTRIBUTE_INTEGRATED,
    "unified_addressing" => CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING,
    "stream_priorities_supported" => CU_DEVICE_ATTRIBUTE_STREAM_PRIORITIES_SUPPORTED,
    "managed_memory" => CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY,
    "concurrent_managed_access" => CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS,
    "pageable_memory_access" => CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS,
    "can_flush_remote_writes" => CU_DEVICE_ATTRIBUTE_CAN_FLUSH_REMOTE_WRITES,
    "can_use_64_bit_stream_mem_ops" => CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS,
    "can_use_stream_wait_value_nor" => CU_DEVICE_ATTRIBUTE_CAN_USE_STREAM_WAIT_VALUE_NOR,
    "memory_pools_supported" => CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED,
    "max_persisting_l2_cache_size" => CU_DEVICE_ATTRIBUTE_MAX_PERSISTING_L2_CACHE_SIZE,
    "max_access_policy_window_size" => CU_DEVICE_ATTRIBUTE_MAX_ACCESS_POLICY_WINDOW_SIZE,
    "mem_sync_domain_count" => CU_DEVICE_ATTRIBUTE_MEM_SYNC_DOMAIN_COUNT,
};

impl Device {
    /// The GPU with this ordinal, as `cuDeviceGet` counts them.
    ///
    /// # Errors
    /// [`Error::NoDriver`] without a driver, [`Error::InvalidValue`] without such a GPU.
    pub fn gpu(_api: &Api<'_>, ordinal: u32) -> Result<Device> {
        Device::open(Driver::cuda()?, ordinal)
    }

    /// The software device with this ordinal. There are two, or as many as `RSTREAM_SOFT_DEVICES` says.
    ///
    /// # Errors
    /// [`Error::InvalidValue`] without such a device.
    pub fn soft(_api: &Api<'_>, ordinal: u32) -> Result<Device> {
        Device::open(Driver::soft(), ordinal)
    }

    /// The device that `text` names: `"0"` is a GPU, `"soft"` and `"soft:1"` are software devices.
    ///
    /// # Errors
    /// [`Error::InvalidValue`] for another text, and as [`Device::gpu`] and [`Device::soft`].
    pub fn parse(api: &Api<'_>, text: &str) -> Result<Device> {
        let ordinal = |digits: &str| {
            digits.parse::<u32>().map_err(|_| {
                Error::invalid(format!("no device {text:?}: expected a GPU's number, \"soft\" or \"soft:<number>\""))
            })
        };
        match text.strip_prefix("soft") {
            Some("") => Device::soft(api, 0),
            Some(rest) => Device::soft(api, ordinal(rest.strip_prefix(':').unwrap_or("?"))?),
            None => Device::gpu(api, ordinal(text)?),
        }
    }

    /// The device of the environment variable `RSTREAM_DEVICE`, else GPU 0. The software device is never chosen unasked.
    ///
    /// # Errors
    /// As [`Device::parse`]; without a driver, [`Error::NoDriver`] whose text names the software device as a way out.
    pub fn default(api: &Api<'_>) -> Result<Device> {
        match std::env::var(DEVICE_VARIABLE) {
            Ok(text) if !text.is_empty() => Device::parse(api, &text).map_err(|error| match error {
                Error::InvalidValue { what } => Error::invalid(format!("{DEVICE_VARIABLE}: {what}")),
                other => other,
            }),
            _ => Device::gpu(api, 0),
        }
    }

    /// Every device: the GPUs, if there is a driver, then the software devices.
    ///
    /// # Errors
    /// What the driver answers while a GPU is opened.
    pub fn all(_api: &Api<'_>) -> Result<Vec<Device>> {
        let drivers = Driver::cuda().into_iter().chain([Driver::soft()]);
        let mut devices = Vec::new();
        for driver in drivers {
            for ordinal in 0..count(driver)? {
                devices.push(Device::open(driver, ordinal)?);
            }
        }
        Ok(devices)
    }

    fn open(driver: &'static Driver, ordinal: u32) -> Result<Device> {
        static OPENED: Mutex<FxHashMap<(Kind, u32), &'static Inner>> =
            Mutex::new(FxHashMap::with_hasher(FxBuildHasher));
        let mut opened = OPENED.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(inner) = opened.get(&(driver.kind(), ordinal)) {
            return Ok(Device(inner));
        }
        let count = count(driver)?;
        if ordinal >= count {
            let kind = if driver.kind() == Kind::Soft { "software device" } else { "GPU" };
            return Err(Error::invalid(format!("no {kind} {ordinal}: there are {count}")));
        }
        let inner: &'static Inner = Box::leak(Box::new(Inner::new(driver, ordinal)?));
        opened.insert((driver.kind(), ordinal), inner);
        Ok(Device(inner))
    }

    /// Its number among the devices of its driver.
    #[must_use]
    pub fn ordinal(self) -> u32 {
        self.0.ordinal
    }

    /// Its driver.
    #[must_use]
    pub fn driver(self) -> &'static Driver {
        self.0.driver
    }

    /// Which driver it belongs to.
    #[must_use]
    pub fn kind(self) -> Kind {
        self.0.driver.kind()
    }

    /// Whether it is a software device.
    #[must_use]
    pub fn is_software(self) -> bool {
        self.kind() == Kind::Soft
    }

    /// The CUDA version of its driver (`cuDriverGetVersion`): 13000 is CUDA 13.0.
    #[must_use]
    pub fn driver_version(self) -> u32 {
        self.0.driver.version()
    }

    /// Its name (`cuDeviceGetName`).
    #[must_use]
    pub fn name(self) -> &'static str {
        &self.0.name
    }

    /// Its compute capability, major and minor.
    #[must_use]
    pub fn compute_capability(self) -> (i32, i32) {
        self.0.compute_capability
    }

    /// The least and the greatest priority of a stream (`cuCtxGetStreamPriorityRange`): lower numbers go first, so
    /// `(0, -5)` on a recent GPU; `(0, 0)` without priorities.
    #[must_use]
    pub fn priority_range(self) -> (i32, i32) {
        self.0.priority_range
    }

    /// The handle of its primary context (`CUcontext`).
    #[must_use]
    pub fn context_handle(self) -> usize {
        self.0.context as usize
    }

    /// The value of an attribute, by its number in `CUdevice_attribute` (`cuDeviceGetAttribute`).
    ///
    /// # Errors
    /// What the driver answers: [`Status::INVALID_VALUE`] for a number that it does not know.
    pub fn attribute(self, _api: &Api<'_>, attribute: u32) -> Result<i32> {
        self.0.attribute(attribute)
    }

    /// The attributes that matter to streams, by name. What the driver does not know is left out.
    ///
    /// # Errors
    /// What the driver answers.
    pub fn attributes(self, _api: &Api<'_>) -> Result<Vec<(&'static str, i32)>> {
        let mut known = Vec::with_capacity(ATTRIBUTES.len());
        for &(name, attribute) in ATTRIBUTES {
            match self.0.attribute(attribute) {
                Ok(value) => known.push((name, value)),
                Err(error) if error.status() == Status::INVALID_VALUE => {}
                Err(error) => return Err(error),
            }
        }
        Ok(known)
    }

    /// Whether streams can signal by memory, and the promises for managed memory in callbacks hold then too.
    pub(crate) fn has_memory_signal(self) -> bool {
        self.0.memory_signal
    }

    /// Free and total memory in bytes (`cuMemGetInfo`).
    ///
    /// # Errors
    /// What the driver answers.
    pub fn memory_info(self, api: &Api<'_>) -> Result<(usize, usize)> {
        let _bound = self.bind(api)?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: writes two sizes.
        unsafe { self.0.driver.cuMemGetInfo_v2(&raw mut free, &raw mut total) }?;
        Ok((free, total))
    }

    /// Waits for all work of the context (`cuCtxSynchronize`). Blocks in the driver: it cannot be interrupted.
    ///
    /// # Errors
    /// What the driver answers: the code of a fault, or 900 while a stream of the context captures.
    pub fn synchronize(self, api: &Api<'_>) -> Result<()> {
        let _bound = self.bind(api)?;
        let _may_block = MayBlock::enter();
        // SAFETY: the context is current.
        unsafe { self.0.driver.cuCtxSynchronize() }
    }

    /// Makes the primary context current on this thread until the guard is dropped.
    pub(crate) fn bind<'a>(self, _api: &'a Api<'_>) -> Result<Bound<'a>> {
        Bound::new(self)
    }

    /// The device's number as the driver's functions take it (`CUdevice`).
    pub(crate) fn cu_device(self) -> c_int {
        self.0.handle
    }

    /// Runs `f` with the primary context current, from where no token can be had: a drop.
    /// Without it too, when it cannot be made current: then it is gone, and `f` finds out.
    pub(crate) fn with_context<R>(self, f: impl FnOnce() -> R) -> R {
        let _bound = Bound::new(self);
        f()
    }

    /// Makes the primary context current on a thread of rstream's own, for good.
    pub(crate) fn make_current(self) -> Result<()> {
        // SAFETY: the context is retained for the life of the process.
        unsafe { self.0.driver.cuCtxSetCurrent(self.0.context) }
    }

    /// As [`Device::reserve_streams`], but not again once it has worked, or failed three times. Whoever comes meanwhile waits.
    #[cfg(feature = "python")]
    pub(crate) fn reserve_streams_once(self, api: &Api<'_>, count: usize) {
        let mut left = self.0.reservations.lock().unwrap_or_else(PoisonError::into_inner);
        if *left > 0 {
            *left = if self.reserve_streams(api, count).is_ok() { 0 } else { *left - 1 };
        }
    }

    /// An event without timing, from the pool.
    pub(crate) fn take_event(self) -> Result<RawEvent> {
        let pooled = self.0.events.lock().unwrap_or_else(PoisonError::into_inner).pop();
        pooled.map_or_else(|| RawEvent::new(self, RawEvent::DISABLE_TIMING), Ok)
    }

    /// Gives an event of [`Device::take_event`] back, to be recorded anew.
    pub(crate) fn give_event_back(self, event: RawEvent) {
        self.0.events.lock().unwrap_or_else(PoisonError::into_inner).push(event);
    }
}

fn count(driver: &Driver) -> Result<u32> {
    let mut count: c_int = 0;
    // SAFETY: writes one int.
    unsafe { driver.cuDeviceGetCount(&raw mut count) }?;
    Ok(u32::try_from(count).unwrap_or(0))
}

impl Inner {
    fn new(driver: &'static Driver, ordinal: u32) -> Result<Inner> {
        let cu_device = c_int::try_from(ordinal).expect("below the count, which is an int");
        let mut inner = Inner {
            driver,
            ordinal,
            handle: 0,
            context: ptr::null_mut(),
            name: String::new(),
            compute_capability: (0, 0),
            priority_range: (0, 0),
            memory_signal: false,
            events: Mutex::new(Vec::new()),
            #[cfg(feature = "python")]
            reservations: Mutex::new(3),
        };
        let mut name = [0_u8; 256];
        // SAFETY: each call writes what it is named for; `name` has the length that is passed.
        unsafe {
            driver.cuDeviceGet(&raw mut inner.handle, cu_device)?;
            driver.cuDeviceGetName(name.as_mut_ptr().cast::<c_char>(), 256, inner.handle)?;
            driver.cuDevicePrimaryCtxRetain(&raw mut inner.context, inner.handle)?;
        }
        inner.name = String::from_utf8_lossy(name.split(|&byte| byte == 0).next().unwrap_or(&[])).into_owned();
        inner.compute_capability = (
            inner.attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR as u32)?,
            inner.attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR as u32)?,
        );
        inner.memory_signal = inner.attribute(Attribute::CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS as u32)?
            != 0
            && inner.attribute(Attribute::CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS as u32)? != 0;
        let before = current(driver)?;
        let (mut least, mut greatest) = (0, 0);
        // SAFETY: the context was just retained; two ints are written; the context before is made current again.
        unsafe {
            driver.cuCtxSetCurrent(inner.context)?;
            let range = driver.cuCtxGetStreamPriorityRange(&raw mut least, &raw mut greatest);
            driver.cuCtxSetCurrent(before)?;
            range?;
        }
        inner.priority_range = (least, greatest);
        Ok(inner)
    }

    fn attribute(&self, attribute: u32) -> Result<i32> {
        let mut value: c_int = 0;
        // SAFETY: writes one int.
        unsafe { self.driver.cuDeviceGetAttribute(&raw mut value, attribute, self.handle) }?;
        Ok(value)
    }
}

fn current(driver: &Driver) -> Result<CUcontext> {
    let mut context: CUcontext = ptr::null_mut();
    // SAFETY: writes one handle.
    unsafe { driver.cuCtxGetCurrent(&raw mut context) }?;
    Ok(context)
}

/// The device's context is current; when this is dropped, the one before is again.
pub(crate) struct Bound<'a> {
    driver: &'static Driver,
    /// `None`: it was current already.
    before: Option<CUcontext>,
    /// A guard of this thread, like the token that it came from.
    thread: std::marker::PhantomData<&'a Api<'a>>,
}

impl Bound<'_> {
    fn new(device: Device) -> Result<Self> {
        let driver = device.driver();
        let before = current(driver)?;
        let changed = before != device.0.context;
        if changed {
            device.make_current()?;
        }
        Ok(Bound { driver, before: changed.then_some(before), thread: std::marker::PhantomData })
    }
}

impl Drop for Bound<'_> {
    fn drop(&mut self) {
        if let Some(before) = self.before {
            // SAFETY: the context was current on this thread, so it is its owner's duty to keep it alive. A failure
            // leaves the device's own context current, which is harmless; there is nobody to tell in a drop.
            drop(unsafe { self.driver.cuCtxSetCurrent(before) });
        }
    }
}
