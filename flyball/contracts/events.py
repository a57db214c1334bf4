"""The event log that goodput reads: one flat, documented record per event.

The supervisor writes it to the database and as JSON lines; `goodput` needs nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from typing import TypeGuard

import msgspec


class EventKind(StrEnum):
    JOB_SUBMITTED = "job_submitted"  # data: world_size, save_every_steps (to the memory tier; 0: no step interval)
    JOB_ENDED = "job_ended"  # data: outcome
    GENERATION_GRANTED = "generation_granted"  # data: parent, hosts
    WORKERS_STOPPED = "workers_stopped"  # the action's quiesce phase is over
    # start commands written, or the first process began; data: restore_step (null: from scratch; missing: unknown),
    # world_size. A trainer's own file adds launch, and rollback (how often that launch went back to an earlier step).
    GENERATION_STARTED = "generation_started"
    # RANK_MARKS and RESTORED concern one rank. Without a rank they cover several ranks of one host, reported together:
    # `ranks` lists them, and each value and `at` is a list in the same order (`per_rank` splits them).
    # data: spawned_at, attached_at, restore_began_at, restored_at, first_step_at, save_blocked_s, data_wait_s
    RANK_MARKS = "rank_marks"
    # a rank entered a phase and left the previous one; data: phase ("init", "restore", "step", "data", "eval",
    # "checkpoint", "parked", "done", "other"). The control plane logs evaluations only, a trainer's own file all phases
    PHASE = "phase"
    # data: first_step, completed_at (list of wall times), of one rank. Without a rank: when the last rank that `sensor`
    # receives completed each step; slowest_step, completed by all of these ranks; `ranks`, their number; and
    # save_blocked_s and data_wait_s of the ranks that have waited longest. If the script reports a loss, and it
    # changed: loss (a number, or "nan", "inf", "-inf"), loss_step and loss_rank, the lowest rank that reports one
    STEPS = "steps"
    CHECKPOINT_SAVED = "checkpoint_saved"  # data: step, tier ('' if the log does not name it)
    RESTORED = "restored"  # data: step, source_tier, source_host, size_bytes, socket_bytes, transport, seconds
    FAULT_INJECTED = "fault_injected"  # data: fault, target; written by the injector before it acts
    SIGNAL = "signal"  # data: kind, source, observed_at
    # data: cause; `inferred` (true) if nobody reported the incident and only a restart shows it: the time before the
    # restart then counts as unknown, not as detection
    INCIDENT_OPENED = "incident_opened"
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
    data: Mapping[str, str | int | float | bool | list[int | float | str] | None] = {}


# --- one event for several ranks of a host ---------------------------------------------------------------------------

RANKS, AT = "ranks", "at"
_LARGEST = 2.0**63
_SUMMED_UP = (EventKind.RANK_MARKS, EventKind.RESTORED)


def summed_up(events: Sequence[Event]) -> Event:
    """Merge events of one kind, host and generation: `ranks`, and for every value a list in their order.

    A single event stays as it is.
    """
    if len(events) == 1:
        return events[0]
    data = {key: [event.data[key] for event in events] for key in events[0].data}
    data |= {RANKS: [event.rank for event in events], AT: [event.at for event in events]}
    return msgspec.structs.replace(events[0], at=max(event.at for event in events), rank=-1, data=data)


def per_rank(event: Event) -> Iterator[Event]:
    """Split a merged event; yields any other event itself. Skips what its lists lack, and ranks that are no numbers."""
    ranks = event.data.get(RANKS)
    if event.kind not in _SUMMED_UP or not isinstance(ranks, list):
        yield event
        return
    lists = {key: values for key, values in event.data.items() if key != RANKS and isinstance(values, list)}
    for place, rank in enumerate(ranks):
        if not _is_number(rank):
            continue
        data = {key: values[place] for key, values in lists.items() if place < len(values)}
        at = data.pop(AT, None)
        moment = float(at) if _is_number(at) else event.at
        yield msgspec.structs.replace(event, rank=int(rank), at=moment, data=data)


def _is_number(value: object) -> TypeGuard[int | float]:
    """Whether it is finite, and no integer of hundreds of digits."""
    return isinstance(value, int | float) and -_LARGEST <= value <= _LARGEST
