"""What probes find, and what becomes of it: conditions that begin, go on, or end. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol, TypeAlias

import msgspec

from flyball.contracts.reports.conditions import (
    BOOT,
    EVENT,
    MAX_CONDITIONS,
    ConditionKey,
    Evidence,
    HostCondition,
    Severity,
)

Standing: TypeAlias = Mapping[ConditionKey, HostCondition]
MAX_MESSAGE = 2_000


class NotAvailableError(Exception):
    """This host lacks what the probe reads; the text says what, for the log."""


class ProbeFinding(msgspec.Struct, frozen=True):
    """Something that a probe found. `ttl_s`: how long an event stands; 0.0: until it is ended. `is_remembered`: a probe
    that did not see what was before may not find it."""

    kind: str
    severity: Severity
    message: str
    subject: str = ""
    evidence: Evidence = {}
    ttl_s: float = 0.0
    is_remembered: bool = False


class Reading(msgspec.Struct, frozen=True):
    """One reading of a probe. `states`: all that is wrong now; what is missing there is over. `events`: what happened
    since the last reading, and stands for a while."""

    states: tuple[ProbeFinding, ...] = ()
    events: tuple[ProbeFinding, ...] = ()
    mark: str = ""  # how far it has read, for the probe of the next daemon of this boot


class Probe(Protocol):
    """Reads one subject. Runs in a thread of its own, and may block there."""

    source: str  # of its conditions
    interval_s: float
    deadline_s: float

    def read(self) -> Reading:
        """Raises NotAvailableError, or OSError."""
        ...


class News(msgspec.Struct, frozen=True):
    """What changed."""

    began: tuple[HostCondition, ...] = ()
    ended: tuple[HostCondition, ...] = ()


def news(standing: Standing, source: str, reading: Reading, now: float, boot: str = "") -> News:
    """What a reading of this source changes. A finding that stands already is news only if its severity changed, or an
    event's time is half over. Ended conditions come first where there would be too many. `boot`: of the kernel."""
    mine = {key: condition for key, condition in standing.items() if key[0] == source}
    found = {(source, finding.kind, finding.subject[:100]): finding for finding in (*reading.states, *reading.events)}
    states = {(source, finding.kind, finding.subject[:100]) for finding in reading.states}
    ended = tuple(c for key, c in mine.items() if key not in states and not c.is_event)
    room = MAX_CONDITIONS - len(standing) + len(ended)
    began = []
    for key, finding in found.items():
        known = mine.get(key)
        condition = _condition(finding, source, now, _marks(finding, boot, is_event=key not in states))
        if known is None and room <= 0:
            continue
        if known is None or known.severity is not finding.severity or _runs_out(known, finding, now):
            room -= known is None
            since = known.since if known is not None and known.severity is finding.severity else now
            began.append(msgspec.structs.replace(condition, since=since))
    return News(tuple(began), ended)


def over(standing: Standing, now: float) -> list[ConditionKey]:
    """The conditions that ended by themselves. The supervisor ends them, too."""
    return [key for key, condition in standing.items() if 0.0 < condition.until <= now]


def ended_by_reboot(standing: Iterable[HostCondition]) -> list[HostCondition]:
    """Conditions about what the kernel reported: they are of the boot in which it did."""
    return [condition for condition in standing if condition.is_event]


def _runs_out(known: HostCondition, finding: ProbeFinding, now: float) -> bool:
    return known.until > 0.0 and known.until - now < finding.ttl_s / 2


def _marks(finding: ProbeFinding, boot: str, *, is_event: bool) -> Evidence:
    if is_event:
        return {EVENT: True, BOOT: boot}
    return {BOOT: boot} if finding.is_remembered else {}


def _condition(finding: ProbeFinding, source: str, now: float, marks: Evidence) -> HostCondition:
    return HostCondition(
        kind=finding.kind,
        severity=finding.severity,
        message=finding.message[:MAX_MESSAGE],
        source=source,
        since=now,
        subject=finding.subject[:100],
        evidence={**finding.evidence, **marks},
        until=now + finding.ttl_s if finding.ttl_s else 0.0,
    )
