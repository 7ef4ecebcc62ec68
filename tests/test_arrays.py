"""Arrays and copies."""

from __future__ import annotations

import gc
import pickle

import numpy as np
import pytest

import rstream as rs

MAKERS = {"pinned": rs.pinned_empty, "managed": rs.managed_empty, "device": rs.device_empty}
HOST = ["pinned", "managed"]


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize(
    ("shape", "expected"), [(3, (3,)), ((2, 3), (2, 3)), ([4], (4,)), ((), ()), (np.int8(2), (2,))]
)
def test_shape_and_dtype_are_as_in_numpy(device, kind, shape, expected):
    array = MAKERS[kind](shape, np.int16, device)
    like = np.empty(shape, np.int16)
    assert array.shape == like.shape == expected
    assert array.dtype == like.dtype
    assert (array.nbytes, array.size, array.ndim, array.itemsize) == (like.nbytes, like.size, like.ndim, 2)
    assert array.device == device
    assert array.ptr != 0
    assert kind.capitalize() in repr(array)
    assert repr(array).rpartition(" on ")[2] == repr(rs.Graph(device)).rpartition(" on ")[2]
    assert MAKERS[kind](2, device=device).dtype == np.float64


@pytest.mark.parametrize("kind", HOST)
def test_the_view_of_numpy_shares_the_memory_and_keeps_it(device, kind):
    array = MAKERS[kind]((3, 4), np.float32, device)
    view = np.asarray(array)
    view[:] = np.arange(12).reshape(3, 4)
    assert np.asarray(array)[2, 3] == 11
    assert array[1, 0] == 4
    array[1, 0] = 40
    assert view[1, 0] == 40
    assert view.ctypes.data == array.ptr
    assert len(array) == 3
    copy = np.array(array)
    del array
    gc.collect()
    view[0, 0] = 5
    assert view.sum() == 40 - 4 + 66 + 5
    assert copy[0, 0] == 0
    assert np.asarray(MAKERS[kind](2, np.int32, device), dtype=np.float64).dtype == np.float64


def test_the_host_does_not_touch_device_memory(device):
    array = rs.device_empty(4, np.int32, device)
    with pytest.raises(TypeError, match="to_host"):
        np.asarray(array)
    assert hasattr(array, "__cuda_array_interface__") != device.is_software


@pytest.mark.parametrize("kind", MAKERS)
def test_an_empty_array_needs_no_memory(stream, device, kind):
    array = MAKERS[kind]((0, 5), np.int32, device)
    assert array.shape == (0, 5)
    assert array.nbytes == 0
    assert array.ptr == 0
    stream.copy(array, np.empty((5, 0), np.int32))
    stream.fill(array, 1)
    if kind in HOST:
        assert np.asarray(array).shape == (0, 5)
    else:
        assert array.to_host(stream).shape == (0, 5)


@pytest.mark.parametrize("bad", [-1, (2, -3)])
def test_a_negative_shape_is_named(device, bad):
    with pytest.raises(rs.InvalidValueError, match=r"shape=.*-"):
        rs.pinned_empty(bad, device=device)


@pytest.mark.parametrize("bad", [1.5, "3", (1, None), None])
def test_a_shape_of_no_integers_is_a_type_error(device, bad):
    with pytest.raises(TypeError, match="shape="):
        rs.device_empty(bad, device=device)


def test_bad_dtypes_sizes_and_options_are_named(device):
    with pytest.raises(rs.InvalidValueError, match="object"):
        rs.pinned_empty(3, object, device)
    with pytest.raises(TypeError):
        rs.pinned_empty(3, "no dtype", device)
    with pytest.raises(rs.InvalidValueError, match="too many"):
        rs.device_empty((2**40, 2**40), device=device)
    for make in MAKERS.values():
        with pytest.raises(rs.OutOfMemoryError, match=f"{2**60 + 7} bytes were asked for") as refused:
            make(2**60 + 7, np.uint8, device)
        assert refused.value.code == 2
    with pytest.raises(rs.InvalidValueError, match="single"):
        rs.managed_empty(3, device=device, attach="single")
    with pytest.raises(rs.InvalidValueError, match="soft:1"):
        rs.device_empty(3, device="soft:1", stream=rs.Stream(device))


def test_arrays_are_not_pickled(device):
    with pytest.raises(TypeError, match="pickle a NumPy copy"):
        pickle.dumps(rs.pinned_empty(3, device=device))


