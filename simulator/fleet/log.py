"""The event log of a simulated run, as goodput reads it. Steps are logged at a generation's beginning and end only."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from msgspec.structs import replace

from flyball.contracts.events import Event, EventKind
from simulator.fleet.control_plane import JOB
from simulator.fleet.training import JobTraining

Value = str | int | float | bool | list[int | float | str] | None

_FIRST_STEPS = 3  # logged one by one, so that the length of a step is known


def with_true_size(events: Iterable[Event], world_size: int, save_every_steps: int) -> list[Event]:
    """The control plane's events, with the size of the whole job instead of the part that it was shown."""
    return [
        event if (data := _true_data(event, world_size, save_every_steps)) is None else replace(event, data=data)
        for event in events
    ]


def _true_data(event: Event, world_size: int, save_every_steps: int) -> Mapping[str, Value] | None:
    match event.kind:
        case EventKind.JOB_SUBMITTED:
            return {"world_size": world_size, "save_every_steps": save_every_steps, "logs_some_steps": True}
        case EventKind.GENERATION_STARTED:
            return {**event.data, "world_size": world_size}
        case EventKind.GENERATION_GRANTED:
            return {"parent": event.data.get("parent")}
    return None


def fault(at: float, name: str, target: str) -> Event:
    """A fault that begins now."""
    return Event(at=at, kind=EventKind.FAULT_INJECTED, host_id=target, data={"fault": name, "target": target})


def started(generation: int, *, spawned_at: float, restore_began_at: float, restored_at: float) -> Event:
    """The marks of the last rank of a generation that begins to step."""
    data: dict[str, Value] = {
        "spawned_at": spawned_at,
        "attached_at": restore_began_at,
        "restore_began_at": restore_began_at,
        "restored_at": restored_at,
    }
    return Event(at=restored_at, kind=EventKind.RANK_MARKS, job=JOB, generation=generation, rank=0, data=data)


def steps(training: JobTraining, at: float) -> list[Event]:
    """The steps of the running generation, which stops at `at`: the first ones, those that a restart may go back to,
    and the last. The account takes the time between two logged steps for the steps between them."""
    before, newest = training.first_step, training.step_at(at)
    saved = (training.committed_at(at), training.replicated_at(at), training.persistent_at(at))
    later = {point.step for point in saved if point.generation == training.generation}
    wanted = {*range(before + 1, before + 1 + _FIRST_STEPS), *later, newest}
    found: list[Event] = []
    for step in sorted(step for step in wanted if before < step <= newest):
        saves = (step - before - 1) // training.every_steps  # that ended before this step began
        found.append(_summary(training, step, saves * training.save_s))
    return found


def _summary(training: JobTraining, step: int, blocked_s: float) -> Event:
    at = training.completed_at(step)
    data: dict[str, Value] = {
        "first_step": step,
        "completed_at": [at],
        "slowest_step": step,
        "ranks": 1,
        "sensor": "s1",
        "save_blocked_s": blocked_s,
        "data_wait_s": 0.0,
    }
    return Event(at=at, kind=EventKind.STEPS, job=JOB, generation=training.generation, data=data)
