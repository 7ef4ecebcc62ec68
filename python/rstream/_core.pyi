"""The extension module: the classes over the Rust core. Import them from `rstream`."""

from collections.abc import Callable, Generator, Iterable, Mapping
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Concatenate, Final, Generic, Literal, ParamSpec, Protocol, TypeVar, final

from typing_extensions import disjoint_base

from rstream._arrays import ManagedArray
from rstream._attributes import AccessPolicyWindow
from rstream._capture import CaptureInfo, CaptureMode
from rstream._status import Status

_T = TypeVar("_T")
_T_co = TypeVar("_T_co", covariant=True)
_P = ParamSpec("_P")

class _CudaStream(Protocol):
    def __cuda_stream__(self) -> tuple[int, int]: ...

__all__ = [
    "Capture",
    "Completion",
    "Device",
    "Event",
    "Graph",
    "GraphExec",
    "GreenContext",
    "Hold",
    "HostNode",
    "Injection",
    "Memory",
    "Node",
    "Stream",
    "StreamAttributes",
    "_Finished",
    "__version__",
    "_after_fork",
    "_at_exit",
    "_exchange_capture_mode",
    "default_device",
    "devices",
    "fault",
    "hold",
    "in_callback",
    "inject",
    "pointer_info",
    "set_wait_policy",
    "spin",
    "stats",
    "status_text",
    "wait_policy",
]

__version__: Final[str]

@final
class Device:
    """A GPU (`Device(0)`) or a software device (`Device("soft")`, `Device("soft:1")`).

    The first use retains the device's primary context (`cuDevicePrimaryCtxRetain`), the one that torch and CuPy
    use, and keeps it for the life of the process. Devices are equal when they are the same device, and can be
    hashed and pickled.

    Raises `DriverNotFoundError` without a driver, `InvalidValueError` for a device that there is not, `TypeError`
    for what names no device.
    """

    def __new__(cls, spec: Device | int | str) -> Device: ...
    @property
    def name(self) -> str:
        """The name (`cuDeviceGetName`)."""

    @property
    def ordinal(self) -> int:
        """The number among the devices of its driver."""

    @property
    def is_software(self) -> bool:
        """Whether it is a software device."""

    @property
    def driver_version(self) -> tuple[int, int]:
        """The newest CUDA version that the driver supports, `(13, 0)` (`cuDriverGetVersion`)."""

    @property
    def compute_capability(self) -> tuple[int, int]:
        """Major and minor compute capability, `(9, 0)`."""

    @property
    def priority_range(self) -> tuple[int, int]:
        """Least and greatest priority of a stream; lower numbers go first (`cuCtxGetStreamPriorityRange`)."""

    @property
    def context_handle(self) -> int:
        """The handle of the primary context (`CUcontext`)."""

    @property
    def attributes(self) -> Mapping[str, int]:
        """The attributes that matter to streams, by name (`cuDeviceGetAttribute`)."""

    def memory_info(self) -> tuple[int, int]:
        """Free and total memory in bytes (`cuMemGetInfo`)."""

    def free_cached_memory(self) -> int:
        """Give memory that collected arrays left in rstream's cache back to the driver; returns its size in bytes.

        Waits for all work that is queued on the device (`cuMemFree`, `cuMemFreeHost`).
        """

    def reserve_streams(self, count: int) -> None:
        """Make room in the driver for `count` streams more than there are, 0 to 4096.

        Without room, whoever makes a stream waits for all work of the device, callbacks included, and so do other
        threads' calls meanwhile. The driver has room for 35 streams at first; a stream takes about 0.6 MiB, which the
        driver keeps (measured on one H200). Where PyTorch is loaded, rstream reserves 160 before the first stream. This
        makes that many streams and destroys them, and waits itself if there is no room (`cuStreamCreateWithPriority`,
        `cuStreamDestroy`).
        """

    def synchronize(self) -> None:
        """Wait for all work of the context (`cuCtxSynchronize`).

        Releases the GIL, but blocks in the driver: Ctrl-C takes effect afterwards. Raises `DeviceFaultError` after a
        fault.
        """

    def __eq__(self, other: object, /) -> bool: ...
    def __ne__(self, other: object, /) -> bool: ...
    def __hash__(self) -> int: ...
    def __reduce__(self) -> tuple[Any, ...]: ...

def devices() -> list[Device]:
    """Every device: the GPUs, if there is a driver, then the software devices."""

