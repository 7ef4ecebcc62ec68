//! The software driver at the level of its entry points, as an H200's driver was seen to behave.
#![allow(
    clippy::undocumented_unsafe_blocks,
    reason = "each call is one of the driver's, with handles and pointers of this test"
)]

use std::ffi::{c_int, c_uint, c_void};
use std::ptr::{null, null_mut};
use std::sync::Once;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;

use cudarc::driver::sys::{CUcontext, CUevent, CUstream, CUstreamAttrValue, CUstreamBatchMemOpParams};
use softcuda::*;

const LEGACY: CUstream = 1 as CUstream;
const PER_THREAD: CUstream = 2 as CUstream;

/// Makes the context of `device` current on this thread. Each test has a device of its own: a thread that frees makes
/// all others that use the context wait, until everything that any test holds up is done.
fn context(device: c_int) -> CUcontext {
    static DEVICES: Once = Once::new();
    // Before the driver reads it, which it does when it is first asked for a device.
    DEVICES.call_once(|| unsafe { std::env::set_var("RSTREAM_SOFT_DEVICES", "16") });
    let mut context = null_mut();
    unsafe {
        assert_eq!(cuInit(0), 0);
        assert_eq!(cuDevicePrimaryCtxRetain(&raw mut context, device), 0);
        assert_eq!(cuCtxSetCurrent(context), 0);
    }
    context
}

fn stream(flags: c_uint) -> CUstream {
    let mut stream = null_mut();
    assert_eq!(unsafe { cuStreamCreate(&raw mut stream, flags) }, 0);
    stream
}

fn event(flags: c_uint) -> CUevent {
    let mut event = null_mut();
    assert_eq!(unsafe { cuEventCreate(&raw mut event, flags) }, 0);
    event
}

fn pinned(bytes: usize) -> *mut c_void {
    let mut host = null_mut();
    assert_eq!(unsafe { cuMemHostAlloc(&raw mut host, bytes, 0) }, 0);
    host
}

/// A word that a stream waits on until it is released.
struct Gate(*mut c_void);

impl Gate {
    fn on(stream: CUstream) -> Gate {
        let word = pinned(8);
        assert_eq!(unsafe { cuStreamWaitValue64_v2(stream, word as u64, 1, 0) }, 0);
        Gate(word)
    }

    fn open(&self) {
        unsafe { AtomicU64::from_ptr(self.0.cast()) }.store(1, Ordering::Release);
    }
}

/// Queues a host function that waits to be let go; gives the end that does it, and the one that hears of its start.
fn blocker(stream: CUstream) -> (Sender<()>, Receiver<()>) {
    unsafe extern "C" fn wait(data: *mut c_void) {
        let (started, go) = *unsafe { Box::from_raw(data.cast::<(Sender<()>, Receiver<()>)>()) };
        started.send(()).unwrap();
        go.recv().unwrap();
    }
    let (go, waits) = channel();
    let (starts, started) = channel();
    let data = Box::into_raw(Box::new((starts, waits))).cast();
    assert_eq!(unsafe { cuLaunchHostFunc(stream, Some(wait), data) }, 0);
    (go, started)
}

unsafe extern "C" fn count(data: *mut c_void) {
    unsafe { &*data.cast::<AtomicU32>() }.fetch_add(1, Ordering::AcqRel);
}

unsafe extern "C" fn note_status(_stream: CUstream, status: c_uint, data: *mut c_void) {
    unsafe { &*data.cast::<AtomicU32>() }.store(status, Ordering::Release);
}

