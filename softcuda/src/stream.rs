//! Stream management, and memory operations of streams.

use std::cell::RefCell;
use std::collections::HashMap;
use std::ffi::{c_int, c_uint, c_ulonglong, c_void};

use cudarc::driver::sys::{CUcontext, CUevent, CUgreenCtx, CUhostFn, CUstream, CUstreamBatchMemOpParams};

use crate::device::{self, PRIORITIES};
use crate::event::EXTERNAL;
use crate::graph::NodeWork;
use crate::memory::{self, MemoryKind};
use crate::system::{
    self, Answer, Condition, HostCall, ILLEGAL_STATE, INVALID_HANDLE, INVALID_VALUE, NOT_READY, StreamState, Work,
};
use crate::{call, call_outside, green, put};

pub(crate) const LEGACY: usize = 1;
const PER_THREAD: usize = 2;

/// A stream of a context, or of a green one inside it unless that is 0, with the handle that is created with it.
pub(crate) fn new_handle(context: usize, green: usize, flags: c_uint, priority: c_int) -> Answer<usize> {
    let _submission = system::submission(context);
    let mut system = system::lock();
    green::alive(&system, green)?;
    system.sound(context)?;
    system = system::make_room_for_a_stream(system, context);
    system.sound(context)?;
    let stream = system.new_stream(context, flags, priority.clamp(PRIORITIES.1, PRIORITIES.0));
    system.streams.get_mut(&stream).expect("made above").green = green;
    system.contexts.get_mut(&context).expect("sound").made_streams += 1;
    let handle = system::fresh_handle();
    system.handles.insert(handle, stream);
    Ok(handle)
}

/// The per-thread default streams of a thread, by context. They go with the thread.
#[derive(Default)]
struct ThreadStreams(HashMap<usize, u64>);

impl Drop for ThreadStreams {
    fn drop(&mut self) {
        let mut system = system::lock();
        for &stream in self.0.values() {
            system.retire(stream);
        }
    }
}

thread_local! {
    static THREAD_STREAMS: RefCell<ThreadStreams> = RefCell::default();
}

/// The stream that a handle names on this thread, or what is wrong with its context: that comes first in every call.
pub(crate) fn resolve(handle: CUstream) -> Answer<u64> {
    let stream = find(handle)?;
    system::lock().sound_stream(stream)?;
    Ok(stream)
}

fn find(handle: CUstream) -> Answer<u64> {
    match handle as usize {
        0 | LEGACY => {
            let context = device::current()?;
            Ok(system::lock().contexts.get(&context).ok_or(INVALID_HANDLE)?.legacy)
        }
        PER_THREAD => {
            let context = device::current()?;
            let stream = THREAD_STREAMS.try_with(|streams| {
                let mut system = system::lock();
                let mut streams = streams.borrow_mut();
                match streams.0.get(&context) {
                    Some(&stream) if system.streams.contains_key(&stream) => stream,
                    _ => {
                        let stream = system.new_stream(context, 0, 0);
                        streams.0.insert(context, stream);
                        stream
                    }
                }
            });
            // A destructor of another thread-local may call after this thread's streams have gone.
            stream.map_err(|_| INVALID_HANDLE)
        }
        other => system::lock().handles.get(&other).copied().ok_or(INVALID_HANDLE),
    }
}

/// Asks a stream about itself. Even that is a use of the legacy stream, and refused to a member that is invalidated.
pub(crate) fn look<T>(handle: CUstream, ask: impl FnOnce(u64, &StreamState) -> T) -> Answer<T> {
    let stream = resolve(handle)?;
    let mut system = system::lock();
    system.respect_legacy(stream)?;
    system.refuse_when_invalidated(stream)?;
    Ok(ask(stream, system.streams.get(&stream).ok_or(INVALID_HANDLE)?))
}

/// As [`look`], for what a member of a capture does not permit.
fn look_outside<T>(handle: CUstream, ask: impl FnOnce(u64, &StreamState) -> T) -> Answer<T> {
    let stream = resolve(handle)?;
    let mut system = system::lock();
    system.respect_legacy(stream)?;
    system.refuse_on_member(stream)?;
    Ok(ask(stream, system.streams.get(&stream).ok_or(INVALID_HANDLE)?))
}

