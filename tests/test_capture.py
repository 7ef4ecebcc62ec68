"""Stream capture: what becomes a node, what is refused, and what never breaks a capture."""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import threading
import weakref

import numpy as np
import pytest
from helpers import freed, run, until

import rstream as rs

STRESS = int(os.environ.get("RSTREAM_STRESS", "1"))
MODES = ["global", "thread_local", "relaxed"]


def break_capture(device):
    """Makes a call that no capture survives."""
    with pytest.raises(rs.CaptureUnsupportedError) as raised:
        device.synchronize()
    assert raised.value.code == 900


@pytest.mark.parametrize("mode", MODES)
def test_work_is_captured_and_runs_once_for_each_launch(stream, mode):
    seen, source, target = [], np.arange(4.0), np.zeros(4)
    pinned = rs.pinned_empty(4, np.int32, stream.device)
    pinned[:] = 0
    with stream.capture(mode=mode) as capture:
        assert capture.mode == mode
        assert capture.status == stream.capture_status == "active"
        node = capture.launch_host_func(seen.append, "first")
        also = stream.launch_host_func(seen.append, "second")
        stream.copy(target, source)
        stream.fill(pinned, 7)
    assert seen == []
    assert isinstance(node, rs.HostNode)
    assert isinstance(also, rs.HostNode)
    assert stream.capture_status == capture.status == "none"
    assert not target.any()
    run(capture.graph, stream, 3)
    assert seen == ["first", "second"] * 3
    assert node.runs == also.runs == 3
    assert np.array_equal(target, source)
    assert (np.asarray(pinned) == 7).all()


def test_a_graph_reads_the_arrays_when_it_is_launched(stream):
    source, target = rs.pinned_empty(4, int, stream.device), np.zeros(4, int)
    with stream.capture() as capture:
        stream.copy(target, source)
    exec = capture.graph.instantiate()
    for value in (1, 2):
        source[:] = value
        exec.launch(stream)
        stream.synchronize(30)
        assert (target == value).all()


def test_a_fork_and_a_join_become_branches(stream, device):
    order, other = [], rs.Stream(device)
    with stream.capture() as capture:
        first = stream.launch_host_func(order.append, "first")
        other.wait(stream)
        assert other.capture_status == "active"
        assert other.capture_info.id == capture.id
        left = stream.launch_host_func(order.append, "left")
        right = other.launch_host_func(order.append, "right")
        stream.wait(other)
        assert set(capture.dependencies) == {left, right}
        last = stream.launch_host_func(order.append, "last")
    assert other.capture_status == "none"
    assert {(first, left), (first, right), (left, last), (right, last)} == set(capture.graph.edges)
    assert set(capture.graph.nodes) == {first, left, right, last}
    run(capture.graph, stream, 2)
    assert order[0] == order[4] == "first"
    assert order[3] == order[7] == "last"


def test_events_fork_and_join_too(stream, device):
    other, begin, end = rs.Stream(device), rs.Event(device), rs.Event(device)
    with stream.capture() as capture:
        stream.launch_host_func(int)
        stream.record(begin)
        other.wait(begin)
        node = other.launch_host_func(int)
        other.record(end)
        stream.wait(end)
        assert node in capture.dependencies
    assert len(capture.graph.nodes) == 2
    # Recorded outside, they are ordinary again.
    stream.record(end)
    end.synchronize(30)
    assert end.query()


def test_an_empty_capture_gives_an_empty_graph(stream):
    with stream.capture() as capture:
        pass
    assert capture.graph.nodes == capture.graph.edges == []
    run(capture.graph, stream)


def test_a_stream_that_took_part_without_work_need_not_be_joined(stream, device):
    other = rs.Stream(device)
    with stream.capture():
        stream.launch_host_func(int)
        other.wait(stream)
    assert other.capture_status == "none"


