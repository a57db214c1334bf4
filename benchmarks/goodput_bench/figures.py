"""Figures of the comparison: the goodput calculator's report of each run, and medians per side. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from math import fsum
from statistics import median

import msgspec

from flyball.contracts.events import EventKind
from goodput.calculator import AccountOptions, GoodputReport, IncidentReport, calculate
from goodput_bench.runs import Injection, Observed
from goodput_bench.sides import Side

NO_FAULT = "no fault"


class Spread(msgspec.Struct, frozen=True):
    """One figure over the repetitions."""

    median: float
    min: float
    max: float
    runs: tuple[float, ...]


class RunFigures(msgspec.Struct, frozen=True):
    """One repetition of one side. `seconds_by_category` sums to `elapsed_s`.

    `badput_s` (by the cause that the side reports) and `lost_s_by_fault` (by the injected fault before it) each sum to
    the time that was not useful.
    """

    side: Side
    repetition: int
    elapsed_s: float
    goodput: float
    ettr: float
    seconds_by_category: Mapping[str, float]
    badput_s: Mapping[str, float]
    lost_s_by_fault: Mapping[str, float]
    lost_steps: int
    steps_kept: int
    median_step_s: float | None
    mttr_s: float | None
    resumed_s_by_fault: Mapping[str, float]  # median over the faults of a kind: from the fault to the first step after
    start_s: float  # from the launch to the first step
    incidents: tuple[IncidentReport, ...]
    faults_met: int
    faults_missed: tuple[str, ...]
    saves_failed: int  # as reported by the ranks, each for itself
    load_average: float
    failure: str
    notes: tuple[str, ...]  # the calculator's


class SideFigures(msgspec.Struct, frozen=True):
    """Medians over the repetitions. `failures` lists runs that ended early; they still count."""

    goodput: Spread
    goodput_at_reference_step: Spread  # steps kept x reference step / elapsed: slower steps are a loss too
    ettr: Spread
    mttr_s: Spread | None
    lost_steps: Spread
    steps_kept: Spread
    step_s: Spread | None  # over the runs' medians
    faults_met: tuple[int, ...]  # per repetition
    seconds_by_category: Mapping[str, float]
    badput_s: Mapping[str, float]
    lost_s_by_fault: Mapping[str, float]
    resumed_s_by_fault: Mapping[str, float]
    failures: tuple[str, ...]


def run_figures(observed: Observed, repetition: int) -> RunFigures:
    """The figures of one run, from its launch to its planned end."""
    report = calculate(observed.events, now=observed.ended_at, options=AccountOptions(to_at=observed.ended_at))
    incidents = tuple(i for i in report.incidents if i.opened_at <= observed.ended_at)
    met = [injection for injection in observed.injections if injection.at is not None]
    return RunFigures(
        side=observed.side,
        repetition=repetition,
        elapsed_s=report.elapsed_s,
        goodput=report.goodput or 0.0,
        ettr=report.ettr or 0.0,
        seconds_by_category=report.seconds_by_category,
        badput_s=report.badput_s,
        lost_s_by_fault=_lost_s_by_fault(report, observed.injections),
        lost_steps=sum(incident.lost_steps or 0 for incident in incidents),
        steps_kept=report.steps.kept,
        median_step_s=report.steps.median_s,
        mttr_s=report.mttr_s,
        resumed_s_by_fault=_resumed_s_by_fault(incidents, observed.injections),
        start_s=observed.first_step_at - observed.launched_at,
        incidents=incidents,
        faults_met=len(met),
        faults_missed=tuple(
            f"{injection.fault.kind} at {injection.fault.at_s:g} s: {injection.missed}"
            for injection in observed.injections
            if injection.at is None
        ),
        saves_failed=sum(
            event.kind is EventKind.SIGNAL and event.data.get("kind") == "save_failed" and event.at <= observed.ended_at
            for event in observed.events
        ),
        load_average=observed.load_average,
        failure=observed.failure,
        notes=report.notes,
    )


def reference_step_s(runs: Sequence[RunFigures]) -> float | None:
    """The smaller of both sides' median step times. None if no run made two steps."""
    known = [found for side in Side if (found := _steps_s(runs, side))]
    return min((median(found) for found in known), default=None)


def side_figures(runs: Sequence[RunFigures], side: Side) -> SideFigures:
    """The figures of one side. `runs`: of both sides, since they share the reference step."""
    step_s = reference_step_s(runs)
    steps_s = _steps_s(runs, side)
    runs = [run for run in runs if run.side is side]
    repairs = [run.mttr_s for run in runs if run.mttr_s is not None]
    return SideFigures(
        goodput=_spread([run.goodput for run in runs]),
        goodput_at_reference_step=_spread([run.steps_kept * (step_s or 0.0) / run.elapsed_s for run in runs]),
        ettr=_spread([run.ettr for run in runs]),
        mttr_s=_spread(repairs) if repairs else None,
        lost_steps=_spread([run.lost_steps for run in runs]),
        steps_kept=_spread([run.steps_kept for run in runs]),
        step_s=_spread(steps_s) if steps_s else None,
        faults_met=tuple(run.faults_met for run in runs),
        seconds_by_category=_medians([run.seconds_by_category for run in runs]),
        badput_s=_medians([run.badput_s for run in runs]),
        lost_s_by_fault=_medians([run.lost_s_by_fault for run in runs]),
        resumed_s_by_fault=_medians_where_known([run.resumed_s_by_fault for run in runs]),
        failures=tuple(f"repetition {run.repetition}: {run.failure}" for run in runs if run.failure),
    )


def _lost_s_by_fault(report: GoodputReport, injections: Sequence[Injection]) -> dict[str, float]:
    """Lost seconds by kind of fault. The rest is start-up, saves, and short delays of steps."""
    lost: dict[str, float] = defaultdict(float)
    for incident in report.incidents:
        lost[_fault_of(incident, injections)] += incident.badput_s
    lost[NO_FAULT] += fsum(report.badput_s.values()) - fsum(i.badput_s for i in report.incidents)
    return dict(sorted(lost.items(), key=lambda item: -item[1]))


def _resumed_s_by_fault(incidents: Sequence[IncidentReport], injections: Sequence[Injection]) -> dict[str, float]:
    found: dict[str, list[float]] = defaultdict(list)
    for incident in incidents:
        if incident.resumed_s is not None:
            found[_fault_of(incident, injections)].append(incident.resumed_s)
    return {kind: median(seconds) for kind, seconds in sorted(found.items())}


def _fault_of(incident: IncidentReport, injections: Sequence[Injection]) -> str:
    """The kind of the last fault before the incident was opened."""
    kinds = [done.fault.kind for done in injections if done.at is not None and done.at <= incident.opened_at]
    return kinds[-1].value if kinds else NO_FAULT


def _steps_s(runs: Sequence[RunFigures], side: Side) -> list[float]:
    return [run.median_step_s for run in runs if run.side is side and run.median_step_s is not None]


def _spread(values: Sequence[float]) -> Spread:
    return Spread(median=median(values), min=min(values), max=max(values), runs=tuple(values))


def _medians(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The median per key, largest first. A row without the key counts as 0."""
    keys = {key for row in rows for key in row}
    found = {key: median(row.get(key, 0.0) for row in rows) for key in keys}
    return dict(sorted(found.items(), key=lambda item: (-item[1], item[0])))


def _medians_where_known(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The median per key over the rows that have it."""
    keys = sorted({key for row in rows for key in row})
    return {key: median(row[key] for row in rows if key in row) for key in keys}
