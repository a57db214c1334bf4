"""Rules for a job that runs on fewer hosts than it asked for, when hosts are free again.

The job trains meanwhile. To grow is a planned move: all ranks save a named step and park, and a larger generation goes
on from it, so no step is lost. It costs a restart, so it is done only if the further ranks are expected to gain more.
"""

from __future__ import annotations

from math import inf

import msgspec

from flyball.contracts.decisions import DecisionKind, Incident
from services.controller.round import expected_cost, fewer_hosts, plans
from services.controller.round.diagnosis import ROOM_TO_GROW, STRAGGLER, SUPERSEDED_WORKERS, newest_common_step
from services.controller.round.round import Case, Round
from services.controller.round.verdict import Verdict
from services.controller.round.view import GenerationView, HostView, JobView, PastFailure
from services.controller.rules import preemption_rules, recovery_rules
from services.rules.incident_states import IncidentEvent
from services.rules.wording import kept, listed

MAX_COOLDOWN_S = 86_400.0

_NOT_WORTH_IT = "not_worth_it"
_NOT_SAVED = "not_saved"  # the message is when
_NOT_IN_THE_WAY = frozenset({STRAGGLER, SUPERSEDED_WORKERS})


def find(round_: Round, job: JobView, generation: GenerationView) -> None:
    """Open an incident when hosts are free for a job that runs on fewer than it asked for, once they have been well for
    a while, and not soon after the last start. A save that failed for it is tried again after the cooldown, in the
    same generation after twice as long each time; what was not worth a restart is not weighed again before its numbers
    change."""
    case, name, settings = Case(round_, job), job.spec.job, round_.settings_of(job.spec)
    if job.spec.nnodes >= job.spec.asked_nnodes or not settings.grow or not job.spec.checkpoint.saves:
        return
    if generation.started_at == 0.0 or any(round_.open_actions(name)):
        return
    if any(incident.cause not in _NOT_IN_THE_WAY for incident in round_.open_incidents(name)):
        return
    free = fewer_hosts.joining(case)
    if not free or _not_worth_it(case, generation) in job.failures:
        return
    first_at = min(host.since for host in free) + settings.grow_after_s
    due_at = max(_again_at(job, generation, settings.grow_cooldown_s), first_at)
    if round_.now < due_at:
        round_.wake(due_at)
        return
    named = listed([host.host_id for host in _joining(case)])
    round_.open_incident(
        job=name,
        host_id="",
        cause=ROOM_TO_GROW,
        message=f"Job {name} runs on {len(generation.hosts)} of the {job.spec.asked_nnodes} hosts that it asked for, "
        f"and has room to grow: {named}.",
        generation=generation.generation,
        failed_step=newest_common_step(generation),
        observed_at=round_.now,
    )


def follow(round_: Round, job: JobView, incident: Incident) -> None:
    """Close an undecided incident if another generation has begun, no host is free any more, or the job is not to grow
    any more: not before ranks that parked for it are released."""
    case, generation = Case(round_, job, incident), job.generation
    if generation is None:
        return
    is_given_up = incident.decisions_made >= case.settings.max_decisions_per_incident
    if is_given_up or preemption_rules.last_action(case) is not None:
        return
    if generation.generation != incident.generation or not _joining(case) or not case.settings.grow:
        round_.advance(incident, IncidentEvent.CLEARED)


def restart_on_more_hosts(case: Case) -> Verdict | None:
    """Restart on further hosts that are free, if the job runs on fewer than it asked for: it costs no restart of its
    own."""
    joining = fewer_hosts.joining(case)
    return _grow(case, joining) if joining else None


def give_up_after_a_failed_save(case: Case) -> Verdict | None:
    """If the ranks could not save, or too many actions have not ended it, let them train on as they are. The job's
    record says when: it is tried again later."""
    incident, limit = case.this_incident, case.settings.max_decisions_per_incident
    has_failed = preemption_rules.save_failed(case)
    if not has_failed and incident.decisions_made < limit:
        return None
    plan = preemption_rules.plan_for_those_that_stand(case)
    why = "The ranks could not save a step for it" if has_failed else f"{limit} actions have not ended it"
    return Verdict(
        DecisionKind.HOLD if plan is None else plan.kind,
        f"{incident.message} {why}: the job trains on as it is. It takes the hosts with its next restart, or when it "
        "can save a step for it later.",
        plan=plan,
        evidence={"decisions": incident.decisions_made},
        gives_up=True,
        notes=PastFailure(case.this_generation.generation, ROOM_TO_GROW, _NOT_SAVED, f"{case.now:.0f}", -1),
    )


