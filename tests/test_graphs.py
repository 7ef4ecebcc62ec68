"""Graphs made by hand, executables, and what they keep alive."""

from __future__ import annotations

import gc
import os
import pickle
import sys
import threading
import traceback
import weakref
from xml.etree import ElementTree

import numpy as np
import pytest
from helpers import freed, run, until

import rstream as rs

STRESS = int(os.environ.get("RSTREAM_STRESS", "1"))


@pytest.fixture
def graph(device):
    return rs.Graph(device)


def test_nodes_and_edges(graph, device):
    first = graph.add_empty_node()
    second = graph.add_host_node(int, dependencies=first)
    third = graph.add_empty_node(dependencies=[first, second])
    graph.add_dependencies([])
    assert {node.kind for node in graph.nodes} == {"empty", "host"}
    assert set(graph.edges) == {(first, second), (first, third), (second, third)}
    fourth = graph.add_empty_node()
    graph.add_dependencies([(third, fourth), (first, fourth)])
    assert len(graph.edges) == 5
    assert graph.device == device
    assert graph.handle
    assert len({first, second, third, fourth}) == 4
    assert first != second
    assert hash(first) == hash(graph.nodes[graph.nodes.index(first)])
    assert "empty" in repr(first)


def test_a_graph_of_every_kind_of_node_runs_in_order(graph, stream, device):
    order, event = [], rs.Event(device)
    pinned, result = rs.pinned_empty(4, np.int32, device), np.zeros(4, np.int32)
    memory = rs.device_empty(4, np.int32, device)
    fill = graph.add_memset_node(memory, 5)
    copy = graph.add_memcpy_node(pinned, memory, dependencies=fill)
    look = graph.add_host_node(lambda: order.append(np.asarray(pinned).tolist()), dependencies=copy)
    back = graph.add_memcpy_node(result, pinned, dependencies=copy)
    both = graph.add_empty_node(dependencies=[look, back])
    record = graph.add_event_record_node(event, dependencies=both)
    child = rs.Graph(device)
    child.add_host_node(order.append, "child")
    inside = graph.add_child_graph(child, dependencies=record)
    wait = graph.add_event_wait_node(event, dependencies=inside)
    graph.add_host_node(order.append, "last", dependencies=wait)
    kinds = sorted(node.kind for node in graph.nodes)
    assert kinds == sorted(
        ["memset", "memcpy", "host", "memcpy", "empty", "event_record", "graph", "wait_event", "host"]
    )
    run(graph, stream, 2)
    assert order == [[5, 5, 5, 5], "child", "last"] * 2
    assert result.tolist() == [5, 5, 5, 5]
    assert event.query()


def test_branches_may_run_in_any_order_but_once(graph, stream):
    seen = []
    first = graph.add_host_node(seen.append, 0)
    branches = [graph.add_host_node(seen.append, number, dependencies=first) for number in range(1, 9)]
    graph.add_host_node(seen.append, 9, dependencies=branches)
    run(graph, stream, 5)
    for launch in range(5):
        part = seen[launch * 10 : launch * 10 + 10]
        assert part[0] == 0
        assert part[9] == 9
        assert sorted(part) == list(range(10))


def test_bad_dependencies_are_refused_and_add_nothing(graph, device):
    node, stranger = graph.add_empty_node(), rs.Graph(device).add_empty_node()
    ran = []
    for add in (
        lambda nodes: graph.add_empty_node(dependencies=nodes),
        lambda nodes: graph.add_host_node(ran.append, dependencies=nodes),
        lambda nodes: graph.add_event_wait_node(rs.Event(device), dependencies=nodes),
        lambda nodes: graph.add_child_graph(rs.Graph(device), dependencies=nodes),
        lambda nodes: graph.add_memset_node(rs.pinned_empty(4, np.int8, device), 0, dependencies=nodes),
    ):
        with pytest.raises(rs.InvalidValueError, match="another graph"):
            add([stranger])
        with pytest.raises(rs.InvalidValueError, match="twice"):
            add([node, node])
        with pytest.raises(TypeError, match="no Node"):
            add(["node"])
    other = graph.add_empty_node(dependencies=node)
    for edges, what in (
        ([(node, other)], "already"),
        ([(node, node)], "itself"),
        ([(stranger, node)], "another graph"),
        ([(other, node), (other, node)], "already"),
    ):
        with pytest.raises(rs.InvalidValueError, match=what):
            graph.add_dependencies(edges)
    assert set(graph.nodes) == {node, other}
    assert graph.edges == [(node, other)]


