"""The times and the cost of every incident, and how long the parts of repairs took. Pure."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from math import fsum

import msgspec

from flyball.contracts.decisions import DecisionKind
from goodput.account.categories import Category
from goodput.account.intervals import Timeline
from goodput.account.losses import Price, failure_class
from goodput.account.measures import Quantiles, quantiles
from goodput.account.stages import FaultStamps
from goodput.account.sweep import Interval
from goodput.history.facts import History, LoggedDecision, LoggedGeneration, LoggedIncident

# Decisions that only find out what to do.
_NO_ANSWER = frozenset({DecisionKind.HOLD, DecisionKind.TAKE_STACKS, DecisionKind.CHECK_HOSTS})


class IncidentReport(msgspec.Struct, frozen=True):
    """One incident and its cost. `*_s` times are seconds since `began_at`."""

    incident_id: str
    cause: str
    outcome: str  # resolved, escalated; '' while it is open
    began_at: float | None  # wall clock of the fault
    began_is_estimate: bool  # not known: the newest step completed before the incident is used
    detected_s: float | None  # incident opened
    decided_s: float | None  # first decision other than hold
    resumed_s: float | None  # first step of the last generation that answers it
    decisions: tuple[str, ...]  # kinds, in order
    lost_steps: int | None
    seconds_by_category: Mapping[str, float]
    badput_s: float
    opened_at: float = 0.0  # wall clock
    host_id: str = ""  # '' if the log does not say, or it is not a single host's
    failure_class: str = "unknown"
    answered: bool = False  # a generation was started because of it
    interrupted: bool = False  # a new generation, or the job's end, followed it
    gpu_hours: float | None = None
    cost: float | None = None


# The parts of a repair, with the categories whose time they sum.
_PARTS = {
    "wait_for_hosts": (Category.IDLE_NO_HOSTS,),
    "stop": (Category.STOP,),
    "restart": (Category.RESTART,),
    "restore": (Category.RESTORE,),
    "warm_up": (Category.WARM_UP,),
}


def incident_reports(history: History, line: Timeline, price: Price) -> tuple[IncidentReport, ...]:
    """Incidents opened within the timeline, or costing part of its time."""
    decisions: defaultdict[str, list[LoggedDecision]] = defaultdict(list)
    answers: defaultdict[str, list[LoggedGeneration]] = defaultdict(list)
    spent: defaultdict[str, list[Interval]] = defaultdict(list)
    recomputed: defaultdict[str, int] = defaultdict(int)
    for decision in history.decisions:
        decisions[decision.incident_id].append(decision)
    for generation in history.generations:
        answers[generation.incident_id].append(generation)
    for interval in line.intervals:
        spent[interval.incident_id].append(interval)
    for step in line.executed:
        recomputed[step.incident_id] += step.n_steps
    fault_times = _FaultTimes(history, line)
    found = []
    for incident in history.incidents:
        incident_id = incident.incident_id
        if incident_id in spent or line.start <= incident.opened_at <= line.end:
            found.append(
                _report(
                    incident,
                    began=fault_times.fault_time(incident),
                    decisions=decisions.get(incident_id, ()),
                    answers=answers.get(incident_id, ()),
                    spent=seconds_by_category(spent.get(incident_id, ())),
                    recomputed=recomputed.get(incident_id, 0),
                    price=price,
                )
            )
    return tuple(found)


def repair_parts(incidents: Iterable[IncidentReport]) -> Mapping[str, Quantiles]:
    """Durations of the parts of repairs, over incidents after which training resumed: detect (fault to incident),
    decide (to the decision), the later stages, and the total (fault to first step)."""
    repaired = [i for i in incidents if i.answered and i.resumed_s is not None]
    parts = {
        "detect": quantiles(i.detected_s for i in repaired),
        "decide": quantiles(
            max(0.0, i.decided_s - i.detected_s) if i.decided_s is not None and i.detected_s is not None else None
            for i in repaired
        ),
    }
    for name, categories in _PARTS.items():
        parts[name] = quantiles(fsum(i.seconds_by_category.get(c, 0.0) for c in categories) for i in repaired)
    return parts | {"total": quantiles(i.resumed_s for i in repaired)}


def seconds_by_category(intervals: Iterable[Interval]) -> dict[str, float]:
    """Seconds of every category, including those that do not occur."""
    pieces: dict[str, list[float]] = {category: [] for category in Category}
    for interval in intervals:
        pieces[interval.category].append(interval.seconds)
    return {str(category): fsum(seconds) for category, seconds in pieces.items()}


def _report(
    incident: LoggedIncident,
    *,
    began: tuple[float | None, bool],
    decisions: Sequence[LoggedDecision],
    answers: Sequence[LoggedGeneration],
    spent: Mapping[str, float],
    recomputed: int,
    price: Price,
) -> IncidentReport:
    began_at, estimated = began
    decided_at = next((d.at for d in decisions if d.kind not in _NO_ANSWER), None)
    resumed_at = answers[-1].steps[0].at if answers and answers[-1].steps else None
    lost_steps = incident.lost_steps  # as the controller counted, else the recomputed ones
    if lost_steps is None and answers:
        lost_steps = recomputed
    by_category = {category: seconds for category, seconds in spent.items() if seconds > 0}
    badput_s = fsum(by_category.values())
    return IncidentReport(
        incident_id=incident.incident_id,
        cause=incident.cause,
        outcome=incident.outcome,
        began_at=began_at,
        began_is_estimate=estimated,
        detected_s=None if incident.inferred else _since(began_at, incident.opened_at),
        decided_s=_since(began_at, decided_at),
        resumed_s=_since(began_at, resumed_at),
        decisions=tuple(d.kind for d in decisions),
        lost_steps=lost_steps,
        seconds_by_category=by_category,
        badput_s=badput_s,
        opened_at=incident.opened_at,
        host_id=incident.host_id,
        failure_class=failure_class(incident),
        answered=bool(answers),
        interrupted=bool(answers) or any(d.kind == DecisionKind.FAIL_JOB for d in decisions),
        gpu_hours=price.gpu_hours(badput_s),
        cost=price.cost(badput_s),
    )


def _since(began_at: float | None, moment: float | None) -> float | None:
    """Seconds since the fault, not negative: the clocks of two hosts may differ by more than a detection takes."""
    return None if began_at is None or moment is None else max(0.0, moment - began_at)


class _FaultTimes:
    """Finds when faults happened."""

    def __init__(self, history: History, line: Timeline) -> None:
        self._completed = sorted(step.completed for step in line.executed)
        self._stamps = FaultStamps(history, self._completed)

    def fault_time(self, incident: LoggedIncident) -> tuple[float | None, bool]:
        """What is known of it, else the newest step before the incident opened, and whether the time is such an
        estimate."""
        known = self._stamps.stamp_of(incident)
        if known is not None:
            return known, False
        # An inferred incident may be opened by the very step that followed it.
        before = bisect_left if incident.inferred else bisect_right
        newest = before(self._completed, incident.opened_at) - 1
        return (self._completed[newest] if newest >= 0 else None), True