def let_the_ranks_go(case: Case) -> Verdict | None:
    """Release parked ranks, to train on as they are, if the free hosts are gone."""
    if not preemption_rules.stand(case) or _joining(case):
        return None
    return preemption_rules.resume(case, case.this_generation, "No host is free any more")


def grow_onto_free_hosts(case: Case) -> Verdict | None:
    """Start a larger generation once all ranks have saved."""
    return _grow(case, _joining(case)) if preemption_rules.stand(case) else None


def stay_if_growing_costs_more(case: Case) -> Verdict | None:
    """End the matter if the restart is expected to cost more than the further ranks gain. Other numbers (more free
    hosts, another policy, the next generation) begin it anew."""
    gain = _gain(case)
    if gain.gain_gpu_s > gain.cost_gpu_s:
        return None
    return Verdict(
        DecisionKind.HOLD,
        f"{case.this_incident.message} That is not worth a restart: {gain.in_words}.",
        evidence=gain.evidence,
        settles=_not_worth_it(case, case.this_generation),
    )


def wait_until_all_ranks_step(case: Case) -> Verdict | None:
    """Wait for starting ranks, which cannot save a step yet."""
    return preemption_rules.wait_until_all_ranks_step(case, "the job grows when they do.")


def save_before_the_world_grows(case: Case) -> Verdict | None:
    """Let every rank save the same step, named here, and park, so that nothing is lost."""
    joining, gain = _joining(case), _gain(case)
    if not joining or preemption_rules.last_action(case) is not None:
        return None
    named = listed([host.host_id for host in joining])
    follows = f"then they go on together with {named}. It is worth it: {gain.in_words}."
    saved = preemption_rules.save_and_park(case, inf, deadline_s=inf, spares=joining, follows=follows)
    return msgspec.structs.replace(saved, evidence={**saved.evidence, **gain.evidence})


# --- parts of the rules ----------------------------------------------------------------------------------------------


def _joining(case: Case) -> list[HostView]:
    return fewer_hosts.joining(case, well_for_s=case.settings.grow_after_s)


def _gain(case: Case) -> expected_cost.MoreHosts:
    return expected_cost.of_more(case, _joining(case))


def _again_at(job: JobView, generation: GenerationView, cooldown_s: float) -> float:
    """From when on the job may grow: after its last start, and after each save for it that failed since."""
    of_this = (generation.generation, ROOM_TO_GROW, _NOT_SAVED)
    failed_at = [float(f.error_message) for f in job.failures if (f.generation, f.cause, f.error_kind) == of_this]
    longer: float = cooldown_s * 2 ** len(failed_at)
    return max([generation.started_at, *failed_at]) + min(longer, MAX_COOLDOWN_S)


def _not_worth_it(case: Case, generation: GenerationView) -> PastFailure:
    """The entry in the job's record for the present numbers, without past recoveries: the one that began this
    generation is known only once it is resolved."""
    job = msgspec.structs.replace(case.job, recoveries=())
    gain = _gain(msgspec.structs.replace(case, job=job))
    numbers = f"gain {gain.gain_gpu_s:g}, cost {gain.cost_gpu_s:g}"
    return PastFailure(generation.generation, ROOM_TO_GROW, _NOT_WORTH_IT, numbers, -1)


def _grow(case: Case, joining: list[HostView]) -> Verdict:
    incident, generation = case.this_incident, case.this_generation
    hosts = fewer_hosts.with_more(case, generation, joining)
    plan = plans.restart_plan(case, generation, hosts, kind=DecisionKind.GROW, incident=incident)
    names = [host.host_id for host in joining]
    return Verdict(
        DecisionKind.GROW,
        f"{incident.message} {recovery_rules.last_failure(case)}Generation {generation.generation + 1} starts with "
        f"{listed(names)} too: on {len(hosts)} of {plan.spec.asked_nnodes} hosts, with {plan.spec.world_size} ranks in "
        f"place of {case.job.spec.world_size}.",
        plan=plan,
        evidence={
            **recovery_rules.evidence_of(case, generation),
            "to": kept(names),
            "ranks": plan.spec.world_size,
            "ranks_before": case.job.spec.world_size,
        },
    )
