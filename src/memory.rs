//! Buffers: pinned, managed and device memory that outlives the queued work that uses it.

use std::any::Any;
use std::ffi::{c_int, c_uint, c_void};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cudarc::driver::sys::{CUpointer_attribute as PointerAttribute, CUstream};
use rustc_hash::{FxBuildHasher, FxHashMap};

use crate::api::Api;
use crate::device::Device;
use crate::driver::{Driver, is_forked_child};
use crate::error::{Error, Result, Status};
use crate::event::{Outlook, RawEvent};
use crate::reaper::{self, MayBlock, Relaxed};
use crate::stream::Stream;

/// Where the memory of a [`Buffer`] is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum BufferKind {
    /// Host memory that the device reaches directly (`cuMemHostAlloc`, portable and mapped).
    Pinned,
    /// Memory that moves between host and device on demand (`cuMemAllocManaged`).
    Managed,
    /// Memory of the device (`cuMemAlloc`); the host cannot touch it.
    Device,
}

/// To whom managed memory belongs at first (`CUmemAttach_flags`).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub enum ManagedAttach {
    /// Any stream on any device may use it.
    #[default]
    Global,
    /// No stream of a device without concurrent managed access uses it.
    Host,
}

/// To whom managed memory belongs from a point of a stream on (`CUmemAttach_flags`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Attach {
    /// To any stream on any device.
    Global = 1,
    /// To no stream of a device without concurrent managed access.
    Host = 2,
    /// To this stream alone.
    Single = 4,
}

/// What a block of memory was allocated as. Blocks of one class serve each other's buffers.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct Class {
    device: Device,
    kind: BufferKind,
    /// Of managed memory.
    attach: ManagedAttach,
    /// The size of the block.
    bytes: usize,
}

impl Class {
    const SMALLEST: usize = 512;

    /// Sizes are rounded up by less than an eighth, so that blocks fit one another's buffers.
    fn new(device: Device, kind: BufferKind, attach: ManagedAttach, len: usize) -> Class {
        let step = (len.checked_next_power_of_two().unwrap_or(1 << 63) / 8).max(Class::SMALLEST);
        Class { device, kind, attach, bytes: len.div_ceil(step).saturating_mul(step) }
    }

    /// Puts a block of this class that nobody uses into the cache.
    fn put_back(self, address: u64) {
        cache().entry(self).or_default().push(address);
    }

    /// Puts a block of this class that nobody uses into the cache, once it belongs to whom it belonged at first: done by
    /// the background thread, on a stream of its own.
    fn put_back_attached(self, address: u64) {
        let mut changed: Option<RawEvent> = None;
        reaper::release_when(self.device, move || {
            if changed.is_none() {
                changed = self.attach_as_at_first(address);
            }
            // A block whose association cannot be changed belongs to a context that is lost.
            let done = changed.as_ref().is_none_or(|event| event.outlook() != Outlook::Pending);
            if done {
                self.put_back(address);
                changed.take().into_iter().for_each(|event| self.device.give_event_back(event));
            }
            done
        });
    }

    /// The event that is reached when it is done; `None` when it could not be. The context is current.
    fn attach_as_at_first(self, address: u64) -> Option<RawEvent> {
        const NON_BLOCKING: c_uint = 1;
        let driver = self.device.driver();
        let flags = match self.attach {
            ManagedAttach::Global => Attach::Global,
            ManagedAttach::Host => Attach::Host,
        };
        let _may_block = MayBlock::enter();
        let mut stream = std::ptr::null_mut();
        // SAFETY: the stream is made and destroyed here; the block is managed memory that nobody uses.
        unsafe {
            driver.cuStreamCreate(&raw mut stream, NON_BLOCKING).ok()?;
            let attached = driver.cuStreamAttachMemAsync(stream, address, 0, flags as c_uint);
            let event = attached.and_then(|()| self.device.take_event());
            let recorded = event.and_then(|event| driver.cuEventRecord(event.handle(), stream).map(|()| event));
            drop(driver.cuStreamDestroy_v2(stream));
            recorded.ok()
        }
    }

