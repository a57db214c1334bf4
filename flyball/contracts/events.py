"""The event log that goodput reads: one flat, documented record per event.

Written by the supervisor to the database and as JSON lines; `goodput` needs nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

import msgspec


class EventKind(StrEnum):
    JOB_SUBMITTED = "job_submitted"
    JOB_ENDED = "job_ended"  # data: outcome
    GENERATION_GRANTED = "generation_granted"  # data: parent, hosts
    WORKERS_STOPPED = "workers_stopped"  # the quiesce phase of an action is over
    GENERATION_STARTED = "generation_started"  # start commands written; data: restore_step (null: from scratch)
    RANK_MARKS = (
        "rank_marks"  # data: spawned_at, attached_at, restore_began_at, restored_at, first_step_at, save_blocked_s
    )
    PHASE = "phase"  # a rank entered a phase that takes long, or left it; data: phase ("eval", "step", ...)
    STEPS = "steps"  # data: first_step, completed_at (list of wall times), of one rank
    RESTORED = "restored"  # data: step, source_tier, source_host, size_bytes, socket_bytes, seconds
    FAULT_INJECTED = "fault_injected"  # data: fault, target; stamped by the injector before it acts
    SIGNAL = "signal"  # data: kind, source, observed_at
    INCIDENT_OPENED = "incident_opened"  # data: cause
    INCIDENT_CLOSED = "incident_closed"  # data: state, lost_steps
    DECISION = "decision"  # data: decision_id, kind, rule
    ACTION_ENDED = "action_ended"  # data: action_id, state
    HOST_JOINED = "host_joined"
    HOST_LEFT = "host_left"
    CONTROLLER_ELECTED = "controller_elected"  # data: epoch


class Event(msgspec.Struct, frozen=True):
    """`at` is wall-clock seconds. Fields that do not apply are '' or -1."""

    at: float
    kind: EventKind
    job: str = ""
    generation: int = -1
    rank: int = -1
    host_id: str = ""
    incident_id: str = ""
    data: Mapping[str, str | int | float | bool | list[float | str] | None] = {}
