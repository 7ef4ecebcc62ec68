//! Functions that are not implemented yet: each answers 801.

use std::ffi::{c_char, c_int, c_uint, c_ulonglong, c_void};

use cudarc::driver::sys::*;

use crate::call;
use crate::system::NOT_SUPPORTED;

macro_rules! unsupported {
    ($(fn $name:ident($($argument:ty),*);)*) => {
        $(pub unsafe extern "C" fn $name($(_: $argument),*) -> c_uint {
            call(stringify!($name), || Err(NOT_SUPPORTED))
        })*
    };
}

unsupported! {
    fn cuLaunchHostFunc_v2(CUstream, CUhostFn, *mut c_void, c_uint);
    fn cuStreamBeginCapture_v2(CUstream, c_uint);
    fn cuStreamBeginCaptureToGraph(CUstream, CUgraph, *const CUgraphNode, *const CUgraphEdgeData, usize, c_uint);
    fn cuStreamEndCapture(CUstream, *mut CUgraph);
    fn cuStreamGetCaptureInfo_v3(CUstream, *mut c_uint, *mut u64, *mut CUgraph, *mut *const CUgraphNode, *mut *const CUgraphEdgeData, *mut usize);
    fn cuStreamUpdateCaptureDependencies_v2(CUstream, *mut CUgraphNode, *const CUgraphEdgeData, usize, c_uint);
    fn cuGraphCreate(*mut CUgraph, c_uint);
    fn cuGraphDestroy(CUgraph);
    fn cuGraphGetNodes(CUgraph, *mut CUgraphNode, *mut usize);
    fn cuGraphGetEdges_v2(CUgraph, *mut CUgraphNode, *mut CUgraphNode, *mut CUgraphEdgeData, *mut usize);
    fn cuGraphNodeGetType(CUgraphNode, *mut c_uint);
    fn cuGraphNodeGetDependencies_v2(CUgraphNode, *mut CUgraphNode, *mut CUgraphEdgeData, *mut usize);
    fn cuGraphAddDependencies_v2(CUgraph, *const CUgraphNode, *const CUgraphNode, *const CUgraphEdgeData, usize);
    fn cuGraphAddEmptyNode(*mut CUgraphNode, CUgraph, *const CUgraphNode, usize);
    fn cuGraphAddHostNode(*mut CUgraphNode, CUgraph, *const CUgraphNode, usize, *const CUDA_HOST_NODE_PARAMS);
    fn cuGraphHostNodeGetParams(CUgraphNode, *mut CUDA_HOST_NODE_PARAMS);
    fn cuGraphAddMemcpyNode(*mut CUgraphNode, CUgraph, *const CUgraphNode, usize, *const CUDA_MEMCPY3D, CUcontext);
    fn cuGraphAddMemsetNode(*mut CUgraphNode, CUgraph, *const CUgraphNode, usize, *const CUDA_MEMSET_NODE_PARAMS, CUcontext);
    fn cuGraphAddEventRecordNode(*mut CUgraphNode, CUgraph, *const CUgraphNode, usize, CUevent);
    fn cuGraphAddEventWaitNode(*mut CUgraphNode, CUgraph, *const CUgraphNode, usize, CUevent);
    fn cuGraphAddChildGraphNode(*mut CUgraphNode, CUgraph, *const CUgraphNode, usize, CUgraph);
    fn cuGraphDestroyNode(CUgraphNode);
    fn cuGraphClone(*mut CUgraph, CUgraph);
    fn cuGraphNodeFindInClone(*mut CUgraphNode, CUgraphNode, CUgraph);
    fn cuGraphInstantiateWithFlags(*mut CUgraphExec, CUgraph, c_ulonglong);
    fn cuGraphExecDestroy(CUgraphExec);
    fn cuGraphLaunch(CUgraphExec, CUstream);
    fn cuGraphUpload(CUgraphExec, CUstream);
    fn cuGraphExecUpdate_v2(CUgraphExec, CUgraph, *mut CUgraphExecUpdateResultInfo);
    fn cuGraphDebugDotPrint(CUgraph, *const c_char, c_uint);
    fn cuUserObjectCreate(*mut CUuserObject, *mut c_void, CUhostFn, c_uint, c_uint);
    fn cuUserObjectRetain(CUuserObject, c_uint);
    fn cuUserObjectRelease(CUuserObject, c_uint);
    fn cuGraphRetainUserObject(CUgraph, CUuserObject, c_uint, c_uint);
    fn cuGraphReleaseUserObject(CUgraph, CUuserObject, c_uint);
    fn cuGreenCtxCreate(*mut CUgreenCtx, CUdevResourceDesc, c_int, c_uint);
    fn cuGreenCtxDestroy(CUgreenCtx);
    fn cuCtxFromGreenCtx(*mut CUcontext, CUgreenCtx);
    fn cuGreenCtxStreamCreate(*mut CUstream, CUgreenCtx, c_uint, c_int);
    fn cuDeviceGetDevResource(c_int, *mut CUdevResource, c_uint);
    fn cuDevSmResourceSplitByCount(*mut CUdevResource, *mut c_uint, *const CUdevResource, *mut CUdevResource, c_uint, c_uint);
    fn cuDevResourceGenerateDesc(*mut CUdevResourceDesc, *mut CUdevResource, c_uint);
}