def default_device() -> Device:
    """The device of the environment variable `RSTREAM_DEVICE`, else GPU 0.

    The software device is never chosen unasked: without a driver, `DriverNotFoundError` names it as a way out.
    """

@final
class Stream:
    """A queue of work for a device (`cuStreamCreateWithPriority`).

    `device` is a `Device` or what `Device()` takes; by default `default_device()`. A stream is non-blocking unless
    asked otherwise: it does not synchronize with the legacy default stream. `priority` is clamped to
    `device.priority_range`. `signal` says how the host is told that a point was reached: `"memory"` by a number that
    the stream writes, `"driver"` by the driver's own callbacks, `"auto"` by the first on a GPU that can.

    What a stream knows about itself is read once, so its properties, `repr`, `==` and `hash` never call the driver.
    Every method that calls the driver releases the GIL, and raises `NotPermittedError` inside a callback or host
    function, `ClosedError` on a closed stream and, where it has no form in a capture, `CaptureUnsupportedError`
    while the stream captures.
    """

    def __new__(
        cls,
        device: Device | int | str | None = None,
        *,
        non_blocking: bool = True,
        priority: int = 0,
        signal: Literal["auto", "memory", "driver"] = "auto",
    ) -> Stream: ...
    @staticmethod
    def legacy_default(device: Device | int | str | None = None) -> Stream:
        """The legacy default stream (`CU_STREAM_LEGACY`), which blocking streams and it wait for each other."""

    @staticmethod
    def per_thread_default(device: Device | int | str | None = None) -> Stream:
        """The default stream of this thread (`CU_STREAM_PER_THREAD`).

        Use on another thread raises `InvalidValueError`.
        """

    @staticmethod
    def from_external(obj: _CudaStream | Any, device: Device | int | str | None = None) -> Stream:
        """A stream of another library, which is kept alive and never destroyed by rstream.

        `obj` has `__cuda_stream__`, or is a stream of torch, CuPy or Numba, or a handle as an integer, which then has
        to stay valid. Raises `TypeError` for what is no stream, `InvalidValueError` for a stream of another context
        than the device's primary one.
        """

    @staticmethod
    def _adopt(handle: int, device: Device, keep: object) -> Stream: ...
    @property
    def handle(self) -> int:
        """The handle (`CUstream`). Raises `ClosedError` on a closed stream."""

    @property
    def id(self) -> int:
        """A number that no other stream of the process ever has (`cuStreamGetId`)."""

    @property
    def device(self) -> Device:
        """The device."""

    @property
    def priority(self) -> int:
        """The priority, as the driver clamped it (`cuStreamGetPriority`)."""

    @property
    def non_blocking(self) -> bool:
        """Whether it does not synchronize with the legacy default stream (`cuStreamGetFlags`)."""

    @property
    def context_handle(self) -> int:
        """The handle of its context (`cuStreamGetCtx_v2`)."""

    @property
    def green_context(self) -> int | None:
        """The handle of its green context, if it is of one (`cuStreamGetCtx_v2`)."""

    @property
    def signal(self) -> Literal["memory", "driver"]:
        """How the host is told that a point was reached; never `"auto"`. The same for all handles of a stream."""

    @property
    def attributes(self) -> StreamAttributes:
        """Its attributes, to be read and set (`cuStreamGetAttribute`, `cuStreamSetAttribute`)."""

    def copy_attributes(self, from_stream: Stream) -> None:
        """Take over all attributes of another stream, its priority included (`cuStreamCopyAttributes`).

        Raises `InvalidValueError` for a stream of another device.
        """

    @property
    def closed(self) -> bool:
        """Whether it was closed."""

    @property
    def pending(self) -> int:
        """How many pieces of host code were queued through this object and have not ended.

        A cancelled one ends when the stream gets there.
        """

    def query(self) -> bool:
        """Whether all queued work is done (`cuStreamQuery`). Raises `DeviceFaultError` after a fault."""

    def synchronize(self, timeout: float | None = None) -> None:
        """Wait until all work queued so far is done.

        `timeout` is in seconds; when it runs out, `WaitTimeoutError` (a `TimeoutError`) is raised, and the stream can
        be waited for again. Ctrl-C ends the wait. Raises `InvalidValueError` for a negative time-out,
        `DeviceFaultError` after a fault.
        """

    def wait(self, event_or_stream: Event | Stream | _CudaStream | Any, *, external: bool = False) -> None:
        """Make later work wait for an event, or for all that is queued on another stream so far (`cuStreamWaitEvent`).

        If the other stream captures, or the event was recorded in a capture, this stream takes part in that capture
        from then on. A stream that captures can wait for what is in its own capture only, or with `external=True` for
        an event as it is recorded at each launch of the graph (`CU_EVENT_WAIT_EXTERNAL`). Raises a `CaptureError` that
        says which rule would have been broken.
        """

    def record(self, event: Event | None = None, *, external: bool = False) -> Event:
        """Record `event`, or a new one, behind all that is queued so far (`cuEventRecord`), and return it.

        While the stream captures, the event stands for what was captured so far: streams can wait for it, the host
        cannot. With `external=True` it is recorded at each launch of the graph (`CU_EVENT_RECORD_EXTERNAL`). Raises
        `InvalidValueError` for an event of another device.
        """

    def capture(
        self,
        *,
        mode: CaptureMode = "global",
        graph: Graph | None = None,
        dependencies: Iterable[Node] | Node | None = None,
    ) -> Capture:
        """A capture of this stream, to be begun by `with`: what is queued inside becomes nodes of a graph.

        `mode` says which 'potentially unsafe' calls (`cudaMalloc`, `cudaEventQuery`, …) break the capture while it
        lasts: those of this thread and of others (`"global"`), of this thread (`"thread_local"`), or none
        (`"relaxed"`). What rstream itself calls never does. With `graph`, nodes go into that graph, the first ones
        behind its nodes `dependencies`. Those that were captured before it is abandoned stay; if the capture breaks, or
        ends with work that was not joined, that graph is gone (`cuStreamBeginCapture`, `cuStreamBeginCaptureToGraph`).
        """

    @property
    def capture_status(self) -> Literal["none", "active", "invalidated"]:
        """Whether the stream takes part in a capture, whoever began it (`cuStreamIsCapturing`). Never disturbs one.

        Raises `CaptureImplicitError` for the legacy default stream while a blocking stream captures.
        """

    @property
    def capture_info(self) -> CaptureInfo | None:
        """The capture that the stream takes part in (`cuStreamGetCaptureInfo`), or None. Never disturbs one."""

    def attach(self, array: ManagedArray, attach: Literal["global", "host", "single"]) -> None:
        """Say to whom managed memory belongs from this point of the stream on (`cuStreamAttachMemAsync`).

        `"single"`: to this stream alone, `"global"`: to all, `"host"`: to none on a device without concurrent managed
        access. The driver takes it back when the stream goes, and rstream when the array does. On every device, memory
        that is attached to one stream may be read and written inside that stream's callbacks, as NumPy. Raises
        `InvalidValueError` for `"single"` on the legacy default stream, `TypeError` for another array.
        """

    def add_callback(
        self, fn: Callable[Concatenate[Status, _P], _T], /, *args: _P.args, **kwargs: _P.kwargs
    ) -> Completion[_T]:
        """Queue a callback: `fn(status, *args, **kwargs)` runs once when all work before is done.

        Later work waits until it returns. After a device fault it runs too, with the fault's status. It must not call
        the API (`cuStreamAddCallback`). When the enqueue fails, its references are dropped before the exception is
        raised.
        """

    def launch_host_func(self, fn: Callable[_P, _T], /, *args: _P.args, **kwargs: _P.kwargs) -> Completion[_T] | Any:
        """Queue a host function: `fn(*args, **kwargs)` runs once when all work before is done.

        Later work waits until it returns. It must not call the API. After a device fault it does not run, and its
        completion raises the error (`cuStreamAddCallback`, since `cuLaunchHostFunc` would not tell).

        While the stream captures, whoever began that, it becomes a node instead, which runs once for each launch, and a
        `HostNode` is returned: as by `Capture.launch_host_func`.
        """

    def then(self, fn: Callable[_P, _T], /, *args: _P.args, **kwargs: _P.kwargs) -> Completion[_T]:
        """Queue a continuation: `fn(*args, **kwargs)` runs once on a worker thread when all work before is done.

        The stream does not wait for it, and it may call the API. The continuations of a stream run in order. After a
        device fault it does not run, and its completion raises the error.
        """

    def add_native_callback(
        self, address: int, user_data: int = 0, *, keep_alive: object = None, status: bool = False
    ) -> Completion[None]:
        """Queue a native function: it runs once when all work before is done, without the GIL.

        `address` is that of a C function `void f(void *user_data)`, or with `status=True` `void f(uint32_t status, void
        *user_data)`: from ctypes, cffi, a Numba `@cfunc` or a library. Later work waits until it returns. It must not
        call the API. With `status` it runs after a device fault too, with the code of the fault; without, it does not
        run then, and its completion raises the error. `keep_alive` is kept until it has run. A wrong address crashes
        the process. Raises `InvalidValueError` for address 0.
        """

    def completion(self) -> Completion[None]:
        """A completion that resolves when all work queued so far is done: at once if it is (`cuStreamQuery`)."""

    def copy(self, dst: Any, src: Any) -> None:
        """Queue a copy of all bytes of `src` to `dst` (`cuMemcpyAsync`).

        Both are kept alive until it is done, or, while the stream captures, as long as the graph.

        Each is a C-contiguous NumPy array, an array of rstream, or an object with `__cuda_array_interface__`; they have
        the same number of bytes, whatever their shapes and dtypes. A copy from ordinary (pageable) NumPy memory reads
        it before the call returns or soon after; one into it returns when the copy is done. Raises `InvalidValueError`
        for sizes that differ, a read-only `dst`, memory that is not contiguous or of another device; `TypeError` for
        another object.
        """

    def fill(self, dst: Any, value: Any) -> None:
        """Queue that every element of `dst` is set to `value`, cast to its dtype (`cuMemsetD8Async` and its kin).

        The element's bytes have to be one value of 1, 2 or 4 bytes, or repeat it. Raises `InvalidValueError` otherwise.
        """

    def close(self) -> None:
        """Give the stream up (`cuStreamDestroy`), without waiting: queued work still runs."""

    def __enter__(self) -> Stream: ...
    def __exit__(
        self,
        *_exception: type[BaseException] | BaseException | TracebackType | None,
    ) -> None: ...
    def __await__(self) -> Generator[Any]: ...
    def __cuda_stream__(self) -> tuple[int, int]:
        """The protocol by which other libraries take the stream: `(0, handle)`."""

    def __eq__(self, other: object, /) -> bool: ...
    def __ne__(self, other: object, /) -> bool: ...
    def __hash__(self) -> int: ...
    def __reduce__(self) -> Any: ...

