"""The exceptions of rstream: one tree under `CudaError`."""

from __future__ import annotations

import inspect
from concurrent.futures import CancelledError
from types import CoroutineType
from typing import Any

from rstream import _core


class CudaError(RuntimeError):
    """An error of the driver, or of rstream in the driver's terms.

    `code` is the number (`CUresult`), `name` its name in `cuda.h`, `description` the driver's text for it. The message
    says
    what was refused, and why.
    """

    def __init__(self, message: str, code: int = 999) -> None:
        super().__init__(message)
        self.code = code
        self.name, self.description, _ = _core.status_text(code)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.code)


class InvalidValueError(CudaError, ValueError):
    """An argument is out of its range (1)."""


class OutOfMemoryError(CudaError, MemoryError):
    """No memory is left (2)."""


class NotPermittedError(CudaError):
    """A call that is not allowed here (800): the API inside a callback or host function."""


class NotSupportedError(CudaError):
    """The device, the system or this version cannot do it (801)."""


class InvalidHandleError(CudaError):
    """A handle that names nothing, or something of another context (400)."""


class ClosedError(InvalidHandleError):
    """The object was closed."""


class DeviceFaultError(CudaError):
    """Work failed on the device, and its context is lost for the rest of the process: 700 and other sticky codes."""


class ContextDestroyedError(CudaError):
    """The context is gone (709)."""


class DriverNotFoundError(CudaError):
    """There is no NVIDIA driver, or no device (100)."""


class DriverTooOldError(CudaError):
    """The driver lacks a function (36). The message names the CUDA version that has it."""


class ShutdownError(CudaError):
    """The host code was not run, since the interpreter is going (4)."""


class WaitTimeoutError(CudaError, TimeoutError):
    """A wait ran out of time (909). What was waited for goes on."""


class CaptureError(CudaError):
    """A rule of stream capture was broken, or would have been (900 to 908)."""


class GraphUpdateError(CudaError):
    """An executable graph cannot be updated from this graph, whose nodes or edges are others (910)."""


class CaptureUnsupportedError(CaptureError):
    """Not possible while the stream captures (900)."""


class CaptureInvalidatedError(CaptureError):
    """The capture was invalidated by an earlier error (901)."""


class CaptureMergeError(CaptureError):
    """Two captures would have been joined (902)."""


class CaptureUnmatchedError(CaptureError):
    """The capture was begun on another stream (903)."""


class CaptureUnjoinedError(CaptureError):
    """Work of a forked stream was not joined (904)."""


class CaptureIsolationError(CaptureError):
    """Captured work would have depended on work outside (905)."""


class CaptureImplicitError(CaptureError):
    """The legacy default stream would have depended on a capture (906)."""


class CapturedEventError(CaptureError):
    """The event was recorded in a capture (907)."""


class CaptureWrongThreadError(CaptureError):
    """The capture was begun on another thread (908)."""


_BY_KIND: dict[str, type[CudaError]] = {
    "no_driver": DriverNotFoundError,
    "too_old": DriverTooOldError,
    "closed": ClosedError,
    "capture": CaptureError,
    "timeout": WaitTimeoutError,
    "shutdown": ShutdownError,
}

_BY_CODE: dict[int, type[CudaError]] = {
    1: InvalidValueError,
    2: OutOfMemoryError,
    36: DriverTooOldError,
    100: DriverNotFoundError,
    400: InvalidHandleError,
    709: ContextDestroyedError,
    800: NotPermittedError,
    801: NotSupportedError,
    900: CaptureUnsupportedError,
    901: CaptureInvalidatedError,
    902: CaptureMergeError,
    903: CaptureUnmatchedError,
    904: CaptureUnjoinedError,
    905: CaptureIsolationError,
    906: CaptureImplicitError,
    907: CapturedEventError,
    908: CaptureWrongThreadError,
    909: WaitTimeoutError,
    910: GraphUpdateError,
}


def not_awaited(function: Any, coroutine: CoroutineType[Any, Any, Any]) -> TypeError | None:
    """The error of a coroutine function as host code; None for a function that returns a coroutine on purpose."""
    if not any(map(inspect.iscoroutinefunction, (function, type(function).__call__))):
        return None
    coroutine.close()
    name = getattr(function, "__qualname__", None) or repr(function)
    return TypeError(
        f"{name} is a coroutine function, and host code is not awaited: await the completion, then call it"
    )


def build(kind: str, code: int, message: str) -> BaseException:
    """The exception for an error of the core."""
    if kind == "cancelled":
        return CancelledError(message)
    sticky = _core.status_text(code)[2]
    if kind == "capture" and code in _BY_CODE:
        kind = ""
    return (_BY_KIND.get(kind) or _BY_CODE.get(code) or (DeviceFaultError if sticky else CudaError))(message, code)
