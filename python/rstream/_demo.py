"""``python -m rstream demo [FILE]``.

Each stream has two pinned buffers that the file is read into, one device buffer, and one pinned buffer for the way
back. A chunk's work on its stream is: copy to the device, copy back, and a callback that computes the CRC-32 of what
came back. The stream waits for the callback, so the next chunk's copies may reuse the device buffer and the buffer for
the way back; the host waits only for an event behind the copy from the buffer that it is about to overwrite.
"""

from __future__ import annotations

import os
import shutil
import stat
import statistics
import sys
import sysconfig
import threading
import time
import zlib
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from io import BufferedReader
from pathlib import Path

import numpy as np
import numpy.typing as npt

import rstream as rs
from rstream._info import no_gpu_reason
from rstream._interop import device_text

_PROBES = 1000

Bytes = npt.NDArray[np.uint8]
Matrix = tuple[int, ...]
# The size of a chunk in bytes, and the completion of its checksum.
Sent = tuple[int, "rs.Completion[int]"]


def _times(matrix: Matrix, vector: int) -> int:
    product = 0
    for column in matrix:
        if vector & 1:
            product ^= column
        vector >>= 1
    return product


def _product(left: Matrix, right: Matrix) -> Matrix:
    return tuple(_times(left, column) for column in right)


@lru_cache(maxsize=8)
def _zeros(length: int) -> Matrix:
    """Return what appending ``length`` zero bytes does to a CRC register, a matrix over GF(2) given by its columns."""
    # A zero bit shifts the register; the bit that falls out brings the polynomial in. By squaring: 2 bits, 4, 8.
    power: Matrix = (0xEDB88320, *(1 << bit for bit in range(31)))
    for _ in range(3):
        power = _product(power, power)
    result: Matrix = tuple(1 << bit for bit in range(32))
    while length:
        if length & 1:
            result = _product(power, result)
        power = _product(power, power)
        length >>= 1
    return result


def crc32_combine(first: int, second: int, length: int) -> int:
    """Return the CRC-32 of two blocks in a row from the CRC-32 of each; ``length`` is the second's in bytes.

    A CRC is linear but for its start and end value, and those cancel out: run the first one's register over as many
    zero bytes as the second block has, and add the second one's (zlib's ``crc32_combine``).
    """
    return _times(_zeros(length), first) ^ second


def default_file() -> str:
    """Return the largest of a few files that come with every Python."""
    names = [sys.executable, np.__file__]
    library = sysconfig.get_config_var("INSTSONAME")
    if library:
        names.append(os.path.join(str(sysconfig.get_config_var("LIBDIR")), str(library)))
    names += map(str, Path(sysconfig.get_path("stdlib")).glob("pydoc_data/*.py"))
    return max((name for name in names if os.path.isfile(name)), key=os.path.getsize)


def choose_device(text: str | None) -> tuple[rs.Device, str]:
    """Return the device, and why it is this one."""
    if text:
        return rs.Device(text), "chosen with --device"
    variable = os.environ.get("RSTREAM_DEVICE")
    if variable:
        return rs.default_device(), f"chosen with RSTREAM_DEVICE={variable}"
    reason = no_gpu_reason()
    if reason:
        return rs.Device("soft"), f"the software device, since there is no GPU: {reason}"
    return rs.Device(0), "the first GPU"


