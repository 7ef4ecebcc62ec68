//! A software CUDA driver: the stream functions of the driver API, executed by CPU threads.
//!
//! Every function has the name and the C signature of the real driver's symbol, with enums as the integers that they are
//! in C, and behaves as an H200's driver was seen to behave. It exists so that programs on streams can be developed and
//! tested without a GPU, faults included ([`control`]).
//!
//! The kernels of a graph are the test kernel of `module.rs`; copies of boxes and arrays answer 801
//! (`CUDA_ERROR_NOT_SUPPORTED`).
//!
//! # Safety
//! Handles are never followed, so a wrong one is an error code. Pointers are followed as in the real driver: they must be
//! valid for what the function is documented to read and write.
#![allow(non_snake_case, reason = "the names are CUDA's")]
#![allow(missing_docs, clippy::missing_safety_doc, reason = "the functions are documented in CUDA's own reference")]

mod attributes;
mod capture;
mod codes;
pub mod control;
mod device;
mod event;
mod graph;
mod green;
mod memory;
mod module;
mod stream;
mod system;
mod user_object;

pub use codes::{error_name, error_text};

macro_rules! functions {
    ($($module:ident: $($name:ident)*;)*) => {
        $(pub use $module::{$($name),*};)*
        /// The names of all entry points.
        const FUNCTIONS: &[&str] = &[$($(stringify!($name)),*),*];
    };
}

functions! {
    device: cuInit cuDriverGetVersion cuDeviceGetCount cuDeviceGet cuDeviceGetName cuDeviceGetAttribute
        cuDevicePrimaryCtxRetain cuDevicePrimaryCtxRelease_v2 cuDevicePrimaryCtxReset_v2 cuCtxGetCurrent cuCtxSetCurrent
        cuCtxGetDevice cuCtxSynchronize cuCtxGetStreamPriorityRange cuGetErrorName cuGetErrorString;
    stream: cuStreamCreate cuStreamCreateWithPriority cuStreamDestroy_v2 cuStreamQuery cuStreamSynchronize
        cuStreamWaitEvent cuStreamAddCallback cuLaunchHostFunc cuLaunchHostFunc_v2 cuStreamAttachMemAsync cuStreamGetFlags
        cuStreamGetPriority cuStreamGetId cuStreamGetCtx cuStreamGetCtx_v2 cuStreamGetDevice cuStreamWaitValue32_v2
        cuStreamWaitValue64_v2 cuStreamWriteValue32_v2 cuStreamWriteValue64_v2 cuStreamBatchMemOp_v2;
    event: cuEventCreate cuEventRecord cuEventRecordWithFlags cuEventQuery cuEventSynchronize cuEventDestroy_v2
        cuEventElapsedTime_v2;
    memory: cuMemAlloc_v2 cuMemFree_v2 cuMemAllocAsync cuMemFreeAsync cuMemHostAlloc cuMemFreeHost
        cuMemHostGetDevicePointer_v2 cuMemAllocManaged cuMemcpy cuMemcpyAsync cuMemsetD8_v2 cuMemsetD8Async
        cuMemsetD16Async cuMemsetD32Async cuPointerGetAttribute cuMemGetInfo_v2;
    module: cuModuleLoadData cuModuleGetFunction cuModuleUnload cuLaunchKernel;
    attributes: cuStreamGetAttribute cuStreamSetAttribute cuStreamCopyAttributes;
    capture: cuStreamBeginCapture_v2 cuStreamBeginCaptureToGraph cuStreamEndCapture cuStreamIsCapturing
        cuStreamGetCaptureInfo_v3 cuStreamUpdateCaptureDependencies_v2 cuThreadExchangeStreamCaptureMode;
    graph: cuGraphCreate cuGraphDestroy cuGraphGetNodes cuGraphGetEdges_v2 cuGraphNodeGetType
        cuGraphNodeGetDependencies_v2 cuGraphAddDependencies_v2 cuGraphAddEmptyNode cuGraphAddHostNode
        cuGraphHostNodeGetParams cuGraphAddMemcpyNode cuGraphAddMemsetNode cuGraphAddEventRecordNode
        cuGraphAddEventWaitNode cuGraphAddChildGraphNode cuGraphDestroyNode cuGraphClone cuGraphNodeFindInClone
        cuGraphInstantiateWithFlags cuGraphExecDestroy cuGraphLaunch cuGraphUpload cuGraphExecUpdate_v2
        cuGraphDebugDotPrint;
    user_object: cuUserObjectCreate cuUserObjectRetain cuUserObjectRelease cuGraphRetainUserObject
        cuGraphReleaseUserObject;
    green: cuGreenCtxCreate cuGreenCtxDestroy cuCtxFromGreenCtx cuGreenCtxStreamCreate cuDeviceGetDevResource
        cuDevSmResourceSplitByCount cuDevResourceGenerateDesc;
}

/// The frame of every entry point: injected failures first, then `f`, whose error is the code.
fn call(name: &'static str, f: impl FnOnce() -> system::Answer) -> u32 {
    match control::injected(name).map_or_else(f, Err) {
        Ok(()) => 0,
        Err(code) => code,
    }
}

/// As [`call`], for the functions that answer 800 inside a callback (measured: not all do).
fn call_outside(name: &'static str, f: impl FnOnce() -> system::Answer) -> u32 {
    call(name, || if system::in_callback() { Err(system::NOT_PERMITTED) } else { f() })
}

/// Writes a result through a pointer of the caller's; NULL is an invalid value.
///
/// # Safety
/// `to` is NULL or valid for a write.
unsafe fn put<T>(to: *mut T, value: T) -> system::Answer {
    if to.is_null() {
        return Err(system::INVALID_VALUE);
    }
    // SAFETY: not NULL, so valid for a write: the caller's promise.
    unsafe { to.write(value) };
    Ok(())
}
