//! The objects of one case, and what each word of the language calls.

use std::collections::{BTreeMap, HashMap};
use std::ffi::{c_int, c_void};
use std::fmt::Write as _;
use std::ptr;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use cudarc::driver::sys::*;
use rstream::driver::{Driver, StreamCallback};
use rstream::testing::KERNEL;

/// What a call answers that this driver does not have: `CUDA_ERROR_CALL_REQUIRES_NEWER_DRIVER`.
const MISSING: u32 = 36;
/// What output variables have before a call.
const UNTOUCHED: usize = 0x5A5A_5A50;
/// No gate holds longer than this.
const LONGEST_GATE: Duration = Duration::from_secs(30);
/// How long `runs` and `running` wait.
pub const PATIENCE: Duration = Duration::from_secs(3);

/// The answer of a call, or what is wrong with the line.
pub type Outcome = Result<String, String>;

/// The device under test: made once for all cases.
pub struct Bench {
    pub driver: &'static Driver,
    pub device: c_int,
    pub context: usize,
    /// The kernel `rstream_work(nanoseconds, code)`.
    pub kernel: usize,
}

/// Calls an entry point of the table and gives its code.
macro_rules! ask {
    ($bench:expr, $name:ident($($argument:expr),* $(,)?)) => {
        match $bench.driver.table.$name {
            // SAFETY: every pointer is NULL where the driver checks it, or to a variable of the right type that outlives
            // the call; handles are made by the driver and given up once, and what work uses is freed after that work.
            Some(entry) => unsafe { entry($($argument),*) },
            None => MISSING,
        }
    };
}

impl Bench {
    /// Retains the primary context of device 0 and loads the kernel, which would wait for all work if it came later.
    pub fn new(driver: &'static Driver) -> Bench {
        let mut bench = Bench { driver, device: 0, context: 0, kernel: 0 };
        let mut context: CUcontext = ptr::null_mut();
        let mut module: CUmodule = ptr::null_mut();
        let mut kernel: CUfunction = ptr::null_mut();
        assert_eq!(ask!(bench, cuDeviceGet(&raw mut bench.device, 0)), 0);
        assert_eq!(ask!(bench, cuDevicePrimaryCtxRetain(&raw mut context, bench.device)), 0);
        assert_eq!(ask!(bench, cuCtxSetCurrent(context)), 0);
        assert_eq!(ask!(bench, cuModuleLoadData(&raw mut module, KERNEL.as_ptr().cast())), 0);
        assert_eq!(ask!(bench, cuModuleGetFunction(&raw mut kernel, module, c"rstream_work".as_ptr())), 0);
        bench.context = context as usize;
        bench.kernel = kernel as usize;
        assert_eq!(bench.launch(0, 0, 0), 0);
        assert_eq!(ask!(bench, cuCtxSynchronize()), 0);
        bench
    }

    /// Makes the context current on this thread.
    pub fn bind(&self) {
        ask!(self, cuCtxSetCurrent(self.context as CUcontext));
    }

    fn launch(&self, stream: usize, nanoseconds: u64, code: u32) -> u32 {
        let (mut nanoseconds, mut code) = (nanoseconds, code);
        let mut arguments: [*mut c_void; 2] = [(&raw mut nanoseconds).cast(), (&raw mut code).cast()];
        let (function, parameters) = (self.kernel as CUfunction, arguments.as_mut_ptr());
        ask!(self, cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, stream as CUstream, parameters, ptr::null_mut()))
    }
}

/// What a name stands for. Handles are kept as integers, so that they may cross threads.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Object {
    Stream(usize),
    Event(usize),
    Graph(usize),
    Node(usize),
    Exec(usize),
    /// A user object.
    Counted(usize),
    Module(usize),
    Context(usize),
    Green(usize),
    Descriptor(usize),
    /// A `CUdevResource` in leaked memory.
    Resource(usize),
    Memory(Memory),
    Function(&'static HostFunction),
    Id(u64),
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Memory {
    kind: MemoryKind,
    address: u64,
    len: usize,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum MemoryKind {
    Device,
    /// From `cuMemAllocAsync`.
    Pool,
    /// A node of a graph owns it.
    Graph,
    Pinned,
    Managed,
    Pageable,
}

/// A host function that counts its runs. A gate waits to be opened; a caller makes one call of the driver.
pub struct HostFunction {
    name: String,
    machine: &'static Machine,
    gate: bool,
    call: Option<Vec<String>>,
    record: Mutex<Record>,
}

#[derive(Default)]
struct Record {
    entered: usize,
    left: usize,
    statuses: Vec<u32>,
    streams: Vec<usize>,
    answer: Option<String>,
}

impl PartialEq for HostFunction {
    fn eq(&self, other: &HostFunction) -> bool {
        ptr::eq(self, other)
    }
}

impl Eq for HostFunction {}

impl std::fmt::Debug for HostFunction {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "function {}", self.name)
    }
}

impl HostFunction {
    fn record(&self) -> MutexGuard<'_, Record> {
        self.record.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn data(&'static self) -> *mut c_void {
        ptr::from_ref(self).cast_mut().cast()
    }

    fn run(&self, from: Option<(usize, u32)>) {
        {
            let mut record = self.record();
            record.entered += 1;
            if let Some((stream, status)) = from {
                record.streams.push(stream);
                record.statuses.push(status);
            }
        }
        self.machine.state().order.push(self.name.clone());
        if self.gate {
            self.machine.pass_gate(&self.name);
        }
        if let Some(call) = &self.call {
            let words: Vec<&str> = call.iter().map(String::as_str).collect();
            let outcome = std::panic::catch_unwind(|| self.machine.call(CALLBACK_THREAD, &words));
            self.record().answer = Some(match outcome {
                Ok(Ok(answer)) => answer,
                Ok(Err(error)) => error,
                Err(_) => "panicked".into(),
            });
        }
        self.record().left += 1;
    }
}

/// The number of no thread of the language: calls in a host function are the driver's thread's.
const CALLBACK_THREAD: usize = usize::MAX;

unsafe extern "C" fn host_function(data: *mut c_void) {
    // SAFETY: `data` is a `HostFunction` that is leaked.
    unsafe { &*data.cast::<HostFunction>() }.run(None);
}

unsafe extern "C" fn stream_callback(stream: CUstream, status: u32, data: *mut c_void) {
    // SAFETY: as above.
    unsafe { &*data.cast::<HostFunction>() }.run(Some((stream as usize, status)));
}

/// A wait on memory that was queued: cleaning up makes it true.
#[derive(Clone, Copy)]
struct Wait {
    address: u64,
    wide: bool,
    value: u64,
    kind: u32,
}

#[derive(Default)]
struct State {
    names: HashMap<String, Object>,
    /// What has to be given up, in the order it was made.
    live: Vec<Object>,
    /// Streams whose capture was begun, and by which thread.
    begun: Vec<(usize, usize)>,
    waits: Vec<Wait>,
    /// Host functions in the order in which they started.
    order: Vec<String>,
    /// References of the case itself to its user objects.
    references: BTreeMap<usize, u32>,
    open: Vec<String>,
    closing: bool,
}

/// One case's state. Leaked: host functions may run at any time.
pub struct Machine {
    bench: &'static Bench,
    state: Mutex<State>,
    gates: Condvar,
}

