"""Capture a pipeline with two branches into a graph once, and launch it for each batch."""

import numpy as np

import rstream as rs

device = rs.default_device()
stream, side = rs.Stream(device), rs.Stream(device)

batch = rs.pinned_empty(1024, np.float32, device)
there = rs.device_empty(1024, np.float32, device)
back = rs.pinned_empty(1024, np.float32, device)
sums: list[float] = []

with stream.capture() as capture:
    # The copy to the device on one branch, the sum on the host on another.
    side.wait(stream)
    stream.copy(there, batch)
    side.launch_host_func(lambda: sums.append(float(batch[:].sum())))
    stream.copy(back, there)
    stream.wait(side)
    stream.launch_host_func(lambda: print(f"batch {len(sums)}: {back[0]:.0f} came back, sum {sums[-1]:.0f}"))

print(capture.graph.to_dot())

with capture.graph.instantiate() as launchable:
    for number in range(1, 4):
        batch[:] = number
        launchable.launch(stream)
        stream.synchronize()

assert sums == [1024.0, 2048.0, 3072.0]
