"""From an event log to a report: goodput, ETTR, the loss by category and by cause, every incident with its cost.

Pure: `calculate(events)` reads no clock and no file. docs/goodput.md gives every formula with its source.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from math import fsum
from statistics import fmean

import msgspec

from flyball.contracts.decisions import DecisionKind
from flyball.contracts.events import Event
from goodput.categories import PRODUCTIVE, RUNNING, Category
from goodput.history import History, Incident, build
from goodput.intervals import Executed, Interval, Timeline, timeline

SCHEMA = "flyball.goodput.v1"


class Steps(msgspec.Struct, frozen=True):
    """Steps of the world, that is, completed by every rank."""

    kept: int
    recomputed: int  # executed, and executed again by a later generation
    newest: int  # -1 before the first
    median_s: float | None  # None before two steps in a row


class IncidentReport(msgspec.Struct, frozen=True):
    """One incident and what it cost. The moments `*_s` are seconds since `began_at`."""

    incident_id: str
    cause: str
    outcome: str  # resolved, escalated, or '' while it is open
    began_at: float | None  # wall clock of the fault
    began_is_estimate: bool  # no injector's stamp: the newest step completed before the incident stands in for it
    detected_s: float | None  # incident opened
    decided_s: float | None  # first decision that is not to hold
    resumed_s: float | None  # first step completed by the last generation that answers it
    decisions: tuple[str, ...]  # kinds, in order
    lost_steps: int | None
    seconds_by_category: Mapping[str, float]
    badput_s: float


class Report(msgspec.Struct, frozen=True):
    """The measures of one job over [started_at, ended_at]; ratios are None when no time has passed.

    goodput = useful / elapsed
    ettr    = (useful + evaluation + checkpoint_blocked) / elapsed
    mttr_s  = mean over incidents of (first step after it - its fault)
    mttf_s  = (useful + recomputed + evaluation + checkpoint_blocked) / number of interruptions
    sum(seconds_by_category) = elapsed_s = useful + sum(badput_s)
    """

    schema: str
    job: str
    outcome: str  # of the job, '' while it runs
    started_at: float
    ended_at: float
    elapsed_s: float
    goodput: float | None
    ettr: float | None
    seconds_by_category: Mapping[str, float]  # every category, also those of 0.0
    badput_s: Mapping[str, float]  # by cause, largest first
    incidents: tuple[IncidentReport, ...]
    interruptions: int  # incidents that a new generation or the end of the job followed
    mttr_s: float | None
    mttf_s: float | None
    steps: Steps
    notes: tuple[str, ...]  # what was assumed or is missing


def calculate(events: Iterable[Event], *, now: float | None = None, job: str | None = None) -> Report:
    """The report on one job's events, in any order, with any repetitions and gaps.

    `now` (wall clock) ends the time of a job that has not ended; without it the log's last moment does. `job` chooses
    among several. Raises NotFound if the log has no such job, UsageError if it has several and none was chosen.
    """
    history = build(list(events), job=job, now=now)
    line = timeline(history)
    elapsed_s = history.end - history.start
    by_category = seconds_by_category(line.intervals)
    incidents = tuple(_incident_report(history, line, incident) for incident in history.incidents)
    answered = {g.incident_id for g in history.generations}
    ended_by = {d.incident_id for d in history.decisions if d.kind == DecisionKind.FAIL_JOB}
    interruptions = sum(1 for i in history.incidents if i.incident_id in answered | ended_by)
    repairs = [i.resumed_s for i in incidents if i.resumed_s is not None and i.incident_id in answered]
    return Report(
        schema=SCHEMA,
        job=history.job,
        outcome=history.outcome,
        started_at=history.start,
        ended_at=history.end,
        elapsed_s=elapsed_s,
        goodput=by_category[Category.USEFUL] / elapsed_s if elapsed_s > 0 else None,
        ettr=fsum(by_category[c] for c in PRODUCTIVE) / elapsed_s if elapsed_s > 0 else None,
        seconds_by_category=by_category,
        badput_s=_badput_by_cause(history, line.intervals),
        incidents=incidents,
        interruptions=interruptions,
        mttr_s=fmean(repairs) if repairs else None,
        mttf_s=fsum(by_category[c] for c in RUNNING) / interruptions if interruptions else None,
        steps=_steps(line.executed, line.step_s),
        notes=_notes(history, line),
    )


def seconds_by_category(intervals: Iterable[Interval]) -> dict[str, float]:
    """Seconds of every category, also of those that do not occur."""
    pieces: dict[str, list[float]] = {category: [] for category in Category}
    for interval in intervals:
        pieces[interval.category].append(interval.seconds)
    return {str(category): fsum(seconds) for category, seconds in pieces.items()}


def _badput_by_cause(history: History, intervals: Iterable[Interval]) -> dict[str, float]:
    """Seconds that were not useful, by the cause of the incident, else by what the job did meanwhile."""
    causes = {i.incident_id: i.cause for i in history.incidents}
    pieces: dict[str, list[float]] = defaultdict(list)
    for interval in intervals:
        if interval.category is not Category.USEFUL:
            cause = causes.get(interval.incident_id) or _CAUSE_WITHOUT_INCIDENT.get(interval.category, "unknown")
            pieces[cause].append(interval.seconds)
    sums = {cause: fsum(seconds) for cause, seconds in pieces.items()}
    return dict(sorted(sums.items(), key=lambda item: (-item[1], item[0])))


_CAUSE_WITHOUT_INCIDENT = {
    Category.SCHEDULING: "scheduling",
    Category.RESTART: "start_up",
    Category.RESTORE: "start_up",
    Category.WARM_UP: "start_up",
    Category.STOP: "operator",
    Category.EVALUATION: "evaluation",
    Category.CHECKPOINT_BLOCKED: "checkpointing",
    Category.SHUTDOWN: "shutdown",
}


def _incident_report(history: History, line: Timeline, incident: Incident) -> IncidentReport:
    began_at, estimated = _began_at(history, line.executed, incident)
    decisions = [d for d in history.decisions if d.incident_id == incident.incident_id]
    decided_at = next((d.at for d in decisions if d.kind != DecisionKind.HOLD), None)
    answers = [g for g in history.generations if g.incident_id == incident.incident_id]
    resumed_at = answers[-1].steps[0].at if answers and answers[-1].steps else None
    by_category = {
        category: seconds
        for category, seconds in seconds_by_category(
            i for i in line.intervals if i.incident_id == incident.incident_id
        ).items()
        if seconds > 0
    }
    return IncidentReport(
        incident_id=incident.incident_id,
        cause=incident.cause,
        outcome=incident.outcome,
        began_at=began_at,
        began_is_estimate=estimated,
        detected_s=_since(began_at, incident.opened_at),
        decided_s=_since(began_at, decided_at),
        resumed_s=_since(began_at, resumed_at),
        decisions=tuple(d.kind for d in decisions),
        lost_steps=_lost_steps(incident, line.executed, answered=bool(answers)),
        seconds_by_category=by_category,
        badput_s=fsum(by_category.values()),
    )


def _since(began_at: float | None, moment: float | None) -> float | None:
    """Seconds from the fault on, not negative: the clocks of two hosts may differ by more than a detection takes."""
    return None if began_at is None or moment is None else max(0.0, moment - began_at)


def _began_at(history: History, executed: Sequence[Executed], incident: Incident) -> tuple[float | None, bool]:
    """When the fault happened: the injector's stamp that no earlier incident answers, else the newest step before the
    incident was opened. The second value says that it is an estimate."""
    earlier = [i.opened_at for i in history.incidents if i.opened_at < incident.opened_at]
    since = max(earlier, default=history.start)
    stamps = [f for f in history.faults if since <= f <= incident.opened_at]
    if stamps:
        return stamps[-1], False
    completed = [e.completed for e in executed if e.completed <= incident.opened_at]
    return (max(completed), True) if completed else (None, True)


def _lost_steps(incident: Incident, executed: Iterable[Executed], *, answered: bool) -> int | None:
    """As the controller counted; else the steps that were done again because of it; None while nothing answered it."""
    if incident.lost_steps is not None:
        return incident.lost_steps
    if not answered:
        return None
    return sum(e.n_steps for e in executed if e.incident_id == incident.incident_id)


def _steps(executed: Sequence[Executed], step_s: float | None) -> Steps:
    return Steps(
        kept=sum(e.n_steps for e in executed if e.kept),
        recomputed=sum(e.n_steps for e in executed if not e.kept),
        newest=max((e.step for e in executed), default=-1),
        median_s=step_s,
    )


def _notes(history: History, line: Timeline) -> tuple[str, ...]:
    notes = []
    if not history.submitted:
        notes.append("The log does not say when the job was submitted: its time is counted from the first event.")
    if not history.outcome:
        notes.append("The log does not say that the job ended: its time is counted up to now, or to the last event.")
    if not line.executed:
        notes.append("The log has no completed step: what the job did while it ran is unknown.")
    elif line.step_s is None:
        notes.append("The log has no two steps in a row: the first step counts as useful as a whole.")
    gaps = sum(e.n_steps - 1 for e in line.executed)
    if gaps:
        notes.append(f"{gaps} steps are missing from the log: their time is that between the steps beside them.")
    return tuple(notes)
