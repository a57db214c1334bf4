"""Signals in the event log: their keys, which of them fit into columns, and the event of each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeAlias

import structlog

from flyball.contracts.events import Event, EventKind
from flyball.contracts.reports.signals import (
    ConditionBegan,
    ConditionEnded,
    ConditionsStand,
    ReplicasDiffer,
    SaveFailed,
    Signal,
    SignalBody,
)
from flyball.contracts.reports.training_health import (
    LossDiverged,
    LossRecovered,
    ReplayDiffers,
    Straggler,
    StragglerRecovered,
)
from services.record.codec import subject_of
from services.rules.unreadable import unstorable

MAX_SOURCE_LENGTH = 128
MAX_NAME_LENGTH = 64
_TENSORS_IN_EVENT, _NAME_IN_EVENT, _TEXT_IN_EVENT = 8, 256, 500
_NUMBERS: dict[type, tuple[str, ...]] = {
    Straggler: ("compute_s", "usual_s", "windows"),
    StragglerRecovered: ("windows",),
    LossRecovered: ("step", "value", "first_step", "highest"),
    LossDiverged: ("step", "value", "first_step", "clean_step"),
}
SignalKey = tuple[str, str, int]
Details: TypeAlias = dict[str, str | int | float | list[int | float | str]]
_log = structlog.get_logger(__name__)


def key_of(signal: Signal) -> SignalKey:
    return signal.source, signal.incarnation, signal.seq


def is_storable(signal: Signal) -> bool:
    """Whether names and numbers fit into their columns. Contracts limit neither incarnations nor integers."""
    numbers = (getattr(signal.body, name, 0) for name in ("generation", "pid"))
    steps = (getattr(signal.body, name, 0) for name in ("last_step", "step"))  # some scripts count tokens
    return (
        len(signal.source) <= MAX_SOURCE_LENGTH
        and len(signal.incarnation) <= MAX_NAME_LENGTH
        and 0 <= signal.seq < 2**63
        and all(-(2**31) <= number < 2**31 for number in numbers)
        and all(-(2**63) <= step < 2**63 for step in steps)
    )


def storable(signals: Iterable[Signal]) -> Iterator[Signal]:
    """The signals to store, in order; those that do not fit into columns are replaced."""
    for signal in signals:
        if is_storable(signal):
            yield signal
        elif is_storable(stand_in := unstorable(signal, "a value does not fit its column")):
            yield stand_in
        else:  # not a daemon or sensor of Flyball
            _log.error("signal_dropped", source=signal.source[:64], kind=type(signal.body).__name__)


def event_of(signal: Signal, now: float) -> Event:
    """The event of a stored signal. Pure."""
    subject = subject_of(signal)
    return Event(
        at=now,
        kind=EventKind.SIGNAL,
        job=subject.job,
        generation=subject.generation,
        rank=getattr(signal.body, "rank", -1),
        host_id=subject.host_id,
        data={"kind": subject.kind, "source": signal.source, "observed_at": signal.at, **_details(signal.body)},
    )


def _details(body: SignalBody) -> Details:
    """What people need who read the event: there may be no incident that would show it."""
    if type(body) in _NUMBERS:
        return {name: getattr(body, name) for name in _NUMBERS[type(body)]}
    if isinstance(body, ConditionBegan):
        found = body.condition
        words = {"severity": found.severity.value, "message": found.message}
        return {"reporter": found.source, "condition": found.kind, "subject": found.subject, **words}
    if isinstance(body, SaveFailed):
        return {"step": body.step, "message": body.message[:_TEXT_IN_EVENT]}
    if isinstance(body, ConditionEnded):
        return {"reporter": body.source, "condition": body.kind, "subject": body.subject}
    if isinstance(body, ConditionsStand):
        return {"reporters": [*body.sources], "stand": len(body.keys)}
    return _differences(body) if isinstance(body, ReplicasDiffer | ReplayDiffers) else {}


def _differences(body: ReplicasDiffer | ReplayDiffers) -> Details:
    tensors: list[int | float | str] = [name[:_NAME_IN_EVENT] for name in body.tensors[:_TENSORS_IN_EVENT]]
    found: Details = {"step": body.step, "tensors": tensors, "count": body.count}
    if isinstance(body, ReplicasDiffer):
        return {**found, "agree": [*body.agree], "differ": [*body.differ]}
    runs = ("peer_runs", "peer_results", "as_peer", "own_runs", "own_odd")
    numbers = ("differing", "ranks", "peer", *runs, "equal_step")
    return {**found, **{name: getattr(body, name) for name in numbers}}