    /// Asks the driver for a block.
    fn allocate(self, api: &Api<'_>) -> Result<u64> {
        /// `CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP`: usable by every context.
        const PORTABLE_AND_MAPPED: c_uint = 3;
        let _bound = self.device.bind(api)?;
        let driver = self.device.driver();
        // An allocation is no part of anybody's capture, so it must not break one.
        let _relaxed = Relaxed::enter(driver);
        let (mut address, mut host) = (0_u64, std::ptr::null_mut::<c_void>());
        // SAFETY: each call writes one address.
        unsafe {
            match (self.kind, self.attach) {
                (BufferKind::Pinned, _) => {
                    driver.cuMemHostAlloc(&raw mut host, self.bytes, PORTABLE_AND_MAPPED)?;
                    address = host as u64;
                }
                (BufferKind::Managed, ManagedAttach::Global) => {
                    driver.cuMemAllocManaged(&raw mut address, self.bytes, 1)?;
                }
                (BufferKind::Managed, ManagedAttach::Host) => {
                    driver.cuMemAllocManaged(&raw mut address, self.bytes, 2)?;
                }
                (BufferKind::Device, _) => driver.cuMemAlloc_v2(&raw mut address, self.bytes)?,
            }
        }
        Ok(address)
    }
}

/// Blocks that no buffer uses. They are kept to be used again, as other libraries on CUDA do it, because the driver's
/// `cuMemFree` waits for every stream of the context, callbacks and waits on memory included, and makes other threads'
/// calls wait meanwhile: freeing at any moment would be a deadlock with a callback that waits for one of them.
static CACHE: Mutex<FxHashMap<Class, Vec<u64>>> = Mutex::new(FxHashMap::with_hasher(FxBuildHasher));

fn cache() -> MutexGuard<'static, FxHashMap<Class, Vec<u64>>> {
    // Nothing foreign runs under the lock, so a poisoned one still guards a sound state.
    CACHE.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Device {
    /// Gives memory that dropped buffers left in rstream's cache back to the driver (`cuMemFree`, `cuMemFreeHost`), and
    /// returns its size in bytes.
    ///
    /// The driver waits for all work of the device that is queued, and lets other threads' calls wait meanwhile.
    ///
    /// # Errors
    /// What the driver answers.
    pub fn free_cached_memory(self, api: &Api<'_>) -> Result<usize> {
        let _bound = self.bind(api)?;
        let driver = self.driver();
        let _relaxed = Relaxed::enter(driver);
        let _may_block = MayBlock::enter();
        let classes: Vec<(Class, Vec<u64>)> = cache().extract_if(|class, _| class.device == self).collect();
        let (mut bytes, mut failed) = (0, None);
        for (class, addresses) in classes {
            for address in addresses {
                // SAFETY: the block was allocated as its class says, no buffer uses it, and it left the cache.
                let freed = unsafe {
                    match class.kind {
                        BufferKind::Pinned => driver.cuMemFreeHost(address as *mut c_void),
                        BufferKind::Managed | BufferKind::Device => driver.cuMemFree_v2(address),
                    }
                };
                match freed {
                    Ok(()) => bytes += class.bytes,
                    Err(error) => {
                        failed.get_or_insert(error);
                        class.put_back(address);
                    }
                }
            }
        }
        failed.map_or(Ok(bytes), Err)
    }
}

struct Inner {
    class: Class,
    /// The address, for host and device alike under unified addressing; 0 for no bytes.
    address: u64,
    len: usize,
    /// Managed memory: its association was changed.
    attached: AtomicBool,
}

impl Drop for Inner {
    fn drop(&mut self) {
        // This was the last handle, and queued work keeps one: nothing uses the block any more.
        // In a forked child the memory is the parent's, whose threads may have held the lock.
        if self.len == 0 || is_forked_child() {
            return;
        }
        if *self.attached.get_mut() {
            self.class.put_back_attached(self.address);
        } else {
            self.class.put_back(self.address);
        }
    }
}

/// A block of memory, a shared handle. Its contents are not initialized.
///
/// When the last clone is gone and queued work that uses it is done, the memory goes into a cache for later buffers;
/// [`Device::free_cached_memory`] gives it back to the driver. Work that another library queued must not use it any more
/// by then.
#[derive(Clone)]
pub struct Buffer {
    inner: Arc<Inner>,
}

impl std::fmt::Debug for Buffer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Buffer")
            .field("kind", &self.kind())
            .field("device", &self.device())
            .field("len", &self.len())
            .finish_non_exhaustive()
    }
}