#[test]
fn bad_arguments_have_the_drivers_codes() {
    context(0);
    let s = stream(1);
    let e = event(2);
    let mut out = null_mut();
    unsafe {
        assert_eq!(cuInit(1), 1);
        assert_eq!(cuStreamCreate(null_mut(), 0), 1);
        assert_eq!(cuStreamCreate(&raw mut out, 2), 1);
        assert_eq!(cuEventCreate(&mut null_mut(), 4), 1);
        assert_eq!(cuEventCreate(&mut null_mut(), 8), 1);
        assert_eq!(cuStreamAddCallback(s, None, null_mut(), 0), 1);
        assert_eq!(cuStreamAddCallback(s, Some(note_status), null_mut(), 1), 1);
        assert_eq!(cuLaunchHostFunc(s, None, null_mut()), 1);
        assert_eq!(cuStreamWaitEvent(s, e, 5), 1);
        assert_eq!(cuStreamWaitEvent(s, e, 1), 401);
        assert_eq!(cuStreamWaitEvent(s, null_mut(), 0), 400);
        assert_eq!(cuEventRecordWithFlags(e, s, 1), 401);
        assert_eq!(cuEventRecord(null_mut(), s), 400);
        assert_eq!(cuStreamDestroy_v2(null_mut()), 400);
        assert_eq!(cuStreamDestroy_v2(LEGACY), 400);
        assert_eq!(cuStreamDestroy_v2(PER_THREAD), 400);
        assert_eq!(cuStreamGetFlags(s, null_mut()), 1);
        assert_eq!(cuStreamQuery(0xdead0 as CUstream), 400);
        assert_eq!(cuDeviceGet(&mut 0, 99), 101);
        assert_eq!(cuGetErrorName(12345, &mut null()), 1);
        let mut mode = 7;
        assert_eq!(cuThreadExchangeStreamCaptureMode(&raw mut mode), 0);
        assert_eq!(mode, 0);
        assert_eq!(cuThreadExchangeStreamCaptureMode(&raw mut mode), 0);
        assert_eq!(mode, 7);
        assert_eq!(cuGraphDestroy(null_mut()), 1);
        assert_eq!(cuStreamDestroy_v2(s), 0);
        assert_eq!(cuStreamQuery(s), 400);
    }
}

#[test]
fn priorities_are_clamped_and_default_streams_describe_themselves() {
    context(1);
    let (mut out, mut priority) = (null_mut(), 99);
    for (asked, got) in [(100, 0), (-100, -5), (-3, -3)] {
        unsafe {
            assert_eq!(cuStreamCreateWithPriority(&raw mut out, 1, asked), 0);
            assert_eq!(cuStreamGetPriority(out, &raw mut priority), 0);
        }
        assert_eq!(priority, got);
    }
    let id = |stream| {
        let mut id = 0;
        assert_eq!(unsafe { cuStreamGetId(stream, &raw mut id) }, 0);
        id
    };
    assert_eq!(id(null_mut()), id(LEGACY));
    assert_ne!(id(PER_THREAD), id(LEGACY));
    let here = id(PER_THREAD);
    let there = thread::spawn(move || {
        context(1);
        let mut id = 0;
        assert_eq!(unsafe { cuStreamGetId(PER_THREAD, &raw mut id) }, 0);
        id
    });
    assert_ne!(here, there.join().unwrap());
}

#[test]
fn without_a_current_context_calls_answer_201() {
    thread::spawn(|| {
        let mut out = null_mut();
        assert_eq!(unsafe { cuStreamCreate(&raw mut out, 0) }, 201);
        assert_eq!(unsafe { cuStreamQuery(null_mut()) }, 201);
    })
    .join()
    .unwrap();
}

#[test]
fn one_callback_thread_serves_all_streams_of_a_context() {
    context(3);
    let (a, b) = (stream(1), stream(1));
    let (go, started) = blocker(a);
    started.recv().unwrap();
    let ran = AtomicU32::new(0);
    unsafe { assert_eq!(cuLaunchHostFunc(b, Some(count), (&raw const ran).cast_mut().cast()), 0) };
    unsafe { assert_eq!(cuStreamQuery(b), 600) };
    assert_eq!(ran.load(Ordering::Acquire), 0);
    go.send(()).unwrap();
    unsafe { assert_eq!(cuStreamSynchronize(b), 0) };
    assert_eq!(ran.load(Ordering::Acquire), 1);
}

#[test]
fn some_calls_are_refused_inside_a_callback_and_some_are_not() {
    unsafe extern "C" fn call(data: *mut c_void) {
        let codes = unsafe { &mut *data.cast::<Vec<u32>>() };
        let (mut pointer, mut number, mut size) = (null_mut::<c_void>(), 0_i32, 0_usize);
        unsafe {
            codes.extend([
                cuCtxGetCurrent((&raw mut pointer).cast()),
                cuCtxSetCurrent(null_mut()),
                cuCtxSynchronize(),
                cuDeviceGetCount(&raw mut number),
                cuMemGetInfo_v2(&raw mut size, &raw mut size),
                cuEventCreate((&raw mut pointer).cast(), 0),
                cuMemHostAlloc(&raw mut pointer, 8, 0),
                cuStreamCreate((&raw mut pointer).cast(), 0),
                cuDriverGetVersion(&raw mut number),
            ]);
        }
    }
    context(4);
    let s = stream(1);
    let mut codes: Vec<u32> = Vec::new();
    unsafe {
        assert_eq!(cuLaunchHostFunc(s, Some(call), (&raw mut codes).cast()), 0);
        assert_eq!(cuStreamSynchronize(s), 0);
    }
    assert_eq!(codes, [800, 800, 800, 800, 800, 800, 800, 800, 0]);
}

