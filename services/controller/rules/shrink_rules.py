"""Rules for a job that may go on with fewer hosts than it asked for (`min_nodes`), when no spare replaces a lost one.

Holding costs the work of all ranks until a host is free. Going on costs a restart now, another one to grow again, and
meanwhile only the work of the missing ranks. So a job waits about as long as those restarts take (`shrink_after_s`).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from flyball.contracts.cluster import HostRanks
from flyball.contracts.decisions import DecisionKind
from services.controller.round import expected_cost, fewer_hosts, plans
from services.controller.round.round import Case
from services.controller.round.verdict import Verdict
from services.controller.rules import preemption_rules, recovery_rules
from services.controller.rules.step_ahead import is_stepping
from services.rules.wording import counted, kept, listed

_ASK_AGAIN_S = 1.0


def hold_what_does_not_fit(case: Case) -> Verdict | None:
    """If a smaller world runs out of memory before it makes progress, wait for a host: its ranks hold larger shares of
    what is sharded, and another restart of as few would end alike."""
    incident, generation = case.this_incident, case.this_generation
    hosts = len(generation.hosts)
    if fewer_hosts.too_few(case, generation) < hosts or fewer_hosts.joining(case):
        return None
    return Verdict(
        DecisionKind.HOLD,
        f"{incident.message} {counted(hosts, 'host')} have too little memory for job {case.job.spec.job}, which asked "
        f"for {case.job.spec.asked_nnodes}: it waits for another host.",
        evidence={"hosts": hosts, "asked": case.job.spec.asked_nnodes},
        holding_for="a host, since fewer have too little memory",
        hold_until=case.now + _ASK_AGAIN_S,
    )


def go_on_with_fewer_hosts(case: Case) -> Verdict | None:
    """If the job allows it and no spare came in time, go on with the hosts that are left. Hosts that are about to be
    taken away are left too, if enough others remain."""
    generation = case.this_generation
    lost, leaving = recovery_rules.lost_and_leaving(case)
    if not lost or case.now < fewer_hosts.due_at(case):
        return None
    free = case.well_hosts
    hosts = fewer_hosts.without(case, generation, lost, free)
    for host_id in leaving:
        if not recovery_rules.has_only_a_warning(case.round.hosts[host_id]):
            fewer = fewer_hosts.without(case, generation, [*lost, host_id], free)
            lost, hosts = ([*lost, host_id], fewer) if fewer is not None else (lost, hosts)
    return None if hosts is None else _shrink(case, lost, hosts)


def save_before_the_job_shrinks(case: Case) -> Verdict | None:
    """Let every rank save the same step before a host is left that no spare replaces, so that nothing is lost."""
    generation = case.job.generation
    if generation is None or preemption_rules.last_action(case) is not None or not is_stepping(case, generation):
        return None
    if not preemption_rules.may_shrink(case):
        return None
    return preemption_rules.save_and_park(case, inf, deadline_s=inf, spares=(), follows="then they go on without it.")


def leave_without_a_spare(case: Case) -> Verdict | None:
    """Go on without a host that must be left, if the job allows it and no spare came in time: at a notice, just before
    the host is gone; for a condition, only if it is critical."""
    host_id = case.this_incident.host_id
    hosts = fewer_hosts.without(case, case.this_generation, [host_id])
    return _shrink(case, [host_id], hosts) if hosts is not None and preemption_rules.may_shrink(case) else None


# --- parts of the rules ----------------------------------------------------------------------------------------------


def _shrink(case: Case, lost: Sequence[str], hosts: tuple[HostRanks, ...]) -> Verdict:
    incident, generation = case.this_incident, case.this_generation
    plan = plans.restart_plan(case, generation, hosts, kind=DecisionKind.SHRINK, incident=incident)
    ranks, before = plan.spec.world_size, case.job.spec.world_size
    costs = expected_cost.of_fewer(case, incident, before - ranks)
    names = [part.host_id for part in hosts]
    return Verdict(
        DecisionKind.SHRINK,
        f"{incident.message} {recovery_rules.last_failure(case)}No spare came for {listed(lost)}: generation "
        f"{generation.generation + 1} goes on with {len(hosts)} of {counted(plan.spec.asked_nnodes, 'host')} "
        f"({listed(names)}) and {counted(ranks, 'rank')} in place of {before}. {costs.in_words}",
        plan=plan,
        evidence={
            **recovery_rules.evidence_of(case, generation),
            "from": kept(lost),
            "hosts": kept(names),
            "ranks": ranks,
            "ranks_before": before,
            **costs.evidence,
        },
    )
