"""The accumulated events of one job. Pure."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import msgspec

from flyball.contracts.events import Event, EventKind
from goodput.history.facts import Break, History, LoggedDecision, LoggedGeneration, LoggedIncident, Wait
from goodput.history.generation_log import GenerationLog, full_size, generations, larger
from goodput.history.step_log import SettledStep
from goodput.history.values import moment, text, whole

SIGNALS_KEPT = 1000  # of those that no election followed, when a job's account is settled


class IncidentLog(msgspec.Struct):
    """All incidents that any event names. Without an opening event an incident opens at the first event that names
    it."""

    _first_named: dict[str, float] = {}
    _opened: dict[str, Event] = {}
    _closed: dict[str, Event] = {}

    def named(self, event: Event) -> None:
        """Record that an event names an incident."""
        if event.incident_id:
            at = self._first_named.get(event.incident_id, math.inf)
            self._first_named[event.incident_id] = min(at, event.at)

    def opened(self, event: Event) -> None:
        """Add an INCIDENT_OPENED event."""
        self.named(event)
        _keep_earliest(self._opened, event)

    def closed(self, event: Event) -> None:
        """Add an INCIDENT_CLOSED event."""
        self.named(event)
        _keep_earliest(self._closed, event)

    def all(self) -> tuple[LoggedIncident, ...]:
        """By opening time."""
        incidents = [self._incident(incident_id) for incident_id in self._first_named]
        return tuple(sorted(incidents, key=lambda i: (i.opened_at, i.incident_id)))

    def _incident(self, incident_id: str) -> LoggedIncident:
        opening, closing = self._opened.get(incident_id), self._closed.get(incident_id)
        sources = [event for event in (closing, opening) if event]  # the closing event takes precedence
        return LoggedIncident(
            incident_id=incident_id,
            cause=_first(text(e.data, "cause") for e in sources) or "unknown",
            opened_at=opening.at if opening else self._first_named[incident_id],
            closed_at=closing.at if closing else None,
            outcome=text(closing.data, "state") if closing else "",
            lost_steps=whole(closing.data, "lost_steps") if closing else None,
            host_id=_first(e.host_id or text(e.data, "host_id") for e in sources),
            failure_class=_first(text(e.data, "failure_class") for e in sources),
            inferred=opening is not None and opening.data.get("inferred") is True,
            fault_at=moment(opening, "fault_at") if opening else None,
        )


def _keep_earliest(chosen: dict[str, Event], event: Event) -> None:
    """Keep the earliest event of each incident. Ties are broken by content, so order does not matter."""
    if not event.incident_id:
        return
    known = chosen.get(event.incident_id)
    if known is None or _identity(event) < _identity(known):
        chosen[event.incident_id] = event


def _identity(event: Event) -> tuple[float, str, str]:
    return event.at, repr(sorted(event.data.items(), key=lambda item: item[0])), event.host_id


def _first(values: Iterable[str]) -> str:
    return next((value for value in values if value), "")


# --- jobs ---


class JobLog(msgspec.Struct):
    """The accumulated events of one job."""

    first_at: float = math.inf
    last_at: float = -math.inf
    submitted: set[float] = set()
    afresh: tuple[float, int] = (-math.inf, -1)  # the newest run from scratch: since when, its first generation
    ended: set[tuple[float, str]] = set()
    world_size: int | None = None
    save_every_steps: int | None = None
    logs_some_steps: bool = False
    generations: dict[int, GenerationLog] = {}
    incidents: IncidentLog = msgspec.field(default_factory=IncidentLog)
    decisions: set[LoggedDecision] = set()
    faults: set[float] = set()
    stops: set[float] = set()
    elections: set[float] = set()
    signals: set[tuple[float, float]] = set()  # received at, observed at

    @property
    def is_empty(self) -> bool:
        return self.first_at == math.inf

    def add(self, event: Event) -> None:
        at = event.at
        self.first_at = min(self.first_at, at)
        self.last_at = max(self.last_at, at)
        handler = _HANDLERS.get(event.kind)
        if handler is not None:
            handler(self, event)

    def generation(self, event: Event) -> GenerationLog:
        """The log of the event's generation."""
        found = self.generations.get(event.generation)
        if found is None:
            found = self.generations[event.generation] = GenerationLog()
        return found

    @property
    def n_values(self) -> int:
        logs = self.generations.values()
        return len(self.signals) + sum(len(log.steps) + len(log.phases) for log in logs)

    def settle(self, settled: Mapping[int, Sequence[SettledStep]]) -> None:
        """Keep these steps of each generation instead of all before them, and forget those of former runs."""
        for number in [number for number in self.generations if number < self.afresh[1]]:
            del self.generations[number]
        for number, steps in settled.items():
            self.generations[number].settle(steps)

    def forget_signals(self, elections: Collection[float]) -> None:
        """Keep the newest signals, and those that waited for one of these elections."""
        elected = sorted(elections)
        newest = sorted(self.signals)
        older, newest = newest[:-SIGNALS_KEPT], newest[-SIGNALS_KEPT:]
        waited = (one for one in older if bisect_right(elected, one[0]) > bisect_right(elected, one[1]))
        self.signals = {*newest, *waited}

    def _submitted(self, event: Event) -> None:
        self.submitted.add(event.at)
        first = whole(event.data, "first_generation", least=0)
        if first is not None:
            self.afresh = max(self.afresh, (event.at, first))
        self.world_size = larger(self.world_size, whole(event.data, "world_size", least=1))
        self.save_every_steps = larger(self.save_every_steps, whole(event.data, "save_every_steps", least=1))
        self.logs_some_steps = self.logs_some_steps or event.data.get("logs_some_steps") is True

    def _ended(self, event: Event) -> None:
        self.ended.add((event.at, text(event.data, "outcome")))

    def _restored(self, event: Event) -> None:
        step = whole(event.data, "step", least=-1)
        if step is not None:
            self.generation(event).restored_steps.add(step)

    def _phase(self, event: Event) -> None:
        generation = self.generation(event)
        generation.is_known = True
        generation.phases.add(event)

    def _saved(self, event: Event) -> None:
        step = whole(event.data, "step")
        if step is not None:
            self.generation(event).saved_steps.add(step)

    def _steps(self, event: Event) -> None:
        generation = self.generation(event)
        generation.is_known = True
        generation.steps.add(event)
        generation.add_waits(event)

    def _signal(self, event: Event) -> None:
        observed_at = moment(event, "observed_at")
        if observed_at is not None:
            self.signals.add((event.at, observed_at))

    def _decision(self, event: Event) -> None:
        kind, rule = text(event.data, "kind"), text(event.data, "rule")
        self.decisions.add(LoggedDecision(event.at, kind, event.incident_id, rule))
        self.incidents.named(event)

    def history(self, name: str, of_every_job: JobLog, now: float | None) -> History:
        """The history of the newest run from scratch, including events that concern every job."""
        since, first = self.afresh
        incidents = tuple(incident for incident in self.incidents.all() if incident.opened_at >= since)
        of_run = {number: log for number, log in self.generations.items() if number >= first}
        full = full_size(of_run.values(), self.world_size)
        found = generations(of_run, incidents, full)
        submissions = tuple(sorted(at for at in self.submitted if at >= since))
        # A script that ended may also be restarted with the same event file, which says nothing of it.
        begins = sorted([*submissions, *(g.started_at for g in found if g.started_at is not None)])
        ends = sorted(end for end in self.ended if end[0] >= since)
        again = {end: at for end in ends if (at := _next_after(begins, end[0])) is not None}
        ended = ends[-1] if ends and ends[-1] not in again else None
        start, end = self._bounds(found, of_every_job if not name else self, ended, now, submissions)
        return History(
            job=name,
            start=start,
            end=end,
            submitted=bool(submissions),
            outcome=(ended[1] or "ended") if ended else "",
            generations=found,
            incidents=incidents,
            decisions=tuple(sorted(decision for decision in self.decisions if decision.at >= since)),
            faults=tuple(sorted(at for at in self.faults | of_every_job.faults if at >= since)),
            stops=tuple(sorted(at for at in self.stops if at >= since)),
            waits=_waits(self.elections | of_every_job.elections, self.signals | of_every_job.signals, since),
            breaks=_breaks((end[0], at) for end, at in again.items()),
            submissions=submissions,
            world_size=full.ranks,
            save_every_steps=self.save_every_steps,
            logs_some_steps=self.logs_some_steps,
        )

    def _bounds(
        self,
        generations: Iterable[LoggedGeneration],
        also: JobLog,
        ended: tuple[float, str] | None,
        now: float | None,
        submissions: Sequence[float],
    ) -> tuple[float, float]:
        moments = [t for t in (self.first_at, self.last_at, also.first_at, also.last_at) if math.isfinite(t)]
        for generation in generations:
            moments += [t for t in (generation.began_at, generation.restored_at) if t is not None]
            moments += [s.at for s in (*generation.steps[:1], *generation.steps[-1:])]
        if not moments:
            moments = [now or 0.0]
        start = submissions[0] if submissions else min(moments)
        end = ended[0] if ended else max(moments) if now is None else now
        return start, max(start, end)


