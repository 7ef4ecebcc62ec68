"""Let the end of one batch queue the next, without a thread that waits.

Runs on GPU 0, or on the software device with RSTREAM_DEVICE=soft.
"""

import threading

import numpy as np

import rstream as rs


def main() -> None:
    """Double a number on its way round, ten times."""
    value = np.asarray(rs.pinned_empty(1, np.int64))
    value[:] = 1
    there = rs.device_empty(1, np.int64)
    stream = rs.Stream()
    finished = threading.Event()

    def next_round(left: int) -> None:
        # The stream does not wait for a continuation, which may therefore queue more work.
        value[:] *= 2
        if left == 0:
            finished.set()
            return
        stream.copy(there, value)
        stream.copy(value, there)
        stream.then(next_round, left - 1)

    stream.then(next_round, 9)
    finished.wait()
    stream.close()
    print(f"after ten rounds: {value[0]}")


if __name__ == "__main__":
    main()