impl Buffer {
    /// `len` bytes of pinned host memory (`cuMemHostAlloc`).
    ///
    /// # Errors
    /// [`Status::OUT_OF_MEMORY`].
    pub fn pinned(api: &Api<'_>, device: Device, len: usize) -> Result<Buffer> {
        Buffer::new(api, device, BufferKind::Pinned, ManagedAttach::Global, len)
    }

    /// `len` bytes of managed memory (`cuMemAllocManaged`).
    ///
    /// # Errors
    /// [`Status::OUT_OF_MEMORY`]; [`Status::NOT_SUPPORTED`] on a device without managed memory.
    pub fn managed(api: &Api<'_>, device: Device, len: usize, attach: ManagedAttach) -> Result<Buffer> {
        Buffer::new(api, device, BufferKind::Managed, attach, len)
    }

    /// `len` bytes of device memory (`cuMemAlloc`).
    ///
    /// # Errors
    /// [`Status::OUT_OF_MEMORY`].
    pub fn device_memory(api: &Api<'_>, device: Device, len: usize) -> Result<Buffer> {
        Buffer::new(api, device, BufferKind::Device, ManagedAttach::Global, len)
    }

    fn new(api: &Api<'_>, device: Device, kind: BufferKind, attach: ManagedAttach, len: usize) -> Result<Buffer> {
        let class = Class::new(device, kind, attach, len);
        let mut address = 0;
        if len > 0 {
            let cached = cache().get_mut(&class).and_then(Vec::pop);
            address = match cached {
                Some(address) => address,
                None => class
                    .allocate(api)
                    .or_else(|error| {
                        // What the cache holds may be what is missing.
                        if error.status() == Status::OUT_OF_MEMORY && device.free_cached_memory(api)? > 0 {
                            class.allocate(api)
                        } else {
                            Err(error)
                        }
                    })
                    .map_err(|error| match error {
                        Error::Driver { status: Status::OUT_OF_MEMORY, function } => {
                            Error::OutOfMemory { function, bytes: len }
                        }
                        other => other,
                    })?,
            };
        }
        Ok(Buffer { inner: Arc::new(Inner { class, address, len, attached: AtomicBool::new(false) }) })
    }

    /// Whether this is its only handle, and no queued work of rstream's uses it.
    pub(crate) fn is_unique(&self) -> bool {
        Arc::strong_count(&self.inner) == 1
    }

    /// The address, of host and device alike; 0 when it has no bytes.
    #[must_use]
    pub fn ptr(&self) -> u64 {
        self.inner.address
    }

    /// The number of bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.inner.len
    }

    /// Whether it has no bytes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.inner.len == 0
    }

    /// Where the memory is.
    #[must_use]
    pub fn kind(&self) -> BufferKind {
        self.inner.class.kind
    }

    /// The device that it was allocated for.
    #[must_use]
    pub fn device(&self) -> Device {
        self.inner.class.device
    }
}

/// What is repeated over memory by [`Stream::fill`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pattern {
    /// One byte (`cuMemsetD8Async`).
    U8(u8),
    /// Two bytes (`cuMemsetD16Async`); the address has to be even.
    U16(u16),
    /// Four bytes (`cuMemsetD32Async`); the address has to be a multiple of four.
    U32(u32),
}

impl Pattern {
    /// Its length in bytes.
    #[must_use]
    pub fn len(self) -> usize {
        match self {
            Pattern::U8(_) => 1,
            Pattern::U16(_) => 2,
            Pattern::U32(_) => 4,
        }
    }

    /// Queues or captures that it is written `count` times from `dst` on.
    ///
    /// # Safety
    /// The stream is alive, and the range is memory that the device may write.
    pub(crate) unsafe fn write(self, driver: &Driver, stream: CUstream, dst: u64, count: usize) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe {
            match self {
                Pattern::U8(value) => driver.cuMemsetD8Async(dst, value, count, stream),
                Pattern::U16(value) => driver.cuMemsetD16Async(dst, value, count, stream),
                Pattern::U32(value) => driver.cuMemsetD32Async(dst, value, count, stream),
            }
        }
    }

    /// How often it fits into `bytes`.
    pub(crate) fn times(self, bytes: usize) -> Result<usize> {
        if bytes.is_multiple_of(self.len()) {
            Ok(bytes / self.len())
        } else {
            Err(Error::invalid(format!("{bytes} bytes cannot be filled with {} each", self.len())))
        }
    }

    /// Never: a pattern has one, two or four bytes.
    #[must_use]
    pub fn is_empty(self) -> bool {
        false
    }
}

