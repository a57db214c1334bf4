"""Rules for a running job with a host that has a pressing condition.

A critical condition: leave at once, the host cannot train. A warning leaves time: save first, and never end a healthy
job for it. Without a spare the job trains on.
"""

from __future__ import annotations

from math import inf

from flyball.contracts.decisions import ActionState, DecisionKind
from services.controller.round.round import Case
from services.controller.round.verdict import Verdict
from services.controller.rules import preemption_rules, recovery_rules
from services.controller.rules.step_ahead import is_stepping

_ASK_AGAIN_S = 1.0


def leave_a_broken_host(case: Case) -> Verdict | None:
    """Move the ranks of a host that cannot train to a spare, from the newest recovery point."""
    host = case.round.hosts.get(case.this_incident.host_id)
    return recovery_rules.migrate_to_spare(case) if host is not None and host.is_broken and _is_there(case) else None


def start_what_a_failed_move_left(case: Case) -> Verdict | None:
    """If the move did not succeed, or its ranks do not train in time, the generation that it granted has to start all
    the same."""
    earlier = preemption_rules.last_action(case)
    if earlier is None or earlier.plan.next is None:
        return None
    return recovery_rules.restart_in_place(case)


def wait_for_a_spare(case: Case) -> Verdict | None:
    """Train on until a host is free: a host that may fail is better than none."""
    incident = case.this_incident
    if not _is_there(case) or preemption_rules.stand(case) or case.well_hosts:
        return None
    return Verdict(
        DecisionKind.HOLD,
        f"{incident.message} No spare is free to take its ranks: job {case.job.spec.job} trains on, and waits for a "
        "host.",
        evidence={"host": incident.host_id},
        holding_for="a spare host",
        hold_until=case.now + _ASK_AGAIN_S,
    )


def save_before_the_host_is_left(case: Case) -> Verdict | None:
    """Let every rank save the same step, named here, and park, so that nothing is lost."""
    generation = case.job.generation
    if generation is None or preemption_rules.last_action(case) is not None:
        return None
    spares = case.well_hosts
    if not spares or not is_stepping(case, generation):
        return None
    return preemption_rules.save_and_park(case, inf, deadline_s=inf, spares=spares)


def migrate_what_is_saved(case: Case) -> Verdict | None:
    """Move the ranks once all of them have saved."""
    earlier = preemption_rules.last_action(case)
    saved = (DecisionKind.EMERGENCY_CHECKPOINT, ActionState.SUCCEEDED)
    is_saved = earlier is not None and (earlier.plan.kind, earlier.state) == saved
    return recovery_rules.migrate_to_spare(case) if is_saved else None


def release_what_could_not_be_saved(case: Case) -> Verdict | None:
    """If the save failed, train on: a warning is no reason to lose steps. The next failure leaves the host."""
    incident, plan = case.this_incident, preemption_rules.plan_for_those_that_stand(case)
    if plan is None:
        return None
    return Verdict(
        plan.kind,
        f"{incident.message} The save before the move did not succeed: job {case.job.spec.job} trains on where it is, "
        "and leaves the host with its next restart. An operator can drain it.",
        plan=plan,
        evidence={"host": incident.host_id},
        gives_up=True,
        cordons=(incident.host_id,),
    )


def stay_without_a_checkpoint(case: Case) -> Verdict | None:
    """A job that saves nothing would start from scratch elsewhere: let it train on."""
    incident = case.this_incident
    if not _is_there(case):
        return None
    return Verdict(
        DecisionKind.HOLD,
        f"{incident.message} Job {case.job.spec.job} cannot save a step now, and would lose its progress: "
        "it trains on, and leaves the host with its next restart.",
        evidence={"host": incident.host_id},
        holding_for="a step that all ranks can save",
        hold_until=case.now + _ASK_AGAIN_S,
    )


def _is_there(case: Case) -> bool:
    generation = case.job.generation
    return generation is not None and any(part.host_id == case.this_incident.host_id for part in generation.hosts)