def test_an_exception_abandons_the_capture_and_frees_what_was_captured(stream):
    class Payload:
        pass

    payload = Payload()
    reference = weakref.ref(payload)
    with pytest.raises(ZeroDivisionError), stream.capture() as capture:
        stream.launch_host_func(lambda kept: None, payload)
        del payload
        1 / 0
    assert stream.capture_status == capture.status == "none"
    assert freed(reference)
    with pytest.raises(rs.CaptureError, match="no graph: the capture was abandoned"):
        capture.graph
    assert stream.launch_host_func(lambda: 5).result(30) == 5


def test_before_its_end_a_capture_says_why_there_is_no_graph(stream):
    capture = stream.capture()
    with pytest.raises(rs.CaptureError, match="no graph: the capture has not begun"):
        capture.graph
    with capture, pytest.raises(rs.CaptureError, match="no graph: the capture has not ended"):
        capture.graph
    assert capture.graph.nodes == []


def test_a_capture_can_be_ended_and_abandoned_by_hand(stream):
    with stream.capture() as capture:
        stream.launch_host_func(int)
        graph = capture.end()
        assert stream.capture_status == "none"
    assert capture.graph == graph
    with stream.capture() as capture:
        capture.abandon()
        assert stream.query()
    for act in (capture.end, capture.abandon, lambda: capture.launch_host_func(int), lambda: capture.dependencies):
        with pytest.raises(rs.CaptureError, match="not going on"):
            act()
    with pytest.raises(rs.CaptureError, match="once"):
        capture.__enter__()


def test_a_capture_that_nobody_has_is_abandoned(stream):
    capture = stream.capture()
    capture.__enter__()
    del capture
    gc.collect()
    # On the background thread, which tells nobody.
    until(lambda: stream.capture_status == "none")
    assert stream.query()


def test_a_capturing_stream_can_be_closed(device):
    stream = rs.Stream(device)
    with pytest.raises(rs.CudaError), stream.capture():
        stream.launch_host_func(int)
        stream.close()
        stream.launch_host_func(int)
    assert stream.closed