@final
class StreamAttributes:
    """The attributes of a stream.

    Each read and each assignment is a call of the driver, allowed while the stream captures. An attribute acts on work
    that is queued after it was set. A bad value raises `InvalidValueError` before the call.
    """

    @property
    def synchronization_policy(self) -> Literal["auto", "spin", "yield", "blocking_sync"] | None:
        """How other libraries' threads wait for the stream in the driver; `None` if it was never set."""

    @synchronization_policy.setter
    def synchronization_policy(self, policy: Literal["auto", "spin", "yield", "blocking_sync"]) -> None: ...
    @property
    def priority(self) -> int:
        """The priority of work; the driver clamps it to `device.priority_range`."""

    @priority.setter
    def priority(self, priority: int) -> None: ...
    @property
    def mem_sync_domain(self) -> Literal["default", "remote"]:
        """The memory synchronization domain."""

    @mem_sync_domain.setter
    def mem_sync_domain(self, domain: Literal["default", "remote"]) -> None: ...
    @property
    def mem_sync_domain_map(self) -> tuple[int, int]:
        """The physical domains of `"default"` and `"remote"`, each below the device's `mem_sync_domain_count`."""

    @mem_sync_domain_map.setter
    def mem_sync_domain_map(self, map: tuple[int, int]) -> None: ...
    @property
    def access_policy_window(self) -> AccessPolicyWindow:
        """The range of addresses with properties in the L2 cache; `None` may be assigned for no window.

        The driver may align its base and round its size.
        """

    @access_policy_window.setter
    def access_policy_window(self, window: AccessPolicyWindow | None) -> None: ...

