"""What an event log says about one job, put in order.

Logs are incomplete, out of order and full of repetitions. Every value here is therefore a minimum, a maximum or a
union over events, so that neither the order of lines nor a line that comes twice changes anything; a field that is
missing or of the wrong type is treated as not there.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from flyball.contracts.cluster import Phase
from flyball.contracts.errors import NotFound, UsageError
from flyball.contracts.events import Event, EventKind

# Of these, events without a job concern every job.
_HISTORY_OF_EVERY_JOB = (EventKind.FAULT_INJECTED, EventKind.CONTROLLER_ELECTED, EventKind.SIGNAL)


class WorldStep(NamedTuple):
    """A step that every reporting rank of a generation completed; `at` is when the last of them did."""

    step: int
    at: float


class BlockedSample(NamedTuple):
    """By `at`, the rank had waited `total_s` inside save since its start."""

    at: float
    total_s: float


class Generation(msgspec.Struct, frozen=True):
    """One restart epoch. Times are wall clock; None where the log does not say."""

    generation: int
    incident_id: str  # the incident that it answers, '' for the first start or where unknown
    began_at: float | None  # first sign of life: start command, spawn or first step
    started_at: float | None
    spawned_at: float | None  # of the last rank
    restore_began_at: float | None  # of the last rank
    restored_at: float | None  # of the last rank; when it attached, for a rank that restored nothing
    restore_step: int | None  # -1: from scratch, None: unknown
    steps: tuple[WorldStep, ...]  # steps ascending, times never falling
    blocked: tuple[BlockedSample, ...]  # of the rank that waited longest
    evaluations: tuple[tuple[float, float | None], ...]  # per rank: entered, left


class Incident(msgspec.Struct, frozen=True):
    incident_id: str
    cause: str
    opened_at: float
    closed_at: float | None
    outcome: str  # '' while it is open
    lost_steps: int | None  # as the controller counted


class Decision(NamedTuple):
    at: float
    kind: str
    incident_id: str


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
    generations: tuple[Generation, ...]
    incidents: tuple[Incident, ...]  # by time of opening
    decisions: tuple[Decision, ...]
    faults: tuple[float, ...]
    stops: tuple[float, ...]
    waits: tuple[Wait, ...]


def number(data: Mapping[str, object], key: str) -> float | None:
    """A finite number of an event's data, else None."""
    value = data.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def moment(data: Mapping[str, object], key: str) -> float | None:
    """A wall-clock time of an event's data; 0.0 means: not reached."""
    value = number(data, key)
    return value if value is not None and value > 0 else None


def text(data: Mapping[str, object], key: str) -> str:
    value = data.get(key)
    return value if isinstance(value, str) else ""


def choose_job(events: Iterable[Event], job: str | None) -> str:
    """The job to report on; raises NotFound when the log has none, UsageError when it has several to choose from."""
    names = sorted({e.job for e in events if e.job or e.kind not in _HISTORY_OF_EVERY_JOB})
    if job is not None:
        if job not in names:
            raise NotFound(f"The log has no event of job {job!r}.", hint=f"it has: {', '.join(names) or 'no job'}")
        return job
    named = [name for name in names if name] or names
    if not named:
        raise NotFound("The log has no event of any job.", hint="give the log of a job that was submitted")
    if len(named) > 1:
        raise UsageError(f"The log holds {len(named)} jobs.", hint=f"choose one of: {', '.join(named)}")
    return named[0]


def build(events: Sequence[Event], *, job: str | None = None, now: float | None = None) -> History:
    """The history of one job, up to its end, else up to `now`, else up to the last moment in the log."""
    name = choose_job(events, job)
    by_kind: dict[EventKind, list[Event]] = defaultdict(list)
    for event in events:
        if math.isfinite(event.at) and (event.job == name or (not event.job and event.kind in _HISTORY_OF_EVERY_JOB)):
            by_kind[event.kind].append(event)

    incidents = _incidents(by_kind)
    generations = _generations(by_kind, incidents)
    start, end = _bounds(by_kind, generations, name, now)
    ended = max(by_kind[EventKind.JOB_ENDED], key=lambda e: (e.at, text(e.data, "outcome")), default=None)
    return History(
        job=name,
        start=start,
        end=end,
        submitted=bool(by_kind[EventKind.JOB_SUBMITTED]),
        outcome=(text(ended.data, "outcome") or "ended") if ended else "",
        generations=generations,
        incidents=incidents,
        decisions=tuple(
            sorted({Decision(e.at, text(e.data, "kind"), e.incident_id) for e in by_kind[EventKind.DECISION]})
        ),
        faults=tuple(sorted({e.at for e in by_kind[EventKind.FAULT_INJECTED]})),
        stops=tuple(sorted({e.at for e in by_kind[EventKind.WORKERS_STOPPED]})),
        waits=_waits(by_kind),
    )