pub unsafe extern "C" fn cuStreamCreate(out: *mut CUstream, flags: c_uint) -> c_uint {
    call_outside("cuStreamCreate", || create(out, flags, 0))
}

pub unsafe extern "C" fn cuStreamCreateWithPriority(out: *mut CUstream, flags: c_uint, priority: c_int) -> c_uint {
    call_outside("cuStreamCreateWithPriority", || create(out, flags, priority))
}

fn create(out: *mut CUstream, flags: c_uint, priority: c_int) -> Answer {
    if out.is_null() || flags > 1 {
        return Err(INVALID_VALUE);
    }
    let handle = new_handle(device::current()?, device::current_green(), flags, priority)?;
    // SAFETY: the caller's promise.
    unsafe { put(out, handle as CUstream) }
}

pub unsafe extern "C" fn cuStreamDestroy_v2(stream: CUstream) -> c_uint {
    call("cuStreamDestroy_v2", || {
        let id = *system::lock().handles.get(&(stream as usize)).ok_or(INVALID_HANDLE)?;
        let _submission = system::submission_of(id);
        let mut system = system::lock();
        let id = system.handles.remove(&(stream as usize)).ok_or(INVALID_HANDLE)?;
        let context = system.streams[&id].context;
        system.contexts.get_mut(&context).expect("of a stream").made_streams -= 1;
        let sound = system.sound_stream(id);
        system.leave_capture(id);
        system.retire(id);
        sound
    })
}

pub unsafe extern "C" fn cuStreamQuery(stream: CUstream) -> c_uint {
    call("cuStreamQuery", || {
        let id = resolve(stream)?;
        let crowded = system::lock().streams.get(&id).is_some_and(|state| state.crowded);
        // Beside somebody who waits for room on this stream, not on another, the real driver waits as well (measured).
        drop(crowded.then(|| system::submission_of(id)));
        let mut system = system::lock();
        system.host_asks(id)?;
        if system.all_done(id) { Ok(()) } else { Err(NOT_READY) }
    })
}

pub unsafe extern "C" fn cuStreamSynchronize(stream: CUstream) -> c_uint {
    call("cuStreamSynchronize", || {
        let id = resolve(stream)?;
        system::lock().host_asks(id)?;
        synchronize(id)
    })
}

/// Waits until all that the stream has now is done. For the legacy stream: the blocking ones too.
pub(crate) fn synchronize(id: u64) -> Answer {
    let system = system::lock();
    let context = system.streams.get(&id).ok_or(INVALID_HANDLE)?.context;
    let legacy = system.contexts.get(&context).is_some_and(|context| context.legacy == id);
    let targets = system::drained(&system, |other, state| {
        other == id || legacy && state.context == context && state.is_blocking()
    });
    let system =
        system::wait_until(system, |system| system.sound(context).is_err() || system::reached(system, &targets));
    system.sound(context)
}

pub unsafe extern "C" fn cuStreamWaitEvent(stream: CUstream, event: CUevent, flags: c_uint) -> c_uint {
    call("cuStreamWaitEvent", || {
        if flags > EXTERNAL {
            return Err(INVALID_VALUE);
        }
        let id = resolve(stream)?;
        let place = {
            let mut system = system::lock();
            system.respect_legacy(id)?;
            if flags == EXTERNAL {
                if !system.is_member(id) {
                    return Err(ILLEGAL_STATE);
                }
                let event = event as usize;
                if !system.events.contains_key(&event) {
                    return Err(INVALID_HANDLE);
                }
                return system.capture_node(id, NodeWork::Wait(event));
            }
            if let Some(answer) = system.capture_wait(id, event as usize) {
                return answer;
            }
            system.events.get(&(event as usize)).ok_or(INVALID_HANDLE)?.place.clone()
        };
        match place {
            Some(place) if !place.is_done() => system::mark(id, vec![place], None),
            _ => Ok(()),
        }
    })
}

pub unsafe extern "C" fn cuStreamAddCallback(
    stream: CUstream,
    callback: Option<unsafe extern "C" fn(CUstream, c_uint, *mut c_void)>,
    data: *mut c_void,
    flags: c_uint,
) -> c_uint {
    call("cuStreamAddCallback", || {
        let function = callback.filter(|_| flags == 0).ok_or(INVALID_VALUE)?;
        submit_call(stream, HostCall::Callback(function), data)
    })
}