@final
class Capture:
    """A capture of a stream into a graph, made by `Stream.capture` and begun by `with`.

    Left without an exception it ends, and `graph` is the result; with one it is abandoned. It ends on the thread that
    began it, unless its mode is relaxed.
    """

    def __enter__(self) -> Capture: ...
    def __exit__(
        self,
        *exception: type[BaseException] | BaseException | TracebackType | None,
    ) -> None: ...
    def end(self) -> Graph:
        """End the capture (`cuStreamEndCapture`) and return the graph.

        Raises `CaptureInvalidatedError` when a rule was broken while it lasted, `CaptureUnjoinedError` when another
        stream that took part has work that this one did not wait for; the capture is over then. Raises
        `CaptureWrongThreadError` on another thread: it goes on then.
        """

    def abandon(self) -> None:
        """End the capture and drop what was captured; what went into a graph of the caller's stays there.

        Any thread may. Raises `CaptureWrongThreadError` on another thread when it goes into a graph of the caller's,
        which would be lost; it goes on then.
        """

    def launch_host_func(self, fn: Callable[_P, object], /, *args: _P.args, **kwargs: _P.kwargs) -> HostNode:
        """Capture a host function: `fn(*args, **kwargs)` runs once for each launch (`cuLaunchHostFunc`).

        It must not call the API. The graph, every executable made from it and every pending launch keep it alive.
        """

    @property
    def graph(self) -> Graph:
        """The graph. Raises `CaptureError` before the end."""

    @property
    def stream(self) -> Stream:
        """The stream."""

    @property
    def mode(self) -> CaptureMode:
        """The mode."""

    @property
    def id(self) -> int | None:
        """Its number, that of its graph: captures into one graph share it. None when it is not going on."""

    @property
    def status(self) -> Literal["none", "active", "invalidated"]:
        """Whether it goes on, or broke (`cuStreamIsCapturing`)."""

    @property
    def dependencies(self) -> list[Node]:
        """The nodes that the next one depends on (`cuStreamGetCaptureInfo`)."""

    def add_dependencies(self, nodes: Iterable[Node] | Node) -> None:
        """Add nodes to those that the next one depends on (`cuStreamUpdateCaptureDependencies`).

        Raises `InvalidValueError` for a node of another graph.
        """

    def set_dependencies(self, nodes: Iterable[Node] | Node) -> None:
        """Make the next node depend on these alone (`cuStreamUpdateCaptureDependencies`)."""

    def __reduce__(self) -> Any: ...

