"""Waiting for completions: many of them, in asyncio, and as futures."""

from __future__ import annotations

import asyncio
import concurrent.futures
import math
import threading
import time
import weakref
from collections.abc import Iterable, Iterator
from typing import Any, Literal, NamedTuple, TypeVar, overload

from rstream import _core
from rstream._errors import InvalidValueError, NotPermittedError, WaitTimeoutError

_T = TypeVar("_T")


class DoneAndNotDone(NamedTuple):
    """What `wait` returns: the completions that are done, and those that are not."""

    done: set[_core.Completion[Any]]
    not_done: set[_core.Completion[Any]]


def _deadline(timeout: float | None) -> float | None:
    if timeout is None:
        return None
    timeout = float(timeout)
    if math.isnan(timeout) or timeout < 0:
        raise InvalidValueError(f"timeout={timeout}: expected seconds of at least 0, or None", 1)
    return time.monotonic() + timeout


def _set(completions: Iterable[_core.Completion[Any]]) -> set[_core.Completion[Any]]:
    result = set(completions)
    for completion in result:
        if not isinstance(completion, _core.Completion):
            raise TypeError(f"{completion!r} is no Completion")
    return result


def _left(deadline: float | None) -> float | None:
    if deadline is None:
        return None
    return max(0.0, deadline - time.monotonic())


class _Listener:
    """Gets each completion when it is done. Afterwards nothing is left with those that are not."""

    def __init__(self, completions: Iterable[_core.Completion[Any]]) -> None:
        self._completions = list(completions)
        self._finished = _core._Finished()
        self._waiters: list[int | None] = []

    def __enter__(self) -> _Listener:
        for number, completion in enumerate(self._completions):
            self._waiters.append(completion._tell(self._finished, number))
        return self

    def __exit__(self, *_: object) -> None:
        for completion, waiter in zip(self._completions, self._waiters, strict=False):
            if waiter is not None and not completion.done():
                completion._remove_waiter(waiter)

    def next(self, deadline: float | None) -> _core.Completion[Any] | None:
        """The next that is done, for a callback only if one is; `None` after the deadline."""
        number = self._finished.get(_left(deadline))
        return None if number is None else self._completions[number]

    def empty(self) -> bool:
        """Whether there is none now."""
        return self._finished.empty()


def wait(
    completions: Iterable[_core.Completion[Any]],
    timeout: float | None = None,
    return_when: Literal["ALL_COMPLETED", "FIRST_COMPLETED", "FIRST_EXCEPTION"] = "ALL_COMPLETED",
) -> DoneAndNotDone:
    """Wait for completions, as `concurrent.futures.wait` does for futures.

    Returns the sets of those that are done and that are not when the condition is met or `timeout` seconds have passed.
    Raises `InvalidValueError` for a negative time-out or another `return_when`.
    """
    if return_when not in ("ALL_COMPLETED", "FIRST_COMPLETED", "FIRST_EXCEPTION"):
        raise InvalidValueError(
            f"return_when={return_when!r}: expected ALL_COMPLETED, FIRST_COMPLETED or FIRST_EXCEPTION", 1
        )
    deadline = _deadline(timeout)
    pending = _set(completions)
    # Those that are done need no listener.
    done = {completion for completion in pending if completion.done()}
    pending -= done
    if _is_met(return_when, done) or not pending:
        return DoneAndNotDone(done, pending)
    with _Listener(pending) as listener:
        return _gather(done, pending, listener, deadline, return_when)


def _is_met(return_when: str, done: Iterable[_core.Completion[Any]]) -> bool:
    """Whether completions that are done end a wait for more."""
    if return_when == "FIRST_EXCEPTION":
        return any(completion.cancelled() or completion.exception() is not None for completion in done)
    return return_when == "FIRST_COMPLETED" and any(True for _ in done)


