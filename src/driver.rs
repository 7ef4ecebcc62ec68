//! The one table of driver entry points, filled from the real driver or from softcuda.
//!
//! [`Table`] lists every function that rstream calls, under the name of its *symbol* (`cuStreamDestroy_v2`, not
//! `cuStreamDestroy`) and with the signature of `cudarc`'s binding. The compiler checks each entry twice: against
//! `cudarc::driver::sys`, and against softcuda's function of the same name, so that the software driver cannot drift.
//!
//! Enums cross the table as integers ([`Abi`]). `cudarc` declares them as Rust enums, and a driver that is newer than
//! the bindings may return a value that such an enum does not have, which would be undefined behaviour.

use std::ffi::{CStr, c_char, c_int, c_uint, c_ulonglong, c_ushort, c_void};
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, OnceLock};

use cudarc::driver::sys::{self, *};

use crate::error::{Error, Result, Status};

/// How a type of `cudarc`'s signatures crosses the C boundary: enums as the integers that they are in C.
pub trait Abi {
    /// The type in the table.
    type Raw;
}

macro_rules! abi {
    ($($ty:ty => $raw:ty),* $(,)?) => { $(impl Abi for $ty { type Raw = $raw; })* };
    (same: $($ty:ty),* $(,)?) => { $(impl Abi for $ty { type Raw = $ty; })* };
}

abi! {
    CUstreamCaptureMode => c_uint,
    *mut CUstreamCaptureMode => *mut c_uint,
    *mut CUstreamCaptureStatus => *mut c_uint,
    CUdevice_attribute => c_uint,
    CUpointer_attribute => c_uint,
    CUstreamAttrID => c_uint,
    CUresult => c_uint,
    *mut CUgraphNodeType => *mut c_uint,
    CUdevResourceType => c_uint,
    CUstreamCallback => StreamCallback,
}

abi! { same:
    c_int, c_uint, usize, u64, f32, u8, c_ushort, CUhostFn,
    *mut c_int, *mut c_uint, *mut usize, *mut u64, *mut f32, *mut c_char, *const c_char, *mut c_void, *const c_void,
    *mut *mut c_void, *mut *const c_char,
    CUcontext, *mut CUcontext, CUgreenCtx, *mut CUgreenCtx, CUstream, *mut CUstream, CUevent, *mut CUevent,
    CUmodule, *mut CUmodule, CUfunction, *mut CUfunction,
    CUgraph, *mut CUgraph, CUgraphNode, *mut CUgraphNode, *const CUgraphNode, *mut *const CUgraphNode,
    *mut CUgraphEdgeData, *const CUgraphEdgeData, *mut *const CUgraphEdgeData, CUgraphExec, *mut CUgraphExec,
    *mut CUgraphExecUpdateResultInfo, *const CUDA_HOST_NODE_PARAMS, *mut CUDA_HOST_NODE_PARAMS, *const CUDA_MEMCPY3D,
    *const CUDA_MEMSET_NODE_PARAMS, CUuserObject, *mut CUuserObject,
    *mut CUstreamBatchMemOpParams, *mut CUstreamAttrValue, *const CUstreamAttrValue,
    CUdevResourceDesc, *mut CUdevResourceDesc, *mut CUdevResource, *const CUdevResource,
}

/// `CUstreamCallback` with its status as the integer that it is in C.
pub type StreamCallback = Option<unsafe extern "C" fn(CUstream, c_uint, *mut c_void)>;

