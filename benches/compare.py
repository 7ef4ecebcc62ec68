"""rstream beside its peers and the C floor, on one device, in one run.

    python benches/compare.py [--device 0] [--json FILE] [--quick]

Prints a table with ratios; each figure is the median of repeats. Peers are what is installed: CuPy and torch. With a C
compiler native callbacks are measured, and with CUDA's headers the floor is compiled and run. On the software device
the figures compare rstream with itself only.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
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
from collections.abc import Callable
from pathlib import Path
from typing import Any

import rstream as rs

FLOOR = Path(__file__).with_name("floor.c")
SIGNALS = ("memory", "driver")


class Bench:
    """Figures by target and contestant, in microseconds unless a name says otherwise."""

    def __init__(self, device: rs.Device, quick: bool) -> None:
        self.device = device
        self.repeats = 3 if quick else 7
        self.scale = 10 if quick else 1
        self.rows: list[tuple[str, str, float]] = []
        self.native: ctypes.CDLL | None = None

    def note(self, target: str, name: str, figure: float) -> None:
        """Keeps a figure, and shows it."""
        self.rows.append((target, name, figure))
        print(f"  {target:34s} {name:34s} {figure:12.3f}", flush=True)

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


def compile_floor(bench: Bench) -> dict[str, float]:
    """Compiles the native callbacks and, where CUDA's headers are, runs the floor."""
    compiler = shutil.which("nvcc") or shutil.which("cc")
    if compiler is None:
        return {}
    folder = Path(tempfile.mkdtemp(prefix="rstream-bench-"))
    source = folder / "floor.c"
    source.write_text(FLOOR.read_text())
    pic = ["-Xcompiler", "-fPIC"] if compiler.endswith("nvcc") else ["-fPIC"]
    library = folder / "floor.so"
    subprocess.run([compiler, "-O2", "-shared", *pic, "-o", library, source], check=True)
    bench.native = ctypes.CDLL(str(library))
    if bench.device.is_software:
        return {}
    program = folder / "floor"
    built = subprocess.run([compiler, "-O2", "-DPROGRAM", "-o", program, source, "-lcuda", "-lpthread"], check=False)
    if built.returncode:
        return {}
    floor: dict[str, float] = json.loads(subprocess.run([program], check=True, capture_output=True, text=True).stdout)
    for name, figure in floor.items():
        bench.note("floor", name, figure)
    return floor


def stages(bench: Bench, stream: rs.Stream, kernel: float, add: Callable[[], object], count: int) -> float:
    """Microseconds for a stage of a kernel of `kernel` microseconds and an ordered callback."""

    def work(count: int) -> None:
        for _ in range(count):
            rs.testing.spin(stream, kernel)
            add()

    return bench.each(count, work, stream.synchronize)


def ordered(bench: Bench) -> None:
    """T1 to T3: an ordered callback in each stage of a pipeline."""
    for signal in SIGNALS:
        with rs.Stream(bench.device, signal=signal) as stream:  # type: ignore[arg-type]
            if bench.native is not None:
                counter = ctypes.c_uint64(0)
                address = ctypes.cast(bench.native.rstream_count, ctypes.c_void_p).value or 0
                data = ctypes.addressof(counter)
                for kernel, count in ((0, 1000), (20, 500)):
                    figure = stages(bench, stream, kernel, lambda: stream.add_native_callback(address, data), count)
                    bench.note(f"T1-2 native stage, {kernel} us kernel", f"rstream {signal}", figure)
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


def latencies(bench: Bench) -> None:
    """T4 and T5."""
    for signal in SIGNALS:
        with rs.Stream(bench.device, signal=signal) as stream:  # type: ignore[arg-type]
            for target, kernel in (("T4 latency after a 30 us kernel", 30), ("T5 latency, idle stream", 0)):
                figure = latency(
                    bench, kernel, stream.add_callback, stream.synchronize, lambda: rs.testing.spin(stream, 30)
                )
                bench.note(target, f"rstream {signal}", figure)


def notifications(bench: Bench) -> None:
    """T6: thousands that the stream does not wait for."""
    for signal in SIGNALS:
        with rs.Stream(bench.device, signal=signal) as stream:  # type: ignore[arg-type]
            last: list[rs.Completion[Any]] = []

            def work(count: int) -> None:
                last[:] = [stream.then(nothing) for _ in range(count)]

            bench.note("T6 continuation, per item", f"rstream {signal}", bench.each(5000, work, lambda: rs.wait(last)))