@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.float32, np.complex128, np.dtype("S3"), np.bool_])
@pytest.mark.parametrize("shape", [(), (1,), (1000,), (3, 5, 7)])
def test_bytes_survive_the_way_to_the_device_and_back(stream, device, dtype, shape):
    generator = np.random.default_rng(7)
    dtype = np.dtype(dtype)
    source = np.frombuffer(generator.bytes(int(np.prod(shape)) * dtype.itemsize), dtype).reshape(shape)
    on_device = rs.device_empty(shape, dtype, stream=stream)
    stream.copy(on_device, source)
    result = on_device.to_host(stream)
    assert result.dtype == dtype
    assert result.shape == shape
    assert result.tobytes() == source.tobytes()


@pytest.mark.parametrize("dst", ["pinned", "managed", "device", "numpy"])
@pytest.mark.parametrize("src", ["pinned", "managed", "device", "numpy"])
def test_any_mix_of_memory_can_be_copied(stream, device, dst, src):
    def make(kind):
        return np.zeros(100, np.int32) if kind == "numpy" else MAKERS[kind](100, np.int32, device)

    values = np.arange(100, dtype=np.int32)
    source, target = make(src), make(dst)
    stream.copy(source, values)
    stream.copy(target, source)
    stream.synchronize(30)
    result = target.to_host(stream) if dst == "device" else np.asarray(target)
    assert (result == values).all()


def test_views_of_pinned_memory_can_be_copied(stream, device):
    array = rs.pinned_empty(100, np.uint8, device)
    array[:] = np.arange(100)
    part = rs.device_empty(10, np.uint8, device)
    stream.copy(part, np.asarray(array)[50:60])
    assert part.to_host(stream).tolist() == list(range(50, 60))


def test_memory_that_is_dropped_while_work_uses_it_lives_on(stream, device):
    result = rs.pinned_empty(1 << 20, np.uint8, device)
    hold = rs.testing.hold(stream)
    source, middle = rs.pinned_empty(1 << 20, np.uint8, device), rs.device_empty(1 << 20, np.uint8, device)
    stream.fill(source, 0x5A)
    stream.copy(middle, np.asarray(source))
    stream.copy(result, middle)
    del source, middle
    gc.collect()
    others = [rs.pinned_empty(1 << 20, np.uint8, device) for _ in range(4)]
    for other in others:
        np.asarray(other)[:] = 0xFF
    hold.release()
    stream.synchronize(30)
    assert (np.asarray(result) == 0x5A).all()


def test_a_wrong_copy_is_named_and_nothing_is_queued(stream, device):
    array = rs.device_empty(4, np.int32, device)
    read_only = np.zeros(4, np.int32)
    read_only.setflags(write=False)
    cases = [
        ((array, np.zeros(3, np.int32)), "16 bytes.*12"),
        ((np.zeros(8, np.int32)[::2], array), "dst.*contiguous"),
        ((array, np.zeros((2, 4), np.int32).T[:2]), "contiguous"),
        ((read_only, array), "read-only"),
        ((array, np.array([object()] * 2)), "object"),
    ]
    hold = rs.testing.hold(stream)
    for arguments, match in cases:
        with pytest.raises(rs.InvalidValueError, match=match):
            stream.copy(*arguments)
    for bad in (None, [1, 2, 3, 4], b"0123456789abcdef", 5):
        with pytest.raises(TypeError, match=type(bad).__name__):
            stream.copy(array, bad)
    hold.release()
    assert stream.pending == 0
    stream.synchronize(30)


@pytest.mark.parametrize(
    ("dtype", "value"),
    [
        (np.uint8, 255),
        (np.int8, -1),
        (np.int16, -300),
        (np.float32, 1.5),
        (np.int64, 0),
        (np.int64, -1),
        (bool, True),
        (np.dtype("S3"), b"aaa"),
        (np.dtype([("a", "u1", 3), ("b", "u2")]), np.zeros((), np.dtype([("a", "u1", 3), ("b", "u2")]))),
    ],
)
def test_fill(stream, device, dtype, value):
    array = rs.device_empty((7, 3), dtype, device)
    stream.fill(array, value)
    assert (array.to_host(stream) == np.full((7, 3), value, dtype)).all()


