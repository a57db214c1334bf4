"""What became of a fault, from the incidents that followed it. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Any, TypeAlias

import msgspec

from flyball.contracts.decisions import IncidentState
from simulator.inject.campaign.mixes import MixedFault

EARLY_S = 1.0  # clocks of hosts may differ by so much
Incident: TypeAlias = Mapping[str, Any]  # as the API shows it


class FaultVerdict(StrEnum):
    RECOVERED = "recovered"  # noticed, and the job trains again
    TRAINED_ON = "trained on"  # nothing had to be done, and the job trains
    MISSED = "missed"  # an incident had to follow, and none did
    WRONG = "handled wrong"
    NOT_INJECTED = "not injected"

    @property
    def is_failure(self) -> bool:
        return self in (FaultVerdict.MISSED, FaultVerdict.WRONG)


class FaultOutcome(msgspec.Struct, frozen=True):
    """One fault of a campaign. Seconds count from the fault; -1: it did not happen."""

    number: int
    fault: str
    stands_for: str
    target: str
    at: float  # wall clock
    verdict: FaultVerdict
    why: str  # of the verdict, if it is not plain
    detected_as: str  # cause of the incident
    signal: str
    detected_s: float
    decisions: tuple[str, ...]
    recovered_s: float
    lost_steps: int
    incident_ids: tuple[str, ...]
    beside: tuple[int, ...] = ()  # numbers of the faults that struck while it had no verdict


def judge(
    *,
    number: int,
    fault: str,
    stands_for: str = "",
    target: str,
    at: float,
    host_id: str,
    causes: Sequence[str],
    incidents: Sequence[Incident],
    trains: bool,
    job_state: str,
    beside: Sequence[int] = (),
    causes_beside: Sequence[str] = (),
) -> FaultOutcome:
    """`causes`: as one of which the fault has to be recognised; (): it may pass unnoticed. `incidents`: of the job;
    those that do not follow the fault count for nothing. `trains`: the job has made steps since they were closed.
    `beside`: the numbers of faults that struck while it had no verdict, `causes_beside` their causes. One restart may
    heal several faults: then the incident of another is this one's, too."""
    incidents = incidents_after(incidents, at)
    if not causes and beside:  # it is blamed for nothing that another fault explains
        places = ("", host_id) if host_id else {i["host_id"] for i in incidents}
        incidents = [i for i in incidents if not causes_of(i) & set(causes_beside) and i["host_id"] in places]
    expected = _expected(incidents, causes, causes_beside, host_id if beside else "")
    first = next(iter(expected or incidents), None)
    closed = all(IncidentState(i["state"]).closed for i in incidents)
    why = ""
    if first is None:
        verdict = FaultVerdict.MISSED if causes else FaultVerdict.TRAINED_ON if trains else FaultVerdict.WRONG
        why = "" if verdict is not FaultVerdict.WRONG else "the job made no more steps, and there is no incident"
        if verdict is FaultVerdict.MISSED and trains:
            why = "the job trains on, and nothing was noticed"
    elif escalated := [i for i in incidents if i["state"] == IncidentState.ESCALATED.value]:
        verdict, why = FaultVerdict.WRONG, f"{escalated[0]['incident_id']} was given up: {escalated[0]['message']}"
    elif not closed:
        verdict, why = FaultVerdict.WRONG, f"an incident is still open: {first['holding_for'] or first['message']}"
    elif not trains:
        verdict, why = FaultVerdict.WRONG, f"the job made no more steps ({job_state})"
    elif causes and not expected:
        verdict, why = FaultVerdict.WRONG, f"taken for {first['cause']}"
    elif host_id and not beside and first["host_id"] not in ("", host_id):
        verdict, why = FaultVerdict.WRONG, f"{first['host_id']} was blamed for it"
    else:
        verdict = FaultVerdict.RECOVERED
    others = sorted({i["cause"] for i in incidents if i is not first})
    if others and not why:
        why = f"also {', '.join(others)}"
    if beside:
        why = "; ".join(filter(None, (why, f"at the same time as {', '.join(map(str, sorted(set(beside))))}")))
    resolved = [float(i["resolved_at"]) for i in incidents if i["resolved_at"]]
    return FaultOutcome(
        number=number,
        fault=fault,
        stands_for=stands_for,
        target=target,
        at=at,
        verdict=verdict,
        why=why,
        detected_as=first["cause"] if first else "",
        signal=first["signal"] if first else "",
        detected_s=_since(at, (first["observed_at"] or first["opened_at"]) if first else None),
        decisions=tuple(dict.fromkeys(kind for i in incidents for kind in i["decisions"])),
        recovered_s=_since(at, max(resolved, default=None)) if closed else -1.0,
        lost_steps=sum(max(0, i["lost_steps"]) for i in incidents),
        incident_ids=tuple(i["incident_id"] for i in incidents),
        beside=tuple(sorted(set(beside))),
    )