def _bounds(
    by_kind: Mapping[EventKind, list[Event]], generations: Iterable[Generation], job: str, now: float | None
) -> tuple[float, float]:
    submitted = [e.at for e in by_kind.get(EventKind.JOB_SUBMITTED, ())]
    ended = [e.at for e in by_kind.get(EventKind.JOB_ENDED, ())]
    moments = [e.at for kind in by_kind for e in by_kind[kind] if e.job == job]
    for generation in generations:
        moments += [t for t in (generation.began_at, generation.restored_at) if t is not None]
        moments += [s.at for s in (*generation.steps[:1], *generation.steps[-1:])]
    start = min(submitted or moments)
    end = max(ended) if ended else max(moments) if now is None else now
    return start, max(start, end)


# --- incidents -------------------------------------------------------------------------------------------------------


def _incidents(by_kind: Mapping[EventKind, list[Event]]) -> tuple[Incident, ...]:
    """Every incident that any event names; one whose opening is missing from the log opens where it is named first."""
    first_named: dict[str, float] = {}
    for kind in (EventKind.INCIDENT_OPENED, EventKind.DECISION, EventKind.INCIDENT_CLOSED):
        for event in by_kind.get(kind, ()):
            if event.incident_id:
                first_named[event.incident_id] = min(first_named.get(event.incident_id, math.inf), event.at)

    opened = _earliest(by_kind.get(EventKind.INCIDENT_OPENED, ()))
    closed = _earliest(by_kind.get(EventKind.INCIDENT_CLOSED, ()))
    incidents = []
    for incident_id, named_at in first_named.items():
        opening, closing = opened.get(incident_id), closed.get(incident_id)
        lost = number(closing.data, "lost_steps") if closing else None
        causes = (text(e.data, "cause") for e in (closing, opening) if e)  # the end knows better than the beginning
        incidents.append(
            Incident(
                incident_id=incident_id,
                cause=next((cause for cause in causes if cause), "unknown"),
                opened_at=opening.at if opening else named_at,
                closed_at=closing.at if closing else None,
                outcome=text(closing.data, "state") if closing else "",
                lost_steps=int(lost) if lost is not None and lost >= 0 else None,
            )
        )
    return tuple(sorted(incidents, key=lambda i: (i.opened_at, i.incident_id)))


def _earliest(events: Iterable[Event]) -> dict[str, Event]:
    """The earliest event of each incident; ties are broken by content, so that order does not matter."""
    chosen: dict[str, Event] = {}
    for event in events:
        known = chosen.get(event.incident_id)
        if known is None or _identity(event) < _identity(known):
            chosen[event.incident_id] = event
    return chosen


def _identity(event: Event) -> tuple[float, str]:
    return event.at, repr(sorted(event.data.items()))


def _waits(by_kind: Mapping[EventKind, list[Event]]) -> tuple[Wait, ...]:
    """Signals that were observed before an election and taken in only after it: nobody was there to hear them."""
    waits = set()
    for election in {e.at for e in by_kind.get(EventKind.CONTROLLER_ELECTED, ())}:
        observed = [moment(e.data, "observed_at") for e in by_kind.get(EventKind.SIGNAL, ()) if e.at >= election]
        before = [t for t in observed if t is not None and t < election]
        if before:
            waits.add(Wait(min(before), election))
    return tuple(sorted(waits))


# --- generations -----------------------------------------------------------------------------------------------------


class _StepLog:
    """Completion times of one generation's steps over its ranks."""

    def __init__(self) -> None:
        self.newest: dict[int, int] = {}  # rank -> newest step
        self.latest: dict[int, float] = {}  # step -> when the last rank completed it

    def add(self, event: Event) -> None:
        first = number(event.data, "first_step")
        times = event.data.get("completed_at")
        if first is None or not isinstance(times, list):
            return
        step = int(first) - 1
        for at in times:
            step += 1
            if isinstance(at, int | float) and math.isfinite(at):
                if at > self.latest.get(step, -math.inf):
                    self.latest[step] = float(at)
                if step > self.newest.get(event.rank, -1):
                    self.newest[event.rank] = step

    def world_steps(self, resumed_from: int | None) -> tuple[WorldStep, ...]:
        """Steps that all reporting ranks completed. A lost host's last reports may be missing: a step from which a
        later generation resumed was complete all the same."""
        if not self.newest:
            return ()
        newest = max(min(self.newest.values()), -1 if resumed_from is None else resumed_from)
        steps, at = [], -math.inf
        for step in sorted(s for s in self.latest if s <= newest):
            at = max(at, self.latest[step])
            steps.append(WorldStep(step, at))
        return tuple(steps)


