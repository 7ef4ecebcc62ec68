"""Device work, holds and faults on demand, for tests of programs that use rstream."""

from __future__ import annotations

from rstream import _core

__all__ = ["Hold", "Injection", "fault", "hold", "inject", "soft_device", "spin"]

Hold = _core.Hold
Injection = _core.Injection


def spin(stream: _core.Stream, microseconds: float) -> None:
    """Queue device work on `stream` that lasts `microseconds` (a kernel from PTX; `cuLaunchKernel`).

    Raises `InvalidValueError` for a negative time.
    """
    _core.spin(stream, microseconds)


def fault(stream: _core.Stream, code: int = 700) -> None:
    """Queue work on `stream` that fails with `code`. The context of its device is lost for the rest of the process.

    On a GPU only 700 (`CUDA_ERROR_ILLEGAL_ADDRESS`) can be caused; on a software device every sticky code. Raises
    `InvalidValueError` for another.
    """
    _core.fault(stream, code)


def hold(stream: _core.Stream) -> _core.Hold:
    """Make `stream` wait, on the device, until the returned holder is released (`cuStreamWaitValue64`).

    The holder is a context manager, and releases when it is collected.
    """
    return _core.hold(stream)


def inject(function: str, code: int, nth: int = 1) -> _core.Injection:
    """Make the `nth` call from now of a driver function on the software devices answer `code` and do nothing else.

    `function` is the driver's symbol, such as `"cuStreamAddCallback"`. Use it as a context manager: leaving it takes
    the
    injection back. Raises `InvalidValueError` for a function that there is not, and for numbers below 1.
    """
    return _core.inject(function, code, nth)


def soft_device(ordinal: int = 0) -> _core.Device:
    """The software device with this number. There are two, or as many as `RSTREAM_SOFT_DEVICES` says (1 to 16)."""
    return _core.Device(f"soft:{ordinal}")
