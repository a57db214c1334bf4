"""Finds out what the control plane was doing at any moment: the layer below the steps.

A fold over the log's marks in order of time. It classifies the time between two steps when training stood still; while
steps go on, they cover it.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from enum import IntEnum
from typing import NamedTuple

from flyball.contracts.cluster import JobState
from flyball.contracts.decisions import DecisionKind
from goodput.account.categories import Category
from goodput.history.facts import History, LoggedDecision, LoggedGeneration, LoggedIncident


class Stage(NamedTuple):
    """From `start` until the next stage."""

    start: float
    category: Category
    incident_id: str


class TrainingPause(NamedTuple):
    """Training stood still from `at`, the completion of a step, until `until` (inf: for good)."""

    at: float
    until: float
    generation: int
    step_s: float | None  # a normal step's duration; None if unknown


class _Kind(IntEnum):
    """Marks in causal order, which also orders marks of the same moment."""

    SUBMITTED = 0
    OPENED = 1
    HELD = 2
    DECIDED = 3
    STOPPED = 4
    STARTED = 5
    RESTORE_BEGAN = 6
    RESTORED = 7
    FIRST_STEP = 8
    CLOSED = 9
    PAUSED = 10
    FAULT = 11
    CONTROLLER_AWAY = 12
    ELECTED = 13


class _Mark(NamedTuple):
    at: float
    kind: _Kind
    generation: int = -1
    incident_id: str = ""
    category: Category = Category.UNKNOWN  # of the stage that a decision or a pause begins

    @property
    def is_unexplained(self) -> bool:
        """Steps paused, and no incident explains it."""
        return self.kind is _Kind.PAUSED and not self.incident_id


class _State(NamedTuple):
    category: Category
    incident_id: str = ""
    generation: int | None = None  # the one that is starting


_UNKNOWN = _State(Category.UNKNOWN)
# Stages that another incident's opening does not end; its decision does.
_COMMITTED = frozenset(
    {Category.DECISION, Category.IDLE_NO_HOSTS, Category.STOP, Category.CHECKPOINT_BLOCKED, Category.SHUTDOWN}
)
# Stages of an incident in progress. A pause of the steps within one of them belongs to it.
_HANDLING = _COMMITTED | {Category.DETECTION, Category.CONTROL_PLANE_AWAY}
# Stages not ended by continuing steps, which are normal while a job is being stopped or saved.
_WHILE_STEPS_GO_ON = frozenset({Category.STOP, Category.SHUTDOWN, Category.CHECKPOINT_BLOCKED})
# Stages unaffected by a hold: the workers, or the job, are already being ended.
_PAST_HOLDING = frozenset({Category.STOP, Category.SHUTDOWN})

_DECIDED_STAGE = {
    DecisionKind.RESTART_IN_PLACE: Category.STOP,
    DecisionKind.MIGRATE_TO_SPARE: Category.STOP,
    DecisionKind.SHRINK: Category.STOP,
    DecisionKind.GROW: Category.STOP,
    DecisionKind.EMERGENCY_CHECKPOINT: Category.CHECKPOINT_BLOCKED,
    DecisionKind.RESUME: Category.CHECKPOINT_BLOCKED,
    DecisionKind.FAIL_JOB: Category.SHUTDOWN,
    DecisionKind.STOP_JOB: Category.SHUTDOWN,
    DecisionKind.COMPLETE_JOB: Category.SHUTDOWN,
}
_FINDS_OUT = (DecisionKind.HOLD, DecisionKind.TAKE_STACKS, DecisionKind.CHECK_HOSTS)
_WAITS_FOR_A_HOST = "wait_for_a_spare"  # the policy's rule for holding because no host is free


def stages(history: History, pauses: Iterable[TrainingPause], *, cut_off_steps: float) -> list[Stage]:
    """Stages in order of time; the first begins with the job.

    A step cut off by a fault counts as recomputed if the fault came within `cut_off_steps` normal step durations.
    """
    state = _UNKNOWN
    found = [Stage(history.start, state.category, state.incident_id)]
    completed = sorted(step.at for generation in history.generations for step in generation.steps)
    since = history.start
    for mark in sorted(_marks(history, pauses, FaultStamps(history, completed), cut_off_steps)):
        went_on = bisect_right(completed, mark.at) - bisect_right(completed, since) if mark.is_unexplained else 0
        if went_on > cut_off_steps and state.category in _HANDLING - _WHILE_STEPS_GO_ON:
            state = _UNKNOWN  # training outlived an incident whose end is not in the log
        before, state = state, _next(state, mark)
        since = since if state is before else mark.at
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
        case _Kind.HELD if mark.category is Category.IDLE_NO_HOSTS and state.category not in _PAST_HOLDING:
            return _State(mark.category, mark.incident_id)
        case _Kind.HELD if state.category is Category.IDLE_NO_HOSTS:  # from here on it waits for something else
            return _State(mark.category, mark.incident_id)
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
            return _UNKNOWN  # from here on the steps decide
        case _Kind.CLOSED if state.category in _HANDLING and state.incident_id == mark.incident_id:
            return state if state.category is Category.SHUTDOWN else _UNKNOWN
        case _Kind.PAUSED if state.category not in _HANDLING or _belongs_to_another(state, mark):
            return _State(mark.category, mark.incident_id)
        case _Kind.FAULT if state.category not in _HANDLING:
            return _State(Category.DETECTION, mark.incident_id)
        case _Kind.CONTROLLER_AWAY if state.category not in _COMMITTED:
            return _State(Category.CONTROL_PLANE_AWAY, mark.incident_id)
        case _Kind.ELECTED if state.category is Category.CONTROL_PLANE_AWAY:
            return _State(Category.DETECTION, state.incident_id)
        case _:
            return state


def _belongs_to_another(state: _State, pause: _Mark) -> bool:
    """Whether steps pause for a new incident while an earlier one, which training outlived, is still recorded as
    open."""
    return bool(pause.incident_id) and state.incident_id != pause.incident_id


def _marks(
    history: History, pauses: Iterable[TrainingPause], stamps: FaultStamps, cut_off_steps: float
) -> Iterator[_Mark]:
    if history.submitted:
        for at in history.submissions or (history.start,):
            yield _Mark(at, _Kind.SUBMITTED)
    for incident in history.incidents:
        if (fault_at := stamps.stamp_of(incident)) is not None:
            yield _Mark(fault_at, _Kind.FAULT, incident_id=incident.incident_id)
        yield _Mark(incident.opened_at, _Kind.OPENED, incident_id=incident.incident_id)
        if incident.closed_at is not None:
            yield _Mark(incident.closed_at, _Kind.CLOSED, incident_id=incident.incident_id)
    for decision in history.decisions:
        yield from _decision_marks(decision)
    for at in history.stops:
        yield _Mark(at, _Kind.STOPPED)
    order = _Order(history)
    for wait in history.waits:
        if opened := order.incident_opened(wait.until, math.inf):
            yield _Mark(wait.since, _Kind.CONTROLLER_AWAY, incident_id=opened.incident_id)
            yield _Mark(wait.until, _Kind.ELECTED)
    plain = not any(g.steps or g.restored_at is not None for g in history.generations)
    for generation in history.generations:
        yield from _start_up_marks(generation, plain=plain)
    for pause in pauses:
        yield _pause_mark(order, stamps, pause, cut_off_steps)


def _decision_marks(decision: LoggedDecision) -> Iterator[_Mark]:
    if decision.kind in _DECIDED_STAGE:
        category = _DECIDED_STAGE[DecisionKind(decision.kind)]
        yield _Mark(decision.at, _Kind.DECIDED, incident_id=decision.incident_id, category=category)
    elif decision.kind in _FINDS_OUT and decision.incident_id:
        category = Category.IDLE_NO_HOSTS if decision.rule == _WAITS_FOR_A_HOST else Category.DECISION
        yield _Mark(decision.at, _Kind.HELD, incident_id=decision.incident_id, category=category)


def _start_up_marks(generation: LoggedGeneration, *, plain: bool) -> Iterator[_Mark]:
    """A generation's own marks, each no earlier than its cause: the clocks of hosts and controller differ.

    A `plain` script never attaches, and logs nothing once its processes run.
    """
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


class _Order:
    """Finds what came next. Logs have ten thousand incidents, so every lookup is a bisection or a dict access."""

    def __init__(self, history: History) -> None:
        self.history = history
        self._opened = [incident.opened_at for incident in history.incidents]
        self._by_id = {incident.incident_id: incident for incident in history.incidents}
        self._numbers = [generation.generation for generation in history.generations]

    def incident(self, incident_id: str) -> LoggedIncident | None:
        """None: it has no event of its own."""
        return self._by_id.get(incident_id)

    def incident_opened(self, since: float, until: float) -> LoggedIncident | None:
        """The first one opened in [since, until)."""
        index = bisect_left(self._opened, since)
        return self.history.incidents[index] if index < len(self._opened) and self._opened[index] < until else None

    def is_before_an_end(self, pause: TrainingPause) -> bool:
        """Whether the job ended within the pause, and was not failed."""
        breaks = self.history.breaks
        place = bisect_left(breaks, (pause.at, pause.at))
        if place < len(breaks):
            return breaks[place].since < pause.until
        return math.isinf(pause.until) and self.history.outcome in (JobState.SUCCEEDED, JobState.STOPPED)

    def fault_after(self, moment: float) -> float:
        """inf if none came."""
        faults = self.history.faults
        index = bisect_right(faults, moment)
        return faults[index] if index < len(faults) else math.inf

    def successor(self, generation: int) -> LoggedGeneration | None:
        index = bisect_right(self._numbers, generation)
        return self.history.generations[index] if index < len(self._numbers) else None


def _pause_mark(order: _Order, stamps: FaultStamps, pause: TrainingPause, cut_off_steps: float) -> _Mark:
    """Why steps paused: a fault that an incident followed, the end of the job, or nothing in the log."""
    incident_id, opened_at, is_inferred = _ending_incident(order, pause)
    if incident_id:
        incident = order.incident(incident_id)
        known_at = stamps.stamp_of(incident) if incident else None
        fault_at = order.fault_after(pause.at) if known_at is None else known_at
        category = Category.UNKNOWN if is_inferred else Category.DETECTION
        if pause.at < fault_at <= opened_at and not math.isinf(fault_at):
            # The step in progress at the fault was never completed.
            within = pause.step_s is not None and fault_at - pause.at <= cut_off_steps * pause.step_s
            category = Category.RECOMPUTED if within else Category.UNKNOWN
    elif order.is_before_an_end(pause):
        category = Category.SHUTDOWN
    else:
        category = Category.UNKNOWN
    return _Mark(pause.at, _Kind.PAUSED, pause.generation, incident_id, category)


def _ending_incident(order: _Order, pause: TrainingPause) -> tuple[str, float, bool]:
    """The incident that stopped training at `pause.at` ('' if none), when it opened, and whether it is inferred."""
    until = pause.until
    successor = order.successor(pause.generation)
    if math.isinf(until) and successor is not None:
        if successor.incident_id:
            incident = order.incident(successor.incident_id)
            return (
                successor.incident_id,
                incident.opened_at if incident else math.inf,
                bool(incident and incident.inferred),
            )
        until = successor.began_at if successor.began_at is not None else math.inf
    incident = order.incident_opened(pause.at, until)
    return (incident.incident_id, incident.opened_at, incident.inferred) if incident else ("", math.inf, False)


# --- fault stamps ----------------------------------------------------------------------------------------------------

STAMP_STEPS = 10  # a fault that the world outlived by more steps is not this incident's


class FaultStamps:
    """Matches incidents with the injector's fault stamps. `completed`: when the world completed each step, over all
    generations, ascending."""

    def __init__(self, history: History, completed: Sequence[float]) -> None:
        self._start = history.start
        self._opened = [incident.opened_at for incident in history.incidents]
        self._faults = history.faults
        self._completed = completed

    def stamp_of(self, incident: LoggedIncident) -> float | None:
        """The earliest stamp that no earlier incident answers, and that only a few steps followed, else the moment that
        the controller knew; None if there is neither."""
        earlier = bisect_left(self._opened, incident.opened_at) - 1
        since = self._opened[earlier] if earlier >= 0 else self._start
        outlived = bisect_right(self._completed, incident.opened_at) - STAMP_STEPS - 1
        if outlived >= 0:
            since = max(since, self._completed[outlived])
        stamp = bisect_left(self._faults, since)
        is_its = stamp < len(self._faults) and self._faults[stamp] <= incident.opened_at
        return self._faults[stamp] if is_its else incident.fault_at
