//! Memory, copies and fills.

use std::ffi::{c_int, c_uint, c_ushort, c_void};
use std::sync::Arc;

use cudarc::driver::sys::{CUcontext, CUstream};

use crate::graph::{self, NodeType, NodeWork};
pub(crate) use crate::system::MemoryKind;
use crate::system::{
    self, Allocation, Answer, Block, ILLEGAL_ADDRESS, INVALID_VALUE, NOT_PERMITTED, OUT_OF_MEMORY, Owner, Place,
    Source, System, Work,
};
use crate::{call, call_outside, device, put, stream};

/// The memory of a software device.
const TOTAL: usize = 4 << 30;
const GLOBAL: u32 = 1;
const HOST: u32 = 2;

fn used(system: &System, context: usize) -> usize {
    system.memory.values().filter(|allocation| allocation.context == context).map(|allocation| allocation.len).sum()
}

/// To allocate memory of the graph that is captured is no unsafe call.
fn allocate(size: usize, kind: MemoryKind, attach: u32, owner: Owner) -> Answer<u64> {
    if size == 0 {
        return Err(INVALID_VALUE);
    }
    let context = device::current()?;
    let _submission = system::submission(context);
    {
        let mut system = system::lock();
        system.sound(context)?;
        if owner == Owner::Caller {
            system.unsafe_call()?;
        }
        if size > TOTAL - used(&system, context).min(TOTAL) {
            return Err(OUT_OF_MEMORY);
        }
    }
    let block = Block::new(size).ok_or(OUT_OF_MEMORY)?;
    let address = block.address();
    let allocation =
        Allocation { context, kind, owner, len: size, _block: block, attached_at_first: attach, attached: (attach, 0) };
    system::lock().memory.insert(address, allocation);
    Ok(address)
}

/// Frees when all work that is pending in the context is done, as the real driver does.
fn free(address: u64, kinds: &[MemoryKind]) -> Answer {
    if address == 0 {
        return Ok(());
    }
    let mut system = system::lock();
    let allocation = system.memory.get(&address).filter(|allocation| kinds.contains(&allocation.kind));
    let &Allocation { context, owner, .. } = allocation.ok_or(INVALID_VALUE)?;
    if owner == (Owner::Graph { live: false }) {
        return Err(INVALID_VALUE);
    }
    system.sound(context)?;
    if system::in_callback() {
        // It would wait for itself.
        return Err(NOT_PERMITTED);
    }
    system.unsafe_call()?;
    drop(system);
    // Others' calls on the context wait as well, as with the real driver.
    let _submission = system::submission(context);
    let system = system::lock();
    let targets = system::drained(&system, |_, stream| stream.context == context);
    let mut system =
        system::wait_until(system, |system| system.sound(context).is_err() || system::reached(system, &targets));
    system.sound(context)?;
    if owner != Owner::Caller {
        system.set_live(address, false);
        return Ok(());
    }
    let freed = system.memory.remove(&address);
    drop(system);
    drop(freed);
    Ok(())
}

/// The kind of memory that a range is in; `None` for plain host memory. An error when it leaves its allocation.
pub(crate) fn kind_of_range(address: u64, len: usize) -> Answer<Option<MemoryKind>> {
    if address == 0 && len > 0 {
        return Err(INVALID_VALUE);
    }
    let system = system::lock();
    let Some((base, allocation)) = system.allocation_at(address) else { return Ok(None) };
    match usize::try_from(address - base).ok().and_then(|offset| offset.checked_add(len)) {
        Some(end) if end <= allocation.len => Ok(Some(allocation.kind)),
        _ => Err(INVALID_VALUE),
    }
}

pub unsafe extern "C" fn cuMemAlloc_v2(out: *mut u64, size: usize) -> c_uint {
    // SAFETY: the caller's promise.
    call_outside("cuMemAlloc_v2", || unsafe {
        put(out, 0).and(put(out, allocate(size, MemoryKind::Device, 0, Owner::Caller)?))
    })
}

pub unsafe extern "C" fn cuMemFree_v2(ptr: u64) -> c_uint {
    call("cuMemFree_v2", || free(ptr, &[MemoryKind::Device, MemoryKind::Managed]))
}