REFUSED = {
    "add_callback": lambda stream, f: stream.add_callback(f),
    "then": lambda stream, f: stream.then(f),
    "completion": lambda stream, f: stream.completion(),
    "query": lambda stream, f: stream.query(),
    "synchronize": lambda stream, f: stream.synchronize(),
    "attach": lambda stream, f: stream.attach(rs.managed_empty(4, device=stream.device), "single"),
    "launch of a graph": lambda stream, f: rs.Graph(stream.device).instantiate().launch(stream),
    "upload of a graph": lambda stream, f: rs.Graph(stream.device).instantiate().upload(stream),
    "adoption": lambda stream, f: rs.Stream.from_external(stream.handle, stream.device),
    "hold": lambda stream, f: rs.testing.hold(stream),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("act", REFUSED)
def test_what_cannot_be_captured_is_refused_before_the_call(stream, mode, act):
    def function(*_):
        raise AssertionError("must not run")

    reference = weakref.ref(function)
    with stream.capture(mode=mode) as capture:
        with pytest.raises(rs.CaptureUnsupportedError, match="captur") as raised:
            REFUSED[act](stream, function)
        assert raised.value.code == 900
        assert capture.status == "active"
    del function, raised
    gc.collect()
    assert freed(reference)
    assert stream.query()


def test_a_stream_outside_is_refused_in_a_capture(stream, device):
    other, event = rs.Stream(device), rs.Event(device)
    other.record(event)
    with stream.capture() as capture:
        for what in (other, event):
            with pytest.raises(rs.CaptureIsolationError, match="outside") as raised:
                stream.wait(what)
            assert raised.value.code == 905
        stream.wait(rs.Event(device))
        assert capture.status == "active"


def test_two_captures_are_not_joined(device):
    first, second, event = rs.Stream(device), rs.Stream(device), rs.Event(device)
    with first.capture() as one, second.capture() as two:
        assert one.id != two.id
        first.record(event)
        for what in (first, event):
            with pytest.raises(rs.CaptureMergeError, match="end one") as raised:
                second.wait(what)
            assert raised.value.code == 902
        assert one.status == two.status == "active"


def test_work_that_was_not_joined_ends_the_capture_badly(stream, device):
    other = rs.Stream(device)
    with pytest.raises(rs.CaptureUnjoinedError, match="has to wait for every stream") as raised, stream.capture():
        other.wait(stream)
        other.launch_host_func(int)
    assert raised.value.code == 904
    assert stream.capture_status == other.capture_status == "none"
    assert stream.query()


def test_a_second_capture_of_a_stream_is_refused(stream, device):
    other = rs.Stream(device)
    with stream.capture() as capture:
        other.wait(stream)
        for taken in (stream, other):
            with pytest.raises(rs.CaptureError, match="already") as raised:
                taken.capture().__enter__()
            assert raised.value.code == 401
        assert capture.status == "active"


def test_the_host_cannot_ask_a_captured_event(stream, device):
    event = rs.Event(device)
    with stream.capture() as capture:
        stream.record(event)
        for ask in (event.query, event.synchronize, event.completion):
            with pytest.raises(rs.CapturedEventError, match="recorded in a capture") as raised:
                ask()
            assert raised.value.code == 907
        assert capture.status == "active"
    with pytest.raises(rs.CapturedEventError):
        event.query()
    with pytest.raises(rs.InvalidValueError, match="capture that is over"):
        rs.Stream(device).wait(event)


def test_a_broken_capture_says_so_until_it_is_ended(stream, device):
    with pytest.raises(rs.CaptureInvalidatedError, match="does not permit") as raised, stream.capture() as capture:
        stream.launch_host_func(int)
        break_capture(device)
        assert capture.status == stream.capture_status == "invalidated"
        assert stream.capture_info is None
        for act in (
            lambda: stream.launch_host_func(int),
            lambda: stream.fill(rs.pinned_empty(1, np.int8, device), 0),
            stream.query,
            lambda: capture.dependencies,
            lambda: capture.set_dependencies([]),
        ):
            with pytest.raises(rs.CaptureInvalidatedError):
                act()
    assert raised.value.code == 901
    assert stream.query()


def test_ends_on_the_wrong_thread_are_refused_and_harmless(stream):
    errors = []

    def end(capture):
        try:
            capture.end()
        except rs.CudaError as error:
            errors.append(error)

    for mode in ("global", "thread_local"):
        with stream.capture(mode=mode) as capture:
            thread = threading.Thread(target=end, args=[capture])
            thread.start()
            thread.join()
            error = errors.pop()
            assert type(error) is rs.CaptureWrongThreadError
            assert error.code == 908
            assert capture.status == "active"
        assert capture.graph.nodes == []
    with stream.capture(mode="relaxed") as capture:
        thread = threading.Thread(target=end, args=[capture])
        thread.start()
        thread.join()
        assert errors == []
        assert stream.capture_status == "none"


def test_the_legacy_default_stream_and_a_blocking_capture(device):
    legacy = rs.Stream.legacy_default(device)
    with pytest.raises(rs.CaptureUnsupportedError, match="another stream"), legacy.capture():
        pass
    event = rs.Event(device)
    with rs.Stream(device, non_blocking=False) as stream, stream.capture() as capture:
        for act in (
            lambda: legacy.capture_status,
            lambda: legacy.launch_host_func(int),
            lambda: legacy.record(event),
            legacy.query,
            lambda: rs.Stream.legacy_default(device),
        ):
            with pytest.raises(rs.CaptureImplicitError) as raised:
                act()
            assert raised.value.code == 906
        assert capture.status == "active"
    with rs.Stream(device) as stream, stream.capture() as capture:
        stream.record(event)
        for what in (stream, event):
            with pytest.raises(rs.CaptureImplicitError, match="cannot take part"):
                legacy.wait(what)
        assert legacy.capture_status == "none"
        assert legacy.query()
        assert capture.status == "active"


def test_a_per_thread_default_stream_captures(device):
    stream, seen = rs.Stream.per_thread_default(device), []
    with stream.capture() as capture:
        stream.launch_host_func(seen.append, 1)
    run(capture.graph, stream)
    assert seen == [1]


def test_capture_into_a_graph(stream, device):
    order, graph = [], rs.Graph(device)
    first = graph.add_host_node(order.append, "first")
    with stream.capture(graph=graph, dependencies=first) as capture:
        assert capture.dependencies == [first]
        assert stream.capture_info.dependencies == (first,)
        second = stream.launch_host_func(order.append, "second")
        for act in (lambda: graph.nodes, graph.instantiate, graph.clone, lambda: graph.add_empty_node()):
            with pytest.raises(rs.CaptureUnsupportedError, match="captured into"):
                act()
        with pytest.raises(rs.CaptureError), rs.Stream(device).capture(graph=graph):
            pass
    assert capture.graph == graph
    assert graph.edges == [(first, second)]
    run(graph, stream)
    assert order == ["first", "second"]
    with stream.capture(graph=graph, dependencies=[second]):
        stream.launch_host_func(order.append, "third")
    run(graph, stream)
    assert order[2:] == ["first", "second", "third"]


def test_a_graph_is_gone_when_the_capture_into_it_breaks(stream, device):
    graph = rs.Graph(device)
    graph.add_empty_node()
    with pytest.raises(rs.CaptureInvalidatedError), stream.capture(graph=graph):
        break_capture(device)
    with pytest.raises(rs.CaptureInvalidatedError, match="gone"):
        graph.nodes
    with pytest.raises(rs.CaptureInvalidatedError, match="gone"):
        graph.instantiate()


def test_an_abandoned_capture_into_a_graph_leaves_the_graph(stream, device):
    graph = rs.Graph(device)
    node = graph.add_empty_node()
    with pytest.raises(ZeroDivisionError), stream.capture(graph=graph, dependencies=node):
        1 / 0
    assert node in graph.nodes


def test_dependencies_are_added_and_set(stream, device):
    stranger = rs.Graph(device).add_empty_node()
    with stream.capture() as capture:
        assert capture.dependencies == []
        first, second = stream.launch_host_func(int), stream.launch_host_func(int)
        assert capture.dependencies == [second]
        capture.add_dependencies(first)
        capture.add_dependencies([first, second])
        assert set(capture.dependencies) == {first, second}
        capture.set_dependencies([first])
        assert capture.dependencies == [first]
        third = stream.launch_host_func(int)
        capture.set_dependencies([])
        fourth = stream.launch_host_func(int)
        with pytest.raises(rs.InvalidValueError, match="another graph"):
            capture.add_dependencies(stranger)
        with pytest.raises(TypeError, match="no Node"):
            capture.set_dependencies([1])
        assert capture.status == "active"
    assert set(capture.graph.edges) == {(first, second), (first, third)}
    assert fourth in capture.graph.nodes


def test_external_events_cross_the_border_of_the_graph(stream, device):
    begin, end, order = rs.Event(device), rs.Event(device), []
    for act in (lambda: stream.wait(begin, external=True), lambda: stream.record(end, external=True)):
        with pytest.raises(rs.CaptureError, match="external") as raised:
            act()
        assert raised.value.code == 401
    with pytest.raises(TypeError, match="for events"):
        stream.wait(rs.Stream(device), external=True)
    with stream.capture() as capture:
        stream.wait(begin, external=True)
        stream.launch_host_func(order.append, "graph")
        assert stream.record(end, external=True) is end
        # It is no captured event: between launches the host may ask.
        assert end.query()
    assert [node.kind for node in capture.graph.nodes] == ["wait_event", "host", "event_record"]
    other = rs.Stream(device)
    with rs.testing.hold(other):
        other.launch_host_func(order.append, "before")
        other.record(begin)
        exec = capture.graph.instantiate()
        exec.launch(stream)
        assert not end.query()
    end.synchronize(30)
    assert order == ["before", "graph"]


def test_an_event_lives_as_long_as_the_graph(stream, device):
    event = rs.Event(device)
    with stream.capture() as capture:
        stream.record(event, external=True)
    event.close()
    del event
    run(capture.graph, stream, 2)


def test_capture_info(stream, device):
    assert stream.capture_info is None
    with stream.capture() as capture:
        info = stream.capture_info
        assert isinstance(info, rs.CaptureInfo)
        assert info.id == capture.id > 0
        assert info.graph != 0
        assert info.dependencies == ()
        node = stream.launch_host_func(int)
        assert stream.capture_info.dependencies == (node,)
        assert rs.Stream(device).capture_info is None
    assert capture.id is None


@pytest.mark.parametrize("mode", MODES)
def test_nothing_that_rstream_does_disturbs_a_capture(stream, device, mode):
    errors = []

    def everything():
        for _ in range(20):
            other, event = rs.Stream(device, priority=-1), rs.Event(device, timing=True)
            assert all(repr(kept) for kept in (other, event, device))
            assert other == rs.Stream.from_external(other.handle, device)
            assert len({other, stream}) == 2
            properties = (
                "handle",
                "id",
                "device",
                "priority",
                "non_blocking",
                "context_handle",
                "green_context",
                "signal",
            )
            for name in (*properties, "closed", "pending", "capture_status", "capture_info"):
                getattr(other, name)
            assert other.attributes.priority == other.priority
            for kept in (other, event, stream):
                with pytest.raises(TypeError):
                    pickle.dumps(kept)
            arrays = [make(1000, device=device) for make in (rs.pinned_empty, rs.managed_empty, rs.device_empty)]
            other.copy(arrays[2], arrays[0])
            other.fill(arrays[1], 0)
            other.record(event)
            assert other.then(event.query).result(30)
            other.add_callback(lambda status: None).result(30)
            event.synchronize(30)
            other.synchronize(30)
            arrays[2].to_host(other)
            graph = rs.Graph(device)
            graph.add_host_node(int)
            exec = graph.clone().instantiate()
            exec.update(graph)
            exec.launch(other)
            other.completion().result(30)
            exec.close()
            other.attach(arrays[1], "single")
            with rs.capture_mode("thread_local", device):
                del arrays, graph, exec, event
                other.close()
                gc.collect()

    def thread():
        try:
            everything()
        except BaseException as error:
            errors.append(error)

    device.free_cached_memory()
    with stream.capture(mode=mode) as capture:
        everything()
        background = threading.Thread(target=thread)
        background.start()
        background.join(60)
        for name in ("handle", "id", "device", "priority", "non_blocking", "context_handle", "green_context", "signal"):
            getattr(stream, name)
        assert str(stream.id) in repr(stream)
        assert hash(stream) == stream.id
        assert stream == capture.stream
        assert stream.attributes.priority == 0
        assert errors == []
        assert device.free_cached_memory() > 0
        assert capture.status == "active"
        node = stream.launch_host_func(int)
    assert capture.graph.nodes == [node]


def test_a_capture_that_another_handle_began_is_noticed_at_each_enqueue(stream, device):
    adopted, seen = rs.Stream.from_external(stream.handle, device), []
    adopted.launch_host_func(seen.append, 0).result(30)
    with stream.capture() as capture:
        with pytest.raises(rs.CaptureUnsupportedError):
            adopted.add_callback(seen.append)
        assert adopted.capture_info.id == capture.id
        node = adopted.launch_host_func(seen.append, 1)
        assert isinstance(node, rs.HostNode)
    adopted.launch_host_func(seen.append, 2).result(30)
    run(capture.graph, adopted)
    assert seen == [0, 2, 1]


@pytest.mark.parametrize("options", [{"mode": "fast"}, {"mode": ""}])
def test_bad_modes_are_named(stream, options):
    with pytest.raises(rs.InvalidValueError, match=f"mode={options['mode']!r}".replace("'", '"')):
        stream.capture(**options)


def test_bad_graphs_and_dependencies(stream, device):
    node = rs.Graph(device).add_empty_node()
    with pytest.raises(rs.InvalidValueError, match="give that as well"):
        stream.capture(dependencies=[node])
    with (
        pytest.raises(rs.InvalidValueError, match="another graph"),
        stream.capture(graph=rs.Graph(device), dependencies=[node]),
    ):
        pass
    assert stream.capture_status == "none"


@pytest.mark.soft_only
def test_a_failed_begin_leaves_the_stream_as_it_was(stream):
    with rs.testing.inject("cuStreamBeginCapture_v2", 2), pytest.raises(rs.OutOfMemoryError), stream.capture():
        pass
    assert stream.query()


@pytest.mark.soft_only
@pytest.mark.parametrize(
    "function", ["cuUserObjectCreate", "cuGraphRetainUserObject", "cuLaunchHostFunc", "cuStreamGetCaptureInfo_v3"]
)
def test_a_host_function_that_cannot_be_captured_is_let_go(stream, function):
    def refused():
        raise AssertionError("must not run")

    reference = weakref.ref(refused)
    with stream.capture() as capture:
        with rs.testing.inject(function, 2), pytest.raises(rs.OutOfMemoryError):
            stream.launch_host_func(refused)
        node = stream.launch_host_func(int)
    del refused
    gc.collect()
    assert freed(reference)
    assert capture.graph.nodes == [node]
    run(capture.graph, stream)


def test_the_capture_mode_of_a_thread_is_pushed_and_popped(device):
    mode = rs._core._exchange_capture_mode

    def now():
        before = mode(device, 0)
        mode(device, before)
        return before

    assert now() == 0
    with rs.capture_mode("relaxed", device):
        assert now() == 2
        with pytest.raises(ZeroDivisionError), rs.capture_mode("thread_local", device):
            assert now() == 1
            1 / 0
        assert now() == 2
        seen = []
        thread = threading.Thread(target=lambda: seen.append(now()))
        thread.start()
        thread.join()
        assert seen == [0]
    assert now() == 0
    again = rs.capture_mode("relaxed", device)
    with again, again:
        assert now() == 2
    assert now() == 0


def test_a_capture_mode_belongs_to_its_thread(device):
    manager, errors = rs.capture_mode("relaxed", device), []
    manager.__enter__()

    def leave():
        try:
            manager.__exit__(None, None, None)
        except RuntimeError as error:
            errors.append(error)

    thread = threading.Thread(target=leave)
    thread.start()
    thread.join()
    assert "another thread" in str(errors[0])
    rs._core._exchange_capture_mode(device, 0)


def test_a_bad_capture_mode_is_named(device):
    with pytest.raises(rs.InvalidValueError, match="mode='lax'"):
        rs.capture_mode("lax", device)


def test_captures_are_not_pickled_and_have_a_repr(stream):
    capture = stream.capture(mode="relaxed")
    assert "not begun" in repr(capture)
    with capture:
        assert "active" in repr(capture)
        assert capture.stream == stream
    assert "ended" in repr(capture)
    with pytest.raises(TypeError, match="pickled"):
        pickle.dumps(capture)


@pytest.mark.gpu_only
def test_a_capture_of_torch_is_noticed(device):
    torch = pytest.importorskip("torch")
    seen, owner = [], torch.cuda.Stream()
    adopted = rs.Stream.from_external(owner)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=owner):
        with pytest.raises(rs.CaptureUnsupportedError):
            adopted.add_callback(seen.append)
        node = adopted.launch_host_func(seen.append, "captured")
    assert seen == []
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    assert seen == ["captured"] * 3
    assert node.runs == 3
    adopted.launch_host_func(seen.append, "after").result(30)


