"""The three kinds of host code."""

from __future__ import annotations

import asyncio
import functools
import gc
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import CancelledError

import numpy as np
import pytest

import rstream as rs

KINDS = ["add_callback", "launch_host_func", "then"]


def enqueue(stream: rs.Stream, kind: str, fn: Callable[[], object]) -> rs.Completion:
    """Queue `fn` without arguments, whatever the kind."""
    if kind == "add_callback":
        return stream.add_callback(lambda _status: fn())
    return getattr(stream, kind)(fn)


def test_a_callback_gets_the_status_and_its_arguments(stream):
    completion = stream.add_callback(lambda status, *args, **kwargs: (status, args, kwargs), 1, "two", three=3)
    status, args, kwargs = completion.result(30)
    assert status == rs.Status.SUCCESS == 0
    assert isinstance(status, rs.Status)
    assert status.ok
    assert (args, kwargs) == ((1, "two"), {"three": 3})
    assert completion.status == rs.Status.SUCCESS


@pytest.mark.parametrize("kind", ["launch_host_func", "then"])
def test_others_get_their_arguments_only(stream, kind):
    completion = getattr(stream, kind)(lambda *args, **kwargs: (args, kwargs), 1, fn_=2, fn=3)
    assert completion.result(30) == ((1,), {"fn_": 2, "fn": 3})


@pytest.mark.parametrize("kind", KINDS)
def test_host_code_runs_once_each_and_in_order(stream, kind):
    seen = []
    completions = [enqueue(stream, kind, lambda n=n: seen.append(n)) for n in range(500)]
    completions[-1].result(60)
    assert seen == list(range(500))
    assert all(completion.done() for completion in completions)
    assert stream.pending == 0


def test_mixed_kinds_keep_the_order_that_they_promise(stream):
    ordered, free = [], []
    for number in range(200):
        (stream.add_callback if number % 2 else lambda f: stream.launch_host_func(f, None))(
            lambda _status, number=number: ordered.append(number)
        )
        last = stream.then(free.append, number)
    last.result(60)
    stream.synchronize(60)
    assert ordered == list(range(200))
    assert free == list(range(200))


@pytest.mark.parametrize("kind", ["add_callback", "launch_host_func"])
def test_later_work_waits_for_a_callback(stream, device, kind):
    word = rs.pinned_empty(1, np.uint32, device)
    view = np.asarray(word)
    view[0] = 1
    seen = enqueue(stream, kind, lambda: int(view[0]))
    stream.fill(word, 2)
    assert seen.result(30) == 1
    stream.synchronize(30)
    assert view[0] == 2


def test_later_work_does_not_wait_for_a_continuation(stream, device):
    word = rs.pinned_empty(1, np.uint32, device)
    view = np.asarray(word)
    go = threading.Event()
    completion = stream.then(go.wait, 60)
    stream.fill(word, 7)
    stream.synchronize(30)
    assert view[0] == 7
    assert not completion.done()
    go.set()
    assert completion.result(30) is True


def test_a_callback_sees_what_was_copied_before(stream, device):
    source = rs.pinned_empty(1000, np.int64, device)
    source[:] = np.arange(1000)
    on_device = rs.device_empty(1000, np.int64, device)
    back = rs.pinned_empty(1000, np.int64, device)
    stream.copy(on_device, source)
    stream.copy(back, on_device)
    total = stream.add_callback(lambda _status: int(np.asarray(back).sum()))
    assert total.result(30) == 499500


def test_host_code_of_a_closed_stream_still_runs(stream):
    seen = []
    hold = rs.testing.hold(stream)
    completions = [stream.add_callback(lambda _status, n=n: seen.append(n)) for n in range(100)]
    stream.close()
    assert stream.closed
    hold.release()
    completions[-1].result(30)
    assert seen == list(range(100))


def test_host_code_of_a_collected_stream_still_runs(device):
    stream = rs.Stream(device)
    hold = rs.testing.hold(stream)
    completion = stream.then(lambda: "ran")
    gone = weakref.ref(stream)
    del stream
    gc.collect()
    assert gone() is None
    hold.release()
    assert completion.result(30) == "ran"


@pytest.mark.parametrize("kind", KINDS)
def test_an_exception_comes_out_of_result_as_it_is(stream, kind, lost):
    error = ValueError("on purpose")

    def fail():
        raise error

    completion = enqueue(stream, kind, fail)
    with pytest.raises(ValueError, match="on purpose") as caught:
        completion.result(30)
    assert caught.value is error
    assert "fail" in [entry.name for entry in caught.traceback]
    assert completion.exception() is error
    assert enqueue(stream, kind, lambda: 1).result(30) == 1
    del completion, caught
    gc.collect()
    # Somebody looked, so nothing is reported: what is reported next is the next.
    stream.then(int, "no number")
    assert [type(exception) for exception in lost.wait(1)] == [ValueError]
    assert lost.exceptions != [error]


