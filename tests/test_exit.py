"""The end of the process, and fork: programs that end in the middle of things end well."""

from __future__ import annotations

import time

import pytest


@pytest.mark.parametrize("kind", ["add_callback", "launch_host_func", "then"])
def test_host_code_that_is_due_runs_before_the_end(program, kind):
    """1,000 pending at the end of main: all run, within the exit's time."""
    out = program(
        f"""
        stream = rs.Stream()
        def tick(*_):
            global count
            count += 1
            if count == 1000:
                print("all ran")
        count = 0
        for _ in range(1000):
            stream.{kind}(tick)
        """
    )
    assert out == "all ran\n"


@pytest.mark.parametrize("kind", ["add_callback", "launch_host_func", "then"])
def test_host_code_that_is_not_due_is_given_up(program, kind):
    """1,000 pending on a stream that never goes on: status 0 within 5 seconds, and nothing runs."""
    started = time.monotonic()
    out = program(
        f"""
        import builtins
        stream = rs.Stream()
        builtins.hold = rs.testing.hold(stream)
        completions = [stream.{kind}(print, "ran") for _ in range(500)]
        futures = [completion.future() for completion in completions]
        for _ in range(500):
            stream.{kind}(print, "ran")
        """,
        errors=True,
    )
    assert out == "rstream: Python callables that were not done 1 s (RSTREAM_EXIT_TIMEOUT) after the end: 1000\n"
    assert time.monotonic() - started < 5


def test_the_exit_waits_as_long_as_it_is_told(program):
    out = program(
        """
        import time
        stream = rs.Stream()
        stream.add_callback(lambda status: (time.sleep(2), print("finished")))
        """,
        RSTREAM_EXIT_TIMEOUT="30",
    )
    assert out == "finished\n"


def test_ctrl_c_ends_the_wait_of_the_exit(program):
    out = program(
        """
        import atexit, builtins, signal
        stream = rs.Stream()
        builtins.hold = rs.testing.hold(stream)
        stream.then(print)
        def exit():
            # No thread of Python's: 3.12 starts none at this time.
            signal.signal(signal.SIGALRM, signal.default_int_handler)
            signal.setitimer(signal.ITIMER_REAL, 0.3)
            try:
                rs._exit()
            except KeyboardInterrupt:
                print("interrupted")
        atexit.unregister(rs._exit)
        atexit.register(exit)
        """,
        RSTREAM_EXIT_TIMEOUT="inf",
    )
    assert out == "interrupted\n"


PROGRAMS = {
    "sleeping callback": "rs.Stream().add_callback(lambda status: time.sleep(60))",
    "sleeping host function": "rs.Stream().launch_host_func(time.sleep, 60)",
    "sleeping continuation": "rs.Stream().then(time.sleep, 60)",
    "busy callback": "rs.Stream().add_callback(lambda status: [None for _ in iter(int, 1)])",
    "busy continuation": "rs.Stream().then(lambda: [None for _ in iter(int, 1)])",
    "blocked on a lock": "rs.Stream().then(threading.Lock().acquire) and rs.Stream().then(threading.Event().wait)",
    "waiting thread": (
        "s = rs.Stream(); keep = rs.testing.hold(s); "
        "threading.Thread(target=s.synchronize, daemon=True).start(); "
        "threading.Thread(target=s.completion().result, daemon=True).start()"
    ),
    "live objects": (
        "s = rs.Stream(); e = s.record(); a = rs.device_empty(9); "
        "p = np.asarray(rs.pinned_empty(9)); c = s.completion()"
    ),
    "cycle": "c = rs.Stream().completion(); l = [c]; l.append(l); c.add_done_callback(l.append)",
    "unretrieved": "c = rs.Stream().then(lambda: 1); del c",
    "enqueues for ever": "s = rs.Stream()\ndef again(): s.then(again)\nagain()",
    "awaits in a loop that is never closed": (
        "async def wait(c): await c\n"
        "s = rs.Stream(); keep = rs.testing.hold(s); l = asyncio.new_event_loop()\n"
        "l.create_task(wait(s.completion())); l.create_task(wait(s.then(int))); l.call_soon(l.stop); l.run_forever()"
    ),
    "awaits in a daemon thread": (
        "async def wait(s):\n    while True: await s.then(int); await s.completion()\n"
        "threading.Thread(target=asyncio.run, args=(wait(rs.Stream()),), daemon=True).start(); time.sleep(0.1)"
    ),
    "system exit in main": "rs.Stream().then(time.sleep, 60); import sys; sys.exit(0)",
}


# Python code that a worker runs beside the callable itself, and in which the ending interpreter may end the worker.
PROGRAMS |= {
    "busy finalizer of an argument": "rs.Stream().then(lambda a: None, Busy())",
    "busy finalizer of a callback's argument": "rs.Stream().add_callback(lambda status, a: None, Busy())",
    "busy finalizer of a result": "rs.Stream().then(Busy)",
    "busy finalizer in a completion's": "h = [rs.Stream().then(Busy)]; rs.wait(h); rs.Stream().then(h.clear)",
    "busy finalizer of a cancelled argument": (
        "s = rs.Stream(); keep = rs.testing.hold(s); c = s.then(print, Busy()); c.cancel(); keep.release()"
    ),
    "busy hook": "sys.unraisablehook = Busy.spin; rs.Stream().then(lambda: 1 / 0)",
    "busy done callback": "c = rs.Stream().then(int); c.add_done_callback(Busy.spin)",
    "daemon threads that meet errors": "[threading.Thread(target=meet_errors, daemon=True).start() for _ in range(4)]",
}
HELPERS = """
import asyncio, sys, threading, time
import numpy as np

class Busy:
    def __del__(self):
        self.spin()
    @staticmethod
    def spin(*_):
        while True:
            pass

def meet_errors():
    while True:
        rs.Stream().then(lambda: 1 / 0).exception()
"""


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_ends_well(program, name):
    started = time.monotonic()
    program(f"{HELPERS}\n{PROGRAMS[name]}\n", timeout=30, RSTREAM_EXIT_TIMEOUT="0.2")
    assert time.monotonic() - started < 5