macro_rules! table {
    ($($since:literal fn $name:ident($($arg:ident: $ty:ty),* $(,)?);)*) => {
        /// Pointers to the driver's entry points. `None`: this driver does not have the function.
        #[allow(non_snake_case, missing_docs)]
        pub struct Table {
            $(pub $name: Option<unsafe extern "C" fn($(<$ty as Abi>::Raw),*) -> c_uint>,)*
        }

        impl Table {
            fn soft() -> Table {
                Table { $($name: {
                    let entry: unsafe extern "C" fn($(<$ty as Abi>::Raw),*) -> c_uint = softcuda::$name;
                    Some(entry)
                },)* }
            }

            fn cuda(symbols: &Symbols) -> Table {
                Table { $($name: {
                    // SAFETY: the symbol of this name has this signature: the constant below checks it against
                    // cudarc's binding, and `Abi` replaces enums by the integers that they are in C.
                    unsafe { symbols.get::<unsafe extern "C" fn($(<$ty as Abi>::Raw),*) -> c_uint>(concat!(stringify!($name), "\0")) }
                },)* }
            }
        }

        $(const _: unsafe fn($($ty),*) -> CUresult = sys::$name;)*

        /// Each entry point as a call: refuses what this driver does not have, and turns its code into a `Result`.
        ///
        /// # Safety
        /// As the function in CUDA's documentation: handles are alive, pointers valid for what the function reads and
        /// writes.
        #[allow(non_snake_case, missing_docs, clippy::missing_safety_doc, clippy::too_many_arguments)]
        impl Driver {
            $(#[inline]
            pub unsafe fn $name(&self, $($arg: <$ty as Abi>::Raw),*) -> Result<()> {
                match self.table.$name {
                    Some(entry) if self.version >= $since => {
                        // SAFETY: the caller's promise; the entry's signature is checked above.
                        let code = unsafe { entry($($arg),*) };
                        if code == 0 { Ok(()) } else { Err(Error::driver(Status::new(code), stringify!($name))) }
                    }
                    _ => Err(Error::DriverTooOld { function: stringify!($name), needed: $since, found: self.version }),
                }
            })*
        }
    };
}

