"""Streams, events and devices."""

from __future__ import annotations

import gc
import os
import pickle
import threading
import weakref

import numpy as np
import pytest
from conftest import SIGNAL

import rstream as rs


def test_a_stream_knows_itself(device):
    stream = rs.Stream(device)
    assert stream.device == device
    assert stream.non_blocking
    assert stream.priority == 0
    assert stream.handle != 0
    assert stream.context_handle == device.context_handle
    assert stream.green_context is None
    assert stream.signal == SIGNAL
    assert not stream.closed
    assert stream.pending == 0
    assert str(stream.id) in repr(stream)


@pytest.mark.parametrize("non_blocking", [True, False])
def test_the_flag_asked_for_is_the_flag_read_back_from_the_driver(device, non_blocking):
    assert rs.Stream(device, non_blocking=non_blocking).non_blocking is non_blocking


def test_priorities_are_clamped_as_the_driver_does(device):
    least, greatest = device.priority_range
    assert least >= greatest
    assert rs.Stream(device, priority=greatest).priority == greatest
    assert rs.Stream(device, priority=100).priority == least
    assert rs.Stream(device, priority=-100).priority == greatest
    assert rs.Stream(device, priority=2**31).priority == least
    assert rs.Stream(device, priority=-(2**40)).priority == greatest


def test_equality_and_hash_are_those_of_the_stream(device):
    first, second = rs.Stream(device), rs.Stream(device)
    again = rs.Stream.from_external(first.handle, device)
    assert first == again
    assert hash(first) == hash(again)
    assert first != second
    assert first != first.handle
    assert len({first, again, second}) == 2
    ids = [rs.Stream(device).id for _ in range(100)]
    assert len(set(ids)) == 100


def test_close_can_be_called_twice_and_is_noticed(device):
    stream = rs.Stream(device)
    stream.close()
    stream.close()
    assert stream.closed
    assert "closed" in repr(stream)
    calls = [
        lambda: stream.handle,
        stream.query,
        stream.synchronize,
        stream.record,
        stream.completion,
        stream.__cuda_stream__,
        lambda: stream.then(print),
        lambda: stream.add_callback(print),
        lambda: stream.launch_host_func(print),
        lambda: stream.wait(rs.Event(device)),
        lambda: stream.copy(np.zeros(1), np.zeros(1)),
        lambda: rs.Stream(device).wait(stream),
    ]
    for call in calls:
        with pytest.raises(rs.ClosedError, match="Stream is closed"):
            call()


def test_a_stream_is_a_context_manager(device):
    with rs.Stream(device) as stream:
        completion = stream.then(lambda: 1)
    assert stream.closed
    assert completion.result(30) == 1


def test_streams_events_and_arrays_are_collected(device):
    things = [rs.Stream(device), rs.Event(device), rs.device_empty(8, device=device), rs.pinned_empty(8, device=device)]
    gone = [weakref.ref(thing) for thing in things]
    del things
    gc.collect()
    assert [ref() for ref in gone] == [None] * 4


def test_query_and_synchronize(stream):
    assert stream.query() is True
    hold = rs.testing.hold(stream)
    assert stream.query() is False
    for _ in range(2):
        with pytest.raises(rs.WaitTimeoutError) as caught:
            stream.synchronize(0.01)
        assert caught.value.code == 909
    hold.release()
    stream.synchronize()
    assert stream.query() is True
    stream.synchronize(0)


def test_a_stream_waits_for_events_and_streams(device):
    first, second, third = (rs.Stream(device) for _ in range(3))
    with rs.testing.hold(first):
        event = first.record()
        second.wait(event)
        third.wait(second)
        assert not event.query()
        assert not second.query()
        assert not third.query()
        event.close()
    third.synchronize(30)
    assert first.query()
    assert second.query()


def test_a_never_recorded_event_holds_nobody(stream, device):
    event = rs.Event(device)
    stream.wait(event)
    assert event.query()
    event.synchronize(0)
    stream.synchronize(30)


def test_an_event_can_be_waited_for(stream, device):
    event = rs.Event(device)
    with rs.testing.hold(stream):
        assert stream.record(event) is event
        assert not event.query()
        with pytest.raises(rs.WaitTimeoutError):
            event.synchronize(0.01)
    event.synchronize(30)
    assert event.query()
    event.record(stream)
    event.synchronize(30)


