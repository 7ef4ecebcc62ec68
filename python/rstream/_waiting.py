"""Waiting for completions: many of them, in asyncio, and as futures."""

from __future__ import annotations

import asyncio
import concurrent.futures
import math
import threading
import time
import weakref
from collections.abc import Awaitable, Iterable, Iterator
from typing import Any, Literal, NamedTuple, TypeVar, overload

from rstream import _core
from rstream._errors import InvalidValueError, WaitTimeoutError

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
            hint = ": its .completion() is one" if isinstance(completion, _core.Stream | _core.Event) else ""
            raise TypeError(f"{completion!r} is no Completion{hint}")
    return result


def _left(deadline: float | None) -> float | None:
    if deadline is None:
        return None
    return max(0.0, deadline - time.monotonic())


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
    # Those that are done need not be listened for.
    done = {completion for completion in pending if completion.done()}
    pending -= done
    if _is_met(return_when, done) or not pending:
        return DoneAndNotDone(done, pending)
    listened = list(pending)
    with _core._Finished(listened) as finished:
        while pending:
            number = finished.get(_left(deadline))
            if number is None:
                break
            completion = listened[number]
            pending.discard(completion)
            done.add(completion)
            # The first to be done are given together.
            if (return_when != "FIRST_COMPLETED" or finished.empty()) and _is_met(return_when, [completion]):
                break
    return DoneAndNotDone(done, pending)


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
async def gather(
    completions: Iterable[_core.Completion[Any]], *others: object, return_exceptions: bool = False
) -> list[Any]:
    """Await completions and return their results in the order given, as `asyncio.gather` does, without a task for each.

    Once all are done, the first failure in that order is raised, or with `return_exceptions` each takes the place of
    its result; a completion that was cancelled has failed with `asyncio.CancelledError`. To cancel the await is to stop
    waiting: the host code still runs. Raises `TypeError` for what is no completion.
    """
    if others or isinstance(completions, Awaitable):
        # As asyncio.gather takes them.
        raise TypeError("gather takes one iterable of completions: write gather([a, b]), not gather(a, b)")
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


def as_completed(
    completions: Iterable[_core.Completion[Any]], timeout: float | None = None
) -> Iterator[_core.Completion[Any]]:
    """Iterate over completions in the order in which they are done.

    Raises `WaitTimeoutError` when not all are done after `timeout` seconds from this call.
    """
    return _iterate(_set(completions), _deadline(timeout))


def _iterate(pending: set[_core.Completion[Any]], deadline: float | None) -> Iterator[_core.Completion[Any]]:
    listened = list(pending)
    with _core._Finished(listened) as finished:
        for left in range(len(listened), 0, -1):
            number = finished.get(_left(deadline))
            if number is None:
                raise WaitTimeoutError(f"{left} of {len(listened)} completions are not done", 909)
            yield listened[number]


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
    """The future of a completion, for which a callback does not wait either."""

    def __init__(self, completion: _core.Completion[Any]) -> None:
        super().__init__()
        self._completion = completion

    # The completion may be done before the future has heard of it, and refuses to be waited for in a callback.

    def result(self, timeout: float | None = None) -> Any:
        if _core.in_callback() and not self.done():
            return self._completion.result(timeout)
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        if _core.in_callback() and not self.done():
            return self._completion.exception(timeout)
        return super().exception(timeout)


def concurrent_future(completion: _core.Completion[Any]) -> concurrent.futures.Future[Any]:
    """`Completion.future`."""
    future = _Future(completion)
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
