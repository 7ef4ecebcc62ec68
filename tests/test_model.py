"""Random programs over streams, events, captures and graphs, checked against a model of what they have to do.

A program is a list of operations as plain data: `(name, thread, *arguments)`. `thread` 1 is a second thread that makes
calls for the first one, so there is one order of calls; the arguments are numbers of streams, events and arrays, or say
how many graphs or executables ago one was made. `programs()` makes programs, `run(device, program)` executes and checks
one. To replay one that failed:

    import rstream as rs, test_model
    test_model.run(rs.Device("soft"), [("begin", 0, 0, "global", None), ("end", 1, 0)])

The model knows for each piece of work what it comes after, as a set of earlier pieces (an integer, a bit for each), and
for each capture its members and nodes. Checked are:

- after each call: that it was refused, with the class and the code that the model says, or was not; `capture_status`
  and `capture_info` of each stream;
- when a stream or an event is reached: that what comes before it has run; behind a hold: that it is not reached;
- at the end: which host code ran and how often, in which order, with what result; the contents of arrays that no race
  decides; the nodes and edges of graphs; that nothing is pending.

The examples are the same in each run with one version of hypothesis, and one way to install it and rstream: it takes
constants for its examples from modules outside of site-packages. With `RSTREAM_MODEL_OUT=file` a line about them is
appended to the file: how many programs, operations and refusals there were of each kind. It is the same for every
device. `RSTREAM_STRESS=n` with n below 300 runs n examples.
"""

from __future__ import annotations

import json
import os
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import CancelledError, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import rstream as rs

STREAMS, EVENTS, ARRAYS, HOLDS = 4, 3, 4, 2
MODES = ["global", "thread_local", "relaxed"]
EXAMPLES = 300
TIMEOUT = 30

REFUSALS = {
    1: rs.InvalidValueError,
    401: rs.CaptureError,
    900: rs.CaptureUnsupportedError,
    901: rs.CaptureInvalidatedError,
    902: rs.CaptureMergeError,
    904: rs.CaptureUnjoinedError,
    905: rs.CaptureIsolationError,
    907: rs.CapturedEventError,
    908: rs.CaptureWrongThreadError,
    909: rs.WaitTimeoutError,
    910: rs.GraphUpdateError,
}


# Programs.

a_stream = st.integers(0, STREAMS - 1)
an_event = st.integers(0, EVENTS - 1)
an_array = st.integers(0, ARRAYS - 1)
ago = st.sampled_from([0, 0, 0, 1, 2])

# Each operation: how often it is drawn, and what its arguments are drawn from.
OPERATIONS: dict[str, tuple[int, list[st.SearchStrategy]]] = {
    "host": (8, [a_stream]),
    "callback": (4, [a_stream]),
    "then": (4, [a_stream]),
    "completion": (3, [a_stream]),
    "cancel": (3, [ago]),
    "fill": (4, [an_array, st.integers(0, 255), a_stream]),
    "copy": (4, [an_array, an_array, a_stream]),
    "record": (6, [a_stream, an_event]),
    "wait_event": (6, [a_stream, an_event]),
    "wait_stream": (6, [a_stream, a_stream]),
    "query": (3, [a_stream]),
    "synchronize": (2, [a_stream]),
    "query_event": (3, [an_event]),
    "synchronize_event": (2, [an_event]),
    "event_completion": (2, [an_event]),
    "new_event": (2, [an_event]),
    "close": (2, [a_stream]),
    "hold": (2, [a_stream]),
    "release": (2, []),
    "allocate": (1, []),
    "look": (1, []),
    "begin": (3, [a_stream, st.sampled_from(MODES), st.sampled_from([None, None, None, "fresh", 0, 1])]),
    "end": (2, [a_stream]),
    "abandon": (2, [a_stream]),
    "break": (1, []),
    "instantiate": (2, [ago]),
    "launch": (5, [ago, a_stream]),
    "clone": (2, [ago]),
    "update": (4, [ago, st.integers(0, 4)]),
}
NAMES = [name for name, (weight, _) in OPERATIONS.items() for _ in range(weight)]

Program = list[tuple]


@st.composite
def operations(draw: st.DrawFn, *names: str) -> tuple:
    """Any operation, or one of `names`; one in eight on the second thread."""
    name = draw(st.sampled_from(names or NAMES))
    thread = int(draw(st.integers(0, 7)) == 7)
    return (name, thread, *(draw(argument) for argument in OPERATIONS[name][1]))


