"""Guards: they hold back, or amend, what a rule wants to do. Each is asked about the verdict of the first rule."""

from __future__ import annotations

import msgspec

from flyball.contracts.cluster import HostState
from flyball.contracts.decisions import DecisionKind
from flyball.contracts.orders import AWAITS_APPROVAL, OrderKind
from services.controller.round import blast_radius, given_up
from services.controller.round.diagnosis import CHECKPOINT_REQUESTED, DEPARTURES, ROOM_TO_GROW
from services.controller.round.round import Case
from services.controller.round.verdict import Verdict
from services.controller.round.view import HostView
from services.controller.rules import preemption_rules
from services.rules.wording import counted, in_words, kept, listed

_HOUR_S = 3600.0
_LOOK_AGAIN_S = 60.0
_NEXT_ROUND_S = 0.2
# They end what is under way, or let ranks train on.
_ALWAYS = (DecisionKind.FAIL_JOB, DecisionKind.STOP_JOB, DecisionKind.RESUME, DecisionKind.CORDON)


def act_once_in_a_round(case: Case, wanted: Verdict) -> Verdict | None:
    """If an action for another incident of the job was decided in this round, wait for the next one. Rules cannot see
    that action yet: two of one job would run at once."""
    incident, job, plan = case.incident, case.job, wanted.plan
    if incident is None or plan is None or job.state.ended or not case.round.has_acted(job.spec.job):
        return None
    if plan.kind is DecisionKind.CORDON:  # stops stray workers only
        return None
    return Verdict(
        DecisionKind.HOLD,
        f"{incident.message} Another action of job {job.spec.job} was decided just now, and begins first.",
        holding_for="another action of the job to begin",
        hold_until=case.now + _NEXT_ROUND_S,
    )


def wait_for_the_end_of_maintenance(case: Case, wanted: Verdict) -> Verdict | None:
    """While a host of the job is in a maintenance window and cannot train, wait for its end. Ranks that have parked for
    a move do not wait: the move goes on, and no other begins, unless a host is about to go."""
    incident, generation, plan = case.incident, case.job.generation, wanted.plan
    if incident is None or generation is None or plan is None or preemption_rules.stand(case):
        return None
    last_call_at = preemption_rules.last_call_at(case)
    begins_a_move = wanted.kind is DecisionKind.EMERGENCY_CHECKPOINT and case.now < last_call_at
    if plan.next is None and not begins_a_move:
        return None
    hosts = (case.round.hosts.get(part.host_id) for part in generation.hosts)
    away = [h for h in hosts if h is not None and h.silenced_until and _is_down(case, h)]
    if not away:
        return None
    until = max(host.silenced_until for host in away)
    named = listed([host.host_id for host in away])
    return Verdict(
        DecisionKind.HOLD,
        f"{incident.message} {named} {'is' if len(away) == 1 else 'are'} in a maintenance window: nothing is done for "
        f"up to {until - case.now:.0f} s. To end it: flyball silence --end.",
        evidence={"hosts": kept([host.host_id for host in away]), "wait_s": round(until - case.now, 1)},
        holding_for=f"the end of the maintenance of {named}",
        hold_until=min(until, last_call_at) if begins_a_move else until,
    )


def cordon_no_more_hosts(case: Case, wanted: Verdict) -> Verdict | None:
    """Leave hosts, but do not cordon them, once too many were cordoned within an hour. A host that is given up is not
    tried again all the same."""
    if not wanted.cordons:
        return None
    why = blast_radius.too_many(case.round, wanted.cordons)
    if not why:
        return None
    reason = f"{wanted.reason} {listed(wanted.cordons)} is not cordoned: {why}."
    notes = given_up.note_of(case) if wanted.gives_up and case.incident is not None else wanted.notes
    return msgspec.structs.replace(wanted, cordons=(), reason=reason, notes=notes)


