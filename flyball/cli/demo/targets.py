"""Whom the demo's faults hit."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flyball.cli.demo.stack import JOB, DemoStack
from flyball.contracts.clock import SystemClock

if TYPE_CHECKING:
    from simulator.inject.faults import Injection

KILLED_RANK = 1
HUNG_RANK = 2
LOST_RANK = 3  # its host is lost: the ranks on it change hosts
PREEMPTED_RANK = 0  # its host gets notice: it also has the world's rank 0
NOTICE_S = 60.0


def inject(stack: DemoStack, fault: str) -> Injection:
    """Do one fault to the running job. The stamp in the answer is taken before it happens."""
    from simulator.inject import faults

    clock = SystemClock()
    if fault == "kill":
        return faults.kill(stack.client, job=JOB, rank=KILLED_RANK, clock=clock)
    if fault == "hang":
        return faults.hang(stack.client, job=JOB, rank=HUNG_RANK, clock=clock)
    if fault == "host-down":
        host_id = _host_of(stack, LOST_RANK)
        stack.expect_loss(host_id)
        return faults.host_down(stack.client, host_id=host_id, clock=clock)
    return faults.preempt(stack.client, host_id=_host_of(stack, PREEMPTED_RANK), deadline_s=NOTICE_S, clock=clock)


def _host_of(stack: DemoStack, rank: int) -> str:
    return next(str(r["host_id"]) for r in stack.job()["ranks"] if r["rank"] == rank)
