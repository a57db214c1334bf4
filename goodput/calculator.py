"""Calculates a report from an event log: goodput, ETTR, losses by category, cause, host and failure class, and every
incident with its cost.

Pure: `calculate(events)` reads no clock and no file. docs/reference/goodput/measures.md gives every formula and its
source.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import fsum
from statistics import fmean

import msgspec

from flyball.contracts.events import Event
from goodput.account.categories import PRODUCTIVE, RUNNING, Category
from goodput.account.incident_costs import IncidentReport, incident_reports, repair_parts, seconds_by_category
from goodput.account.intervals import Timeline, timeline
from goodput.account.losses import Loss, Price, losses, summed
from goodput.account.measures import (
    Productivity,
    Quantiles,
    RollingPoint,
    StepQuantiles,
    WindowedEttr,
    productivity,
    program_goodput,
    ratio,
    rolling,
    step_quantiles,
)
from goodput.account.options import AccountOptions
from goodput.account.steps import Executed
from goodput.history.facts import History
from goodput.history.job_history import build
from goodput.history.rank_clocks import RankClock
from goodput.predict.recommendation import Recommendation, recommendation_for
from goodput.wording import counted

SCHEMA = "flyball.goodput.v1"
_NAMED = 5  # ranks listed in a note

__all__ = [
    "SCHEMA",
    "Analysis",
    "IncidentReport",
    "Loss",
    "AccountOptions",
    "GoodputReport",
    "Steps",
    "analyse",
    "analysis_of",
    "calculate",
]


class Steps(msgspec.Struct, frozen=True):
    """Steps of the world: completed by every rank."""

    kept: int
    recomputed: int  # repeated by a later generation
    newest: int  # -1 before the first
    median_s: float | None  # None before two consecutive steps


class GoodputReport(msgspec.Struct, frozen=True):
    """The measures of one job over [started_at, ended_at]; ratios are None when no time has passed.

    elapsed_s = ended_at - started_at - not_running_s

    goodput = useful / elapsed
    ettr    = (useful + evaluation + checkpoint_blocked + data_wait + straggler) / elapsed
    mttr_s  = mean over incidents of (first step after it - its fault)
    mttf_s  = time in which the workers ran / number of interruptions
    mtbi_s  = time since the job was first scheduled / number of interruptions
    sum(seconds_by_category) = elapsed_s = useful + sum(badput_s) = useful + sum of the losses' seconds
    gpu_hours = gpus x elapsed_s / 3600, likewise for every part of the time; cost = gpu_hours x the price
    """

    schema: str
    job: str
    outcome: str  # of the job; '' while it runs
    started_at: float
    ended_at: float
    elapsed_s: float
    goodput: float | None
    ettr: float | None
    seconds_by_category: Mapping[str, float]  # every category, including those of 0.0
    badput_s: Mapping[str, float]  # by cause, largest first
    incidents: tuple[IncidentReport, ...]
    interruptions: int  # incidents followed by a new generation or the end of the job
    mttr_s: float | None
    mttf_s: float | None
    steps: Steps
    notes: tuple[str, ...]  # assumptions and missing data
    step_s: float | None = None  # the median step
    gpus: int | None = None
    gpu_hours: float | None = None
    gpu_hours_by_category: Mapping[str, float] = {}  # empty if the log has no ranks
    cost: float | None = None  # None without a price
    losses: tuple[Loss, ...] = ()
    badput_by_host: Mapping[str, float] = {}  # of incidents and waits due to one host, or `unknown`
    badput_by_failure_class: Mapping[str, float] = {}  # of incidents
    mtbi_s: float | None = None
    mttd_s: float | None = None  # mean over incidents of (incident opened - its fault)
    repair: Mapping[str, Quantiles] = {}
    lost_steps: StepQuantiles | None = None  # per interruption
    rolling: tuple[RollingPoint, ...] = ()
    ettr_window: WindowedEttr | None = None
    mfu: float | None = None  # while the job trained
    productivity: Productivity | None = None
    recommendation: Recommendation | None = None
    not_running_s: float = 0.0  # the job had ended, and was submitted again: in no category, and not in elapsed_s


class Analysis(msgspec.Struct, frozen=True):
    """The report, and the data it was calculated from."""

    report: GoodputReport
    timeline: Timeline
    history: History


def calculate(
    events: Iterable[Event], *, now: float | None = None, job: str | None = None, options: AccountOptions | None = None
) -> GoodputReport:
    """The report on one job's events, which may be unordered, repeated and incomplete.

    `now` (wall clock) ends the time of a running job; without it the last event does. `job` chooses one of several.
    Iterates over `events` once. Raises NotFound if the log has no such job, UsageError if it has several and none was
    chosen.
    """
    return analyse(events, now=now, job=job, options=options).report


def analyse(
    events: Iterable[Event], *, now: float | None = None, job: str | None = None, options: AccountOptions | None = None
) -> Analysis:
    """Like `calculate`, with the timeline and history behind the report."""
    return analysis_of(build(events, job=job, now=now), options)


def analysis_of(history: History, options: AccountOptions | None = None) -> Analysis:
    """Analyse a history again, for another part of its time or at another price."""
    options = options or AccountOptions()
    line = timeline(history, from_at=options.from_at, to_at=options.to_at)
    return Analysis(report=_report(history, line, options), timeline=line, history=history)


def _report(history: History, line: Timeline, options: AccountOptions) -> GoodputReport:
    elapsed_s = line.end - line.start - line.not_running_s
    gpus = history.world_size if options.gpus is None else options.gpus
    price = Price(gpus=gpus, gpu_hour_price=options.gpu_hour_price)
    seconds = seconds_by_category(line.intervals)
    running_s = fsum(seconds[c] for c in RUNNING)
    executed = _executed_in(line)
    steps = _steps(executed, line.step_s)
    incidents = incident_reports(history, line, price)
    in_time = [i for i in incidents if line.start <= i.opened_at <= line.end]
    interrupting = [i for i in in_time if i.interrupted]
    interruptions = len(interrupting)
    repairs = [i.resumed_s for i in in_time if i.resumed_s is not None and i.answered]
    detections = [i.detected_s for i in in_time if i.detected_s is not None]
    rows = losses(line.intervals, history.incidents, price)
    points, ettr_window = rolling(line.intervals, options.window_s)
    mfu, program = program_goodput(
        kept_steps=steps.kept,
        useful_s=seconds[Category.USEFUL],
        gpus=gpus,
        model_flops_per_step=options.model_flops_per_step,
        peak_flops_per_gpu=options.peak_flops_per_gpu,
        reference_step_s=options.reference_step_s,
    )
    lost_steps = step_quantiles(i.lost_steps for i in interrupting)
    mttr_s = fmean(repairs) if repairs else None
    return GoodputReport(
        schema=SCHEMA,
        job=history.job,
        outcome=history.outcome,
        started_at=line.start,
        ended_at=line.end,
        elapsed_s=elapsed_s,
        goodput=ratio(seconds[Category.USEFUL], elapsed_s),
        ettr=ratio(fsum(seconds[c] for c in PRODUCTIVE), elapsed_s),
        seconds_by_category=seconds,
        badput_s=summed(rows, lambda row: row.cause),
        incidents=incidents,
        interruptions=interruptions,
        mttr_s=mttr_s,
        mttf_s=ratio(running_s, interruptions * 1.0) if interruptions else None,
        steps=steps,
        notes=_notes(history, line, executed, options),
        step_s=line.step_s,
        gpus=gpus,
        gpu_hours=price.gpu_hours(elapsed_s),
        gpu_hours_by_category={c: h for c, s in seconds.items() if (h := price.gpu_hours(s)) is not None},
        cost=price.cost(elapsed_s),
        losses=rows,
        badput_by_host=summed(rows, lambda row: row.host_id),
        badput_by_failure_class=summed(rows, lambda row: row.failure_class),
        mtbi_s=(elapsed_s - seconds[Category.SCHEDULING]) / interruptions if interruptions else None,
        mttd_s=fmean(detections) if detections else None,
        repair=repair_parts(in_time),
        lost_steps=lost_steps,
        rolling=points,
        ettr_window=ettr_window,
        mfu=mfu,
        productivity=productivity(seconds, elapsed_s, program),
        not_running_s=line.not_running_s,
        recommendation=recommendation_for(
            history,
            executed,
            step_s=line.step_s,
            blocked_s=_blocked_by_itself_s(rows),
            interruptions=interruptions,
            running_s=running_s,
            repair_s=mttr_s,
            lost_steps=lost_steps.mean,
        ),
    )


def _blocked_by_itself_s(rows: Iterable[Loss]) -> float:
    """Time blocked in the program's own saves, without those that an incident caused."""
    return fsum(row.seconds for row in rows if row.category == Category.CHECKPOINT_BLOCKED and not row.incident_id)


