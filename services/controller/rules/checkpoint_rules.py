"""Rules for a checkpoint that an operator requests: all ranks save the same step, wait until the slow tiers have it,
and train on where they are."""

from __future__ import annotations

from math import inf

from flyball.contracts.cluster import JobState
from flyball.contracts.decisions import DecisionKind, Incident
from flyball.contracts.orders import Order, OrderState
from services.controller.round.diagnosis import CHECKPOINT_REQUESTED, newest_common_step
from services.controller.round.round import Case, Round
from services.controller.round.verdict import Verdict
from services.controller.round.view import JobView
from services.controller.rules import preemption_rules
from services.controller.rules.step_ahead import is_stepping
from services.rules.incident_states import IncidentEvent
from services.rules.wording import in_words

_ASK_AGAIN_S = 1.0


def take_order(round_: Round, order: Order) -> None:
    """Open the job's incident, unless it has one; refuse the order if the job can save nothing."""
    job = round_.jobs.get(order.target)
    generation = job.generation if job is not None else None
    if job is None or generation is None or job.state is not JobState.RUNNING:
        round_.settle_order(order, OrderState.REFUSED, f"job {order.target} does not run")
        return
    if not job.spec.checkpoint.saves:
        round_.settle_order(order, OrderState.REFUSED, f"job {order.target} saves no checkpoints")
        return
    if not any(incident.cause == CHECKPOINT_REQUESTED for incident in round_.open_incidents(order.target)):
        why = f" ({order.reason})" if order.reason else ""
        round_.open_incident(
            job=order.target,
            host_id="",
            cause=CHECKPOINT_REQUESTED,
            message=f"An operator requested a checkpoint of job {order.target}{why}.",
            generation=generation.generation,
            failed_step=newest_common_step(generation),
            observed_at=order.requested_at,
        )
    round_.settle_order(order, OrderState.OVER)


def follow(round_: Round, job: JobView, incident: Incident) -> None:
    """Close an undecided incident if another generation has begun: a recovery restored what was saved."""
    generation = job.generation
    if generation is None or generation.generation == incident.generation:
        return
    if preemption_rules.last_action(Case(round_, job, incident)) is None:
        round_.advance(incident, IncidentEvent.CLEARED)


def give_up_after_a_failed_save(case: Case) -> Verdict | None:
    """If the ranks could not save, or did not train in time, let them train on."""
    incident, settings = case.this_incident, case.settings
    has_failed = preemption_rules.save_failed(case)
    is_late = (
        not incident.action_id
        and not is_stepping(case, case.this_generation)
        and case.now >= incident.opened_at + settings.action_deadline_s
    )
    if not (has_failed or is_late or incident.decisions_made >= settings.max_decisions_per_incident):
        return None
    plan = preemption_rules.plan_for_those_that_stand(case)
    if has_failed:
        why = "The ranks could not save the step"
    elif is_late:
        why = f"No step could be named for it within {settings.action_deadline_s:.0f} s"
    else:
        why = f"{incident.decisions_made} actions have not ended it"
    return Verdict(
        DecisionKind.HOLD if plan is None else plan.kind,
        f"{incident.message} {why}: the job trains on. Its newest recovery point counts.",
        plan=plan,
        evidence={"decisions": incident.decisions_made},
        gives_up=True,
    )


def train_on_after_the_save(case: Case) -> Verdict | None:
    """Release the ranks once all have saved."""
    earlier = preemption_rules.last_action(case)
    if earlier is None or not preemption_rules.stand(case):
        return None
    return preemption_rules.resume(case, case.this_generation, earlier.message.capitalize() or "The step is saved")


def wait_for_the_other_action(case: Case) -> Verdict | None:
    """Wait for another action of the job, which may be saving a step too."""
    job, incident = case.job.spec.job, case.this_incident
    others = [action for action in case.round.open_actions(job) if action.action_id != incident.action_id]
    if not others:
        return None
    return Verdict(
        DecisionKind.HOLD,
        f"{incident.message} {others[0].action_id} ({in_words(others[0].plan.kind)}) is under way and comes first.",
        evidence={"action": others[0].action_id},
        holding_for=f"{others[0].action_id} to end",
        hold_until=case.now + _ASK_AGAIN_S,
    )


def wait_until_all_ranks_step(case: Case) -> Verdict | None:
    """Wait for starting ranks, which cannot save a step yet."""
    return preemption_rules.wait_until_all_ranks_step(case, "they save a step when they do.")


def save_on_request(case: Case) -> Verdict | None:
    """Let every rank save the same step, named here."""
    if preemption_rules.last_action(case) is not None:
        return None
    return preemption_rules.save_and_park(case, inf, deadline_s=inf, spares=(), follows="then they train on.")
