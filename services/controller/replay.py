"""Runs stored rounds through the policy again. Pure.

Each round is stored with its inputs: the view, the signals, the settings and the time. A replay takes from the view
what was observed and reported. What the policy itself had derived (open incidents, records of failures, numbers of
decisions) comes from the replay's own run, so a difference shows in everything that follows from it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum

import msgspec

from flyball.contracts.cluster import PolicyValue
from flyball.contracts.decisions import Decision, Incident
from flyball.contracts.reports.signals import Signal
from services.controller.policy import decide
from services.controller.round.job_policy import settings_of
from services.controller.round.view import Outcome, PastFailure, PolicySettings, View

LARGE_PARTS = 20_000  # hosts, ranks and copies; a larger view takes longer to write than a decision may wait


class RoundInputs(msgspec.Struct, frozen=True):
    """The inputs of a round, except its signals and its time."""

    view: View
    settings: PolicySettings

    @property
    def is_large(self) -> bool:
        """Whether to store it after the decision is announced, not before."""
        ranks = sum(len(job.generation.ranks) for job in self.view.jobs if job.generation is not None)
        return len(self.view.hosts) + ranks + len(self.view.copies) > LARGE_PARTS


class StoredRound(msgspec.Struct, frozen=True):
    number: int
    at: float
    epoch: int
    version: str  # of the release that decided
    signals: tuple[Signal, ...]
    inputs: RoundInputs


class Replay:
    """One run over the rounds, oldest first. It takes the first round's incidents as they are."""

    def __init__(self) -> None:
        self.incidents: dict[str, Incident] = {}  # known to this run, open and closed
        self.missing: list[tuple[int, int]] = []  # first and last number of decisions whose rounds are not stored
        self.differences: list[str] = []
        self._failures: dict[str, tuple[PastFailure, ...]] = {}
        self._next_incident = 0  # 0: nothing was replayed yet
        self._next_decision = 0

    def run(self, stored: StoredRound) -> Outcome:
        """Decide a stored round again."""
        view = stored.inputs.view
        if self._next_decision != view.next_decision or self._next_incident != view.next_incident:
            self._resume(view)
        else:
            self._compare(stored)
            view = self._own(view)
        outcome = decide(view, stored.signals, stored.inputs.settings, stored.at)
        self._take(view, outcome)
        return outcome

    def _resume(self, view: View) -> None:
        """Start, or continue after rounds that are not stored, or after a difference in the numbers of decisions."""
        if self._next_decision and view.next_decision > self._next_decision:
            self.missing.append((self._next_decision, view.next_decision - 1))
        elif self._next_decision and view.next_decision < self._next_decision:
            self.differences.append(f"dec-{view.next_decision} is decided here, and was not before")
        self._next_decision, self._next_incident = view.next_decision, view.next_incident
        self.incidents |= {incident.incident_id: incident for incident in view.incidents}
        self._failures = {job.spec.job: job.failures for job in view.jobs}

    def _own(self, view: View) -> View:
        """The view with this run's incidents and records in place of the stored ones."""
        open_now = tuple(incident for incident in self.incidents.values() if not incident.state.closed)
        jobs = tuple(
            msgspec.structs.replace(job, failures=self._failures.get(job.spec.job, job.failures)) for job in view.jobs
        )
        return msgspec.structs.replace(view, incidents=open_now, jobs=jobs)

    def _compare(self, stored: StoredRound) -> None:
        """Note where the stored incidents and records differ from this run's."""
        view = stored.inputs.view
        then = {incident.incident_id: incident for incident in view.incidents}
        now = {name: incident for name, incident in self.incidents.items() if not incident.state.closed}
        for name in sorted(then.keys() | now.keys()):
            if name not in now or name not in then:
                where = "open here, and was closed" if name in now else "closed here, and was open"
                self.differences.append(f"before round {stored.number} {name} is {where}")
            else:
                self.differences += differences(f"{name} before round {stored.number}", then[name], now[name])
        for job in view.jobs:
            known = self._failures.setdefault(job.spec.job, job.failures)
            if known != job.failures:
                self.differences.append(f"before round {stored.number} job {job.spec.job} has another record")

    def _take(self, view: View, outcome: Outcome) -> None:
        for incident in outcome.incidents:
            self._next_incident += incident.incident_id not in self.incidents
            self.incidents[incident.incident_id] = incident
        self._next_decision += len(outcome.decisions)
        if outcome.adoption is not None:
            self._next_decision = max(self._next_decision, outcome.adoption.decision_floor + 1)
        known = {job.spec.job: job.failures for job in view.jobs}
        for change in outcome.jobs:
            if change.failure is not None:
                known[change.job] = (*known.get(change.job, ()), change.failure)
        self._failures |= known