def test_a_cycle_cannot_be_instantiated(graph):
    first = graph.add_empty_node()
    second = graph.add_empty_node(dependencies=first)
    graph.add_dependencies([(second, first)])
    with pytest.raises(rs.InvalidValueError, match="cycle"):
        graph.instantiate()
    ElementTree.fromstring(graph.to_svg())


@pytest.mark.parametrize(
    ("arguments", "error", "what"),
    [
        ((np.zeros(3), np.zeros(4)), rs.InvalidValueError, "24 bytes"),
        ((np.zeros(0), np.zeros(0)), rs.InvalidValueError, "0 bytes"),
        ((np.zeros((4, 4))[:, 0], np.zeros(4)), rs.InvalidValueError, "C-contiguous"),
        ((b"bytes", np.zeros(4)), TypeError, "bytes"),
    ],
)
def test_bad_copies_are_refused(graph, arguments, error, what):
    with pytest.raises(error, match=what):
        graph.add_memcpy_node(*arguments)
    assert graph.nodes == []


def test_bad_functions_fills_and_children(graph, device):
    with pytest.raises(TypeError, match="not callable"):
        graph.add_host_node(5)
    with pytest.raises(rs.InvalidValueError, match="does not fit"):
        graph.add_memset_node(rs.pinned_empty(4, np.int8, device), 1000)
    elsewhere = rs.device_empty(1, device="soft:1")
    for add in (
        lambda: graph.add_memset_node(elsewhere, 0),
        lambda: graph.add_memcpy_node(elsewhere, np.zeros(1)),
    ):
        with pytest.raises(rs.InvalidValueError, match="dst: memory of device soft:1 in a graph of device"):
            add()
    with pytest.raises(rs.InvalidValueError, match="itself"):
        graph.add_child_graph(graph)
    with pytest.raises(rs.ClosedError):
        event = rs.Event(device)
        event.close()
        graph.add_event_record_node(event)
    assert graph.nodes == []


def test_a_coroutine_function_is_an_error_of_its_node(graph, stream):
    async def step(*_args):
        raise AssertionError("it is never started")

    with stream.capture(graph=graph):
        captured = stream.launch_host_func(step)
    added = graph.add_host_node(step, dependencies=captured)
    exec, told = graph.instantiate(), []
    exec.on_error(told.append)
    exec.launch(stream)
    stream.synchronize(30)
    assert [captured.errors, added.errors] == [[told[0]], [told[1]]]
    for error in told:
        assert isinstance(error, TypeError)
        assert "step is a coroutine function, and host code is not awaited" in str(error)


def test_a_clone_is_a_graph_of_its_own(graph, stream):
    seen = []
    node = graph.add_host_node(seen.append, 1)
    clone = graph.clone()
    assert clone != graph
    found = clone.find_in_clone(node)
    assert clone.nodes == [found]
    assert found != node
    with pytest.raises(rs.InvalidValueError):
        graph.find_in_clone(found)
    graph.add_host_node(seen.append, 2, dependencies=node)
    with pytest.raises(rs.InvalidValueError, match="another graph"):
        clone.add_empty_node(dependencies=node)
    run(clone, stream)
    assert seen == [1]
    assert node.runs == 1


class Payload:
    """A callable over a large array."""

    def __init__(self):
        self.array = np.ones(1_000_000)
        self.calls = 0

    def __call__(self):
        self.calls += 1


@pytest.mark.parametrize("how", ["captured", "added"])
def test_a_function_lives_as_long_as_anything_needs_it_and_no_longer(stream, device, how):
    payload = Payload()
    array, calls = weakref.ref(payload.array), []
    graph = rs.Graph(device)
    if how == "captured":
        with stream.capture() as capture:
            node = stream.launch_host_func(lambda kept: calls.append(kept.array.sum()), payload)
        graph = capture.graph
        del capture
    else:
        node = graph.add_host_node(lambda kept: calls.append(kept.array.sum()), payload)
    del payload
    gc.collect()
    assert array() is not None
    exec = graph.instantiate()
    del graph
    gc.collect()
    assert array() is not None
    with rs.testing.hold(stream):
        exec.launch(stream)
        exec.close()
        del exec
        gc.collect()
        assert array() is not None
    stream.synchronize(30)
    assert calls == [1_000_000.0]
    assert freed(array)
    assert node.runs == 1
    assert node.name.endswith("<lambda>")


