"""Rules for a host that will be taken away at a known time."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, isinf

from flyball.contracts.decisions import ActionPlan, ActionState, DecisionKind, Incident, IncidentState
from services.controller.round import fewer_hosts, plans
from services.controller.round.diagnosis import DEPARTURES, DRAIN_REQUESTED, HOST_CONDITION, PREEMPTION_NOTICE
from services.controller.round.round import Case, Round
from services.controller.round.verdict import Verdict
from services.controller.round.view import ActionView, GenerationView, HostView
from services.controller.rules import health_rules, recovery_rules
from services.controller.rules.step_ahead import is_stepping, step_ahead

_ASK_AGAIN_S = 1.0
_SPARE_BACK_S = 3.0  # wait for another spare, if one is lost while ranks save, before they are released


def give_up_after_too_many_decisions(case: Case) -> Verdict | None:
    """Give up after too many actions. Training goes on until the host goes; its loss is an incident of its own."""
    incident, limit = case.incident, case.settings.max_decisions_per_incident
    if incident is None or incident.decisions_made < limit:
        return None
    plan = plan_for_those_that_stand(case)
    train_on = "" if plan is None else " The ranks train on where they are."
    return Verdict(
        DecisionKind.HOLD if plan is None else plan.kind,
        f"{incident.message} {limit} actions have not ended it: an operator must take over.{train_on}",
        plan=plan,
        evidence={"decisions": incident.decisions_made},
        gives_up=True,
        cordons=(incident.host_id,),
    )


def let_the_other_incident_go_first(case: Case) -> Verdict | None:
    """Wait for another incident: only one at a time may change the generation. A failure goes first; its restart also
    leaves the preempted host. So does what ranks have parked for last. What they train on with is not in the way: a
    harm that is held for a person, a failure after whose restart they repeat steps. And whoever granted the generation
    sees to its ranks."""
    if case.incident is None:
        return None
    failure = health_rules.first_to_handle(case.round, case.job)
    if failure is not None and failure.state is IncidentState.VERIFYING and last_action(case) is not None:
        failure = None
    others = [
        other
        for other in case.round.open_incidents(case.job.spec.job)
        if other.incident_id != case.incident.incident_id and (other is failure or _acts_on_a_notice(case, other))
    ]
    if not others:
        return None
    return Verdict(
        DecisionKind.HOLD,
        f"{case.incident.message} {others[0].incident_id} ({others[0].cause}) is being handled and comes first.",
        evidence={"incident": others[0].incident_id},
        holding_for=f"{others[0].incident_id} to be over",
        hold_until=case.now + _ASK_AGAIN_S,
        awaits_news=case.incident.cause != DRAIN_REQUESTED,  # which has a deadline of its own
    )


def save_before_the_host_goes(case: Case) -> Verdict | None:
    """Let every rank save the same step, named here, and park, so that nothing is lost. Without a spare, train on for
    as long as the notice allows."""
    incident, generation = case.incident, case.job.generation
    if incident is None or generation is None:
        return None
    if last_action(case) is not None:
        return None
    remaining_s = _remaining_s(case)
    reserve_s = case.settings.emergency_reserve_s
    spares = case.free_hosts
    if remaining_s <= reserve_s or not is_stepping(case, generation):
        return None
    if not spares and remaining_s > 2.0 * reserve_s:
        return None
    return save_and_park(case, remaining_s, deadline_s=remaining_s - reserve_s, spares=spares)


def save_and_park(
    case: Case, remaining_s: float, *, deadline_s: float, spares: Sequence[HostView], follows: str = ""
) -> Verdict:
    """The verdict for an emergency checkpoint at a step ahead of all ranks, within `deadline_s` including slow
    tiers. Other jobs' moves leave the spares alone meanwhile. `remaining_s`: inf if the host has no deadline.
    `follows`: what the ranks do next, unless a spare decides."""
    incident, generation = case.incident, case.job.generation
    assert incident is not None and generation is not None, "checked by the calling rule"
    step = step_ahead(case, generation)
    if incident.host_id and spares:
        chosen = recovery_rules.choose_spares(case, [incident.host_id], spares) or {}
        spares = [spare.host for spare in chosen.values()]  # none: it has no ranks, or no free host will do
    deadline_s = min(case.settings.action_deadline_s, deadline_s)
    return Verdict(
        DecisionKind.EMERGENCY_CHECKPOINT,
        f"{incident.message} {'' if isinf(remaining_s) else f'{remaining_s:.1f} s are left: '}"
        f"{'E' if isinf(remaining_s) else 'e'}very rank saves step {step} and parks, "
        + (follows or (f"then {spares[0].host_id} takes over." if spares else "then they wait for a spare.")),
        plan=plans.save_plan(case, generation, step, deadline_s=deadline_s, spares=spares),
        evidence={
            "host": incident.host_id,
            "remaining_s": None if isinf(remaining_s) else round(remaining_s, 3),
            "step": step,
            "newest_step": max(rank.step for rank in generation.ranks),
        },
    )


def wait_until_all_ranks_step(case: Case, follows: str) -> Verdict | None:
    """Wait for starting ranks, which cannot save a step yet. `follows`: what happens when they train."""
    if is_stepping(case, case.this_generation):
        return None
    return Verdict(
        DecisionKind.HOLD,
        f"{case.this_incident.message} Not all ranks train yet: {follows}",
        holding_for="all ranks to train",
        hold_until=case.now + _ASK_AGAIN_S,
    )


def restart_ranks_that_did_not_go_on(case: Case) -> Verdict | None:
    """Restart ranks that were released, but did not get the command or did not move."""
    earlier = last_action(case)
    if earlier is None or earlier.plan.kind is not DecisionKind.RESUME:
        return None
    return recovery_rules.restart_in_place(case)


def is_wanted(round_: Round, incident: Incident) -> bool:
    """Whether the host's ranks must still leave: a notice or a drain may be withdrawn, a condition may end."""
    host = round_.hosts.get(incident.host_id)
    if host is None:
        return False
    if incident.cause == HOST_CONDITION:
        return bool(host.pressing)
    return host.is_drained if incident.cause == DRAIN_REQUESTED else host.preempt_deadline_at > 0.0