@st.composite
def captures(draw: st.DrawFn) -> Program:
    """A capture with a fork and a join, other operations in between, most of them harmless; then launches of it."""
    any_operations = st.lists(operations(), min_size=1, max_size=8)
    others = st.integers(1, STREAMS - 1)
    origin, thread = draw(a_stream), int(draw(st.integers(0, 7)) == 7)

    def work(stream: int) -> Program:
        name = draw(st.sampled_from(["host", "host", "fill", "copy"]))
        return [(name, thread, *(draw(argument) for argument in OPERATIONS[name][1][:-1]), stream)]

    def depend(later: int, earlier: int) -> Program:
        if draw(st.booleans()):
            return [("wait_stream", thread, later, earlier)]
        event = draw(an_event)
        return [("record", thread, earlier, event), ("wait_event", thread, later, event)]

    other = (origin + draw(others)) % STREAMS
    program = [draw(operations("begin"))]
    program = [("begin", thread, origin, *program[0][3:]), *work(origin)]
    program += depend(other, origin) + work(origin) + work(other)
    program += draw(any_operations)
    if draw(st.booleans()):
        third = (origin + draw(others)) % STREAMS
        program += depend(third, draw(st.sampled_from([origin, other]))) + work(third) + depend(origin, third)
    program += depend(origin, other)
    program += work(origin)
    if draw(st.integers(0, 3)):
        program += [("wait_stream", thread, origin, (origin + step) % STREAMS) for step in (1, 2, 3)]
    ender = thread if draw(st.integers(0, 3)) else 1 - thread
    program += [("end", ender, origin), ("end", thread, origin), ("instantiate", 0, 0)]
    for stream in draw(st.lists(a_stream, min_size=1, max_size=3)):
        program += [("launch", 0, 0, stream), *draw(any_operations)]
    if draw(st.booleans()):
        program += [draw(operations("clone", "release")), draw(operations("update")), ("launch", 0, 0, origin)]
    return program


def interleaved(draw: st.DrawFn, first: Program, second: Program) -> Program:
    """Both in one, each in its order."""
    program, rest = [], [list(reversed(first)), list(reversed(second))]
    while rest[0] and rest[1]:
        program.append(rest[draw(st.integers(0, 1))].pop())
    return program + rest[0][::-1] + rest[1][::-1]


@st.composite
def programs(draw: st.DrawFn) -> Program:
    """Captures with launches, one after the other or at the same time, and other operations between them."""
    program = [draw(operations("hold"))] if draw(st.booleans()) else []
    program += draw(st.lists(operations(), min_size=4, max_size=20))
    for _ in range(draw(st.sampled_from([0, 1, 1, 2, 2, 3, 3]))):
        part = draw(captures())
        program = interleaved(draw, program, part) if draw(st.booleans()) else program + part
    return program + draw(st.lists(operations(), min_size=6, max_size=20))


# The model: what each object of rstream stands for.


@dataclass(eq=False)
class Node:
    work: tuple
    after: tuple[Node, ...]
    real: rs.Node


@dataclass(eq=False)
class Graph:
    real: rs.Graph
    nodes: list[Node]
    state: str = "whole"  # or captured into, or gone

    @property
    def refusal(self) -> int | None:
        return {"whole": None, "captured": 900, "gone": 901}[self.state]


@dataclass(eq=False)
class Exec:
    real: rs.GraphExec
    nodes: list[Node]
    done: int = 0  # what is done when all its launches are


@dataclass(eq=False)
class Stream:
    real: rs.Stream
    tail: int = 0  # what later work comes after
    continued: int = 0  # what later continuations come after too
    capture: Capture | None = None


@dataclass(eq=False)
class Event:
    real: rs.Event
    reached: int = 0  # what it comes after
    recorded: bool = False
    capture: Capture | None = None  # in which it was recorded
    nodes: list[Node] = field(default_factory=list)  # what it stands for there


