"""Streams and memory of other libraries."""

from __future__ import annotations

import math
import operator
from typing import Any

import numpy as np

from rstream import _core
from rstream._errors import InvalidValueError


def _handle(obj: Any) -> int:
    """The handle of a stream of another library."""
    protocol = getattr(obj, "__cuda_stream__", None)
    if protocol is not None:
        answer = protocol() if callable(protocol) else protocol
        try:
            version, handle = answer
            version, handle = operator.index(version), operator.index(handle)
        except (TypeError, ValueError):
            raise InvalidValueError(
                f"__cuda_stream__ of {type(obj).__name__} gave {answer!r}: expected two integers (0, handle)", 1
            ) from None
        if version != 0:
            raise InvalidValueError(f"__cuda_stream__ of {type(obj).__name__} has version {version}: expected 0", 1)
        return handle
    # torch, CuPy, and what is no more than a number (Numba's stream handles among others).
    for name in ("cuda_stream", "ptr", "handle"):
        attribute = getattr(obj, name, None)
        if attribute is not None and not callable(attribute):
            obj = getattr(attribute, "value", attribute) or 0
            break
    if isinstance(obj, bool):
        raise TypeError("a bool is no stream")
    try:
        return operator.index(obj)
    except TypeError:
        raise TypeError(
            f"{type(obj).__name__} is no stream: expected __cuda_stream__, "
            "a stream of torch, CuPy or Numba, or a handle"
        ) from None


def _device(obj: Any) -> _core.Device | None:
    """The device that a stream of another library says it is of."""
    for candidate in (getattr(getattr(obj, "device", None), "index", None), getattr(obj, "device_id", None)):
        if isinstance(candidate, int) and candidate >= 0:
            return _core.Device(candidate)
    return None


def adopt(obj: Any, device: _core.Device | int | str | None) -> _core.Stream:
    """`Stream.from_external`."""
    if isinstance(obj, _core.Stream):
        if device is not None and _core.Device(device) != obj.device:
            raise InvalidValueError(f"the stream is of {obj.device!r}, not of {_core.Device(device)!r}", 1)
        return obj
    handle = _handle(obj)
    if not 0 <= handle < 2**64:
        raise InvalidValueError(f"handle {handle} is no address: expected 0 to 2**64 - 1", 1)
    where = _core.Device(device) if device is not None else _device(obj) or _core.default_device()
    return _core.Stream._adopt(handle, where, obj)


def device_text(device: _core.Device) -> str:
    """Return the name that `rs.Device` takes for this device: `"0"`, `"soft:1"`."""
    return f"soft:{device.ordinal}" if device.is_software else str(device.ordinal)


def describe(device: _core.Device, place: str, obj: Any, role: str) -> tuple[int, int, bool, int | None]:
    """Address, bytes, writability and producer stream of an object with a CUDA Array Interface."""
    interface = getattr(obj, "__cuda_array_interface__", None)
    if interface is None:
        raise TypeError(
            f"{role}: cannot copy a {type(obj).__name__}: expected a NumPy array, an array of rstream, "
            "or an object with __cuda_array_interface__"
        )
    if device.is_software:
        raise InvalidValueError(f"{role}: memory of a GPU {place} of device {device_text(device)}", 1)
    shape = tuple(int(size) for size in interface["shape"])
    itemsize = np.dtype(interface["typestr"]).itemsize
    strides = interface.get("strides")
    if strides is not None:
        contiguous, expected = True, itemsize
        for size, stride in zip(reversed(shape), reversed(tuple(strides)), strict=True):
            contiguous &= size <= 1 or stride == expected
            expected *= size
        if not contiguous:
            raise InvalidValueError(f"{role}: an array of shape {shape} and strides {strides} is not C-contiguous", 1)
    producer = interface.get("stream")
    address, read_only = interface["data"]
    return int(address or 0), math.prod(shape) * itemsize, not read_only, None if producer is None else int(producer)
