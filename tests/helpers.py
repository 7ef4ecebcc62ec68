"""What several test modules use."""

from __future__ import annotations

import threading
import weakref


def freed(reference, timeout=30):
    """Whether what `reference` refers to goes away: the driver drops what graphs own on a thread of its own."""
    gone = threading.Event()
    if reference() is None:
        return True
    weakref.finalize(reference(), gone.set)
    return gone.wait(timeout)


def until(condition):
    """Asks for what a background thread does, and tells nobody of."""
    asked = threading.Event()
    for _ in range(30_000):
        if condition():
            return
        asked.wait(0.001)
    raise AssertionError("it never came to be")


def run(graph, stream, times=1):
    exec = graph.instantiate()
    for _ in range(times):
        exec.launch(stream)
    stream.synchronize(30)
    return exec