/// A copy needs two sides of one size.
pub(crate) fn same_size(dst: &Buffer, src: &Buffer) -> Result<()> {
    if dst.len() == src.len() {
        return Ok(());
    }
    Err(Error::invalid(format!("a copy from {} bytes to {} bytes", src.len(), dst.len())))
}

impl Stream {
    /// Whether work on this stream may use `buffer`: memory of another driver is nothing to this one, and device memory is
    /// its device's.
    pub(crate) fn may_use(&self, buffer: &Buffer) -> bool {
        let (mine, its) = (self.device(), buffer.device());
        its.kind() == mine.kind() && (buffer.kind() != BufferKind::Device || its == mine)
    }

    pub(crate) fn check_copy(&self, dst: &Buffer, src: &Buffer) -> Result<()> {
        same_size(dst, src)?;
        self.refuse_foreign(dst)?;
        self.refuse_foreign(src)
    }

    fn refuse_foreign(&self, buffer: &Buffer) -> Result<()> {
        if self.may_use(buffer) {
            return Ok(());
        }
        Err(Error::invalid(format!("memory of device {} on a stream of device {}", buffer.device(), self.device())))
    }

    /// Says to whom managed memory belongs from this point of the stream on (`cuStreamAttachMemAsync`): to all, to the
    /// host, or to this stream alone. The driver takes that back when the stream goes, and rstream when the memory does.
    ///
    /// On a device without concurrent managed access the host may touch the memory only while no stream that may use it
    /// has work: attached to one stream, inside that stream's callbacks. Elsewhere it is a hint.
    ///
    /// # Errors
    /// [`Error::InvalidValue`] when it is not managed memory or of another driver, and for [`Attach::Single`] on the
    /// legacy default stream; [`Error::Capture`] while the stream captures; what the driver answers.
    pub fn attach_memory(&self, api: &Api<'_>, buffer: &Buffer, attach: Attach) -> Result<()> {
        if buffer.kind() != BufferKind::Managed {
            let kind = format!("{:?}", buffer.kind()).to_lowercase();
            return Err(Error::invalid(format!("{kind} memory cannot be attached: only managed memory can")));
        }
        self.refuse_foreign(buffer)?;
        if attach == Attach::Single && self.is_legacy_default() {
            return Err(Error::invalid("memory cannot be attached to the legacy default stream alone"));
        }
        let ready = self.ready(api, "attach memory", "Attach it before the capture begins")?;
        // On another stream it would break somebody's capture (measured).
        let _relaxed = Relaxed::enter(self.device().driver());
        if buffer.is_empty() {
            return Ok(());
        }
        buffer.inner.attached.store(true, Ordering::Relaxed);
        ready.submit(Box::new(buffer.clone()), |driver, stream| {
            // SAFETY: the stream is alive, and the address that of a managed block, all of which is meant. The flag is
            // never 0, which crashes the driver (measured).
            unsafe { driver.cuStreamAttachMemAsync(stream, buffer.ptr(), 0, attach as c_uint) }
        })
    }

    /// Queues a copy of all of `src` to `dst` (`cuMemcpyAsync`). Both live until it is done; captured, as long as the graph.
    ///
    /// # Errors
    /// [`Error::InvalidValue`] when the sizes differ, and for memory of another device; what the driver answers.
    pub fn copy(&self, api: &Api<'_>, dst: &Buffer, src: &Buffer) -> Result<()> {
        self.check_copy(dst, src)?;
        // SAFETY: both buffers have that many bytes, are memory of this driver, and are kept.
        unsafe { self.copy_raw(api, dst.ptr(), src.ptr(), dst.len(), (dst.clone(), src.clone())) }
    }

    /// Queues that all of `dst` is filled with `pattern` (`cuMemsetD8Async` and its kin). `dst` lives until it is done;
    /// captured, as long as the graph.
    ///
    /// # Errors
    /// [`Error::InvalidValue`] when the pattern does not divide the size, and for memory of another device; what the
    /// driver answers.
    pub fn fill(&self, api: &Api<'_>, dst: &Buffer, pattern: Pattern) -> Result<()> {
        let count = pattern.times(dst.len())?;
        self.refuse_foreign(dst)?;
        // SAFETY: the buffer has that many bytes, is memory of this driver, and is kept.
        unsafe { self.fill_raw(api, dst.ptr(), pattern, count, dst.clone()) }
    }

