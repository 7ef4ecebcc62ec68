"""How the host is told: by memory that a thread polls, or by the driver's callbacks."""

from __future__ import annotations

import ctypes
import threading
import time
import weakref

import pytest
from helpers import freed

import rstream as rs

SIGNALS = ["memory", "driver"]


@pytest.fixture(params=SIGNALS)
def signalled(request, device):
    """A stream under each signal."""
    with rs.Stream(device, signal=request.param) as stream:
        assert stream.signal == request.param
        yield stream


def test_everything_runs_once_in_order(signalled):
    seen, kinds = [], (signalled.add_callback, signalled.launch_host_func, signalled.then)
    pending = [kinds[number % 3](lambda *_, number=number: seen.append(number)) for number in range(3000)]
    notice = signalled.completion()
    rs.wait([*pending, notice], 60)
    assert [number for number in seen if number % 3 != 2] == [number for number in range(3000) if number % 3 != 2]
    assert [number for number in seen if number % 3 == 2] == list(range(2, 3000, 3))
    assert notice.result(0) is None
    assert signalled.pending == 0


def test_more_than_any_queue_has_room_for_does_not_block(signalled):
    ran = []
    with rs.testing.hold(signalled):
        pending = [signalled.add_callback(lambda status: ran.append(status)) for _ in range(5000)]
        assert not ran
    rs.wait(pending, 60)
    assert len(ran) == 5000


def test_continuations_stay_in_order_when_the_signal_changes(device):
    stream, seen = rs.Stream(device, signal="memory"), []
    with rs.testing.hold(stream):
        pending = [stream.then(seen.append, number) for number in range(1000)]
    rs.wait(pending, 60)
    assert seen == list(range(1000))


def test_a_slow_callback_does_not_hold_up_other_streams(device):
    slow, quick = rs.Stream(device, signal="memory"), rs.Stream(device, signal="memory")
    entered, leave, seen = threading.Event(), threading.Event(), []

    def block(status):
        entered.set()
        assert leave.wait(60)

    blocked = slow.add_callback(block)
    assert entered.wait(60)
    # It ends at all: under the driver's signal it would not.
    quick.add_callback(seen.append).result(60)
    assert seen == [0]
    assert not blocked.done()
    leave.set()
    blocked.result(60)


def test_many_streams_can_be_blocked_in_callbacks(device):
    """More than may wait on memory: the others use the driver's callbacks."""
    streams = [rs.Stream(device, signal="memory") for _ in range(20)]
    gate, counts = threading.Event(), []

    def block(status):
        assert gate.wait(60)
        counts.append(1)

    pending = [stream.add_callback(block) for stream in streams]
    gate.set()
    rs.wait(pending, 60)
    assert len(counts) == 20


def test_a_full_queue_does_not_use_up_the_threads_that_poll(device):
    """A question about a stream blocks while somebody waits for room in its queue, and such are asked every 20 ms."""
    full, other = (rs.Stream(device, signal="memory") for _ in range(2))
    array = rs.device_empty(64, "u1", device)
    with rs.testing.hold(full) as hold, rs.testing.hold(other) as quick:
        waiting, last = full.add_callback(lambda status: 0), other.add_callback(lambda status: 0)

        def fill():
            for _ in range(3000):
                full.fill(array, 1)

        filler = threading.Thread(target=fill)
        filler.start()
        # Longer than it takes to ask 64 times.
        with pytest.raises(TimeoutError):
            waiting.result(2)
        quick.release()
        assert last.result(10) == 0
        assert filler.is_alive()
        hold.release()
        filler.join()
    assert waiting.result(30) == 0


def test_streams_of_one_id_share_a_lane(device):
    stream, seen = rs.Stream(device, signal="memory"), []
    again = rs.Stream.from_external(stream.handle, device)
    pending = []
    for number in range(100):
        pending.append(
            (stream if number % 2 else again).add_callback(lambda status, number=number: seen.append(number))
        )
    rs.wait(pending, 60)
    assert seen == list(range(100))


@pytest.fixture(params=["owner first", "adopted first"])
def handles(request, signalled):
    """Two handles of one stream, in either order: its owner's, and an adopted one.

    Under one of its two values, RSTREAM_SIGNAL says another signal for the adopted one than the owner has.
    """
    other = rs.Stream.from_external(signalled.handle, signalled.device)
    assert other is not signalled
    assert other == signalled
    return (signalled, other) if request.param == "owner first" else (other, signalled)