pub unsafe extern "C" fn cuLaunchHostFunc(stream: CUstream, function: CUhostFn, data: *mut c_void) -> c_uint {
    call("cuLaunchHostFunc", || {
        let function = function.ok_or(INVALID_VALUE)?;
        submit_call(stream, HostCall::Function(function), data)
    })
}

/// The synchronization mode says how device and host wait for one another; here there is one way.
pub unsafe extern "C" fn cuLaunchHostFunc_v2(
    stream: CUstream,
    function: CUhostFn,
    data: *mut c_void,
    sync_mode: c_uint,
) -> c_uint {
    call("cuLaunchHostFunc_v2", || {
        let function = function.filter(|_| sync_mode <= 1).ok_or(INVALID_VALUE)?;
        submit_call(stream, HostCall::Function(function), data)
    })
}

fn submit_call(stream: CUstream, call: HostCall, data: *mut c_void) -> Answer {
    let work = Work::Host { call, handle: stream as usize, data: data as usize };
    system::submit(resolve(stream)?, vec![work])
}

pub unsafe extern "C" fn cuStreamAttachMemAsync(stream: CUstream, ptr: u64, length: usize, flags: c_uint) -> c_uint {
    const SINGLE: c_uint = 4;
    call("cuStreamAttachMemAsync", || {
        let id = resolve(stream)?;
        // No flag at all crashes the real driver; an invalid value is kinder.
        if !matches!(flags, 1 | 2 | SINGLE) || flags == SINGLE && stream.is_null() {
            return Err(INVALID_VALUE);
        }
        {
            let system = system::lock();
            let allocation = system.memory.get(&ptr).filter(|allocation| allocation.kind == MemoryKind::Managed);
            if !allocation.is_some_and(|allocation| length == 0 || length == allocation.len) {
                return Err(INVALID_VALUE);
            }
        }
        {
            let mut system = system::lock();
            if !system.is_member(id) {
                system.unsafe_call()?;
            }
        }
        let to = if flags == SINGLE { id } else { 0 };
        system::submit(id, vec![Work::Attach { address: ptr, kind: flags, stream: to }])
    })
}

pub unsafe extern "C" fn cuStreamGetFlags(stream: CUstream, flags: *mut c_uint) -> c_uint {
    call("cuStreamGetFlags", || {
        // SAFETY: the caller's promise.
        look_outside(stream, |_, state| state.flags).and_then(|value| unsafe { put(flags, value) })
    })
}

pub unsafe extern "C" fn cuStreamGetPriority(stream: CUstream, priority: *mut c_int) -> c_uint {
    call("cuStreamGetPriority", || {
        // SAFETY: the caller's promise.
        look(stream, |_, state| state.priority).and_then(|value| unsafe { put(priority, value) })
    })
}

pub unsafe extern "C" fn cuStreamGetId(stream: CUstream, id: *mut c_ulonglong) -> c_uint {
    // SAFETY: the caller's promise.
    call("cuStreamGetId", || look_outside(stream, |stream, _| stream).and_then(|value| unsafe { put(id, value) }))
}

pub unsafe extern "C" fn cuStreamGetCtx(stream: CUstream, ctx: *mut CUcontext) -> c_uint {
    call("cuStreamGetCtx", || {
        // SAFETY: the caller's promise.
        look(stream, |_, state| if state.green == 0 { state.context } else { state.green })
            // SAFETY: the caller's promise.
            .and_then(|value| unsafe { put(ctx, value as CUcontext) })
    })
}

pub unsafe extern "C" fn cuStreamGetCtx_v2(stream: CUstream, ctx: *mut CUcontext, green: *mut CUgreenCtx) -> c_uint {
    call("cuStreamGetCtx_v2", || {
        let (context, of) = look(stream, |_, state| (state.context, state.green))?;
        // SAFETY: the caller's promise.
        unsafe { put(ctx, context as CUcontext).and(put(green, of as CUgreenCtx)) }
    })
}

