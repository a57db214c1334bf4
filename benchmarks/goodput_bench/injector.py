"""Faults on a live job, the same way on both sides: a signal to the process that trains as a rank."""

from __future__ import annotations

import signal

import msgspec

from flyball.contracts.clock import SystemClock
from flyball.contracts.events import Event, EventKind
from goodput_bench import orders
from goodput_bench.fault_list import Fault, FaultKind
from goodput_bench.live_job import LiveJob
from simulator.inject.processes import send

_SIGNALS = {
    FaultKind.KILL: signal.SIGKILL,
    FaultKind.KILL_ALL: signal.SIGKILL,
    FaultKind.EXCEPTION: orders.RAISE,
    FaultKind.HANG: orders.HANG,
    FaultKind.FREEZE: signal.SIGSTOP,
}


class Strike(msgspec.Struct, frozen=True):
    """What became of one fault of the list. `at`: wall clock, just before the signal; None if it met no training."""

    fault: Fault
    at: float | None
    missed: str = ""  # why

    def events(self, job: str) -> list[Event]:
        """The stamp that goes into the event log."""
        if self.at is None:
            return []
        data = {
            "fault": self.fault.kind.value,
            "target": "all ranks" if self.fault.rank < 0 else f"rank {self.fault.rank}",
        }
        return [Event(at=self.at, kind=EventKind.FAULT_INJECTED, job=job, rank=self.fault.rank, data=data)]


def strike(job: LiveJob, fault: Fault) -> Strike:
    """Carry out a fault, unless the job is not training: nothing is there then that could fail a second time."""
    if not job.is_training:
        return Strike(fault, None, f"no step for {job.quiet_s:.1f} s: the job had not recovered from the fault before")
    ranks = range(job.world_size) if fault.rank < 0 else (fault.rank,)
    processes = [process for rank in ranks if (process := job.process_of(rank)) is not None]
    at = SystemClock().wall_s()
    sent = [send(process, _SIGNALS[fault.kind]) for process in processes]
    return Strike(fault, at) if any(sent) else Strike(fault, None, "the process of the rank was not there")
