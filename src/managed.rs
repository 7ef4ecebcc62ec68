//! Managed memory that belongs to a stream: the host may touch it inside that stream's callbacks, and nowhere else.

use std::marker::PhantomData;
use std::time::Duration;

use bytemuck::Pod;

use crate::api::Api;
use crate::completion::Completion;
use crate::error::{Error, Result, Status};
use crate::memory::{Attach, Buffer, BufferKind, Pattern};
use crate::stream::{Ready, Stream};

/// Managed memory attached to a stream (`cuStreamAttachMemAsync` with `CU_MEM_ATTACH_SINGLE`), as elements of `T`.
///
/// Only work of that stream uses it. The host reaches it inside a callback of the stream ([`Attached::with`]), while the
/// stream waits, or after it was synchronized ([`Attached::synchronize`]). That is what CUDA's rules for unified memory
/// ask for on a device without concurrent managed access, and safe on any.
///
/// ```compile_fail
/// # use rstream::{Api, managed::Attached};
/// # fn f(api: &Api<'_>, mut attached: Attached<'_, f32>) {
/// let data = attached.synchronize(api, None).unwrap();
/// // error: no work can be queued while the host has the data
/// attached.fill(api, rstream::Pattern::U32(0)).unwrap();
/// data[0] = 1.0;
/// # }
/// ```
pub struct Attached<'s, T> {
    stream: &'s Stream,
    buffer: Buffer,
    element: PhantomData<T>,
}

impl<T> std::fmt::Debug for Attached<'_, T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Attached").field("stream", self.stream).field("buffer", &self.buffer).finish()
    }
}

impl Stream {
    /// Attaches all of `buffer` to this stream (`cuStreamAttachMemAsync`), as elements of `T`.
    ///
    /// # Errors
    /// [`Error::InvalidValue`] when it is not managed memory, has other handles or queued work, has a size that is no
    /// multiple of an element's, and for the legacy default stream; [`Error::Capture`] while the stream captures.
    ///
    /// # Examples
    /// ```
    /// # use rstream::{Api, Buffer, Device, ManagedAttach, Stream, StreamOptions};
    /// # Api::attach(|api| {
    /// # let device = Device::soft(api, 0)?;
    /// let stream = Stream::new(api, device, StreamOptions::default())?;
    /// let buffer = Buffer::managed(api, device, 1024, ManagedAttach::Global)?;
    /// let mut data = stream.attach::<u32>(api, buffer)?;
    /// data.fill(api, rstream::Pattern::U32(7))?;
    /// let sum = data.with(api, |data| data.map(|data| data.iter().sum::<u32>()))?;
    /// assert_eq!(sum.into_result(None)?, Ok(7 * 256));
    /// # Ok::<(), rstream::Error>(()) })??; Ok::<(), rstream::Error>(())
    /// ```
    pub fn attach<T: Pod>(&self, api: &Api<'_>, buffer: Buffer) -> Result<Attached<'_, T>> {
        if !buffer.is_unique() {
            return Err(Error::invalid("memory to be attached has other handles, or work that uses it"));
        }
        if size_of::<T>() == 0 || !buffer.len().is_multiple_of(size_of::<T>()) {
            return Err(Error::invalid(format!("{} bytes as elements of {} each", buffer.len(), size_of::<T>())));
        }
        if !buffer.ptr().is_multiple_of(align_of::<T>() as u64) {
            return Err(Error::invalid(format!(
                "memory at {:#x} for elements aligned to {}",
                buffer.ptr(),
                align_of::<T>()
            )));
        }
        self.attach_memory(api, &buffer, Attach::Single)?;
        Ok(Attached { stream: self, buffer, element: PhantomData })
    }
}

impl<T: Pod> Attached<'_, T> {
    /// The number of elements.
    #[must_use]
    pub fn len(&self) -> usize {
        self.buffer.len() / size_of::<T>()
    }

