"""Values of stream attributes."""

from __future__ import annotations

from typing import Literal, NamedTuple

AccessProperty = Literal["normal", "streaming", "persisting"]


class AccessPolicyWindow(NamedTuple):
    """A range of addresses whose accesses have properties in the L2 cache (`CUaccessPolicyWindow`).

    `base` is the first address and `nbytes` the size, 0 for no window. The share `hit_ratio` (0 to 1) of accesses gets
    the property `hit`, the others `miss`, which is not `"persisting"`.
    """

    base: int
    nbytes: int
    hit_ratio: float = 1.0
    hit: AccessProperty = "persisting"
    miss: AccessProperty = "normal"