@disjoint_base
class Node:
    """A node of a graph (`CUgraphNode`)."""

    @property
    def kind(self) -> str:
        """What it does: `"kernel"`, `"memcpy"`, `"host"` and so on, as in `CUgraphNodeType`."""

    @property
    def handle(self) -> int:
        """The handle (`CUgraphNode`)."""

    def __eq__(self, other: object, /) -> bool: ...
    def __ne__(self, other: object, /) -> bool: ...
    def __hash__(self) -> int: ...
    def __reduce__(self) -> Any: ...

@final
class HostNode(Node):
    """A host function in a graph. This object does not keep the function alive; the graph does."""

    @property
    def name(self) -> str:
        """The function's name."""

    @property
    def runs(self) -> int:
        """How often it was run, by all launches of all executables that have it."""

    @property
    def errors(self) -> list[BaseException]:
        """What its runs raised: the last 100. The frames of their tracebacks are cleared, so that they hold nothing."""

@final
class Graph:
    """A graph (`CUgraph`): work as nodes and edges, made by capture or by hand, that is launched as often as one likes.

    What its nodes use (functions, arrays, events) lives as long as the graph, an executable made from it, or a pending
    launch. Methods that add a node take `dependencies`, a node or several, and raise `InvalidValueError` for nodes of
    another graph.

    `device` says where the memory of its copies and fills is. Its launches may go to streams of other devices of the
    same driver.
    """

    def __new__(cls, device: Device | int | str | None = None) -> Graph: ...
    @property
    def device(self) -> Device:
        """The device."""

    @property
    def handle(self) -> int:
        """The handle (`CUgraph`). Raises `CaptureError` while it is captured into."""

    @property
    def nodes(self) -> list[Node]:
        """The nodes, in no particular order; host functions of rstream are `HostNode`s (`cuGraphGetNodes`)."""

    @property
    def edges(self) -> list[tuple[Node, Node]]:
        """The edges: the second node of each pair depends on the first (`cuGraphGetEdges`)."""

    def add_host_node(
        self, fn: Callable[..., object], /, *args: Any, dependencies: Iterable[Node] | Node | None = None, **kwargs: Any
    ) -> HostNode:
        """Add a host function: `fn(*args, **kwargs)` runs once for each launch (`cuGraphAddHostNode`).

        It must not call the API. What it raises is in `HostNode.errors`, and told to `GraphExec.on_error` or else to
        `sys.unraisablehook`; the launch goes on.
        """

    def add_empty_node(self, *, dependencies: Iterable[Node] | Node | None = None) -> Node:
        """Add a node that does nothing (`cuGraphAddEmptyNode`)."""

    def add_memcpy_node(self, dst: Any, src: Any, *, dependencies: Iterable[Node] | Node | None = None) -> Node:
        """Add a copy of all bytes of `src` to `dst` (`cuGraphAddMemcpyNode`). Arrays as for `Stream.copy`.

        Work that another library has queued on the arrays is waited for now.
        """

    def add_memset_node(self, dst: Any, value: Any, *, dependencies: Iterable[Node] | Node | None = None) -> Node:
        """Add that every element of `dst` is set to `value` (`cuGraphAddMemsetNode`). As for `Stream.fill`."""

    def add_event_record_node(self, event: Event, *, dependencies: Iterable[Node] | Node | None = None) -> Node:
        """Add a node that records `event` at each launch (`cuGraphAddEventRecordNode`)."""

    def add_event_wait_node(self, event: Event, *, dependencies: Iterable[Node] | Node | None = None) -> Node:
        """Add a node that waits at each launch for `event`, as it is recorded then (`cuGraphAddEventWaitNode`)."""

    def add_child_graph(self, graph: Graph, *, dependencies: Iterable[Node] | Node | None = None) -> Node:
        """Add a copy of `graph` as a node (`cuGraphAddChildGraphNode`)."""

    def add_dependencies(self, edges: Iterable[tuple[Node, Node]]) -> None:
        """Add edges: the second node of each pair will depend on the first (`cuGraphAddDependencies`).

        Raises `InvalidValueError` for a node and itself, and for an edge that exists.
        """

    def clone(self) -> Graph:
        """A copy of the graph, which shares the functions (`cuGraphClone`)."""

    def find_in_clone(self, original: Node) -> Node:
        """The node of this clone that `original` became (`cuGraphNodeFindInClone`)."""

    def to_dot(self) -> str:
        """The graph in the DOT language of Graphviz."""

    def to_svg(self) -> str:
        """A drawing, as SVG. For graphs of some hundred nodes at most."""

    def instantiate(self) -> GraphExec:
        """Make it executable (`cuGraphInstantiateWithFlags`). Raises `InvalidValueError` when it has a cycle."""

    def close(self) -> None:
        """Give it up (`cuGraphDestroy`, on a background thread). Executables made from it go on.

        Needed when a function in it refers to the graph or an executable: the driver owns the function, so the garbage
        collector cannot see such a cycle.
        """

    def __enter__(self) -> Graph: ...
    def __exit__(
        self,
        *_exception: type[BaseException] | BaseException | TracebackType | None,
    ) -> None: ...
    def _repr_svg_(self) -> str | None: ...
    def __eq__(self, other: object, /) -> bool: ...
    def __ne__(self, other: object, /) -> bool: ...
    def __hash__(self) -> int: ...
    def __reduce__(self) -> Any: ...