table! {
    // Devices and contexts.
    2000 fn cuInit(flags: c_uint);
    2020 fn cuDriverGetVersion(version: *mut c_int);
    2000 fn cuDeviceGetCount(count: *mut c_int);
    2000 fn cuDeviceGet(device: *mut c_int, ordinal: c_int);
    2000 fn cuDeviceGetName(name: *mut c_char, len: c_int, dev: c_int);
    2000 fn cuDeviceGetAttribute(pi: *mut c_int, attrib: CUdevice_attribute, dev: c_int);
    7000 fn cuDevicePrimaryCtxRetain(pctx: *mut CUcontext, dev: c_int);
    11000 fn cuDevicePrimaryCtxRelease_v2(dev: c_int);
    11000 fn cuDevicePrimaryCtxReset_v2(dev: c_int);
    4000 fn cuCtxGetCurrent(pctx: *mut CUcontext);
    4000 fn cuCtxSetCurrent(ctx: CUcontext);
    2000 fn cuCtxGetDevice(device: *mut c_int);
    2000 fn cuCtxSynchronize();
    5050 fn cuCtxGetStreamPriorityRange(least: *mut c_int, greatest: *mut c_int);
    3020 fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize);
    6000 fn cuGetErrorName(error: CUresult, name: *mut *const c_char);
    6000 fn cuGetErrorString(error: CUresult, text: *mut *const c_char);

    // Streams.
    2000 fn cuStreamCreate(stream: *mut CUstream, flags: c_uint);
    5050 fn cuStreamCreateWithPriority(stream: *mut CUstream, flags: c_uint, priority: c_int);
    4000 fn cuStreamDestroy_v2(stream: CUstream);
    2000 fn cuStreamQuery(stream: CUstream);
    2000 fn cuStreamSynchronize(stream: CUstream);
    3020 fn cuStreamWaitEvent(stream: CUstream, event: CUevent, flags: c_uint);
    5000 fn cuStreamAddCallback(stream: CUstream, callback: CUstreamCallback, data: *mut c_void, flags: c_uint);
    10000 fn cuLaunchHostFunc(stream: CUstream, function: CUhostFn, data: *mut c_void);
    13020 fn cuLaunchHostFunc_v2(stream: CUstream, function: CUhostFn, data: *mut c_void, sync_mode: c_uint);
    6000 fn cuStreamAttachMemAsync(stream: CUstream, ptr: u64, length: usize, flags: c_uint);
    5050 fn cuStreamGetFlags(stream: CUstream, flags: *mut c_uint);
    5050 fn cuStreamGetPriority(stream: CUstream, priority: *mut c_int);
    12000 fn cuStreamGetId(stream: CUstream, id: *mut c_ulonglong);
    9020 fn cuStreamGetCtx(stream: CUstream, ctx: *mut CUcontext);
    12050 fn cuStreamGetCtx_v2(stream: CUstream, ctx: *mut CUcontext, green: *mut CUgreenCtx);
    12080 fn cuStreamGetDevice(stream: CUstream, device: *mut c_int);
    11000 fn cuStreamCopyAttributes(dst: CUstream, src: CUstream);
    11000 fn cuStreamGetAttribute(stream: CUstream, attr: CUstreamAttrID, value: *mut CUstreamAttrValue);
    11000 fn cuStreamSetAttribute(stream: CUstream, attr: CUstreamAttrID, value: *const CUstreamAttrValue);
    11070 fn cuStreamWaitValue32_v2(stream: CUstream, addr: u64, value: u32, flags: c_uint);
    11070 fn cuStreamWaitValue64_v2(stream: CUstream, addr: u64, value: u64, flags: c_uint);
    11070 fn cuStreamWriteValue32_v2(stream: CUstream, addr: u64, value: u32, flags: c_uint);
    11070 fn cuStreamWriteValue64_v2(stream: CUstream, addr: u64, value: u64, flags: c_uint);
    11070 fn cuStreamBatchMemOp_v2(stream: CUstream, count: c_uint, ops: *mut CUstreamBatchMemOpParams, flags: c_uint);

    // Capture.
    10010 fn cuStreamBeginCapture_v2(stream: CUstream, mode: CUstreamCaptureMode);
    12030 fn cuStreamBeginCaptureToGraph(stream: CUstream, graph: CUgraph, deps: *const CUgraphNode,
        edges: *const CUgraphEdgeData, count: usize, mode: CUstreamCaptureMode);
    10000 fn cuStreamEndCapture(stream: CUstream, graph: *mut CUgraph);
    10000 fn cuStreamIsCapturing(stream: CUstream, status: *mut CUstreamCaptureStatus);
    12030 fn cuStreamGetCaptureInfo_v3(stream: CUstream, status: *mut CUstreamCaptureStatus, id: *mut u64,
        graph: *mut CUgraph, deps: *mut *const CUgraphNode, edges: *mut *const CUgraphEdgeData, count: *mut usize);
    12030 fn cuStreamUpdateCaptureDependencies_v2(stream: CUstream, deps: *mut CUgraphNode,
        edges: *const CUgraphEdgeData, count: usize, flags: c_uint);
    10010 fn cuThreadExchangeStreamCaptureMode(mode: *mut CUstreamCaptureMode);

    // Events.
    2000 fn cuEventCreate(event: *mut CUevent, flags: c_uint);
    2000 fn cuEventRecord(event: CUevent, stream: CUstream);
    11010 fn cuEventRecordWithFlags(event: CUevent, stream: CUstream, flags: c_uint);
    2000 fn cuEventQuery(event: CUevent);
    2000 fn cuEventSynchronize(event: CUevent);
    4000 fn cuEventDestroy_v2(event: CUevent);
    12080 fn cuEventElapsedTime_v2(milliseconds: *mut f32, start: CUevent, end: CUevent);

    // Memory.
    3020 fn cuMemAlloc_v2(ptr: *mut u64, size: usize);
    3020 fn cuMemFree_v2(ptr: u64);
    11020 fn cuMemAllocAsync(ptr: *mut u64, size: usize, stream: CUstream);
    11020 fn cuMemFreeAsync(ptr: u64, stream: CUstream);
    2020 fn cuMemHostAlloc(ptr: *mut *mut c_void, size: usize, flags: c_uint);
    2000 fn cuMemFreeHost(ptr: *mut c_void);
    3020 fn cuMemHostGetDevicePointer_v2(device: *mut u64, host: *mut c_void, flags: c_uint);
    6000 fn cuMemAllocManaged(ptr: *mut u64, size: usize, flags: c_uint);
    4000 fn cuMemcpy(dst: u64, src: u64, size: usize);
    4000 fn cuMemcpyAsync(dst: u64, src: u64, size: usize, stream: CUstream);
    3020 fn cuMemsetD8_v2(dst: u64, value: u8, count: usize);
    3020 fn cuMemsetD8Async(dst: u64, value: u8, count: usize, stream: CUstream);
    3020 fn cuMemsetD16Async(dst: u64, value: c_ushort, count: usize, stream: CUstream);
    3020 fn cuMemsetD32Async(dst: u64, value: c_uint, count: usize, stream: CUstream);
    4000 fn cuPointerGetAttribute(data: *mut c_void, attribute: CUpointer_attribute, ptr: u64);

    // Modules: device work for rstream's own tests.
    2000 fn cuModuleLoadData(module: *mut CUmodule, image: *const c_void);
    2000 fn cuModuleGetFunction(function: *mut CUfunction, module: CUmodule, name: *const c_char);
    2000 fn cuModuleUnload(module: CUmodule);
    4000 fn cuLaunchKernel(function: CUfunction, grid_x: c_uint, grid_y: c_uint, grid_z: c_uint, block_x: c_uint,
        block_y: c_uint, block_z: c_uint, shared: c_uint, stream: CUstream, params: *mut *mut c_void,
        extra: *mut *mut c_void);

    // Graphs.
    10000 fn cuGraphCreate(graph: *mut CUgraph, flags: c_uint);
    10000 fn cuGraphDestroy(graph: CUgraph);
    10000 fn cuGraphGetNodes(graph: CUgraph, nodes: *mut CUgraphNode, count: *mut usize);
    12030 fn cuGraphGetEdges_v2(graph: CUgraph, from: *mut CUgraphNode, to: *mut CUgraphNode,
        edges: *mut CUgraphEdgeData, count: *mut usize);
    10000 fn cuGraphNodeGetType(node: CUgraphNode, kind: *mut CUgraphNodeType);
    12030 fn cuGraphNodeGetDependencies_v2(node: CUgraphNode, deps: *mut CUgraphNode, edges: *mut CUgraphEdgeData,
        count: *mut usize);
    12030 fn cuGraphAddDependencies_v2(graph: CUgraph, from: *const CUgraphNode, to: *const CUgraphNode,
        edges: *const CUgraphEdgeData, count: usize);
    10000 fn cuGraphAddEmptyNode(node: *mut CUgraphNode, graph: CUgraph, deps: *const CUgraphNode, count: usize);
    10000 fn cuGraphAddHostNode(node: *mut CUgraphNode, graph: CUgraph, deps: *const CUgraphNode, count: usize,
        params: *const CUDA_HOST_NODE_PARAMS);
    10000 fn cuGraphHostNodeGetParams(node: CUgraphNode, params: *mut CUDA_HOST_NODE_PARAMS);
    10000 fn cuGraphAddMemcpyNode(node: *mut CUgraphNode, graph: CUgraph, deps: *const CUgraphNode, count: usize,
        params: *const CUDA_MEMCPY3D, ctx: CUcontext);
    10000 fn cuGraphAddMemsetNode(node: *mut CUgraphNode, graph: CUgraph, deps: *const CUgraphNode, count: usize,
        params: *const CUDA_MEMSET_NODE_PARAMS, ctx: CUcontext);
    11010 fn cuGraphAddEventRecordNode(node: *mut CUgraphNode, graph: CUgraph, deps: *const CUgraphNode, count: usize,
        event: CUevent);
    11010 fn cuGraphAddEventWaitNode(node: *mut CUgraphNode, graph: CUgraph, deps: *const CUgraphNode, count: usize,
        event: CUevent);
    10000 fn cuGraphAddChildGraphNode(node: *mut CUgraphNode, graph: CUgraph, deps: *const CUgraphNode, count: usize,
        child: CUgraph);
    10000 fn cuGraphDestroyNode(node: CUgraphNode);
    10000 fn cuGraphClone(clone: *mut CUgraph, graph: CUgraph);
    10000 fn cuGraphNodeFindInClone(node: *mut CUgraphNode, original: CUgraphNode, clone: CUgraph);
    11040 fn cuGraphInstantiateWithFlags(exec: *mut CUgraphExec, graph: CUgraph, flags: c_ulonglong);
    10000 fn cuGraphExecDestroy(exec: CUgraphExec);
    10000 fn cuGraphLaunch(exec: CUgraphExec, stream: CUstream);
    11010 fn cuGraphUpload(exec: CUgraphExec, stream: CUstream);
    12000 fn cuGraphExecUpdate_v2(exec: CUgraphExec, graph: CUgraph, info: *mut CUgraphExecUpdateResultInfo);
    11030 fn cuGraphDebugDotPrint(graph: CUgraph, path: *const c_char, flags: c_uint);
    11030 fn cuUserObjectCreate(object: *mut CUuserObject, ptr: *mut c_void, destroy: CUhostFn, count: c_uint,
        flags: c_uint);
    11030 fn cuUserObjectRetain(object: CUuserObject, count: c_uint);
    11030 fn cuUserObjectRelease(object: CUuserObject, count: c_uint);
    11030 fn cuGraphRetainUserObject(graph: CUgraph, object: CUuserObject, count: c_uint, flags: c_uint);
    11030 fn cuGraphReleaseUserObject(graph: CUgraph, object: CUuserObject, count: c_uint);

    // Green contexts.
    12040 fn cuGreenCtxCreate(ctx: *mut CUgreenCtx, desc: CUdevResourceDesc, dev: c_int, flags: c_uint);
    12040 fn cuGreenCtxDestroy(ctx: CUgreenCtx);
    12040 fn cuCtxFromGreenCtx(ctx: *mut CUcontext, green: CUgreenCtx);
    12050 fn cuGreenCtxStreamCreate(stream: *mut CUstream, green: CUgreenCtx, flags: c_uint, priority: c_int);
    12040 fn cuDeviceGetDevResource(dev: c_int, resource: *mut CUdevResource, kind: CUdevResourceType);
    12040 fn cuDevSmResourceSplitByCount(result: *mut CUdevResource, groups: *mut c_uint, input: *const CUdevResource,
        remaining: *mut CUdevResource, flags: c_uint, min: c_uint);
    12040 fn cuDevResourceGenerateDesc(desc: *mut CUdevResourceDesc, resources: *mut CUdevResource, count: c_uint);
}