impl Machine {
    pub fn new(bench: &'static Bench) -> &'static Machine {
        Box::leak(Box::new(Machine { bench, state: Mutex::default(), gates: Condvar::new() }))
    }

    pub fn bench(&self) -> &'static Bench {
        self.bench
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn pass_gate(&self, name: &str) {
        let until = Instant::now() + LONGEST_GATE;
        let mut state = self.state();
        while !state.closing && !state.open.iter().any(|open| open == name) && Instant::now() < until {
            (state, _) = self.gates.wait_timeout(state, LONGEST_GATE).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Opens every gate, and makes every wait on memory true. Called again and again while a case is cleaned up, because
    /// two waits on one word may want different values.
    pub fn release_all(&self) {
        let mut state = self.state();
        state.closing = true;
        self.gates.notify_all();
        for wait in &state.waits {
            let value = if wait.kind & 3 == 3 { !wait.value } else { wait.value };
            poke(wait.address, wait.wide, value);
        }
    }

    // Names.

    fn find(&self, name: &str) -> Result<Object, String> {
        self.state().names.get(name).copied().ok_or_else(|| format!("nothing is named {name:?}"))
    }

    fn bind(&self, name: &str, object: Object) {
        self.state().names.insert(name.to_owned(), object);
    }

    /// Names a new object that has to be given up.
    fn own(&self, name: &str, object: Object) {
        let mut state = self.state();
        state.names.insert(name.to_owned(), object);
        if !state.live.contains(&object) {
            state.live.push(object);
        }
    }

    fn given_up(&self, object: Object) {
        let mut state = self.state();
        state.live.retain(|&live| live != object);
        if let Object::Memory(Memory { address, len, .. }) = object {
            state.waits.retain(|wait| wait.address.checked_sub(address).is_none_or(|offset| offset >= len as u64));
        }
    }

    fn stream(&self, name: &str) -> Result<CUstream, String> {
        match name {
            "null" => Ok(ptr::null_mut()),
            "legacy" => Ok(1 as CUstream),
            "per_thread" => Ok(2 as CUstream),
            _ => match self.find(name)? {
                Object::Stream(handle) => Ok(handle as CUstream),
                other => Err(format!("{name} is {other:?}, not a stream")),
            },
        }
    }

    fn event(&self, name: &str) -> Result<CUevent, String> {
        match name {
            "null" => Ok(ptr::null_mut()),
            _ => match self.find(name)? {
                Object::Event(handle) => Ok(handle as CUevent),
                other => Err(format!("{name} is {other:?}, not an event")),
            },
        }
    }

    fn graph(&self, name: &str) -> Result<CUgraph, String> {
        match name {
            "null" => Ok(ptr::null_mut()),
            _ => match self.find(name)? {
                Object::Graph(handle) => Ok(handle as CUgraph),
                other => Err(format!("{name} is {other:?}, not a graph")),
            },
        }
    }

    fn node(&self, name: &str) -> Result<CUgraphNode, String> {
        match name {
            "null" => Ok(ptr::null_mut()),
            _ => match self.find(name)? {
                Object::Node(handle) => Ok(handle as CUgraphNode),
                other => Err(format!("{name} is {other:?}, not a node")),
            },
        }
    }

    fn nodes(&self, names: &[&str]) -> Result<Vec<CUgraphNode>, String> {
        names.iter().map(|name| self.node(name)).collect()
    }

    fn exec(&self, name: &str) -> Result<CUgraphExec, String> {
        match name {
            "null" => Ok(ptr::null_mut()),
            _ => match self.find(name)? {
                Object::Exec(handle) => Ok(handle as CUgraphExec),
                other => Err(format!("{name} is {other:?}, not an executable graph")),
            },
        }
    }

    fn user_object(&self, name: &str) -> Result<CUuserObject, String> {
        match name {
            "null" => Ok(ptr::null_mut()),
            _ => match self.find(name)? {
                Object::Counted(handle) => Ok(handle as CUuserObject),
                other => Err(format!("{name} is {other:?}, not a user object")),
            },
        }
    }

    fn green(&self, name: &str) -> Result<CUgreenCtx, String> {
        match name {
            "null" => Ok(ptr::null_mut()),
            _ => match self.find(name)? {
                Object::Green(handle) => Ok(handle as CUgreenCtx),
                other => Err(format!("{name} is {other:?}, not a green context")),
            },
        }
    }

    fn resource(&self, name: &str) -> Result<usize, String> {
        match name {
            "null" => Ok(0),
            _ => match self.find(name)? {
                Object::Resource(place) => Ok(place),
                other => Err(format!("{name} is {other:?}, not a resource")),
            },
        }
    }

    fn context(&self, name: &str) -> Result<CUcontext, String> {
        match name {
            "null" => Ok(ptr::null_mut()),
            "primary" => Ok(self.bench.context as CUcontext),
            _ => match self.find(name)? {
                Object::Context(handle) => Ok(handle as CUcontext),
                other => Err(format!("{name} is {other:?}, not a context")),
            },
        }
    }

    fn memory(&self, name: &str) -> Result<Memory, String> {
        match self.find(name)? {
            Object::Memory(memory) => Ok(memory),
            other => Err(format!("{name} is {other:?}, not memory")),
        }
    }

    /// `null`, `d`, `d+8`.
    fn address(&self, text: &str) -> Result<u64, String> {
        if text == "null" {
            return Ok(0);
        }
        match text.split_once('+') {
            Some((name, offset)) => Ok(self.memory(name)?.address + number::<u64>(offset)?),
            None => Ok(self.memory(text)?.address),
        }
    }

    /// The function of this name, made now if there is none: it counts its runs.
    fn function(&'static self, name: &str) -> Result<Option<&'static HostFunction>, String> {
        if name == "null" {
            return Ok(None);
        }
        if let Ok(found) = self.find(name) {
            return match found {
                Object::Function(function) => Ok(Some(function)),
                other => Err(format!("{name} is {other:?}, not a function")),
            };
        }
        Ok(Some(self.new_function(name, false, None)))
    }

    fn new_function(&'static self, name: &str, gate: bool, call: Option<Vec<String>>) -> &'static HostFunction {
        let record = Mutex::default();
        let function = HostFunction { name: name.to_owned(), machine: self, gate, call, record };
        let function: &'static HostFunction = Box::leak(Box::new(function));
        self.bind(name, Object::Function(function));
        function
    }

    fn name_of_stream(&self, handle: usize) -> String {
        match handle {
            0 => "null".into(),
            1 => "legacy".into(),
            2 => "per_thread".into(),
            _ => self.name_of(Object::Stream(handle)),
        }
    }

    fn name_of(&self, object: Object) -> String {
        let state = self.state();
        let mut names: Vec<&String> =
            state.names.iter().filter(|(_, known)| **known == object).map(|(name, _)| name).collect();
        names.sort();
        names.first().map_or("other".into(), |name| (*name).clone())
    }

    fn name_of_context(&self, handle: usize) -> String {
        match handle {
            0 => "null".into(),
            UNTOUCHED => "untouched".into(),
            _ if handle == self.bench.context => "primary".into(),
            _ => self.name_of(Object::Context(handle)),
        }
    }

    /// Whether work in the stream becomes nodes. Not asked of the legacy stream.
    fn captures(&self, stream: CUstream) -> bool {
        let mut status = 0;
        stream as usize > 1 && ask!(self.bench, cuStreamIsCapturing(stream, &raw mut status)) == 0 && status == 1
    }

    // What needs no driver.

    /// The words that are about the case itself: `None` if the word is a call of the driver.
    pub fn local(&'static self, words: &[&str]) -> Option<Outcome> {
        Some(match words {
            ["gate", name] => {
                self.new_function(name, true, None);
                Ok("0".into())
            }
            ["function", name, call @ ..] => {
                let name = name.trim_end_matches(':');
                self.new_function(name, false, Some(call.iter().map(|&word| word.to_owned()).collect()));
                Ok("0".into())
            }
            ["release", name] => {
                self.state().open.push((*name).to_owned());
                self.gates.notify_all();
                Ok("0".into())
            }
            ["running", name] => self.about(name, |function| {
                if wait_until(|| function.record().entered > 0) { "0".into() } else { "it does not start".into() }
            }),
            ["running_not", name] => self.about(name, |function| {
                std::thread::sleep(Duration::from_millis(20));
                if function.record().entered == 0 { "0".into() } else { "it started".into() }
            }),
            ["runs", name, ..] => self.about(name, |function| {
                let wanted: usize = words.get(2).and_then(|count| count.parse().ok()).unwrap_or(0);
                wait_until(|| function.record().left >= wanted);
                // A run too many would come now.
                std::thread::sleep(Duration::from_millis(5));
                function.record().left.to_string()
            }),
            ["status", name] => self.about(name, |function| spaced(function.record().statuses.iter())),
            ["handle", name] => self.about(name, |function| {
                let streams: Vec<usize> = function.record().streams.clone();
                spaced(streams.into_iter().map(|stream| self.name_of_stream(stream)))
            }),
            ["answer", name] => self.about(name, |function| {
                wait_until(|| function.record().left > 0);
                function.record().answer.clone().unwrap_or_else(|| "it did not run".into())
            }),
            ["order"] => Ok(spaced(self.state().order.iter())),
            ["same", a, b] => match (self.find(a), self.find(b)) {
                (Ok(a), Ok(b)) => Ok(if a == b { "yes" } else { "no" }.into()),
                (Err(error), _) | (_, Err(error)) => Err(error),
            },
            ["pageable", name, size] => number::<usize>(size).map(|len| {
                let address = vec![0_u64; len.div_ceil(8)].leak().as_mut_ptr() as u64;
                self.bind(name, Object::Memory(Memory { kind: MemoryKind::Pageable, address, len }));
                "0".into()
            }),
            ["fill", name, value] => self.memory(name).and_then(|memory| {
                if matches!(memory.kind, MemoryKind::Pinned | MemoryKind::Managed | MemoryKind::Pageable) {
                    // SAFETY: host memory of this length that lives to the end of the case.
                    unsafe { ptr::write_bytes(memory.address as *mut u8, number(value)?, memory.len) };
                    Ok("0".into())
                } else {
                    Err(format!("the host cannot write to {name}"))
                }
            }),
            ["poke", address, value] | ["poke32", address, value] => self
                .address(address)
                .and_then(|address| Ok((address, number::<u64>(value)?)))
                .map(|(address, value)| {
                    poke(address, words[0] == "poke", value);
                    "0".into()
                }),
            ["peek", address] => self.address(address).map(|address| peek(address).to_string()),
            ["sleep", milliseconds] => number(milliseconds).map(|milliseconds| {
                std::thread::sleep(Duration::from_millis(milliseconds));
                "0".into()
            }),
            _ => return None,
        })
    }

    fn about(&'static self, name: &str, tell: impl FnOnce(&'static HostFunction) -> String) -> Outcome {
        self.function(name)?.map(tell).ok_or_else(|| "null is not a function".into())
    }

    // Calls.

    /// Makes the call on this thread. The answer is the code, and the outputs if the code is 0 (or if they matter).
    #[allow(clippy::too_many_lines, reason = "one arm for each word of the language")]
    pub fn call(&'static self, thread: usize, words: &[&str]) -> Outcome {
        let bench = self.bench;
        let code = match words {
            ["repeat", count, call @ ..] => {
                let mut answer = String::new();
                for _ in 0..number::<u32>(count)? {
                    answer = self.call(thread, call)?;
                    if answer.split(' ').next() != Some("0") {
                        break;
                    }
                }
                return Ok(answer);
            }

            // Contexts.
            ["driver_version"] => {
                let mut version = 0;
                ask!(bench, cuDriverGetVersion(&raw mut version))
            }
            ["device_count"] => {
                let mut count = 0;
                ask!(bench, cuDeviceGetCount(&raw mut count))
            }
            ["ctx_sync"] => ask!(bench, cuCtxSynchronize()),
            ["ctx_get"] => {
                let mut context = UNTOUCHED as CUcontext;
                let code = ask!(bench, cuCtxGetCurrent(&raw mut context));
                return Ok(with(code, self.name_of_context(context as usize)));
            }
            ["ctx_set", name] => ask!(bench, cuCtxSetCurrent(self.context(name)?)),
            ["ctx_get_device"] => {
                let mut device = -1;
                let code = ask!(bench, cuCtxGetDevice(&raw mut device));
                return Ok(with(code, if device == bench.device { "device" } else { "other" }));
            }
            ["ctx_retain"] => {
                let mut context = ptr::null_mut();
                let code = ask!(bench, cuDevicePrimaryCtxRetain(&raw mut context, bench.device));
                return Ok(with(code, self.name_of_context(context as usize)));
            }
            ["ctx_release"] => ask!(bench, cuDevicePrimaryCtxRelease_v2(bench.device)),
            ["ctx_reset"] => ask!(bench, cuDevicePrimaryCtxReset_v2(bench.device)),
            ["priority_range", which @ ..] => {
                let (mut least, mut greatest) = (99, 99);
                let first = if which.contains(&"no_least") { ptr::null_mut() } else { &raw mut least };
                let second = if which.contains(&"no_greatest") { ptr::null_mut() } else { &raw mut greatest };
                let code = ask!(bench, cuCtxGetStreamPriorityRange(first, second));
                return Ok(with(code, format!("{least} {greatest}")));
            }
            ["mem_info"] => {
                let (mut free, mut total) = (0, 0);
                let code = ask!(bench, cuMemGetInfo_v2(&raw mut free, &raw mut total));
                return Ok(with(code, if free <= total && total > 0 { "plausible" } else { "implausible" }));
            }
            ["error_name", error] => {
                let mut name = ptr::null();
                let code = ask!(bench, cuGetErrorName(number(error)?, &raw mut name));
                // SAFETY: the driver's own string, or NULL.
                let text = (!name.is_null()).then(|| unsafe { std::ffi::CStr::from_ptr(name) }.to_string_lossy());
                return Ok(format!("{code} {}", text.as_deref().unwrap_or("null")));
            }

            // Streams.
            ["stream", name, options @ ..] => {
                let mut handle = UNTOUCHED as CUstream;
                let out = if *name == "null" { ptr::null_mut() } else { &raw mut handle };
                let flags = options.first().map_or(Ok(0), |flags| flag(STREAM_FLAGS, flags))?;
                let code = match options.get(1) {
                    Some(priority) => ask!(bench, cuStreamCreateWithPriority(out, flags, number(priority)?)),
                    None => ask!(bench, cuStreamCreate(out, flags)),
                };
                if code == 0 {
                    self.own(name, Object::Stream(handle as usize));
                }
                code
            }
            ["stream_destroy", name] => {
                let stream = self.stream(name)?;
                let code = ask!(bench, cuStreamDestroy_v2(stream));
                if code == 0 {
                    self.given_up(Object::Stream(stream as usize));
                }
                code
            }
            ["query", name] => ask!(bench, cuStreamQuery(self.stream(name)?)),
            ["sync", name] => ask!(bench, cuStreamSynchronize(self.stream(name)?)),
            ["wait_event", name, event, flags @ ..] => {
                let flags = flags.first().map_or(Ok(0), |flags| flag(EXTERNAL, flags))?;
                ask!(bench, cuStreamWaitEvent(self.stream(name)?, self.event(event)?, flags))
            }
            ["add_callback", name, function, flags @ ..] => {
                let function = self.function(function)?;
                let callback: StreamCallback = function.map(|_| stream_callback as _);
                let data = function.map_or(ptr::null_mut(), HostFunction::data);
                let flags = flags.first().map_or(Ok(0), |flags| number(flags))?;
                ask!(bench, cuStreamAddCallback(self.stream(name)?, callback, data, flags))
            }
            ["launch_host", name, function] => {
                let function = self.function(function)?;
                let data = function.map_or(ptr::null_mut(), HostFunction::data);
                ask!(bench, cuLaunchHostFunc(self.stream(name)?, function.map(|_| host_function as _), data))
            }
            ["attach", name, address, len, flags] => {
                let flags = flag(ATTACH, flags)?;
                if flags == 0 {
                    return Err("flags 0 crash the real driver".into());
                }
                ask!(bench, cuStreamAttachMemAsync(self.stream(name)?, self.address(address)?, number(len)?, flags))
            }
            ["get_flags", name, out @ ..] => {
                let mut flags = 99;
                let out = if out == ["null"] { ptr::null_mut() } else { &raw mut flags };
                let code = ask!(bench, cuStreamGetFlags(self.stream(name)?, out));
                return Ok(with(code, flags));
            }
            ["get_priority", name, out @ ..] => {
                let mut priority = 99;
                let out = if out == ["null"] { ptr::null_mut() } else { &raw mut priority };
                let code = ask!(bench, cuStreamGetPriority(self.stream(name)?, out));
                return Ok(with(code, priority));
            }
            ["get_id", name, out @ ..] => {
                let mut id = 0;
                let place = if out == ["null"] { ptr::null_mut() } else { &raw mut id };
                let code = ask!(bench, cuStreamGetId(self.stream(name)?, place));
                if let (0, [out]) = (code, out) {
                    self.bind(out, Object::Id(id));
                }
                code
            }
            ["get_ctx", name] => {
                let mut context = UNTOUCHED as CUcontext;
                let code = ask!(bench, cuStreamGetCtx(self.stream(name)?, &raw mut context));
                return Ok(with(code, self.name_of_context(context as usize)));
            }
            ["get_ctx_v2", name] => {
                let mut context = UNTOUCHED as CUcontext;
                let mut green = UNTOUCHED as CUgreenCtx;
                let code = ask!(bench, cuStreamGetCtx_v2(self.stream(name)?, &raw mut context, &raw mut green));
                let green = match green as usize {
                    0 => "null".into(),
                    UNTOUCHED => "untouched".into(),
                    handle => self.name_of(Object::Green(handle)),
                };
                return Ok(with(code, format!("{} {green}", self.name_of_context(context as usize))));
            }
            ["get_device", name, out @ ..] => {
                let mut device = -1;
                let out = if out == ["null"] { ptr::null_mut() } else { &raw mut device };
                let code = ask!(bench, cuStreamGetDevice(self.stream(name)?, out));
                return Ok(with(code, if device == bench.device { "device" } else { "other" }));
            }
            ["kernel", name, options @ ..] => {
                let microseconds: u64 = options.first().map_or(Ok(0), |time| number(time))?;
                bench.launch(self.stream(name)? as usize, microseconds * 1000, 0)
            }
            ["fault", name] => bench.launch(self.stream(name)? as usize, 0, 700),

            // Attributes.
            ["copy_attributes", to, from] => ask!(bench, cuStreamCopyAttributes(self.stream(to)?, self.stream(from)?)),
            ["get_attribute", name, attribute, out @ ..] => {
                return self.get_attribute(name, attribute, out == ["null"]);
            }
            ["set_attribute", name, attribute, value @ ..] => self.set_attribute(name, attribute, value)?,

            // Stream memory operations.
            ["wait_value32", name, address, value, kind] => {
                let wait = self.wait(address, false, value, kind)?;
                let value = u32::try_from(wait.value).map_err(|error| error.to_string())?;
                ask!(bench, cuStreamWaitValue32_v2(self.stream(name)?, wait.address, value, wait.kind))
            }
            ["wait_value64", name, address, value, kind] => {
                let wait = self.wait(address, true, value, kind)?;
                ask!(bench, cuStreamWaitValue64_v2(self.stream(name)?, wait.address, wait.value, wait.kind))
            }
            ["write_value32", name, address, value, flags @ ..] => {
                let (address, value) = (self.address(address)?, number(value)?);
                let flags = flags.first().map_or(Ok(0), |flags| number(flags))?;
                ask!(bench, cuStreamWriteValue32_v2(self.stream(name)?, address, value, flags))
            }
            ["write_value64", name, address, value, flags @ ..] => {
                let (address, value) = (self.address(address)?, number(value)?);
                let flags = flags.first().map_or(Ok(0), |flags| number(flags))?;
                ask!(bench, cuStreamWriteValue64_v2(self.stream(name)?, address, value, flags))
            }
            ["batch", name, count, operations @ ..] => {
                let count = if *count == "all" { operations.len() } else { number(count)? };
                let mut all: Vec<[u64; 6]> =
                    operations.iter().map(|operation| self.operation(operation)).collect::<Result<_, _>>()?;
                // Counts that are too large are refused, but the array has to be as long.
                all.resize(count.max(all.len()).max(1), [0; 6]);
                let place = if operations == ["null"] { ptr::null_mut() } else { all.as_mut_ptr() };
                let count = u32::try_from(count).map_err(|error| error.to_string())?;
                ask!(bench, cuStreamBatchMemOp_v2(self.stream(name)?, count, place.cast(), 0))
            }

            // Capture.
            ["begin", name, mode] => {
                let stream = self.stream(name)?;
                let code = ask!(bench, cuStreamBeginCapture_v2(stream, flag(MODES, mode)?));
                if code == 0 {
                    self.state().begun.push((stream as usize, thread));
                }
                code
            }
            ["begin_to_graph", name, graph, mode, nodes @ ..] => {
                let (stream, nodes) = (self.stream(name)?, self.nodes(nodes)?);
                let place = if nodes.is_empty() { ptr::null() } else { nodes.as_ptr() };
                let (graph, mode) = (self.graph(graph)?, flag(MODES, mode)?);
                let code =
                    ask!(bench, cuStreamBeginCaptureToGraph(stream, graph, place, ptr::null(), nodes.len(), mode));
                if code == 0 {
                    self.state().begun.push((stream as usize, thread));
                }
                code
            }
            ["begin_to_graph_null_nodes", name, graph, mode] => {
                let (stream, graph, mode) = (self.stream(name)?, self.graph(graph)?, flag(MODES, mode)?);
                ask!(bench, cuStreamBeginCaptureToGraph(stream, graph, ptr::null(), ptr::null(), 1, mode))
            }
            ["end", name, graph @ ..] => {
                let mut handle = UNTOUCHED as CUgraph;
                let out = if graph == ["null"] { ptr::null_mut() } else { &raw mut handle };
                let code = ask!(bench, cuStreamEndCapture(self.stream(name)?, out));
                let what = match handle as usize {
                    UNTOUCHED => "untouched",
                    0 => "null",
                    _ => "graph",
                };
                if what == "graph" {
                    self.own(graph.first().unwrap_or(&"the graph that end gave"), Object::Graph(handle as usize));
                }
                return Ok(format!("{code} {what}"));
            }
            ["is_capturing", name, out @ ..] => {
                let mut status = 99;
                let out = if out == ["null"] { ptr::null_mut() } else { &raw mut status };
                let code = ask!(bench, cuStreamIsCapturing(self.stream(name)?, out));
                return Ok(with(code, status_name(status)));
            }
            ["capture_info", name, options @ ..] => return self.capture_info(name, options),
            ["update_dependencies", name, how, nodes @ ..] => {
                let mut nodes = self.nodes(nodes)?;
                let place = if nodes.is_empty() { ptr::null_mut() } else { nodes.as_mut_ptr() };
                let (stream, how) = (self.stream(name)?, flag(UPDATES, how)?);
                ask!(bench, cuStreamUpdateCaptureDependencies_v2(stream, place, ptr::null(), nodes.len(), how))
            }
            ["update_dependencies_null_nodes", name, how] => {
                let (stream, how) = (self.stream(name)?, flag(UPDATES, how)?);
                ask!(bench, cuStreamUpdateCaptureDependencies_v2(stream, ptr::null_mut(), ptr::null(), 1, how))
            }
            ["exchange_mode", mode] => {
                let mut value = if *mode == "null" { 0 } else { flag(MODES, mode)? };
                let place = if *mode == "null" { ptr::null_mut() } else { &raw mut value };
                let code = ask!(bench, cuThreadExchangeStreamCaptureMode(place));
                let old = MODES.iter().find(|(_, known)| *known == value).map_or("unknown", |(name, _)| name);
                return Ok(with(code, old));
            }

            // Events.
            ["event", name, flags @ ..] => {
                let mut handle = UNTOUCHED as CUevent;
                let out = if *name == "null" { ptr::null_mut() } else { &raw mut handle };
                let flags = flags.iter().try_fold(0, |all, name| Ok::<u32, String>(all | flag(EVENT_FLAGS, name)?))?;
                let code = ask!(bench, cuEventCreate(out, flags));
                if code == 0 {
                    self.own(name, Object::Event(handle as usize));
                }
                code
            }
            ["event_destroy", name] => {
                let event = self.event(name)?;
                let code = ask!(bench, cuEventDestroy_v2(event));
                if code == 0 {
                    self.given_up(Object::Event(event as usize));
                }
                code
            }
            ["record", event, name] => ask!(bench, cuEventRecord(self.event(event)?, self.stream(name)?)),
            ["record", event, name, flags] => {
                let flags = flag(EXTERNAL, flags)?;
                ask!(bench, cuEventRecordWithFlags(self.event(event)?, self.stream(name)?, flags))
            }
            ["event_query", event] => ask!(bench, cuEventQuery(self.event(event)?)),
            ["event_sync", event] => ask!(bench, cuEventSynchronize(self.event(event)?)),
            ["elapsed", start, end, out @ ..] => {
                let mut milliseconds = 0.0_f32;
                let out = if out == ["null"] { ptr::null_mut() } else { &raw mut milliseconds };
                let code = ask!(bench, cuEventElapsedTime_v2(out, self.event(start)?, self.event(end)?));
                return Ok(with(code, if milliseconds < 0.0 { "backward" } else { "forward" }));
            }

            // Memory.
            ["alloc", name, size] => {
                let (mut address, len) = (0, number(size)?);
                let out = if *name == "null" { ptr::null_mut() } else { &raw mut address };
                let code = ask!(bench, cuMemAlloc_v2(out, len));
                self.own_memory(code, name, MemoryKind::Device, address, len)
            }
            ["alloc_async", name, size, stream] => {
                let (mut address, len) = (0, number(size)?);
                let stream = self.stream(stream)?;
                let code = ask!(bench, cuMemAllocAsync(&raw mut address, len, stream));
                let kind = if self.captures(stream) { MemoryKind::Graph } else { MemoryKind::Pool };
                self.own_memory(code, name, kind, address, len)
            }
            ["host_alloc", name, size, flags @ ..] => {
                let (mut place, len) = (ptr::null_mut(), number(size)?);
                let out = if *name == "null" { ptr::null_mut() } else { &raw mut place };
                let flags = flags.first().map_or(Ok(0), |flags| number(flags))?;
                let code = ask!(bench, cuMemHostAlloc(out, len, flags));
                self.own_memory(code, name, MemoryKind::Pinned, place as u64, len)
            }
            ["managed", name, size, flags] => {
                let (mut address, len) = (0, number(size)?);
                let out = if *name == "null" { ptr::null_mut() } else { &raw mut address };
                let code = ask!(bench, cuMemAllocManaged(out, len, flag(ATTACH, flags)?));
                self.own_memory(code, name, MemoryKind::Managed, address, len)
            }
            ["free", name] => {
                let code = ask!(bench, cuMemFree_v2(self.address(name)?));
                self.gave_memory_up(code, name)
            }
            ["free_host", name] => {
                let code = ask!(bench, cuMemFreeHost(self.address(name)? as *mut c_void));
                self.gave_memory_up(code, name)
            }
            ["free_async", name, stream] => {
                let stream = self.stream(stream)?;
                let code = ask!(bench, cuMemFreeAsync(self.address(name)?, stream));
                if self.captures(stream) { code } else { self.gave_memory_up(code, name) }
            }
            ["device_pointer", name, flags @ ..] => {
                let mut address = 0;
                let flags = flags.first().map_or(Ok(0), |flags| number(flags))?;
                let host = self.address(name)?;
                let code = ask!(bench, cuMemHostGetDevicePointer_v2(&raw mut address, host as *mut c_void, flags));
                return Ok(with(code, if address == host { "same" } else { "other" }));
            }
            ["copy", to, from, size] => {
                ask!(bench, cuMemcpy(self.address(to)?, self.address(from)?, number(size)?))
            }
            ["copy_async", to, from, size, name] => {
                let (to, from, size) = (self.address(to)?, self.address(from)?, number(size)?);
                ask!(bench, cuMemcpyAsync(to, from, size, self.stream(name)?))
            }
            ["memset", to, value, count] => {
                ask!(bench, cuMemsetD8_v2(self.address(to)?, number(value)?, number(count)?))
            }
            ["memset8", to, value, count, name] => {
                let (to, value, count) = (self.address(to)?, number(value)?, number(count)?);
                ask!(bench, cuMemsetD8Async(to, value, count, self.stream(name)?))
            }
            ["memset16", to, value, count, name] => {
                let (to, value, count) = (self.address(to)?, number(value)?, number(count)?);
                ask!(bench, cuMemsetD16Async(to, value, count, self.stream(name)?))
            }
            ["memset32", to, value, count, name] => {
                let (to, value, count) = (self.address(to)?, number(value)?, number(count)?);
                ask!(bench, cuMemsetD32Async(to, value, count, self.stream(name)?))
            }
            ["bytes", name] => return self.bytes(name),
            ["pointer", address, attribute] => {
                let mut value = 0_u64;
                let attribute = flag(POINTER_ATTRIBUTES, attribute)?;
                let address = self.address(address)?;
                let code = ask!(bench, cuPointerGetAttribute((&raw mut value).cast(), attribute, address));
                return Ok(with(code, self.name_of_pointer_attribute(attribute, value)));
            }

            // Modules.
            ["module", name] => {
                let mut handle = ptr::null_mut();
                let code = ask!(bench, cuModuleLoadData(&raw mut handle, KERNEL.as_ptr().cast()));
                if code == 0 {
                    self.own(name, Object::Module(handle as usize));
                }
                code
            }
            ["module_unload", name] => {
                let object = self.find(name)?;
                let Object::Module(handle) = object else { return Err(format!("{name} is not a module")) };
                let code = ask!(bench, cuModuleUnload(handle as CUmodule));
                if code == 0 {
                    self.given_up(object);
                }
                code
            }

            // Graphs.
            ["graph", name, flags @ ..] => {
                let mut handle = ptr::null_mut();
                let out = if *name == "null" { ptr::null_mut() } else { &raw mut handle };
                let flags = flags.first().map_or(Ok(0), |flags| number(flags))?;
                let code = ask!(bench, cuGraphCreate(out, flags));
                if code == 0 {
                    self.own(name, Object::Graph(handle as usize));
                }
                code
            }
            ["graph_destroy", name] => {
                let graph = self.graph(name)?;
                let code = ask!(bench, cuGraphDestroy(graph));
                if code == 0 {
                    self.given_up(Object::Graph(graph as usize));
                }
                code
            }
            ["nodes", name] => {
                let (code, nodes) = self.all_nodes(self.graph(name)?);
                return Ok(with(code, nodes.len()));
            }
            ["nodes_in_room_for", name, room] => {
                let mut nodes = vec![UNTOUCHED as CUgraphNode; number(room)?];
                let mut count = nodes.len();
                let code = ask!(bench, cuGraphGetNodes(self.graph(name)?, nodes.as_mut_ptr(), &raw mut count));
                let nulls = nodes.iter().filter(|node| node.is_null()).count();
                return Ok(with(code, format!("{count} {nulls}")));
            }
            ["node_types", name] => {
                let (code, nodes) = self.all_nodes(self.graph(name)?);
                let mut names: Vec<String> = nodes.iter().map(|&node| self.type_of(node)).collect();
                names.sort();
                return Ok(with(code, spaced(names.iter())));
            }
            ["name_nodes", name, names @ ..] => {
                let (code, nodes) = self.all_nodes(self.graph(name)?);
                if nodes.len() != names.len() {
                    return Err(format!("{code}: there are {} nodes", nodes.len()));
                }
                for (name, node) in names.iter().zip(nodes) {
                    self.bind(name, Object::Node(node as usize));
                }
                code
            }
            ["edges", name] => {
                let mut count = 0;
                let graph = self.graph(name)?;
                let (from, to, edges) = (ptr::null_mut(), ptr::null_mut(), ptr::null_mut());
                let code = ask!(bench, cuGraphGetEdges_v2(graph, from, to, edges, &raw mut count));
                return Ok(with(code, count));
            }
            ["node_type", name] => {
                let mut kind = 99;
                let code = ask!(bench, cuGraphNodeGetType(self.node(name)?, &raw mut kind));
                return Ok(with(code, node_type_name(kind)));
            }
            ["node_dependencies", name] => {
                let mut count = 0;
                let (node, nodes) = (self.node(name)?, ptr::null_mut());
                let code = ask!(bench, cuGraphNodeGetDependencies_v2(node, nodes, ptr::null_mut(), &raw mut count));
                return Ok(with(code, count));
            }
            ["add_dependency", graph, from, to] => {
                let (from, to) = ([self.node(from)?], [self.node(to)?]);
                let graph = self.graph(graph)?;
                ask!(bench, cuGraphAddDependencies_v2(graph, from.as_ptr(), to.as_ptr(), ptr::null(), 1))
            }
            ["empty_node", name, graph, nodes @ ..] => {
                let (graph, nodes) = (self.graph(graph)?, self.nodes(nodes)?);
                let mut node = ptr::null_mut();
                let place = first(&nodes);
                let code = ask!(bench, cuGraphAddEmptyNode(&raw mut node, graph, place, nodes.len()));
                self.name_node(code, name, node)
            }
            ["empty_node_null_nodes", graph] => {
                let mut node = ptr::null_mut();
                ask!(bench, cuGraphAddEmptyNode(&raw mut node, self.graph(graph)?, ptr::null(), 1))
            }
            ["host_node", name, graph, function, nodes @ ..] => {
                let (graph, nodes, function) = (self.graph(graph)?, self.nodes(nodes)?, self.function(function)?);
                let data = function.map_or(ptr::null_mut(), HostFunction::data);
                let parameters = CUDA_HOST_NODE_PARAMS { fn_: function.map(|_| host_function as _), userData: data };
                let mut node = ptr::null_mut();
                let out = if *name == "null" { ptr::null_mut() } else { &raw mut node };
                let place = first(&nodes);
                let code = ask!(bench, cuGraphAddHostNode(out, graph, place, nodes.len(), &raw const parameters));
                self.name_node(code, name, node)
            }
            ["host_node_null_parameters", graph] => {
                let mut node = ptr::null_mut();
                ask!(bench, cuGraphAddHostNode(&raw mut node, self.graph(graph)?, ptr::null(), 0, ptr::null()))
            }
            ["host_node_function", node, function] => {
                let mut parameters = CUDA_HOST_NODE_PARAMS { fn_: None, userData: ptr::null_mut() };
                let code = ask!(bench, cuGraphHostNodeGetParams(self.node(node)?, &raw mut parameters));
                let data = self.function(function)?.map_or(ptr::null_mut(), HostFunction::data);
                return Ok(with(code, if parameters.userData == data { "yes" } else { "no" }));
            }
            ["memset_node", name, graph, to, value, count, nodes @ ..] => {
                let (graph, nodes, dst) = (self.graph(graph)?, self.nodes(nodes)?, self.address(to)?);
                let (value, width) = (number(value)?, number(count)?);
                let parameters = CUDA_MEMSET_NODE_PARAMS { dst, pitch: 0, value, elementSize: 1, width, height: 1 };
                let mut node = ptr::null_mut();
                let (place, context) = (first(&nodes), bench.context as CUcontext);
                let parameters = &raw const parameters;
                let code =
                    ask!(bench, cuGraphAddMemsetNode(&raw mut node, graph, place, nodes.len(), parameters, context));
                self.name_node(code, name, node)
            }
            ["memcpy_node", name, graph, to, from, count, nodes @ ..] => {
                let (graph, nodes) = (self.graph(graph)?, self.nodes(nodes)?);
                let parameters = linear_copy(self.address(to)?, self.address(from)?, number(count)?);
                let mut node = ptr::null_mut();
                let (place, context) = (first(&nodes), bench.context as CUcontext);
                let parameters = &raw const parameters;
                let code =
                    ask!(bench, cuGraphAddMemcpyNode(&raw mut node, graph, place, nodes.len(), parameters, context));
                self.name_node(code, name, node)
            }
            ["record_node", name, graph, event, nodes @ ..] => {
                let (graph, nodes, event) = (self.graph(graph)?, self.nodes(nodes)?, self.event(event)?);
                let mut node = ptr::null_mut();
                let place = first(&nodes);
                let code = ask!(bench, cuGraphAddEventRecordNode(&raw mut node, graph, place, nodes.len(), event));
                self.name_node(code, name, node)
            }
            ["wait_node", name, graph, event, nodes @ ..] => {
                let (graph, nodes, event) = (self.graph(graph)?, self.nodes(nodes)?, self.event(event)?);
                let mut node = ptr::null_mut();
                let place = first(&nodes);
                let code = ask!(bench, cuGraphAddEventWaitNode(&raw mut node, graph, place, nodes.len(), event));
                self.name_node(code, name, node)
            }
            ["child_node", name, graph, child, nodes @ ..] => {
                let (graph, nodes, child) = (self.graph(graph)?, self.nodes(nodes)?, self.graph(child)?);
                let mut node = ptr::null_mut();
                let place = first(&nodes);
                let code = ask!(bench, cuGraphAddChildGraphNode(&raw mut node, graph, place, nodes.len(), child));
                self.name_node(code, name, node)
            }
            ["node_destroy", name] => ask!(bench, cuGraphDestroyNode(self.node(name)?)),
            ["clone", name, graph] => {
                let mut handle = ptr::null_mut();
                let out = if *name == "null" { ptr::null_mut() } else { &raw mut handle };
                let code = ask!(bench, cuGraphClone(out, self.graph(graph)?));
                if code == 0 {
                    self.own(name, Object::Graph(handle as usize));
                }
                code
            }
            ["find_in_clone", name, node, graph] => {
                let mut found = ptr::null_mut();
                let code = ask!(bench, cuGraphNodeFindInClone(&raw mut found, self.node(node)?, self.graph(graph)?));
                self.name_node(code, name, found)
            }
            ["instantiate", name, graph, flags @ ..] => {
                let mut handle = ptr::null_mut();
                let out = if *name == "null" { ptr::null_mut() } else { &raw mut handle };
                let flags = flags.first().map_or(Ok(0), |flags| number(flags))?;
                let code = ask!(bench, cuGraphInstantiateWithFlags(out, self.graph(graph)?, flags));
                if code == 0 {
                    self.own(name, Object::Exec(handle as usize));
                }
                code
            }
            ["exec_destroy", name] => {
                let exec = self.exec(name)?;
                let code = ask!(bench, cuGraphExecDestroy(exec));
                if code == 0 {
                    self.given_up(Object::Exec(exec as usize));
                }
                code
            }
            ["graph_launch", exec, name] => ask!(bench, cuGraphLaunch(self.exec(exec)?, self.stream(name)?)),
            ["upload", exec, name] => ask!(bench, cuGraphUpload(self.exec(exec)?, self.stream(name)?)),
            ["exec_update", exec, graph] => {
                let mut info = std::mem::MaybeUninit::<CUgraphExecUpdateResultInfo>::zeroed();
                let code = ask!(bench, cuGraphExecUpdate_v2(self.exec(exec)?, self.graph(graph)?, info.as_mut_ptr()));
                // SAFETY: zeroed, and read as the integer that the enum is in C.
                let result = unsafe { info.as_ptr().cast::<u32>().read() };
                let name = UPDATE_RESULTS.get(result as usize).copied().unwrap_or("unknown");
                return Ok(format!("{code} {name}"));
            }
            ["dot", graph, path] => {
                let directory = std::env::temp_dir();
                let file = directory.join(format!("rstream-conformance-{}.dot", std::process::id()));
                let place = match *path {
                    "null" => None,
                    "file" => Some(file.to_string_lossy().into_owned()),
                    "empty" => Some(String::new()),
                    _ => Some("/nowhere/at/all.dot".into()),
                };
                let place = place.map(|place| std::ffi::CString::new(place).expect("no NUL in a path"));
                let graph = self.graph(graph)?;
                let code =
                    ask!(bench, cuGraphDebugDotPrint(graph, place.as_ref().map_or(ptr::null(), |p| p.as_ptr()), 0));
                let text = std::fs::read_to_string(&file).unwrap_or_default();
                let _ = std::fs::remove_file(&file);
                return Ok(with(code, if text.contains("digraph") { "digraph" } else { "nothing" }));
            }

            // User objects.
            ["user_object", name, function, options @ ..] => {
                let function = self.function(function)?;
                let data = function.map_or(ptr::null_mut(), HostFunction::data);
                let count = options.first().map_or(Ok(1), |count| number(count))?;
                let flags = options.get(1).map_or(Ok(1), |flags| number(flags))?;
                let mut handle = ptr::null_mut();
                let out = if *name == "null" { ptr::null_mut() } else { &raw mut handle };
                let destroy: CUhostFn = function.map(|_| host_function as _);
                let code = ask!(bench, cuUserObjectCreate(out, data, destroy, count, flags));
                if code == 0 {
                    self.bind(name, Object::Counted(handle as usize));
                    self.state().references.insert(handle as usize, count);
                }
                code
            }
            ["user_object_retain", name, count] => {
                let (object, count) = (self.user_object(name)?, number(count)?);
                let code = ask!(bench, cuUserObjectRetain(object, count));
                self.count_references(code, object, count, true)
            }
            ["user_object_release", name, count] => {
                let (object, count) = (self.user_object(name)?, number(count)?);
                let code = ask!(bench, cuUserObjectRelease(object, count));
                self.count_references(code, object, count, false)
            }
            ["graph_retain_object", graph, name, count, flags] => {
                let (object, count, flags) = (self.user_object(name)?, number(count)?, flag(MOVES, flags)?);
                let code = ask!(bench, cuGraphRetainUserObject(self.graph(graph)?, object, count, flags));
                if flags == 1 { self.count_references(code, object, count, false) } else { code }
            }
            ["graph_release_object", graph, name, count] => {
                let (graph, object) = (self.graph(graph)?, self.user_object(name)?);
                ask!(bench, cuGraphReleaseUserObject(graph, object, number(count)?))
            }

            // Green contexts.
            ["sm_resource", name] => {
                let place = new_resource();
                let code = ask!(bench, cuDeviceGetDevResource(bench.device, place as *mut CUdevResource, 1));
                self.bind(name, Object::Resource(place));
                code
            }
            ["resource_of_kind", kind] => {
                let place = new_resource() as *mut CUdevResource;
                ask!(bench, cuDeviceGetDevResource(bench.device, place, number(kind)?))
            }
            ["split", name, from, least] => {
                let (part, rest) = (new_resource(), new_resource());
                let mut groups = 1;
                let from = self.resource(from)? as *const CUdevResource;
                let (out, rest) = (part as *mut CUdevResource, rest as *mut CUdevResource);
                let code =
                    ask!(bench, cuDevSmResourceSplitByCount(out, &raw mut groups, from, rest, 0, number(least)?));
                self.bind(name, Object::Resource(part));
                return Ok(with(code, groups));
            }
            ["descriptor", name, resource] => {
                let mut handle = ptr::null_mut();
                let resource = self.resource(resource)? as *mut CUdevResource;
                let code = ask!(bench, cuDevResourceGenerateDesc(&raw mut handle, resource, 1));
                self.bind(name, Object::Descriptor(handle as usize));
                code
            }
            ["green", name, descriptor, flags] => {
                let handle = match *descriptor {
                    "null" => 0,
                    name => match self.find(name)? {
                        Object::Descriptor(handle) => handle,
                        other => return Err(format!("{name} is {other:?}, not a descriptor")),
                    },
                };
                let mut green = ptr::null_mut();
                let descriptor = handle as CUdevResourceDesc;
                let code = ask!(bench, cuGreenCtxCreate(&raw mut green, descriptor, bench.device, number(flags)?));
                if code == 0 {
                    self.own(name, Object::Green(green as usize));
                }
                code
            }
            ["green_destroy", name] => {
                let green = self.green(name)?;
                let code = ask!(bench, cuGreenCtxDestroy(green));
                if code == 0 {
                    self.given_up(Object::Green(green as usize));
                }
                code
            }
            ["ctx_from_green", name, green] => {
                let mut context = ptr::null_mut();
                let code = ask!(bench, cuCtxFromGreenCtx(&raw mut context, self.green(green)?));
                if code == 0 {
                    self.bind(name, Object::Context(context as usize));
                }
                return Ok(with(code, self.name_of_context(context as usize)));
            }
            ["green_stream", name, green, flags, priority] => {
                let mut handle = ptr::null_mut();
                let (green, flags, priority) = (self.green(green)?, flag(STREAM_FLAGS, flags)?, number(priority)?);
                let out = if *name == "null" { ptr::null_mut() } else { &raw mut handle };
                let code = ask!(bench, cuGreenCtxStreamCreate(out, green, flags, priority));
                if code == 0 {
                    self.own(name, Object::Stream(handle as usize));
                }
                code
            }
            _ => return Err(format!("no such call: {}", words.join(" "))),
        };
        Ok(code.to_string())
    }

    // Parts of calls.

    fn own_memory(&self, code: u32, name: &str, kind: MemoryKind, address: u64, len: usize) -> u32 {
        if code == 0 {
            self.own(name, Object::Memory(Memory { kind, address, len }));
        }
        code
    }

    fn gave_memory_up(&self, code: u32, name: &str) -> u32 {
        if let (0, Ok(object)) = (code, self.find(name)) {
            self.given_up(object);
        }
        code
    }

    fn name_node(&self, code: u32, name: &str, node: CUgraphNode) -> u32 {
        if code == 0 {
            self.bind(name, Object::Node(node as usize));
        }
        code
    }

    fn count_references(&self, code: u32, object: CUuserObject, count: u32, more: bool) -> u32 {
        if code == 0 {
            let mut state = self.state();
            let references = state.references.entry(object as usize).or_default();
            *references = if more { references.saturating_add(count) } else { references.saturating_sub(count) };
        }
        code
    }

    fn all_nodes(&self, graph: CUgraph) -> (u32, Vec<CUgraphNode>) {
        let mut count = 0;
        let code = ask!(self.bench, cuGraphGetNodes(graph, ptr::null_mut(), &raw mut count));
        let mut nodes = vec![ptr::null_mut(); count];
        if code != 0 || count == 0 {
            return (code, nodes);
        }
        (ask!(self.bench, cuGraphGetNodes(graph, nodes.as_mut_ptr(), &raw mut count)), nodes)
    }

    fn type_of(&self, node: CUgraphNode) -> String {
        let mut kind = 99;
        let code = ask!(self.bench, cuGraphNodeGetType(node, &raw mut kind));
        if code == 0 { node_type_name(kind) } else { format!("error {code}") }
    }

    fn get_attribute(&self, name: &str, attribute: &str, null: bool) -> Outcome {
        let attribute = flag(ATTRIBUTES, attribute)?;
        let mut value = [0_u64; 8];
        let place = if null { ptr::null_mut() } else { value.as_mut_ptr().cast() };
        let code = ask!(self.bench, cuStreamGetAttribute(self.stream(name)?, attribute, place));
        let word = |index: usize| {
            let half = value[index / 2] >> (32 * (index % 2));
            u32::try_from(half & 0xFFFF_FFFF).expect("masked")
        };
        Ok(match attribute {
            1 => {
                let base = if value[0] == 0 { "null".into() } else { self.name_of_address(value[0]) };
                let ratio = f32::from_bits(word(4));
                with(code, format!("{base} {} {ratio} {} {}", value[1], word(5), word(6)))
            }
            8 => with(code, word(0).cast_signed()),
            9 => with(code, format!("{} {}", word(0) & 0xFF, word(0) >> 8 & 0xFF)),
            _ => with(code, word(0)),
        })
    }

    fn set_attribute(&self, name: &str, attribute: &str, value: &[&str]) -> Result<u32, String> {
        let attribute = flag(ATTRIBUTES, attribute)?;
        let mut union = [0_u64; 8];
        match (attribute, value) {
            (_, ["null"]) => {}
            (1, [base, bytes, ratio, hit, miss]) => {
                let ratio: f32 = ratio.parse().map_err(|_| format!("{ratio:?} is not a ratio"))?;
                union[0] = self.address(base)?;
                union[1] = number(bytes)?;
                union[2] = u64::from(ratio.to_bits()) | u64::from(number::<u32>(hit)?) << 32;
                union[3] = u64::from(number::<u32>(miss)?);
            }
            (9, [default, remote]) => {
                union[0] = u64::from(number::<u8>(default)?) | u64::from(number::<u8>(remote)?) << 8;
            }
            (_, [value]) => union[0] = u64::from(number::<i32>(value)?.cast_unsigned()),
            _ => return Err("not a value of this attribute".into()),
        }
        let place = if value == ["null"] { ptr::null() } else { union.as_ptr().cast() };
        Ok(ask!(self.bench, cuStreamSetAttribute(self.stream(name)?, attribute, place)))
    }

    fn name_of_address(&self, address: u64) -> String {
        let state = self.state();
        let mut found: Vec<String> = Vec::new();
        for (name, object) in &state.names {
            if let Object::Memory(memory) = object {
                match address.checked_sub(memory.address) {
                    Some(0) => found.push(name.clone()),
                    Some(offset) if offset < memory.len as u64 => found.push(format!("{name}+{offset}")),
                    _ => {}
                }
            }
        }
        found.sort();
        found.into_iter().next().unwrap_or_else(|| "other".into())
    }

    fn name_of_pointer_attribute(&self, attribute: u32, value: u64) -> String {
        match attribute {
            1 => self.name_of_context(usize::try_from(value).unwrap_or(0)),
            3 | 4 | 11 => self.name_of_address(value),
            9 => if value == self.bench.device as u64 { "device" } else { "other" }.into(),
            _ => value.to_string(),
        }
    }

    /// A wait on memory, noted if cleaning up can make it true.
    fn wait(&self, address: &str, wide: bool, value: &str, kind: &str) -> Result<Wait, String> {
        let name = address.split('+').next().unwrap_or_default();
        let wait = Wait { address: self.address(address)?, wide, value: number(value)?, kind: flag(WAITS, kind)? };
        if name != "null" {
            if !matches!(self.memory(name)?.kind, MemoryKind::Pinned) {
                return Err("a wait on other than pinned memory could not be cleaned up".into());
            }
            if wait.address.is_multiple_of(if wide { 8 } else { 4 }) {
                self.state().waits.push(wait);
            }
        }
        Ok(wait)
    }

    /// One of a batch: `wait32:h:1:geq`, `wait64:…`, `write32:h:1`, `write64:…`, `unknown`.
    fn operation(&self, text: &str) -> Result<[u64; 6], String> {
        let parts: Vec<&str> = text.split(':').collect();
        let (kind, address, value, flags) = match parts.as_slice() {
            ["null"] => (0, 0, 0, 0),
            ["unknown"] => (77, 0, 0, 0),
            [kind @ ("wait32" | "wait64"), address, value, flags] => {
                let wait = self.wait(address, *kind == "wait64", value, flags)?;
                (if *kind == "wait64" { 4 } else { 1 }, wait.address, wait.value, wait.kind)
            }
            [kind @ ("write32" | "write64"), address, value] => {
                (if *kind == "write64" { 5 } else { 2 }, self.address(address)?, number(value)?, 0)
            }
            _ => return Err(format!("{text:?} is not an operation")),
        };
        Ok([kind, address, value, u64::from(flags), 0, 0])
    }

    fn capture_info(&self, name: &str, options: &[&str]) -> Outcome {
        let stream = self.stream(name)?;
        let mut status = 99;
        let mut id = UNTOUCHED as u64;
        let mut graph = UNTOUCHED as CUgraph;
        let mut nodes = UNTOUCHED as *const CUgraphNode;
        let mut edges = UNTOUCHED as *const CUgraphEdgeData;
        let mut count = UNTOUCHED;
        let code = match options {
            ["status_null"] => {
                let null = ptr::null_mut();
                let (nodes, edges, count) = (ptr::null_mut(), ptr::null_mut(), ptr::null_mut());
                ask!(
                    self.bench,
                    cuStreamGetCaptureInfo_v3(stream, null, &raw mut id, &raw mut graph, nodes, edges, count)
                )
            }
            ["status_only"] => {
                let (id, graph) = (ptr::null_mut(), ptr::null_mut());
                let (nodes, edges, count) = (ptr::null_mut(), ptr::null_mut(), ptr::null_mut());
                ask!(self.bench, cuStreamGetCaptureInfo_v3(stream, &raw mut status, id, graph, nodes, edges, count))
            }
            ["edges_without_nodes"] => {
                let (id, graph) = (ptr::null_mut(), ptr::null_mut());
                let (nodes, count) = (ptr::null_mut(), ptr::null_mut());
                let edges = &raw mut edges;
                ask!(self.bench, cuStreamGetCaptureInfo_v3(stream, &raw mut status, id, graph, nodes, edges, count))
            }
            _ => ask!(
                self.bench,
                cuStreamGetCaptureInfo_v3(
                    stream,
                    &raw mut status,
                    &raw mut id,
                    &raw mut graph,
                    &raw mut nodes,
                    &raw mut edges,
                    &raw mut count
                )
            ),
        };
        let all = count != UNTOUCHED && code == 0 && status == 1;
        for option in options {
            match option.split_once('=') {
                Some(("graph", name)) if graph as usize != UNTOUCHED => self.bind(name, Object::Graph(graph as usize)),
                Some(("id", name)) if id != UNTOUCHED as u64 => self.bind(name, Object::Id(id)),
                Some(("nodes", names)) if all => {
                    let names: Vec<&str> = names.split(',').collect();
                    if names.len() != count {
                        return Err(format!("{code}: there are {count} dependencies"));
                    }
                    for (index, name) in names.into_iter().enumerate() {
                        // SAFETY: the driver's array of `count` nodes, valid until the next call on the stream.
                        let node = unsafe { nodes.add(index).read() };
                        self.bind(name, Object::Node(node as usize));
                    }
                }
                _ => {}
            }
        }
        let mut text = with(code, status_name(status));
        if code == 0 {
            let id = match id {
                0 => "0",
                id if id == UNTOUCHED as u64 => "untouched",
                _ => "id",
            };
            let graph = match graph as usize {
                0 => "null",
                UNTOUCHED => "untouched",
                _ => "graph",
            };
            let count = if count == UNTOUCHED { "untouched".into() } else { count.to_string() };
            let _ = write!(text, " {id} {graph} {count}");
        }
        Ok(text)
    }

    /// The bytes of memory, run by run: `7x64 0x8`.
    fn bytes(&self, name: &str) -> Outcome {
        let memory = self.memory(name)?;
        let mut bytes = vec![0_u8; memory.len];
        match memory.kind {
            MemoryKind::Pinned | MemoryKind::Managed | MemoryKind::Pageable => {
                // SAFETY: host memory of this length that lives to the end of the case.
                unsafe { ptr::copy_nonoverlapping(memory.address as *const u8, bytes.as_mut_ptr(), bytes.len()) };
            }
            MemoryKind::Device | MemoryKind::Pool | MemoryKind::Graph => {
                let code = ask!(self.bench, cuMemcpy(bytes.as_mut_ptr() as u64, memory.address, bytes.len()));
                if code != 0 {
                    return Ok(format!("error {code}"));
                }
            }
        }
        let runs = bytes.chunk_by(|a, b| a == b).map(|run| format!("{}x{}", run[0], run.len()));
        Ok(spaced(runs))
    }

    // Cleaning up. Every part is called on a thread of the case.

    /// The captures that may still be on, as positions for [`Machine::end_capture`] with the thread that began each.
    pub fn open_captures(&self) -> Vec<(usize, usize)> {
        let state = self.state();
        let alive = |stream: usize| stream == 2 || state.live.contains(&Object::Stream(stream));
        state.begun.iter().copied().filter(|&(stream, _)| alive(stream)).collect()
    }

    pub fn end_capture(&self, stream: usize) {
        let mut status = 0;
        if ask!(self.bench, cuStreamIsCapturing(stream as CUstream, &raw mut status)) != 0 || status == 0 {
            return;
        }
        let mut graph: CUgraph = ptr::null_mut();
        ask!(self.bench, cuStreamEndCapture(stream as CUstream, &raw mut graph));
        if !graph.is_null() {
            self.own("the graph of a capture that was left on", Object::Graph(graph as usize));
        }
    }

    pub fn reset_capture_mode(&self) {
        let mut mode = 0;
        ask!(self.bench, cuThreadExchangeStreamCaptureMode(&raw mut mode));
    }

    pub fn synchronize(&self) {
        ask!(self.bench, cuCtxSynchronize());
    }

    /// Gives up all that is left, in an order in which nothing is used any more.
    pub fn destroy_all(&self) {
        let (live, references) = {
            let mut state = self.state();
            // The memory goes: nothing may be written to it any more, and no wait is left.
            state.waits.clear();
            (std::mem::take(&mut state.live), std::mem::take(&mut state.references))
        };
        let rank = |object: &Object| match object {
            Object::Exec(_) => 0,
            Object::Graph(_) => 1,
            Object::Stream(_) => 2,
            Object::Green(_) => 3,
            _ => 4,
        };
        let mut live = live;
        live.sort_by_key(rank);
        for object in live {
            match object {
                Object::Exec(handle) => ask!(self.bench, cuGraphExecDestroy(handle as CUgraphExec)),
                Object::Graph(handle) => ask!(self.bench, cuGraphDestroy(handle as CUgraph)),
                Object::Stream(handle) => ask!(self.bench, cuStreamDestroy_v2(handle as CUstream)),
                Object::Green(handle) => ask!(self.bench, cuGreenCtxDestroy(handle as CUgreenCtx)),
                Object::Event(handle) => ask!(self.bench, cuEventDestroy_v2(handle as CUevent)),
                Object::Module(handle) => ask!(self.bench, cuModuleUnload(handle as CUmodule)),
                Object::Memory(memory) => match memory.kind {
                    MemoryKind::Device | MemoryKind::Managed => ask!(self.bench, cuMemFree_v2(memory.address)),
                    MemoryKind::Pool => ask!(self.bench, cuMemFreeAsync(memory.address, ptr::null_mut())),
                    MemoryKind::Pinned => ask!(self.bench, cuMemFreeHost(memory.address as *mut c_void)),
                    MemoryKind::Graph | MemoryKind::Pageable => 0,
                },
                _ => 0,
            };
        }
        for (object, count) in references {
            if count > 0 {
                ask!(self.bench, cuUserObjectRelease(object as CUuserObject, count));
            }
        }
    }

    /// What a context in order answers to a few calls, of which one is unsafe during a capture: "0 0 0 0".
    pub fn health(&self) -> String {
        let mut address = 0;
        let codes = [
            ask!(self.bench, cuCtxSynchronize()),
            ask!(self.bench, cuStreamQuery(ptr::null_mut())),
            ask!(self.bench, cuMemAlloc_v2(&raw mut address, 64)),
            ask!(self.bench, cuMemFree_v2(address)),
        ];
        spaced(codes.iter())
    }
}

// Words.

type Flags = &'static [(&'static str, u32)];

const STREAM_FLAGS: Flags = &[("blocking", 0), ("non_blocking", 1)];
const EVENT_FLAGS: Flags = &[("timing", 0), ("blocking_sync", 1), ("no_timing", 2), ("interprocess", 4)];
const EXTERNAL: Flags = &[("default", 0), ("external", 1)];
const ATTACH: Flags = &[("global", 1), ("host", 2), ("single", 4)];
const MODES: Flags = &[("global", 0), ("thread_local", 1), ("relaxed", 2)];
const UPDATES: Flags = &[("add", 0), ("set", 1)];
const MOVES: Flags = &[("copy", 0), ("move", 1)];
const WAITS: Flags = &[("geq", 0), ("eq", 1), ("and", 2), ("nor", 3)];
const ATTRIBUTES: Flags = &[("window", 1), ("policy", 3), ("priority", 8), ("domain_map", 9), ("domain", 10)];
const POINTER_ATTRIBUTES: Flags = &[
    ("context", 1),
    ("memory_type", 2),
    ("device_pointer", 3),
    ("host_pointer", 4),
    ("is_managed", 8),
    ("device_ordinal", 9),
    ("range_start", 11),
    ("range_size", 12),
];
const NODE_TYPES: &[&str] = &[
    "kernel",
    "memcpy",
    "memset",
    "host",
    "graph",
    "empty",
    "wait_event",
    "event_record",
    "semaphore_signal",
    "semaphore_wait",
    "alloc",
    "free",
    "batch_mem_op",
    "conditional",
];
const UPDATE_RESULTS: &[&str] = &[
    "success",
    "error",
    "topology_changed",
    "node_type_changed",
    "function_changed",
    "parameters_changed",
    "not_supported",
    "unsupported_function_change",
    "attributes_changed",
];

/// The value of a flag's name, or the number.
fn flag(flags: Flags, name: &str) -> Result<u32, String> {
    match flags.iter().find(|(known, _)| *known == name) {
        Some((_, value)) => Ok(*value),
        None => number(name),
    }
}

fn number<T: TryFrom<i128>>(text: &str) -> Result<T, String> {
    let value = match text.strip_prefix("0x") {
        Some(digits) => i128::from_str_radix(digits, 16),
        None => text.parse(),
    };
    value.ok().and_then(|value| T::try_from(value).ok()).ok_or_else(|| format!("{text:?} is not a number that fits"))
}

fn status_name(status: u32) -> String {
    match status {
        0 => "none".into(),
        1 => "active".into(),
        2 => "invalidated".into(),
        99 => "untouched".into(),
        other => other.to_string(),
    }
}

fn node_type_name(kind: u32) -> String {
    NODE_TYPES.get(kind as usize).map_or_else(|| kind.to_string(), |&name| name.into())
}

/// The code, and the output if there is one.
fn with(code: u32, output: impl std::fmt::Display) -> String {
    if code == 0 { format!("0 {output}") } else { code.to_string() }
}

fn spaced(words: impl Iterator<Item = impl std::fmt::Display>) -> String {
    words.map(|word| word.to_string()).collect::<Vec<_>>().join(" ")
}

fn first(nodes: &[CUgraphNode]) -> *const CUgraphNode {
    if nodes.is_empty() { ptr::null() } else { nodes.as_ptr() }
}

/// Room for a `CUdevResource` of any version of the driver.
fn new_resource() -> usize {
    vec![0_u64; 64].leak().as_mut_ptr() as usize
}

fn linear_copy(to: u64, from: u64, count: usize) -> CUDA_MEMCPY3D {
    let unified = CUmemorytype_enum::CU_MEMORYTYPE_UNIFIED;
    CUDA_MEMCPY3D {
        srcXInBytes: 0,
        srcY: 0,
        srcZ: 0,
        srcLOD: 0,
        srcMemoryType: unified,
        srcHost: ptr::null(),
        srcDevice: from,
        srcArray: ptr::null_mut(),
        reserved0: ptr::null_mut(),
        srcPitch: 0,
        srcHeight: 0,
        dstXInBytes: 0,
        dstY: 0,
        dstZ: 0,
        dstLOD: 0,
        dstMemoryType: unified,
        dstHost: ptr::null_mut(),
        dstDevice: to,
        dstArray: ptr::null_mut(),
        reserved1: ptr::null_mut(),
        dstPitch: 0,
        dstHeight: 0,
        WidthInBytes: count,
        Height: 1,
        Depth: 1,
    }
}

fn wait_until(true_at_last: impl Fn() -> bool) -> bool {
    let until = Instant::now() + PATIENCE;
    while !true_at_last() {
        if Instant::now() >= until {
            return false;
        }
        std::thread::sleep(Duration::from_micros(200));
    }
    true
}

/// Writes a word of pinned memory that a stream may be waiting for.
fn poke(address: u64, wide: bool, value: u64) {
    // SAFETY: the address is in host memory of a case, aligned, and freed after every stream has passed its waits.
    unsafe {
        if wide {
            std::sync::atomic::AtomicU64::from_ptr(address as *mut u64)
                .store(value, std::sync::atomic::Ordering::Release);
        } else {
            let value = u32::try_from(value & 0xFFFF_FFFF).expect("masked");
            std::sync::atomic::AtomicU32::from_ptr(address as *mut u32)
                .store(value, std::sync::atomic::Ordering::Release);
        }
    }
}

fn peek(address: u64) -> u64 {
    // SAFETY: as for `poke`.
    unsafe { std::sync::atomic::AtomicU64::from_ptr(address as *mut u64).load(std::sync::atomic::Ordering::Acquire) }
}