def test_handles_of_a_stream_have_one_signal(device, signalled):
    other = rs.Stream.from_external(signalled.handle, device)
    third = rs.Stream.from_external(other.handle, device)
    assert {other.signal, third.signal} == {signalled.signal}


def test_continuations_of_two_handles_run_in_order(handles):
    seen = []
    for _ in range(5):
        with rs.testing.hold(handles[0]):
            pending = [handles[number % 2].then(seen.append, number) for number in range(400)]
        rs.wait(pending, 60)
        assert seen == list(range(400))
        seen.clear()


def test_continuations_of_two_handles_of_a_stream_that_is_not_held_run_in_order(handles):
    seen = []
    rs.wait([handles[number % 2].then(seen.append, number) for number in range(2000)], 60)
    assert seen == list(range(2000))


def test_completions_of_two_handles_resolve_in_order(handles):
    for _ in range(20):
        with rs.testing.hold(handles[0]):
            pending = [handles[number % 2].completion() for number in range(400)]
        while not pending[-1].done():
            # From the end on: when one is done, those before it are.
            done = [completion.done() for completion in reversed(pending)]
            assert done == sorted(done)
        assert all(completion.done() for completion in pending)


def test_a_continuation_sees_the_completions_of_another_handle_that_were_queued_before(handles):
    first, second = handles
    for _ in range(5):
        with rs.testing.hold(first):
            pending = []
            for _ in range(200):
                told = first.completion()
                pending.append(second.then(told.done))
        assert all(continuation.result(60) for continuation in pending)


def test_a_completion_is_not_done_at_once_before_that_of_another_handle(handles):
    """A thread that polls may not have told of the first when the stream is idle."""
    first, second = handles
    rs.set_wait_policy("sleep")
    try:
        for _ in range(200):
            with rs.testing.hold(first):
                before = first.completion()
            while not second.query():
                pass
            if second.completion().done():
                assert before.done()
    finally:
        rs.set_wait_policy("adaptive")


def test_a_closed_stream_still_runs_what_it_has(device):
    stream, seen = rs.Stream(device, signal="memory"), []
    with rs.testing.hold(stream):
        pending = [stream.add_callback(seen.append) for _ in range(10)]
        stream.close()
        del stream
    rs.wait(pending, 60)
    assert seen == [0] * 10


def test_words_are_used_again(device):
    for _ in range(600):
        with rs.Stream(device, signal="memory") as stream:
            assert stream.add_callback(int).result(60) == 0


@pytest.mark.parametrize("make", [rs.Stream.legacy_default, rs.Stream.per_thread_default])
def test_default_streams_use_the_drivers(device, make):
    assert make(device).signal == "driver"


def test_the_environment_says_what_auto_is(device, program):
    """Without it, that is the memory signal on a GPU; the software device is quicker with the driver's."""
    best = "driver" if device.is_software else "memory"
    assert program("print(rs.Stream().signal)", RSTREAM_SIGNAL="") == f"{best}\n"
    for signal in SIGNALS:
        assert program("print(rs.Stream().signal)", RSTREAM_SIGNAL=signal) == f"{signal}\n"
    program(
        """
        try:
            rs.Stream()
            raise SystemExit(1)
        except rs.InvalidValueError as error:
            assert "RSTREAM_SIGNAL=fast" in str(error)
        """,
        RSTREAM_SIGNAL="fast",
    )


def test_a_fault_tells_what_is_pending_also_on_other_streams(program):
    program(
        """
        streams = [rs.Stream(signal="memory") for _ in range(5)]
        holds = [rs.testing.hold(stream) for stream in streams[1:]]
        callbacks = [stream.add_callback(lambda status: int(status)) for stream in streams]
        functions = [stream.launch_host_func(int) for stream in streams]
        late = [stream.then(int) for stream in streams[1:]]
        rs.testing.fault(streams[0])
        for callback in callbacks[1:]:
            assert callback.result(30) == 700
        for broken in functions[1:] + late:
            assert isinstance(broken.exception(30), rs.DeviceFaultError)
        """
    )


def test_wait_policies():
    assert rs.wait_policy() == "adaptive"
    for policy in ("sleep", "spin", "adaptive"):
        rs.set_wait_policy(policy)
        assert rs.wait_policy() == policy
    for bad in ("", "fast"):
        with pytest.raises(rs.InvalidValueError, match=f'policy="{bad}"'):
            rs.set_wait_policy(bad)