@overload
async def gather(
    completions: Iterable[_core.Completion[_T]], *, return_exceptions: Literal[False] = False
) -> list[_T]: ...
@overload
async def gather(
    completions: Iterable[_core.Completion[_T]], *, return_exceptions: bool
) -> list[_T | BaseException]: ...
async def gather(completions: Iterable[_core.Completion[Any]], *, return_exceptions: bool = False) -> list[Any]:
    """Await completions and return their results in the order given, as `asyncio.gather` does, without a task for each.

    Once all are done, the first failure in that order is raised, or with `return_exceptions` each takes the place of
    its result; a completion that was cancelled has failed with `asyncio.CancelledError`. To cancel the await is to stop
    waiting: the host code still runs. Raises `TypeError` for what is no completion.
    """
    given = list(completions)
    _set(given)
    task = asyncio.current_task()
    asked = task.cancelling() if task else 0
    results: list[Any] = []
    failure: BaseException | None = None
    for completion in given:
        try:
            results.append(await completion)
        except BaseException as error:
            if isinstance(error, asyncio.CancelledError):
                # Of the task, unless it is the completion's own.
                own = completion.cancelled() and not (task and task.cancelling() > asked)
            else:
                own = isinstance(error, Exception) or (completion.done() and completion.exception() is error)
            if not own:
                raise
            results.append(error)
            failure = failure or error
    if failure is None or return_exceptions:
        return results
    try:
        raise failure
    finally:
        # The traceback has this frame, which must not have the failure, nor who has it.
        del failure, results, completions, given, completion


def _gather(
    done: set[_core.Completion[Any]],
    pending: set[_core.Completion[Any]],
    listener: _Listener,
    deadline: float | None,
    return_when: str,
) -> DoneAndNotDone:
    while pending:
        completion = listener.next(deadline)
        if completion is None:
            break
        pending.discard(completion)
        done.add(completion)
        # The first to be done are given together.
        if (return_when != "FIRST_COMPLETED" or listener.empty()) and _is_met(return_when, [completion]):
            break
    return DoneAndNotDone(done, pending)


def as_completed(
    completions: Iterable[_core.Completion[Any]], timeout: float | None = None
) -> Iterator[_core.Completion[Any]]:
    """Iterate over completions in the order in which they are done.

    Raises `WaitTimeoutError` when not all are done after `timeout` seconds from this call.
    """
    return _iterate(_set(completions), _deadline(timeout))


def _iterate(pending: set[_core.Completion[Any]], deadline: float | None) -> Iterator[_core.Completion[Any]]:
    with _Listener(pending) as listener:
        count = len(pending)
        for number in range(count):
            completion = listener.next(deadline)
            if completion is None:
                raise WaitTimeoutError(f"{count - number} of {count} completions are not done", 909)
            yield completion


def _settle(future: concurrent.futures.Future[Any], completion: _core.Completion[Any]) -> None:
    """Give a future the end of `completion`."""
    if completion.cancelled():
        # Seen here, so that it is not reported as lost.
        completion.exception()
        future.cancel()
        return
    error = completion.exception()
    if error is None:
        future.set_result(completion.result())
    elif isinstance(error, StopIteration):
        # A future cannot carry it.
        wrapped = RuntimeError("host code raised StopIteration")
        wrapped.__cause__ = error
        future.set_exception(wrapped)
    else:
        future.set_exception(error)


# Of event loops that watch no sockets; others have theirs.
inboxes: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, object] = weakref.WeakKeyDictionary()


class _Future(concurrent.futures.Future[Any]):
    """A future that a callback does not wait for either."""

    def _may_wait(self) -> None:
        if not self.done() and _core.in_callback():
            raise NotPermittedError(
                "a callback must not wait for a completion: what it waits for may be queued behind it", 800
            )

    def result(self, timeout: float | None = None) -> Any:
        self._may_wait()
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self._may_wait()
        return super().exception(timeout)


def concurrent_future(completion: _core.Completion[Any]) -> concurrent.futures.Future[Any]:
    """`Completion.future`."""
    future = _Future()
    waiter: int | None = None
    # Whoever takes it says, once, that the future runs or was cancelled.
    decided = threading.Lock()

    def tell(completion: _core.Completion[Any]) -> None:
        if completion.cancelled() or (decided.acquire(blocking=False) and future.set_running_or_notify_cancel()):
            _settle(future, completion)

    def forget(future: concurrent.futures.Future[Any]) -> None:
        if not future.cancelled():
            return
        if waiter is not None:
            completion._remove_waiter(waiter)
        if decided.acquire(blocking=False):
            # So that those who wait for several futures hear of it.
            future.set_running_or_notify_cancel()

    future.add_done_callback(forget)
    waiter = completion._add_waiter(tell)
    return future
