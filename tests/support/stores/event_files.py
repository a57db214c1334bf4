"""What a trainer's event file says, for the tests that look at it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from support.clocks.waits import until

from flyball.contracts.events import Event, EventKind
from flyball.sdk.event_file import EventFile
from flyball.sdk.trainer import Job
from goodput.read.event_files import read_logs

DEADLINE_S = 120.0


def of_kind(path: Path, kind: EventKind) -> list[Event]:
    return [event for event in read_logs([path]).events if event.kind is kind]


def steps_in(path: Path) -> list[int]:
    return [
        step
        for event in of_kind(path, EventKind.STEPS)
        for step in range(event.data["first_step"], event.data["first_step"] + len(event.data["completed_at"]))
    ]


def wait_for_step(path: Path, step: int) -> None:
    until(lambda: path.exists() and step in steps_in(path), "the step was not written")


def _event_file_of(job: Job) -> EventFile:
    assert job._events is not None
    return job._events


def write_out(job: Job) -> None:
    """Have what happened up to now in the file; its thread does so twice a second."""
    _event_file_of(job)._flush()


def at_exit_of(job: Job) -> Callable[[], None]:
    """What the interpreter calls at its exit, where nobody closed the job."""
    return _event_file_of(job)._at_exit


def end_process(job: Job) -> None:
    at_exit_of(job)()