def test_a_value_that_cannot_fill_is_named(stream, device):
    array = rs.device_empty(4, np.uint8, device)
    for bad in (256, -1, 1.5, "x", None, np.int64(300)):
        with pytest.raises((rs.InvalidValueError, TypeError), match=str(bad)):
            stream.fill(array, bad)
    with pytest.raises(rs.InvalidValueError, match="1e\\+300"):
        stream.fill(rs.device_empty(4, np.float32, device), 1e300)
    stream.fill(array, np.int64(3))
    assert array.to_host(stream).tolist() == [3] * 4
    with pytest.raises(TypeError, match="stream=1"):
        array.to_host(1)
    with pytest.raises(rs.InvalidValueError, match="shape"):
        stream.fill(array, [1, 2])
    with pytest.raises(rs.InvalidValueError, match="8 bytes"):
        stream.fill(rs.device_empty(4, np.float64, device), 1.1)
    with pytest.raises(rs.InvalidValueError, match="0 bytes"):
        stream.fill(rs.device_empty(4, "V0", device), np.zeros((), "V0"))
    with pytest.raises(TypeError, match="list"):
        stream.fill([1], 1)
    assert stream.query()


@pytest.mark.soft_only
def test_memory_that_the_device_cannot_fill_is_named(stream, device):
    plain = np.ones(4)
    for fill in (stream.fill, rs.Graph(device).add_memset_node):
        with pytest.raises(rs.InvalidValueError, match=r"^dst: plain \(pageable\) .* NumPy") as refused:
            fill(plain, 0)
        assert refused.value.code == 1
    assert plain.sum() == 4
    pinned = np.asarray(rs.pinned_empty(4, np.uint8, device))
    pinned[:] = 1
    stream.fill(pinned[1:3], 2)
    stream.synchronize(30)
    assert pinned.tolist() == [1, 2, 2, 1]


def test_memory_of_collected_arrays_is_used_again(stream, device):
    for kind in MAKERS:
        array = MAKERS[kind](1000, np.uint8, device)
        address = array.ptr
        del array
        gc.collect()
        again = MAKERS[kind](990, np.uint8, device)
        assert again.ptr == address
        assert again.nbytes == 990
        other = MAKERS[kind](990, np.uint8, device)
        assert other.ptr != address


def test_memory_that_queued_work_uses_is_not_used_again(stream, device):
    hold = rs.testing.hold(stream)
    array = rs.device_empty(1000, np.uint8, device)
    address = array.ptr
    stream.fill(array, 1)
    del array
    gc.collect()
    assert all(rs.device_empty(1000, np.uint8, device).ptr != address for _ in range(10))
    hold.release()


def test_a_copy_keeps_the_memory_whatever_becomes_of_the_array(stream, device):
    target, source = rs.device_empty(64, np.uint8, device), rs.pinned_empty(64, np.uint8, device)
    source[:] = 1
    hold = rs.testing.hold(stream)
    stream.copy(target, source)
    source._memory = None
    gc.collect()
    others = [rs.pinned_empty(64, np.uint8, device) for _ in range(4)]
    for other in others:
        other[:] = 2
    hold.release()
    assert (target.to_host(stream) == 1).all()


def test_cached_memory_can_be_given_back(device):
    # Words of holds of earlier tests may come into the cache meanwhile; they are smaller than this.
    size = 1 << 20
    device.free_cached_memory()
    array = rs.device_empty(size, np.uint8, device)
    assert device.free_cached_memory() < size
    del array
    gc.collect()
    assert device.free_cached_memory() >= size
    assert device.free_cached_memory() < size


@pytest.mark.soft_only
def test_cached_memory_is_given_back_when_memory_is_short(device):
    free, _ = device.memory_info()
    half = rs.device_empty(free // 2, np.uint8, device)
    del half
    gc.collect()
    most = rs.device_empty(device.memory_info()[1] * 3 // 4, np.uint8, device)
    assert most.nbytes
    del most
    gc.collect()
    device.free_cached_memory()


def test_to_host_waits_for_the_stream_that_it_is_given(stream, device):
    array = rs.device_empty(3, np.int32, device)
    rs.testing.spin(stream, 2000)
    stream.fill(array, 4)
    assert array.to_host(stream).tolist() == [4, 4, 4]
    assert array.to_host().tolist() == [4, 4, 4]


@pytest.mark.soft_only
def test_cached_memory_that_cannot_be_freed_stays_in_the_cache(program):
    # In a process of its own, where no other block can be the one that is refused.
    out = program(
        """
        device = rs.default_device()
        rs.device_empty(1 << 20, "u1", device)
        with rs.testing.inject("cuMemFree_v2", 999):
            try:
                device.free_cached_memory()
            except rs.CudaError as error:
                print("cuMemFree" in str(error))
        print(device.free_cached_memory() >= 1 << 20)
        """
    )
    assert out == "True\nTrue\n"
