"""The command line: ``python -m rstream info`` and ``python -m rstream demo [FILE]``."""

import argparse
import io
import os
import sys
from collections.abc import Sequence

from rstream import __version__, _demo, _info


def _positive(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 1")
    return number


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one subcommand and return the exit status: 0, 1 for a failure, 2 for a wrong argument or file."""
    parser = argparse.ArgumentParser(prog="python -m rstream", description="Host code at points of a CUDA stream.")
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("info", help="list the devices, their driver, and what each supports")
    demo = commands.add_parser(
        "demo",
        help="stream a file through a device and back, with checksums in callbacks",
        description="Stream a file in chunks through pinned and device memory and back over several streams. A "
        "callback on the stream computes the CRC-32 of each chunk; combined, they have to equal zlib's of the file.",
    )
    demo.add_argument("file", metavar="FILE", nargs="?", help="default: the largest file that comes with Python")
    demo.add_argument(
        "--device",
        help='"0" for GPU 0, "soft" for the software device; default: RSTREAM_DEVICE, else GPU 0, else "soft"',
    )
    demo.add_argument("--streams", type=_positive, default=4, metavar="N", help="how many streams (default: 4)")
    demo.add_argument("--chunk", type=_positive, default=1 << 20, metavar="BYTES", help="default: 1048576")
    options = parser.parse_args(arguments)

    # File and device names may hold what the terminal's encoding lacks.
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        if options.command == "info":
            status = _info.run()
        else:
            status = _demo.run(options.file, device=options.device, streams=options.streams, chunk=options.chunk)
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # Whoever read the output has seen enough; what is still buffered goes nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


if __name__ == "__main__":
    sys.exit(main())
