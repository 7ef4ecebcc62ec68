"""Completions: waiting, asyncio, futures."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import gc
import os
import pickle
import re
import sys
import threading
import weakref

import numpy as np
import pytest

import rstream as rs


@pytest.fixture
def held(stream):
    with rs.testing.hold(stream) as hold:
        yield hold


def test_it_is_pending_then_done(stream, held):
    completion = stream.then(lambda: 5)
    assert not completion.done()
    assert completion.status is None
    assert "pending" in repr(completion)
    assert stream.pending == 1
    with pytest.raises(rs.WaitTimeoutError) as caught:
        completion.result(0)
    assert isinstance(caught.value, TimeoutError)
    with pytest.raises(TimeoutError):
        completion.exception(0.001)
    held.release()
    assert completion.result() == 5
    assert completion.result(0) == 5
    assert completion.exception() is None
    assert completion.status == 0
    assert "done" in repr(completion)
    assert stream.pending == 0


def test_a_stream_can_be_waited_for_without_host_code(stream, held):
    completion = stream.completion()
    assert not completion.done()
    held.release()
    assert completion.result(30) is None


def test_a_completion_of_an_idle_stream_is_there_at_once(stream):
    stream.synchronize()
    before = rs.stats()
    completion = stream.completion()
    assert completion.done()
    assert completion.status == 0
    assert completion.result(0) is None
    assert not completion.cancel()
    after = rs.stats()
    assert [after[name] - before[name] for name in ("accepted", "run", "failed", "cancelled")] == [1, 1, 0, 0]


def test_a_completion_of_a_blocking_stream_waits_for_the_legacy_stream(device):
    legacy, blocking = rs.Stream.legacy_default(device), rs.Stream(device, non_blocking=False)
    with rs.testing.hold(legacy) as hold:
        completion = blocking.completion()
        assert not completion.done()
        hold.release()
        assert completion.result(30) is None


def test_completions_of_a_stream_are_there_in_order(stream):
    for _ in range(200):
        rs.testing.spin(stream, 1)
        completions = [stream.completion() for _ in range(20)]
        done = [completion.done() for completion in reversed(completions)]
        # Looked at from the last: what is done has all before it done.
        assert done == sorted(done)
        rs.wait(completions, timeout=30)


@pytest.mark.parametrize("bad", [-1, -0.001, float("nan"), float("-inf")])
def test_a_bad_timeout_is_named(stream, bad):
    completion = stream.completion()
    for call in (completion.result, completion.exception, stream.synchronize, rs.Event(stream.device).synchronize):
        with pytest.raises(rs.InvalidValueError, match=re.escape(f"timeout={bad}:")):
            call(bad)
    with pytest.raises(ValueError, match="timeout"):
        rs.wait([completion], bad)
    assert completion.result(float("inf")) is None


def test_done_callbacks_run_once_with_the_completion(stream, held):
    told = []
    both = threading.Barrier(2)
    completion = stream.then(lambda: 1)

    def tell(done):
        told.append(done)
        done.result()
        both.wait(30)

    completion.add_done_callback(tell)
    held.release()
    both.wait(30)
    assert told == [completion]
    completion.add_done_callback(told.append)
    assert told == [completion, completion]
    with pytest.raises(TypeError, match="3 is not callable"):
        completion.add_done_callback(3)


def test_a_done_callback_may_use_the_api_and_its_exception_is_reported(stream, held, lost):
    completion = stream.add_callback(lambda _status: 1)

    def fail(_completion):
        stream.synchronize(30)
        raise LookupError("in a done callback")

    completion.add_done_callback(fail)
    held.release()
    assert [type(error) for error in lost.wait(1)] == [LookupError]


def test_wait_and_as_completed(stream, device):
    other = rs.Stream(device)
    hold = rs.testing.hold(other)
    quick, slow = stream.then(lambda: "quick"), other.then(lambda: "slow")
    assert rs.wait([quick, slow], 30, "FIRST_COMPLETED") == ({quick}, {slow})
    assert rs.wait([quick, slow], 0.001) == ({quick}, {slow})
    iterator = rs.as_completed([slow, quick], 30)
    assert next(iterator) is quick
    with pytest.raises(rs.WaitTimeoutError, match="1 of 1"):
        list(rs.as_completed([slow], 0.001))
    hold.release()
    assert [completion.result() for completion in iterator] == ["slow"]
    assert rs.wait([quick, slow]).not_done == set()
    failed = stream.then(int, "x")
    assert failed in rs.wait([failed, quick], 30, "FIRST_EXCEPTION").done
    assert rs.wait([]) == (set(), set())
    assert rs.wait([quick], np.float32(1)).done == {quick}
    with pytest.raises(TypeError, match="1 is no Completion"):
        rs.wait([1])
    with pytest.raises(rs.InvalidValueError, match="SOME"):
        rs.wait([], return_when="SOME")


def test_future(stream, held):
    future = stream.then(lambda: 9).future()
    failing = stream.then(int, "x").future()
    assert isinstance(future, concurrent.futures.Future)
    held.release()
    assert future.result(30) == 9
    assert isinstance(failing.exception(30), ValueError)


def test_waits_that_are_given_up_leave_nothing_behind(stream, held):
    completion = stream.completion()

    def count():
        gc.collect()
        return len(gc.get_objects())

    async def give_up():
        waiting = asyncio.ensure_future(asyncio.wrap_future(completion.future()))
        other = asyncio.ensure_future(awaited())
        await asyncio.sleep(0)
        waiting.cancel()
        other.cancel()
        await asyncio.wait([waiting, other])

    async def awaited():
        await completion

    def poll():
        with pytest.raises(TimeoutError):
            list(rs.as_completed([completion], 0))
        rs.wait([completion], 0)
        future = completion.future()
        assert future.cancel()
        assert concurrent.futures.wait([future], 30).done == {future}

    async def many():
        for _ in range(100):
            await give_up()

    poll()
    asyncio.run(many())
    before = count()
    for _ in range(100):
        poll()
    asyncio.run(many())
    assert count() - before < 100
    held.release()
    completion.result(30)


def test_a_cancelled_completion_cancels_its_futures(stream, held):
    completion = stream.then(lambda: 9)
    future = completion.future()
    assert completion.cancel()
    with pytest.raises(concurrent.futures.CancelledError):
        future.result(30)
    assert concurrent.futures.wait([future], 30).done == {future}


def test_threads_look_at_a_failure_at_once(stream, held):
    """What makes an exception is Python code, which must not run under a lock of the completion."""
    completion = stream.then(lambda: 1)
    completion.cancel()
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=lambda: [completion.exception() for _ in range(2000)]) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
            assert not thread.is_alive()
    finally:
        sys.setswitchinterval(interval)


def test_a_cycle_through_a_result_is_collected(stream):
    class Thing:
        pass

    def look():
        thing = Thing()
        completion = stream.then(int, "x")
        try:
            completion.result(30)
        except ValueError:
            pass
        returned = Thing()
        returned.completion = stream.then(lambda: returned)
        returned.completion.result(30)
        return weakref.ref(thing), weakref.ref(returned)

    gone = look()
    stream.then(lambda: None).result(30)
    gc.collect()
    assert [ref() for ref in gone] == [None, None]


def test_it_can_be_subscripted_in_annotations():
    assert rs.Completion[int].__origin__ is rs.Completion


def test_it_is_not_pickled(stream):
    for thing in (stream, stream.completion(), stream.record()):
        with pytest.raises(TypeError, match="pickled"):
            pickle.dumps(thing)


def test_await(stream, device):
    async def main():
        assert await stream.then(lambda: 1) == 1
        assert await stream.completion() is None
        assert await stream is None
        event = stream.record()
        assert await event is None
        with pytest.raises(ZeroDivisionError):
            await stream.then(lambda: 1 // 0)
        with rs.testing.hold(stream):
            task = asyncio.ensure_future(wait(stream))
            done, _ = await asyncio.wait([task], timeout=0.01)
            assert not done
        assert await task == "later"

    async def wait(stream):
        return await stream.then(lambda: "later")

    asyncio.run(main())


def test_many_events_are_awaited_while_the_loop_goes_on(stream):
    """More than the driver has room for streams: one for each would have to wait for the stream that is held."""

    async def main():
        with rs.testing.hold(stream):
            waits = [asyncio.ensure_future(reached(stream.record())) for _ in range(400)]
            await asyncio.sleep(0)
            assert not any(wait.done() for wait in waits)
        assert await asyncio.gather(*waits) == [None] * 400

    async def reached(event):
        return await event

    asyncio.run(main())


def test_many_awaits_are_gathered(stream):
    async def main():
        return await asyncio.gather(*[wait(number) for number in range(2000)])

    async def wait(number):
        return await stream.then(lambda: number)

    assert asyncio.run(main()) == list(range(2000))


def test_a_cancelled_await_leaves_the_stream_sound(stream, held):
    async def wait(completion):
        return await completion

    async def main():
        completion = stream.then(lambda: "ran")
        task = asyncio.ensure_future(wait(completion))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        held.release()
        return await completion

    assert asyncio.run(main()) == "ran"


def test_loops_in_several_threads(device):
    def work(results):
        async def main():
            stream = rs.Stream(device)

            async def wait(number):
                return await stream.then(lambda: number)

            return await asyncio.gather(*[wait(number) for number in range(200)])

        results.append(asyncio.run(main()))

    results: list[list[int]] = []
    threads = [threading.Thread(target=work, args=(results,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert results == [list(range(200))] * 4


def test_a_completion_that_outlives_its_loop_is_dropped_quietly(stream, lost):
    async def wait(completion):
        await completion

    hold = rs.testing.hold(stream)
    completion = stream.then(lambda: 1)
    loop = asyncio.new_event_loop()
    task = loop.create_task(wait(completion))
    loop.call_soon(loop.stop)
    loop.run_forever()
    task.cancel()
    loop.run_until_complete(asyncio.gather(task, return_exceptions=True))
    loop.close()
    hold.release()
    assert completion.result(30) == 1
    stream.then(lambda: None).result(30)
    gc.collect()
    assert lost.exceptions == []


def test_a_heartbeat_keeps_its_beat_during_an_awaited_kernel(stream):
    async def main():
        beats = 0
        rs.testing.spin(stream, 300_000)
        completion = stream.completion()

        async def beat():
            nonlocal beats
            while not completion.done():
                beats += 1
                await asyncio.sleep(0.001)

        task = asyncio.ensure_future(beat())
        await completion
        await task
        return beats

    assert asyncio.run(main()) > 20


@pytest.mark.parametrize(
    "wait",
    [
        rs.Completion.result,
        rs.Completion.exception,
        lambda completion: rs.wait([completion]),
        lambda completion: list(rs.as_completed([completion])),
        lambda completion: completion.future().result(),
        lambda completion: completion.future().exception(),
        lambda completion: asyncio.run(awaited(completion)),
        lambda completion: asyncio.run(rs.gather([completion])),
    ],
    ids=["result", "exception", "wait", "as_completed", "future result", "future exception", "await", "gather"],
)
def test_a_callback_does_not_wait_for_completions(stream, wait):
    """But it may look at one that is done."""
    before = stream.completion()
    before.result(30)

    def callback(status):
        wait(before)
        with pytest.raises(rs.NotPermittedError, match="must not wait"):
            wait(later.pop())

    with rs.testing.hold(stream):
        later = []
        refused = stream.add_callback(callback)
        later.append(stream.completion())
    assert refused.result(30) is None


def test_a_callback_may_ask_the_future_of_what_is_done(stream):
    """Also when the future has not heard of it yet."""
    for _ in range(100):
        with rs.testing.hold(stream):
            future = stream.completion().future()
            asked = stream.add_callback(lambda status, future=future: future.result(30))
        assert asked.result(30) is None


def test_a_loop_is_woken_up_once_for_all_that_is_due(stream):
    async def main():
        loop, wakes = asyncio.get_running_loop(), []
        watch = loop.add_reader

        def counted(fd, callback, *args):
            def wake():
                wakes.append(1)
                callback(*args)

            watch(fd, wake)

        loop.add_reader = counted
        with rs.testing.hold(stream):
            completions = [stream.then(int, str(number)) for number in range(100)]
            waiting = asyncio.gather(*completions)
            await asyncio.sleep(0)
        # The loop does not run meanwhile.
        rs.wait(completions, 30)
        stream.then(int).result(30)
        return await waiting, len(wakes)

    results, wakes = asyncio.run(main())
    assert results == list(range(100))
    assert wakes == 1


def test_a_coroutine_function_is_no_done_callback(stream, lost):
    async def tell(completion):
        raise AssertionError("it is never started")

    with rs.testing.hold(stream):
        completion = stream.then(int)
        completion.add_done_callback(tell)
    assert completion.result(30) == 0
    lost.wait(1)
    # At once.
    completion.add_done_callback(tell)
    lost.wait(2)
    for error in lost.exceptions:
        assert isinstance(error, TypeError)
        assert "tell is a coroutine function, and host code is not awaited" in str(error)


def test_gather_gives_results_in_order_and_the_first_failure_when_all_are_done(stream, run):
    async def main():
        with rs.testing.hold(stream):
            many = [stream.then(int, str(number)) for number in range(50)]
            waiting = asyncio.ensure_future(rs.gather(many))
            await asyncio.sleep(0)
            assert not waiting.done()
        assert await waiting == list(range(50))
        assert await rs.gather([]) == []

        good, bad, worse = stream.then(int), stream.then(int, "x"), stream.then(lambda: 1 // 0)
        with pytest.raises(ValueError, match="'x'"):
            await rs.gather([good, bad, worse, good])
        assert worse.done()
        results = await rs.gather([good, worse, bad], return_exceptions=True)
        assert [type(result) for result in results] == [int, ZeroDivisionError, ValueError]

        with rs.testing.hold(stream):
            cancelled = stream.then(int)
            assert cancelled.cancel()
            results = await rs.gather([good, cancelled], return_exceptions=True)
            assert [type(result) for result in results] == [int, asyncio.CancelledError]
            with pytest.raises(asyncio.CancelledError):
                await rs.gather([cancelled])
            late = stream.then(int)
            waiting = asyncio.ensure_future(rs.gather([good, late], return_exceptions=True))
            await asyncio.sleep(0)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            assert not late.cancelled()
        assert await late == 0
        leaves = stream.then(sys.exit, 3)
        results = await rs.gather([leaves, good], return_exceptions=True)
        assert [type(result) for result in results] == [SystemExit, int]
        with pytest.raises(TypeError, match="is no Completion"):
            await rs.gather([good, 1])
        for all_of_them in ([good, good], [good]):
            with pytest.raises(TypeError, match=r"gather\(\[a, b\]\)"):
                await rs.gather(*all_of_them)
        for source in (stream, stream.record()):
            with pytest.raises(TypeError, match=r"is no Completion: its \.completion\(\) is one"):
                await rs.gather([good, source])
            assert await rs.gather([source.completion()]) == [None]

        async def given_up(completion):
            # Cancelled before it waits.
            asyncio.current_task().cancel()
            await rs.gather([completion, completion], return_exceptions=True)

        with rs.testing.hold(stream), pytest.raises(asyncio.CancelledError):
            await asyncio.ensure_future(given_up(stream.completion()))

    run(main())


def test_what_gather_raises_keeps_nothing_alive(stream):
    class Owned:
        pass

    async def main():
        owned = Owned()
        gone = weakref.ref(owned)
        many = [stream.then(lambda owned: 1 // 0, owned)]
        del owned
        try:
            await rs.gather([many.pop()])
        except ZeroDivisionError:
            return gone

    gc.disable()
    try:
        assert asyncio.run(main())() is None
    finally:
        gc.enable()


class Blind(asyncio.SelectorEventLoop):
    """A loop that watches no sockets, as Windows has one."""

    def add_reader(self, fd, callback, *args):
        raise NotImplementedError


@pytest.fixture(params=["asyncio", "uvloop", "blind"])
def run(request):
    """As `asyncio.run`, on each kind of loop."""
    loops = {
        "asyncio": lambda: asyncio.SelectorEventLoop,
        "uvloop": lambda: pytest.importorskip("uvloop").new_event_loop,
        "blind": lambda: Blind,
    }

    def run(main):
        with asyncio.Runner(loop_factory=run.loop) as runner:
            return runner.run(main)

    run.loop = loops[request.param]()
    return run


def opened():
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


async def awaited(completion):
    return await completion


def test_every_kind_of_loop_awaits(stream, run):
    async def main():
        assert await stream.then(lambda: 1) == 1
        assert await stream.then(lambda: (2, 3)) == (2, 3)
        assert await stream.completion() is None
        with pytest.raises(ZeroDivisionError):
            await stream.then(lambda: 1 // 0)
        with rs.testing.hold(stream):
            waiting = asyncio.gather(*[stream.then(int, str(number)) for number in range(3000)])
            points = asyncio.gather(*[stream.completion() for _ in range(3000)])
            await asyncio.sleep(0)
        assert await points == [None] * 3000
        return await waiting

    assert run(main()) == list(range(3000))


def test_what_is_done_is_awaited_without_a_future_or_a_loop(stream):
    def step(completion):
        with pytest.raises(StopIteration) as caught:
            awaited(completion).send(None)
        return caught.value.value

    def raised(error):
        raise error

    completion = stream.then(lambda: (1, 2))
    assert completion.result(30) == (1, 2)
    assert step(completion) == (1, 2)
    point = stream.completion()
    point.result(30)
    assert step(point) is None
    failed = stream.then(raised, KeyError("x"))
    rs.wait([failed], 30)
    with pytest.raises(KeyError):
        awaited(failed).send(None)
    stops = stream.then(raised, StopIteration(3))
    rs.wait([stops], 30)
    with pytest.raises(RuntimeError, match="raised StopIteration") as caught:
        next(stops.__await__())
    assert caught.value.__cause__.value == 3
    with rs.testing.hold(stream):
        pending = awaited(stream.then(int))
        with pytest.raises(RuntimeError, match="no running event loop"):
            pending.send(None)


def test_an_awaited_failure_is_not_reported_and_one_that_nobody_awaits_is(stream, run, lost):
    async def main():
        with rs.testing.hold(stream):
            failing = [asyncio.ensure_future(awaited(stream.then(int, "x"))) for _ in range(2)]
            await asyncio.sleep(0)
            failing[0].cancel()
            await asyncio.sleep(0)
        with pytest.raises(ValueError, match="invalid literal"):
            await failing[1]

    run(main())
    gc.collect()
    assert [type(error) for error in lost.wait(1)] == [ValueError]


def test_to_await_a_cancelled_completion_is_to_be_cancelled(stream, run):
    async def main():
        with rs.testing.hold(stream):
            completion = stream.then(int)
            waiting = asyncio.ensure_future(awaited(completion))
            await asyncio.sleep(0)
            assert completion.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            with pytest.raises(asyncio.CancelledError):
                await completion

    run(main())


def test_an_await_is_cancelled_before_and_after_it_is_due(stream, run):
    async def main():
        with rs.testing.hold(stream):
            early, late = (asyncio.ensure_future(awaited(stream.completion())) for _ in range(2))
            last = stream.completion()
            await asyncio.sleep(0)
            early.cancel()
            await asyncio.sleep(0)
        # The loop has not looked yet.
        last.result(30)
        late.cancel()
        # More than an await, which takes what is done without leaving the task.
        await asyncio.wait([early, late])
        assert await stream.then(lambda: 5) == 5
        assert early.cancelled()
        assert late.cancelled()

    run(main())


def test_an_await_is_an_iterator_as_a_generator_is(stream):
    async def main():
        loop = asyncio.get_running_loop()
        with rs.testing.hold(stream):
            completion = stream.completion()
            steps = completion.__await__()
            assert iter(steps) is steps
            future = next(steps)
            assert asyncio.isfuture(future)
            assert future.get_loop() is loop
            with pytest.raises(KeyError, match="thrown"):
                steps.throw(KeyError("thrown"))
            assert steps.send(None) is not future
            with pytest.raises(KeyError, match="thrown"):
                steps.throw(KeyError, "thrown")
            steps.close()
        completion.result(30)
        with pytest.raises(StopIteration):
            steps.send(None)

    asyncio.run(main())


def test_a_loop_that_is_closed_with_awaits_pending_leaves_no_descriptors(stream, run, lost):
    def abandon(due):
        hold = rs.testing.hold(stream)
        completions = [stream.then(int), stream.completion()]
        loop = run.loop()
        tasks = [loop.create_task(awaited(completion)) for completion in completions]
        loop.call_soon(loop.stop)
        loop.run_forever()
        if due:
            hold.release()
            rs.wait(completions, 30)
        for task in tasks:
            task.cancel()
        loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        loop.close()
        if not due:
            hold.release()
            rs.wait(completions, 30)

    abandon(False)
    before = opened()
    for number in range(20):
        abandon(number % 2)
    assert opened() <= before
    assert lost.exceptions == []


def test_loops_come_and_go_in_threads(device, run):
    def work():
        for _ in range(5):
            with rs.Stream(device) as stream:

                async def main(stream=stream):
                    with rs.testing.hold(stream):
                        waiting = asyncio.gather(*[stream.then(int, str(number)) for number in range(100)])
                        await asyncio.sleep(0)
                    return await waiting

                results.append(run(main()))

    results: list[list[int]] = []
    run(asyncio.sleep(0))
    work()
    before = opened()
    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert results == [list(range(100))] * 25
    assert opened() <= before


def test_two_loops_take_turns_in_one_thread(stream):
    loops = [asyncio.new_event_loop() for _ in range(2)]
    before = opened()
    for _ in range(3):
        for loop in loops:
            with rs.testing.hold(stream):
                task = loop.create_task(awaited(stream.then(lambda: 7)))
                loop.call_soon(loop.stop)
                loop.run_forever()
            assert loop.run_until_complete(task) == 7
    # A pair of sockets for each.
    assert opened() == before + 4
    for loop in loops:
        loop.close()


def test_what_a_loop_has_not_got_to_when_it_is_interrupted_comes_later(stream):
    class Interrupted(asyncio.Future):
        def set_result(self, value):
            super().set_result(value)
            if not raised:
                raised.append(True)
                raise KeyboardInterrupt

    class Loop(asyncio.SelectorEventLoop):
        def create_future(self):
            return Interrupted(loop=self)

    async def main():
        with rs.testing.hold(stream):
            completions = [stream.completion() for _ in range(10)]
            waiting = asyncio.gather(*completions)
            await asyncio.sleep(0)
        rs.wait(completions, 30)
        return await waiting

    raised: list[bool] = []
    with contextlib.closing(Loop()) as loop:
        task = loop.create_task(main())
        with pytest.raises(KeyboardInterrupt):
            loop.run_until_complete(task)
        assert loop.run_until_complete(task) == [None] * 10
