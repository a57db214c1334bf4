"""One round of the policy: the view with this round's changes, and the record of these changes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

import msgspec

from flyball.contracts.cluster import HostState, JobSpec, JobState
from flyball.contracts.decisions import ActionPlan, ActionState, Decision, DecisionKind, Incident, IncidentState
from services.controller.round import spare_choice
from services.controller.round.diagnosis import Failure
from services.controller.round.view import (
    ActionView,
    Adoption,
    HostChange,
    HostView,
    JobChange,
    JobView,
    Outcome,
    PastFailure,
    PolicySettings,
    View,
)
from services.controller.round.wording import listed
from services.rules.incident_states import HOST, INCIDENT, HostEvent, IncidentEvent

Evidence = Mapping[str, str | int | float | bool | None]

_BACK_TO_WORK = {HostState.CORDONED: HostEvent.RELEASED, HostState.IN_REPAIR: HostEvent.CLEANED}


class Verdict(msgspec.Struct, frozen=True):
    """What a rule decides. Without a plan it is a hold: it waits for `holding_for`, at most until `hold_until`."""

    kind: DecisionKind
    reason: str
    plan: ActionPlan | None = None
    evidence: Evidence = {}
    holding_for: str = ""
    hold_until: float = 0.0
    job_state: JobState | None = None  # the job's new state
    gives_up: bool = False  # the incident escalates
    cordons: tuple[str, ...] = ()  # hosts that get no work until an operator releases them
    is_patient: bool = False  # does not count against the incident's limit of decisions
    refuses_drain_of: str = ""  # a host whose drain is refused


class Case(msgspec.Struct, frozen=True):
    """The input of a rule: a job, and the incident to decide about, if any."""

    round: Round
    job: JobView
    incident: Incident | None = None

    @property
    def now(self) -> float:
        return self.round.now

    @property
    def settings(self) -> PolicySettings:
        return self.round.settings


class Round:
    """Rules read the values. They change them through the methods, which record the changes for the outcome."""

    def __init__(self, view: View, settings: PolicySettings, now: float) -> None:
        self.view = view
        self.settings = settings
        self.now = now
        self.hosts: dict[str, HostView] = {host.host_id: host for host in view.hosts}
        self.jobs: dict[str, JobView] = {job.spec.job: job for job in view.jobs}
        self.incidents: dict[str, Incident] = {incident.incident_id: incident for incident in view.incidents}
        self.actions: dict[str, ActionView] = {action.action_id: action for action in view.actions}
        self.reported: dict[str, list[Failure]] = {}  # job -> failures known only from signals of this round
        self.noticed: dict[str, float] = {}  # host -> time of its preemption notice, if new in this round
        self.diagnoses: dict[str, Failure] = {}  # job -> what is wrong with its current generation
        self.unadopted: set[str] = set()  # jobs about which hosts know more than the view
        self.adoption: Adoption | None = None
        self.kept_for: dict[str, str] = {}  # free host -> the first job in line that waits for more hosts
        self.spare_of: dict[str, str] = {}  # free host -> the running job whose spare it is
        self._next_incident = view.next_incident
        self._next_decision = view.next_decision
        self._taken: set[str] = set()
        self._decisions: list[Decision] = []
        self._superseded: list[str] = []
        self._changed_incidents: set[str] = set()
        self._host_changes: dict[str, HostChange] = {}
        self._job_changes: list[JobChange] = []
        self._wake_at = 0.0

    # --- reading -----------------------------------------------------------------------------------------------------

    def open_incidents(self, job: str) -> list[Incident]:
        """The job's open incidents, oldest first."""
        return [i for i in self.incidents.values() if i.job == job and not i.state.closed]

    def open_actions(self, job: str) -> Iterator[ActionView]:
        """The job's open actions, except those that only stop stray workers."""
        return (
            action
            for action in self.actions.values()
            if action.plan.job == job and not action.state.ended and action.plan.kind is not DecisionKind.CORDON
        )

    def free_hosts(self, spec: JobSpec) -> list[HostView]:
        """The hosts that may take ranks of the job now, best first."""
        busy = {
            host_id
            for action in self.actions.values()
            if not action.state.ended and action.plan.job != spec.job
            for host_id in (
                *action.plan.stop_hosts,
                *((h.host_id for h in action.plan.next.hosts) if action.plan.next else ()),
            )
        }
        return spare_choice.free_hosts(
            self.hosts.values(), spec, taken=self._taken | busy, now=self.now, fresh_s=self.settings.spare_fresh_s
        )

    def is_silent(self, host_id: str) -> bool:
        """Whether a host cannot receive commands; an unknown host cannot either."""
        host = self.hosts.get(host_id)
        return host is None or host.state in (HostState.SILENT, HostState.SUSPECT)

    # --- changing ----------------------------------------------------------------------------------------------------

    def wake(self, at: float) -> None:
        """Start the next round at `at` at the latest."""
        self._wake_at = at if self._wake_at == 0.0 else min(self._wake_at, at)

    def change_host(
        self,
        host_id: str,
        event: HostEvent | None,
        reason: str,
        *,
        preempt_deadline_at: float | None = None,
        ends_drain: bool = False,
    ) -> None:
        """Change a host's state by an event (None: only its other facts). `ends_drain`: its drain is over or
        refused."""
        host = self.hosts[host_id]
        state = host.state if event is None else HOST.advance(host.state, event)
        earlier = self._host_changes.get(host_id)
        if preempt_deadline_at is None and earlier is not None:
            preempt_deadline_at = earlier.preempt_deadline_at
        ended = host.drain if ends_drain else earlier.ended_drain if earlier is not None else None
        self._host_changes[host_id] = HostChange(host_id, state, reason, preempt_deadline_at, ended)
        changes: dict[str, Any] = {"state": state, "reason": reason}
        if ends_drain:
            changes["drain"] = None
        if state is not host.state:
            changes["since"] = self.now
        if preempt_deadline_at is not None:
            changes["preempt_deadline_at"] = preempt_deadline_at
        self.hosts[host_id] = msgspec.structs.replace(host, **changes)

    def change_job(self, job: str, state: JobState, message: str, failure: PastFailure | None = None) -> None:
        """Set a job's state and message, or add to its record."""
        view = self.jobs[job]
        self._job_changes.append(JobChange(job, state, message, failure))
        failures = view.failures if failure is None else (*view.failures, failure)
        self.jobs[job] = msgspec.structs.replace(view, state=state, message=message, failures=failures)

    def open_incident(self, **facts: Any) -> Incident:  # noqa: ANN401 - the fields of Incident, checked by it
        """Open an incident, and move it on to be decided."""
        incident = Incident(
            incident_id=f"inc-{self._next_incident}",
            state=IncidentState.OPEN,
            opened_at=self.now,
            since=self.now,
            **facts,
        )
        self._next_incident += 1
        self.incidents[incident.incident_id] = incident
        return self.advance(incident, IncidentEvent.DIAGNOSED)

    def advance(self, incident: Incident, event: IncidentEvent | None, **changes: Any) -> Incident:  # noqa: ANN401
        """Move an incident on (event None: only its facts change). An event ends its hold."""
        if event is not None:
            state = INCIDENT.advance(incident.state, event)
            changes |= {"holding_for": "", "hold_until": 0.0, "state": state}
            if state is not incident.state or event is IncidentEvent.FAILED_AGAIN:
                changes["since"] = self.now
            if state.closed:
                changes["resolved_at"] = self.now
        moved = msgspec.structs.replace(incident, **changes)
        if moved != incident:
            self.incidents[incident.incident_id] = moved
            self._changed_incidents.add(incident.incident_id)
        return moved

    def apply(self, case: Case, rule: str, verdict: Verdict) -> None:
        """Turn a verdict into a decision, with all its consequences. A hold that is in force already is not news."""
        if verdict.plan is None and not verdict.gives_up:
            self._hold(case, rule, verdict)
            return
        decision = self._decide(case, rule, verdict)
        if (refused := self.hosts.get(verdict.refuses_drain_of)) is not None:
            self.change_host(refused.host_id, _BACK_TO_WORK.get(refused.state), verdict.reason, ends_drain=True)
        action_id = ""
        if verdict.plan is not None:
            action_id = f"act-{decision.decision_id.removeprefix('dec-')}"
            self._supersede(verdict.plan)
            self._assign(verdict.plan)
        if case.incident is not None:
            self.advance(
                case.incident,
                IncidentEvent.GAVE_UP if verdict.gives_up else IncidentEvent.ACTED,
                action_id=action_id or case.incident.action_id,
                decisions_made=case.incident.decisions_made + (1 if action_id and not verdict.is_patient else 0),
            )
        for host_id in verdict.cordons:
            cordoned = self.hosts.get(host_id)
            if cordoned is not None and cordoned.state not in (HostState.CORDONED, HostState.SILENT):
                self.change_host(host_id, HostEvent.CORDONED, verdict.reason)
        if verdict.job_state is not None:
            name = case.job.spec.job
            self.change_job(name, verdict.job_state, verdict.reason)
            for incident in self.open_incidents(name) if verdict.job_state.ended else ():
                self.advance(incident, IncidentEvent.CLEARED)

    def decide_host(self, host_id: str, kind: DecisionKind, rule: str, reason: str) -> None:
        """Record a decision about a host that no job needs."""
        self._record(Decision(self._decision_id(), "", "", kind, reason, rule, self.now, {"host": host_id}))

    def decide_job(self, job: str, kind: DecisionKind, rule: str, reason: str, evidence: Evidence) -> None:
        """Record a decision about a job without an open incident."""
        self._record(Decision(self._decision_id(), "", job, kind, reason, rule, self.now, evidence))

    def decide_incident(
        self, incident: Incident, kind: DecisionKind, rule: str, reason: str, evidence: Evidence = MappingProxyType({})
    ) -> str:
        """Record a decision about an incident that needs no action; returns the decision's id."""
        decision_id = self._decision_id()
        self._record(
            Decision(decision_id, incident.incident_id, incident.job, kind, reason, rule, self.now, dict(evidence))
        )
        return decision_id

    def supersede_all(self, job: str) -> None:
        """Supersede all open actions of a job."""
        for action in list(self.open_actions(job)):
            self._superseded.append(action.action_id)
            self.actions[action.action_id] = msgspec.structs.replace(action, state=ActionState.SUPERSEDED)

    def outcome(self) -> Outcome:
        """All changes of this round."""
        return Outcome(
            incidents=tuple(i for key, i in self.incidents.items() if key in self._changed_incidents),
            decisions=tuple(self._decisions),
            superseded_actions=tuple(self._superseded),
            hosts=tuple(self._host_changes.values()),
            jobs=tuple(self._job_changes),
            wake_at=self._wake_at,
            adoption=self.adoption,
        )

    # --- parts of a decision -----------------------------------------------------------------------------------------

    def _hold(self, case: Case, rule: str, verdict: Verdict) -> None:
        assert case.incident is not None  # a job without an incident waits with a message instead
        self.wake(verdict.hold_until)
        if case.incident.holding_for == verdict.holding_for:
            return
        self._decide(case, rule, verdict)
        self.advance(case.incident, None, holding_for=verdict.holding_for, hold_until=verdict.hold_until)

    def _decide(self, case: Case, rule: str, verdict: Verdict) -> Decision:
        decision = Decision(
            decision_id=self._decision_id(),
            incident_id=case.incident.incident_id if case.incident else "",
            job=case.job.spec.job,
            kind=verdict.kind,
            reason=verdict.reason,
            rule=rule,
            at=self.now,
            evidence=verdict.evidence,
            action=verdict.plan,
        )
        self._record(decision)
        return decision

    def _decision_id(self) -> str:
        return f"dec-{self._next_decision}"

    def _record(self, decision: Decision) -> None:
        self._next_decision += 1
        self._decisions.append(decision)

    def _supersede(self, plan: ActionPlan) -> None:
        if plan.kind is DecisionKind.CORDON:
            return
        self.supersede_all(plan.job)

    def _assign(self, plan: ActionPlan) -> None:
        """Take the hosts of a granted generation, and set the job's state and message."""
        if plan.next is None:
            return
        where = f"running on {listed([part.host_id for part in plan.next.hosts])}"
        view = self.jobs[plan.job]
        if (view.state, view.message) != (JobState.RUNNING, where):
            self.change_job(plan.job, JobState.RUNNING, where)
        for part in plan.next.hosts:
            self._taken.add(part.host_id)
            host = self.hosts.get(part.host_id)
            if host is not None and host.state is HostState.SPARE:
                self.change_host(part.host_id, HostEvent.ASSIGNED, f"it got ranks of job {plan.job}")