class _Bar:
    """A progress bar on standard error, if that is a terminal."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.shown = sys.stderr.isatty()
        self.percent = -1

    def show(self, done: int) -> None:
        percent = min(100, 100 * done // self.total) if self.total else 100
        if self.shown and percent != self.percent:
            self.percent = percent
            width = max(10, min(60, shutil.get_terminal_size().columns - 8))
            filled = width * percent // 100
            print(f"\r[{'#' * filled}{'.' * (width - filled)}] {percent:3}%", end="", file=sys.stderr, flush=True)

    def clear(self) -> None:
        if self.shown:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


class _Tally:
    """What became of the callbacks."""

    def __init__(self) -> None:
        self.accepted = 0
        self.run = 0
        # Callbacks may run on several threads at once.
        self.lock = threading.Lock()

    def ran(self) -> None:
        with self.lock:
            self.run += 1


def _checksum(status: rs.Status, chunk: Bytes, tally: _Tally) -> int:
    tally.ran()
    if not status.ok:
        raise RuntimeError(f"the copies before this callback failed: {status.name}")
    return zlib.crc32(chunk.data)


class _Pipeline:
    """One stream, and the buffers that its chunks pass through."""

    def __init__(self, device: rs.Device, chunk: int) -> None:
        self.device = device
        self.stream = rs.Stream(device)
        self.sources = [np.asarray(rs.pinned_empty(chunk, np.uint8, device)) for _ in range(2)]
        self.copied = [rs.Event(device) for _ in range(2)]
        self.back = np.asarray(rs.pinned_empty(chunk, np.uint8, device))
        self.on_device = rs.device_empty(chunk, np.uint8, device)
        self.turn = 0

    def read(self, file: BufferedReader) -> Bytes:
        """Read the next chunk, once the copy of what the buffer held before is done. Empty at the end of the file."""
        self.turn ^= 1
        self.copied[self.turn].synchronize()
        source = self.sources[self.turn]
        return source[: file.readinto(source.data)]

    def send(self, source: Bytes, tally: _Tally) -> rs.Completion[int]:
        """Queue the way to the device and back, and the checksum."""
        on_device, back = self.on_device, self.back
        if source.size < back.size:
            # The last chunk; a copy takes arrays of one size.
            on_device, back = rs.device_empty(source.size, np.uint8, self.device), back[: source.size]
        self.stream.copy(on_device, source)
        self.stream.record(self.copied[self.turn])
        self.stream.copy(back, on_device)
        completion = self.stream.add_callback(_checksum, back, tally)
        tally.accepted += 1
        return completion


def _send_chunks(file: BufferedReader, device: rs.Device, streams: int, chunk: int, tally: _Tally) -> Iterator[Sent]:
    """Send the file's chunks round, in the file's order and one stream after the other."""
    pipelines = [_Pipeline(device, chunk) for _ in range(streams)]
    while True:
        for pipeline in pipelines:
            source = pipeline.read(file)
            if not source.size:
                return
            yield source.size, pipeline.send(source, tally)


@dataclass
class _Result:
    """What came back from the device so far."""

    crc: int = 0
    size: int = 0
    chunks: int = 0
    errors: list[BaseException] = field(default_factory=list)

    def add(self, length: int, completion: rs.Completion[int]) -> None:
        error = completion.exception()
        if error is None:
            self.crc = crc32_combine(self.crc, completion.result(), length)
        else:
            self.errors.append(error)
        self.size += length
        self.chunks += 1


def _stream_file(
    file: BufferedReader, size: int, device: rs.Device, streams: int, chunk: int, tally: _Tally
) -> _Result:
    bar = _Bar(size)
    result = _Result()
    waiting: deque[Sent] = deque()

    def settle() -> None:
        result.add(*waiting.popleft())
        bar.show(result.size)

    try:
        bar.show(0)
        for sent in _send_chunks(file, device, streams, chunk, tally):
            waiting.append(sent)
            while waiting and waiting[0][1].done():
                settle()
        while waiting:
            settle()
    finally:
        bar.clear()
    return result


def _probe(_status: rs.Status, asked: int, tally: _Tally) -> int:
    started = time.perf_counter_ns()
    tally.ran()
    return started - asked


def _latencies(device: rs.Device, tally: _Tally) -> list[float]:
    """Return, in microseconds, the times from the call of add_callback on an idle stream to the callback's start."""
    times = []
    with rs.Stream(device) as stream:
        for _ in range(_PROBES):
            completion = stream.add_callback(_probe, time.perf_counter_ns(), tally)
            tally.accepted += 1
            times.append(completion.result() / 1000)
    return times


def _independent(path: str) -> int:
    crc = 0
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            crc = zlib.crc32(block, crc)
    return crc


def run(path: str | None, *, device: str | None, streams: int, chunk: int) -> int:
    """Run the demo and return the exit status."""

    def fail(what: str, status: int) -> int:
        print(f"rstream demo: {what}", file=sys.stderr)
        return status

    path = path or default_file()
    try:
        about = os.stat(path)
        # Opening a pipe would wait for its other end, and what it gave could not be read a second time.
        if not (stat.S_ISREG(about.st_mode) or stat.S_ISDIR(about.st_mode)):
            return fail(f"cannot read {path}: it is not a regular file", 2)
        with open(path, "rb") as file:
            try:
                chosen, reason = choose_device(device)
            except rs.CudaError as error:
                return fail(f"cannot use the device: {error}", 2)
            tally = _Tally()
            started = time.perf_counter()
            result = _stream_file(file, about.st_size, chosen, streams, chunk, tally)
            seconds = time.perf_counter() - started
        expected = _independent(path)
        times = _latencies(chosen, tally)
    except rs.CudaError as error:
        return fail(str(error), 1)
    except OSError as error:
        return fail(f"cannot read {path}: {error.strerror or error}", 2)

    percentiles = statistics.quantiles(times, n=100)
    failed = len(result.errors)
    print(f"device      {device_text(chosen)}, {chosen.name} ({reason})")
    print(f"file        {path}")
    print(f"bytes       {result.size:,} in {result.chunks:,} chunks of at most {chunk:,}, over {streams} streams")
    print(f"throughput  {result.size / seconds / 1e6:,.1f} MB/s, from the file to the device, back, and checked")
    print(f"callbacks   {tally.accepted:,} accepted, {tally.run:,} run, {failed:,} failed")
    print(
        f"latency     p50 {percentiles[49]:.1f} us, p99 {percentiles[98]:.1f} us, from add_callback on an idle stream"
    )
    print(f"            to the callback's first line ({_PROBES:,} callbacks)")
    if failed:
        return fail(f"{failed} callbacks failed, the first with: {result.errors[0]}", 1)
    if result.crc != expected:
        return fail(f"CRC-32 {result.crc:08x} by way of the device, {expected:08x} by zlib: they differ", 1)
    print(f"crc-32      {result.crc:08x}, the same as zlib's of the whole file")
    return 0