@pytest.mark.gpu_only
def test_a_capture_of_cupy_is_noticed(device):
    cupy = pytest.importorskip("cupy")
    seen, owner = [], cupy.cuda.Stream(non_blocking=True)
    adopted = rs.Stream.from_external(owner)
    owner.begin_capture()
    with pytest.raises(rs.CaptureUnsupportedError):
        adopted.then(seen.append)
    adopted.launch_host_func(seen.append, 1)
    graph = owner.end_capture()
    graph.launch(stream=owner)
    owner.synchronize()
    assert seen == [1]


@pytest.mark.soft_only
def test_a_node_that_nobody_can_name_does_nothing(stream):
    """The driver has taken it, but cannot say which node it is."""
    failing = rs.testing.inject("cuStreamGetCaptureInfo_v3", 999, 3)
    with stream.capture() as capture, failing, pytest.raises(rs.CudaError):
        stream.launch_host_func(lambda: 1 / 0)
    (node,) = capture.graph.nodes
    run(capture.graph, stream)
    assert node.errors == []


def test_an_old_branch_does_not_reach_into_a_new_capture(stream, device):
    with stream.capture() as old:
        node = stream.launch_host_func(int)
    with stream.capture() as new:
        with pytest.raises(rs.CaptureError):
            old.set_dependencies([node])
        with pytest.raises(rs.InvalidValueError, match="another graph"):
            new.set_dependencies([node])
        assert new.status == "active"