pub unsafe extern "C" fn cuStreamGetDevice(stream: CUstream, out: *mut c_int) -> c_uint {
    call("cuStreamGetDevice", || {
        let ordinal = device::ordinal_of(look_outside(stream, |_, state| state.context)?);
        // SAFETY: the caller's promise.
        unsafe { put(out, c_int::try_from(ordinal).expect("at most 16")) }
    })
}

/// One stream memory operation, its arguments checked.
fn memory_operation(address: u64, wide: bool, value: u64, wait: Option<c_uint>) -> Answer<Work> {
    const FLUSH: c_uint = 1 << 30;
    let width = if wide { 8 } else { 4 };
    if !address.is_multiple_of(width) || memory::kind_of_range(address, width as usize)?.is_none() {
        return Err(INVALID_VALUE);
    }
    Ok(match wait.map(|flags| flags & !FLUSH) {
        None => Work::Write { address, wide, value },
        Some(kind @ 0..=3) => Work::WaitValue(Condition { address, wide, value, kind }),
        Some(_) => return Err(INVALID_VALUE),
    })
}

fn submit_operation(stream: CUstream, address: u64, wide: bool, value: u64, wait: Option<c_uint>) -> Answer {
    let id = resolve(stream)?;
    system::submit(id, vec![memory_operation(address, wide, value, wait)?])
}

pub unsafe extern "C" fn cuStreamWaitValue32_v2(stream: CUstream, addr: u64, value: u32, flags: c_uint) -> c_uint {
    call("cuStreamWaitValue32_v2", || submit_operation(stream, addr, false, u64::from(value), Some(flags)))
}

pub unsafe extern "C" fn cuStreamWaitValue64_v2(stream: CUstream, addr: u64, value: u64, flags: c_uint) -> c_uint {
    call("cuStreamWaitValue64_v2", || submit_operation(stream, addr, true, value, Some(flags)))
}

pub unsafe extern "C" fn cuStreamWriteValue32_v2(stream: CUstream, addr: u64, value: u32, flags: c_uint) -> c_uint {
    call("cuStreamWriteValue32_v2", || {
        if flags != 0 { Err(INVALID_VALUE) } else { submit_operation(stream, addr, false, u64::from(value), None) }
    })
}

pub unsafe extern "C" fn cuStreamWriteValue64_v2(stream: CUstream, addr: u64, value: u64, flags: c_uint) -> c_uint {
    call("cuStreamWriteValue64_v2", || {
        if flags != 0 { Err(INVALID_VALUE) } else { submit_operation(stream, addr, true, value, None) }
    })
}

pub unsafe extern "C" fn cuStreamBatchMemOp_v2(
    stream: CUstream,
    count: c_uint,
    ops: *mut CUstreamBatchMemOpParams,
    flags: c_uint,
) -> c_uint {
    // Where each member of the union has its fields; a 32-bit value leaves the other half of its place unset.
    const ADDRESS: usize = 8;
    const VALUE: usize = 16;
    const FLAGS: usize = 24;
    const MOST: c_uint = 256;
    call("cuStreamBatchMemOp_v2", || {
        let id = resolve(stream)?;
        if flags == 0 && count == 0 {
            return Ok(());
        }
        // No array at all crashes the real driver; an invalid value is kinder.
        if flags != 0 || count >= MOST || ops.is_null() {
            return Err(INVALID_VALUE);
        }
        let mut works = Vec::with_capacity(count as usize);
        for index in 0..count as usize {
            // SAFETY: the caller has `count` operations, each with the fields of its kind.
            unsafe {
                let op = ops.add(index).cast::<u8>();
                let flags = || op.add(FLAGS).cast::<u32>().read();
                let (wide, wait) = match op.cast::<u32>().read() {
                    1 => (false, Some(flags())),
                    2 => (false, None),
                    4 => (true, Some(flags())),
                    5 => (true, None),
                    _ => return Err(INVALID_VALUE),
                };
                let value = op.add(VALUE);
                let value = if wide { value.cast::<u64>().read() } else { u64::from(value.cast::<u32>().read()) };
                works.push(memory_operation(op.add(ADDRESS).cast::<u64>().read(), wide, value, wait)?);
            }
        }
        system::submit(id, works)
    })
}
