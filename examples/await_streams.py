"""Await streams and callbacks on an asyncio event loop.

Runs on GPU 0, or on the software device with RSTREAM_DEVICE=soft.
"""

import asyncio

import numpy as np

import rstream as rs


async def one_way_and_back(number: int) -> float:
    """Send an array through the device on a stream of its own, and return its mean."""
    source = np.asarray(rs.pinned_empty(10_000, np.float64))
    target = np.asarray(rs.pinned_empty(10_000, np.float64))
    source[:] = number
    there = rs.device_empty(10_000, np.float64)
    with rs.Stream() as stream:
        stream.copy(there, source)
        stream.copy(target, there)
        await stream
        return float(target.mean())


async def main() -> None:
    """Run eight at once."""
    means = await asyncio.gather(*(one_way_and_back(number) for number in range(8)))
    print("means:", ", ".join(f"{mean:.0f}" for mean in means))


if __name__ == "__main__":
    asyncio.run(main())