def _executed_in(line: Timeline) -> Sequence[Executed]:
    """Steps completed within the timeline."""
    return [step for step in line.executed if line.start <= step.completed <= line.end]


def _steps(executed: Sequence[Executed], step_s: float | None) -> Steps:
    return Steps(
        kept=sum(e.n_steps for e in executed if e.kept),
        recomputed=sum(e.n_steps for e in executed if not e.kept),
        newest=max((e.step for e in executed), default=-1),
        median_s=step_s,
    )


def _notes(history: History, line: Timeline, executed: Sequence[Executed], options: AccountOptions) -> tuple[str, ...]:
    notes = []
    if not history.submitted:
        notes.append("The log does not say when the job was submitted: its time counts from the first event.")
    if not history.outcome and not history.logs_some_steps:  # a simulation ends before its job
        notes.append("The job runs, or its end is not in the log: its time counts up to now, or to the last event.")
    if not line.executed:
        notes.append("The log has no completed step: the job's running time is unknown.")
    elif line.step_s is None:
        notes.append("The log has no two consecutive steps: all of the first step counts as useful.")
    gaps = sum(e.n_steps - 1 for e in executed if e.settled is None)
    if gaps and not history.logs_some_steps:
        notes.append(f"{gaps} steps are missing from the log: their time is that between the steps around them.")
    lost_logs = {lost for generation in history.generations for lost in generation.lost_logs}
    if lost_logs:
        named = ", ".join(str(lost) for lost in sorted(lost_logs)[:_NAMED])
        more = f" and {len(lost_logs) - _NAMED} more" if len(lost_logs) > _NAMED else ""
        notes.append(f"The logs of rank {named}{more} end long before the others': after that only the others count.")
    notes += _epoch_notes(history)
    notes += _clock_notes(clock for generation in history.generations for clock in generation.clocks)
    if any(g.capacity < 1.0 and g.capacity_is_guess for g in history.generations):
        notes.append("The log does not say the job's full size: the largest size that it ran at is assumed.")
    if any(g.capacity > 1.0 for g in history.generations):
        notes.append(f"The job grew beyond its full size of {history.world_size} ranks: those beyond it do not count.")
    if history.absurd_times:
        notes.append("Events with impossible times (before 1970, or after the year 5138) were left out.")
    if history.unset_clocks:
        notes.append("Events of about 1970, from a clock that was never set, were left out.")
    if (line.start, line.end) != (history.start, history.end):
        notes.append("The report covers part of the job's time: its measures count only that part.")
    if options.gpu_hour_price is not None and options.gpus is None:
        ranks = history.world_size
        notes.append(
            f"One GPU for each of the {ranks} ranks was assumed." if ranks else "The log has no ranks: no cost."
        )
    return tuple(notes)


def _epoch_notes(history: History) -> list[str]:
    starts_over = sum(generation.epochs - 1 for generation in history.generations)
    if not starts_over:
        return []
    return [
        f"Step numbers start over {counted(starts_over, 'time')} without a new generation: this is taken for"
        " epochs, and the steps are numbered through."
    ]


def _clock_notes(clocks: Iterable[RankClock]) -> list[str]:
    """A note on the host whose clock was furthest off."""
    off_s: dict[str, tuple[float, float]] = {}
    for clock in clocks:
        who = clock.host_id or f"rank {clock.rank}"
        least_s, most_s = off_s.get(who, (clock.least_s, clock.most_s))
        off_s[who] = min(least_s, clock.least_s), max(most_s, clock.most_s)
    if not off_s:
        return []
    who = max(sorted(off_s), key=lambda name: max(map(abs, off_s[name])))
    least_s, most_s = off_s[who]
    more = f", as were those of {len(off_s) - 1} more" if len(off_s) > 1 else ""
    return [
        f"The clock of {who} was off by {least_s:+.3f} to {most_s:+.3f} s: its times were corrected by"
        f" the steps that all ranks completed together{more}."
    ]