pub unsafe extern "C" fn cuMemAllocAsync(out: *mut u64, size: usize, stream: CUstream) -> c_uint {
    call_outside("cuMemAllocAsync", || {
        let id = stream::resolve(stream)?;
        let capturing = {
            let mut system = system::lock();
            system.respect_legacy(id)?;
            system.is_member(id)
        };
        // SAFETY: the caller's promise.
        unsafe { put(out, 0) }?;
        if size == 0 {
            return Ok(());
        }
        let owner = if capturing { Owner::Graph { live: false } } else { Owner::Caller };
        let address = allocate(size, MemoryKind::Device, 0, owner)?;
        if capturing {
            graph::capture_allocation(id, address)?;
        }
        // SAFETY: the caller's promise.
        unsafe { put(out, address) }
    })
}

pub unsafe extern "C" fn cuMemFreeAsync(ptr: u64, stream: CUstream) -> c_uint {
    call("cuMemFreeAsync", || {
        let id = stream::resolve(stream)?;
        {
            let mut system = system::lock();
            let allocation = system.memory.get(&ptr).filter(|allocation| allocation.kind == MemoryKind::Device);
            let owner = allocation.ok_or(INVALID_VALUE)?.owner;
            if !system.is_member(id) {
                system.unsafe_call()?;
                if let Owner::Graph { live } = owner {
                    system.respect_legacy(id)?;
                    system.set_live(ptr, false);
                    return if live { Ok(()) } else { Err(INVALID_VALUE) };
                }
            }
        }
        system::submit(id, vec![Work::Free(ptr)])
    })
}

pub unsafe extern "C" fn cuMemHostAlloc(out: *mut *mut c_void, size: usize, flags: c_uint) -> c_uint {
    call_outside("cuMemHostAlloc", || {
        if flags > 7 {
            return Err(INVALID_VALUE);
        }
        // SAFETY: the caller's promise.
        unsafe {
            put(out, std::ptr::null_mut())?;
            if size == 0 {
                return device::current().map(drop);
            }
            put(out, allocate(size, MemoryKind::Pinned, 0, Owner::Caller)? as *mut c_void)
        }
    })
}

pub unsafe extern "C" fn cuMemFreeHost(ptr: *mut c_void) -> c_uint {
    call("cuMemFreeHost", || free(ptr as u64, &[MemoryKind::Pinned]))
}

pub unsafe extern "C" fn cuMemHostGetDevicePointer_v2(out: *mut u64, host: *mut c_void, flags: c_uint) -> c_uint {
    call("cuMemHostGetDevicePointer_v2", || {
        if flags != 0 || kind_of_range(host as u64, 1)? != Some(MemoryKind::Pinned) {
            return Err(INVALID_VALUE);
        }
        // SAFETY: the caller's promise.
        unsafe { put(out, host as u64) }
    })
}

pub unsafe extern "C" fn cuMemAllocManaged(out: *mut u64, size: usize, flags: c_uint) -> c_uint {
    call_outside("cuMemAllocManaged", || {
        if !matches!(flags, GLOBAL | HOST) {
            return Err(INVALID_VALUE);
        }
        // SAFETY: the caller's promise.
        unsafe { put(out, 0).and(put(out, allocate(size, MemoryKind::Managed, flags, Owner::Caller)?)) }
    })
}

pub unsafe extern "C" fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize) -> c_uint {
    call_outside("cuMemGetInfo_v2", || {
        let context = device::current()?;
        let system = system::lock();
        system.sound(context)?;
        let left = TOTAL - used(&system, context).min(TOTAL);
        // SAFETY: the caller's promise.
        unsafe { put(free, left).and(put(total, TOTAL)) }
    })
}

pub unsafe extern "C" fn cuMemcpy(dst: u64, src: u64, size: usize) -> c_uint {
    call_outside("cuMemcpy", || {
        let legacy = stream::resolve(std::ptr::null_mut())?;
        // SAFETY: the caller's promise.
        unsafe { copy(dst, src, size, legacy) }?;
        stream::synchronize(legacy)
    })
}

pub unsafe extern "C" fn cuMemcpyAsync(dst: u64, src: u64, size: usize, stream: CUstream) -> c_uint {
    // SAFETY: the caller's promise.
    call("cuMemcpyAsync", || unsafe { copy(dst, src, size, stream::resolve(stream)?) })
}