/// Which driver a device belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Kind {
    /// The real driver, libcuda.
    Cuda,
    /// softcuda, the software driver in this crate's workspace.
    Soft,
}

/// A driver: its entry points and its version. There is one of each [`Kind`] in a process.
pub struct Driver {
    /// The entry points, for callers that want the bare codes.
    pub table: Table,
    kind: Kind,
    version: u32,
    /// Held, after the streams' gates, while something is captured: the driver does not synchronize graphs, and what it says
    /// about a capture is good until the next call. Nothing that is captured blocks.
    pub(crate) capturing: Mutex<()>,
}

impl fmt::Debug for Driver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Driver").field("kind", &self.kind).field("version", &self.version).finish_non_exhaustive()
    }
}

impl Driver {
    /// The real driver, loaded and initialized (`cuInit`) by the first call.
    ///
    /// # Errors
    /// [`Error::NoDriver`] when libcuda is not on the machine or refuses to start: the text says which.
    pub fn cuda() -> Result<&'static Driver> {
        static CUDA: OnceLock<Result<Driver>> = OnceLock::new();
        CUDA.get_or_init(|| Driver::start(Kind::Cuda, Table::cuda(&Symbols::of_libcuda()?)))
            .as_ref()
            .map_err(Clone::clone)
    }

    /// The software driver.
    pub fn soft() -> &'static Driver {
        static SOFT: OnceLock<Driver> = OnceLock::new();
        SOFT.get_or_init(|| Driver::start(Kind::Soft, Table::soft()).expect("softcuda starts on every machine"))
    }

    fn start(kind: Kind, table: Table) -> Result<Driver> {
        let mut driver = Driver::of(kind, table, u32::MAX);
        let mut version: c_int = 0;
        // SAFETY: cuInit takes no pointer; cuDriverGetVersion writes one int.
        unsafe { driver.cuInit(0).and_then(|()| driver.cuDriverGetVersion(&raw mut version)) }
            .map_err(|error| Error::NoDriver { reason: error.to_string() })?;
        driver.version = u32::try_from(version).unwrap_or(0);
        mark_forked_children();
        Ok(driver)
    }

    /// A driver made of `table`, which says of itself that it has `version`: a stand-in for an older driver in tests.
    /// `cuInit` is not called.
    ///
    /// # Safety
    /// The table's functions are what their names say, or `None`.
    #[must_use]
    pub unsafe fn with_table(kind: Kind, table: Table, version: u32) -> Driver {
        Driver::of(kind, table, version)
    }

    fn of(kind: Kind, table: Table, version: u32) -> Driver {
        Driver { table, kind, version, capturing: Mutex::default() }
    }

    /// The table of the software driver, to build a [`Driver::with_table`] from.
    #[must_use]
    pub fn soft_table() -> Table {
        Table::soft()
    }

    /// Which driver this is.
    #[must_use]
    pub fn kind(&self) -> Kind {
        self.kind
    }

    /// The newest CUDA version that the driver supports, as `cuDriverGetVersion` gives it: 13020 is CUDA 13.2.
    #[must_use]
    pub fn version(&self) -> u32 {
        self.version
    }

    /// The driver's own text for `status`, from `cuGetErrorString`; `None` for a code that it does not know.
    #[must_use]
    pub fn describe(&self, status: Status) -> Option<&'static str> {
        let mut text: *const c_char = std::ptr::null();
        // SAFETY: writes one pointer, to a string of the driver's that lives as long as the process.
        unsafe {
            self.cuGetErrorString(status.code(), &raw mut text).ok()?;
            if text.is_null() { None } else { CStr::from_ptr(text).to_str().ok() }
        }
    }
}