_HANDLERS: Mapping[EventKind, Callable[[JobLog, Event], None]] = {
    EventKind.JOB_SUBMITTED: JobLog._submitted,
    EventKind.JOB_ENDED: JobLog._ended,
    EventKind.GENERATION_GRANTED: lambda log, e: log.generation(e).add_granted(e),
    EventKind.GENERATION_STARTED: lambda log, e: log.generation(e).add_started(e),
    EventKind.RANK_MARKS: lambda log, e: log.generation(e).add_marks(e),
    EventKind.RESTORED: JobLog._restored,
    EventKind.CHECKPOINT_SAVED: JobLog._saved,
    EventKind.PHASE: JobLog._phase,
    EventKind.STEPS: JobLog._steps,
    EventKind.WORKERS_STOPPED: lambda log, e: log.stops.add(e.at),
    EventKind.FAULT_INJECTED: lambda log, e: log.faults.add(e.at),
    EventKind.CONTROLLER_ELECTED: lambda log, e: log.elections.add(e.at),
    EventKind.SIGNAL: JobLog._signal,
    EventKind.DECISION: JobLog._decision,
    EventKind.INCIDENT_OPENED: lambda log, e: log.incidents.opened(e),
    EventKind.INCIDENT_CLOSED: lambda log, e: log.incidents.closed(e),
}


def _next_after(moments: Sequence[float], at: float) -> float | None:
    place = bisect_right(moments, at)
    return moments[place] if place < len(moments) else None


def _breaks(found: Iterable[tuple[float, float]]) -> tuple[Break, ...]:
    """Those of several ends without a start in between are one, from the first."""
    first: dict[float, float] = {}
    for since, until in found:
        first[until] = min(first.get(until, since), since)
    return tuple(sorted(Break(since, until) for until, since in first.items()))


def _waits(elections: Iterable[float], signals: Iterable[tuple[float, float]], after: float) -> tuple[Wait, ...]:
    """Signals observed before an election and received only after it: no controller was there to receive them."""
    received = sorted(signals)
    earliest = [math.inf]  # from the end on: the earliest observation among this signal and those received later
    for _, observed_at in reversed(received):
        earliest.append(min(earliest[-1], observed_at))
    earliest.reverse()
    waits = set()
    for election in elections:
        since = earliest[bisect_left(received, (election, -math.inf))]
        if after <= since < election:
            waits.add(Wait(since, election))
    return tuple(sorted(waits))