/// # Safety
/// Plain host memory among the ranges is valid: until the call returns, and a source of a copy between host ranges until
/// the stream has passed.
unsafe fn copy(dst: u64, src: u64, bytes: usize, id: u64) -> Answer {
    if bytes == 0 {
        return Ok(());
    }
    let (to, from) = (kind_of_range(dst, bytes)?, kind_of_range(src, bytes)?);
    {
        let mut system = system::lock();
        system.respect_legacy(id)?;
        if system.is_member(id) {
            let work = Work::Copy { dst, src: Source::Memory(src), bytes };
            return system.capture_node(id, NodeWork::Works(NodeType::Memcpy, vec![work]));
        }
    }
    // Pageable memory: a source is read at the call, a destination is written before it returns.
    let source = match from {
        // SAFETY: plain host memory, valid for the call.
        None => Source::Staged(unsafe { std::slice::from_raw_parts(src as *const u8, bytes) }.to_vec()),
        Some(_) => Source::Memory(src),
    };
    let written = to.is_none().then(|| Arc::new(Place::default()));
    system::submit_uncaptured(id, Work::Copy { dst, src: source, bytes }, written.clone())?;
    let Some(written) = written else { return Ok(()) };
    // Not until the context is lost only: the engine may be writing just then.
    let system = system::wait_until(system::lock(), |_| written.is_done());
    system.sound_stream(id)
}

fn fill(dst: u64, value: u32, width: usize, count: usize, id: u64) -> Answer {
    if count == 0 {
        return Ok(());
    }
    let bytes = count.checked_mul(width).ok_or(INVALID_VALUE)?;
    {
        let mut system = system::lock();
        if dst == 0 && system.is_member(id) {
            // Captured without a look at the address (measured): it faults when it is launched.
            return system.capture_node(id, NodeWork::Works(NodeType::Memset, vec![Work::Fault(ILLEGAL_ADDRESS)]));
        }
    }
    // Plain host memory is not the device's to write.
    if !dst.is_multiple_of(width as u64) || kind_of_range(dst, bytes)?.is_none() {
        return Err(INVALID_VALUE);
    }
    system::submit(id, vec![Work::Fill { dst, value, width, count }])
}

pub unsafe extern "C" fn cuMemsetD8_v2(dst: u64, value: u8, count: usize) -> c_uint {
    call_outside("cuMemsetD8_v2", || {
        let legacy = stream::resolve(std::ptr::null_mut())?;
        fill(dst, u32::from(value), 1, count, legacy)?;
        stream::synchronize(legacy)
    })
}

pub unsafe extern "C" fn cuMemsetD8Async(dst: u64, value: u8, count: usize, stream: CUstream) -> c_uint {
    call("cuMemsetD8Async", || fill(dst, u32::from(value), 1, count, stream::resolve(stream)?))
}

pub unsafe extern "C" fn cuMemsetD16Async(dst: u64, value: c_ushort, count: usize, stream: CUstream) -> c_uint {
    call("cuMemsetD16Async", || fill(dst, u32::from(value), 2, count, stream::resolve(stream)?))
}

pub unsafe extern "C" fn cuMemsetD32Async(dst: u64, value: c_uint, count: usize, stream: CUstream) -> c_uint {
    call("cuMemsetD32Async", || fill(dst, value, 4, count, stream::resolve(stream)?))
}

pub unsafe extern "C" fn cuPointerGetAttribute(data: *mut c_void, attribute: c_uint, ptr: u64) -> c_uint {
    call("cuPointerGetAttribute", || {
        let system = system::lock();
        let (base, allocation) = system.allocation_at(ptr).ok_or(INVALID_VALUE)?;
        let kind = allocation.kind;
        // SAFETY: the caller has room for the attribute's type.
        unsafe {
            match attribute {
                1 => put(data.cast::<CUcontext>(), allocation.context as CUcontext),
                2 => put(data.cast::<c_uint>(), if kind == MemoryKind::Pinned { 1 } else { 2 }),
                // The host has no address for device memory.
                4 if kind == MemoryKind::Device => Err(INVALID_VALUE),
                3 | 4 => put(data.cast::<u64>(), ptr),
                8 => put(data.cast::<c_uint>(), c_uint::from(kind == MemoryKind::Managed)),
                9 => {
                    let ordinal = device::ordinal_of(allocation.context);
                    put(data.cast::<c_int>(), c_int::try_from(ordinal).expect("at most 16"))
                }
                11 => put(data.cast::<u64>(), base),
                12 => put(data.cast::<usize>(), allocation.len),
                _ => Err(INVALID_VALUE),
            }
        }
    })
}
