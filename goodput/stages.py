"""What the control plane was doing at any moment: the layer below the steps.

A fold over the log's marks in the order of time. It decides what the time between two steps was when training stood
still; while steps go on, the steps lie on top of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from enum import IntEnum
from typing import NamedTuple

from flyball.contracts.cluster import JobState
from flyball.contracts.decisions import DecisionKind
from goodput.categories import Category
from goodput.history import Generation, History


class Stage(NamedTuple):
    """From `start` on, until the next stage."""

    start: float
    category: Category
    incident_id: str


class Pause(NamedTuple):
    """Training stood still from `at`, the completion of a step, until `until` (inf: for good)."""

    at: float
    until: float
    generation: int
    step_s: float | None  # what a step takes, None where the log does not tell


class _Kind(IntEnum):
    """Marks in causal order, which settles the order of marks of the same moment."""

    SUBMITTED = 0
    OPENED = 1
    DECIDED = 2
    STOPPED = 3
    STARTED = 4
    RESTORE_BEGAN = 5
    RESTORED = 6
    FIRST_STEP = 7
    CLOSED = 8
    PAUSED = 9
    FAULT = 10
    UNHEARD = 11
    ELECTED = 12


class _Mark(NamedTuple):
    at: float
    kind: _Kind
    generation: int = -1
    incident_id: str = ""
    category: Category = Category.UNKNOWN  # of the stage that a decision or a pause begins


class _State(NamedTuple):
    category: Category
    incident_id: str = ""
    generation: int | None = None  # the one that is starting


_UNKNOWN = _State(Category.UNKNOWN)
# Stages of an incident under way. A pause of the steps within one of them belongs to it.
_HANDLING = frozenset(
    {
        Category.DETECTION,
        Category.CONTROL_PLANE_AWAY,
        Category.DECISION,
        Category.STOP,
        Category.CHECKPOINT_BLOCKED,
        Category.SHUTDOWN,
    }
)
# Stages that another incident's opening does not end; its decision does.
_COMMITTED = frozenset({Category.DECISION, Category.STOP, Category.CHECKPOINT_BLOCKED, Category.SHUTDOWN})

_DECIDED_STAGE = {
    DecisionKind.RESTART_IN_PLACE: Category.STOP,
    DecisionKind.MIGRATE_TO_SPARE: Category.STOP,
    DecisionKind.SHRINK: Category.STOP,
    DecisionKind.GROW: Category.STOP,
    DecisionKind.EMERGENCY_CHECKPOINT: Category.CHECKPOINT_BLOCKED,
    DecisionKind.FAIL_JOB: Category.SHUTDOWN,
    DecisionKind.STOP_JOB: Category.SHUTDOWN,
    DecisionKind.COMPLETE_JOB: Category.SHUTDOWN,
}


def stages(history: History, pauses: Iterable[Pause], *, cut_off_steps: float) -> list[Stage]:
    """Stages in the order of time, the first at the job's start. A step that a fault cut off counts as recomputed if
    the fault came within `cut_off_steps` times what a step takes."""
    state = _UNKNOWN
    found = [Stage(history.start, state.category, state.incident_id)]
    for mark in sorted(_marks(history, pauses, cut_off_steps)):
        state = _next(state, mark)
        found.append(Stage(mark.at, state.category, state.incident_id))
    return found


def _next(state: _State, mark: _Mark) -> _State:  # noqa: PLR0911, PLR0912 - one transition table, read top to bottom
    """The state after a mark."""
    starting = state.generation is not None and state.generation == mark.generation
    match mark.kind:
        case _Kind.SUBMITTED:
            return _State(Category.SCHEDULING)
        case _Kind.OPENED if state.category not in _COMMITTED:
            return _State(Category.DECISION, mark.incident_id)
        case _Kind.DECIDED:
            return _State(mark.category, mark.incident_id)
        case _Kind.STOPPED if state.category is not Category.SHUTDOWN:
            return _State(Category.RESTART, state.incident_id)
        case _Kind.STARTED:
            return _State(Category.RESTART, mark.incident_id, mark.generation)
        case _Kind.RESTORE_BEGAN if starting:
            return state._replace(category=Category.RESTORE)
        case _Kind.RESTORED if starting:
            return state._replace(category=Category.WARM_UP)
        case _Kind.FIRST_STEP if starting:
            return _UNKNOWN  # from here on the steps speak
        case _Kind.CLOSED if state.category in _HANDLING and state.incident_id == mark.incident_id:
            return state if state.category is Category.SHUTDOWN else _UNKNOWN
        case _Kind.PAUSED if state.category not in _HANDLING or _belongs_to_another(state, mark):
            return _State(mark.category, mark.incident_id)
        case _Kind.FAULT if state.category not in _HANDLING:
            return _State(Category.DETECTION, mark.incident_id)
        case _Kind.UNHEARD if state.category not in _COMMITTED:
            return _State(Category.CONTROL_PLANE_AWAY, mark.incident_id)
        case _Kind.ELECTED if state.category is Category.CONTROL_PLANE_AWAY:
            return _State(Category.DETECTION, state.incident_id)
        case _:
            return state


def _belongs_to_another(state: _State, pause: _Mark) -> bool:
    """Whether an earlier incident, which training outlived, is still on the books when steps pause for a new one."""
    return bool(pause.incident_id) and state.incident_id != pause.incident_id


def _marks(history: History, pauses: Iterable[Pause], cut_off_steps: float) -> Iterator[_Mark]:
    if history.submitted:
        yield _Mark(history.start, _Kind.SUBMITTED)
    for incident in history.incidents:
        yield _Mark(incident.opened_at, _Kind.OPENED, incident_id=incident.incident_id)
        if incident.closed_at is not None:
            yield _Mark(incident.closed_at, _Kind.CLOSED, incident_id=incident.incident_id)
    for decision in history.decisions:
        if decision.kind in _DECIDED_STAGE:
            category = _DECIDED_STAGE[DecisionKind(decision.kind)]
            yield _Mark(decision.at, _Kind.DECIDED, incident_id=decision.incident_id, category=category)
    for at in history.stops:
        yield _Mark(at, _Kind.STOPPED)
    for fault_at in history.faults:
        if incident_id := _incident_opened(history, fault_at, math.inf):
            yield _Mark(fault_at, _Kind.FAULT, incident_id=incident_id)
    for wait in history.waits:
        if incident_id := _incident_opened(history, wait.until, math.inf):
            yield _Mark(wait.since, _Kind.UNHEARD, incident_id=incident_id)
            yield _Mark(wait.until, _Kind.ELECTED)
    plain = not any(g.steps or g.restored_at is not None for g in history.generations)
    for generation in history.generations:
        yield from _start_up_marks(generation, plain=plain)
    for pause in pauses:
        yield _pause_mark(history, pause, cut_off_steps)


def _start_up_marks(generation: Generation, *, plain: bool) -> Iterator[_Mark]:
    """A generation's own marks, each not before the one that causes it: hosts' clocks differ from the controller's.
    A `plain` script, which never attaches, tells nothing once its processes run."""
    first_step = generation.steps[0].at if generation.steps else None
    if plain:
        first_step = generation.started_at if generation.spawned_at is None else generation.spawned_at
    at = -math.inf
    for kind, moment in (
        (_Kind.STARTED, generation.started_at),
        (_Kind.RESTORE_BEGAN, generation.restore_began_at),
        (_Kind.RESTORED, generation.restored_at),
        (_Kind.FIRST_STEP, first_step),
    ):
        if moment is not None:
            at = max(at, moment)
            yield _Mark(at, kind, generation.generation, generation.incident_id)


def _pause_mark(history: History, pause: Pause, cut_off_steps: float) -> _Mark:
    """Why steps paused: a fault that an incident followed, the end of the job, or nothing that the log tells."""
    incident_id = _ending_incident(history, pause)
    if incident_id:
        opened_at = next(i.opened_at for i in history.incidents if i.incident_id == incident_id)
        fault_at = next((f for f in history.faults if pause.at < f <= opened_at), None)
        category = Category.DETECTION
        if fault_at is not None:
            # The step under way when the fault came was never completed.
            within = pause.step_s is not None and fault_at - pause.at <= cut_off_steps * pause.step_s
            category = Category.RECOMPUTED if within else Category.UNKNOWN
    elif math.isinf(pause.until) and history.outcome in (JobState.SUCCEEDED, JobState.STOPPED):
        category = Category.SHUTDOWN
    else:
        category = Category.UNKNOWN
    return _Mark(pause.at, _Kind.PAUSED, pause.generation, incident_id, category)


def _ending_incident(history: History, pause: Pause) -> str:
    """The incident because of which training stood still from `pause.at` on."""
    successor = next((g for g in history.generations if g.generation > pause.generation), None)
    if math.isinf(pause.until) and successor is not None:
        if successor.incident_id:
            return successor.incident_id
        return _incident_opened(history, pause.at, successor.began_at if successor.began_at is not None else math.inf)
    return _incident_opened(history, pause.at, pause.until)


def _incident_opened(history: History, since: float, until: float) -> str:
    return next((i.incident_id for i in history.incidents if since <= i.opened_at < until), "")