class OtherDecision(msgspec.Struct, frozen=True):
    """A situation, what was decided then, and what another policy decides there; None: nothing."""

    round: int
    at: float
    job: str
    incident_id: str
    then: Decision | None
    now: Decision | None

    @property
    def is_same(self) -> bool:
        then, now = self.then, self.now
        return then is not None and now is not None and (then.kind, then.rule) == (now.kind, now.rule)


def decide_otherwise(
    stored: StoredRound, given: Mapping[str, PolicyValue], then: Sequence[Decision]
) -> list[OtherDecision]:
    """Decide a stored round by another policy: with these settings, over the cluster's and the jobs' own.

    Each round is decided in the situation that there was, so that a difference does not carry on into later rounds:
    what would have happened after another decision is not known. `then`: what the round decided.
    """
    view = stored.inputs.view
    jobs = tuple(
        msgspec.structs.replace(job, spec=msgspec.structs.replace(job.spec, policy={**job.spec.policy, **given}))
        for job in view.jobs
    )
    settings = settings_of(stored.inputs.settings, given)
    now = decide(msgspec.structs.replace(view, jobs=jobs), stored.signals, settings, stored.at).decisions
    before, after = _by_subject(then), _by_subject(now)
    return [
        OtherDecision(stored.number, stored.at, key[0], key[1], before.get(key), after.get(key))
        for key in dict.fromkeys((*before, *after))
    ]


def _by_subject(decisions: Iterable[Decision]) -> dict[tuple[str, str, str, int], Decision]:
    """Decisions by job, incident and host: two policies may decide about the same ones in another order."""
    found: dict[tuple[str, str, str, int], Decision] = {}
    for decision in decisions:
        subject = (
            decision.job,
            decision.incident_id,
            str(decision.evidence.get("host", "")) if not decision.job else "",
        )
        found[*subject, sum(key[:3] == subject for key in found)] = decision
    return found


def differences(name: str, then: Incident | Decision, now: Incident | Decision) -> list[str]:
    """The differences in words, field by field."""
    return [
        f"{name}: {field} was {_shown(getattr(then, field))}, and is {_shown(getattr(now, field))} here"
        for field in then.__struct_fields__
        if getattr(then, field) != getattr(now, field)
    ]


def _shown(value: object) -> str:
    return value.value if isinstance(value, StrEnum) else repr(value)


def compared(then: Iterable[Decision], now: Iterable[Decision]) -> tuple[int, list[str]]:
    """Returns how many decisions are identical, and how the others differ. Both must be in order, over one range."""
    before = {decision.decision_id: decision for decision in then}
    after = {decision.decision_id: decision for decision in now}
    same, found = 0, []
    for name in (*before, *(name for name in after if name not in before)):
        if name not in after:
            found.append(f"{name} ({before[name].kind.value}, {before[name].rule}) is not decided here")
            continue
        if name not in before:
            found.append(f"{name} ({after[name].kind.value}, {after[name].rule}) is decided here, and was not before")
            continue
        old, new = before[name], after[name]
        if not old.alternatives:  # an older release stored none
            new = msgspec.structs.replace(new, alternatives=())
        if old == new:
            same += 1
        else:
            found += differences(name, old, new)
    return same, found
