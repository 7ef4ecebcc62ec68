//! Full queues, calls inside callbacks, and contexts that are given up. Each test has a device of its own.
#![allow(
    clippy::undocumented_unsafe_blocks,
    reason = "each call is one of the driver's, with handles and pointers of this test"
)]

use std::cell::RefCell;
use std::ffi::{c_int, c_uint, c_void};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel, sync_channel};
use std::sync::{Arc, Once};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use cudarc::driver::sys::{CUevent, CUstream};
use softcuda::*;

const PER_THREAD: CUstream = 2 as CUstream;

/// Makes the context of a device current on this thread.
fn attach(device: c_int) {
    static DEVICES: Once = Once::new();
    // Before the driver reads it, which it does when it is first asked for a device.
    DEVICES.call_once(|| unsafe { std::env::set_var("RSTREAM_SOFT_DEVICES", "16") });
    let mut context = null_mut();
    unsafe {
        assert_eq!(cuInit(0), 0);
        assert_eq!(cuDevicePrimaryCtxRetain(&raw mut context, device), 0);
        assert_eq!(cuCtxSetCurrent(context), 0);
    }
}

fn stream() -> usize {
    let mut stream: CUstream = null_mut();
    assert_eq!(unsafe { cuStreamCreate(&raw mut stream, 1) }, 0);
    stream as usize
}

fn device_memory(bytes: usize) -> u64 {
    let mut address = 0;
    assert_eq!(unsafe { cuMemAlloc_v2(&raw mut address, bytes) }, 0);
    address
}

/// Makes a stream wait until [`open`].
fn gate(stream: usize) -> u64 {
    let mut word = null_mut();
    unsafe {
        assert_eq!(cuMemHostAlloc(&raw mut word, 8, 0), 0);
        assert_eq!(cuStreamWaitValue64_v2(stream as CUstream, word as u64, 1, 0), 0);
    }
    word as u64
}

fn open(gate: u64) {
    unsafe { AtomicU64::from_ptr(gate as *mut u64) }.store(1, Ordering::Release);
}

/// Queues `f` as a host function.
fn host<F: FnOnce() + Send + 'static>(stream: usize, f: F) {
    unsafe extern "C" fn run(data: *mut c_void) {
        (*unsafe { Box::from_raw(data.cast::<Box<dyn FnOnce() + Send>>()) })();
    }
    let f: Box<dyn FnOnce() + Send> = Box::new(f);
    let data = Box::into_raw(Box::new(f)).cast();
    assert_eq!(unsafe { cuLaunchHostFunc(stream as CUstream, Some(run), data) }, 0);
}

/// Queues a host function that waits: the first end lets it go, the second hears of its start.
fn blocker(stream: usize) -> (Sender<()>, Receiver<()>) {
    let ((go, waits), (starts, started)) = (channel(), channel());
    host(stream, move || {
        starts.send(()).unwrap();
        waits.recv().unwrap();
    });
    (go, started)
}

/// Makes streams on another thread until that waits for a thread that blocks the context.
fn until_calls_wait(device: c_int) -> JoinHandle<()> {
    const MOST: usize = 100_000;
    let (makes, made) = sync_channel(0);
    let creator = thread::spawn(move || {
        attach(device);
        while makes.send(()).is_ok() {
            assert_eq!(unsafe { cuStreamDestroy_v2(stream() as CUstream) }, 0);
        }
    });
    let tries = (0..MOST).take_while(|_| made.recv_timeout(Duration::from_millis(100)).is_ok());
    assert!(tries.count() < MOST, "streams are made while a thread blocks the context");
    creator
}

#[test]
fn a_full_queue_blocks_its_enqueuer_and_calls_on_the_context_but_no_work() {
    const DEVICE: c_int = 2;
    const ROOM: u32 = 1021;
    attach(DEVICE);
    let (full, other) = (stream(), stream());
    let memory = device_memory(64);
    let (held, held_other) = (gate(full), gate(other));
    let (ran, has_run) = channel();
    host(other, move || ran.send(()).unwrap());
    let accepted = Arc::new(AtomicU32::new(1));
    let enqueuer = thread::spawn({
        let accepted = Arc::clone(&accepted);
        move || {
            attach(DEVICE);
            for _ in 0..2 * ROOM {
                assert_eq!(unsafe { cuMemsetD8Async(memory, 1, 64, full as CUstream) }, 0);
                accepted.fetch_add(1, Ordering::AcqRel);
            }
        }
    });
    while accepted.load(Ordering::Acquire) < ROOM {
        thread::yield_now();
    }
    let creator = until_calls_wait(DEVICE);
    // Execution, callbacks and questions go on.
    open(held_other);
    has_run.recv().unwrap();
    unsafe {
        assert_eq!(cuStreamSynchronize(other as CUstream), 0);
        assert_eq!(cuStreamQuery(other as CUstream), 0);
    }
    assert_eq!(accepted.load(Ordering::Acquire), ROOM);
    open(held);
    enqueuer.join().unwrap();
    creator.join().unwrap();
    assert_eq!(unsafe { cuCtxSynchronize() }, 0);
}

