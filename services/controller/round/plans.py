"""Builds the action plans of decisions."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import msgspec

from flyball.contracts.checkpoints import JobHistory, Lineage, Tier, with_world_sizes
from flyball.contracts.cluster import HostRanks
from flyball.contracts.decisions import ActionPlan, DecisionKind, GenerationPlan, Incident
from services.controller.round import fewer_hosts, guardrails, pace
from services.controller.round.choices.peer_choice import PeerMap, choose_peers
from services.controller.round.diagnosis import RESTORE_FAILED, newest_step_of
from services.controller.round.round import Case
from services.controller.round.view import GenerationView, HostView
from services.rules import recovery_point

STACKS_DEADLINE_S = 4.0  # for all hosts to answer, half of it for the stacks themselves
_WARM_SPARES = 2  # per job; a third would only help with a third failure within seconds
_END_TIMEOUT_S = 40.0  # beyond twice the grace, for a job's end
_LAST_FLUSH_S = 60.0  # beyond that, for the newest recovery point to reach a disk or store


def start_plan(case: Case, hosts: tuple[HostRanks, ...]) -> ActionPlan:
    """Start the job's first generation, or resume a job that had ended.

    A resumed job is first stopped on all hosts that may have workers or copies of it. They report their copies, from
    which the restore step is computed.
    """
    spec, before = case.job.spec.on(len(hosts)), case.job.before
    lineage = before.lineage if before is not None else ()
    if len(hosts) != case.job.spec.nnodes:
        lineage = with_world_sizes(lineage, case.job.spec.world_size)
    reachable: tuple[str, ...] = ()
    unreachable: tuple[str, ...] = ()
    history: JobHistory | None = None
    if before is not None:
        placed = tuple(part.host_id for part in hosts)
        reachable, unreachable = _involved(case, before, (*placed, *_holders(case)))
        history = JobHistory(spec.checkpoint, lineage, case.job.run)
    return ActionPlan(
        kind=DecisionKind.START_JOB,
        job=spec.job,
        spec=spec,
        generation=before.generation if before else 0,
        stop_hosts=reachable,
        unreachable_hosts=unreachable,
        next=GenerationPlan(
            job=spec.job,
            generation=before.generation + 1 if before else 1,
            parent=before.generation if before and lineage else None,
            hosts=hosts,
            peers=_peers(case, hosts),
            parent_lineage=lineage,
            restart_count=0,
            restarts_used=0,
            known_step=known_step(case, lineage, reachable) if lineage else -1,
            master_port=_master_port(case, hosts),
            run=case.job.run,
        ),
        deadline_s=case.settings.action_deadline_s,
        warm_hosts=_warm(case, hosts),
        history=history,
    )


def restart_plan(
    case: Case,
    generation: GenerationView,
    hosts: tuple[HostRanks, ...],
    *,
    kind: DecisionKind,
    incident: Incident,
    lineage: Lineage | None = None,
    given_up: Collection[str] = (),
) -> ActionPlan:
    """Stop the running workers and continue in a new generation on `hosts`.

    `lineage` replaces the present history if only part of it counts. Hosts in `given_up` get no commands.
    """
    spec = case.job.spec.on(len(hosts))
    history = clean_history(case, generation, incident) if lineage is None else lineage
    if len(hosts) != len(generation.hosts):
        history = with_world_sizes(history, case.job.spec.world_size)
    is_ancestor = generation.started_at > 0.0 and any(entry.generation == generation.generation for entry in history)
    reachable, unreachable = _involved(case, generation, given_up=given_up)
    left = _others_that_hold(case, (*reachable, *unreachable))
    if left and known_step(case, history, (*reachable, *left)) > known_step(case, history, reachable):
        reachable, unreachable = _involved(case, generation, left, given_up=given_up)
    before = {part.host_id for part in generation.hosts}
    budget = guardrails.budget_after(generation, incident, case.settings, case.job.failures)
    joining = tuple(part.host_id for part in hosts if part.host_id not in before)
    return ActionPlan(
        kind=kind,
        job=spec.job,
        spec=spec,
        generation=generation.generation,
        stop_hosts=reachable,
        unreachable_hosts=unreachable,
        next=GenerationPlan(
            job=spec.job,
            generation=generation.generation + 1,
            parent=generation.generation if is_ancestor else generation.parent,
            hosts=hosts,
            peers=_peers(case, hosts, generation),
            parent_lineage=history,
            restart_count=budget.restart_count,
            restarts_used=budget.used,
            furthest_step=budget.furthest_step,
            known_step=known_step(case, history, reachable),
            master_port=_master_port(case, hosts),
            run=case.job.run,
            too_few_hosts=fewer_hosts.too_few(case, generation),
            step_s=_step_s(case, generation, history),
        ),
        deadline_s=case.settings.action_deadline_s,
        warm_hosts=(*joining, *_warm(case, hosts)),
    )


def save_plan(
    case: Case, generation: GenerationView, step: int, *, deadline_s: float, spares: Sequence[HostView]
) -> ActionPlan:
    """Make every rank save at `step` and park, to move to these spares; meanwhile, warm them up."""
    return ActionPlan(
        kind=DecisionKind.EMERGENCY_CHECKPOINT,
        job=case.job.spec.job,
        spec=case.job.spec,
        generation=generation.generation,
        stop_hosts=tuple(part.host_id for part in generation.hosts),
        emergency_step=step,
        deadline_s=deadline_s,
        warm_hosts=tuple(host.host_id for host in spares[:_WARM_SPARES]),
        claimed_hosts=tuple(host.host_id for host in spares),
    )


def stacks_plan(case: Case, generation: GenerationView) -> ActionPlan:
    """See where the ranks stand, on all hosts that can be asked."""
    asked = (part.host_id for part in generation.hosts)
    return ActionPlan(
        kind=DecisionKind.TAKE_STACKS,
        job=case.job.spec.job,
        spec=case.job.spec,
        generation=generation.generation,
        stop_hosts=tuple(host_id for host_id in asked if not case.round.is_silent(host_id)),
        deadline_s=STACKS_DEADLINE_S,
    )


def resume_plan(case: Case, generation: GenerationView) -> ActionPlan:
    """Release ranks that are parked at an emergency step. Steps beyond `emergency_step`, their newest, prove that they
    train again."""
    return ActionPlan(
        kind=DecisionKind.RESUME,
        job=case.job.spec.job,
        spec=case.job.spec,
        generation=generation.generation,
        stop_hosts=tuple(part.host_id for part in generation.hosts),
        emergency_step=max((rank.step for rank in generation.ranks), default=-1),
        deadline_s=case.settings.action_deadline_s,
    )


def end_plan(case: Case, kind: DecisionKind, grace_s: float, *, last_step: int = -1) -> ActionPlan:
    """End the job on every host that has workers of it, or copies from an earlier placement.

    `last_step`: the step that all ranks save first, -1 for none.
    """
    spec = case.job.spec
    generation = case.job.generation
    reachable, unreachable = _involved(case, generation, _holders(case)) if generation else ((), ())
    return ActionPlan(
        kind=kind,
        job=spec.job,
        spec=spec,
        generation=generation.generation if generation else 0,
        stop_hosts=reachable,
        unreachable_hosts=unreachable,
        emergency_step=last_step,
        deadline_s=2.0 * grace_s + _END_TIMEOUT_S + (_LAST_FLUSH_S if spec.checkpoint.is_durable else 0.0),
        grace_s=grace_s,
        history=JobHistory(spec.checkpoint, generation.lineage, case.job.run) if generation else None,
        lacks_ranks=any(part.host_id in unreachable for part in generation.hosts) if generation else False,
        keep_memory=kind is DecisionKind.FAIL_JOB
        and case.incident is not None
        and case.incident.cause == RESTORE_FAILED,
    )


def clean_plan(case: Case, host_id: str, generation: int) -> ActionPlan:
    """Stop workers of a superseded generation that still run on a host. If the job ended, free its slots too."""
    return ActionPlan(
        kind=DecisionKind.STOP_JOB if case.job.state.ended else DecisionKind.CORDON,
        job=case.job.spec.job,
        spec=case.job.spec,
        generation=generation,
        stop_hosts=(host_id,),
        deadline_s=case.settings.action_deadline_s,
    )


def _holders(case: Case) -> tuple[str, ...]:
    """Return hosts that last reported copies of the job."""
    job = case.job.spec.job
    return tuple(copy.host_id for copy in case.round.view.copies if copy.job == job and copy.host_id)


def _others_that_hold(case: Case, involved: Collection[str]) -> tuple[str, ...]:
    """Return reachable hosts outside `involved` that have copies of the job."""
    names = dict.fromkeys(_holders(case)).keys() - frozenset(involved)
    hosts = case.round.hosts
    return tuple(sorted(n for n in names if not case.round.is_silent(n) and not hosts[n].left_at))


def _involved(
    case: Case, generation: GenerationView, others: Collection[str] = (), *, given_up: Collection[str] = ()
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return (reachable, unreachable) hosts that may have workers of the job, plus `others`.

    Includes the generation's hosts, and those of the view's actions, which may have left older workers behind.
    """
    names = [*(part.host_id for part in generation.hosts), *others]
    for action in case.round.actions.values():
        plan = action.plan
        if plan.job == case.job.spec.job and plan.kind is not DecisionKind.CORDON:
            names += plan.stop_hosts
            names += plan.unreachable_hosts
    unique = tuple(dict.fromkeys(names))
    silent = {host_id: host_id in given_up or case.round.is_silent(host_id) for host_id in unique}
    return tuple(h for h, is_silent in silent.items() if not is_silent), tuple(h for h in unique if silent[h])


