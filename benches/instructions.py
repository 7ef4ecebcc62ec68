"""How many instructions and allocations the core needs for one enqueue, dispatch or idle call, counted by callgrind.

    python benches/instructions.py [--baseline] [--keep FOLDER]

Runs `benches/instructions.rs` on the software device under valgrind, for two numbers of rounds, and takes the
difference, so that what happens once does not count. What softcuda and the C library do is left out. The counts are
compared with `instructions.json` and do not depend on what else the machine does; with another compiler they do change,
and are then shown without a verdict. `--baseline` writes the file anew.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BASELINE = Path(__file__).with_suffix(".json")
SIGNALS = ("memory", "driver")
KINDS = ("callback", "host function", "continuation", "notice")
CALLS = ("query", "synchronize", "event record", "completion", "create and close")
CARGO = os.environ.get("CARGO", "cargo")
PROGRAM = "instructions"
ROUNDS = (5, 25)
BATCH = 100  # of instructions.rs
ALLOCATIONS = {"malloc", "calloc", "realloc", "aligned_alloc", "posix_memalign"}

# By how much a count may grow. The maps that a new stream goes into have random keys, and how many jobs a worker of the
# executor finds at a time is a matter of chance.
TOLERANCE = 0.01
TOLERANCES = {
    "idle create and close": 0.05,
    "dispatch continuation, memory": 0.03,
    "dispatch continuation, driver": 0.03,
}

# The names that callgrind gives, mangled: an enqueue or call begins at one of the first, a dispatch at the others.
HERE = re.compile("measured_(enqueue|call)")
THERE = re.compile("lane.*run_in_turn|callback.*trampoline")
# Of a closure on the heap: how a thread of the executor calls its job, and before that the system the thread.
BOXED = re.compile("vtable.shim")


def part(frames: list[str]) -> str | None:
    """What a function was called for, by the names of it and of its callers, innermost first.

    Nothing that counts: what softcuda called, and the wait for a lock.
    """
    boxed = [index for index, frame in enumerate(frames) if BOXED.search(frame)]
    for index, frame in enumerate(frames):
        if "softcuda" in frame or "lock_contended" in frame:
            return None
        if HERE.search(frame):
            return "enqueue"
        if THERE.search(frame) or index in boxed[:-1]:
            return "dispatch"
    return None


def lines_of(profile: Path) -> Iterator[tuple[str, list[str], str | None, int, int]]:
    """For each line: object and frames of the function, what it calls, how many times, and its own instructions."""
    names: dict[tuple[str, str], str] = {}

    def named(kind: str, text: str) -> str:
        number, _, name = text.partition(" ")
        if name:
            names[kind, number] = name
        return names[kind, number]

    owner, callee = "", None
    frames: list[str] = []
    for line in profile.read_text().splitlines():
        key, equals, value = line.partition("=")
        if equals and key in ("ob", "cob"):
            name = named("ob", value)
            owner = name if key == "ob" else owner
        elif equals and key in ("fn", "cfn"):
            name = named("fn", value)
            if key == "fn":
                frames = name.split("'")
            else:
                callee = name.split("'")[0]
        elif equals and key == "calls":
            yield owner, frames, callee, int(value.split()[0]), 0
        elif line[:1] in "+-*0123456789" and line:
            # The line behind `calls=` has what the callee took.
            if callee is None:
                yield owner, frames, None, 0, int(line.split()[1])
            callee = None


def count(program: Path, what: str, signal: str, rounds: int, folder: Path) -> Counter[str]:
    """Instructions and allocations of a run, by part."""
    stem = folder / f"{what}.{signal}.{rounds}".replace(" ", "-")
    for left in folder.glob(f"{stem.name}-*"):
        left.unlink()
    options = ["--separate-threads=yes", "--separate-callers=60", "--demangle=no", f"--callgrind-out-file={stem}"]
    subprocess.run(
        ["valgrind", "-q", "--tool=callgrind", *options, program, what, signal, str(rounds)], check=True, timeout=120
    )
    counts: Counter[str] = Counter()
    for profile in folder.glob(f"{stem.name}-*"):
        for owner, frames, callee, calls, instructions in lines_of(profile):
            if owner != str(program) or (found := part(frames)) is None:
                continue
            counts[found] += instructions
            if callee in ALLOCATIONS:
                counts[f"{found}, allocations"] += calls
    return counts


def measure(program: Path, folder: Path) -> dict[str, float]:
    """Everything, for one operation each."""
    figures = {}
    for what, signals in [(kind, SIGNALS) for kind in KINDS] + [(call, ("driver",)) for call in CALLS]:
        for signal in signals:
            few, many = (count(program, what, signal, rounds, folder) for rounds in ROUNDS)
            name = f"{what}, {signal}" if what in KINDS else what
            parts = ("enqueue", "dispatch") if what in KINDS else ("enqueue",)
            for found in parts:
                if not many[found]:
                    sys.exit(f"{name}: callgrind found no {found}: the functions are called otherwise now")
                label = f"{found} {name}" if what in KINDS else f"idle {name}"
                for suffix in ("", ", allocations"):
                    difference = many[found + suffix] - few[found + suffix]
                    figures[label + suffix] = round(difference / ((ROUNDS[1] - ROUNDS[0]) * BATCH), 2)
    return figures


def build() -> Path:
    """The program, built by Cargo."""
    done = subprocess.run(
        [CARGO, "bench", "--no-default-features", "--bench", PROGRAM, "--no-run", "--message-format=json"],
        cwd=ROOT,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    for line in done.stdout.splitlines():
        message = json.loads(line)
        if message.get("executable") and message["target"]["name"] == PROGRAM:
            return Path(message["executable"])
    sys.exit("Cargo has built no program")


def main() -> int:
    """Counts, prints, and compares or writes the baseline."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--baseline", action="store_true", help="write the counts to the baseline")
    parser.add_argument("--keep", type=Path, help="leave callgrind's files in this folder, for callgrind_annotate")
    options = parser.parse_args()
    program = build()
    compiler = subprocess.run(["rustc", "--version"], check=True, capture_output=True, text=True).stdout.strip()
    made_by = f"{compiler}, {platform.machine()}"
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.keep or Path(scratch)
        folder.mkdir(exist_ok=True)
        figures = measure(program, folder)
    if options.baseline:
        BASELINE.write_text(json.dumps({"made by": made_by, "figures": figures}, indent=1) + "\n")
    baseline = json.loads(BASELINE.read_text())
    worse = []
    for name, figure in figures.items():
        before = baseline["figures"].get(name)
        change = f"{figure / before - 1:+8.1%}" if before else ""
        print(f"  {name:52s} {figure:10.2f} {change}")
        # The little is for allocations that come once in a while.
        if before is None or figure > before * (1 + TOLERANCES.get(name, TOLERANCE)) + 0.05:
            worse.append(name)
    if baseline["made by"] != made_by:
        print(f"The baseline was made by {baseline['made by']}, this by {made_by}: no verdict")
        return 0
    if worse:
        print(f"Above the baseline: {'; '.join(worse)}")
        print("If that is meant, `make bench-baseline` writes the baseline anew.")
    return bool(worse)


if __name__ == "__main__":
    sys.exit(main())