#[test]
fn a_stream_beyond_the_room_waits_for_all_work_and_makes_other_calls_wait() {
    const DEVICE: c_int = 11;
    const ROOM: usize = 35;
    const NEXT_ROOM: usize = 78;
    attach(DEVICE);
    let (held, busy) = (stream(), stream());
    let gate = gate(held);
    let (go, started) = blocker(busy);
    started.recv().unwrap();
    let mut streams: Vec<usize> = (2..ROOM).map(|_| stream()).collect();
    let (makes, made) = channel();
    let creator = thread::spawn(move || {
        attach(DEVICE);
        makes.send(stream()).unwrap();
    });
    let others = until_calls_wait(DEVICE);
    // Neither of the two is enough. Questions are answered.
    open(gate);
    assert_eq!(unsafe { cuStreamSynchronize(held as CUstream) }, 0);
    assert!(made.try_recv().is_err());
    go.send(()).unwrap();
    streams.push(made.recv().unwrap());
    creator.join().unwrap();
    others.join().unwrap();
    // The room stays when streams go.
    for stream in streams {
        assert_eq!(unsafe { cuStreamDestroy_v2(stream as CUstream) }, 0);
    }
    let (go, started) = blocker(busy);
    started.recv().unwrap();
    for _ in 2..NEXT_ROOM {
        stream();
    }
    go.send(()).unwrap();
    assert_eq!(unsafe { cuCtxSynchronize() }, 0);
}

#[test]
fn while_a_callback_runs_freeing_waits_and_makes_other_calls_wait() {
    const DEVICE: c_int = 3;
    attach(DEVICE);
    let (busy, other) = (stream(), stream());
    let memory = device_memory(64);
    let (go, started) = blocker(busy);
    started.recv().unwrap();
    unsafe {
        assert_eq!(cuStreamQuery(busy as CUstream), 600);
        assert_eq!(cuMemsetD8Async(device_memory(64), 1, 64, other as CUstream), 0);
        assert_eq!(cuStreamSynchronize(other as CUstream), 0);
        assert_eq!(cuStreamDestroy_v2(stream() as CUstream), 0);
    }
    let over = Arc::new(AtomicBool::new(false));
    let freer = thread::spawn({
        let over = Arc::clone(&over);
        move || {
            attach(DEVICE);
            assert_eq!(unsafe { cuMemFree_v2(memory) }, 0);
            assert!(over.load(Ordering::Acquire));
        }
    });
    let creator = until_calls_wait(DEVICE);
    over.store(true, Ordering::Release);
    go.send(()).unwrap();
    freer.join().unwrap();
    creator.join().unwrap();
}

#[test]
fn what_is_allowed_inside_a_callback() {
    unsafe extern "C" fn nothing(_data: *mut c_void) {}
    unsafe extern "C" fn nothing_either(_stream: CUstream, _status: c_uint, _data: *mut c_void) {}
    attach(4);
    let (s, idle, doomed) = (stream(), stream(), stream());
    let mut events: [CUevent; 2] = [null_mut(); 2];
    for event in &mut events {
        assert_eq!(unsafe { cuEventCreate(&raw mut *event, 2) }, 0);
    }
    let events = events.map(|event| event as usize);
    let (tell, told) = channel();
    host(s, move || {
        let [event, doomed_event] = events.map(|event| event as CUevent);
        let (s, idle, doomed) = (s as CUstream, idle as CUstream, doomed as CUstream);
        let (mut flags, mut id, mut memory) = (0, 0, 0);
        tell.send(unsafe {
            [
                cuStreamGetFlags(s, &raw mut flags),
                cuStreamGetId(s, &raw mut id),
                cuStreamIsCapturing(s, &raw mut flags),
                cuThreadExchangeStreamCaptureMode(&raw mut flags),
                cuEventQuery(event),
                cuStreamQuery(idle),
                cuEventRecord(event, s),
                cuLaunchHostFunc(s, Some(nothing), null_mut()),
                cuStreamAddCallback(s, Some(nothing_either), null_mut(), 0),
                cuStreamSynchronize(idle),
                cuStreamDestroy_v2(doomed),
                cuEventDestroy_v2(doomed_event),
                // It waits for this very callback.
                cuStreamQuery(s),
                cuMemAlloc_v2(&raw mut memory, 8),
            ]
        })
        .unwrap();
    });
    assert_eq!(told.recv().unwrap(), [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 600, 800]);
    assert_eq!(unsafe { cuStreamSynchronize(s as CUstream) }, 0);
}

