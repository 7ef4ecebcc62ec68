"""Faults of the device. Each in a process of its own, since the device is lost afterwards."""

from __future__ import annotations

import pytest


def test_behind_a_fault_callbacks_run_once_and_nothing_else_runs(program):
    program(
        """
        import gc, sys
        stream, other = rs.Stream(), rs.Stream()
        array = rs.device_empty(100)
        event = rs.Event()
        seen, runs = [], []
        before = stream.add_callback(lambda status: status)
        hold = rs.testing.hold(stream)
        rs.testing.fault(stream)
        callbacks = [stream.add_callback(lambda status: seen.append(status)) for _ in range(10)]
        functions = [stream.launch_host_func(runs.append, 1) for _ in range(10)]
        continuations = [stream.then(runs.append, 1) for _ in range(10)]
        notice = stream.completion()
        stream.record(event)
        assert before.result(30) == 0
        hold.release()
        done, pending = rs.wait(callbacks + functions + continuations + [notice], 30)
        assert not pending
        assert seen == [700] * 10 and seen[0].sticky and not seen[0].ok, seen
        assert runs == []
        for completion in functions + continuations + [notice]:
            error = completion.exception()
            assert type(error) is rs.DeviceFaultError and error.code == 700, repr(error)
            assert error.name == "CUDA_ERROR_ILLEGAL_ADDRESS"
            assert completion.status == 700
            assert str(error).startswith("not reached, " if completion is notice else "not run, "), error
        assert all(completion.exception() is None for completion in callbacks)
        assert stream.pending == 0
        for call in (stream.query, stream.synchronize, other.synchronize, event.query, rs.Stream, rs.Event,
                     lambda: stream.then(print), lambda: other.add_callback(print), lambda: rs.device_empty(5)):
            try:
                call()
            except rs.DeviceFaultError as error:
                assert error.code == 700
                assert "Earlier work of the device has failed" in str(error), error
                assert "cuStreamIsCapturing" not in str(error), error
            else:
                raise AssertionError(call)
        assert stream.pending == 0 and other.pending == 0
        print(repr(stream), stream.id, stream.device, hash(stream))
        del stream, other, event, array, hold
        gc.collect()
        """
    )


def test_a_fault_that_nobody_asks_about_is_reported(program):
    out = program(
        """
        import sys, threading
        told = threading.Event()
        def hook(unraisable):
            print(type(unraisable.exc_value).__name__, unraisable.exc_value.code)
            told.set()
        sys.unraisablehook = hook
        stream = rs.Stream()
        hold = rs.testing.hold(stream)
        rs.testing.fault(stream)
        stream.then(print)
        hold.release()
        assert told.wait(30)
        """
    )
    assert out.split() == ["DeviceFaultError", "700"]


@pytest.mark.soft_only
@pytest.mark.parametrize("code", [719, 714, 226])
def test_other_codes_are_delivered_as_they_are(program, code):
    out = program(
        f"""
        stream = rs.Stream()
        hold = rs.testing.hold(stream)
        rs.testing.fault(stream, {code})
        seen = stream.add_callback(lambda status: status)
        hold.release()
        print(int(seen.result(30)), type(stream.completion).__name__)
        """
    )
    assert out.split()[0] == str(code)


def test_a_code_that_is_no_fault_is_refused(program):
    out = program(
        """
        stream = rs.Stream()
        for code in (0, 1, 600, 12345, -1, 2**40):
            try:
                rs.testing.fault(stream, code)
            except rs.InvalidValueError as error:
                print(str(code) in str(error))
        print(stream.query())
        """
    )
    assert out.split() == ["True"] * 7


def test_what_was_cancelled_before_a_fault_counts_as_cancelled(program):
    program(
        """
        stream = rs.Stream()
        hold = rs.testing.hold(stream)
        rs.testing.fault(stream)
        pending = [stream.then(int), stream.launch_host_func(int), stream.add_callback(int), stream.completion()]
        assert all(completion.cancel() for completion in pending)
        last = stream.add_callback(lambda status: status.ok)
        hold.release()
        assert last.result(30) is False
        while stream.pending:
            pass
        stats = rs.stats()
        assert (stats["failed"], stats["cancelled"]) == (0, 4), stats
        """
    )


@pytest.mark.soft_only
@pytest.mark.parametrize(
    ("function", "call"),
    [
        ("cuStreamCreateWithPriority", "rs.Stream()"),
        ("cuEventCreate", "rs.Event()"),
        ("cuEventRecord", "stream.record(event)"),
        ("cuStreamWaitEvent", "stream.wait(event)"),
        ("cuStreamQuery", "stream.query()"),
        ("cuStreamQuery", "stream.synchronize()"),
        ("cuMemAlloc_v2", "rs.device_empty(1)"),
        ("cuMemHostAlloc", "rs.pinned_empty(1)"),
        ("cuMemAllocManaged", "rs.managed_empty(1)"),
        ("cuMemcpyAsync", "stream.copy(array, array)"),
        ("cuMemsetD8Async", "stream.fill(array, 0)"),
        ("enqueue", "stream.then(int)"),
        ("enqueue", "busy.completion()"),
        ("cuCtxGetCurrent", "stream.query()"),
        ("cuMemGetInfo_v2", "stream.device.memory_info()"),
    ],
)
def test_a_refusal_of_the_driver_names_the_function_and_does_no_harm(program, enqueue_function, function, call):
    function = enqueue_function if function == "enqueue" else function
    program(
        f"""
        stream, busy, event, array = rs.Stream(), rs.Stream(), rs.Event(), rs.device_empty(4, "u1")
        hold = rs.testing.hold(busy)
        with rs.testing.inject({function!r}, 999):
            try:
                {call}
            except rs.CudaError as error:
                assert {function!r} in str(error) and error.code == 999, error
            else:
                raise AssertionError("not refused")
        {call}
        assert stream.then(lambda: 1).result(30) == 1
        hold.release()
        assert busy.completion().result(30) is None
        """
    )


@pytest.mark.soft_only
def test_memory_is_safe_when_its_event_cannot_be_recorded(program):
    program(
        """
        import numpy as np
        stream, array = rs.Stream(), rs.device_empty(1 << 20, "u1")
        source = rs.pinned_empty(1 << 20, "u1")
        source[:] = 9
        with rs.testing.inject("cuEventRecord", 2):
            stream.copy(array, source)
        del source
        assert (array.to_host(stream) == 9).all()
        """
    )


@pytest.mark.soft_only
def test_a_bad_injection_is_named(program):
    program(
        """
        with rs.testing.inject("cuInit", 2):
            pass
        for arguments in (("cuNothing", 2, 1), ("cuStreamQuery", 0, 1), ("cuStreamQuery", 2, 0), ("cuInit", -1, 1)):
            try:
                rs.testing.inject(*arguments)
            except rs.InvalidValueError as error:
                print(error)
            else:
                raise AssertionError(arguments)
        with rs.testing.inject("cuStreamQuery", 2, nth=2):
            stream = rs.Stream()
            stream.query()
            try:
                stream.query()
            except rs.OutOfMemoryError:
                pass
            stream.query()
        with rs.testing.inject("cuStreamQuery", 2):
            pass
        stream.query()
        """
    )