def _generations(by_kind: Mapping[EventKind, list[Event]], incidents: Sequence[Incident]) -> tuple[Generation, ...]:
    marks = _by_generation(by_kind.get(EventKind.RANK_MARKS, ()))
    granted = _by_generation(by_kind.get(EventKind.GENERATION_GRANTED, ()))
    started = _by_generation(by_kind.get(EventKind.GENERATION_STARTED, ()))
    restored = _by_generation(by_kind.get(EventKind.RESTORED, ()))
    phases = _by_generation(by_kind.get(EventKind.PHASE, ()))
    step_logs: dict[int, _StepLog] = defaultdict(_StepLog)
    for event in by_kind.get(EventKind.STEPS, ()):
        step_logs[event.generation].add(event)

    numbers = sorted(set(marks) | set(started) | set(step_logs))
    restore_steps = {n: _restore_step(started[n], restored[n], step_logs[n].latest) for n in numbers}
    generations = []
    for index, n in enumerate(numbers):
        resumed_from = next((restore_steps[m] for m in numbers[index + 1 :] if restore_steps[m] is not None), None)
        steps = step_logs[n].world_steps(resumed_from)
        spawned = _moments(marks[n], "spawned_at")
        started_at = min((e.at for e in started[n]), default=min(spawned, default=None))
        signs = [t for t in (started_at, *spawned, *(s.at for s in steps[:1])) if t is not None]
        generations.append(
            Generation(
                generation=n,
                incident_id=_answered_incident(started[n], granted[n], incidents),
                began_at=min(signs, default=None),
                started_at=started_at,
                spawned_at=max(spawned, default=None),
                restore_began_at=max(_moments(marks[n], "restore_began_at"), default=None),
                restored_at=max(
                    _moments(marks[n], "restored_at") or _moments(marks[n], "attached_at"),
                    default=None,
                ),
                restore_step=restore_steps[n],
                steps=steps,
                blocked=_blocked(marks[n]),
                evaluations=_evaluations(phases[n]),
            )
        )
    return tuple(generations)


def _by_generation(events: Iterable[Event]) -> dict[int, list[Event]]:
    grouped: dict[int, list[Event]] = defaultdict(list)
    for event in events:
        grouped[event.generation].append(event)
    return grouped


def _moments(events: Iterable[Event], key: str) -> list[float]:
    return [t for t in (moment(e.data, key) for e in events) if t is not None]


def _restore_step(started: list[Event], restored: list[Event], steps: Iterable[int]) -> int | None:
    """The step that a generation went on from: as the controller named it, else as the engines restored it, else the
    step before the first one seen."""
    named = [number(e.data, "restore_step") for e in started if "restore_step" in e.data]
    if named:
        return min(-1 if value is None else int(value) for value in named)
    fetched = [int(value) for e in restored if (value := number(e.data, "step")) is not None]
    if fetched:
        return min(fetched)
    first = min(steps, default=None)
    return None if first is None else first - 1


def _answered_incident(started: list[Event], granted: list[Event], incidents: Sequence[Incident]) -> str:
    """The incident that a generation answers: as its events say, else the newest one that was open then."""
    named = sorted({e.incident_id for e in (*started, *granted) if e.incident_id})
    if named:
        return named[-1]
    at = min((e.at for e in (*granted, *started)), default=None)
    if at is None:
        return ""
    still_open = [i for i in incidents if i.opened_at <= at and (i.closed_at is None or i.closed_at >= at)]
    return still_open[-1].incident_id if still_open else ""


def _blocked(marks: Iterable[Event]) -> tuple[BlockedSample, ...]:
    """Save-blocked time of the rank that waited longest: the others' waits lie within it."""
    samples: dict[int, set[BlockedSample]] = defaultdict(set)
    for event in marks:
        total = number(event.data, "save_blocked_s")
        if total is not None and total > 0:
            samples[event.rank].add(BlockedSample(event.at, total))
    if not samples:
        return ()
    longest = max(samples.values(), key=lambda of_rank: (max(s.total_s for s in of_rank), sorted(of_rank)))
    return tuple(sorted(longest))


def _evaluations(phases: Iterable[Event]) -> tuple[tuple[float, float | None], ...]:
    by_rank: dict[int, set[tuple[float, str]]] = defaultdict(set)
    for event in phases:
        by_rank[event.rank].add((event.at, text(event.data, "phase")))
    spans: set[tuple[float, float | None]] = set()
    for of_rank in by_rank.values():
        entries = sorted(of_rank)
        for (at, phase), following in zip(entries, [*entries[1:], None], strict=True):
            if phase == Phase.EVAL.name.lower():
                spans.add((at, following[0] if following else None))
    return tuple(sorted(spans, key=lambda s: (s[0], math.inf if s[1] is None else s[1])))