@pytest.mark.soft_only
@pytest.mark.parametrize(
    "share",
    [lambda event: event.handle, lambda event: rs.Graph(event.device).add_event_record_node(event)],
    ids=["handle", "node"],
)
def test_completions_outlive_a_failure_to_give_the_event_out(device, share):
    first, second, event = rs.Stream(device), rs.Stream(device), rs.Event(device)
    with rs.testing.hold(second):
        with rs.testing.hold(first):
            completion = first.record(event).completion()
            with rs.testing.inject("cuStreamCreateWithPriority", code=2), pytest.raises(rs.OutOfMemoryError):
                share(event)
            second.record(event)
            assert not completion.done()
        completion.result(30)
        assert not event.query()
    share(event)
    event.synchronize(30)


@pytest.mark.parametrize("captured", [False, True])
def test_completions_are_of_their_record_when_the_handle_is_read_beside_another(device, captured):
    first, second = rs.Stream(device), rs.Stream(device)
    for _ in range(30):
        event, both = rs.Event(device), threading.Barrier(2)

        def read(event=event, both=both):
            both.wait(30)
            assert event.handle

        with rs.testing.hold(first):
            completion = first.record(event).completion()
            reading = threading.Thread(target=read)
            reading.start()
            both.wait(30)
            if captured:
                with second.capture(mode="relaxed"):
                    second.record(event)
            else:
                second.record(event)
            reading.join(30)
            second.synchronize(30)
            assert not completion.done()
        completion.result(30)


def test_elapsed_time(stream, device):
    start, end = rs.Event(device, timing=True), rs.Event(device, timing=True)
    start.record(stream)
    rs.testing.spin(stream, 3000)
    end.record(stream)
    end.synchronize(30)
    assert end.elapsed_since(start) >= 2.9
    assert start.elapsed_since(end) <= -2.9
    with pytest.raises(rs.InvalidValueError, match="with timing"):
        end.elapsed_since(rs.Event(device))
    with pytest.raises(rs.InvalidHandleError):
        end.elapsed_since(rs.Event(device, timing=True))


def test_options_of_events(device):
    event = rs.Event(device, blocking_sync=True, interprocess=True)
    assert (event.timing, event.blocking_sync, event.interprocess, event.device) == (False, True, True, device)
    assert event.handle != 0
    assert "timing=False" in repr(event)
    with pytest.raises(rs.InvalidValueError, match="interprocess"):
        rs.Event(device, timing=True, interprocess=True)
    with event:
        pass
    with pytest.raises(rs.ClosedError, match="Event is closed"):
        event.query()


def test_default_streams(device):
    legacy = rs.Stream.legacy_default(device)
    assert legacy.handle == 1
    assert not legacy.non_blocking
    assert legacy == rs.Stream.legacy_default(device) == rs.Stream.from_external(0, device)
    mine = rs.Stream.per_thread_default(device)
    assert mine.handle == 2
    assert mine != legacy
    assert mine.then(lambda: 1).result(30) == 1
    blocking, free = rs.Stream(device, non_blocking=False), rs.Stream(device)
    with rs.testing.hold(blocking):
        assert not legacy.query()
        assert free.query()
    legacy.synchronize(30)


def test_a_per_thread_stream_is_refused_elsewhere(device):
    stream = rs.Stream.per_thread_default(device)
    caught = []

    def use():
        try:
            stream.query()
        except rs.InvalidValueError as error:
            caught.append(str(error))

    thread = threading.Thread(target=use)
    thread.start()
    thread.join(30)
    assert "another thread" in caught[0]


def test_devices(device):
    assert device in rs.devices()
    assert rs.Device("soft") in rs.devices()
    assert rs.Device("soft") == rs.Device("soft:0") != rs.Device("soft:1")
    assert rs.Device(device) == device
    assert hash(rs.Device("soft")) == hash(rs.Device("soft:0"))
    assert pickle.loads(pickle.dumps(device)) == device
    assert eval(repr(device), {"Device": rs.Device}) == device
    assert device.is_software == (os.environ["RSTREAM_DEVICE"] == "soft")
    assert device.name
    assert device.driver_version >= (12, 0)
    assert device.compute_capability >= (7, 0)
    assert device.attributes["unified_addressing"] == 1
    free, total = device.memory_info()
    assert 0 < free <= total
    device.synchronize()