#[test]
fn a_destroyed_stream_still_runs_what_it_has() {
    context(5);
    let s = stream(1);
    let gate = Gate::on(s);
    let ran = AtomicU32::new(0);
    let done = event(2);
    unsafe {
        for _ in 0..100 {
            assert_eq!(cuLaunchHostFunc(s, Some(count), (&raw const ran).cast_mut().cast()), 0);
        }
        assert_eq!(cuEventRecord(done, s), 0);
        assert_eq!(cuStreamDestroy_v2(s), 0);
        gate.open();
        assert_eq!(cuEventSynchronize(done), 0);
    }
    assert_eq!(ran.load(Ordering::Acquire), 100);
}

#[test]
fn the_legacy_stream_and_blocking_streams_wait_for_each_other() {
    thread::spawn(|| {
        context(6);
        let (blocking, free) = (stream(0), stream(1));
        let gate = Gate::on(blocking);
        let e = event(2);
        unsafe {
            assert_eq!(cuEventRecord(e, null_mut()), 0);
            assert_eq!(cuStreamQuery(null_mut()), 600);
            assert_eq!(cuEventQuery(e), 600);
            assert_eq!(cuStreamQuery(free), 0);
            let other = stream(0);
            let behind = event(2);
            assert_eq!(cuEventRecord(behind, other), 0);
            assert_eq!(cuEventQuery(behind), 600);
            gate.open();
            assert_eq!(cuEventSynchronize(behind), 0);
            assert_eq!(cuEventQuery(e), 0);
            assert_eq!(cuStreamSynchronize(null_mut()), 0);
        }
    })
    .join()
    .unwrap();
}

#[test]
fn events_follow_their_records() {
    context(7);
    let (s, e, timed) = (stream(1), event(2), [event(0), event(0)]);
    let mut milliseconds = 0.0;
    unsafe {
        assert_eq!(cuEventQuery(e), 0);
        assert_eq!(cuEventElapsedTime_v2(&raw mut milliseconds, timed[0], timed[1]), 400);
        assert_eq!(cuEventRecord(timed[0], s), 0);
        let gate = Gate::on(s);
        assert_eq!(cuEventRecord(timed[1], s), 0);
        assert_eq!(cuEventQuery(timed[1]), 600);
        assert_eq!(cuEventElapsedTime_v2(&raw mut milliseconds, timed[0], timed[1]), 600);
        gate.open();
        assert_eq!(cuStreamSynchronize(s), 0);
        assert_eq!(cuEventElapsedTime_v2(&raw mut milliseconds, timed[1], timed[0]), 0);
        assert!(milliseconds < 0.0);
        assert_eq!(cuEventElapsedTime_v2(&raw mut milliseconds, e, timed[0]), 400);
        assert_eq!(cuEventDestroy_v2(e), 0);
        assert_eq!(cuEventQuery(e), 400);
    }
}