@pytest.mark.parametrize("kind", KINDS)
def test_an_exception_that_nobody_looks_at_is_reported_once(stream, kind, lost):
    def fail():
        raise KeyError("lost")

    hold = rs.testing.hold(stream)
    dropped_before = enqueue(stream, kind, fail)
    dropped_after = enqueue(stream, kind, fail)
    del dropped_before
    hold.release()
    rs.wait([dropped_after], 30)
    lost.wait(1)
    del dropped_after
    gc.collect()
    lost.wait(2)
    stream.then(lambda: None).result(30)
    assert [type(exception) for exception in lost.exceptions] == [KeyError, KeyError]


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_no_exception_is_too_base_to_be_delivered(stream, error):
    def fail(_status):
        raise error

    completion = stream.add_callback(fail)
    assert isinstance(completion.exception(30), error)
    assert stream.add_callback(lambda _status: 1).result(30) == 1


def test_the_references_are_dropped_when_it_ran(stream):
    class Thing:
        pass

    thing = Thing()
    gone = weakref.ref(thing)
    completion = stream.add_callback(lambda _status, _thing: None, thing)
    del thing
    completion.result(30)
    assert gone() is None


@pytest.mark.soft_only
@pytest.mark.parametrize("kind", KINDS)
def test_a_refused_enqueue_drops_its_references(stream, kind, enqueue_function):
    class Thing:
        def __call__(self, *_args):
            return None

    thing, argument = Thing(), Thing()
    gone = weakref.ref(thing), weakref.ref(argument)
    with (
        rs.testing.inject(enqueue_function, 2),
        pytest.raises(rs.OutOfMemoryError, match=enqueue_function) as caught,
    ):
        getattr(stream, kind)(thing, argument)
    assert caught.value.code == 2
    assert isinstance(caught.value, MemoryError)
    del thing, argument, caught
    gc.collect()
    assert gone[0]() is None
    assert gone[1]() is None
    assert stream.pending == 0
    assert stream.then(lambda: 1).result(30) == 1


@pytest.mark.parametrize("kind", ["add_callback", "launch_host_func", "then"])
def test_an_enqueue_inside_a_callback_drops_its_references(stream, kind):
    class Function:
        def __call__(self, *_):
            raise AssertionError("must not run")

    def callback(status):
        function = Function()
        gone = weakref.ref(function)
        with pytest.raises(rs.NotPermittedError) as caught:
            getattr(stream, kind)(function)
        caught.value.__traceback__ = None
        del function
        return gone() is None

    assert stream.add_callback(callback).result(30)


def test_a_cancelled_callback_does_not_run_and_keeps_its_place(stream):
    seen = []
    hold = rs.testing.hold(stream)
    first = stream.add_callback(lambda _status: seen.append("cancelled"))
    second = stream.add_callback(lambda _status: seen.append("second"))
    assert first.cancel()
    assert first.cancelled()
    assert first.done()
    hold.release()
    second.result(30)
    assert seen == ["second"]
    assert not second.cancel()
    with pytest.raises(CancelledError):
        first.result()