    /// Whether it has none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.buffer.is_empty()
    }

    /// The address, of host and device alike, for kernels on the stream.
    #[must_use]
    pub fn ptr(&self) -> u64 {
        self.buffer.ptr()
    }

    /// Queues a callback that gets the data: the stream waits until it returns. After a fault it gets the status instead.
    ///
    /// # Errors
    /// As [`Stream::add_callback`].
    pub fn with<F, R>(&self, api: &Api<'_>, f: F) -> Result<Completion<R>>
    where
        F: FnOnce(Result<&mut [T], Status>) -> R + Send + 'static,
        R: Send + 'static,
    {
        let buffer = self.buffer.clone();
        let callback = move |status: Status| {
            if status.ok() {
                // SAFETY: the stream waits for this callback and nobody else has the data: other callbacks with it are
                // on the same stream, and `synchronize` returns it when there are none.
                f(Ok(unsafe { elements(&buffer) }))
            } else {
                f(Err(status))
            }
        };
        Ok(self.stream.add_callback(api, callback)?)
    }

    /// Waits for the stream, as [`Stream::synchronize`] without a closure that interrupts, and gives the data. While it is
    /// borrowed no work can be queued through this.
    ///
    /// # Errors
    /// As [`Stream::synchronize`].
    pub fn synchronize(&mut self, api: &Api<'_>, timeout: Option<Duration>) -> Result<&mut [T]> {
        self.stream.synchronize(api, timeout, &mut || false)?;
        // SAFETY: the stream is idle, and nobody can queue a callback with the data while `self` is borrowed.
        Ok(unsafe { elements(&self.buffer) })
    }

    /// The stream, for work that uses the memory: queued, since a graph could be launched at any time.
    fn ready<'a>(&'a self, api: &'a Api<'_>) -> Result<Ready<'a>> {
        self.stream.ready(api, "use memory that is attached to it", "Detach it, or end the capture first")
    }

    fn copy(&self, api: &Api<'_>, dst: &Buffer, src: &Buffer) -> Result<()> {
        self.stream.check_copy(dst, src)?;
        let ready = self.ready(api)?;
        if src.is_empty() {
            return Ok(());
        }
        ready.submit(Box::new((dst.clone(), src.clone())), |driver, stream| {
            // SAFETY: the stream is alive; both buffers have that many bytes, and are kept.
            unsafe { driver.cuMemcpyAsync(dst.ptr(), src.ptr(), src.len(), stream) }
        })
    }

    /// Queues a copy of all of `src` into it.
    ///
    /// # Errors
    /// As [`Stream::copy`]; [`Error::Capture`] while the stream captures.
    pub fn copy_from(&mut self, api: &Api<'_>, src: &Buffer) -> Result<()> {
        self.copy(api, &self.buffer, src)
    }

    /// Queues a copy of all of it to `dst`.
    ///
    /// # Errors
    /// As [`Attached::copy_from`].
    pub fn copy_to(&self, api: &Api<'_>, dst: &Buffer) -> Result<()> {
        self.copy(api, dst, &self.buffer)
    }

    /// Queues that all of it is filled with `pattern`.
    ///
    /// # Errors
    /// As [`Stream::fill`]; [`Error::Capture`] while the stream captures.
    pub fn fill(&mut self, api: &Api<'_>, pattern: Pattern) -> Result<()> {
        let count = pattern.times(self.buffer.len())?;
        let ready = self.ready(api)?;
        if count == 0 {
            return Ok(());
        }
        ready.submit(Box::new(self.buffer.clone()), |driver, stream| {
            // SAFETY: the stream is alive; the buffer has that many bytes, and is kept.
            unsafe { pattern.write(driver, stream, self.buffer.ptr(), count) }
        })
    }

    /// Gives the memory back to all streams (`CU_MEM_ATTACH_GLOBAL`), behind what is queued so far.
    ///
    /// # Errors
    /// What the driver answers.
    pub fn detach(self, api: &Api<'_>) -> Result<Buffer> {
        self.stream.attach_memory(api, &self.buffer, Attach::Global)?;
        Ok(self.buffer)
    }
}

/// # Safety
/// Managed memory of whole elements that nobody else uses while the slice lives.
#[allow(clippy::mut_from_ref, reason = "the buffer is a handle; the caller sees to it that there is one slice")]
unsafe fn elements<T: Pod>(buffer: &Buffer) -> &mut [T] {
    debug_assert_eq!(buffer.kind(), BufferKind::Managed);
    if buffer.is_empty() {
        return &mut [];
    }
    // SAFETY: the memory is host-accessible and lives as long as the buffer; `attach` has checked that it is aligned; any
    // bytes are a value of `T`, and none of `T` is without a value. Nobody else uses it (the caller's promise).
    unsafe { std::slice::from_raw_parts_mut(buffer.ptr() as *mut T, buffer.len() / size_of::<T>()) }
}