def awaits(bench: Bench) -> None:
    """T7."""
    for signal in SIGNALS:
        with rs.Stream(bench.device, signal=signal) as stream:  # type: ignore[arg-type]

            async def one(count: int) -> None:
                for _ in range(count):
                    await stream.completion()

            async def many(count: int) -> None:
                await asyncio.gather(*[stream.completion() for _ in range(count)])

            for name, run in (("one", one), ("gathered", many)):
                figure = bench.each(2000, lambda count, run=run: asyncio.run(run(count)), nothing)
                bench.note(f"T7 await, {name}", f"rstream {signal}", figure)

    with rs.Stream(bench.device) as stream:

        async def one_in_executor(count: int) -> None:
            loop = asyncio.get_running_loop()
            for _ in range(count):
                await loop.run_in_executor(None, stream.synchronize)

        async def all_in_executor(count: int) -> None:
            loop = asyncio.get_running_loop()
            await asyncio.gather(*[loop.run_in_executor(None, stream.synchronize) for _ in range(count)])

        async def polled() -> None:
            event = stream.record()
            while not event.query():
                await asyncio.sleep(0)

        async def one_polled(count: int) -> None:
            for _ in range(count):
                await polled()

        async def all_polled(count: int) -> None:
            await asyncio.gather(*[polled() for _ in range(count)])

        for name, run in (
            ("T7 await, one", one_in_executor),
            ("T7 await, gathered", all_in_executor),
        ):
            figure = bench.each(2000, lambda count, run=run: asyncio.run(run(count)), nothing)
            bench.note(name, "run_in_executor", figure)
        for name, run in (("T7 await, one", one_polled), ("T7 await, gathered", all_polled)):
            figure = bench.each(2000, lambda count, run=run: asyncio.run(run(count)), nothing)
            bench.note(name, "event polling", figure)


def idle(bench: Bench) -> None:
    """T8: calls when nothing is queued."""

    def repeat(call: Callable[[], object]) -> float:
        def work(count: int) -> None:
            for _ in range(count):
                call()

        return bench.each(5000, work, nothing)

    with rs.Stream(bench.device) as stream:
        event = rs.Event(bench.device)
        calls: dict[str, Callable[[], object]] = {
            "query": stream.query,
            "synchronize": stream.synchronize,
            "event record": lambda: event.record(stream),
            "create and close": lambda: rs.Stream(bench.device).close(),
        }
        for name, call in calls.items():
            bench.note(f"T8 {name}", "rstream", repeat(call))
    for peer, of in peers(bench).items():
        for name, call in of.get("idle", {}).items():
            bench.note(f"T8 {name}", peer, repeat(call))


def slow_neighbour(bench: Bench) -> None:
    """T9: how long one stream's callback of 200 ms delays another stream's, in milliseconds."""
    for signal in SIGNALS:
        slow, quick = (rs.Stream(bench.device, signal=signal) for _ in range(2))  # type: ignore[arg-type]
        quick.add_callback(nothing).result(30)
        entered = threading.Event()
        figures = []
        for _ in range(3):
            entered.clear()
            busy = slow.add_callback(lambda status: (entered.set(), time.sleep(0.2)))
            entered.wait(30)
            started = time.perf_counter()
            reached = quick.add_callback(lambda status: time.perf_counter()).result(30)
            figures.append((reached - started) * 1e3)
            busy.result(30)
        bench.note("T9 delay by a slow callback, ms", f"rstream {signal}", statistics.median(figures))


def processor(bench: Bench) -> None:
    """T10: processor time in percent of a core, with nothing queued and with one callback behind busy work."""
    seconds = 10 / bench.scale

    def share(wait: Callable[[], object]) -> float:
        before, started = time.process_time(), time.perf_counter()
        wait()
        return (time.process_time() - before) / (time.perf_counter() - started) * 100

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
        streams = [rs.Stream(bench.device, signal=signal) for _ in range(16)]  # type: ignore[arg-type]
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
    import cupy  # type: ignore[import-not-found]

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
    from cuda.bindings import driver  # type: ignore[import-not-found]

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
    from cuda.core import Device  # type: ignore[import-not-found]

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
    import torch  # type: ignore[import-not-found]

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
        for kernel, count in ((0, 1000), (20, 500)):
            figure = stages(bench, adopted, kernel, lambda: add(nothing), count)
            bench.note(f"T3 Python stage, {kernel} us kernel", name, figure)
        for target, kernel in (("T4 latency after a 30 us kernel", 30), ("T5 latency, idle stream", 0)):
            figure = latency(bench, kernel, add, wait, lambda: rs.testing.spin(adopted, 30))
            bench.note(target, name, figure)
        figure = bench.each(5000, lambda count: [add(nothing) for _ in range(count)], wait)
        bench.note("T6 continuation, per item", name, figure)


def main() -> None:
    """Runs everything and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", help="as rstream.Device takes it; by default the default device")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--quick", action="store_true", help="a tenth of the work, to see that it runs")
    options = parser.parse_args()
    device = rs.default_device() if options.device is None else rs.Device(options.device)
    bench = Bench(device, options.quick)
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
    floor = compile_floor(bench)
    for part in (
        ordered,
        callbacks_of_peers,
        latencies,
        notifications,
        awaits,
        idle,
        slow_neighbour,
        processor,
        million,
    ):
        part(bench)
    print("\nratios to the memory signal of rstream")
    own = {target: figure for target, name, figure in bench.rows if name in ("rstream memory", "rstream")}
    for target, name, figure in bench.rows:
        if target in own and own[target] and not name.startswith("rstream memory"):
            print(f"  {target:34s} {name:34s} {figure / own[target]:8.2f}")
    if options.json:
        options.json.write_text(json.dumps({"machine": machine, "floor": floor, "rows": bench.rows}, indent=1))


if __name__ == "__main__":
    main()