def let_the_ranks_go(case: Case) -> Verdict | None:
    """Release parked ranks, to train on where they are, if no spare is left or the host need not be left any more. If
    the host is about to go, they stay parked."""
    incident, generation = case.incident, case.job.generation
    if incident is None or generation is None or not stand(case):
        return None
    if not is_wanted(case.round, incident):
        return resume(case, generation, "It need not be left any more")
    spares = recovery_rules.takers(case, incident.host_id)
    if case.now >= last_call_at(case) or spares or may_shrink(case):
        return None
    until = incident.since + _SPARE_BACK_S
    if case.now >= until:
        return resume(case, generation, "No host is free to take its ranks any more")
    return Verdict(
        DecisionKind.HOLD,
        f"{incident.message} All ranks are parked, and the spare is gone: waiting for another.",
        holding_for="another spare",
        hold_until=until,
    )


def may_shrink(case: Case) -> bool:
    """Whether the job may go on without the host that must be left, since no spare came in time: at a notice, not
    before the host is about to go; for a condition, only if the host cannot train."""
    incident, generation = case.incident, case.job.generation
    if incident is None or generation is None or not is_wanted(case.round, incident):
        return False
    due_at = last_call_at(case) if incident.cause == PREEMPTION_NOTICE else fewer_hosts.due_at(case)
    is_broken = case.round.hosts[incident.host_id].is_broken
    if case.now < due_at or (incident.cause == HOST_CONDITION and not is_broken):
        return False
    is_allowed = fewer_hosts.without(case, generation, [incident.host_id]) is not None
    return is_allowed and not recovery_rules.takers(case, incident.host_id)


def last_action(case: Case) -> ActionView | None:
    """The incident's last action, unless it is superseded or about an earlier generation."""
    incident, generation = case.incident, case.job.generation
    action = case.round.actions.get(incident.action_id) if incident is not None else None
    if action is None or generation is None or action.state is ActionState.SUPERSEDED:
        return None
    return action if action.of_generation == generation.generation else None


def plan_for_those_that_stand(case: Case) -> ActionPlan | None:
    """A plan to release the ranks that are parked for this incident, if there are any."""
    generation = case.job.generation
    return plans.resume_plan(case, generation) if generation is not None and stand(case) else None


def stand(case: Case) -> bool:
    """Return whether ranks got the command to save and park, and no other since."""
    earlier = last_action(case)
    return earlier is not None and earlier.plan.kind is DecisionKind.EMERGENCY_CHECKPOINT and earlier.state.ended


def save_failed(case: Case) -> bool:
    """Return whether the incident's last action was an emergency save, and failed."""
    earlier = last_action(case)
    if earlier is None or earlier.plan.kind is not DecisionKind.EMERGENCY_CHECKPOINT:
        return False
    return earlier.state in (ActionState.FAILED, ActionState.TIMED_OUT)


def resume(case: Case, generation: GenerationView, why: str) -> Verdict:
    """The verdict that releases parked ranks, to train on where they are."""
    assert case.incident is not None
    return Verdict(
        DecisionKind.RESUME,
        f"{case.incident.message} {why}: the ranks of generation {generation.generation} train on where they are.",
        plan=plans.resume_plan(case, generation),
        evidence={"host": case.incident.host_id},
        is_patient=True,
    )


def wait_for_a_spare(case: Case) -> Verdict | None:
    """Train on until a host appears."""
    incident, generation = case.incident, case.job.generation
    if incident is None or generation is None:
        return None
    if all(part.host_id != incident.host_id for part in generation.hosts):
        return None
    remaining_s, last_call = _remaining_s(case), last_call_at(case)
    return Verdict(
        DecisionKind.HOLD,
        f"{incident.message} No spare is free to take its ranks: waiting for a host.",
        evidence={"host": incident.host_id, "remaining_s": round(remaining_s, 3)},
        holding_for="a spare host",
        hold_until=min(case.now + _ASK_AGAIN_S, last_call) if last_call > case.now else case.now + _ASK_AGAIN_S,
    )


def last_call_at(case: Case) -> float:
    """When the ranks have to save because the host is about to go; inf if no notice was given."""
    is_notice = case.incident is not None and case.incident.cause == PREEMPTION_NOTICE
    return case.now + _remaining_s(case) - 2.0 * case.settings.emergency_reserve_s if is_notice else inf


def _remaining_s(case: Case) -> float:
    host = case.round.hosts.get(case.incident.host_id) if case.incident else None
    return host.preempt_deadline_at - case.now if host else 0.0


def _acts_on_a_notice(case: Case, other: Incident) -> bool:
    if other.cause not in DEPARTURES:
        return False
    is_acting = other.state in (IncidentState.ACTING, IncidentState.VERIFYING)
    return is_acting or _parked_since(Case(case.round, case.job, other)) > _parked_since(case)


def _parked_since(case: Case) -> float:
    """When the order came for which ranks stand parked for this incident; -inf: they do not."""
    earlier = last_action(case)
    return earlier.started_at if earlier is not None and stand(case) else -inf