#[test]
fn the_last_release_ends_a_context_and_retaining_it_starts_anew() {
    const DEVICE: c_int = 5;
    attach(DEVICE);
    let s = stream();
    let memory = device_memory(64);
    let held = gate(s);
    let (ran, has_run) = channel();
    host(s, move || ran.send(()).unwrap());
    open(held);
    unsafe {
        assert_eq!(cuDevicePrimaryCtxRelease_v2(DEVICE), 0);
        // It waited for the work.
        has_run.try_recv().unwrap();
        assert_eq!(cuDevicePrimaryCtxRelease_v2(DEVICE), 201);
        assert_eq!(cuStreamQuery(s as CUstream), 400);
        assert_eq!(cuStreamQuery(null_mut()), 709);
        assert_eq!(cuStreamCreate(&mut null_mut(), 1), 709);
        attach(DEVICE);
        assert_eq!(cuStreamQuery(null_mut()), 0);
        assert_eq!(cuStreamQuery(s as CUstream), 400);
        assert_eq!(cuMemFree_v2(memory), 1);
        assert_eq!(cuStreamDestroy_v2(stream() as CUstream), 0);
    }
}

#[test]
fn a_lost_context_answers_empty_copies_too_and_never_leaves_one_half_done() {
    const DEVICE: c_int = 6;
    attach(DEVICE);
    let s = stream();
    let memory = device_memory(1 << 20);
    let held = gate(s);
    let copier = thread::spawn(move || {
        attach(DEVICE);
        let mut target = vec![0_u8; 1 << 20];
        // Blocks until the copy is dropped.
        assert_eq!(unsafe { cuMemcpyAsync(target.as_mut_ptr() as u64, memory, 1 << 20, s as CUstream) }, 709);
    });
    control::destroy_context(DEVICE as u32);
    copier.join().unwrap();
    unsafe {
        assert_eq!(cuMemcpyAsync(memory, memory, 0, s as CUstream), 709);
        assert_eq!(cuMemsetD8Async(memory, 0, 0, s as CUstream), 709);
    }
    open(held);
}

#[test]
fn pointers_tell_where_they_belong() {
    attach(7);
    let memory = device_memory(1000);
    let mut host = null_mut();
    let (mut base, mut size) = (0_u64, 0_usize);
    unsafe {
        assert_eq!(cuMemHostAlloc(&raw mut host, 10, 0), 0);
        assert_eq!(cuPointerGetAttribute((&raw mut base).cast(), 11, memory + 999), 0);
        assert_eq!(cuPointerGetAttribute((&raw mut size).cast(), 12, memory + 999), 0);
        assert_eq!((base, size), (memory, 1000));
        assert_eq!(cuPointerGetAttribute((&raw mut base).cast(), 4, memory), 1);
        assert_eq!(cuPointerGetAttribute((&raw mut base).cast(), 4, host as u64), 0);
        assert_eq!(base, host as u64);
        assert_eq!(cuPointerGetAttribute(null_mut(), 11, memory), 1);
    }
    assert!(memory.is_multiple_of(256) && (host as u64).is_multiple_of(256));
}

#[test]
fn the_destructors_of_a_thread_may_call_the_driver() {
    struct Last(Sender<u32>);
    impl Drop for Last {
        fn drop(&mut self) {
            let mut id = 0;
            self.0.send(unsafe { cuStreamGetId(PER_THREAD, &raw mut id) }).unwrap();
        }
    }
    thread_local!(static LAST: RefCell<Option<Last>> = const { RefCell::new(None) });
    let (tell, told) = channel();
    thread::spawn(move || {
        attach(8);
        // First in, so that it goes after the thread's stream.
        LAST.set(Some(Last(tell)));
        let mut id = 0;
        assert_eq!(unsafe { cuStreamGetId(PER_THREAD, &raw mut id) }, 0);
    })
    .join()
    .unwrap();
    let code = told.recv().unwrap();
    assert!(code == 0 || code == 400, "{code}");
}