@final
class GraphExec:
    """A graph that can be launched (`CUgraphExec`), made by `Graph.instantiate`. Launches of one never overlap."""

    @property
    def device(self) -> Device:
        """The device."""

    @property
    def handle(self) -> int:
        """The handle (`CUgraphExec`). Raises `ClosedError`."""

    @property
    def closed(self) -> bool:
        """Whether it was closed."""

    def launch(self, stream: Stream) -> None:
        """Launch it behind what is queued on `stream` (`cuGraphLaunch`).

        After a device fault of earlier work its host functions do not run; `stream.completion()` behind the launch
        tells. Raises `CaptureUnsupportedError` on a stream that captures.
        """

    def upload(self, stream: Stream) -> None:
        """Bring what it needs to the device, so that the first launch is not slower (`cuGraphUpload`)."""

    def update(self, graph: Graph) -> None:
        """Make later launches do what `graph` says (`cuGraphExecUpdate`).

        Raises `GraphUpdateError` when its nodes or edges are others; nothing is changed then.
        """

    def on_error(self, fn: Callable[[BaseException], object]) -> None:
        """Have `fn(exception)` called for what host functions of its graph raise, on the thread that ran them.

        `fn` must not call the API. Held as long as this object.
        """

    def close(self) -> None:
        """Give it up (`cuGraphExecDestroy`, on a background thread). Launches that are pending still run."""

    def __enter__(self) -> GraphExec: ...
    def __exit__(
        self,
        *_exception: type[BaseException] | BaseException | TracebackType | None,
    ) -> None: ...
    def __reduce__(self) -> Any: ...

@final
class GreenContext:
    """A part of a device's multiprocessors, with streams of its own (`cuGreenCtxCreate`).

    `multiprocessors` is how many it has at least; the driver rounds up, on most devices to a multiple of 8. It lives as
    long as this object or a stream made in it. Raises `InvalidValueError` for more than the device has,
    `DriverTooOldError` before CUDA 12.5.
    """

    def __new__(cls, device: Device | int | str | None = None, *, multiprocessors: int) -> GreenContext: ...
    def create_stream(self, *, priority: int = 0) -> Stream:
        """A new stream in it, which is non-blocking always (`cuGreenCtxStreamCreate`)."""

    @property
    def device(self) -> Device:
        """The device."""

    @property
    def multiprocessors(self) -> int:
        """How many multiprocessors it has."""

    @property
    def handle(self) -> int:
        """The handle (`CUgreenCtx`)."""

    def __reduce__(self) -> Any: ...