def _history(generation: GenerationView) -> Lineage:
    """Return the history that a restart continues.

    A generation without steps of its own cuts nothing off: it restored the newest step available then, and hosts with
    newer copies may be back. It may still have made steps, since reports wait while the bus is away. Its own entry in
    the lineage says from which step on they would count.
    """
    restored = -1 if generation.restore_step is None else generation.restore_step
    has_stepped = any(newest_step_of(rank, generation) > restored for rank in generation.ranks)
    if has_stepped or not generation.parent_lineage:
        return generation.lineage
    own = (entry for entry in generation.lineage if entry.generation == generation.generation)
    return (*generation.parent_lineage, *(msgspec.structs.replace(e, after_step=restored) for e in own))


def clean_history(case: Case, generation: GenerationView, incident: Incident) -> Lineage:
    """Return the history that a restart continues, without the steps that a known harm spoilt.

    All steps count if no recovery point is older than the harm, or if it came back after such a restart.
    """
    history, harm = _history(generation), incident.harm
    if harm is None or incident.generation != generation.generation or guardrails.returns(harm, incident, case.job):
        return history
    clean = recovery_point.before_harm(history, harm)
    hosts = _involved(case, generation)[0]
    return clean if known_step(case, clean, (*hosts, *_others_that_hold(case, hosts))) >= 0 else history


