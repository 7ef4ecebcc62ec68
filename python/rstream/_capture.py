"""Stream capture: what the extension module leaves to Python."""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Literal, NamedTuple

from rstream import _core
from rstream._arrays import DeviceLike
from rstream._errors import InvalidValueError

CaptureMode = Literal["global", "thread_local", "relaxed"]
_MODES: tuple[CaptureMode, ...] = ("global", "thread_local", "relaxed")


class CaptureInfo(NamedTuple):
    """The capture that a stream takes part in (`cuStreamGetCaptureInfo`).

    `id` is its number, which only captures into the same graph share, `graph` the handle (`CUgraph`) of the graph that
    is captured into, which belongs to the driver until the capture ends, and `dependencies` are the nodes that the next
    one depends on.
    """

    id: int
    graph: int
    dependencies: tuple[_core.Node, ...]


class capture_mode:
    """A context manager: this thread has another capture mode (`cuThreadExchangeStreamCaptureMode`).

    While some thread captures in the global mode, calls such as `cudaMalloc` or `cudaEventQuery` break the capture.
    Under `capture_mode("relaxed")` those of this thread do not. The mode is that of the driver of `device`, or of the
    default device; it belongs to the thread, not to a task. What rstream itself calls never breaks a capture.

    Raises `InvalidValueError` for an unknown mode, `RuntimeError` when it is left on another thread.
    """

    def __init__(self, mode: CaptureMode, device: DeviceLike | None = None) -> None:
        if mode not in _MODES:
            raise InvalidValueError(f"mode={mode!r}: expected 'global', 'thread_local' or 'relaxed'", 1)
        self._mode = _MODES.index(mode)
        self._device = _core.default_device() if device is None else _core.Device(device)
        self._local = threading.local()

    def __enter__(self) -> None:
        before = _core._exchange_capture_mode(self._device, self._mode)
        self._local.__dict__.setdefault("before", []).append(before)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        entered: list[int] = self._local.__dict__.get("before", [])
        if not entered:
            raise RuntimeError("capture_mode was entered on another thread, whose mode it is")
        _core._exchange_capture_mode(self._device, entered.pop())