@pytest.mark.parametrize("by_hand", [False, True])
def test_a_captured_event_stays_one_when_launches_will_record_it(stream, device, by_hand):
    event, other = rs.Event(device), rs.Stream(device)
    with stream.capture() as capture:
        stream.record(event)
        if by_hand:
            rs.Graph(device).add_event_record_node(event)
        else:
            stream.record(event, external=True)
        for ask in (event.query, event.synchronize, event.completion):
            with pytest.raises(rs.CapturedEventError):
                ask()
        other.wait(event)
        assert other.capture_status == capture.status == "active"
        event.close()
        with pytest.raises(rs.ClosedError):
            event.query()


def test_an_end_inside_a_callback_is_refused_and_harmless(stream, device):
    with rs.Stream(device) as other, stream.capture(mode="relaxed") as capture:
        for act in (capture.end, capture.abandon):
            refused = other.launch_host_func(act).exception(30)
            assert isinstance(refused, rs.NotPermittedError)
        assert capture.status == "active"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")
def test_a_forked_child_leaves_the_capture_alone(program):
    program(
        """
        import os, warnings
        warnings.simplefilter("ignore", DeprecationWarning)
        stream = rs.Stream()
        for _ in range(20):
            with stream.capture() as capture:
                child = os.fork()
                if child == 0:
                    for act in (capture.end, capture.abandon):
                        try:
                            act()
                            os._exit(1)
                        except RuntimeError:
                            pass
                    del capture
                    os._exit(0)
                assert os.waitpid(child, 0)[1] == 0
                assert capture.status == "active"
        """
    )