@pytest.mark.parametrize("bad", ["", "soft:", "soft:x", "gpu", "-1", "soft:99", 4096, -1])
def test_a_device_that_is_not_there_is_named(bad):
    with pytest.raises(rs.CudaError) as caught:
        rs.Device(bad)
    assert isinstance(caught.value, rs.InvalidValueError | rs.DriverNotFoundError)
    if isinstance(caught.value, rs.InvalidValueError):
        assert str(bad).removeprefix("soft:") in str(caught.value)


@pytest.mark.parametrize("bad", [None, 1.5, b"0", True, [0]])
def test_what_names_no_device_is_a_type_error(bad):
    with pytest.raises(TypeError, match="is no device"):
        rs.Device(bad)


def test_reserved_streams_are_made_beside_a_stream_that_waits(program):
    text = """
        rs.default_device().reserve_streams(200)
        first = rs.Stream()
        with rs.testing.hold(first):
            print(len([rs.Stream() for _ in range(200)]))
        """
    assert program(text) == "200\n"


@pytest.mark.parametrize(("bad", "rule"), [(-1, "expected 0 or more"), (4097, "at most 4096")])
def test_room_for_a_wrong_number_of_streams_is_refused(device, bad, rule):
    with pytest.raises(rs.InvalidValueError, match=rf"room for {bad} streams: {rule}"):
        device.reserve_streams(bad)


@pytest.mark.parametrize(
    "first",
    [
        "rs.Stream()",
        "rs.Stream.legacy_default()",
        "rs.Stream.per_thread_default()",
        "rs.Stream.from_external(2)",
        "rs.GreenContext(multiprocessors=8).create_stream()",
    ],
)
@pytest.mark.parametrize("before", ["", "rs.Stream().close()"])
def test_where_torch_is_loaded_there_is_room_for_its_streams(program, before, first):
    """It makes all at once, with the GIL. Without room the driver waits for a callback, and that for the GIL."""
    text = f"""
        import sys, types
        {before}
        sys.modules.setdefault("torch", types.ModuleType("torch"))
        stream = {first}
        with rs.testing.hold(stream):
            print(len([rs.Stream(non_blocking=True) for _ in range(128)]))
        """
    assert program(text) == "128\n"


@pytest.mark.gpu_only
def test_the_first_stream_of_torch_may_be_made_while_a_callback_is_queued(program, device):
    pytest.importorskip("torch")
    text = """
        import sys
        import torch
        stream = rs.Stream.from_external(torch.cuda.current_stream())
        sys.setswitchinterval(60)
        done = stream.add_callback(lambda status: int(status))
        torch.cuda.Stream()
        print(done.result(30))
        """
    assert program(text) == "0\n"


def test_the_default_device_is_chosen_by_the_environment(program):
    assert program("print(rs.default_device())", RSTREAM_DEVICE="soft:1").strip() == 'Device("soft:1")'
    assert "RSTREAM_DEVICE" in program(
        """
        try:
            rs.default_device()
        except rs.InvalidValueError as error:
            print(error)
        """,
        RSTREAM_DEVICE="nonsense",
    )


@pytest.mark.soft_only
def test_without_a_driver_the_software_device_is_named_and_not_taken(program):
    text = program(
        """
        try:
            rs.Stream()
        except rs.DriverNotFoundError as error:
            print(error)
        """,
        RSTREAM_DEVICE="",
    )
    assert 'Device("soft")' in text
    assert "RSTREAM_DEVICE=soft" in text


@pytest.mark.parametrize("bad", ["", "fast"])
def test_an_unknown_signal_is_named(device, bad):
    with pytest.raises(rs.InvalidValueError, match=f'signal="{bad}"'):
        rs.Stream(device, signal=bad)


def test_objects_of_another_device_are_refused(stream):
    # On either device under test, soft:1 is another one.
    event, other = rs.Event("soft:1"), rs.Stream("soft:1")
    for call in (
        lambda: stream.record(event),
        lambda: event.record(stream),
        lambda: stream.copy(rs.device_empty(1, device="soft:1"), np.zeros(1)),
        lambda: stream.fill(rs.device_empty(1, device="soft:1"), 0),
        lambda: rs.Stream.from_external(other, stream.device),
    ):
        with pytest.raises(rs.InvalidValueError, match="soft:1"):
            call()
    assert stream.pending == 0
    assert stream.query()


