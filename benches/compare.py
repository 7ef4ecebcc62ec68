"""rstream beside its peers and the C floor, on one device, in one run.

    python benches/compare.py [--device 0] [--only T1,T6,scale] [--json FILE] [--markdown FILE] [--quick]

Prints a table with ratios and what they have to be; each figure is the median of repeats. Peers are what is installed:
CuPy, cuda.bindings, cuda.core and torch. With a C compiler native callbacks are measured, and with CUDA's headers the
floor is compiled and run. On the software device the figures compare rstream with itself only.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes
import functools
import gc
import json
import os
import platform
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import rstream as rs

FLOOR = Path(__file__).with_name("floor.c")
SIGNALS: Final[tuple[Literal["memory"], Literal["driver"]]] = ("memory", "driver")
OWN = tuple(f"rstream {signal}" for signal in SIGNALS)


@dataclass(frozen=True)
class Rule:
    """What the figure of a row has to be: at most `factor` times a reference, or, with none, at most `factor`."""

    row: str
    factor: float
    floor: str | None = None
    """The floor's figure that is the reference."""
    less: str | None = None
    """The floor's figure that is taken off both first."""
    peer: bool = False
    """The best peer is the reference."""

    def text(self) -> str:
        """The rule, to be read."""
        if self.floor:
            return f"{self.factor:g} x floor" + (" (added)" if self.less else "")
        return f"{self.factor:g} x best peer" if self.peer else f"{self.factor:g}"

    def ratio(self, figure: float, floor: dict[str, float], peers: dict[str, float]) -> float | None:
        """The figure beside its reference, which is `None` where the reference was not measured."""
        if self.floor:
            if not floor:
                return None
            less = floor[self.less] if self.less else 0.0
            return (figure - less) / (floor[self.floor] - less)
        if self.peer:
            return figure / min(peers.values()) if peers else None
        return figure


RULES = (
    Rule("T1 native stage, 0 us kernel", 1.25, floor="memory_empty"),
    Rule("T1 native stage from Python, 0 us kernel", 1.25, floor="memory_empty"),
    Rule("T2 native stage, 20 us kernel", 1.5, floor="memory_20", less="kernel_20"),
    Rule("T2 native stage from Python, 20 us kernel", 1.5, floor="memory_20", less="kernel_20"),
    Rule("T3 Python stage, 0 us kernel", 0.5, peer=True),
    Rule("T3 Python stage, 20 us kernel", 0.5, peer=True),
    Rule("T4 latency after a 30 us kernel", 1.3, floor="latency_30"),
    Rule("T5 latency, idle stream", 0.5, peer=True),
    Rule("T6 continuation, per item", 1.5, floor="callback_each"),
    Rule("T6 continuation, per item", 0.25, peer=True),
    Rule("T7 await, idle stream", 0.3, peer=True),
    Rule("T7 await, behind a 20 us kernel", 0.3, peer=True),
    Rule("T7 await, gathered", 0.3, peer=True),
    Rule("T7 await, gathered by asyncio", 0.3, peer=True),
    Rule("T8 query", 1, peer=True),
    Rule("T8 synchronize", 1, peer=True),
    Rule("T8 event record", 1, peer=True),
    Rule("T8 create and close", 1, peer=True),
    Rule("T9 delay by a slow callback, ms", 1),
    Rule("T10 processor, nothing queued, %", 0.01),
    Rule("T10 processor, one queued, %", 2),
    Rule("T11 lost or doubled", 0),
    Rule("T11 growth, MiB", 1),
)


COUNTER = ctypes.c_uint64(0)


