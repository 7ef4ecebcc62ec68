"""Compute on the host what a stream has just copied back, while the stream waits.

Runs on GPU 0, or on the software device with RSTREAM_DEVICE=soft.
"""

import numpy as np

import rstream as rs


def main() -> None:
    """Copy an array to the device and back, and sum it in a callback."""
    numbers = np.asarray(rs.pinned_empty(1_000_000, np.int64))
    numbers[:] = np.arange(1_000_000)
    result = np.asarray(rs.pinned_empty(1_000_000, np.int64))
    there = rs.device_empty(1_000_000, np.int64)

    with rs.Stream() as stream:
        stream.copy(there, numbers)
        stream.copy(result, there)
        total = stream.add_callback(lambda status: int(result.sum()) if status.ok else None)

    print(f"on {rs.default_device().name}: the sum is {total.result():,}")


if __name__ == "__main__":
    main()