def test_what_a_captured_copy_uses_lives_as_long_as_the_graph(stream, device):
    source, target = np.arange(1000.0), np.zeros(1000)
    arrays = [weakref.ref(source), weakref.ref(target)]
    with stream.capture() as capture:
        stream.copy(target, source)
    del source, target
    exec = capture.graph.instantiate()
    del capture
    gc.collect()
    assert all(array() is not None for array in arrays)
    exec.launch(stream)
    stream.synchronize(30)
    assert np.array_equal(arrays[1](), np.arange(1000.0))
    exec.close()
    assert all(freed(array) for array in arrays)


def test_ten_thousand_launches_run_it_ten_thousand_times(graph, stream):
    times, payload = 10_000 // STRESS, Payload()
    node = graph.add_host_node(payload)
    with graph.instantiate() as exec:
        for _ in range(times):
            exec.launch(stream)
        stream.synchronize(120)
    assert exec.closed
    assert payload.calls == node.runs == times


def test_an_exception_is_kept_and_reported_and_the_launch_goes_on(graph, stream, lost):
    seen, errors = [], iter([ZeroDivisionError("first"), KeyError("second")])

    def bad():
        raise next(errors)

    node = graph.add_host_node(bad)
    graph.add_host_node(seen.append, 1, dependencies=node)
    exec = run(graph, stream)
    assert [type(error) for error in node.errors] == [ZeroDivisionError]
    assert lost.wait(1) == node.errors
    assert seen == [1]
    told = []
    exec.on_error(told.append)
    exec.launch(stream)
    stream.synchronize(30)
    assert [type(error) for error in told] == [KeyError]
    assert node.errors[1] is told[0]
    assert len(lost.exceptions) == 1
    assert seen == [1, 1]


def test_handlers_hear_of_children_and_of_updates_until_the_executable_is_gone(stream, device, lost):
    def bad(name):
        raise ValueError(name)

    def outer(name):
        child, graph = rs.Graph(device), rs.Graph(device)
        child.add_host_node(bad, name)
        graph.add_child_graph(child)
        return graph

    told = []
    first = outer("first")
    exec = first.instantiate()
    exec.on_error(lambda error: told.append(str(error)))
    exec.launch(stream)
    stream.synchronize(30)
    exec.update(outer("second"))
    exec.launch(stream)
    stream.synchronize(30)
    assert told == ["first", "second"]
    del exec
    gc.collect()
    run(first, stream)
    assert [str(error) for error in lost.wait(1)] == ["first"]
    assert told == ["first", "second"]


def test_a_handler_hears_of_each_exception_once(stream, device):
    def bad():
        raise ValueError("bad")

    def make():
        graph = rs.Graph(device)
        graph.add_host_node(bad)
        return graph

    first, told = make(), []
    exec = first.instantiate()
    exec.on_error(lambda error: told.append("one"))
    exec.on_error(lambda error: told.append("two"))
    for _ in range(5):
        exec.update(make())
    exec.update(first)
    exec.launch(stream)
    stream.synchronize(30)
    assert sorted(told) == ["one", "two"]


def test_an_error_has_its_traceback_but_holds_no_frames(graph, stream):
    payload = Payload()
    reference = weakref.ref(payload.array)

    def bad(kept):
        array = kept.array
        raise ValueError(array.size)

    node = graph.add_host_node(bad, payload)
    exec = graph.instantiate()
    exec.on_error(lambda error: None)
    exec.launch(stream)
    stream.synchronize(30)
    (error,) = node.errors
    names = [frame.name for frame in traceback.extract_tb(error.__traceback__)]
    assert names[-1] == "bad"
    del payload
    exec.close()
    graph.close()
    assert freed(reference)


def test_cycles_through_a_handler_are_collected(graph):
    class Owner:
        pass

    owner = Owner()
    owner.exec = graph.instantiate()
    owner.exec.on_error(lambda error, owner=owner: None)
    reference = weakref.ref(owner)
    del owner
    gc.collect()
    assert freed(reference)


def test_a_graph_is_closed(device, stream):
    ran = []
    with rs.Graph(device) as graph:
        graph.add_host_node(ran.append, 1)
        exec = graph.instantiate()
    graph.close()
    for act in (lambda: graph.nodes, graph.instantiate, graph.clone, lambda: graph.handle):
        with pytest.raises(rs.ClosedError):
            act()
    exec.launch(stream)
    stream.synchronize(30)
    assert ran == [1]
    other = rs.Graph(device)
    with stream.capture(graph=other), pytest.raises(rs.CaptureUnsupportedError, match="captured into"):
        other.close()


