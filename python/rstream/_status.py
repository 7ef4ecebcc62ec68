"""Codes of the driver."""

from __future__ import annotations

from typing import Any, ClassVar

from rstream import _core


class Status(int):
    """A code of the driver (`CUresult`): an `int`, so that a code without a name keeps its number.

    `Status.SUCCESS == 0`. The class has the codes that streams meet as attributes.
    """

    SUCCESS: ClassVar[Status]
    INVALID_VALUE: ClassVar[Status]
    OUT_OF_MEMORY: ClassVar[Status]
    INVALID_HANDLE: ClassVar[Status]
    NOT_READY: ClassVar[Status]
    ILLEGAL_ADDRESS: ClassVar[Status]
    LAUNCH_FAILED: ClassVar[Status]
    CONTEXT_IS_DESTROYED: ClassVar[Status]
    NOT_PERMITTED: ClassVar[Status]
    NOT_SUPPORTED: ClassVar[Status]
    STREAM_CAPTURE_UNSUPPORTED: ClassVar[Status]
    STREAM_CAPTURE_INVALIDATED: ClassVar[Status]
    UNKNOWN: ClassVar[Status]

    @property
    def ok(self) -> bool:
        """Whether this is `CUDA_SUCCESS`."""
        return self == 0

    @property
    def name(self) -> str:
        """The name in `cuda.h` (`"CUDA_ERROR_ILLEGAL_ADDRESS"`); `"CUDA_ERROR_12345"` for a code without one."""
        return _core.status_text(self)[0]

    @property
    def description(self) -> str:
        """What the driver says about it."""
        return _core.status_text(self)[1]

    @property
    def sticky(self) -> bool:
        """Whether the context is lost: every later call that involves it answers the same code."""
        return _core.status_text(self)[2]

    def __repr__(self) -> str:
        return f"<Status {int(self)}: {self.name}>"

    def __str__(self) -> str:
        return f"{self.name} ({int(self)}): {self.description}"

    def __reduce__(self) -> tuple[Any, ...]:
        return Status, (int(self),)


for _name, _code in {
    "SUCCESS": 0,
    "INVALID_VALUE": 1,
    "OUT_OF_MEMORY": 2,
    "INVALID_HANDLE": 400,
    "NOT_READY": 600,
    "ILLEGAL_ADDRESS": 700,
    "CONTEXT_IS_DESTROYED": 709,
    "LAUNCH_FAILED": 719,
    "NOT_PERMITTED": 800,
    "NOT_SUPPORTED": 801,
    "STREAM_CAPTURE_UNSUPPORTED": 900,
    "STREAM_CAPTURE_INVALIDATED": 901,
    "UNKNOWN": 999,
}.items():
    setattr(Status, _name, Status(_code))
