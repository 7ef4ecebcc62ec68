"""What the tests share.

The suite runs on the software device, or on GPU 0 with `RSTREAM_TEST_DEVICE=gpu`. Tests that only make sense on one of
the two are left out of the other's run.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator

import pytest

import rstream as rs

DEVICE = os.environ.get("RSTREAM_TEST_DEVICE", "soft")
if DEVICE not in ("soft", "gpu"):
    raise pytest.UsageError(f"RSTREAM_TEST_DEVICE={DEVICE}: expected soft or gpu")

# What the tests and the programs that they start take for the default device.
os.environ["RSTREAM_DEVICE"] = "soft" if DEVICE == "soft" else "0"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    other = "gpu_only" if DEVICE == "soft" else "soft_only"
    left_out = [item for item in items if item.get_closest_marker(other)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker(other)]


# The suite runs under each signal: RSTREAM_SIGNAL=memory or driver.
SIGNAL = os.environ.setdefault("RSTREAM_SIGNAL", "driver" if DEVICE == "soft" else "memory")


@pytest.fixture(scope="session")
def enqueue_function() -> str:
    """The function of the driver that queues host code under the signal that streams have."""
    return "cuStreamBatchMemOp_v2" if SIGNAL == "memory" else "cuStreamAddCallback"


@pytest.fixture(scope="session")
def device() -> rs.Device:
    return rs.default_device()


@pytest.fixture
def stream(device: rs.Device) -> Iterator[rs.Stream]:
    with rs.Stream(device) as stream:
        yield stream


@pytest.fixture
def lost(monkeypatch: pytest.MonkeyPatch) -> Lost:
    """What reached `sys.unraisablehook`."""
    lost = Lost()
    monkeypatch.setattr(sys, "unraisablehook", lost.take)
    return lost


class Lost:
    """A list of exceptions that can be waited for."""

    def __init__(self) -> None:
        self.exceptions: list[BaseException | None] = []
        self.changed = threading.Condition()

    def take(self, unraisable: sys.UnraisableHookArgs) -> None:
        with self.changed:
            self.exceptions.append(unraisable.exc_value)
            self.changed.notify_all()

    def wait(self, count: int) -> list[BaseException | None]:
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.exceptions) >= count, 30)
            return list(self.exceptions)


Run = Callable[..., str]


@pytest.fixture
def program() -> Run:
    """Runs a program in an interpreter of its own; it has to end well. Returns its output, with `errors` both kinds."""

    def run(text: str, timeout: float = 60, status: int = 0, errors: bool = False, **environment: str) -> str:
        done = subprocess.run(
            [sys.executable, "-c", "import rstream as rs\n" + textwrap.dedent(text)],
            capture_output=True,
            text=True,
            timeout=timeout,
            env={**os.environ, **environment},
        )
        assert done.returncode == status, (done.returncode, done.stdout, done.stderr)
        assert "panicked" not in done.stderr, done.stderr
        assert "atal" not in done.stderr, done.stderr
        return done.stdout + done.stderr if errors else done.stdout

    return run