class Bench:
    """Figures by target and contestant, in microseconds unless a name says otherwise."""

    def __init__(self, device: rs.Device, quick: bool, only: set[str]) -> None:
        self.device = device
        self.only = only
        self.repeats = 3 if quick else 7
        self.scale = 10 if quick else 1
        self.rows: list[tuple[str, str, float]] = []
        self.floor: dict[str, float] = {}
        self.channels: list[dict[str, Any]] = []
        self.native: ctypes.CDLL | None = None
        self.pipeline: Path | None = None

    def wants(self, *targets: str) -> bool:
        """Whether one of these is to be measured."""
        return not self.only or not self.only.isdisjoint(targets)

    def native_callback(self) -> tuple[int, int] | None:
        """Address and argument of a compiled function that counts, where there is a compiler."""
        if self.native is None:
            return None
        return ctypes.cast(self.native.rstream_count, ctypes.c_void_p).value or 0, ctypes.addressof(COUNTER)

    def note(self, target: str, name: str, figure: float) -> None:
        """Keeps a figure, and shows it."""
        self.rows.append((target, name, figure))
        print(f"  {target:46s} {name:16s} {figure:12.3f}", flush=True)

    def each(self, count: int, work: Callable[[int], object], finish: Callable[[], object]) -> float:
        """Microseconds for one of `count`, which `work` queues and `finish` waits for: the median of the repeats."""
        count = max(10, count // self.scale)
        figures = []
        for _ in range(self.repeats):
            started = time.perf_counter_ns()
            work(count)
            finish()
            figures.append((time.perf_counter_ns() - started) / count / 1e3)
        return statistics.median(figures)

    def by_turns(self, calls: dict[str, Callable[[], object]]) -> dict[str, float]:
        """Microseconds for one call of each, the median of many turns.

        The clock of a processor changes between two calls of `each`, by more than what is compared here.
        """
        count = max(10, 1000 // self.scale)
        figures: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(3 * self.repeats):
            for name, call in calls.items():
                started = time.perf_counter_ns()
                for _ in range(count):
                    call()
                figures[name].append((time.perf_counter_ns() - started) / count / 1e3)
        return {name: statistics.median(runs) for name, runs in figures.items()}


def compile_floor(bench: Bench) -> None:
    """Compiles the native callbacks and, where CUDA's headers are, runs the floor."""
    compiler = shutil.which("nvcc") or shutil.which("cc")
    if compiler is None:
        return
    folder = Path(tempfile.mkdtemp(prefix="rstream-bench-"))
    source = folder / "floor.c"
    source.write_text(FLOOR.read_text())
    pic = ["-Xcompiler", "-fPIC"] if compiler.endswith("nvcc") else ["-fPIC"]
    library = folder / "floor.so"
    subprocess.run([compiler, "-O2", "-shared", *pic, "-o", library, source], check=True)
    bench.native = ctypes.CDLL(str(library))
    if bench.device.is_software or not bench.wants("T1", "T2", "T4", "T6"):
        return
    program = folder / "floor"
    built = subprocess.run([compiler, "-O2", "-DPROGRAM", "-o", program, source, "-lcuda", "-lpthread"], check=False)
    if built.returncode:
        return
    bench.floor = json.loads(subprocess.run([program], check=True, capture_output=True, text=True).stdout)
    for name, figure in bench.floor.items():
        bench.note("floor", name, figure)


def stages(bench: Bench, stream: rs.Stream, kernel: float, add: Callable[[], object], count: int) -> float:
    """Microseconds for a stage of a kernel of `kernel` microseconds and an ordered callback."""

    def work(count: int) -> None:
        for _ in range(count):
            rs.testing.spin(stream, kernel)
            add()

    return bench.each(count, work, stream.synchronize)


def native_stages(bench: Bench) -> None:
    """T1 and T2: an ordered callback without Python in each stage of a pipeline, queued by Rust and by Python."""
    if bench.pipeline:
        output = subprocess.run([bench.pipeline], check=True, capture_output=True, text=True).stdout
        for name, figure in json.loads(output).items():
            signal, kernel = name.split("_")
            row = "T1 native stage, 0 us kernel" if kernel == "empty" else "T2 native stage, 20 us kernel"
            bench.note(row, f"rstream {signal}", figure)
    native = bench.native_callback()
    if native is None:
        return
    for signal in SIGNALS:
        with rs.Stream(bench.device, signal=signal) as stream:
            for target, kernel, count in (("T1", 0, 1000), ("T2", 20, 500)):
                if bench.wants(target):
                    figure = stages(bench, stream, kernel, lambda: stream.add_native_callback(*native), count)
                    bench.note(f"{target} native stage from Python, {kernel} us kernel", f"rstream {signal}", figure)


def python_stages(bench: Bench) -> None:
    """T3: the same with a Python callback."""
    for signal in SIGNALS:
        with rs.Stream(bench.device, signal=signal) as stream:
            for kernel, count in ((0, 1000), (20, 500)):
                figure = stages(bench, stream, kernel, lambda: stream.add_callback(nothing), count)
                bench.note(f"T3 Python stage, {kernel} us kernel", f"rstream {signal}", figure)


def nothing(*_: object) -> None:
    """A callback that does nothing."""


def latency(
    bench: Bench,
    kernel: float,
    add: Callable[[Callable[..., None]], object],
    wait: Callable[[], object],
    spin: Callable[[], object],
) -> float:
    """Microseconds from the launch of a kernel, or from the enqueue, to the first line of a Python callback."""
    seen = [0]

    def mark(*_: object) -> None:
        seen[0] = time.perf_counter_ns()

    figures = []
    for _ in range(max(20, 500 // bench.scale)):
        started = time.perf_counter_ns()
        if kernel:
            spin()
        add(mark)
        wait()
        figures.append((seen[0] - started) / 1e3)
    return statistics.median(figures)


LATENCIES = (("T4 latency after a 30 us kernel", 30), ("T5 latency, idle stream", 0))


def latencies(bench: Bench) -> None:
    """T4 and T5."""
    for signal in SIGNALS:
        with rs.Stream(bench.device, signal=signal) as stream:
            for row, kernel in LATENCIES:
                if bench.wants(row.split()[0]):
                    figure = latency(
                        bench, kernel, stream.add_callback, stream.synchronize, lambda: rs.testing.spin(stream, 30)
                    )
                    bench.note(row, f"rstream {signal}", figure)


def notifications(bench: Bench) -> None:
    """T6: thousands that the stream does not wait for."""
    for signal in SIGNALS:
        with rs.Stream(bench.device, signal=signal) as stream:
            last: list[rs.Completion[Any]] = []

            def work(count: int) -> None:
                last[:] = [stream.then(nothing) for _ in range(count)]

            bench.note("T6 continuation, per item", f"rstream {signal}", bench.each(5000, work, lambda: rs.wait(last)))


AWAITS = tuple(rule.row for rule in RULES if rule.row.startswith("T7"))


def looped(bench: Bench, run: Callable[[int], Coroutine[Any, Any, None]]) -> float:
    """Microseconds for one of what a coroutine does, in an event loop of its own."""
    return bench.each(2000, lambda count: asyncio.run(run(count)), nothing)


def awaits(bench: Bench) -> None:
    """T7. What is gathered is queued while the stream is held, so that all of it is waited for."""
    for signal in SIGNALS:
        with rs.Stream(bench.device, signal=signal) as stream:

            async def one(count: int) -> None:
                for _ in range(count):
                    await stream.completion()

            async def one_behind(count: int) -> None:
                for _ in range(count):
                    rs.testing.spin(stream, 20)
                    await stream.completion()

            def queued(count: int) -> list[rs.Completion[None]]:
                with rs.testing.hold(stream):
                    return [stream.completion() for _ in range(count)]

            async def many(count: int) -> None:
                await rs.gather(queued(count))

            async def many_tasks(count: int) -> None:
                await asyncio.gather(*queued(count))

            for row, run in zip(AWAITS, (one, one_behind, many, many_tasks), strict=True):
                bench.note(row, f"rstream {signal}", looped(bench, run))

    with rs.Stream(bench.device) as stream:

        async def in_executor(count: int, kernel: float = 0) -> None:
            loop = asyncio.get_running_loop()
            for _ in range(count):
                if kernel:
                    rs.testing.spin(stream, kernel)
                await loop.run_in_executor(None, stream.synchronize)

        async def all_in_executor(count: int) -> None:
            loop = asyncio.get_running_loop()
            with rs.testing.hold(stream):
                futures = [loop.run_in_executor(None, stream.synchronize) for _ in range(count)]
            await asyncio.gather(*futures)

        async def polled(kernel: float = 0) -> None:
            if kernel:
                rs.testing.spin(stream, kernel)
            event = stream.record()
            while not event.query():
                await asyncio.sleep(0)

        async def polling(count: int, kernel: float = 0) -> None:
            for _ in range(count):
                await polled(kernel)

        async def all_polling(count: int) -> None:
            with rs.testing.hold(stream):
                tasks = [asyncio.create_task(polled()) for _ in range(count)]
                # Each records its event.
                await asyncio.sleep(0)
            await asyncio.gather(*tasks)

        for peer, single, every in (
            ("run_in_executor", in_executor, all_in_executor),
            ("event polling", polling, all_polling),
        ):
            runs = (single, functools.partial(single, kernel=20), every)
            figures = [looped(bench, run) for run in runs]
            for row, figure in zip(AWAITS, (*figures, figures[-1]), strict=True):
                bench.note(row, peer, figure)


def idle(bench: Bench) -> None:
    """T8: calls when nothing is queued."""
    calls: dict[str, dict[str, Callable[[], object]]] = {}

    def of_rstream(
        signal: Literal["memory", "driver"], stream: rs.Stream, event: rs.Event
    ) -> dict[str, Callable[[], object]]:
        return {
            "query": stream.query,
            "synchronize": stream.synchronize,
            "event record": lambda: event.record(stream),
            "create and close": lambda: rs.Stream(bench.device, signal=signal).close(),
        }

    with contextlib.ExitStack() as streams:
        for signal in SIGNALS:
            stream = streams.enter_context(rs.Stream(bench.device, signal=signal))
            for name, call in of_rstream(signal, stream, rs.Event(bench.device)).items():
                calls.setdefault(name, {})[f"rstream {signal}"] = call
        for peer, of in peers(bench).items():
            for name, call in of.get("idle", {}).items():
                calls.setdefault(name, {})[peer] = call
        for name, contestants in calls.items():
            for contestant, figure in bench.by_turns(contestants).items():
                bench.note(f"T8 {name}", contestant, figure)


def slow_neighbour(bench: Bench) -> None:
    """T9: how long one stream's callback of 200 ms delays another stream's, in milliseconds."""
    for signal in SIGNALS:
        slow, quick = (rs.Stream(bench.device, signal=signal) for _ in range(2))
        quick.add_callback(nothing).result(30)
        entered = threading.Event()

        def sleep(status: rs.Status) -> None:
            entered.set()
            time.sleep(0.2)

        figures = []
        for _ in range(3):
            entered.clear()
            busy = slow.add_callback(sleep)
            entered.wait(30)
            started = time.perf_counter()
            reached = quick.add_callback(lambda status: time.perf_counter()).result(30)
            figures.append((reached - started) * 1e3)
            busy.result(30)
        bench.note("T9 delay by a slow callback, ms", f"rstream {signal}", statistics.median(figures))


def processor_time() -> float:
    """Seconds of processor time of rstream's own threads, or, where /proc does not tell, of the process."""
    if not Path("/proc/self/schedstat").exists():
        return time.process_time()
    nanoseconds = 0
    for task in Path("/proc/self/task").iterdir():
        # A thread may end meanwhile.
        with contextlib.suppress(OSError):
            if (task / "comm").read_text().startswith("rstream"):
                nanoseconds += int((task / "schedstat").read_text().split()[0])
    return nanoseconds / 1e9


def processor(bench: Bench) -> None:
    """T10: processor time in percent of a core, with nothing queued and with one callback behind busy work."""
    seconds = 10 / bench.scale

    def share(wait: Callable[[], object]) -> float:
        before, started = processor_time(), time.perf_counter()
        wait()
        return (processor_time() - before) / (time.perf_counter() - started) * 100

    with rs.Stream(bench.device, signal="memory") as stream:
        stream.add_callback(nothing).result(30)
        time.sleep(0.1)
        bench.note("T10 processor, nothing queued, %", "rstream memory", share(lambda: time.sleep(seconds)))
        with rs.testing.hold(stream) as hold:
            done = stream.add_callback(nothing)
            timer = threading.Timer(seconds, hold.release)
            timer.start()
            bench.note("T10 processor, one queued, %", "rstream memory", share(timer.join))
        done.result(30)


def million(bench: Bench) -> None:
    """T11: a million callbacks over 16 streams: how many are missing, and the growth of memory in MiB."""
    total = 1_000_000 // bench.scale**2
    for signal in SIGNALS:
        streams = [rs.Stream(bench.device, signal=signal) for _ in range(16)]
        counts = [0] * 16

        def count(status: rs.Status, index: int) -> None:
            counts[index] += 1

        def run(number: int) -> None:
            for index in range(number):
                streams[index % 16].add_callback(count, index % 16)
                if index % 4096 == 4095:
                    for stream in streams:
                        stream.synchronize()
            for stream in streams:
                stream.add_callback(nothing).result(60)

        run(total // 10)
        gc.collect()
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        started = time.perf_counter()
        run(total)
        taken = (time.perf_counter() - started) / total * 1e6
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
        bench.note("T11 lost or doubled", f"rstream {signal}", abs(sum(counts) - total - total // 10))
        bench.note("T11 growth, MiB", f"rstream {signal}", grown)
        bench.note("T11 per callback", f"rstream {signal}", taken)


def scaling(bench: Bench) -> None:
    """What one item costs when there are more streams, and when more is pending."""
    native = bench.native_callback()

    def ordered(stream: rs.Stream) -> rs.Completion[Any]:
        return stream.add_native_callback(*native) if native else stream.add_callback(nothing)

    kinds: dict[str, Callable[[rs.Stream], rs.Completion[Any]]] = {
        "ordered callback": ordered,
        "continuation": lambda stream: stream.then(nothing),
    }
    for signal in SIGNALS:
        for name, add in kinds.items():
            for number in (1, 16, 128):
                streams = [rs.Stream(bench.device, signal=signal) for _ in range(number)]
                last: list[rs.Completion[Any]] = []

                def work(count: int) -> None:
                    last[:] = [add(streams[index % number]) for index in range(count)]

                figure = bench.each(2560, work, lambda: rs.wait(last))
                bench.note(f"scale {name}, {number} stream{'s' if number > 1 else ''}", f"rstream {signal}", figure)
            # Python code takes too long for a million.
            for number, repeats in ((1, 50), (1_000, 5), (100_000, 1), (1_000_000, 1)):
                if number > 100_000 and (bench.scale > 1 or not native or add is not ordered):
                    continue
                count = number if number <= 1_000 else number // bench.scale
                queued, run = zip(*(held(bench, signal, add, count) for _ in range(repeats)), strict=True)
                bench.note(f"scale {name}, {count:,} pending, enqueue", f"rstream {signal}", statistics.median(queued))
                bench.note(f"scale {name}, {count:,} pending, run", f"rstream {signal}", statistics.median(run))


def held(
    bench: Bench,
    signal: Literal["memory", "driver"],
    add: Callable[[rs.Stream], rs.Completion[Any]],
    count: int,
) -> tuple[float, float]:
    """Microseconds for one of `count` items on a stream that is held: to queue it, and to run it after the release."""
    with rs.Stream(bench.device, signal=signal) as stream, rs.testing.hold(stream) as hold:
        started = time.perf_counter_ns()
        for _ in range(count - 1):
            add(stream)
        last = add(stream)
        queued = time.perf_counter_ns()
        hold.release()
        last.result(120)
        return (queued - started) / count / 1e3, (time.perf_counter_ns() - queued) / count / 1e3


def blocked_streams(bench: Bench) -> None:
    """Whether a further stream goes on while callbacks keep others waiting, with and without work behind them."""
    with rs.Stream(bench.device) as further:
        rs.testing.spin(further, 1)
        further.synchronize(30)
        for waiting in (*range(1, 13), 32):
            for behind in (False, True):
                goes_on, by_driver = keep_waiting(bench, further, waiting, behind)
                bench.channels.append(
                    {"waiting": waiting, "behind": behind, "goes on": goes_on, "by the driver": by_driver}
                )
                print(
                    f"  channels: {waiting:2} streams wait, {'work' if behind else 'nothing'} behind: other streams go"
                    f" on: {'yes' if goes_on else 'no'}; by the driver's callback: {by_driver}",
                    flush=True,
                )


def keep_waiting(bench: Bench, further: rs.Stream, number: int, behind: bool) -> tuple[bool, int | None]:
    """Whether `further` goes on while `number` streams wait for their callbacks, and how many use the driver's."""
    release = threading.Event()
    threads: list[str] = []

    def wait(status: rs.Status) -> None:
        # The memory signal's callbacks run on the polling threads, the driver's on others.
        comm = Path(f"/proc/self/task/{threading.get_native_id()}/comm")
        threads.append(comm.read_text().strip() if comm.exists() else "")
        release.wait(30)

    streams = [rs.Stream(bench.device, signal="memory") for _ in range(number)]
    try:
        waiting = [stream.add_callback(wait) for stream in streams]
        if behind:
            for stream in streams:
                rs.testing.spin(stream, 1)
        rs.testing.spin(further, 1)
        try:
            further.synchronize(0.5)
            goes_on = True
        except TimeoutError:
            goes_on = False
    finally:
        release.set()
    rs.wait(waiting, timeout=30)
    for stream in (*streams, further):
        stream.synchronize(30)
    return goes_on, None if "" in threads else number - threads.count("rstream-poller")


@functools.cache
def peers(bench: Bench) -> dict[str, dict[str, Any]]:
    """What is installed and can be measured on a GPU: calls on an idle stream, and host callbacks where it has them."""
    found: dict[str, dict[str, Any]] = {}
    if bench.device.is_software:
        return found
    for name, make in (("CuPy", of_cupy), ("cuda.bindings", of_bindings), ("cuda.core", of_core), ("torch", of_torch)):
        try:
            found[name] = make()
        except ImportError:
            print(f"  {name} is not installed")
    return found


def of_cupy() -> dict[str, Any]:
    """CuPy."""
    import cupy

    stream = cupy.cuda.Stream(non_blocking=True)
    event = cupy.cuda.Event(disable_timing=True)
    return {
        "handle": stream,
        "add": lambda function: stream.launch_host_func(function, None),
        "synchronize": stream.synchronize,
        "idle": {
            "query": lambda: stream.done,
            "synchronize": stream.synchronize,
            "event record": lambda: event.record(stream),
            "create and close": lambda: cupy.cuda.Stream(non_blocking=True),
        },
    }


def of_bindings() -> dict[str, Any]:
    """cuda.bindings, with a callback by ctypes."""
    from cuda.bindings import driver

    handle = driver.cuStreamCreate(1)[1]
    event = driver.cuEventCreate(2)[1]
    prototype = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
    made: dict[Callable[..., None], Any] = {}

    def add(function: Callable[..., None]) -> None:
        if function not in made:
            made[function] = prototype(lambda data: function())
        address = ctypes.cast(made[function], ctypes.c_void_p).value
        driver.cuLaunchHostFunc(handle, driver.CUhostFn(address), 0)

    return {
        "handle": int(handle),
        "add": add,
        "synchronize": lambda: driver.cuStreamSynchronize(handle),
        "idle": {
            "query": lambda: driver.cuStreamQuery(handle),
            "synchronize": lambda: driver.cuStreamSynchronize(handle),
            "event record": lambda: driver.cuEventRecord(event, handle),
            "create and close": lambda: driver.cuStreamDestroy(driver.cuStreamCreate(1)[1]),
        },
    }


def of_core() -> dict[str, Any]:
    """cuda.core, which has no callbacks."""
    from cuda.core import Device

    device = Device()
    device.set_current()
    stream = device.create_stream()
    event = device.create_event() if hasattr(device, "create_event") else stream.record()
    return {
        "idle": {
            "synchronize": stream.sync,
            "event record": lambda: stream.record(event),
            "create and close": lambda: device.create_stream().close(),
        }
    }


def of_torch() -> dict[str, Any]:
    """torch, which has no callbacks."""
    import torch

    stream, event = torch.cuda.Stream(), torch.cuda.Event()
    return {
        "idle": {
            "query": stream.query,
            "synchronize": stream.synchronize,
            "event record": lambda: event.record(stream),
        }
    }


def callbacks_of_peers(bench: Bench) -> None:
    """T3 to T6 for the peers that have host callbacks. Their kernels are rstream's, on their streams."""
    for name, peer in peers(bench).items():
        if "add" not in peer:
            continue
        add, wait = peer["add"], peer["synchronize"]
        adopted = rs.Stream.from_external(peer["handle"], bench.device)
        if bench.wants("T3"):
            for kernel, count in ((0, 1000), (20, 500)):
                figure = stages(bench, adopted, kernel, lambda: add(nothing), count)
                bench.note(f"T3 Python stage, {kernel} us kernel", name, figure)
        for row, kernel in LATENCIES:
            if bench.wants(row.split()[0]):
                figure = latency(bench, kernel, add, wait, lambda: rs.testing.spin(adopted, 30))
                bench.note(row, name, figure)
        if bench.wants("T6"):
            figure = bench.each(5000, lambda count: [add(nothing) for _ in range(count)], wait)
            bench.note("T6 continuation, per item", name, figure)


PARTS: tuple[tuple[Callable[[Bench], None], tuple[str, ...]], ...] = (
    (native_stages, ("T1", "T2")),
    (python_stages, ("T3",)),
    (callbacks_of_peers, ("T3", "T4", "T5", "T6")),
    (latencies, ("T4", "T5")),
    (notifications, ("T6",)),
    (awaits, ("T7",)),
    (idle, ("T8",)),
    (slow_neighbour, ("T9",)),
    (processor, ("T10",)),
    (million, ("T11",)),
    (scaling, ("scale",)),
    (blocked_streams, ("channels",)),
)


def table(head: tuple[str, ...], lines: Sequence[tuple[str, ...]]) -> str:
    """A Markdown table, or nothing without lines."""
    if not lines:
        return ""
    return "".join(f"| {' | '.join(line)} |\n" for line in (head, ("---",) * len(head), *lines)) + "\n"


def judged(bench: Bench, rule: Rule) -> tuple[str, ...] | None:
    """The line of a rule, if its row was measured."""
    figures = {name: figure for row, name, figure in bench.rows if row == rule.row}
    own = [figures.pop(name, None) for name in OWN]
    if own == [None, None]:
        return None
    # On the software device there is nothing to hold a figure against.
    measured = [figure for figure in own if figure is not None]
    ratios = [None if bench.device.is_software else rule.ratio(figure, bench.floor, figures) for figure in measured]
    target, what = rule.row.split(" ", 1)
    return (
        target,
        what,
        *("" if figure is None else f"{figure:.2f}" for figure in own),
        f"{bench.floor[rule.floor]:.2f}" if rule.floor and bench.floor else "",
        ", ".join(f"{name} {figure:.2f}" for name, figure in sorted(figures.items(), key=lambda item: item[1])),
        rule.text(),
        " / ".join("-" if ratio is None else f"{ratio:.2f}" for ratio in ratios) if rule.floor or rule.peer else "",
        " / ".join("-" if ratio is None else "yes" if ratio <= rule.factor else "no" for ratio in ratios),
    )


def markdown(bench: Bench, machine: dict[str, Any]) -> str:
    """All tables, for a document."""
    text = ", ".join(f"{name} {value}" for name, value in machine.items()) + "\n\n"
    rules = [line for rule in RULES if (line := judged(bench, rule))]
    text += table(("", "what, in us", *OWN, "floor", "peers", "at most", "ratio", "met"), rules)
    rows: dict[str, dict[str, float]] = {}
    for row, name, figure in bench.rows:
        if row.startswith("scale "):
            rows.setdefault(row.removeprefix("scale "), {})[name] = figure
    scaled = [(row, *(f"{figures[name]:.2f}" for name in OWN)) for row, figures in rows.items()]
    text += table(("us for one item", *OWN), scaled)
    answers = [
        (
            str(found["waiting"]),
            "work" if found["behind"] else "nothing",
            "yes" if found["goes on"] else "no",
            "unknown" if found["by the driver"] is None else str(found["by the driver"]),
        )
        for found in bench.channels
    ]
    text += table(("streams that wait", "behind the callback", "other streams go on", "use the driver's"), answers)
    return text


def main() -> None:
    """Runs everything and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", help="as rstream.Device takes it; by default the default device")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--pipeline", type=Path, help="benches/pipeline.rs as a program, for T1 and T2")
    parser.add_argument("--quick", action="store_true", help="a tenth of the work, to see that it runs")
    parser.add_argument("--only", default="", help="targets, such as T1,T6, and the parts scale and channels")
    parser.add_argument("--markdown", type=Path, help="write the tables to this file")
    options = parser.parse_args()
    only = {target for target in options.only.split(",") if target}
    unknown = only - {target for _, targets in PARTS for target in targets}
    if unknown:
        parser.error(f"nothing is called {', '.join(sorted(unknown))}")
    device = rs.default_device() if options.device is None else rs.Device(options.device)
    bench = Bench(device, options.quick, only)
    bench.pipeline = options.pipeline and options.pipeline.resolve(strict=True)
    machine = {
        "device": device.name,
        "driver": ".".join(map(str, device.driver_version)),
        "python": sys.version.split()[0],
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "date": time.strftime("%Y-%m-%d"),
        "rstream": rs.__version__,
    }
    print(machine)
    compile_floor(bench)
    for run, targets in PARTS:
        if bench.wants(*targets):
            run(bench)
    tables = markdown(bench, machine)
    print(f"\n{tables}", end="")
    if options.markdown:
        options.markdown.write_text(tables)
    if options.json:
        figures = {"machine": machine, "floor": bench.floor, "rows": bench.rows, "channels": bench.channels}
        options.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
