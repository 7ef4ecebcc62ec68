"""Managed memory that is attached to streams, and green contexts."""

from __future__ import annotations

import gc
import pickle

import numpy as np
import pytest

import rstream as rs


@pytest.mark.parametrize("attach", ["global", "host", "single"])
@pytest.mark.parametrize("first", ["global", "host"])
def test_memory_is_attached_and_used_in_callbacks(stream, device, first, attach):
    array = rs.managed_empty((4, 8), np.int32, device, attach=first)
    stream.attach(array, attach)
    stream.fill(array, 3)

    def work(status):
        assert status.ok
        view = np.asarray(array)
        total = int(view.sum())
        view += 1
        return total

    assert stream.add_callback(work).result(30) == 3 * 32
    assert stream.launch_host_func(lambda: int(np.asarray(array).sum())).result(30) == 4 * 32
    stream.synchronize(30)
    assert (array[:] == 4).all()


def test_memory_goes_from_stream_to_stream(device):
    array = rs.managed_empty(16, np.float64, device)
    for value in range(4):
        with rs.Stream(device) as stream:
            stream.attach(array, "single")
            stream.launch_host_func(array.__setitem__, slice(None), float(value))
            assert stream.add_callback(lambda status: float(np.asarray(array).sum())).result(30) == value * 16


def test_memory_that_was_attached_is_used_again(stream, device):
    device.free_cached_memory()
    for _ in range(20):
        array = rs.managed_empty(1000, np.int8, device)
        stream.attach(array, "single")
        stream.fill(array, 1)
        stream.synchronize(30)
        del array
    gc.collect()
    fresh = rs.managed_empty(1000, np.int8, device)
    with rs.Stream(device) as other:
        other.fill(fresh, 2)
        other.synchronize(30)
    assert (fresh[:] == 2).all()


def test_an_array_without_bytes_is_attached(stream, device):
    stream.attach(rs.managed_empty(0, device=device), "single")
    stream.synchronize(30)


@pytest.mark.parametrize(
    ("make", "attach", "error", "what"),
    [
        (lambda device: rs.managed_empty(4, device=device), "both", rs.InvalidValueError, 'attach="both"'),
        (lambda device: rs.managed_empty(4, device=device), "", rs.InvalidValueError, 'attach=""'),
        (lambda device: rs.pinned_empty(4, device=device), "single", rs.InvalidValueError, "only managed memory"),
        (lambda device: rs.device_empty(4, device=device), "global", rs.InvalidValueError, "only managed memory"),
        (lambda device: np.zeros(4), "single", TypeError, "ManagedArray"),
        (lambda device: None, "single", TypeError, "ManagedArray"),
    ],
)
def test_what_cannot_be_attached_is_refused(stream, device, make, attach, error, what):
    with pytest.raises(error, match=what):
        stream.attach(make(device), attach)


def test_the_default_streams(device):
    array = rs.managed_empty(4, device=device)
    with pytest.raises(rs.InvalidValueError, match="legacy default stream alone"):
        rs.Stream.legacy_default(device).attach(array, "single")
    rs.Stream.legacy_default(device).attach(array, "global")
    rs.Stream.per_thread_default(device).attach(array, "single")
    rs.Stream.per_thread_default(device).synchronize(30)


def test_green_contexts_have_streams(device):
    context = rs.GreenContext(device, multiprocessors=8)
    assert context.device == device
    assert context.multiprocessors >= 8
    assert context.handle
    assert "8 multiprocessors" in repr(context) or context.multiprocessors > 8
    stream = context.create_stream(priority=-100)
    assert stream.green_context == context.handle
    assert stream.context_handle == device.context_handle
    assert stream.non_blocking
    assert stream.priority == device.priority_range[1]
    assert stream.launch_host_func(lambda: 5).result(30) == 5
    rs.testing.spin(stream, 10)
    seen = []
    with stream.capture() as capture:
        stream.launch_host_func(seen.append, 1)
    capture.graph.instantiate().launch(stream)
    stream.synchronize(30)
    assert seen == [1]
    with pytest.raises(TypeError, match="pickled"):
        pickle.dumps(context)


def test_a_green_context_lives_as_long_as_its_streams(device):
    context = rs.GreenContext(device, multiprocessors=8)
    stream, other = context.create_stream(), context.create_stream()
    del context
    gc.collect()
    other.close()
    assert stream.then(lambda: 1).result(30) == 1
    adopted = rs.Stream.from_external(stream, device)
    assert adopted.green_context == stream.green_context


@pytest.mark.parametrize("count", [0, 100_000])
def test_a_number_of_multiprocessors_that_there_is_not(device, count):
    with pytest.raises(rs.InvalidValueError, match=f"{count} multiprocessors"):
        rs.GreenContext(device, multiprocessors=count)
