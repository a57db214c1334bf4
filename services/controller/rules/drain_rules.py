"""Rules for a host that an operator drains. It is healthy, and the job comes first: without a host for its ranks they
stay, and the drain is refused."""

from __future__ import annotations

from flyball.contracts.decisions import DecisionKind
from services.controller.round.round import Case
from services.controller.round.verdict import Verdict
from services.controller.rules import preemption_rules
from services.controller.rules.step_ahead import is_stepping

_ASK_AGAIN_S = 1.0


def refuse_what_took_too_long(case: Case) -> Verdict | None:
    """Refuse a drain that took too long: half an hour later, the operator may not want it any more."""
    incident, limit = case.this_incident, case.settings.max_decisions_per_incident
    generation = case.job.generation
    if generation is None or all(part.host_id != incident.host_id for part in generation.hosts):
        return None  # a failure has moved them; if they come back, that decision refuses the drain
    if incident.decisions_made >= limit:
        why = f"{limit} actions have not moved its ranks"
    elif not incident.action_id and case.now >= _deadline_at(case):
        waited = f" (it waited for {incident.holding_for})" if incident.holding_for else ""
        why = f"the time for it is over{waited}"
    else:
        return None
    plan = preemption_rules.plan_for_those_that_stand(case)
    return Verdict(
        DecisionKind.HOLD if plan is None else plan.kind,
        f"{incident.message} It is refused: {why}. Job {case.job.spec.job} stays where it is.",
        plan=plan,
        evidence={"host": incident.host_id, "decisions": incident.decisions_made},
        gives_up=True,
        refuses_drain_of=incident.host_id,
    )


def wait_until_all_ranks_step(case: Case) -> Verdict | None:
    """Wait for starting ranks, which cannot save a step yet; not for long, as a script may never report one."""
    generation = case.job.generation
    if generation is None or case.this_incident.action_id or not case.job.spec.checkpoint.saves:
        return None
    if is_stepping(case, generation):
        return None
    until = (generation.started_at or case.now) + case.settings.action_deadline_s
    if case.now >= until:
        return None
    return Verdict(
        DecisionKind.HOLD,
        f"{case.this_incident.message} The ranks of generation {generation.generation} are starting: "
        "they are moved when all of them train.",
        evidence={"host": case.this_incident.host_id, "generation": generation.generation},
        holding_for="all ranks to train",
        hold_until=case.now + _ASK_AGAIN_S,
    )


def save_before_the_host_is_left(case: Case) -> Verdict | None:
    """If there is a spare, let every rank save the same step, named here, and park, so that nothing is lost."""
    generation = case.job.generation
    if generation is None:
        return None
    if preemption_rules.last_action(case) is not None:
        return None
    spares = case.free_hosts
    if not spares or not is_stepping(case, generation):
        return None
    remaining_s = max(_deadline_at(case) - case.now, case.settings.emergency_reserve_s)
    return preemption_rules.save_and_park(case, remaining_s, deadline_s=remaining_s, spares=spares)


def wait_for_a_spare(case: Case) -> Verdict | None:
    """Train on until a host is free."""
    incident, generation = case.this_incident, case.job.generation
    if generation is None or all(part.host_id != incident.host_id for part in generation.hosts):
        return None
    remaining_s = max(0.0, _deadline_at(case) - case.now)
    return Verdict(
        DecisionKind.HOLD,
        f"{incident.message} No spare is free to take its ranks: job {case.job.spec.job} stays there, "
        f"and waits for a host for up to {remaining_s:.0f} s.",
        evidence={"host": incident.host_id, "remaining_s": round(remaining_s, 3)},
        holding_for="a spare host",
        hold_until=case.now + _ASK_AGAIN_S,
    )


def _deadline_at(case: Case) -> float:
    """When the operator's time is over; now, if the drain was withdrawn."""
    host = case.round.hosts.get(case.this_incident.host_id)
    return host.drain.deadline_at if host is not None and host.drain is not None else case.now