/// This process is a forked child of one that had started a driver.
static FORKED: AtomicBool = AtomicBool::new(false);

/// Whether this process is a forked child of the one that started a driver: no call of the driver is sound here.
pub(crate) fn is_forked_child() -> bool {
    FORKED.load(Ordering::Relaxed)
}

/// From now on, forked children know that they are (`pthread_atfork`): to ask for the process id in each call would take a
/// system call. A child that does not come by `fork`, as of `posix_spawn`, runs none of this library's code.
fn mark_forked_children() {
    #[cfg(unix)]
    {
        extern "C" fn mark() {
            FORKED.store(true, Ordering::Relaxed);
        }
        static ONCE: std::sync::Once = std::sync::Once::new();
        // SAFETY: the handler is safe to call in a forked child: it stores one byte. It stays, since this library is
        // never unloaded while a driver that it started is in use.
        ONCE.call_once(|| assert_eq!(unsafe { libc::pthread_atfork(None, None, Some(mark)) }, 0, "out of memory"));
    }
}

/// The symbols of libcuda.
struct Symbols(());

impl Symbols {
    fn of_libcuda() -> Result<Symbols> {
        // SAFETY: loading libcuda runs its initializers, as for every CUDA program.
        if unsafe { sys::is_culib_present() } {
            Ok(Symbols(()))
        } else {
            Err(Error::NoDriver { reason: "libcuda was not found: no NVIDIA driver is installed".into() })
        }
    }

    /// # Safety
    /// `F` is the function pointer type of the symbol `name`, which ends in NUL.
    unsafe fn get<F: Copy>(&self, name: &str) -> Option<F> {
        // SAFETY: `of_libcuda` found the library, so this does not panic; the type is the caller's promise. The library
        // is never unloaded, so the pointer may be kept.
        unsafe { sys::culib().get::<F>(name.as_bytes()).ok().map(|symbol| *symbol) }
    }
}