REFUSED: dict[str, Callable[[rs.Stream, rs.Event], object]] = {
    "query": lambda s, e: s.query(),
    "synchronize": lambda s, e: s.synchronize(),
    "wait event": lambda s, e: s.wait(e),
    "wait stream": lambda s, e: s.wait(s),
    "record": lambda s, e: s.record(),
    "record into": lambda s, e: s.record(e),
    "add_callback": lambda s, e: s.add_callback(print),
    "launch_host_func": lambda s, e: s.launch_host_func(print),
    "then": lambda s, e: s.then(print),
    "completion": lambda s, e: s.completion(),
    "copy": lambda s, e: s.copy(np.zeros(1), np.zeros(1)),
    "Stream": lambda s, e: rs.Stream(s.device),
    "legacy_default": lambda s, e: rs.Stream.legacy_default(s.device),
    "per_thread_default": lambda s, e: rs.Stream.per_thread_default(s.device),
    "from_external": lambda s, e: rs.Stream.from_external(s.handle, s.device),
    "Event": lambda s, e: rs.Event(s.device),
    "event.record": lambda s, e: e.record(s),
    "event.query": lambda s, e: e.query(),
    "event.synchronize": lambda s, e: e.synchronize(),
    "event.elapsed_since": lambda s, e: e.elapsed_since(e),
    "event.completion": lambda s, e: e.completion(),
    "devices": lambda s, e: rs.devices(),
    "default_device": lambda s, e: rs.default_device(),
    "Device": lambda s, e: rs.Device(str(s.device.ordinal) if not s.device.is_software else "soft"),
    "attributes": lambda s, e: s.device.attributes,
    "memory_info": lambda s, e: s.device.memory_info(),
    "device.synchronize": lambda s, e: s.device.synchronize(),
    "pinned_empty": lambda s, e: rs.pinned_empty(1, device=s.device),
    "managed_empty": lambda s, e: rs.managed_empty(1, device=s.device),
    "device_empty": lambda s, e: rs.device_empty(1, device=s.device),
    "spin": lambda s, e: rs.testing.spin(s, 1),
    "fault": lambda s, e: rs.testing.fault(s),
    "hold": lambda s, e: rs.testing.hold(s),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("kind", ["add_callback", "launch_host_func"])
def test_no_call_that_reaches_the_driver_is_allowed_in_a_callback(stream, device, kind, name):
    event = rs.Event(device, timing=True)
    other = rs.Stream(device)
    for target in (stream, other):
        with pytest.raises(rs.NotPermittedError, match="continuation"):
            enqueue(stream, kind, lambda target=target: REFUSED[name](target, event)).result(30)
    assert stream.then(lambda: 1).result(30) == 1
    assert other.query()


def test_what_stays_in_the_process_is_allowed_in_a_callback(stream, device):
    event = rs.Event(device)
    completion = stream.completion()

    def look(_status):
        other = [stream.id, stream.priority, stream.pending, stream.closed, stream.handle, device.name, event.timing]
        return repr(stream), repr(event), completion.done(), hash(stream), stream == stream, other

    assert stream.add_callback(look).result(30)[2] is True


def test_a_callback_must_not_wait_for_what_may_be_behind_it(stream):
    behind = []
    ready = threading.Event()

    def wait(_status):
        ready.wait(30)
        return behind[0].result()

    completion = stream.add_callback(wait)
    behind.append(stream.then(lambda: 1))
    ready.set()
    with pytest.raises(rs.NotPermittedError, match="wait"):
        completion.result(30)
    assert behind[0].result(30) == 1


def test_objects_may_be_dropped_in_a_callback(stream, device):
    things = [rs.Stream(device), rs.Event(device), rs.device_empty(9, device=device), rs.pinned_empty(9, device=device)]
    stream.add_callback(lambda _status: things.clear()).result(30)
    assert stream.then(lambda: stream.query() in (True, False)).result(30)


def test_a_continuation_may_use_the_api_also_on_its_own_stream(stream, device):
    def use():
        other = rs.Stream(device)
        array = rs.device_empty(4, np.int32, device)
        other.fill(array, 5)
        stream.wait(other)
        return stream.add_callback(lambda status: status.ok), array.to_host(other).tolist()

    inner, values = stream.then(use).result(30)
    assert inner.result(30) is True
    assert values == [5, 5, 5, 5]


def test_continuations_may_wait_for_one_another(device):
    first, second = rs.Stream(device), rs.Stream(device)
    started = threading.Event()
    late = threading.Event()

    def outer():
        started.set()
        assert late.wait(30)
        return second.then(lambda: "inner").result(30)

    completion = first.then(outer)
    assert started.wait(30)
    chain = [rs.Stream(device).then(lambda: completion.result(30)) for _ in range(20)]
    late.set()
    assert [link.result(30) for link in chain] == ["inner"] * 20


async def step(*_args):
    raise AssertionError("it is never started")


class Steps:
    async def __call__(self, *_args):
        await step()

    async def method(self, *_args):
        await step()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("function", "name"),
    [(step, "step"), (functools.partial(step, 1), "partial"), (Steps(), "Steps"), (Steps().method, r"Steps\.method")],
    ids=["function", "partial", "object", "method"],
)
def test_a_coroutine_function_is_refused_by_name_when_it_is_called(stream, kind, function, name):
    before = rs.stats()
    completion = getattr(stream, kind)(function)
    with pytest.raises(TypeError, match=f"{name}.* is a coroutine function, and host code is not awaited"):
        completion.result(30)
    after = rs.stats()
    assert (after["run"] - before["run"], after["failed"] - before["failed"]) == (0, 1)


@pytest.mark.parametrize("kind", KINDS)
def test_host_code_may_return_a_coroutine_on_purpose(stream, kind):
    async def later():
        return 5

    assert asyncio.run(enqueue(stream, kind, lambda: later()).result(30)) == 5


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_callable_is_named(stream, kind):
    with pytest.raises(TypeError, match="'nothing' is not callable"):
        getattr(stream, kind)("nothing")
    with pytest.raises(TypeError):
        getattr(stream, kind)()
    assert stream.pending == 0