def act_no_more_often(case: Case, wanted: Verdict) -> Verdict | None:
    """Hold a job that had too many actions within an hour. A move for which ranks have saved and parked counts as one
    with the save."""
    incident, allowed = case.incident, case.settings.max_actions_per_hour
    if incident is None or wanted.plan is None or wanted.is_patient or wanted.kind in _ALWAYS:
        return None
    if preemption_rules.stand(case):
        return None
    recent = sorted(at for at in case.job.acted_at if case.now - at < _HOUR_S)
    if len(recent) < max(1, allowed):
        return None
    until = recent[len(recent) - max(1, allowed)] + _HOUR_S
    return Verdict(
        DecisionKind.HOLD,
        f"{incident.message} {counted(len(recent), 'action')} about job {case.job.spec.job} "
        f"{'was' if len(recent) == 1 else 'were'} decided within the last hour, and at most "
        f"{'1 is' if allowed <= 1 else f'{allowed} are'} allowed: the next one may follow in {until - case.now:.0f} s.",
        evidence={"actions": len(recent), "wait_s": round(until - case.now, 1)},
        holding_for="the hour's limit of actions",
        hold_until=until,
    )


def only_say_it_in_a_dry_run(case: Case, wanted: Verdict) -> Verdict | None:
    """In a dry run, record what would be done about an incident, and do nothing."""
    if case.incident is None or wanted.plan is None or not case.settings.dry_run or wanted.kind is DecisionKind.RESUME:
        return None
    return Verdict(
        DecisionKind.HOLD,
        f'{wanted.reason} This is a dry run: the action "{in_words(wanted.kind)}" is not carried out.',
        evidence={**wanted.evidence, "wanted": wanted.kind.value},
        holding_for=f"an operator (dry run: {in_words(wanted.kind)})",
        hold_until=case.now + _LOOK_AGAIN_S,
    )


def wait_for_approval(case: Case, wanted: Verdict) -> Verdict | None:
    """Hold an action of a kind that an operator must approve, until one does. A save before a move waits for the
    approval of the move, since ranks that have saved stand still; on the last call of a notice they save without it.
    The release of ranks that stand still never waits."""
    incident, approve = case.incident, case.settings.approve
    if incident is None or wanted.plan is None or wanted.kind is DecisionKind.RESUME:
        return None
    last_call_at = preemption_rules.last_call_at(case)
    is_save = wanted.kind is DecisionKind.EMERGENCY_CHECKPOINT
    move = _move(case)
    kind = move if is_save and move in approve and case.now < last_call_at else wanted.kind
    if kind not in approve:
        return None
    order = case.round.orders.get((OrderKind.APPROVE, incident.incident_id))
    if order is not None and (order.awaited == kind.value or (is_save and order.awaited == move.value)):
        return None
    again_at = case.now + _LOOK_AGAIN_S
    return Verdict(
        DecisionKind.HOLD,
        f'{wanted.reason} The action "{in_words(kind)}" is awaiting approval: flyball approve {incident.incident_id}.',
        evidence={**wanted.evidence, "wanted": kind.value},
        holding_for=f"{AWAITS_APPROVAL}{kind.value}",
        hold_until=min(again_at, last_call_at) if case.now < last_call_at else again_at,
    )


def _move(case: Case) -> DecisionKind:
    """What follows an emergency checkpoint; if nothing does, the checkpoint itself."""
    cause = case.incident.cause if case.incident is not None else ""
    if cause == ROOM_TO_GROW:
        return DecisionKind.GROW
    if cause == CHECKPOINT_REQUESTED:
        return DecisionKind.EMERGENCY_CHECKPOINT
    return DecisionKind.SHRINK if preemption_rules.may_shrink(case) else DecisionKind.MIGRATE_TO_SPARE


def release_meanwhile(case: Case, held: Verdict) -> Verdict:
    """A guard's hold, or the release of ranks that have parked for what it holds: they train on meanwhile. If their
    host is about to go, they stay parked."""
    plan = preemption_rules.plan_for_those_that_stand(case)
    if plan is None or case.round.has_acted(plan.job) or case.now >= preemption_rules.last_call_at(case):
        return held
    return Verdict(
        plan.kind,
        f"{held.reason} The ranks train on meanwhile.",
        plan=plan,
        evidence=held.evidence,
        is_patient=True,
    )


def _is_down(case: Case, host: HostView) -> bool:
    """A host that is to be left can train until then."""
    is_named = (
        case.incident is not None and case.incident.host_id == host.host_id and case.incident.cause not in DEPARTURES
    )
    return is_named or case.round.is_silent(host.host_id) or host.state in (HostState.IN_REPAIR, HostState.DEGRADED)