FAILURES = {
    "of a dropped continuation": "s.then(lambda: 1 / 0)",
    "of a dropped callback": "s.add_callback(lambda status: 1 / 0)",
    "of a completion that lives to the end": "c = s.then(lambda: 1 / 0); s.synchronize()",
    "of a done callback": "s.then(int).add_done_callback(lambda c: 1 / 0)",
    # Waited for, since the exit waits for no point of a stream; to wait is not to look at the error.
    "after a fault": ("h = rs.testing.hold(s); rs.testing.fault(s); c = s.completion(); h.release(); rs.wait([c], 30)"),
}


@pytest.mark.parametrize("name", FAILURES)
def test_a_failure_at_the_end_of_a_program_is_told_once(program, name):
    out = program(f"s = rs.Stream()\n{FAILURES[name]}\n", errors=True)
    assert out.count("CUDA_ERROR_ILLEGAL_ADDRESS" if name == "after a fault" else "ZeroDivisionError") == 1, out
    assert "Exception ignored in" in out


def test_a_done_callback_that_is_due_runs_before_the_end(program):
    out = program(
        """
        stream = rs.Stream()
        rs.testing.spin(stream, 20_000)
        stream.completion().add_done_callback(lambda completion: print("told"))
        """
    )
    assert out == "told\n"


@pytest.mark.stress
@pytest.mark.timeout(300)
def test_programs_end_well_again_and_again(program):
    """Races at the end of the interpreter show in repetition only."""
    for number in range(40):
        program(
            f"""
            import threading, time
            streams = [rs.Stream() for _ in range(4)]
            for _ in range(200):
                for stream in streams:
                    stream.then(time.sleep, 0.0001)
                    stream.add_callback(lambda status: None)
            threading.Timer({number % 5} / 1000, streams[0].synchronize).start()
            """,
            RSTREAM_EXIT_TIMEOUT=str(number % 3 / 100),
        )


def test_a_forked_child_gets_a_clear_error_and_the_parent_goes_on(program):
    out = program(
        """
        import os, warnings
        warnings.simplefilter("ignore")
        stream = rs.Stream()
        hold = rs.testing.hold(stream)
        completion = stream.then(lambda: "parent goes on")
        child = os.fork()
        if child == 0:
            calls = [stream.query, completion.result, lambda: rs.wait([completion]), lambda: stream.then(print)]
            for call in [*calls, lambda: next(completion.__await__())]:
                try:
                    call()
                except RuntimeError as error:
                    print("forked" in str(error), flush=True)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        hold.release()
        print(completion.result(30))
        """
    )
    assert out == "True\n" * 5 + "parent goes on\n"


def test_after_the_exit_of_rstream_a_wait_is_an_error_and_no_hang(program):
    out = program(
        """
        import atexit, sys
        def late():
            for call in (lambda: rs.wait([completion]), completion.future, lambda: next(completion.__await__())):
                try:
                    call()
                except rs.ShutdownError as error:
                    print(type(error).__name__)
        # Handlers run in the reverse order: this one after rstream's own.
        stream = rs.Stream()
        hold = rs.testing.hold(stream)
        completion = stream.then(print)
        own = [handler for handler in [rs._exit] if atexit.unregister(handler) is None]
        atexit.register(late)
        atexit.register(own[0])
        """,
        RSTREAM_EXIT_TIMEOUT="0",
    )
    assert out == "ShutdownError\n" * 3


def test_a_forked_child_may_end_as_it_likes(program):
    out = program(
        """
        import os, sys, warnings
        warnings.simplefilter("ignore")
        stream = rs.Stream()
        stream.then(lambda: None).result(30)
        child = os.fork()
        if child == 0:
            del stream
            sys.exit(0)
        print(os.waitpid(child, 0)[1])
        """
    )
    assert out == "0\n"


def test_the_package_imports_without_touching_a_device(program):
    program(
        """
        import threading
        assert threading.active_count() == 1
        """
    )


def test_a_stream_waits_for_no_callback_that_the_exit_has_cut_off(program):
    """What waits for the stream after the interpreter's exit functions would hang otherwise."""
    out = program(
        """
        import atexit, os, threading
        stream, entered = rs.Stream(), threading.Event()

        def block(*_):
            entered.set()
            threading.Event().wait()

        stream.add_callback(block)
        entered.wait(30)
        rs._exit()
        atexit.unregister(rs._exit)
        stream.synchronize(30)
        print("went on", flush=True)
        os._exit(0)
        """,
        RSTREAM_EXIT_TIMEOUT="0.1",
    )
    assert out == "went on\n"


@pytest.mark.parametrize("signal", ["memory", "driver"])
@pytest.mark.parametrize("kind", ["then", "add_callback"])
@pytest.mark.parametrize(
    ("end", "status"),
    [("pass", 0), ("sys.exit(5)", 5), ("raise LookupError('in the child')", 1)],
    ids=["return", "exit", "raise"],
)
def test_a_child_that_host_code_forked_ends_with_the_function(program, signal, kind, end, status):
    program(
        f"""
        import os, sys
        def fork(*_status):
            child = os.fork()
            if child == 0:
                {end}
            return child

        stream = rs.Stream(signal={signal!r})
        child = stream.{kind}(fork).result(30)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == {status}
        assert stream.then(int).result(30) == 0
        """
    )
