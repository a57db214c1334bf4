"""One round of the policy: the view with this round's changes, and the record of these changes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import inf
from types import MappingProxyType
from typing import Any

import msgspec

from flyball.contracts.cluster import HostState, JobSpec, JobState
from flyball.contracts.decisions import (
    ActionPlan,
    ActionState,
    Decision,
    DecisionKind,
    Incident,
    IncidentState,
)
from flyball.contracts.orders import Order, OrderKind, OrderState
from flyball.contracts.reports.conditions import ConditionKey, HostCondition
from flyball.contracts.reports.host_checks import HostCheck
from services.controller.round import job_policy
from services.controller.round.choices import spare_choice
from services.controller.round.diagnosis import BESIDE_FAILURES, Failure
from services.controller.round.verdict import Evidence, Verdict
from services.controller.round.view import (
    ActionView,
    Adoption,
    CheckChange,
    ConditionChange,
    GenerationView,
    HostChange,
    HostView,
    JobChange,
    JobView,
    OrderChange,
    Outcome,
    PastFailure,
    PolicySettings,
    ReportedStanding,
    StandingCondition,
    View,
    WordChange,
)
from services.rules.incident_states import HOST, INCIDENT, HostEvent, IncidentEvent
from services.rules.wording import listed

_BACK_TO_WORK = {HostState.CORDONED: HostEvent.RELEASED, HostState.IN_REPAIR: HostEvent.CLEANED}


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
        """The job's: its own over the cluster's."""
        return self.round.settings_of(self.job.spec)

    @property
    def this_incident(self) -> Incident:
        assert self.incident is not None, "a rule about incidents is asked about one"
        return self.incident

    @property
    def this_generation(self) -> GenerationView:
        assert self.job.generation is not None, "only a job with a generation has incidents"
        return self.job.generation

    @property
    def free_hosts(self) -> list[HostView]:
        """The hosts that may take ranks of the job now, best first. After a failure, whose ranks all stand, those that
        another job's ranks have parked for come last; whatever can wait leaves them alone."""
        others = self.round.claimed_by_others(self.job.spec.job)
        can_wait = self.incident is None or self.incident.cause in BESIDE_FAILURES
        found = sorted(self.round.free_hosts(self.job.spec), key=lambda host: host.host_id in others)
        return [host for host in found if not can_wait or host.host_id not in others]

    @property
    def well_hosts(self) -> list[HostView]:
        """Those without a pressing condition: a move for a warning must not end at another."""
        return [host for host in self.free_hosts if not host.pressing]