@pytest.mark.parametrize("policy", ["adaptive", "spin", "sleep"])
def test_host_code_runs_under_each_policy(device, policy):
    rs.set_wait_policy(policy)
    try:
        with rs.Stream(device, signal="memory") as stream:
            assert rs.wait([stream.add_callback(int) for _ in range(100)], 60).not_done == set()
            rs.testing.spin(stream, 5000)
            assert stream.add_callback(int).result(60) == 0
    finally:
        rs.set_wait_policy("adaptive")


def test_a_policy_of_the_environment(program):
    assert program("print(rs.wait_policy())", RSTREAM_WAIT_POLICY="sleep") == "sleep\n"


LIBC = ctypes.CDLL(None)


def test_a_continuation_in_python_keeps_nobody_else_from_running(signalled):
    """While the GIL is held the stream goes on, and native callbacks behind the continuation run."""
    library = ctypes.PyDLL(None, use_errno=True)
    word = ctypes.create_string_buffer(64)
    assert library.sem_init(word, 0, 0) == 0
    limit = (ctypes.c_long * 2)(int(time.time()) + 60, 0)
    post = ctypes.cast(library.sem_post, ctypes.c_void_p).value
    with rs.testing.hold(signalled):
        continuation = signalled.then(int)
        callback = signalled.add_native_callback(post, ctypes.addressof(word), keep_alive=word)
    # With the GIL held, as a function of a PyDLL is called.
    assert library.sem_timedwait(word, limit) == 0, ctypes.get_errno()
    assert callback.result(30) is None
    assert continuation.result(30) == 0


@pytest.mark.parametrize("status", [False, True])
def test_a_native_function_runs_without_python(signalled, status):
    """A ctypes function stands for a compiled one."""
    words = (ctypes.c_uint32 * 2)(7, 0)
    if status:
        # void f(uint32_t status, void *user_data)
        kind = ctypes.CFUNCTYPE(None, ctypes.c_uint32, ctypes.c_void_p)
        function = kind(lambda status, data: ctypes.cast(data, ctypes.POINTER(ctypes.c_uint32)).__setitem__(1, status))
        words[1] = 5
    else:
        kind = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
        function = kind(lambda data: ctypes.cast(data, ctypes.POINTER(ctypes.c_uint32)).__setitem__(1, 7))
    address = ctypes.cast(function, ctypes.c_void_p).value
    token = threading.Event()
    keep = (function, token)
    done = signalled.add_native_callback(address, ctypes.addressof(words), keep_alive=keep, status=status)
    reference = weakref.ref(token)
    del keep, token
    assert done.result(30) is None
    assert list(words) == [7, 0 if status else 7]
    assert freed(reference)


def test_a_function_of_a_library_is_called(signalled):
    table = (ctypes.c_uint8 * 16)()
    # free(NULL): a function of one pointer that does nothing.
    done = signalled.add_native_callback(ctypes.cast(LIBC.free, ctypes.c_void_p).value, 0, keep_alive=table)
    assert done.result(30) is None


@pytest.mark.parametrize("function", [LIBC.free, ctypes.CFUNCTYPE(None)(print), print, None])
def test_what_is_no_address_is_told_how_to_get_one(signalled, function):
    with pytest.raises(TypeError, match=r"address: expected an integer, .* ctypes\.cast\(f, ctypes\.c_void_p\)\.value"):
        signalled.add_native_callback(function)
    with pytest.raises(OverflowError):
        signalled.add_native_callback(-1)
    assert signalled.pending == 0


def test_a_native_callback_after_a_fault(program):
    program(
        """
        import ctypes
        stream, codes, ran = rs.Stream(), [], []
        with_status = ctypes.CFUNCTYPE(None, ctypes.c_uint32, ctypes.c_void_p)(lambda code, data: codes.append(code))
        without = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda data: ran.append(1))
        address = lambda f: ctypes.cast(f, ctypes.c_void_p).value
        with rs.testing.hold(stream):
            rs.testing.fault(stream)
            told = stream.add_native_callback(address(with_status), status=True)
            not_run = stream.add_native_callback(address(without))
        told.result(30)
        assert isinstance(not_run.exception(30), rs.DeviceFaultError)
        assert codes == [700] and not ran
        """
    )


def test_address_0_is_no_function(signalled):
    with pytest.raises(rs.InvalidValueError, match="address=0"):
        signalled.add_native_callback(0)