def test_an_exception_of_a_handler_is_reported(graph, stream, lost):
    def bad():
        raise ValueError("function")

    def worse(error):
        raise TypeError("handler")

    graph.add_host_node(bad)
    exec = graph.instantiate()
    exec.on_error(worse)
    exec.launch(stream)
    stream.synchronize(30)
    assert [str(error) for error in lost.wait(1)] == ["handler"]
    with pytest.raises(TypeError, match="not callable"):
        exec.on_error("handler")


def test_a_function_that_always_raises_keeps_a_hundred_errors(graph, stream):
    numbers = iter(range(150))

    def bad():
        raise ValueError(next(numbers))

    node = graph.add_host_node(bad)
    exec = graph.instantiate()
    exec.on_error(lambda error: None)
    for _ in range(150):
        exec.launch(stream)
    stream.synchronize(60)
    assert [error.args[0] for error in node.errors] == list(range(50, 150))


def test_a_host_function_makes_no_calls_of_the_api(graph, stream):
    def call():
        stream.query()

    node = graph.add_host_node(call)
    exec = graph.instantiate()
    exec.on_error(lambda error: None)
    exec.launch(stream)
    stream.synchronize(30)
    assert [type(error) for error in node.errors] == [rs.NotPermittedError]


def test_update_changes_later_launches(graph, stream, device):
    seen = []
    graph.add_host_node(seen.append, "old")
    exec = graph.instantiate()
    new = rs.Graph(device)
    new.add_host_node(seen.append, "new")
    with rs.testing.hold(stream):
        exec.launch(stream)
        exec.update(new)
        exec.launch(stream)
    stream.synchronize(30)
    assert seen == ["old", "new"]
    other = rs.Graph(device)
    other.add_empty_node()
    for bad in (other, rs.Graph(device)):
        with pytest.raises(rs.GraphUpdateError, match="Instantiate") as raised:
            exec.update(bad)
        assert raised.value.code == 910
    exec.launch(stream)
    stream.synchronize(30)
    assert seen == ["old", "new", "new"]


def test_launches_of_one_executable_do_not_overlap(graph, device):
    streams, running, most = [rs.Stream(device) for _ in range(3)], [], []

    def enter():
        running.append(1)
        most.append(len(running))

    graph.add_host_node(running.pop, dependencies=graph.add_host_node(enter))
    exec = graph.instantiate()
    for _ in range(20):
        for stream in streams:
            exec.launch(stream)
    for stream in streams:
        stream.synchronize(30)
    assert len(most) == 60
    assert set(most) == {1}