    /// Queues a copy between any two addresses (`cuMemcpyAsync`): host, pinned, managed or device memory. `keep` is
    /// dropped, on a background thread, when the stream has passed the copy. Captured, the copy is a node, whose graph
    /// owns `keep`.
    ///
    /// # Safety
    /// Both ranges are valid, and nobody else uses them in a conflicting way, until the stream has passed the copy, or
    /// while a launch of the graph runs it; `keep` is how to see to the first.
    ///
    /// # Errors
    /// What the driver answers. Nothing is queued then.
    pub unsafe fn copy_raw(
        &self,
        api: &Api<'_>,
        dst: u64,
        src: u64,
        bytes: usize,
        keep: impl Any + Send,
    ) -> Result<()> {
        let ready = self.capturable(api)?;
        if bytes == 0 {
            return Ok(());
        }
        ready.submit(Box::new(keep), |driver, stream| {
            // SAFETY: the stream is alive; the ranges are the caller's promise.
            unsafe { driver.cuMemcpyAsync(dst, src, bytes, stream) }
        })
    }

    /// Queues that `count` patterns are written from `dst` on. `keep` is dropped, on a background thread, when the
    /// stream has passed this.
    ///
    /// # Safety
    /// As [`Stream::copy_raw`].
    ///
    /// # Errors
    /// As [`Stream::copy_raw`].
    pub unsafe fn fill_raw(
        &self,
        api: &Api<'_>,
        dst: u64,
        pattern: Pattern,
        count: usize,
        keep: impl Any + Send,
    ) -> Result<()> {
        let ready = self.capturable(api)?;
        if count == 0 {
            return Ok(());
        }
        ready
            .submit(Box::new(keep), |driver, stream| {
                // SAFETY: the stream is alive; the range is the caller's promise.
                unsafe { pattern.write(driver, stream, dst, count) }
            })
            .map_err(|error| unfillable(api, self.device(), dst, error))
    }
}

/// Says what the driver's refusal of a fill was about, where it is that the address is none of its own.
pub(crate) fn unfillable(api: &Api<'_>, device: Device, dst: u64, error: Error) -> Error {
    if error.status() != Status::INVALID_VALUE {
        return error;
    }
    let _relaxed = Relaxed::enter(device.driver());
    match pointer_info(api, device, dst) {
        Ok(None) => Error::invalid(
            "dst: plain (pageable) host memory, such as NumPy's own, cannot be filled by the device: use pinned, managed \
             or device memory",
        ),
        _ => error,
    }
}

/// What the driver knows about an address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct PointerInfo {
    /// Pinned, managed or device memory.
    pub kind: BufferKind,
    /// The ordinal of the device that it belongs to.
    pub ordinal: u32,
}

/// What the driver of `device` knows about `address` (`cuPointerGetAttribute`); `None` for plain host memory.
///
/// # Errors
/// What the driver answers, except that it does not know the address.
pub fn pointer_info(api: &Api<'_>, device: Device, address: u64) -> Result<Option<PointerInfo>> {
    const MEMORY_TYPE_HOST: c_uint = 1;
    let _bound = device.bind(api)?;
    let driver = device.driver();
    let (mut memory_type, mut managed, mut ordinal) = (0 as c_uint, 0 as c_uint, 0 as c_int);
    // SAFETY: each attribute is an int (IS_MANAGED a bool, for which the driver writes no more than an int).
    let known = unsafe {
        let ask = |data: *mut c_void, attribute: PointerAttribute| {
            driver.cuPointerGetAttribute(data, attribute as u32, address)
        };
        ask((&raw mut memory_type).cast(), PointerAttribute::CU_POINTER_ATTRIBUTE_MEMORY_TYPE)
            .and_then(|()| ask((&raw mut managed).cast(), PointerAttribute::CU_POINTER_ATTRIBUTE_IS_MANAGED))
            .and_then(|()| ask((&raw mut ordinal).cast(), PointerAttribute::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL))
    };
    match known {
        Err(error) if error.status() == Status::INVALID_VALUE => return Ok(None),
        other => other?,
    }
    let kind = match (managed, memory_type) {
        (1.., _) => BufferKind::Managed,
        (0, MEMORY_TYPE_HOST) => BufferKind::Pinned,
        (0, _) => BufferKind::Device,
    };
    Ok(Some(PointerInfo { kind, ordinal: u32::try_from(ordinal).unwrap_or(0) }))
}
