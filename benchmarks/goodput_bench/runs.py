"""One run of one side: start, strike at the offsets of the list, end; and what its event log says then."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec

from flyball.contracts.clock import SystemClock
from flyball.contracts.errors import FlyballError
from flyball.contracts.events import Event, EventKind
from goodput_bench import sides
from goodput_bench.fault_list import Fault
from goodput_bench.injector import Strike, strike
from goodput_bench.live_job import LOOK_INTERVAL_S, LiveJob
from goodput_bench.save_costs import SaveCost, completion_times, cost_of
from goodput_bench.saves_file import read_saves
from goodput_bench.sides import Job, Side

START_DEADLINE_S = 240.0
CALIBRATION_EVERY_STEPS = 25
CALIBRATION_SAVES = 8
_CALIBRATION_DEADLINE_S = 240.0


class RunFailed(FlyballError):
    """A side did not come as far as to be measured."""


class Observed(msgspec.Struct, frozen=True):
    """What one run showed. Its time goes from `launched_at` to `ended_at` (wall clock), also when the job was over
    before: a job that is down makes no progress."""

    side: Side
    launched_at: float
    first_step_at: float
    ended_at: float
    strikes: tuple[Strike, ...]
    events: tuple[Event, ...]
    load_average: float  # of a minute, before the launch
    failure: str  # why the job was over before its time, '' if it was not


def run(side: Side, job: Job, faults: Sequence[Fault], *, length_s: float, parent: Path) -> Observed:
    """Train for `length_s` from the first step on, with these faults. Raises RunFailed if there was no first step."""
    load_average = os.getloadavg()[0]
    clock = SystemClock()
    with tempfile.TemporaryDirectory(prefix="fbg-", dir=parent) as name:
        folder = Path(name).resolve()
        try:
            with _launched(side, job, folder) as live:
                first_step_at, first_s = clock.wall_s(), time.monotonic()
                strikes: list[Strike] = []
                failure = ""
                for fault in faults:
                    failure = failure or _watch(live, first_s + fault.at_s)
                    strikes.append(Strike(fault, None, "the job was over") if failure else strike(live, fault))
                failure = failure or _watch(live, first_s + length_s)
                ended_at = first_step_at + length_s if failure else clock.wall_s()
                if failure:
                    failure = f"{failure} after {time.monotonic() - first_s:.0f} s; it said last:\n{live.last_words()}"
        finally:
            for segment in sides.segments(folder):
                segment.unlink(missing_ok=True)
        told = sides.events(side, folder, [line for line in live.lines if line.at <= ended_at])
    stamps = [event for done in strikes for event in done.events(sides.JOB)]
    launched = Event(at=live.launched_at, kind=EventKind.JOB_SUBMITTED, job=sides.JOB)
    # A run has its whole length, also if the job was over before.
    kept = [event for event in told if event.kind is not EventKind.JOB_ENDED]
    return Observed(
        side=side,
        launched_at=live.launched_at,
        first_step_at=first_step_at,
        ended_at=ended_at,
        strikes=tuple(strikes),
        events=(launched, *kept, *stamps),
        load_average=round(load_average, 2),
        failure=failure,
    )


def measure_saves(job: Job, *, parent: Path) -> SaveCost:
    """What a `dcp.async_save` costs the job while nothing fails. Raises RunFailed."""
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
                        f"The cost of a save could not be measured: {why}.\n{live.last_words()}",
                        hint="give the interval with --save-every STEPS",
                    )
        return cost_of(read_saves(folder / "saves.txt"), completion_times(sides.rank_events(folder)))


@contextmanager
def _launched(side: Side, job: Job, folder: Path) -> Iterator[LiveJob]:
    """A live job that has made its first step. Raises RunFailed if it makes none."""
    with LiveJob(sides.command(side, job, folder), folder, sides.environment(), sides.WORLD_SIZE) as live:
        deadline_s = time.monotonic() + START_DEADLINE_S
        while not live.has_trained:
            failure = live.look()
            if failure or time.monotonic() > deadline_s:
                why = failure or f"{START_DEADLINE_S:.0f} s were not enough"
                raise RunFailed(f"{side} made no first step: {why}.\n{live.last_words()}")
            time.sleep(LOOK_INTERVAL_S)
        yield live


def _watch(live: LiveJob, until_s: float) -> str:
    """Look on until a moment of the monotonic clock; returns why the job was over before, or ''."""
    while not (failure := live.look()) and time.monotonic() < until_s:
        time.sleep(LOOK_INTERVAL_S)
    return failure