def test_launches_from_many_threads(graph, stream):
    seen = []
    graph.add_host_node(seen.append, 1)
    exec = graph.instantiate()
    exec.upload(stream)
    threads = [threading.Thread(target=lambda: [exec.launch(stream) for _ in range(50)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    stream.synchronize(60)
    assert len(seen) == 200


def test_a_closed_executable_says_so(graph, stream):
    exec = graph.instantiate()
    assert exec.handle
    exec.close()
    exec.close()
    assert exec.closed
    assert "closed" in repr(exec)
    for act in (
        lambda: exec.launch(stream),
        lambda: exec.update(graph),
        lambda: exec.handle,
        lambda: exec.on_error(print),
    ):
        with pytest.raises(rs.ClosedError):
            act()


def test_drawings(graph):
    def fünf():
        pass

    first = graph.add_host_node(fünf)
    graph.add_empty_node(dependencies=first)

    def odd():
        pass

    odd.__qualname__ = 'a "quoted" \\ name\n<&>'
    graph.add_host_node(odd, dependencies=first)
    dot = graph.to_dot()
    assert dot.startswith("digraph")
    assert dot.count("->") == 2
    assert "fünf" in dot
    assert 'a \\"quoted\\"' in dot
    svg = ElementTree.fromstring(graph.to_svg())
    assert svg.tag.endswith("svg")
    assert graph._repr_svg_()
    empty = rs.Graph(graph.device)
    assert "->" not in empty.to_dot()
    ElementTree.fromstring(empty.to_svg())


def test_a_dense_graph_is_drawn_at_once(graph):
    nodes = []
    for number in range(30):
        nodes.append(graph.add_host_node(int, number, dependencies=nodes))
    assert graph.to_svg().count('<path d="M') == 1 + 30 * 29 // 2


def test_a_chain_of_clones_goes_away(device):
    graph = rs.Graph(device)
    first = weakref.ref(graph)
    for _ in range(30_000 // STRESS):
        graph = graph.clone()
    assert freed(first)
    del graph
    gc.collect()


def test_the_original_of_a_clone_has_to_be_there(device):
    graph = rs.Graph(device)
    node, clone = graph.add_empty_node(), graph.clone()
    assert clone.find_in_clone(node) in clone.nodes
    with pytest.raises(rs.InvalidValueError, match="no clone"):
        graph.find_in_clone(node)
    del graph
    gc.collect()
    with pytest.raises(rs.InvalidValueError, match="gone"):
        clone.find_in_clone(node)


@pytest.mark.soft_only
def test_functions_of_a_graph_wait_for_no_other_device(stream):
    """They run on the callback thread of where the graph is launched."""
    reached, other = threading.Event(), rs.Stream("soft:1")
    graph = rs.Graph(stream.device)
    graph.add_host_node(reached.set)
    exec = graph.instantiate()
    blocked = stream.launch_host_func(reached.wait, 60)
    exec.launch(other)
    assert blocked.result(60)


def test_a_large_graph_is_not_drawn_in_a_notebook(graph):
    for _ in range(101):
        graph.add_empty_node()
    assert graph._repr_svg_() is None


def test_graphs_are_not_pickled(graph):
    for kept in (graph, graph.instantiate(), graph.add_empty_node(), graph.add_host_node(int)):
        with pytest.raises(TypeError, match="pickled"):
            pickle.dumps(kept)


@pytest.mark.gpu_only
def test_objects_of_two_drivers_do_not_mix(device):
    soft, graph = rs.Stream("soft"), rs.Graph(device)
    with pytest.raises(rs.InvalidValueError, match="device"):
        graph.instantiate().launch(soft)
    with pytest.raises(rs.InvalidValueError, match="device"):
        graph.add_event_wait_node(rs.Event("soft"))
    with pytest.raises(rs.InvalidValueError, match="device"):
        graph.add_child_graph(rs.Graph("soft"))


@pytest.mark.soft_only
@pytest.mark.parametrize("function", ["cuUserObjectCreate", "cuGraphRetainUserObject", "cuGraphAddHostNode"])
def test_a_function_that_cannot_be_added_is_let_go(graph, function):
    def refused():
        raise AssertionError("must not run")

    reference = weakref.ref(refused)
    with rs.testing.inject(function, 2), pytest.raises(rs.OutOfMemoryError):
        graph.add_host_node(refused)
    del refused
    gc.collect()
    assert freed(reference)
    assert graph.nodes == []


@pytest.mark.soft_only
def test_after_a_fault_its_functions_do_not_run_and_a_completion_tells(program):
    program(
        """
        stream, seen = rs.Stream(), []
        graph = rs.Graph()
        graph.add_host_node(seen.append, 1)
        exec = graph.instantiate()
        hold = rs.testing.hold(stream)
        rs.testing.fault(stream)
        exec.launch(stream)
        told = stream.completion()
        hold.release()
        assert isinstance(told.exception(30), rs.DeviceFaultError)
        assert seen == []
        """
    )


def test_a_program_may_end_with_a_launch_pending(program):
    program(
        """
        import sys
        stream, graph = rs.Stream(), rs.Graph()
        graph.add_host_node(lambda: sys.stdout.write("late"))
        exec = graph.instantiate()
        hold = rs.testing.hold(stream)
        exec.launch(stream)
        """,
        RSTREAM_EXIT_TIMEOUT="0.2",
    )


def test_references_are_balanced(stream, device):
    function = Payload()
    before = sys.getrefcount(function)
    for _ in range(20):
        graph = rs.Graph(device)
        graph.add_host_node(function)
        run(graph, stream)
    reference = weakref.ref(graph)
    del graph
    assert freed(reference)
    holder = type("Holder", (), {})()
    last = rs.Graph(device)
    last.add_host_node(lambda kept: None, holder)
    gone = weakref.ref(holder)
    del holder, last
    gc.collect()
    assert freed(gone)
    until(lambda: sys.getrefcount(function) == before)
