//! A lost context. One test, since the device is lost to all that this process does with it.
#![allow(
    clippy::undocumented_unsafe_blocks,
    reason = "each call is one of the driver's, with handles and pointers of this test"
)]

use std::ffi::{c_uint, c_void};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicU32, Ordering};

use cudarc::driver::sys::CUstream;
use softcuda::*;

const PTX: &std::ffi::CStr = c".visible .entry rstream_work(.param .u64 nanoseconds, .param .u32 code) { ret; }";

unsafe extern "C" fn add_status(_stream: CUstream, status: c_uint, data: *mut c_void) {
    unsafe { &*data.cast::<AtomicU32>() }.fetch_add(status, Ordering::AcqRel);
}

unsafe extern "C" fn add_one(data: *mut c_void) {
    unsafe { &*data.cast::<AtomicU32>() }.fetch_add(1, Ordering::AcqRel);
}

#[test]
fn behind_a_fault_callbacks_run_functions_do_not_and_a_reset_starts_anew() {
    let (mut context, mut module, mut kernel) = (null_mut(), null_mut(), null_mut());
    let (mut s, mut other, mut event) = (null_mut(), null_mut(), null_mut());
    let (sum, runs) = (AtomicU32::new(0), AtomicU32::new(0));
    let at = |counter: &AtomicU32| (&raw const *counter).cast_mut().cast::<c_void>();
    unsafe {
        assert_eq!(cuInit(0), 0);
        assert_eq!(cuDevicePrimaryCtxRetain(&raw mut context, 0), 0);
        assert_eq!(cuCtxSetCurrent(context), 0);
        assert_eq!(cuModuleLoadData(&raw mut module, PTX.as_ptr().cast()), 0);
        assert_eq!(cuModuleGetFunction(&raw mut kernel, module, c"rstream_work".as_ptr()), 0);
        assert_eq!(cuModuleGetFunction(&mut null_mut(), module, c"other".as_ptr()), 500);
        assert_eq!(cuStreamCreate(&raw mut s, 1), 0);
        assert_eq!(cuStreamCreate(&raw mut other, 1), 0);
        assert_eq!(cuEventCreate(&raw mut event, 2), 0);
        let mut word = null_mut();
        assert_eq!(cuMemHostAlloc(&raw mut word, 8, 0), 0);
        // Another stream waits for memory that nobody will write.
        assert_eq!(cuStreamWaitValue64_v2(other, word as u64, 1, 0), 0);
        assert_eq!(cuStreamAddCallback(other, Some(add_status), at(&sum), 0), 0);
        let (mut nanoseconds, mut code) = (2_000_000_u64, 700_u32);
        let mut arguments: [*mut c_void; 2] = [(&raw mut nanoseconds).cast(), null_mut()];
        let mut zero = 0_u32;
        arguments[1] = (&raw mut zero).cast();
        assert_eq!(cuLaunchKernel(kernel, 1, 1, 1, 1, 1, 1, 0, s, arguments.as_mut_ptr(), null_mut()), 0);
        arguments[1] = (&raw mut code).cast();
        assert_eq!(cuLaunchKernel(kernel, 1, 1, 1, 1, 1, 1, 0, s, arguments.as_mut_ptr(), null_mut()), 0);
        for _ in 0..10 {
            assert_eq!(cuStreamAddCallback(s, Some(add_status), at(&sum), 0), 0);
            assert_eq!(cuLaunchHostFunc(s, Some(add_one), at(&runs)), 0);
        }
        assert_eq!(cuEventRecord(event, s), 0);
        assert_eq!(cuStreamSynchronize(s), 700);
        assert_eq!(cuStreamQuery(other), 700);
        assert_eq!(cuEventQuery(event), 700);
        assert_eq!(cuStreamAddCallback(s, Some(add_status), at(&sum), 0), 700);
        assert_eq!(cuLaunchHostFunc(s, Some(add_one), at(&runs)), 700);
        assert_eq!(cuStreamCreate(&mut null_mut(), 1), 700);
        assert_eq!(cuMemAlloc_v2(&mut 0, 8), 700);
        assert_eq!(cuCtxSynchronize(), 700);
        // The reset waits until every callback was told.
        assert_eq!(cuDevicePrimaryCtxReset_v2(0), 0);
        assert_eq!(sum.load(Ordering::Acquire), 11 * 700);
        assert_eq!(runs.load(Ordering::Acquire), 0);
        assert_eq!(cuStreamQuery(s), 400);
        assert_eq!(cuStreamCreate(&raw mut s, 1), 0);
        assert_eq!(cuStreamAddCallback(s, Some(add_status), at(&sum), 0), 0);
        assert_eq!(cuStreamSynchronize(s), 0);
    }
}
