"""Rules about a host that will be taken away at a known time."""

from __future__ import annotations

from collections.abc import Sequence

from flyball.contracts.decisions import ActionState, DecisionKind, IncidentState
from services.controller import plans, tracking
from services.controller.diagnosis import DEPARTURES
from services.controller.round import Case, Verdict
from services.controller.step_ahead import is_stepping, step_ahead
from services.controller.view import HostView

_ASK_AGAIN_S = 1.0


def give_up_after_too_many_decisions(case: Case) -> Verdict | None:
    """Training goes on until the host goes; its loss is then an incident of its own."""
    incident, limit = case.incident, case.settings.max_decisions_per_incident
    if incident is None or incident.decisions_made < limit:
        return None
    return Verdict(
        DecisionKind.HOLD,
        f"{incident.message} {limit} actions have not ended it: it is left to an operator.",
        evidence={"decisions": incident.decisions_made},
        gives_up=True,
        cordons=(incident.host_id,),
    )


def let_the_other_incident_go_first(case: Case) -> Verdict | None:
    """One incident at a time changes the generation. A failure goes first, and leaves the preempted host too."""
    if case.incident is None:
        return None
    failure = tracking.failure_of(case.round, case.job.spec.job)
    others = [
        other
        for other in case.round.open_incidents(case.job.spec.job)
        if other.incident_id != case.incident.incident_id
        and (other is failure or _acts_on_a_notice(other.cause, other.state))
    ]
    if not others:
        return None
    return Verdict(
        DecisionKind.HOLD,
        f"{case.incident.message} {others[0].incident_id} ({others[0].cause}) is being handled and comes first.",
        evidence={"incident": others[0].incident_id},
        holding_for=f"{others[0].incident_id} to be over",
        hold_until=case.now + _ASK_AGAIN_S,
    )


def save_before_the_host_goes(case: Case) -> Verdict | None:
    """Every rank saves the same step, named here, and parks: then nothing is lost. With no spare in sight training goes
    on for as long as the notice allows."""
    incident, generation = case.incident, case.job.generation
    if incident is None or generation is None:
        return None
    earlier = case.round.actions.get(incident.action_id)
    if earlier is not None and earlier.state is not ActionState.SUPERSEDED:
        return None
    remaining_s = _remaining_s(case)
    reserve_s = case.settings.emergency_reserve_s
    spares = case.round.free_hosts(case.job.spec)
    if remaining_s <= reserve_s or not is_stepping(case, generation):
        return None
    if not spares and remaining_s > 2.0 * reserve_s:
        return None
    return save_and_park(case, remaining_s, deadline_s=remaining_s - reserve_s, spares=spares)


def save_and_park(case: Case, remaining_s: float, *, deadline_s: float, spares: Sequence[HostView]) -> Verdict:
    """An emergency checkpoint at a step ahead of all ranks, `deadline_s` for it and for the slow tiers."""
    incident, generation = case.incident, case.job.generation
    assert incident is not None and generation is not None, "the rule that calls this has looked"
    step = step_ahead(case, generation)
    deadline_s = min(case.settings.action_deadline_s, deadline_s)
    return Verdict(
        DecisionKind.EMERGENCY_CHECKPOINT,
        f"{incident.message} {remaining_s:.1f} s are left: every rank saves step {step} and parks, "
        + (f"then {spares[0].host_id} takes over." if spares else "then a spare is waited for."),
        plan=plans.save_plan(case, generation, step, deadline_s=deadline_s, spares=spares),
        evidence={
            "host": incident.host_id,
            "remaining_s": round(remaining_s, 3),
            "step": step,
            "newest_step": max(rank.step for rank in generation.ranks),
        },
    )


def wait_for_a_spare(case: Case) -> Verdict | None:
    """Until a host appears, training goes on where it is."""
    incident, generation = case.incident, case.job.generation
    if incident is None or generation is None:
        return None
    if all(part.host_id != incident.host_id for part in generation.hosts):
        return None
    remaining_s = _remaining_s(case)
    last_call = case.now + remaining_s - 2.0 * case.settings.emergency_reserve_s
    return Verdict(
        DecisionKind.HOLD,
        f"{incident.message} No spare is free to take its ranks: waiting for a host.",
        evidence={"host": incident.host_id, "remaining_s": round(remaining_s, 3)},
        holding_for="a spare host",
        hold_until=min(case.now + _ASK_AGAIN_S, last_call) if last_call > case.now else case.now + _ASK_AGAIN_S,
    )


def _remaining_s(case: Case) -> float:
    host = case.round.hosts.get(case.incident.host_id) if case.incident else None
    return host.preempt_deadline_at - case.now if host else 0.0


def _acts_on_a_notice(cause: str, state: IncidentState) -> bool:
    return cause in DEPARTURES and state in (IncidentState.ACTING, IncidentState.VERIFYING)
