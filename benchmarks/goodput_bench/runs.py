"""One run of one side: launch it, inject the faults of the list, end it, and collect its events."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec

from flyball.contracts.clock import SystemClock
from flyball.contracts.errors import FlyballError
from flyball.contracts.events import Event, EventKind
from goodput_bench import faults, sides
from goodput_bench.faults import Fault, FaultKind
from goodput_bench.live_job import POLL_INTERVAL_S, LiveJob
from goodput_bench.saves import SaveCost, completion_times, read_saves, save_cost
from goodput_bench.sides import Job, Side
from simulator.inject.processes import send

START_DEADLINE_S = 240.0
CALIBRATION_EVERY_STEPS = 25
CALIBRATION_SAVES = 8
_CALIBRATION_DEADLINE_S = 240.0
_SIGNALS = {
    FaultKind.KILL: signal.SIGKILL,
    FaultKind.KILL_ALL: signal.SIGKILL,
    FaultKind.EXCEPTION: faults.RAISE,
    FaultKind.HANG: faults.HANG,
    FaultKind.FREEZE: signal.SIGSTOP,
}


class RunFailed(FlyballError):
    """A side could not be measured."""


class Injection(msgspec.Struct, frozen=True):
    """One fault of the list, as injected. `at`: wall clock, just before the signal; None: the job was not training."""

    fault: Fault
    at: float | None
    missed: str = ""  # why it was not injected

    def events(self, job: str) -> list[Event]:
        """The fault as an event for the log."""
        if self.at is None:
            return []
        data = {
            "fault": self.fault.kind.value,
            "target": "all ranks" if self.fault.rank < 0 else f"rank {self.fault.rank}",
        }
        return [Event(at=self.at, kind=EventKind.FAULT_INJECTED, job=job, rank=self.fault.rank, data=data)]


class Observed(msgspec.Struct, frozen=True):
    """One run, from `launched_at` to `ended_at` (wall clock). A job that ends early counts as down until then."""

    side: Side
    launched_at: float
    first_step_at: float
    ended_at: float
    injections: tuple[Injection, ...]
    events: tuple[Event, ...]
    load_average: float  # over one minute, before the launch
    failure: str  # why the job ended early; '': it did not


def run(side: Side, job: Job, planned: Sequence[Fault], *, length_s: float, parent: Path) -> Observed:
    """Train for `length_s` from the first step on, with the planned faults. Raises RunFailed if no step completed."""
    load_average = os.getloadavg()[0]
    clock = SystemClock()
    with tempfile.TemporaryDirectory(prefix="fbg-", dir=parent) as name:
        folder = Path(name).resolve()
        try:
            with _launched(side, job, folder) as live:
                first_step_at, first_s = clock.wall_s(), time.monotonic()
                injections: list[Injection] = []
                failure = ""
                for fault in planned:
                    failure = failure or _watch(live, first_s + fault.at_s)
                    injections.append(Injection(fault, None, "the job was over") if failure else inject(live, fault))
                failure = failure or _watch(live, first_s + length_s)
                ended_at = first_step_at + length_s if failure else clock.wall_s()
                if failure:
                    failure = f"{failure} after {time.monotonic() - first_s:.0f} s; last output:\n{live.last_output()}"
        finally:
            for segment in sides.segments(folder):
                segment.unlink(missing_ok=True)
        events = sides.events(side, folder, [line for line in live.lines if line.at <= ended_at])
    stamps = [event for injection in injections for event in injection.events(sides.JOB)]
    launched = Event(at=live.launched_at, kind=EventKind.JOB_SUBMITTED, job=sides.JOB)
    # A run always has its full length, even if the job ended early.
    kept = [event for event in events if event.kind is not EventKind.JOB_ENDED]
    return Observed(
        side=side,
        launched_at=live.launched_at,
        first_step_at=first_step_at,
        ended_at=ended_at,
        injections=tuple(injections),
        events=(launched, *kept, *stamps),
        load_average=round(load_average, 2),
        failure=failure,
    )


def measure_saves(job: Job, *, parent: Path) -> SaveCost:
    """Measure the cost of a `dcp.async_save` in a run without faults. Raises RunFailed."""
    trial = msgspec.structs.replace(job, every_steps=CALIBRATION_EVERY_STEPS)
    with tempfile.TemporaryDirectory(prefix="fbg-", dir=parent) as name:
        folder = Path(name).resolve()
        with _launched(Side.TORCHRUN, trial, folder) as live:
            deadline_s = time.monotonic() + _CALIBRATION_DEADLINE_S
            while len(read_saves(folder / "saves.txt")) <= CALIBRATION_SAVES:
                failure = _watch(live, time.monotonic() + trial.step_floor_s)
                if failure or time.monotonic() > deadline_s:
                    why = failure or f"{_CALIBRATION_DEADLINE_S:.0f} s were not enough for {CALIBRATION_SAVES} saves"
                    raise RunFailed(
                        f"The cost of a save could not be measured: {why}.\n{live.last_output()}",
                        hint="give the interval with --save-every STEPS",
                    )
        return save_cost(read_saves(folder / "saves.txt"), completion_times(sides.rank_events(folder)))


def inject(job: LiveJob, fault: Fault) -> Injection:
    """Signal the processes that train as the fault's ranks. A job that is not training is left alone."""
    if not job.is_training:
        missed = f"no step for {job.quiet_s:.1f} s: the job had not recovered from the previous fault"
        return Injection(fault, None, missed)
    ranks = range(job.world_size) if fault.rank < 0 else (fault.rank,)
    processes = [process for rank in ranks if (process := job.process_of(rank)) is not None]
    at = SystemClock().wall_s()
    sent = [send(process, _SIGNALS[fault.kind]) for process in processes]
    return Injection(fault, at) if any(sent) else Injection(fault, None, "the rank's process did not exist")


@contextmanager
def _launched(side: Side, job: Job, folder: Path) -> Iterator[LiveJob]:
    """Launch a job and wait for its first step. Raises RunFailed if none completes."""
    with LiveJob(sides.command(side, job, folder), folder, sides.environment(), sides.WORLD_SIZE) as live:
        deadline_s = time.monotonic() + START_DEADLINE_S
        while not live.has_trained:
            failure = live.poll()
            if failure or time.monotonic() > deadline_s:
                why = failure or f"{START_DEADLINE_S:.0f} s were not enough"
                raise RunFailed(f"{side} made no first step: {why}.\n{live.last_output()}")
            time.sleep(POLL_INTERVAL_S)
        yield live


def _watch(live: LiveJob, until_s: float) -> str:
    """Watch the job until a monotonic time. Returns why it ended early, or ''."""
    while not (failure := live.poll()) and time.monotonic() < until_s:
        time.sleep(POLL_INTERVAL_S)
    return failure
