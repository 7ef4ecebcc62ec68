"""Host code at points of a CUDA stream: exactly once, safely, from Python and from Rust.

>>> import rstream as rs
>>> with rs.Stream("soft") as stream:
...     seen = stream.add_callback(lambda status, name: f"{name}: {status.ok}", "done")
...     seen.result()
'done: True'
"""

from __future__ import annotations

import atexit
import math
import os
import sys
from collections.abc import Callable

from rstream import _core, testing
from rstream._arrays import DeviceArray, ManagedArray, PinnedArray, device_empty, managed_empty, pinned_empty
from rstream._attributes import AccessPolicyWindow
from rstream._capture import CaptureInfo, capture_mode
from rstream._core import (
    Capture,
    Completion,
    Device,
    Event,
    Graph,
    GraphExec,
    GreenContext,
    HostNode,
    Node,
    Stream,
    StreamAttributes,
    default_device,
    devices,
    set_wait_policy,
    stats,
    wait_policy,
)
from rstream._errors import (
    CapturedEventError,
    CaptureError,
    CaptureImplicitError,
    CaptureInvalidatedError,
    CaptureIsolationError,
    CaptureMergeError,
    CaptureUnjoinedError,
    CaptureUnmatchedError,
    CaptureUnsupportedError,
    CaptureWrongThreadError,
    ClosedError,
    ContextDestroyedError,
    CudaError,
    DeviceFaultError,
    DriverNotFoundError,
    DriverTooOldError,
    GraphUpdateError,
    InvalidHandleError,
    InvalidValueError,
    NotPermittedError,
    NotSupportedError,
    OutOfMemoryError,
    ShutdownError,
    WaitTimeoutError,
)
from rstream._status import Status
from rstream._waiting import DoneAndNotDone, as_completed, gather, wait

__version__: str = _core.__version__

__all__ = [
    "AccessPolicyWindow",
    "Capture",
    "CaptureError",
    "CaptureImplicitError",
    "CaptureInfo",
    "CaptureInvalidatedError",
    "CaptureIsolationError",
    "CaptureMergeError",
    "CaptureUnjoinedError",
    "CaptureUnmatchedError",
    "CaptureUnsupportedError",
    "CaptureWrongThreadError",
    "CapturedEventError",
    "ClosedError",
    "Completion",
    "ContextDestroyedError",
    "CudaError",
    "Device",
    "DeviceArray",
    "DeviceFaultError",
    "DoneAndNotDone",
    "DriverNotFoundError",
    "DriverTooOldError",
    "Event",
    "Graph",
    "GraphExec",
    "GraphUpdateError",
    "GreenContext",
    "HostNode",
    "InvalidHandleError",
    "InvalidValueError",
    "ManagedArray",
    "Node",
    "NotPermittedError",
    "NotSupportedError",
    "OutOfMemoryError",
    "PinnedArray",
    "ShutdownError",
    "Status",
    "Stream",
    "StreamAttributes",
    "WaitTimeoutError",
    "as_completed",
    "capture_mode",
    "default_device",
    "device_empty",
    "devices",
    "gather",
    "managed_empty",
    "pinned_empty",
    "set_wait_policy",
    "stats",
    "testing",
    "wait",
    "wait_policy",
]


def _from_environment(name: str, convert: Callable[[str], float], least: float, most: float, default: float) -> float:
    """A number that an environment variable gives."""
    text = os.environ.get(name)
    if text is None:
        return default
    try:
        value = convert(text)
        if least <= value <= most:
            return value
    except ValueError:
        pass
    raise InvalidValueError(f"{name}={text}: expected a number from {least} to {most}", 1)


# Looked at now, so that a mistake is told where it can be seen.
_exit_timeout = _from_environment("RSTREAM_EXIT_TIMEOUT", float, 0, math.inf, 1.0)
_from_environment("RSTREAM_SOFT_DEVICES", int, 1, 16, 2)
if "RSTREAM_WAIT_POLICY" in os.environ:
    try:
        set_wait_policy(os.environ["RSTREAM_WAIT_POLICY"])  # type: ignore[arg-type]
    except InvalidValueError as error:
        raise InvalidValueError(f"RSTREAM_WAIT_POLICY: {error}", 1) from None


def _exit() -> None:
    """Wait for host code that is due, then part from the interpreter."""
    left = _core._at_exit(_exit_timeout)
    if left and sys.stderr:
        waited = f"{_exit_timeout:g} s (RSTREAM_EXIT_TIMEOUT)"
        print(f"rstream: Python callables that were not done {waited} after the end: {left}", file=sys.stderr)


atexit.register(_exit)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_core._after_fork)