def test_a_capture_mode_may_be_used_by_several_threads(device):
    manager, inside, leave, errors = rs.capture_mode("relaxed", device), threading.Barrier(3), threading.Event(), []

    def use():
        try:
            with manager:
                inside.wait(30)
                leave.wait(30)
            assert rs._core._exchange_capture_mode(device, 0) == 0
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=use) for _ in range(2)]
    for thread in threads:
        thread.start()
    inside.wait(30)
    leave.set()
    for thread in threads:
        thread.join()
    assert errors == []


def test_streams_that_are_dropped_in_a_capture_do_not_break_it(stream, device):
    with stream.capture() as capture:
        for _ in range(20):
            other = rs.Stream(device)
            other.wait(stream)
            other.launch_host_func(int)
            stream.wait(other)
            del other
        gc.collect()
    assert len(capture.graph.nodes) == 20


def test_captures_and_other_work_of_many_threads(device):
    """Several threads capture into one graph while it is asked, and others queue work as captures begin and end."""
    errors, target = [], rs.pinned_empty(64, np.uint8, device)
    origin, branches = rs.Stream(device), [rs.Stream(device) for _ in range(3)]
    over = threading.Event()

    def work(stream):
        try:
            while not over.is_set():
                try:
                    stream.fill(target, 1)
                    stream.launch_host_func(int)
                except rs.CaptureError:
                    pass
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=[branch]) for branch in branches]
    for thread in threads:
        thread.start()
    try:
        for _ in range(max(1, 200 // STRESS)):
            try:
                with origin.capture(mode="relaxed") as capture:
                    for branch in branches:
                        branch.wait(origin)
                        assert branch.capture_info.id == capture.id
                        origin.wait(branch)
                    assert capture.status == "active"
                    assert capture.dependencies is not None
            except rs.CaptureUnjoinedError:
                continue
            capture.graph.instantiate().launch(origin)
    finally:
        over.set()
    for thread in threads:
        thread.join()
    assert errors == []
    for each in (origin, *branches):
        each.synchronize(60)


@pytest.mark.parametrize("shared", [False, True])
def test_an_event_may_be_asked_for_while_captures_get_it(stream, device, shared):
    """What asks for a captured event breaks the capture, so nothing does."""
    event, earlier = rs.Event(device, timing=True), rs.Event(device, timing=True)
    asks = [event.query, event.completion, lambda: event.elapsed_since(earlier), lambda: event.synchronize(0)]
    errors, over = [], threading.Event()
    stream.record(earlier)
    if shared:
        assert event.handle

    def ask(how):
        try:
            while not over.is_set():
                with contextlib.suppress(rs.CudaError, rs.WaitTimeoutError):
                    how()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=ask, args=[how]) for how in asks]
    for thread in threads:
        thread.start()
    try:
        for _ in range(max(1, 400 // STRESS)):
            rs.testing.spin(stream, 100)
            stream.record(event)
            with stream.capture(mode="relaxed") as capture:
                capture.launch_host_func(int)
                stream.record(event)
                capture.launch_host_func(int)
    finally:
        over.set()
    for thread in threads:
        thread.join(60)
    assert errors == []


def test_an_event_of_an_earlier_capture_into_the_graph_is_refused(stream, device):
    graph, event = rs.Graph(device), rs.Event(device)
    with stream.capture(graph=graph) as first:
        stream.record(event)
        number = first.id
    with stream.capture(graph=graph) as second:
        assert second.id == number
        with pytest.raises(rs.CaptureMergeError):
            stream.wait(event)
        assert second.status == "active"


def test_the_graph_of_a_capture_may_be_asked_for_by_several_threads(stream):
    capture = stream.capture()

    def ask():
        for _ in range(2000):
            with pytest.raises(rs.CaptureError):
                capture.graph

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()


def test_a_full_queue_holds_up_no_capture_of_another_stream(device):
    full, other, third = rs.Stream(device), rs.Stream("soft:1"), rs.Stream("soft:1")
    array, seen = rs.device_empty(4, np.int8, device), []
    with rs.testing.hold(full):
        filling = threading.Thread(target=lambda: [full.fill(array, 0) for _ in range(1200)])
        filling.start()
        with other.capture() as capture:
            other.launch_host_func(seen.append, 1)
            third.synchronize(30)
            assert third.query()
        run(capture.graph, other)
    filling.join(60)
    assert seen == [1]


def test_abandoning_elsewhere_does_not_lose_the_callers_graph(stream, device):
    graph, errors = rs.Graph(device), []
    node = graph.add_host_node(int)

    def abandon(capture):
        try:
            capture.abandon()
        except rs.CudaError as error:
            errors.append(error)

    with stream.capture(graph=graph) as capture:
        thread = threading.Thread(target=abandon, args=[capture])
        thread.start()
        thread.join()
        assert [type(error) for error in errors] == [rs.CaptureWrongThreadError]
        assert capture.status == "active"
    assert graph.nodes == [node]
    with pytest.raises(ZeroDivisionError), stream.capture() as capture:
        thread = threading.Thread(target=abandon, args=[capture])
        thread.start()
        thread.join()
        assert stream.capture_status == "none"
        1 / 0


@pytest.mark.soft_only
def test_an_end_that_the_driver_refuses_can_be_repeated(stream, device):
    for graph in (None, rs.Graph(device)):
        with stream.capture(graph=graph) as capture:
            node = stream.launch_host_func(int)
            with rs.testing.inject("cuStreamEndCapture", 999), pytest.raises(rs.CudaError):
                capture.end()
            assert capture.status == "active"
        assert capture.graph.nodes == [node]
