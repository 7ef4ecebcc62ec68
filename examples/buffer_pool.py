"""Give pinned buffers back to a pool as soon as the stream is done with them.

Runs on GPU 0, or on the software device with RSTREAM_DEVICE=soft.
"""

import queue
from typing import Any

import numpy as np
import numpy.typing as npt

import rstream as rs

Array = npt.NDArray[Any]


def main() -> None:
    """Send 100 batches through 3 buffers."""
    pool: queue.SimpleQueue[Array] = queue.SimpleQueue()
    for _ in range(3):
        pool.put(np.asarray(rs.pinned_empty(65_536, np.float32)))
    there = rs.device_empty(65_536, np.float32)

    def give_back(_status: rs.Status, buffer: Array) -> None:
        # Also after a device fault: a callback runs in every case, so no buffer is ever lost.
        pool.put(buffer)

    with rs.Stream() as stream:
        for batch in range(100):
            buffer = pool.get()  # waits until the stream has passed an earlier copy
            buffer[:] = batch
            stream.copy(there, buffer)
            stream.add_callback(give_back, buffer)
        stream.synchronize()

    print(f"100 batches, {pool.qsize()} buffers back in the pool; the last batch was {there.to_host()[0]:.0f}")


if __name__ == "__main__":
    main()