@final
class Event:
    """A mark that is recorded in a stream and reached when the work before it is done (`cuEventCreate`).

    `timing`: take timestamps for `elapsed_since`. `blocking_sync`: other libraries' waits for it sleep instead of
    spinning. `interprocess`: it can be shared; needs `timing=False`, else `InvalidValueError`.
    """

    def __new__(
        cls,
        device: Device | int | str | None = None,
        *,
        timing: bool = False,
        blocking_sync: bool = False,
        interprocess: bool = False,
    ) -> Event: ...
    @property
    def device(self) -> Device:
        """The device."""

    @property
    def timing(self) -> bool:
        """Whether it takes timestamps."""

    @property
    def blocking_sync(self) -> bool:
        """Whether waits for it in the driver sleep."""

    @property
    def interprocess(self) -> bool:
        """Whether it can be shared with other processes."""

    @property
    def handle(self) -> int:
        """The handle (`CUevent`), for other libraries, which may record the event from then on.

        While a completion of it is pending, the first reading makes a stream that waits for it. That may block, and
        raises what the driver answers, or `NotPermittedError` in a callback. Raises `ClosedError` on a closed event.
        """

    @property
    def closed(self) -> bool:
        """Whether it was closed."""

    def record(self, stream: Stream) -> None:
        """Record it behind all that is queued on `stream` so far (`cuEventRecord`)."""

    def query(self) -> bool:
        """Whether it was reached, or was never recorded (`cuEventQuery`).

        Raises `DeviceFaultError` after a fault, `CapturedEventError` if it was last recorded in a capture.
        """

    def synchronize(self, timeout: float | None = None) -> None:
        """Wait until the record of this moment is reached, at most `timeout` seconds. As `Stream.synchronize`.

        Once `handle` was read, or a graph has the event, a later record takes its place.
        """

    def elapsed_since(self, earlier: Event) -> float:
        """Milliseconds from `earlier` to this event (`cuEventElapsedTime`); negative if this one was reached first.

        Raises `InvalidValueError` for events without timing, `InvalidHandleError` for one that was not recorded,
        `CudaError` (600) for one that was not reached.
        """

    def completion(self) -> Completion[None]:
        """A completion that resolves when the record of this moment is reached; at once if there is none.

        The polling thread asks for it (`cuEventQuery`). Once `handle` was read, or a graph has the event, a stream
        of its own waits for it instead (`cuStreamWaitEvent`), since others may record it anew. To make one may block:
        see `Device.reserve_streams`.
        """

    def close(self) -> None:
        """Give the event up (`cuEventDestroy`). Waits that are queued for it are not affected."""

    def __enter__(self) -> Event: ...
    def __exit__(
        self,
        *_exception: type[BaseException] | BaseException | TracebackType | None,
    ) -> None: ...
    def __await__(self) -> Generator[Any]: ...
    def __reduce__(self) -> Any: ...

@final
class Completion(Generic[_T_co]):
    """The result of host code, or of reaching a point of a stream. It resolves exactly once.

    `await` it, wait for it with `result`, or ask for a call with `add_done_callback`. A failure that nobody retrieves
    is reported through `sys.unraisablehook`. Dropping a completion cancels nothing.
    """

    @classmethod
    def __class_getitem__(cls, item: Any) -> Any: ...
    def done(self) -> bool:
        """Whether it is resolved. Never blocks, and may be called inside a callback."""

    def result(self, timeout: float | None = None) -> _T_co:
        """Wait at most `timeout` seconds and return what the host code returned, or raise what it raised.

        Raises `DeviceFaultError` for host code that did not run because of a fault, `CancelledError` after a
        cancellation, `ShutdownError` if the interpreter was going, `WaitTimeoutError` when the time runs out, and
        `NotPermittedError` inside a callback when the wait would block. Ctrl-C ends the wait.
        """

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """As `result`, but returns the exception, or `None`."""

    @property
    def status(self) -> Status | None:
        """The status that the driver gave at this point of the stream; `None` until then."""

    def cancel(self) -> bool:
        """Ask that the host code be not run. True when it had not started: `result` then raises `CancelledError`."""

    def cancelled(self) -> bool:
        """Whether it was cancelled."""

    def add_done_callback(self, function: Callable[[Completion[Any]], object]) -> None:
        """Call `function(completion)` once when this is resolved, on a worker thread; at once, here, if it is already.

        On a worker the call may use the API, and an exception goes to `sys.unraisablehook`. Functions that are added to
        one completion may be called in any order.
        """

    def _add_waiter(self, function: Callable[[Completion[Any]], object]) -> int | None: ...
    def _remove_waiter(self, number: int) -> None: ...
    def future(self) -> Future[_T_co]:
        """A `concurrent.futures.Future` that gets the same result."""

    def __await__(self) -> Generator[Any, None, _T_co]: ...
    def __reduce__(self) -> Any: ...

