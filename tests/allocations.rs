//! What an enqueue allocates. In a process of its own: the allocator counts.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::ffi::c_void;
use std::ptr;

use rstream::{Api, Buffer, Device, Result, Signal, Status, Stream, StreamOptions, testing};

thread_local! {
    static COUNT: Cell<usize> = const { Cell::new(0) };
}

/// The system's allocator, counting the allocations of each thread.
struct Counting;

// SAFETY: as the system's.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        COUNT.set(COUNT.get() + 1);
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn allocations(work: impl FnOnce() -> Result<()>) -> Result<usize> {
    let before = COUNT.get();
    work()?;
    Ok(COUNT.get() - before)
}

unsafe extern "C" fn nothing(_stream: cudarc::driver::sys::CUstream, _status: u32, _data: *mut c_void) {}

/// As many allocations as the driver itself makes, which the software driver does in the same process.
#[test]
fn a_reusable_callback_is_queued_without_an_allocation() {
    const COUNT: usize = 64;
    Api::attach(|api| {
        let device = Device::soft(api, 0)?;
        let word = Buffer::pinned(api, device, 8)?;
        for signal in [Signal::Driver, Signal::Memory] {
            let stream = Stream::new(api, device, StreamOptions { signal, ..StreamOptions::default() })?;
            let driver = device.driver();
            let raw = stream.handle()? as cudarc::driver::sys::CUstream;
            let bare = || match signal {
                // SAFETY: the stream is alive; the function uses nothing.
                Signal::Driver => unsafe { driver.cuStreamAddCallback(raw, Some(nothing), ptr::null_mut(), 0) },
                _ => {
                    // A write of 0 and a wait for at least 0, as `CUstreamBatchMemOpParams` lays them out.
                    let mut operations = [[0_u64; 6]; 2];
                    for (operation, kind) in operations.iter_mut().zip([5, 4]) {
                        operation[..2].copy_from_slice(&[kind, word.ptr()]);
                    }
                    // SAFETY: the stream and the word are alive, and the operations valid.
                    unsafe { driver.cuStreamBatchMemOp_v2(raw, 2, operations.as_mut_ptr().cast(), 0) }
                }
            };
            let reusable = stream.reusable_callback(|_: Status| ());
            // The first of each pair grows what is kept.
            let [_, theirs, _, ours] = [false, false, true, true].map(|reused| {
                let held = testing::hold(api, &stream).expect("an idle stream");
                let count =
                    allocations(|| (0..COUNT).try_for_each(|_| if reused { reusable.enqueue(api) } else { bare() }));
                held.release();
                stream.synchronize(api, None, &mut || false).expect("nothing fails");
                count.expect("accepted")
            });
            assert_eq!(ours, theirs, "{signal:?}");
        }
        Ok::<(), rstream::Error>(())
    })
    .unwrap()
    .unwrap();
}