@dataclass(eq=False)
class Capture:
    real: rs.Capture
    origin: Stream
    mode: str
    thread: int
    into: Graph | None
    nodes: list[Node]
    id: int | None
    members: dict[Stream, list[Node]]  # with what the next node of each depends on
    left: list[Node] = field(default_factory=list)  # what closed members had captured last
    broken: bool = False
    over: bool = False

    @property
    def status(self) -> str:
        return "none" if self.over else "invalidated" if self.broken else "active"

    def is_elsewhere(self, thread: int) -> bool:
        """Whether `thread` may not end it."""
        return self.mode != "relaxed" and self.thread != thread

    def joined(self) -> bool:
        """Whether all that was captured comes before where the origin is."""
        before: set[Node] = set()
        pending = list(self.members[self.origin])
        while pending:
            node = pending.pop()
            if node not in before:
                before.add(node)
                pending.extend(node.after)
        return before.issuperset(self.left) and all(before.issuperset(nodes) for nodes in self.members.values())

    def finish(self, whole: bool) -> None:
        self.over = True
        for stream in self.members:
            stream.capture = None
        if self.into is not None:
            self.into.state = "whole" if whole else "gone"


class Log:
    """The marks that host code left, in their order."""

    def __init__(self) -> None:
        self.marks: list[int] = []
        self.changed = threading.Condition()

    def leave(self, mark: int) -> int:
        with self.changed:
            self.marks.append(mark)
            self.changed.notify_all()
        return mark

    def count(self) -> Counter[int]:
        with self.changed:
            return Counter(self.marks)

    def wait(self, count: int) -> None:
        with self.changed:
            arrived = self.changed.wait_for(lambda: len(self.marks) >= count, TIMEOUT)
            assert arrived, f"{len(self.marks)} of {count} pieces of host code ran: {self.marks}"


def until(condition: Callable[[], bool]) -> bool:
    """Asks for what a background thread does, and tells nobody of."""
    asked = threading.Event()
    return any(condition() or asked.wait(0.001) for _ in range(TIMEOUT * 1000))


class Skipped(Exception):
    """The operation has nothing to act on."""