def loses_without(case: Case, generation: GenerationView, host_ids: Collection[str]) -> bool:
    """Whether the newest recovery point is on these hosts alone."""
    asked, _ = _involved(case, generation)
    others = [host_id for host_id in asked if host_id not in host_ids]
    return known_step(case, generation.lineage, others) < known_step(case, generation.lineage, asked)


def known_step(case: Case, lineage: Lineage, asked: Collection[str]) -> int:
    """Return the recovery point by the reported copies of the `asked` hosts and the persistent tier; -1 if none."""
    asked = frozenset(asked)
    copies = [
        copy
        for copy in case.round.view.copies
        if copy.job == case.job.spec.job and (copy.tier is Tier.PERSISTENT or copy.host_id in asked)
    ]
    step = recovery_point.newest_step(copies, lineage, case.job.spec.world_size)
    return -1 if step is None else step


def _step_s(case: Case, generation: GenerationView, history: Lineage) -> float:
    """How long a step took until an adoption, for the generations after it: the database does not know how long the job
    had run before, and would take its steps for as short as the time since. 0.0: it knows."""
    if generation.step_s > 0.0 or generation.ran_before_s == 0.0:
        return generation.step_s
    newest = max(case.job.newest_step, known_step(case, history, _holders(case)))
    return pace.step_duration_s(case, newest) if newest >= 0 else 0.0


def _peers(case: Case, hosts: Sequence[HostRanks], before: GenerationView | None = None) -> PeerMap:
    known, spec = case.round.hosts, case.job.spec.checkpoint
    domains = {h.host_id: known[h.host_id].failure_domain if h.host_id in known else "" for h in hosts}
    if before is None:
        return choose_peers(domains, spec.replicas, spec.replication)
    places = _places(before.hosts, hosts)
    return choose_peers(domains, spec.replicas, spec.replication, before=before.peers, places=places)


def _places(before: Sequence[HostRanks], hosts: Sequence[HostRanks]) -> dict[str, str]:
    """Map each host to its place in the previous generation: its own, or that of the lost host whose ranks it has."""
    stayed = {h.host_id for h in hosts} & {h.host_id for h in before}
    lost = {h.ranks: h.host_id for h in before if h.host_id not in stayed}
    taken = {h.host_id: lost[h.ranks] for h in hosts if h.host_id not in stayed and h.ranks in lost}
    return {host_id: host_id for host_id in stayed} | taken


def _master_port(case: Case, hosts: Sequence[HostRanks]) -> int:
    master = next(part.host_id for part in hosts if 0 in part.ranks)
    host = case.round.hosts.get(master)
    return host.free_port if host else 0


def _warm(case: Case, hosts: Sequence[HostRanks]) -> tuple[str, ...]:
    placed = {part.host_id for part in hosts}
    free = [h.host_id for h in case.free_hosts if h.host_id not in placed]
    return tuple(free[:_WARM_SPARES])
