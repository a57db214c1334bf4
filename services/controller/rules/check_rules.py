"""Rules that check hosts: before a job's first step, and after hangs without a culprit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flyball.contracts.cluster import JobState
from flyball.contracts.decisions import ActionState, DecisionKind, Incident
from flyball.contracts.reports.host_checks import CheckState
from services.controller.round import check_plans
from services.controller.round.diagnosis import RANK_STALLED
from services.controller.round.round import Case, Round
from services.controller.round.verdict import Verdict
from services.controller.round.view import ActionView, HostView, JobView
from services.rules import hang_findings
from services.rules.incident_states import IncidentEvent
from services.rules.wording import kept, listed

_FRESH_S = 600.0  # a check that is older proves nothing for a job that starts now
_AGAIN_S = 300.0  # after a check that did not prove a host fit
_SOON_S = 30.0  # the same, if another host is there by now that may show which of two is bad


def check_before_the_first_step(case: Case) -> Verdict | None:
    """If the job asks for it (--check-nodes), check the hosts that it would start on, unless they just passed."""
    job, round_ = case.job, case.round
    if job.state is not JobState.SUBMITTED or not wants_check(job) or _is_checking(round_, job):
        return None
    free = _free(round_, job)
    proven = fit_hosts(round_, job, free)
    fewer = job.spec.fewest_nnodes <= len(free) < job.spec.nnodes
    missing = (len(free) if fewer else job.spec.nnodes) - len(proven)
    candidates = [host for host in free if host not in proven and _may_be_checked(round_, job, host, free)]
    if missing <= 0 or len(candidates) < missing:
        return None
    chosen = candidates[:missing]
    helpers = [host for host in (*proven, *candidates[missing:])]
    names = [host.host_id for host in chosen]
    one = len(names) == 1
    return Verdict(
        DecisionKind.CHECK_HOSTS,
        f"Job {job.spec.job} starts only on hosts that pass a check (--check-nodes): {listed(names)} "
        f"{'multiplies' if one else 'multiply'} matrices and {'reduces' if one else 'reduce'} a tensor, in groups.",
        plan=check_plans.check_plan(
            chosen, helpers, timeout_s=case.settings.host_check_timeout_s, spec=job.spec, generation=0
        ),
        evidence={"hosts": kept(names)},
        is_patient=True,
    )


def check_after_a_hang_without_a_culprit(case: Case) -> Verdict | None:
    """If a job hangs again, and where its ranks stand shows no culprit, stop it and check its hosts: one of them may
    have a bad device or link."""
    incident, generation, job = case.incident, case.job.generation, case.job
    if incident is None or generation is None or incident.cause != RANK_STALLED:
        return None
    looked = case.round.actions.get(incident.action_id)
    if looked is None or looked.plan.kind is not DecisionKind.TAKE_STACKS or not looked.state.ended:
        return None
    if looked.plan.generation != generation.generation or looked.state is ActionState.SUPERSEDED:
        return None
    found = hang_findings.find(looked.stands)
    hung = {failure.generation for failure in job.failures if failure.cause == RANK_STALLED}
    if (found is not None and found.culprits) or len(hung) < 2:
        return None
    known = (case.round.hosts.get(part.host_id) for part in generation.hosts)
    hosts = [host for host in known if host is not None and not case.round.is_silent(host.host_id)]
    if not hosts:
        return None
    helpers = case.round.free_hosts(job.spec) if len(hosts) <= 2 else []
    names = [host.host_id for host in hosts]
    return Verdict(
        DecisionKind.CHECK_HOSTS,
        f"{incident.message} This is hang number {len(hung)}, and nothing shows who causes it. Its workers are "
        f"stopped, and {listed(names)} {'is' if len(names) == 1 else 'are'} checked in groups.",
        plan=check_plans.check_plan(
            hosts,
            helpers,
            timeout_s=case.settings.host_check_timeout_s,
            spec=job.spec,
            generation=generation.generation,
            stops=True,
        ),
        evidence={"generation": generation.generation, "hangs": len(hung), "hosts": kept(names)},
        is_patient=True,
    )


def take_in_check(round_: Round, incident: Incident, action: ActionView) -> None:
    """Say in the incident what the check of its hosts showed, and blame the host that failed."""
    found = check_plans.results(action, round_.now)
    bad = [host for host, check in found.items() if check.state is CheckState.FAILED]
    unknown = [host for host, check in found.items() if check.state is CheckState.UNKNOWN]
    facts: dict[str, Any] = {}
    if bad:
        why = "; ".join(f"{host}: {found[host].message}" for host in bad[:3])
        facts["message"] = f"{incident.message} The check of its hosts failed on {listed(bad)} ({why})."
        facts["host_id"] = bad[0]
    elif unknown:
        facts["message"] = f"{incident.message} {unknown[0]} did not pass its check: {found[unknown[0]].message}."
    else:
        facts["message"] = f"{incident.message} Its hosts passed a check."
    round_.advance(incident, IncidentEvent.LOOKED, **facts)


# --- parts that the start of jobs uses, too --------------------------------------------------------------------------


def wants_check(job: JobView) -> bool:
    return job.spec.check_nodes or job.spec.exclude_stragglers


def fit_hosts(round_: Round, job: JobView, free: Sequence[HostView]) -> list[HostView]:
    """Those of the free hosts on which the job may start: all, unless it wants them checked."""
    if not wants_check(job):
        return list(free)
    since = max(job.submitted_at, round_.now - _FRESH_S)
    fit = (CheckState.PASSED,) if job.spec.exclude_stragglers else (CheckState.PASSED, CheckState.SLOW)
    return [host for host in free if host.check is not None and host.check.state in fit and host.check.at >= since]


def waits_for_checks(round_: Round, job: JobView) -> str:
    """What a job that wants its hosts checked waits for; '' if for something else."""
    if not wants_check(job):
        return ""
    action = _is_checking(round_, job)
    if action is not None:
        return f"checks {listed(list(action.plan.stop_hosts))} before the first step: {action.message or 'begins'}"
    free = _free(round_, job)
    fit = fit_hosts(round_, job, free)
    since = max(job.submitted_at, round_.now - _FRESH_S)
    unfit = [h for h in free if h not in fit and h.check is not None and h.check.at >= since]
    if not unfit or len(fit) >= job.spec.nnodes:
        return ""
    round_.wake(round_.now + _SOON_S)
    shown = "; ".join(f"{h.host_id} {h.check.state.value}: {h.check.message}" for h in unfit[:3] if h.check)
    return f"waits for hosts that pass their check: it needs {job.spec.nnodes}, {len(fit)} passed ({shown})"


def _is_checking(round_: Round, job: JobView) -> ActionView | None:
    open_ = round_.open_actions(job.spec.job)
    return next((action for action in open_ if action.plan.kind is DecisionKind.CHECK_HOSTS), None)


def _free(round_: Round, job: JobView) -> list[HostView]:
    others = {**round_.kept_for, **round_.spare_of}
    return [host for host in round_.free_hosts(job.spec) if host.host_id not in others]


def _may_be_checked(round_: Round, job: JobView, host: HostView, free: Sequence[HostView]) -> bool:
    check = host.check
    if check is None or check.at < max(job.submitted_at, round_.now - _FRESH_S):
        return True
    if check.state is CheckState.RUNNING:
        return False
    others = [h for h in free if h.check is None or h.check.state is not CheckState.UNKNOWN]
    pause_s = _SOON_S if check.state is CheckState.UNKNOWN and others else _AGAIN_S
    return round_.now - check.at >= pause_s
