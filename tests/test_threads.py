"""The GIL, Ctrl-C, races and load: nothing hangs, nothing is lost."""

from __future__ import annotations

import asyncio
import gc
import os
import resource
import signal
import sys
import threading
import time

import numpy as np
import pytest

import rstream as rs


def rss() -> int:
    """The resident memory of this process in bytes."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.stress
@pytest.mark.timeout(600)
def test_many_callbacks_over_many_streams_run_once_in_order_in_flat_memory(device):
    """One million on the software device, 200,000 on a GPU: 16 streams, 4 threads, all three kinds."""
    streams_, threads_, window = 16, 4, 2000
    total = int(os.environ.get("RSTREAM_STRESS", "1000000" if device.is_software else "200000"))
    each = total // streams_
    failures: list[str] = []
    memory: list[int] = []

    def work(number: int) -> None:
        streams = [rs.Stream(device) for _ in range(streams_ // threads_)]
        # Ordered host code and continuations of a stream are two orders; each counts for itself.
        ordered, free = [0] * len(streams), [0] * len(streams)

        def step(_status, counts, index, expected):
            if counts[index] != expected:
                failures.append(f"{index}: {counts[index]} instead of {expected}")
            counts[index] += 1

        for count in range(each):
            for index, stream in enumerate(streams):
                if count % 4 == 0:
                    stream.add_callback(step, ordered, index, count // 4)
                else:
                    stream.then(step, None, free, index, count - count // 4 - 1)
            if count % window == window - 1:
                for stream in streams:
                    stream.then(int).result(120)
                if number == 0:
                    memory.append(rss())
        for stream in streams:
            stream.then(int).result(120)
            stream.synchronize(120)
            assert stream.pending == 0
        assert ordered == [(each + 3) // 4] * len(streams)
        assert free == [each - (each + 3) // 4] * len(streams)

    threads = [Thread(work, number) for number in range(threads_)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.finish(580)
    assert not failures, failures[:5]
    if len(memory) >= 8:
        warm = max(memory[: len(memory) // 4])
        assert max(memory[-3:]) < warm + (64 << 20), [size >> 20 for size in memory]


class Thread(threading.Thread):
    """A thread whose exception comes out of `finish`."""

    def __init__(self, target, *args) -> None:
        super().__init__(daemon=True)
        self.call, self.args, self.error = target, args, None

    def run(self) -> None:
        try:
            self.call(*self.args)
        except BaseException as error:
            self.error = error

    def finish(self, timeout: float) -> None:
        self.join(timeout)
        assert not self.is_alive()
        if self.error is not None:
            raise self.error


@pytest.mark.parametrize("kind", ["add_callback", "launch_host_func", "then"])
def test_a_full_queue_does_not_deadlock_with_a_callback_at_its_head(stream, device, kind):
    """5,000 memsets behind a pending Python callback: the driver blocks the enqueuer, who holds no GIL."""
    array = rs.device_empty(64, np.uint8, device)
    go, started = threading.Event(), threading.Event()

    def wait(*_status):
        started.set()
        return go.wait(60)

    completion = getattr(stream, kind)(wait)
    assert started.wait(30)

    def fill() -> None:
        for number in range(5000):
            stream.fill(array, number % 256)

    spinning = True
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)

    def spin() -> None:
        while spinning:
            sum(range(1000))

    threads = [Thread(fill), Thread(spin)]
    for thread in threads:
        thread.start()
    # The enqueuer is at the limit or past it whatever happens here; the callback ends in any case.
    threading.Timer(0.2, go.set).start()
    threads[0].finish(60)
    spinning = False
    threads[1].finish(60)
    sys.setswitchinterval(interval)
    assert completion.result(60) is True
    stream.synchronize(60)
    assert (array.to_host(stream) == 4999 % 256).all()


def test_enqueues_from_a_continuation_and_from_outside_at_once(device):
    stream, other = rs.Stream(device), rs.Stream(device)
    count = 0

    def again(left: int) -> None:
        nonlocal count
        count += 1
        if left:
            stream.then(again, left - 1)
            other.add_callback(lambda _status: None)
        else:
            done.set()

    done = threading.Event()
    stream.then(again, 500)
    for _ in range(2000):
        other.then(int)
        stream.add_callback(lambda _status: None)
    assert done.wait(60)
    assert count == 501


@pytest.mark.parametrize("what", ["synchronize", "event", "result", "wait"])
def test_a_blocked_call_lets_other_threads_run(stream, device, what):
    hold = rs.testing.hold(stream)
    event, completion = stream.record(), stream.completion()
    call = {
        "synchronize": stream.synchronize,
        "event": event.synchronize,
        "result": completion.result,
        "wait": lambda: rs.wait([completion]),
    }[what]
    thread = Thread(call)
    thread.start()
    beats = 0
    ends = time.monotonic() + 0.3
    while time.monotonic() < ends:
        beats += 1
    assert beats > 1000
    assert thread.is_alive()
    hold.release()
    thread.finish(30)


def test_a_blocked_device_synchronize_lets_other_threads_run(stream, device):
    hold = rs.testing.hold(stream)
    thread = Thread(device.synchronize)
    thread.start()
    assert sum(1 for _ in range(10_000)) == 10_000
    hold.release()
    thread.finish(30)


@pytest.mark.parametrize("what", ["synchronize", "event", "result", "wait", "as_completed", "future", "to_host"])
def test_ctrl_c_ends_a_wait_and_leaves_the_stream_sound(program, what):
    out = program(
        f"""
        import os, signal, threading, time
        # A shell that runs something in the background has it ignore the signal.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        stream = rs.Stream()
        hold = rs.testing.hold(stream)
        event, completion, array = stream.record(), stream.then(lambda: 5), rs.device_empty(4)
        call = {{
            "synchronize": stream.synchronize,
            "event": event.synchronize,
            "result": completion.result,
            "wait": lambda: rs.wait([completion]),
            "as_completed": lambda: list(rs.as_completed([completion])),
            "future": completion.future().result,
            "to_host": lambda: array.to_host(stream),
        }}[{what!r}]
        sent = []
        def interrupt():
            sent.append(time.monotonic())
            os.kill(os.getpid(), signal.SIGINT)
        threading.Timer(0.3, interrupt).start()
        try:
            call()
        except KeyboardInterrupt:
            late = time.monotonic() - sent[0]
            print(late)
        hold.release()
        stream.synchronize(30)
        assert completion.result(30) == 5
        """
    )
    assert float(out) < 0.2


def test_waiting_burns_little(stream):
    rs.testing.spin(stream, 1_000_000)
    before = time.thread_time()
    stream.synchronize(60)
    assert time.thread_time() - before < 0.1


def test_awaits_and_switches_with_a_tiny_switch_interval(device):
    import asyncio

    def work() -> None:
        async def main() -> None:
            stream = rs.Stream(device)

            async def one(number):
                return await stream.then(lambda: number)

            assert await asyncio.gather(*[one(number) for number in range(500)]) == list(range(500))

        asyncio.run(main())

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        threads = [Thread(work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.finish(60)
    finally:
        sys.setswitchinterval(interval)


def test_payloads_of_four_streams_stay_intact_and_in_order(device):
    streams = [rs.Stream(device) for _ in range(4)]
    got: list[list[bytes]] = [[] for _ in streams]
    for number in range(500):
        for index, stream in enumerate(streams):
            payload = bytes([index]) * 16 + number.to_bytes(4, "little")
            stream.then(got[index].append, payload)
    for stream in streams:
        stream.then(int).result(60)
    for index, payloads in enumerate(got):
        assert payloads == [bytes([index]) * 16 + number.to_bytes(4, "little") for number in range(500)]


def test_events_are_collected_while_callbacks_are_pending(device):
    streams = [rs.Stream(device) for _ in range(4)]
    for _ in range(1000):
        for stream in streams:
            stream.add_callback(lambda _status: None)
        rs.Event(device).record(streams[0])
    gc.collect()
    for stream in streams:
        stream.synchronize(60)


def test_memory_is_freed_in_a_loop_while_callbacks_are_pending(device):
    streams = [rs.Stream(device) for _ in range(4)]
    last = []
    for _ in range(200):
        last = [stream.add_callback(lambda _status: sum(range(100))) for stream in streams]
        array = rs.device_empty(1 << 16, np.uint8, device)
        streams[0].fill(array, 1)
        del array
    for completion in last:
        completion.result(60)


def test_memory_is_dropped_and_made_while_a_callback_waits_for_who_does_it(device):
    """The driver's own cuMemFree would wait for the callback, and keep the others' calls waiting with it."""
    stream, other = rs.Stream(device), rs.Stream(device)
    go, started = threading.Event(), threading.Event()
    arrays = [make(1 << 16, np.uint8, device) for make in (rs.pinned_empty, rs.managed_empty, rs.device_empty)]

    def wait(_status):
        started.set()
        return go.wait(60)

    completion = stream.add_callback(wait)
    assert started.wait(30)

    def work() -> None:
        for size in (1 << 16, 1 << 17, 1 << 20):
            arrays.clear()
            gc.collect()
            arrays.extend(make(size, np.uint8, device) for make in (rs.pinned_empty, rs.managed_empty, rs.device_empty))
            with rs.Stream(device) as third:
                third.record()
        go.set()

    thread = Thread(work)
    thread.start()
    thread.finish(30)
    assert completion.result(60) is True
    assert other.query()


def test_streams_are_closed_while_others_use_them(device):
    for _ in range(50):
        stream = rs.Stream(device)
        barrier = threading.Barrier(3)

        def use(stream=stream, barrier=barrier) -> None:
            barrier.wait(30)
            try:
                for _ in range(50):
                    stream.then(int)
                    stream.query()
            except rs.ClosedError:
                pass

        threads = [Thread(use), Thread(use)]
        for thread in threads:
            thread.start()
        barrier.wait(30)
        stream.close()
        for thread in threads:
            thread.finish(30)


def test_callbacks_run_while_every_worker_of_continuations_is_blocked(device):
    """More continuations than there are threads for wait for what a callback does."""
    ready = threading.Event()
    streams = [rs.Stream(device) for _ in range(270)]
    waiting = [stream.then(ready.wait, 60) for stream in streams]
    rs.Stream(device).add_callback(lambda _status: ready.set()).result(60)
    assert rs.wait(waiting, 60).not_done == set()
    assert all(completion.result() for completion in waiting)


@pytest.mark.parametrize(
    "wait",
    [
        lambda completion: rs.wait([completion], 60),
        lambda completion: list(rs.as_completed([completion], 60)),
        lambda completion: completion.future().result(60),
        lambda completion: asyncio.run(awaited(completion)),
    ],
    ids=["wait", "as_completed", "future", "await"],
)
def test_news_needs_no_worker_of_continuations(device, stream, wait):
    """As many continuations as there are threads for wait for a completion."""
    entered = threading.Semaphore(0)
    # An event loop has five descriptors.
    before, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(before, min(most, 4096)), most))

    def block():
        entered.release()
        wait(news)

    streams = [rs.Stream(device) for _ in range(260)]
    with rs.testing.hold(stream):
        news = stream.completion()
        waiting = [stream.then(block) for stream in streams]
        for _ in range(256):
            assert entered.acquire(timeout=60)
    assert rs.wait(waiting, 60).not_done == set()
    assert [completion.exception() for completion in waiting] == [None] * 260


def test_callbacks_run_while_functions_of_many_futures_block(device, stream):
    entered, go = threading.Semaphore(0), threading.Event()

    def block(_future):
        entered.release()
        go.wait(60)

    with rs.testing.hold(stream):
        futures = [stream.completion().future() for _ in range(256)]
        for future in futures:
            future.add_done_callback(block)
    for _ in range(256):
        assert entered.acquire(timeout=60)
    assert rs.Stream(device).add_callback(lambda status: status.ok).result(60)
    go.set()


def test_who_holds_the_gil_is_not_met_with_ever_more_threads(device):
    import ctypes

    def threads():
        return len(os.listdir("/proc/self/task"))

    streams = [rs.Stream(device) for _ in range(300)]
    assert rs.wait([stream.then(int) for stream in streams], 60).not_done == set()
    hold = rs.testing.hold(streams[0])
    continuations = [stream.then(int) for stream in streams]
    # With the GIL held, as a function of a PyDLL is called.
    hold.release()
    before = threads()
    ctypes.PyDLL(None).usleep(100_000)
    assert threads() < before + 16
    assert rs.wait(continuations, 60).not_done == set()


async def awaited(completion):
    return await completion


def test_workers_that_end_leave_no_thread_state_behind(program):
    out = program(
        """
        import ctypes, threading
        api = ctypes.pythonapi
        for name in ("PyInterpreterState_Get", "PyInterpreterState_ThreadHead", "PyThreadState_Next"):
            getattr(api, name).restype = ctypes.c_void_p
        api.PyInterpreterState_ThreadHead.argtypes = api.PyThreadState_Next.argtypes = [ctypes.c_void_p]
        def states():
            state, count = api.PyInterpreterState_ThreadHead(api.PyInterpreterState_Get()), 0
            while state:
                state, count = api.PyThreadState_Next(state), count + 1
            return count
        streams = [rs.Stream() for _ in range(50)]
        for _ in range(20):
            go, started = threading.Event(), threading.Semaphore(0)
            waiting = [stream.then(lambda: (started.release(), go.wait(60))) for stream in streams]
            for _ in streams:
                assert started.acquire(timeout=60)
            go.set()
            assert not rs.wait(waiting, 60).not_done
        print(states())
        """
    )
    assert int(out) < 150


def test_polling_a_completion_does_not_make_it_grow(stream):
    class Waiter:
        pass

    hold = rs.testing.hold(stream)
    completion = stream.completion()
    before = len(gc.get_objects())
    for _ in range(1000):
        assert rs.wait([completion], 0).not_done
    gc.collect()
    assert len(gc.get_objects()) < before + 500
    hold.release()
    completion.result(30)


def test_what_a_cancelled_callback_or_a_copy_held_is_let_go_of_without_another_call(stream, device):
    class Thing:
        def __del__(self) -> None:
            gone.release()

    class Array(np.ndarray):
        def __del__(self) -> None:
            gone.release()

    gone = threading.Semaphore(0)
    hold = rs.testing.hold(stream)
    thing, array = Thing(), np.zeros(4).view(Array)
    target = rs.device_empty(4, device=device)
    completion = stream.add_callback(lambda _status, _thing: None, thing)
    completion.cancel()
    stream.copy(target, array)
    del thing, array
    hold.release()
    assert gone.acquire(timeout=30)
    assert gone.acquire(timeout=30)


def test_a_slow_continuation_does_not_hold_up_another_stream(device):
    slow, quick = rs.Stream(device), rs.Stream(device)
    go = threading.Event()
    blocked = slow.then(go.wait, 60)
    assert [quick.then(lambda n=n: n).result(30) for n in range(100)] == list(range(100))
    assert not blocked.done()
    go.set()
    assert blocked.result(30) is True


@pytest.mark.gpu_only
def test_an_enqueuer_that_holds_the_gil_does_not_deadlock_with_continuations(stream, device):
    """Driver calls of another library, with the GIL held and the queue full, beside pending continuations."""
    import ctypes

    driver = ctypes.PyDLL("libcuda.so.1")
    driver.cuCtxSetCurrent.argtypes = [ctypes.c_void_p]
    driver.cuMemsetD8Async.argtypes = [ctypes.c_uint64, ctypes.c_ubyte, ctypes.c_size_t, ctypes.c_void_p]
    array = rs.device_empty(64, np.uint8, device)
    assert driver.cuCtxSetCurrent(device.context_handle) == 0
    completions = []
    for number in range(5000):
        if number % 10 == 0:
            completions.append(stream.then(int))
        assert driver.cuMemsetD8Async(array.ptr, 1, 64, stream.handle) == 0
    assert rs.wait(completions, 60).not_done == set()


@pytest.mark.gpu_only
def test_awaits_while_another_thread_calls_the_driver_with_the_gil_held(device):
    import asyncio
    import ctypes

    driver = ctypes.PyDLL("libcuda.so.1")
    stop = threading.Event()

    def hog() -> None:
        assert driver.cuCtxSetCurrent(ctypes.c_void_p(device.context_handle)) == 0
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        while not stop.is_set():
            driver.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total))

    def work() -> None:
        async def main() -> None:
            stream = rs.Stream(device)

            async def one():
                return await stream.completion()

            await asyncio.gather(*[one() for _ in range(500)])

        asyncio.run(main())

    hogging = Thread(hog)
    hogging.start()
    threads = [Thread(work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.finish(60)
    stop.set()
    hogging.finish(30)


def test_a_signal_handler_that_raises_ends_the_wait(stream):
    class Stop(Exception):
        pass

    def handler(_number, _frame):
        raise Stop

    before = signal.signal(signal.SIGALRM, handler)
    hold = rs.testing.hold(stream)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(Stop):
            stream.synchronize(60)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    hold.release()
    stream.synchronize(30)