#[test]
fn copies_and_fills_move_bytes_and_check_their_ranges() {
    context(8);
    let s = stream(1);
    let host = pinned(1000);
    let (mut device, mut managed) = (0, 0);
    unsafe {
        assert_eq!(cuMemAlloc_v2(&raw mut device, 1000), 0);
        assert_eq!(cuMemAllocManaged(&raw mut managed, 1000, 1), 0);
        assert_eq!(cuMemAllocManaged(&mut 0, 1000, 4), 1);
        assert_eq!(cuMemAllocManaged(&mut 0, 0, 1), 1);
        assert_eq!(cuMemsetD8Async(device, 7, 1000, s), 0);
        assert_eq!(cuMemsetD16Async(device + 1, 7, 2, s), 1);
        assert_eq!(cuMemsetD32Async(device, 0x0102_0304, 2, s), 0);
        assert_eq!(cuMemcpyAsync(managed, device, 1000, s), 0);
        assert_eq!(cuMemcpyAsync(host as u64, managed, 1000, s), 0);
        assert_eq!(cuMemcpyAsync(host as u64, device + 1, 1000, s), 1);
        assert_eq!(cuMemcpyAsync(host as u64, 0, 10, s), 1);
        assert_eq!(cuStreamSynchronize(s), 0);
        let bytes = std::slice::from_raw_parts(host.cast::<u8>(), 1000);
        assert_eq!(&bytes[..9], [4, 3, 2, 1, 4, 3, 2, 1, 7]);
        // Pageable memory: read at the call, written when the call returns.
        let gate = Gate::on(s);
        let mut source = [5_u8; 10];
        assert_eq!(cuMemcpyAsync(device, source.as_ptr() as u64, 10, s), 0);
        source.fill(6);
        gate.open();
        let mut target = [0_u8; 10];
        assert_eq!(cuMemcpyAsync(target.as_mut_ptr() as u64, device, 10, s), 0);
        assert_eq!(target, [5; 10]);
        let (mut kind, mut ordinal) = (0, 99);
        assert_eq!(cuPointerGetAttribute((&raw mut kind).cast(), 2, device), 0);
        assert_eq!(cuPointerGetAttribute((&raw mut ordinal).cast(), 9, managed), 0);
        assert_eq!((kind, ordinal), (2, 8));
        assert_eq!(cuPointerGetAttribute((&raw mut kind).cast(), 2, target.as_ptr() as u64), 1);
        assert_eq!(cuMemFree_v2(device), 0);
        assert_eq!(cuMemFree_v2(device), 1);
        assert_eq!(cuMemFree_v2(host as u64), 1);
        assert_eq!(cuMemFreeHost(host), 0);
        assert_eq!(cuMemFree_v2(managed), 0);
    }
}

#[test]
fn freeing_waits_for_pending_work() {
    context(9);
    let s = stream(1);
    let gate = Gate::on(s);
    let mut device = 0;
    unsafe { assert_eq!(cuMemAlloc_v2(&raw mut device, 1 << 20), 0) };
    unsafe { assert_eq!(cuMemsetD8Async(device, 1, 1 << 20, s), 0) };
    let (freed, told) = channel();
    let thread = thread::spawn(move || {
        context(9);
        assert_eq!(unsafe { cuMemFree_v2(device) }, 0);
        freed.send(()).unwrap();
    });
    assert!(told.try_recv().is_err());
    gate.open();
    told.recv().unwrap();
    thread.join().unwrap();
}

#[test]
fn attach_has_its_rules() {
    const SINGLE: c_uint = 4;
    context(10);
    let (s, host) = (stream(1), pinned(4096));
    let (mut managed, mut device) = (0, 0);
    unsafe {
        assert_eq!(cuMemAllocManaged(&raw mut managed, 4096, 1), 0);
        assert_eq!(cuMemAlloc_v2(&raw mut device, 4096), 0);
        for (ptr, length, flags, code) in [
            (managed, 0, SINGLE, 0),
            (managed, 4096, 2, 0),
            (managed, 4096, 1, 0),
            (managed, 100, 1, 1),
            (managed + 8, 0, 1, 1),
            (managed, 0, 3, 1),
            (managed, 0, 0, 1),
            (device, 0, 1, 1),
            (host as u64, 0, 1, 1),
            (0, 0, 1, 1),
        ] {
            assert_eq!(cuStreamAttachMemAsync(s, ptr, length, flags), code, "{ptr:#x} {length} {flags}");
        }
        assert_eq!(cuStreamAttachMemAsync(null_mut(), managed, 0, SINGLE), 1);
        assert_eq!(cuStreamAttachMemAsync(null_mut(), managed, 0, 1), 0);
        assert_eq!(cuStreamAttachMemAsync(LEGACY, managed, 0, SINGLE), 0);
        assert_eq!(cuStreamAttachMemAsync(PER_THREAD, managed, 0, SINGLE), 0);
    }
}

