"""What is known of a job's history: the facts that every measure is computed from. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from goodput.history.phases import PhaseSpan, Waiting
from goodput.history.rank_clocks import RankClock
from goodput.history.step_log import CompletedStep, LastRank


class WaitSample(NamedTuple):
    """By `at`, the rank had waited `total_s` since its start."""

    at: float
    total_s: float


class LoggedGeneration(msgspec.Struct, frozen=True):
    """One restart epoch. Times are wall clock; None where the log does not say."""

    generation: int
    incident_id: str  # the incident that it answers, '' for the first start or where unknown
    began_at: float | None  # first sign of life: start command, spawn or first step
    started_at: float | None
    spawned_at: float | None  # of the last rank
    restore_began_at: float | None  # of the last rank
    restored_at: float | None  # of the last rank; when it attached, for a rank that restored nothing
    restore_step: int | None  # -1: from scratch, None: unknown
    steps: tuple[CompletedStep, ...]  # steps ascending, times never falling
    last_ranks: tuple[LastRank, ...]  # of steps that several ranks told of, ascending
    waited: Mapping[Waiting, tuple[WaitSample, ...]]  # where only totals are told, of the rank that waited longest
    phases: Mapping[Waiting, tuple[PhaseSpan, ...]]
    capacity: float = 1.0  # ranks (or hosts) in use, of those at full size; above 1 where the job grew beyond that
    capacity_is_guess: bool = False  # the log does not say the full size: the largest that it has stands in for it
    saved_steps: frozenset[int] = frozenset()  # that the log says were saved
    lost_logs: tuple[int, ...] = ()  # ranks that told of no more steps long before the others did
    clocks: tuple[RankClock, ...] = ()  # of ranks, that had to be set right
    epochs: int = 1  # at so many the numbers of its steps begin
    tells_of_blocked: bool = False  # the log says how long saves blocked, be it not at all


class LoggedIncident(msgspec.Struct, frozen=True):
    incident_id: str
    cause: str
    opened_at: float
    closed_at: float | None
    outcome: str  # '' while it is open
    lost_steps: int | None  # as the controller counted
    host_id: str = ""  # '' : not one host's, or unknown
    failure_class: str = ""  # as the log names it
    inferred: bool = False  # nobody reported it: a restart tells that there was one, and nothing when it began


class LoggedDecision(NamedTuple):
    at: float
    kind: str
    incident_id: str
    rule: str = ""  # the policy's rule that spoke


class Wait(NamedTuple):
    """A signal was observed at `since` and reached a controller only after one was elected at `until`."""

    since: float
    until: float


class History(msgspec.Struct, frozen=True):
    """Everything the measures are computed from. `start` <= `end`."""

    job: str
    start: float
    end: float
    submitted: bool
    outcome: str  # '' while the job runs
    generations: tuple[LoggedGeneration, ...]
    incidents: tuple[LoggedIncident, ...]  # by time of opening
    decisions: tuple[LoggedDecision, ...]  # by time
    faults: tuple[float, ...]
    stops: tuple[float, ...]
    waits: tuple[Wait, ...]
    world_size: int | None = None  # ranks at full size, None: the log names none
    save_every_steps: int | None = None  # as it was submitted; None: the log does not say, or not in steps
    absurd_times: bool = False  # events were left out because their time cannot be
    unset_clocks: bool = False  # and others because they came from a clock that was not set