class Player:
    """Executes operations and follows them in the model: a method for each kind."""

    def __init__(self, device: rs.Device, worker: ThreadPoolExecutor, tally: Counter[str]) -> None:
        self.device, self.worker, self.tally = device, worker, tally
        self.thread = 0
        self.log = Log()
        # The work that was queued: what each piece comes before, and what it does. Bits of sets are numbers of these.
        self.before: list[int] = []
        self.works: list[tuple] = []
        self.host = 0  # what the host has waited for, and so comes before all that it queues
        self.held: dict[int, rs.testing.Hold] = {}
        self.results: list[tuple[rs.Completion, int, object]] = []
        self.cancelled: set[int] = set()
        self.marks = 0

        self.streams = [self.new_stream(number) for number in range(STREAMS)]
        self.closed: list[Stream] = []
        self.events = [Event(rs.Event(device)) for _ in range(EVENTS)]
        # A copy from host memory to host memory blocks the host, so half of the arrays is on the device.
        make = [rs.pinned_empty, rs.pinned_empty, rs.device_empty, rs.device_empty]
        self.arrays = [make(8, np.uint8, device) for make in make]
        for number, array in enumerate(self.arrays):
            self.streams[0].real.fill(array, number)
        self.streams[0].real.synchronize(TIMEOUT)
        self.begun: list[Capture | None] = [None] * STREAMS
        self.captures: list[Capture] = []
        self.graphs: list[Graph] = []
        self.execs: list[Exec] = []

    def new_stream(self, number: int) -> Stream:
        """The first stream is a blocking one."""
        return Stream(rs.Stream(self.device, non_blocking=number != 0))

    # How calls are made, and work is noted.

    def call(self, function: Callable, *arguments: object, refusal: int | None = None) -> object:
        """Makes a call on the thread of the operation. `refusal` is the code that it has to raise."""

        def attempt() -> object:
            return function(*arguments)

        raised, result = None, None
        try:
            result = attempt() if self.thread == 0 else self.worker.submit(attempt).result(TIMEOUT)
        except rs.CudaError as error:
            raised = error
        if refusal is None:
            assert raised is None, f"refused: {raised!r} ({raised.code})"
            return result
        assert raised is not None, f"accepted, and not refused with {refusal}"
        assert (type(raised), raised.code) == (REFUSALS[refusal], refusal), f"{raised!r} ({raised.code}), not {refusal}"
        self.tally[f"refused {refusal}"] += 1
        return None

    def piece(self, work: tuple, before: int) -> int:
        """Notes a piece of work, and returns its number."""
        self.before.append(before)
        self.works.append(work)
        return len(self.works) - 1

    def queue(self, stream: Stream, work: tuple) -> int:
        """Notes a piece of work at the end of a stream."""
        number = self.piece(work, stream.tail | self.host)
        stream.tail = self.before[number] | 1 << number
        return number

    def new_mark(self) -> int:
        self.marks += 1
        return self.marks

    def blocked(self, work: int) -> bool:
        """Whether something of a set waits for a hold that is not released."""
        return any(work >> number & 1 for number in self.held)

    def check_reached(self, work: int) -> None:
        """A set is done, as the host was told: its host code has run."""
        due = (number for number in range(work.bit_length()) if work >> number & 1)
        need = Counter(self.works[n][1] for n in due if self.works[n][0] == "host" and n not in self.cancelled)
        missing = need - self.log.count()
        assert not missing, f"reached, but {missing} did not run"

    @staticmethod
    def uncapturable(stream: Stream) -> int | None:
        """The code with which a member of a capture refuses what cannot be captured."""
        if stream.capture is None:
            return None
        return 901 if stream.capture.broken else 900

    @staticmethod
    def broken(stream: Stream) -> int | None:
        """The code with which a member of a broken capture refuses work."""
        return 901 if stream.capture is not None and stream.capture.broken else None

    def capture_node(self, stream: Stream, work: tuple) -> Node:
        """Notes that work of a member became a node, which the next one depends on."""
        capture = stream.capture
        info = stream.real.capture_info
        assert len(info.dependencies) == 1, info
        node = Node(work, tuple(capture.members[stream]), info.dependencies[0])
        assert node.real.kind == {"host": "host", "fill": "memset", "copy": "memcpy"}[work[0]]
        capture.nodes.append(node)
        capture.members[stream] = [node]
        return node

    @staticmethod
    def join(capture: Capture, stream: Stream, nodes: list[Node]) -> None:
        """A stream takes part in a capture, behind `nodes`."""
        stream.capture = capture
        there = capture.members.setdefault(stream, [])
        there += [node for node in nodes if node not in there]

    # Host code.

    def do_host(self, number: int) -> None:
        stream, mark = self.streams[number], self.new_mark()
        result = self.call(stream.real.launch_host_func, self.log.leave, mark, refusal=self.broken(stream))
        if stream.capture is None:
            self.results.append((result, self.queue(stream, ("host", mark)), mark))
        elif result is not None:
            assert isinstance(result, rs.HostNode)
            node = self.capture_node(stream, ("host", mark))
            assert node.real == result
            node.real = result

    def do_callback(self, number: int) -> None:
        stream, mark = self.streams[number], self.new_mark()
        refusal = self.uncapturable(stream)
        completion = self.call(
            stream.real.add_callback, lambda status: (self.log.leave(mark), status.ok), refusal=refusal
        )
        if refusal is None:
            self.results.append((completion, self.queue(stream, ("host", mark)), (mark, True)))

    def do_then(self, number: int) -> None:
        stream, mark = self.streams[number], self.new_mark()
        refusal = self.uncapturable(stream)
        completion = self.call(stream.real.then, self.log.leave, mark, refusal=refusal)
        if refusal is None:
            piece = self.piece(("host", mark), stream.tail | self.host | stream.continued)
            stream.continued = self.before[piece] | 1 << piece
            self.results.append((completion, piece, mark))

    def do_completion(self, number: int) -> None:
        stream = self.streams[number]
        refusal = self.uncapturable(stream)
        completion = self.call(stream.real.completion, refusal=refusal)
        if refusal is None:
            self.mark_done(completion, stream.tail)

    def mark_done(self, completion: rs.Completion, after: int) -> None:
        """A completion of no host code leaves a mark when it resolves."""
        mark = self.new_mark()
        completion.add_done_callback(lambda _completion: self.log.leave(mark))
        self.results.append((completion, self.piece(("done", mark), after | self.host), None))

    def do_cancel(self, ago: int) -> None:
        """Cancels host code that waits for a hold, and so has not started."""
        waiting = [
            (completion, number)
            for completion, number, _ in self.results
            if self.works[number][0] == "host" and number not in self.cancelled and self.blocked(self.before[number])
        ]
        completion, number = self.pick(waiting, ago)
        assert self.call(completion.cancel) is True
        assert completion.cancelled()
        self.cancelled.add(number)

    # Memory.

    def do_fill(self, array: int, value: int, number: int) -> None:
        stream, work = self.streams[number], ("fill", array, value)
        self.call(stream.real.fill, self.arrays[array], value, refusal=self.broken(stream))
        self.note_memory(stream, work)

    def do_copy(self, to: int, source: int, number: int) -> None:
        if to == source or max(to, source) < ARRAYS // 2:
            raise Skipped
        stream, work = self.streams[number], ("copy", to, source)
        self.call(stream.real.copy, self.arrays[to], self.arrays[source], refusal=self.broken(stream))
        self.note_memory(stream, work)

    def note_memory(self, stream: Stream, work: tuple) -> None:
        if stream.capture is None:
            self.queue(stream, work)
        elif not stream.capture.broken:
            self.capture_node(stream, work)

    def do_allocate(self) -> None:
        """Memory can be had and dropped whatever is captured."""
        self.call(rs.pinned_empty, 64, np.uint8, self.device)
        self.call(rs.device_empty, 64, np.uint8, self.device)

    # Order between streams.

    def do_record(self, number: int, which: int) -> None:
        stream, event = self.streams[number], self.events[which]
        refusal = self.broken(stream)
        self.call(stream.real.record, event.real, refusal=refusal)
        if refusal is None:
            event.recorded, event.capture, event.reached = True, stream.capture, stream.tail | self.host
            event.nodes = list(stream.capture.members[stream]) if stream.capture else []

    def do_wait_event(self, number: int, which: int) -> None:
        stream, event = self.streams[number], self.events[which]
        mine, theirs = stream.capture, event.capture
        refusal = self.broken(stream)
        if refusal is None and mine is not None and event.recorded and mine is not theirs:
            refusal = 905 if theirs is None else 902
        if refusal is None and theirs is not None and (theirs.over or theirs.broken):
            refusal = 1
        self.call(stream.real.wait, event.real, refusal=refusal)
        if refusal is None and theirs is not None:
            self.join(theirs, stream, event.nodes)
        elif refusal is None and mine is None:
            stream.tail |= event.reached

    def do_wait_stream(self, number: int, which: int) -> None:
        stream, other = self.streams[number], self.streams[which]
        mine, theirs = stream.capture, other.capture
        refusal = self.broken(stream) or self.broken(other)
        if refusal is None and mine is not None and mine is not theirs:
            refusal = 905 if theirs is None else 902
        self.call(stream.real.wait, other.real, refusal=refusal)
        if refusal is None and theirs is not None:
            self.join(theirs, stream, list(theirs.members[other]))
        elif refusal is None:
            stream.tail |= other.tail

    def ask(self, query: Callable[[], bool], work: int, refusal: int | None) -> None:
        done = self.call(query, refusal=refusal)
        if refusal is not None:
            return
        assert not (done and self.blocked(work)), "done, though it waits for a hold"
        if done:
            # How often this is so is chance, so the model makes no more of it.
            self.check_reached(work)

    def await_(self, synchronize: Callable[[float], None], work: int, refusal: int | None) -> None:
        """Waits for what can be reached. Beside a hold the device may be busy with what waits for that."""
        if refusal is not None:
            self.call(synchronize, TIMEOUT, refusal=refusal)
        elif self.blocked(work):
            self.call(synchronize, 0, refusal=909)
        elif self.held:
            raise Skipped
        else:
            self.call(synchronize, TIMEOUT)
            self.check_reached(work)
            self.host |= work

    def do_query(self, number: int) -> None:
        stream = self.streams[number]
        self.ask(stream.real.query, stream.tail, self.uncapturable(stream))

    def do_synchronize(self, number: int) -> None:
        stream = self.streams[number]
        self.await_(stream.real.synchronize, stream.tail, self.uncapturable(stream))

    def do_query_event(self, which: int) -> None:
        event = self.events[which]
        self.ask(event.real.query, event.reached, 907 if event.capture else None)

    def do_synchronize_event(self, which: int) -> None:
        event = self.events[which]
        self.await_(event.real.synchronize, event.reached, 907 if event.capture else None)

    def do_event_completion(self, which: int) -> None:
        event = self.events[which]
        completion = self.call(event.real.completion, refusal=907 if event.capture else None)
        if completion is not None:
            self.mark_done(completion, event.reached)

    def do_new_event(self, which: int) -> None:
        self.events[which] = Event(self.call(rs.Event, self.device))

    def do_close(self, number: int) -> None:
        """Another stream takes the place. A closed origin can be ended; a closed member leaves what it captured."""
        stream = self.streams[number]
        self.call(stream.real.close)
        assert stream.real.closed
        self.closed.append(stream)
        capture = stream.capture
        if capture is not None and capture.origin is not stream:
            capture.left += capture.members.pop(stream)
        self.streams[number] = self.new_stream(number)

    def do_hold(self, number: int) -> None:
        stream = self.streams[number]
        if len(self.held) == HOLDS:
            raise Skipped
        refusal = self.uncapturable(stream)
        hold = self.call(rs.testing.hold, stream.real, refusal=refusal)
        if refusal is None:
            self.held[self.queue(stream, ("hold",))] = hold

    def do_release(self) -> None:
        number, hold = self.pick(list(self.held.items()), -1)
        self.call(hold.release)
        del self.held[number]

    # Captures and graphs.

    def do_begin(self, number: int, mode: str, into: str | int | None) -> None:
        stream, graph = self.streams[number], None
        if into == "fresh":
            graph = Graph(self.call(rs.Graph, self.device), [])
        elif into is not None:
            graph = self.pick(self.graphs, into)
        refusal = 401 if stream.capture is not None else graph and graph.refusal
        start = graph.nodes[-1:] if graph else []
        dependencies = [node.real for node in start] if graph and graph.state == "whole" else None
        real = stream.real.capture(mode=mode, graph=graph and graph.real, dependencies=dependencies)
        self.call(real.__enter__, refusal=refusal)
        if refusal is not None:
            return
        nodes = graph.nodes if graph else []
        capture = Capture(real, stream, mode, self.thread, graph, nodes, real.id, {stream: start})
        if graph is not None:
            graph.state = "captured"
        if into == "fresh":
            self.graphs.append(graph)
        stream.capture = self.begun[number] = capture
        assert capture.id is not None
        assert capture.id not in [other.id for other in self.captures if not other.over]
        self.captures.append(capture)

    def do_end(self, number: int) -> None:
        capture = self.begun[number]
        if capture is None:
            raise Skipped
        refusal = None
        if capture.over:
            refusal = 401
        elif capture.is_elsewhere(self.thread):
            refusal = 908
        elif capture.broken:
            refusal = 901
        elif not capture.joined():
            refusal = 904
        graph = self.call(capture.real.end, refusal=refusal)
        if refusal in (401, 908):
            return
        capture.finish(whole=refusal is None)
        if refusal is None and capture.into is None:
            self.graphs.append(Graph(graph, capture.nodes))
        assert refusal is not None or capture.into is None or graph == capture.into.real
        assert refusal is not None or capture.real.graph == graph

    def do_abandon(self, number: int) -> None:
        capture = self.begun[number]
        if capture is None:
            raise Skipped
        self.abandon(capture)

    def abandon(self, capture: Capture) -> None:
        """Refused elsewhere if a graph of the caller's would be lost, which the end on another thread destroys."""
        refusal = None
        if capture.over:
            refusal = 401
        elif capture.is_elsewhere(self.thread) and capture.into is not None:
            refusal = 908
        self.call(capture.real.abandon, refusal=refusal)
        if refusal is None:
            right = not capture.is_elsewhere(self.thread)
            capture.finish(whole=right and not capture.broken and capture.joined())

    def do_break(self) -> None:
        """The device is waited for, which no capture survives. Beside none the call could block."""
        if all(capture.status != "active" for capture in self.captures):
            raise Skipped
        self.call(self.device.synchronize, refusal=900)
        for capture in self.captures:
            capture.broken = True

    def do_instantiate(self, ago: int) -> None:
        graph = self.pick(self.graphs, ago)
        if self.held:
            # The driver may wait for the device there (seen on an H200), as it does for memory.
            raise Skipped
        exec_ = self.call(graph.real.instantiate, refusal=graph.refusal)
        if exec_ is not None:
            self.execs.append(Exec(exec_, list(graph.nodes)))

    def do_launch(self, ago: int, number: int) -> None:
        exec_, stream = self.pick(self.execs, ago), self.streams[number]
        refusal = self.uncapturable(stream)
        self.call(exec_.real.launch, stream.real, refusal=refusal)
        if refusal is not None:
            return
        done = start = stream.tail | self.host | exec_.done
        pieces: dict[Node, int] = {}
        for node in exec_.nodes:
            before = start
            for earlier in node.after:
                before |= self.before[pieces[earlier]] | 1 << pieces[earlier]
            pieces[node] = self.piece(node.work, before)
            done |= 1 << pieces[node]
        stream.tail = exec_.done = done

    def do_clone(self, ago: int) -> None:
        graph = self.pick(self.graphs, ago)
        clone = self.call(graph.real.clone, refusal=graph.refusal)
        if clone is None:
            return
        twins: dict[Node, Node] = {}
        for node in graph.nodes:
            after = tuple(twins[earlier] for earlier in node.after)
            twins[node] = Node(node.work, after, clone.find_in_clone(node.real))
        self.graphs.append(Graph(clone, list(twins.values())))

    def shape(self, nodes: list[Node]) -> list[tuple]:
        """What an executable and a graph have to have in common for an update: kinds, and edges by their places."""

        def kind(work: tuple) -> tuple:
            if work[0] == "host":
                return ("host",)
            return work[0], *(array < ARRAYS // 2 for array in work[1 : 2 if work[0] == "fill" else 3])

        return [(kind(node.work), [nodes.index(earlier) for earlier in node.after]) for node in nodes]

    def do_update(self, ago: int, graph_ago: int) -> None:
        exec_, graph = self.pick(self.execs, ago), self.pick(self.graphs, graph_ago)
        old, new = self.shape(exec_.nodes), self.shape(graph.nodes)
        refusal = graph.refusal
        if refusal is None and len(old) != len(new):
            refusal = 910
        elif refusal is None and old != new:
            # Which of the differences matter is up to the driver.
            raise Skipped
        if self.held:
            raise Skipped
        self.call(exec_.real.update, graph.real, refusal=refusal)
        if refusal is None:
            exec_.nodes = list(graph.nodes)

    def do_look(self) -> None:
        self.call(self.check_captures)

    # Checks.

    @staticmethod
    def pick(things: list, ago: int):
        if not things:
            raise Skipped
        return things[-1 - ago % len(things)]

    def check_captures(self) -> None:
        """Each stream takes part in the capture that the model says, behind the nodes that it says."""
        for number, stream in enumerate(self.streams):
            capture = stream.capture
            status = capture.status if capture else "none"
            assert stream.real.capture_status == status, f"stream {number}: {stream.real.capture_status}, not {status}"
            info = stream.real.capture_info
            assert (info is not None) == (status == "active")
            if info is not None:
                assert info.id == capture.id
                there = [node.real for node in capture.members[stream]]
                assert set(info.dependencies) == set(there), f"stream {number}: {info.dependencies}, not {there}"
        for capture in self.captures:
            assert capture.real.id == (None if capture.over else capture.id)
            if not capture.origin.real.closed:
                assert capture.real.status == capture.status

    def step(self, operation: tuple) -> None:
        name, self.thread, *arguments = operation
        try:
            getattr(self, f"do_{name}")(*arguments)
            self.tally[name] += 1
        except Skipped:
            self.tally["skipped"] += 1
        self.check_captures()

    def clean_up(self) -> None:
        """Leaves nothing behind that concerns the next program, whatever the model believes."""
        for hold in self.held.values():
            hold.release()
        for capture in self.captures:
            if capture.real.id is not None:
                # On the thread that began it, whoever that was.
                abandon = capture.real.abandon
                abandon() if capture.thread == 0 else self.worker.submit(abandon).result(TIMEOUT)

    def finish(self) -> None:
        """Ends what goes on, waits for all, and checks what is left."""
        for hold in self.held.values():
            hold.release()
        self.held.clear()
        for capture in self.captures:
            if not capture.over:
                self.thread = capture.thread
                self.abandon(capture)
        self.thread = 0
        self.check_captures()
        codes = [number for number, work in enumerate(self.works) if work[0] in ("host", "done")]
        expected = [number for number in codes if number not in self.cancelled]
        self.log.wait(len(expected))
        for stream in self.streams:
            stream.real.synchronize(TIMEOUT)
            self.check_reached(stream.tail)
        self.worker.submit(self.device.synchronize).result(TIMEOUT)
        self.check_results()
        for stream in self.streams + self.closed:
            assert until(lambda real=stream.real: real.pending == 0), f"{stream.real.pending} are pending"
        self.check_order(expected)
        self.check_memory()
        self.check_graphs()

    def check_results(self) -> None:
        for completion, number, value in self.results:
            if number in self.cancelled:
                with pytest.raises(CancelledError):
                    completion.result(TIMEOUT)
            else:
                assert completion.result(TIMEOUT) == value

    def check_order(self, expected: list[int]) -> None:
        """All host code ran as often as it had to, and after what comes before it.

        Where one function was run by launches that were not ordered, nobody can tell which run was which.
        """
        runs: dict[int, list[int]] = {}
        for number in expected:
            runs.setdefault(self.works[number][1], []).append(number)
        ran = Counter(self.log.marks)
        assert ran == {mark: len(numbers) for mark, numbers in runs.items()}
        ordered = {
            mark: iter(numbers)
            for mark, numbers in runs.items()
            if all(self.before[later] >> earlier & 1 for earlier, later in pairwise(numbers))
        }
        told = sum(1 << number for mark in ordered for number in runs[mark])
        seen = 0
        for mark in self.log.marks:
            if mark in ordered:
                number = next(ordered[mark])
                missing = self.before[number] & told & ~seen
                early = [self.works[n][1] for n in range(missing.bit_length()) if missing >> n & 1]
                assert not missing, f"{mark} ran before {early}: {self.log.marks}"
                seen |= 1 << number

    def check_memory(self) -> None:
        """Each array has what the last write left, unless writes and copies raced for it."""
        writes: dict[int, list[int]] = {array: [] for array in range(ARRAYS)}
        for number, work in enumerate(self.works):
            if work[0] in ("fill", "copy"):
                writes[work[1]].append(number)
        everything = (1 << len(self.works)) - 1
        written: dict[int, int | None] = {}

        def read(array: int, number: int, before: int) -> int | None:
            """What piece `number` reads, `None` if a race decides."""
            earlier = [write for write in writes[array] if before >> write & 1]
            others = [write for write in writes[array] if not before >> write & 1]
            if not all(write > number and self.before[write] >> number & 1 for write in others):
                return None
            if not earlier:
                return array
            *rest, last = earlier
            return written[last] if all(self.before[last] >> write & 1 for write in rest) else None

        for number, work in enumerate(self.works):
            if work[0] == "fill":
                written[number] = work[2]
            elif work[0] == "copy":
                written[number] = read(work[2], number, self.before[number])
        seen = rs.pinned_empty(8, np.uint8, self.device)
        for array, real in enumerate(self.arrays):
            value = read(array, len(self.works), everything)
            self.tally["arrays known" if value is not None else "arrays raced for"] += 1
            if value is None:
                continue
            if array >= ARRAYS // 2:
                self.streams[0].real.copy(seen, real)
                self.streams[0].real.synchronize(TIMEOUT)
                real = seen
            assert list(real) == [value] * 8, f"array {array}: {list(real)}, not {value}"

    def check_graphs(self) -> None:
        """Graphs have the nodes and edges that were captured; a host node knows how often it ran."""
        runs = Counter(self.works[number][1] for number in range(len(self.works)) if self.works[number][0] == "host")
        for graph in self.graphs:
            if graph.state == "gone":
                continue
            assert set(graph.real.nodes) == {node.real for node in graph.nodes}
            edges = {(earlier.real, node.real) for node in graph.nodes for earlier in node.after}
            assert set(graph.real.edges) == edges
            for node in graph.nodes:
                if isinstance(node.real, rs.HostNode):
                    assert node.real.runs == runs[node.work[1]]


def run(device: rs.Device, program: Program, tally: Counter[str] | None = None) -> None:
    """Executes a program and checks it. `tally` counts operations and refusals."""
    with ThreadPoolExecutor(1) as worker:
        player = Player(device, worker, Counter() if tally is None else tally)
        try:
            for number, operation in enumerate(program):
                step = f"step {number}, {operation}"
                player.step(operation)
            step = "the end"
            player.finish()
        except BaseException as error:
            player.clean_up()
            if not isinstance(error, Exception):
                raise
            text = "\n".join(f"    {operation}," for operation in program)
            raise AssertionError(f"at {step}: {error!r}\nprogram = [\n{text}\n]") from error


@pytest.mark.timeout(400)
def test_random_programs_do_what_the_model_says(device):
    """Also asserts that the programs have been worth it: each operation and each kind of refusal occurs."""
    examples = min(EXAMPLES, int(os.environ.get("RSTREAM_STRESS", EXAMPLES)))
    tally: Counter[str] = Counter()

    @settings(
        max_examples=examples,
        derandomize=True,
        database=None,
        deadline=None,
        report_multiple_bugs=False,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
    @given(program=programs())
    def check(program: Program) -> None:
        tally["programs"] += 1
        run(device, program, tally)

    check()
    if path := os.environ.get("RSTREAM_MODEL_OUT"):
        with open(path, "a") as file:
            print(json.dumps(tally, sort_keys=True), file=file)
    if examples == EXAMPLES:
        wanted = [*OPERATIONS, *(f"refused {code}" for code in REFUSALS), "arrays known"]
        assert not [name for name in wanted if tally[name] < 10]