def incidents_after(incidents: Iterable[Incident], at: float) -> list[Incident]:
    """Those that may be about a fault at `at`: they opened after it, or a restart of theirs was decided or completed
    after it, which may have healed it, too. That one was merely resolved after it says nothing of it."""

    def follows(incident: Incident) -> bool:
        return float(incident["opened_at"]) >= at - EARLY_S or any(
            float(moment["at"]) > at and moment["state"] != IncidentState.RESOLVED.value
            for moment in incident.get("timeline", ())
        )

    return [i for i in incidents if follows(i)]


def took_up(incident: Incident, at: float, causes: Sequence[str]) -> bool:
    """Whether an incident that was held against another fault became one of these causes after `at`."""
    return any(
        float(moment["at"]) > at and moment["cause"] in causes and moment["state"] != IncidentState.RESOLVED.value
        for moment in incident.get("timeline", ())
    )


def causes_of(incident: Incident) -> set[str]:
    """All that it was taken for: what goes wrong in its restart becomes its cause."""
    return {str(incident["cause"]), *(str(moment["cause"]) for moment in incident.get("timeline", ()))}


def _expected(
    incidents: Sequence[Incident], causes: Sequence[str], causes_beside: Sequence[str], host_id: str
) -> list[Incident]:
    """Those that recognise the fault: by its own causes, else by those of faults beside it; its host's, if any."""
    expected = [i for i in incidents if causes_of(i) & set(causes)]
    if causes and not expected:
        expected = [i for i in incidents if causes_of(i) & set(causes_beside)]
    if host_id:
        expected = [i for i in expected if i["host_id"] in ("", host_id)] or expected
    return expected


def not_injected(number: int, fault: MixedFault, at: float, why: str) -> FaultOutcome:
    """The outcome of a fault that could not be injected."""
    return FaultOutcome(
        number=number,
        fault=fault.fault,
        stands_for=fault.stands_for,
        target="",
        at=at,
        verdict=FaultVerdict.NOT_INJECTED,
        why=why,
        detected_as="",
        signal="",
        detected_s=-1.0,
        decisions=(),
        recovered_s=-1.0,
        lost_steps=0,
        incident_ids=(),
    )


def _since(at: float, moment: float | None) -> float:
    return -1.0 if moment is None else round(max(0.0, moment - at), 3)


class CampaignReport(msgspec.Struct, frozen=True):
    """A campaign and what it showed."""

    seed: int
    job: str
    mix: str
    rate_per_h: float
    duration_s: float
    began_at: float
    ended_at: float
    faults: tuple[FaultOutcome, ...]
    ended_early: str  # why it ended before its time; ''

    @property
    def failures(self) -> tuple[FaultOutcome, ...]:
        return tuple(f for f in self.faults if f.verdict.is_failure)

    def count(self, verdict: FaultVerdict) -> int:
        return sum(f.verdict is verdict for f in self.faults)

    def summary(self) -> dict[str, int]:
        """How many faults had which verdict, and the steps that all of them cost."""
        counts = {verdict.value: self.count(verdict) for verdict in FaultVerdict}
        return counts | {"steps lost": sum(f.lost_steps for f in self.faults)}