@final
class Memory:
    """Bytes in pinned, managed or device memory; the arrays of the package are made of it."""

    def __new__(
        cls,
        kind: Literal["pinned", "managed", "device"],
        nbytes: int,
        device: Device | int | str | None = None,
        attach: str = "global",
    ) -> Memory: ...
    @property
    def kind(self) -> Literal["pinned", "managed", "device"]:
        """Where the bytes are."""

    @property
    def ptr(self) -> int:
        """The address; 0 for no bytes."""

    @property
    def nbytes(self) -> int:
        """The number of bytes."""

    @property
    def device(self) -> Device:
        """The device that they were allocated for."""

    def __buffer__(self, flags: int, /) -> memoryview: ...
    def __reduce__(self) -> Any: ...

@final
class Hold:
    """A stream that waits until this is released."""

    def release(self) -> None:
        """Let the stream go on. May be called anywhere."""

    def __enter__(self) -> Hold: ...
    def __exit__(
        self,
        *_exception: type[BaseException] | BaseException | TracebackType | None,
    ) -> None: ...

@final
class Injection:
    """A failure of the software driver that is to come."""

    def close(self) -> None:
        """Take it back."""

    def __enter__(self) -> Injection: ...
    def __exit__(
        self,
        *_exception: type[BaseException] | BaseException | TracebackType | None,
    ) -> None: ...

@final
class _Finished:
    def __new__(cls, completions: list[Completion[Any]]) -> _Finished: ...
    def get(self, seconds: float | None) -> int | None:
        """The number of the next that is done; `None` when there is none after `seconds`."""

    def empty(self) -> bool:
        """Whether none is done that was not got."""

    def __enter__(self) -> _Finished: ...
    def __exit__(
        self,
        *_exception: type[BaseException] | BaseException | TracebackType | None,
    ) -> None: ...

def in_callback() -> bool:
    """Whether this thread runs a callback or a host function, in which no calls of the API are permitted."""

def set_wait_policy(policy: Literal["adaptive", "spin", "sleep"]) -> None:
    """Set how the thread that polls for the memory signal waits, for the whole process.

    `"adaptive"` spins for 50 us, then sleeps for an eighth of the time waited so far, at most 2 ms; `"spin"` spins,
    which takes a core while host code is queued; `"sleep"` never spins. With nothing queued it sleeps under each. An
    `await` spins for up to 50 us too before it suspends the event loop, but under `"sleep"`. The environment variable
    `RSTREAM_WAIT_POLICY` sets it for a process. Raises `InvalidValueError` for another.
    """

def wait_policy() -> Literal["adaptive", "spin", "sleep"]:
    """How that thread waits: see `set_wait_policy`."""

def stats() -> dict[str, int]:
    """Counters of the process: host code that was `accepted`, has `run`, has `failed` or was `cancelled`."""

def status_text(code: int) -> tuple[str, str, bool]:
    """Name, description and stickiness of a code."""

def pointer_info(device: Device, address: int) -> tuple[Literal["pinned", "managed", "device"], int] | None:
    """Kind and device number of an address (`cuPointerGetAttribute`); `None` for plain host memory."""

def spin(stream: Stream, microseconds: float) -> None:
    """`rstream.testing.spin`."""

def fault(stream: Stream, code: int = 700) -> None:
    """`rstream.testing.fault`."""

def hold(stream: Stream) -> Hold:
    """`rstream.testing.hold`."""

def inject(function: str, code: int, nth: int = 1) -> Injection:
    """`rstream.testing.inject`."""

def _at_exit(seconds: float) -> int: ...
def _exchange_capture_mode(device: Device, mode: int) -> int: ...
def _after_fork() -> None: ...
