"""The check of a host before it gets work: a matrix product on each device, and an all-reduce with other hosts.

Pure. A host's daemon measures, the controller judges (services.rules.preflight).
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import msgspec

from flyball.contracts.identity import Duration, HostId

Count = Annotated[int, msgspec.Meta(ge=0, le=1_000_000)]


class CheckStage(StrEnum):
    """How far a host's check got before it failed."""

    DEVICE = "device"  # on its own: a device, or its software, failed
    GROUP = "group"  # with the other hosts of its group: any of them may be to blame
    VOID = "void"  # it was broken off: the daemon ended, or the port was taken; shows nothing about the hardware


class CheckMeasure(msgspec.Struct, frozen=True):
    """What one host measured in one group. Seconds are those of the slowest device."""

    host_id: HostId
    round: Count  # from 1
    group: tuple[HostId, ...]
    devices: Count = 0
    matmul_s: Duration = 0.0  # 0.0: not measured
    all_reduce_s: Duration = 0.0
    failed: CheckStage | None = None  # None: it passed
    message: str = ""  # why it failed


class CheckState(StrEnum):
    RUNNING = "running"
    PASSED = "passed"
    SLOW = "slow"  # passed, but it computes slower than the other hosts
    FAILED = "failed"
    UNKNOWN = "unknown"  # it, or another host, is bad: no host is there to show which

    @property
    def may_work(self) -> bool:
        return self in (CheckState.PASSED, CheckState.SLOW)


class HostCheck(msgspec.Struct, frozen=True):
    """The newest check of a host."""

    state: CheckState
    at: float  # when it began or, if it is over, ended; wall clock
    action_id: str
    devices: int = 0
    matmul_s: float = 0.0  # 0.0: not measured
    all_reduce_s: float = 0.0  # the shortest of its groups
    message: str = ""