class Round:
    """Rules read the values. They change them through the methods, which record the changes for the outcome."""

    def __init__(self, view: View, settings: PolicySettings, now: float) -> None:
        self.view = view
        self.settings = settings
        self.now = now
        self.orders: dict[tuple[OrderKind, str], Order] = {
            order.key: order for order in view.orders if order.state is OrderState.STANDING
        }
        silences = {  # target -> the end of its maintenance window
            order.target: order.until
            for order in self.orders.values()
            if order.kind is OrderKind.SILENCE and order.until > now
        }
        self.hosts: dict[str, HostView] = {host.host_id: self._counted(host).silenced(silences) for host in view.hosts}
        self.jobs: dict[str, JobView] = {job.spec.job: job for job in view.jobs}
        self.incidents: dict[str, Incident] = {incident.incident_id: incident for incident in view.incidents}
        self.actions: dict[str, ActionView] = {action.action_id: action for action in view.actions}
        self.reported: dict[str, list[Failure]] = {}  # job -> failures known only from signals of this round
        self.noticed: dict[str, float] = {}  # host -> time of its preemption notice, if new in this round
        self.broke: set[str] = set()  # hosts that a report of this round calls broken
        self.diagnoses: dict[str, Failure] = {}  # job -> what is wrong with its current generation
        self.unadopted: set[str] = set()  # jobs about which hosts know more than the view
        self.unsupervised: set[str] = set()  # hosts that run ranks of a job that nobody supervises
        self.words: tuple[WordChange, ...] = ()
        self.withdrawn: tuple[ReportedStanding, ...] = ()
        self.adoption: Adoption | None = None
        self.kept_for: dict[str, str] = {}  # free host -> the first job in line that waits for more hosts
        self.spare_of: dict[str, str] = {}  # free host -> the running job whose spare it is
        self._next_incident = view.next_incident
        self._next_decision = view.next_decision
        self._taken: set[str] = set()
        self._claims: dict[str, str] = {}  # of this round: free host -> the job whose ranks are to park for it
        self._decisions: list[Decision] = []
        self._superseded: list[str] = []
        self._acted: set[str] = set()
        self._changed_incidents: set[str] = set()
        self._host_changes: dict[str, HostChange] = {}
        self._check_changes: dict[str, CheckChange] = {}
        self._condition_changes: dict[tuple[str, ConditionKey], ConditionChange] = {}
        self._job_changes: list[JobChange] = []
        self._order_changes: list[OrderChange] = []
        self._wake_at = 0.0
        self._settings_of: dict[str, PolicySettings] = {}

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

    def well_hosts(self, spec: JobSpec) -> list[HostView]:
        """The free hosts without a pressing condition, best first: a move for a warning must not end at another."""
        return [host for host in self.free_hosts(spec) if not host.pressing]

    def free_hosts(self, spec: JobSpec, among: Iterable[HostView] | None = None) -> list[HostView]:
        """The hosts that may take ranks of the job now (`among` these), best first. An operator's cordon keeps a host
        out of them even before it is applied again."""
        cordoned = {target for kind, target in self.orders if kind is OrderKind.CORDON}
        busy = spare_choice.busy_hosts(self.actions.values(), spec.job)
        return spare_choice.free_hosts(
            self.hosts.values() if among is None else among,
            spec,
            taken=self._taken | busy | cordoned | self.unsupervised,
            now=self.now,
            fresh_s=self.settings.spare_fresh_s,
        )

    def claimed_by_others(self, job: str) -> set[str]:
        """The free hosts for which ranks of other jobs save and park, or stand parked."""
        claims = spare_choice.claims(self.actions.values(), self.incidents) | self._claims
        return {host_id for host_id, owner in claims.items() if owner != job}

    def settings_of(self, spec: JobSpec) -> PolicySettings:
        """The settings for a job: its own over the cluster's."""
        if spec.job not in self._settings_of:
            self._settings_of[spec.job] = job_policy.settings_of(self.settings, spec.policy)
        return self._settings_of[spec.job]

    def is_silent(self, host_id: str) -> bool:
        """Whether a host cannot receive commands; an unknown host cannot either."""
        host = self.hosts.get(host_id)
        return host is None or host.state in (HostState.SILENT, HostState.SUSPECT)

    def has_acted(self, job: str) -> bool:
        """Whether an action for the job was decided in this round, beside those that only stop stray workers."""
        return job in self._acted

    # --- changing ----------------------------------------------------------------------------------------------------

    def _counted(self, host: HostView) -> HostView:
        """The host with those failures that count: recent ones, since an operator last uncordoned it."""
        if not host.failed_at:
            return host
        cleared = self.orders.get((OrderKind.CLEAR, host.host_id))
        since = max(self.now - self.settings.host_failure_window_s, cleared.requested_at if cleared else -inf)
        failed_at = tuple(at for at in host.failed_at if at > since)
        return host if failed_at == host.failed_at else msgspec.structs.replace(host, failed_at=failed_at)

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

    def change_condition(
        self, host_id: str, condition: HostCondition, *, is_overruled: bool = False, has_ended: bool = False
    ) -> None:
        """Put a condition on a host, in place of the one with its key, or take it away."""
        host = self.hosts[host_id]
        change = ConditionChange(host_id, condition, is_overruled, has_ended)
        self._condition_changes[host_id, condition.key] = change
        others = [one for one in host.conditions if one.condition.key != condition.key]
        if not has_ended:
            others.append(StandingCondition(condition, is_overruled))
        conditions = tuple(sorted(others, key=lambda one: one.condition.key))
        self.hosts[host_id] = msgspec.structs.replace(host, conditions=conditions)

    def change_check(self, host_id: str, check: HostCheck) -> None:
        """Set the result of a host's check."""
        self._check_changes[host_id] = CheckChange(host_id, check)
        self.hosts[host_id] = msgspec.structs.replace(self.hosts[host_id], check=check)

    def change_job(self, job: str, state: JobState, message: str, failure: PastFailure | None = None) -> None:
        """Set a job's state and message, or add to its record."""
        view = self.jobs[job]
        self._job_changes.append(JobChange(job, state, message, failure))
        failures = view.failures if failure is None else (*view.failures, failure)
        self.jobs[job] = msgspec.structs.replace(view, state=state, message=message, failures=failures)

    def open_incident(self, **facts: Any) -> Incident:  # noqa: ANN401 - the fields of Incident, checked by it
        """Open an incident, and move it on to be decided. Without another word it began when it was observed."""
        incident = Incident(
            incident_id=f"inc-{self._next_incident}",
            state=IncidentState.OPEN,
            opened_at=self.now,
            since=self.now,
            **{"fault_at": facts.get("observed_at", self.now), **facts},
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
        if verdict.is_hold:
            self._hold(case, rule, verdict)
            return
        decision = self._decide(case, rule, verdict)
        if (refused := self.hosts.get(verdict.refuses_drain_of)) is not None:
            self.change_host(refused.host_id, _BACK_TO_WORK.get(refused.state), verdict.reason, ends_drain=True)
        action_id = ""
        if verdict.plan is not None:
            action_id = f"act-{decision.decision_id.removeprefix('dec-')}"
            if verdict.plan.kind is not DecisionKind.CORDON:
                self.supersede_all(verdict.plan.job)
                self._acted.add(verdict.plan.job)
            self._assign(verdict.plan)
        if case.incident is not None and verdict.settles is not None:
            self.change_job(case.job.spec.job, case.job.state, case.job.message, verdict.settles)
            self.advance(case.incident, IncidentEvent.CLEARED, message=verdict.reason)
        elif case.incident is not None:
            self.advance(
                case.incident,
                IncidentEvent.GAVE_UP if verdict.gives_up else IncidentEvent.ACTED,
                action_id=action_id or case.incident.action_id,
                decisions_made=case.incident.decisions_made + (1 if action_id and not verdict.is_patient else 0),
            )
        if verdict.notes is not None:
            self.change_job(case.job.spec.job, case.job.state, case.job.message, verdict.notes)
        for host_id in verdict.cordons:
            cordoned = self.hosts.get(host_id)
            if cordoned is not None and cordoned.state not in (HostState.CORDONED, HostState.SILENT):
                self.change_host(host_id, HostEvent.CORDONED, verdict.reason)
        if verdict.job_state is not None:
            name = case.job.spec.job
            self.change_job(name, verdict.job_state, verdict.reason)
            for incident in self.open_incidents(name) if verdict.job_state.ending else ():
                self.advance(incident, IncidentEvent.CLEARED)

    def decide_host(self, host_id: str, kind: DecisionKind, rule: str, reason: str) -> None:
        """Record a decision about a host that no job needs."""
        self._record(Decision(self._decision_id(), "", "", kind, reason, rule, self.now, {"host": host_id}))

    def decide_job(self, job: str, kind: DecisionKind, rule: str, reason: str, evidence: Evidence) -> str:
        """Record a decision about a job without an open incident; returns the decision's id."""
        decision_id = self._decision_id()
        self._record(Decision(decision_id, "", job, kind, reason, rule, self.now, evidence))
        return decision_id

    def decide_check(self, plan: ActionPlan, rule: str, reason: str, evidence: Evidence) -> None:
        """Record a decision to check hosts, for no job."""
        self._record(Decision(self._decision_id(), "", "", plan.kind, reason, rule, self.now, evidence, plan))

    def decide_incident(
        self, incident: Incident, kind: DecisionKind, rule: str, reason: str, evidence: Evidence = MappingProxyType({})
    ) -> str:
        """Record a decision about an incident that needs no action; returns the decision's id."""
        decision_id = self._decision_id()
        self._record(
            Decision(decision_id, incident.incident_id, incident.job, kind, reason, rule, self.now, dict(evidence))
        )
        return decision_id

    def settle_order(self, order: Order, state: OrderState, message: str = "") -> None:
        """End an operator's order, or refuse it."""
        del self.orders[order.key]
        self._order_changes.append(OrderChange(order, state, message))

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
            conditions=tuple(self._condition_changes.values()),
            jobs=tuple(self._job_changes),
            wake_at=self._wake_at,
            adoption=self.adoption,
            orders=tuple(self._order_changes),
            checks=tuple(self._check_changes.values()),
            words=self.words,
            withdrawn=self.withdrawn,
        )

    # --- parts of a decision -----------------------------------------------------------------------------------------

    def _hold(self, case: Case, rule: str, verdict: Verdict) -> None:
        assert case.incident is not None  # a job without an incident waits with a message instead
        if not verdict.awaits_news:
            self.wake(verdict.hold_until)
        if verdict.is_in_force(case.incident):
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
            alternatives=verdict.alternatives,
        )
        self._record(decision)
        return decision

    def _decision_id(self) -> str:
        return f"dec-{self._next_decision}"

    def _record(self, decision: Decision) -> None:
        self._next_decision += 1
        self._decisions.append(decision)
        if decision.action is not None and decision.action.check is not None:
            self._taken.update(decision.action.stop_hosts)

    def _assign(self, plan: ActionPlan) -> None:
        """Take the hosts of a granted generation, and set the job's state and message."""
        self._claims.update(dict.fromkeys(plan.claimed_hosts, plan.job))
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
