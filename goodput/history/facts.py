"""The facts of a job's history that every measure is computed from. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from goodput.history.phases import PhaseSpan, Waiting
from goodput.history.rank_clocks import RankClock
from goodput.history.step_log import CompletedStep, LastRank, SettledStep


class WaitSample(NamedTuple):
    """By `at`, the rank had waited `total_s` in total."""

    at: float
    total_s: float


class LoggedGeneration(msgspec.Struct, frozen=True):
    """One generation. Times are wall clock; None if the log does not have them."""

    generation: int
    incident_id: str  # the incident that it answers; '' for the first start, or if unknown
    began_at: float | None  # first sign of life: start command, spawn or first step
    started_at: float | None
    spawned_at: float | None  # of the last rank
    restore_began_at: float | None  # of the last rank
    restored_at: float | None  # of the last rank; its attach time if it restored nothing
    restore_step: int | None  # -1: from scratch; None: unknown
    steps: tuple[CompletedStep, ...]  # steps ascending, times never decreasing
    last_ranks: tuple[LastRank, ...]  # for steps reported by several ranks, ascending
    waited: Mapping[Waiting, tuple[WaitSample, ...]]  # for waits logged as totals: of the rank that waited longest
    phases: Mapping[Waiting, tuple[PhaseSpan, ...]]
    capacity: float = 1.0  # ranks (or hosts) in use over those at full size; above 1 if the job grew beyond that
    capacity_is_guess: bool = False  # the log lacks the full size, so the largest logged one is used
    saved_steps: frozenset[int] = frozenset()  # logged as saved
    lost_logs: tuple[int, ...] = ()  # ranks whose logs end long before the others'
    clocks: tuple[RankClock, ...] = ()  # of ranks whose clocks were corrected
    epochs: int = 1  # number of epochs in its step numbers
    logs_blocking: bool = False  # the log says how long saves blocked, even if that is zero
    numbered_from: int = 0  # what the epochs before it add to its step numbers
    settled: Mapping[int, SettledStep] = {}  # step -> what is kept of it: waits and phases up to there are forgotten
    settled_until: float = -math.inf


class LoggedIncident(msgspec.Struct, frozen=True):
    incident_id: str
    cause: str
    opened_at: float
    closed_at: float | None
    outcome: str  # '' while it is open
    lost_steps: int | None  # as the controller counted
    host_id: str = ""  # '': not a single host's, or unknown
    failure_class: str = ""  # as the log names it
    inferred: bool = False  # nobody reported it: only a restart shows it, so its beginning is unknown
    fault_at: float | None = None  # the last sign of life before it, as the controller knew


class LoggedDecision(NamedTuple):
    at: float
    kind: str
    incident_id: str
    rule: str = ""  # the policy rule that decided


class Wait(NamedTuple):
    """A signal was observed at `since`, but reached a controller only after one was elected at `until`."""

    since: float
    until: float


class Break(NamedTuple):
    """The job had ended at `since`, and was submitted again at `until`: nobody ran it in between."""

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
    incidents: tuple[LoggedIncident, ...]  # by opening time
    decisions: tuple[LoggedDecision, ...]  # by time
    faults: tuple[float, ...]
    stops: tuple[float, ...]
    waits: tuple[Wait, ...]
    breaks: tuple[Break, ...] = ()  # by time
    submissions: tuple[float, ...] = ()  # by time
    world_size: int | None = None  # ranks at full size; None: the log does not say
    save_every_steps: int | None = None  # as submitted; None: not in the log, or not in steps
    logs_some_steps: bool = False  # by design, as the simulator's log says of itself: what lies between is no gap
    absurd_times: bool = False  # events with impossible times were dropped
    unset_clocks: bool = False  # events from a clock that was never set were dropped
