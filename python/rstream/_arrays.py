"""Arrays in pinned, managed and device memory."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any, Literal, SupportsIndex

import numpy as np
import numpy.typing as npt

from rstream import _core
from rstream._errors import InvalidValueError
from rstream._interop import device_text

DeviceLike = _core.Device | int | str
ShapeLike = SupportsIndex | Sequence[SupportsIndex]


def _shape(shape: ShapeLike) -> tuple[int, ...]:
    """A shape as NumPy takes it: a number, or a sequence of numbers of at least 0."""
    try:
        sizes: tuple[int, ...] = (operator.index(shape),)  # type: ignore[arg-type]
    except TypeError:
        try:
            sizes = tuple(operator.index(size) for size in shape)  # type: ignore[union-attr]
        except TypeError:
            raise TypeError(f"shape={shape!r}: expected an integer or a sequence of integers") from None
    if any(size < 0 for size in sizes):
        raise InvalidValueError(f"shape={shape!r}: no size may be negative", 1)
    return sizes


def _dtype(dtype: npt.DTypeLike) -> np.dtype[Any]:
    result = np.dtype(dtype)
    if result.hasobject:
        raise InvalidValueError(f"dtype={result}: Python objects cannot be in memory of a device", 1)
    return result


class _Array:
    """What the three kinds of arrays share: C-contiguous memory with a shape and a dtype."""

    __slots__ = ("__weakref__", "_memory", "dtype", "shape")

    _kind: Literal["pinned", "managed", "device"]
    #: The shape, a tuple of ints.
    shape: tuple[int, ...]
    #: The type of an element.
    dtype: np.dtype[Any]

    def __init__(
        self, shape: ShapeLike, dtype: npt.DTypeLike, device: DeviceLike | None, attach: str = "global"
    ) -> None:
        self.shape = _shape(shape)
        self.dtype = _dtype(dtype)
        nbytes = math.prod(self.shape) * self.dtype.itemsize
        if nbytes > np.iinfo(np.intp).max:
            raise InvalidValueError(f"shape={shape!r}, dtype={self.dtype}: {nbytes} bytes are too many", 1)
        self._memory = _core.Memory(self._kind, nbytes, device, attach)

    @property
    def nbytes(self) -> int:
        """The number of bytes."""
        return self._memory.nbytes

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return len(self.shape)

    @property
    def itemsize(self) -> int:
        """The number of bytes of an element."""
        return self.dtype.itemsize

    @property
    def device(self) -> _core.Device:
        """The device that the memory was allocated for."""
        return self._memory.device

    @property
    def ptr(self) -> int:
        """The address, of host and device alike; 0 for an array of no bytes."""
        return self._memory.ptr

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of an array without dimensions")
        return self.shape[0]

    def __repr__(self) -> str:
        device = device_text(self.device)
        return f"<rstream.{type(self).__name__} shape={self.shape} dtype={self.dtype} on device {device}>"

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError(f"a {type(self).__name__} cannot be pickled: pickle a NumPy copy of it")

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """CUDA Array Interface, version 3; only for memory of a GPU.

        `stream` is `None`: who shares the array orders the work.
        """
        if self.device.is_software:
            # An AttributeError, so that consumers see an object without the interface.
            raise AttributeError("memory of a software device is not CUDA memory")
        return {
            "shape": self.shape,
            "typestr": self.dtype.str,
            "descr": self.dtype.descr,
            "data": (self.ptr, False),
            "strides": None,
            "stream": None,
            "version": 3,
        }


class _HostArray(_Array):
    """An array that the host can read and write in place."""

    __slots__ = ()

    def numpy(self) -> npt.NDArray[Any]:
        """The array as NumPy sees it: a view, not a copy. It keeps the memory alive."""
        if self.nbytes == 0:
            return np.empty(self.shape, self.dtype)
        return np.ndarray(self.shape, self.dtype, buffer=memoryview(self._memory))

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> npt.NDArray[Any]:
        view = self.numpy()
        if dtype is not None and np.dtype(dtype) != self.dtype:
            if copy is False:
                raise ValueError(
                    f"an array of dtype {self.dtype} is no array of dtype {np.dtype(dtype)} without a copy"
                )
            return view.astype(dtype)
        return view.copy() if copy else view

    def __getitem__(self, key: Any) -> Any:
        return self.numpy()[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        self.numpy()[key] = value


class PinnedArray(_HostArray):
    """An array in pinned host memory (`cuMemHostAlloc`), which the device reaches directly. Made by `pinned_empty`."""

    __slots__ = ()
    _kind = "pinned"


class ManagedArray(_HostArray):
    """An array in managed memory (`cuMemAllocManaged`), which moves as it is used. Made by `managed_empty`."""

    __slots__ = ()
    _kind = "managed"


class DeviceArray(_Array):
    """An array in device memory (`cuMemAlloc`), which the host cannot touch. Made by `device_empty`."""

    __slots__ = ()
    _kind = "device"

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> npt.NDArray[Any]:
        raise TypeError("a DeviceArray is not converted to NumPy silently: use to_host()")

    def to_host(self, stream: _core.Stream | None = None) -> npt.NDArray[Any]:
        """A NumPy copy of the array, as it is when the work queued on `stream` so far is done.

        Waits for it. Without a stream, one of its own is used, which waits for no other: synchronize first with what
        writes the array.
        """
        if not isinstance(stream, _core.Stream | None):
            raise TypeError(f"stream={stream!r}: expected a Stream or None")
        result: npt.NDArray[Any] = np.empty(self.shape, self.dtype)
        own = stream is None
        queue = _core.Stream(self.device) if stream is None else stream
        try:
            # Ctrl-C ends this wait, and not that of the copy, which blocks in the driver.
            if stream is not None:
                stream.synchronize()
            queue.copy(result, self)
            queue.synchronize()
        finally:
            if own:
                queue.close()
        return result


def pinned_empty(shape: ShapeLike, dtype: npt.DTypeLike = float, device: DeviceLike | None = None) -> PinnedArray:
    """A new array of `shape` and `dtype`, as `numpy.empty` takes them, in pinned host memory (`cuMemHostAlloc`).

    `np.asarray(a)` is a view of it. Its contents are not initialized. Raises `OutOfMemoryError` when there is no
    memory,
    `InvalidValueError` for a negative size or a dtype of Python objects.
    """
    return PinnedArray(shape, dtype, device)


def managed_empty(
    shape: ShapeLike,
    dtype: npt.DTypeLike = float,
    device: DeviceLike | None = None,
    attach: Literal["global", "host"] = "global",
) -> ManagedArray:
    """A new array of `shape` and `dtype` in managed memory (`cuMemAllocManaged`).

    `attach` says who may use it at first: `"global"` any stream on any device, `"host"` no stream of a device without
    concurrent managed access. Otherwise as `pinned_empty`.
    """
    return ManagedArray(shape, dtype, device, attach)


def device_empty(
    shape: ShapeLike,
    dtype: npt.DTypeLike = float,
    device: DeviceLike | None = None,
    stream: _core.Stream | None = None,
) -> DeviceArray:
    """A new array of `shape` and `dtype` in the memory of `device`, or of the device of `stream` (`cuMemAlloc`).

    Usable at once, on every stream of the device. Otherwise as `pinned_empty`.
    """
    if stream is not None:
        if device is not None and _core.Device(device) != stream.device:
            raise InvalidValueError(f"device={device!r} is not the stream's device, {stream.device!r}", 1)
        device = stream.device
    return DeviceArray(shape, dtype, device)


def pattern(array: Any, value: Any) -> tuple[int, int]:
    """The bits of `value` as an element of `array`, in 1, 2 or 4 bytes, for `Stream.fill`."""
    described: Any = getattr(array, "dtype", None)
    if described is None and hasattr(array, "__cuda_array_interface__"):
        described = array.__cuda_array_interface__["typestr"]
    if described is None:
        raise TypeError(f"dst: cannot fill a {type(array).__name__}")
    dtype = _dtype(described)
    given = np.asarray(value)
    if given.shape != ():
        raise InvalidValueError(f"value of shape {given.shape}: expected a single value", 1)
    try:
        with np.errstate(over="raise"):
            if given.dtype.kind in "iu":
                # As a Python integer, whose range NumPy checks.
                element = np.array(int(given), dtype=dtype)
            else:
                element = given.astype(dtype, casting="same_kind")
    except (ArithmeticError, TypeError, ValueError) as error:
        raise InvalidValueError(f"value={value!r} does not fit dtype {dtype}", 1) from error
    bits = element.tobytes()
    for width in (1, 2, 4):
        if bits and bits == bits[:width] * (len(bits) // width):
            return width, int.from_bytes(bits[:width], "little")
    raise InvalidValueError(
        f"value={value!r} as {dtype} is {len(bits)} bytes that do not repeat: the driver fills with 1, 2 or 4. "
        "Copy from an array of the value instead",
        1,
    )