@pytest.mark.soft_only
def test_a_stream_of_another_context_is_refused(device):
    other = rs.Stream("soft:1")
    with pytest.raises(rs.InvalidValueError, match="context"):
        rs.Stream.from_external(other.handle, device)


class Protocol:
    def __init__(self, answer):
        self.answer = answer

    def __cuda_stream__(self):
        return self.answer


class Like:
    def __init__(self, **attributes):
        self.__dict__.update(attributes)


def test_streams_of_others_are_taken_as_they_are(stream, device):
    assert stream.__cuda_stream__() == (0, stream.handle)
    assert rs.Stream.from_external(stream) is stream
    wrapped = Protocol((0, stream.handle))
    kept = weakref.ref(wrapped)
    adopted = rs.Stream.from_external(wrapped, device)
    del wrapped
    gc.collect()
    assert kept() is not None
    assert adopted == stream
    adopted.close()
    assert stream.query()
    for like in (Like(cuda_stream=stream.handle), Like(ptr=stream.handle), Like(handle=Like(value=stream.handle))):
        assert rs.Stream.from_external(like, device) == stream
    assert rs.Stream.from_external(np.uint64(stream.handle), device) == stream
    with rs.testing.hold(stream):
        later = rs.Stream(device)
        later.wait(Protocol((0, stream.handle)))
        assert not later.query()
    later.synchronize(30)


@pytest.mark.parametrize("answer", [None, 7, (0,), (0, 1, 2), ("0", "1"), (0, None)])
def test_a_wrong_answer_of_the_protocol_is_named(device, answer):
    with pytest.raises(rs.InvalidValueError, match="__cuda_stream__ of Protocol"):
        rs.Stream.from_external(Protocol(answer), device)


def test_another_version_of_the_protocol_is_refused(device, stream):
    with pytest.raises(rs.InvalidValueError, match="version 1"):
        rs.Stream.from_external(Protocol((1, stream.handle)), device)


@pytest.mark.parametrize("bad", [None, "stream", 1.5, True, object()])
def test_what_is_no_stream_is_a_type_error(device, bad):
    with pytest.raises(TypeError, match="stream"):
        rs.Stream.from_external(bad, device)


def test_status_is_an_int_that_keeps_unknown_codes():
    status = rs.Status(12345)
    assert status == 12345
    assert status.name == "CUDA_ERROR_12345"
    assert not status.ok
    assert not status.sticky
    assert rs.Status(700) == rs.Status.ILLEGAL_ADDRESS
    assert rs.Status.ILLEGAL_ADDRESS.sticky
    assert rs.Status.SUCCESS.ok
    assert "illegal memory access" in rs.Status(700).description
    assert pickle.loads(pickle.dumps(status)) == status
    assert isinstance(pickle.loads(pickle.dumps(status)), rs.Status)


def test_stats_count_what_became_of_host_code(stream):
    before = rs.stats()
    hold = rs.testing.hold(stream)
    done = [stream.then(lambda: 1), stream.add_callback(lambda _status: 1), stream.then(int, "x"), stream.completion()]
    cancelled = stream.then(lambda: 1)
    cancelled.cancel()
    hold.release()
    rs.wait(done, 30)
    assert isinstance(done[2].exception(), ValueError)
    stream.then(lambda: None).result(30)
    change = {key: value - before[key] for key, value in rs.stats().items()}
    assert change == {"accepted": 6, "run": 4, "failed": 1, "cancelled": 1}


@pytest.mark.parametrize("what", [None, "stream", 1.5, object()])
def test_what_cannot_be_waited_for_is_named(stream, what):
    with pytest.raises(TypeError, match="expected an Event"):
        stream.wait(what)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("RSTREAM_SOFT_DEVICES", "0"),
        ("RSTREAM_SOFT_DEVICES", "17"),
        ("RSTREAM_SOFT_DEVICES", "two"),
        ("RSTREAM_EXIT_TIMEOUT", "-1"),
        ("RSTREAM_EXIT_TIMEOUT", "soon"),
        ("RSTREAM_EXIT_TIMEOUT", "nan"),
        ("RSTREAM_WAIT_POLICY", "fast"),
    ],
)
def test_a_bad_environment_is_told_at_the_import(program, name, value):
    assert f"{value}" in program("", status=1, errors=True, **{name: value})