#[test]
fn memory_operations_write_and_wait() {
    context(11);
    let (a, b) = (stream(1), stream(1));
    let words = pinned(64);
    let address = words as u64;
    let word = |index: usize| unsafe { AtomicU64::from_ptr(words.cast::<u64>().add(index)) };
    // A wait that another stream satisfies, in each of the four ways.
    for (kind, wanted, written) in [(0, 5, 9), (1, 5, 5), (2, 6, 2), (3, 0, 1)] {
        word(0).store(if kind == 3 { u64::MAX } else { 0 }, Ordering::Release);
        unsafe {
            assert_eq!(cuStreamWaitValue64_v2(a, address, wanted, kind), 0);
            assert_eq!(cuStreamWriteValue64_v2(a, address + 8, u64::from(kind) + 1, 0), 0);
            assert_eq!(cuStreamQuery(a), 600);
            assert_eq!(cuStreamWriteValue64_v2(b, address, written, 0), 0);
            assert_eq!(cuStreamSynchronize(a), 0);
        }
        assert_eq!(word(1).load(Ordering::Acquire), u64::from(kind) + 1);
    }
    let mut ops: [CUstreamBatchMemOpParams; 2] = unsafe { std::mem::zeroed() };
    ops[0].pad = [5, address + 16, 77, 0, 0, 0];
    ops[1].pad = [4, address + 16, 77, 1, 0, 0];
    unsafe {
        assert_eq!(cuStreamBatchMemOp_v2(a, 2, ops.as_mut_ptr(), 0), 0);
        assert_eq!(cuStreamSynchronize(a), 0);
        assert_eq!(cuStreamBatchMemOp_v2(a, 2, ops.as_mut_ptr(), 1), 1);
        assert_eq!(cuStreamBatchMemOp_v2(a, 256, ops.as_mut_ptr(), 0), 1);
        assert_eq!(cuStreamWaitValue64_v2(a, 0, 1, 0), 1);
        assert_eq!(cuStreamWaitValue64_v2(a, address + 1, 1, 0), 1);
        assert_eq!(cuStreamWaitValue32_v2(a, address, 1, 4), 1);
        assert_eq!(cuStreamWriteValue32_v2(a, address, 1, 1), 1);
    }
    assert_eq!(word(2).load(Ordering::Acquire), 77);
}

#[test]
fn many_host_functions_are_accepted_behind_a_blocked_one() {
    const MANY: u32 = 200_000;
    context(12);
    let s = stream(1);
    let (go, started) = blocker(s);
    started.recv().unwrap();
    let ran = AtomicU32::new(0);
    for _ in 0..MANY {
        assert_eq!(unsafe { cuLaunchHostFunc(s, Some(count), (&raw const ran).cast_mut().cast()) }, 0);
    }
    go.send(()).unwrap();
    assert_eq!(unsafe { cuStreamSynchronize(s) }, 0);
    assert_eq!(ran.load(Ordering::Acquire), MANY);
}

#[test]
fn attributes_have_their_defaults_and_limits() {
    context(15);
    let (a, b) = (stream(1), stream(1));
    let mut value: CUstreamAttrValue = unsafe { std::mem::zeroed() };
    let at = (&raw mut value).cast::<u32>();
    unsafe {
        assert_eq!(cuStreamGetAttribute(a, 3, &raw mut value), 0);
        assert_eq!(at.read(), u32::MAX);
        for other in [0, 2, 4, 7, 11, 99] {
            assert_eq!(cuStreamGetAttribute(a, other, &raw mut value), 1);
            assert_eq!(cuStreamSetAttribute(a, other, &raw const value), 1);
        }
        assert_eq!(cuStreamGetAttribute(a, 3, null_mut()), 1);
        assert_eq!(cuStreamSetAttribute(a, 3, null()), 1);
        for (attribute, number, code) in
            [(3, 0, 1), (3, 5, 1), (3, 4, 0), (10, 2, 1), (10, 1, 0), (9, 4, 1), (9, 0x0003, 0)]
        {
            at.write(number);
            assert_eq!(cuStreamSetAttribute(a, attribute, &raw const value), code, "{attribute} {number}");
        }
        at.cast::<i32>().write(-77);
        assert_eq!(cuStreamSetAttribute(a, 8, &raw const value), 0);
        assert_eq!(cuStreamCopyAttributes(b, a), 0);
        assert_eq!(cuStreamGetAttribute(b, 3, &raw mut value), 0);
        assert_eq!(at.read(), 4);
        let mut priority = 0;
        assert_eq!(cuStreamGetPriority(b, &raw mut priority), 0);
        assert_eq!(priority, -5);
        assert_eq!(cuStreamCopyAttributes(null_mut(), a), 0);
    }
}
