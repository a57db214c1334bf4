"""Rules for a generation that failed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

import msgspec

from flyball.contracts.checkpoints import Lineage
from flyball.contracts.cluster import HostState, JobState
from flyball.contracts.decisions import ActionState, DecisionKind
from flyball.contracts.error_classes import gpu_memory_in_use
from services.controller.round import diagnosis, fewer_hosts, guardrails, plans
from services.controller.round.choices import spare_choice
from services.controller.round.diagnosis import DRAIN_REQUESTED, RESTORE_FAILED, WORKER_EXCEPTION
from services.controller.round.round import Case
from services.controller.round.verdict import Evidence, Verdict
from services.controller.round.view import ActionView, GenerationView, HostView, PastFailure
from services.rules import hang_findings
from services.rules.wording import explained, in_words, kept, listed, sentence

COPIES_STAY = "All copies stay where they are: the same command tries them again; with --fresh it starts over."
_ASK_AGAIN_S = 1.0
_LEAVING = (HostState.CORDONED, HostState.IN_REPAIR, HostState.DEGRADED)


def fail_after_too_many_decisions(case: Case) -> Verdict | None:
    """Fail the job if this many actions about one fault have not ended the incident, or four times as many about
    faults that have nothing to do with each other, without a new step in between: a person must look at it."""
    incident = case.this_incident
    if guardrails.decisions_left(incident, case.settings) > 0:
        return None
    made, limit = incident.decisions_made, case.settings.max_decisions_per_incident
    why = f"{limit} actions have not ended it."
    if made < limit:
        made += incident.decisions_before
        why = f"{made} actions about this fault and those before it have not brought the job to a new step."
    if (action := _last_action(case)) is not None and is_retry(case):
        why = f"{why} The last one: {sentence(action.message or f'{action.action_id} {in_words(action.state)}')}"
    if incident.cause == RESTORE_FAILED:
        why = f"{why} {COPIES_STAY}"
    return fail(case, f"{incident.message} {why}", {"decisions": made})


def leave_the_host_of_an_identical_exception(case: Case) -> Verdict | None:
    """Move away from a host on which the same exception came again and on no other, before the job is blamed."""
    repeated = _repeated(case)
    if repeated is None:
        return None
    failure, times = repeated
    hosts = guardrails.hosts_alike(failure, case.job.failures, _records(case.this_generation))
    placed = {part.host_id for part in case.this_generation.hosts}
    if len(hosts) != 1 or not hosts <= placed:
        return None
    verdict = move(case, tuple(hosts), avoid=hosts)
    if verdict is None:
        return None
    reason = f"{verdict.reason} This failure ended {times} generations on {listed(sorted(hosts))}, and none elsewhere."
    return msgspec.structs.replace(verdict, reason=reason)


def fail_on_identical_exception(case: Case) -> Verdict | None:
    """Fail the job if the same exception comes at the same step again: a bug, not a fault of a machine, unless it came
    on broken hosts only."""
    repeated = _repeated(case)
    if repeated is None:
        return None
    failure, times = repeated
    hosts = guardrails.hosts_alike(failure, case.job.failures, _records(case.this_generation))
    if all(host_id in case.round.hosts and case.round.hosts[host_id].is_broken for host_id in hosts):
        return None
    where = f"after step {failure.step}" if failure.step >= 0 else "before the first step"
    memory = _gpu_memory(case.this_generation)
    return fail(
        case,
        f"{case.this_incident.message} The same failure {where} ended {times} generations: another restart would meet "
        f"it again.{f' GPU memory in use: {memory}.' if memory else ''}",
        {"times": times, "error": failure.error_kind, "step": failure.step},
    )


def back_off_after_a_failed_action(case: Case) -> Verdict | None:
    """Wait between failed actions, longer each time."""
    incident, action = case.this_incident, _last_action(case)
    if action is None or not is_retry(case):
        return None
    until = incident.since + guardrails.back_off_s(incident.decisions_made)
    if case.now >= until:
        return None
    return Verdict(
        DecisionKind.HOLD,
        f"{_ended(action)} The next attempt, number {incident.decisions_made + 1}, "
        f"is made in {until - case.now:.1f} s.",
        evidence={"action": action.action_id, "decisions": incident.decisions_made},
        holding_for=f"some time to pass after {action.action_id}",
        hold_until=until,
    )


def fail_when_restarts_are_used_up(case: Case) -> Verdict | None:
    """Fail the job if its workers failed too often without progress in between (--max-restarts)."""
    incident, generation, limit = case.this_incident, case.this_generation, case.job.spec.max_restarts
    if incident.cause not in guardrails.WORKER_CAUSES:
        return None
    if guardrails.budget_after(generation, incident, case.settings, case.job.failures).used <= limit:
        return None
    match limit:
        case 0:
            why = "--max-restarts 0 allows no restart."
        case 1:
            why = "The one restart that --max-restarts allows is used up, without progress since."
        case _:
            why = f"All {limit} restarts that --max-restarts allows are used up, without progress in between."
    return fail(case, f"{incident.message} {why}", {})


def migrate_to_spare(case: Case) -> Verdict | None:
    """Move the ranks of hosts that are lost, or about to be, to spares; all other ranks keep their hosts."""
    return _migrate(case)


def restart_on_a_broken_host(case: Case) -> Verdict | None:
    """If no spare came within the patience with starts, try once more on a host that is reachable, although it has a
    critical condition: the report may be wrong. If its ranks fail there again, it was right: wait for a spare."""
    lost, _ = lost_and_leaving(case)
    waited_s = case.now - case.this_incident.since
    if not lost or any(case.round.is_silent(host_id) for host_id in lost) or waited_s < case.settings.start_patience_s:
        return None
    failed = Counter(failure.host_id for failure in guardrails.failures_within(case.this_incident, case.job))
    if any(failed[host_id] > 1 for host_id in lost):
        return None
    broken = f"{listed(lost)} {'has a critical condition' if len(lost) == 1 else 'have critical conditions'}"
    return restart(case, f"{broken}, but no spare came within {waited_s:.0f} s: the job starts there once more.")


def wait_for_a_spare(case: Case) -> Verdict | None:
    """Wait for a host if there are too few."""
    lost, _ = lost_and_leaving(case)
    if not lost:
        return None
    free = case.free_hosts
    return Verdict(
        DecisionKind.HOLD,
        f"{case.this_incident.message} No spare: {len(lost)} host{'' if len(lost) == 1 else 's'} must be replaced "
        f"({listed(lost)}), and {len(free) or 'none'} {'is' if len(free) <= 1 else 'are'} free: waiting for a host."
        f"{fewer_hosts.in_words(case, lost)}",
        evidence={"lost": kept(lost), "free": kept([host.host_id for host in free])},
        holding_for="a spare host",
        hold_until=case.now + _ASK_AGAIN_S,
    )


def return_to_a_host_that_was_left(case: Case) -> Verdict | None:
    """Move ranks back to a host that was left although it can train, if their spare is lost before they train there
    and no other is free. Their workers have not been stopped on it yet: the restart does that first."""
    lost, leaving = lost_and_leaving(case)
    job = case.job.spec.job
    strays = (host for host in case.round.hosts.values() if host.stale_jobs.keys() == {job}) if lost else ()
    left = case.round.free_hosts(case.job.spec, [msgspec.structs.replace(host, stale_jobs={}) for host in strays])
    moved = _move(case, lost, leaving, [*case.free_hosts, *left]) if left else None
    if moved is None or moved.plan is None or moved.plan.next is None:
        return None
    names = {host.host_id for host in left}.intersection(part.host_id for part in moved.plan.next.hosts)
    return moved if names.issubset(moved.plan.stop_hosts) else None


def take_a_drained_host_back(case: Case) -> Verdict | None:
    """Move ranks back to a drained host if their spare is lost before they train there: the drain is refused. So is one
    that was requested only then, as long as they have not been stopped there."""
    lost, leaving = lost_and_leaving(case)
    if not lost:
        return None
    job, free = case.job.spec.job, case.free_hosts
    present = {part.host_id for part in case.this_generation.hosts}
    drained = {i.host_id for i in case.round.open_incidents(job) if i.cause == DRAIN_REQUESTED}
    for host in case.round.hosts.values():
        is_ours = host.host_id in drained or job in host.stale_jobs
        if not (is_ours and host.is_drained) or host.host_id in present:
            continue
        if case.round.is_silent(host.host_id) or host.preempt_deadline_at or host.job:
            continue
        moved = _move(case, lost, leaving, [*free, host])
        if moved is not None and moved.plan is not None and host.host_id in moved.plan.stop_hosts:
            reason = f"{moved.reason} The drain of {host.host_id} is refused: there is no other host."
            return msgspec.structs.replace(moved, reason=reason, refuses_drain_of=host.host_id)
    return None


def restart_in_place(case: Case) -> Verdict:
    """Restart on the same hosts, if they are healthy, from the newest recovery point."""
    following = case.this_generation.generation + 1
    return restart(case, f"No host has to be replaced: generation {following} starts in place.")


# --- parts of the rules ----------------------------------------------------------------------------------------------


def _repeated(case: Case) -> tuple[PastFailure, int] | None:
    """The exception that ended the generation, and how many it ended, if these are too many."""
    incident = case.this_incident
    if incident.cause != WORKER_EXCEPTION:
        return None
    own = [f for f in case.job.failures if (f.generation, f.cause) == (incident.generation, incident.cause)]
    if not own or not own[-1].error_kind:
        return None
    times = guardrails.times_seen(own[-1], case.job.failures)
    return (own[-1], times) if times >= case.settings.identical_exception_limit else None


def _records(generation: GenerationView) -> list[PastFailure]:
    found = (diagnosis.exit_failure(rank, generation) for rank in generation.ranks)
    return [failure.record for failure in found if failure is not None]


def restart(case: Case, what: str, *, lineage: Lineage | None = None) -> Verdict:
    """Restart on the current hosts, or on spares where hosts are lost or leaving."""
    moved = _migrate(case, lineage=lineage)
    if moved is not None:
        return moved
    incident, generation = case.this_incident, case.this_generation
    hosts = spare_choice.replace(generation.hosts, (), (), case.round.hosts) or generation.hosts
    plan = plans.restart_plan(
        case, generation, hosts, kind=DecisionKind.RESTART_IN_PLACE, incident=incident, lineage=lineage
    )
    return Verdict(
        DecisionKind.RESTART_IN_PLACE,
        f"{incident.message} {last_failure(case)}{what} {_budget(case, generation)}",
        plan=plan,
        evidence=evidence_of(case, generation),
    )


def move(case: Case, leave: Sequence[str], *, avoid: Collection[str], given_up: Collection[str] = ()) -> Verdict | None:
    """Move the ranks of all these hosts to spares outside `avoid`; None if there are too few. `given_up`: hosts among
    them that get no commands any more."""
    lost, leaving = lost_and_leaving(case)
    free = [host for host in case.well_hosts if host.host_id not in avoid]
    first = [host_id for host_id in leave if host_id not in lost]
    if len(free) < len(lost) + len(first):
        return None
    return _move(case, [*lost, *first], [h for h in leaving if h not in first], free, given_up=given_up)


def _migrate(case: Case, *, lineage: Lineage | None = None) -> Verdict | None:
    return _move(case, *lost_and_leaving(case), case.free_hosts, lineage=lineage)


def _move(
    case: Case,
    lost: list[str],
    leaving: list[str],
    free: list[HostView],
    *,
    lineage: Lineage | None = None,
    given_up: Collection[str] = (),
) -> Verdict | None:
    if not lost and not leaving:
        return None
    incident, generation = case.this_incident, case.this_generation
    warned = [host_id for host_id in leaving if has_only_a_warning(case.round.hosts[host_id])]
    urgent = lost + [host_id for host_id in leaving if host_id not in warned]
    moving = urgent[: max(len(lost), len(free))]  # leaving hosts can wait, lost ones cannot
    moving += warned[: max(0, sum(not host.pressing for host in free) - len(moving))]  # to hosts without one only
    chosen = choose_spares(case, moving, free) if moving else None
    if chosen is None:
        return None
    hosts = spare_choice.moved(generation.hosts, chosen, case.round.hosts)
    kind = DecisionKind.MIGRATE_TO_SPARE
    plan = plans.restart_plan(case, generation, hosts, kind=kind, incident=incident, lineage=lineage, given_up=given_up)
    return Verdict(
        DecisionKind.MIGRATE_TO_SPARE,
        f"{incident.message} {last_failure(case)}{spare_choice.in_words(generation.hosts, chosen)}",
        plan=plan,
        evidence={
            **evidence_of(case, generation),
            "from": kept(moving),
            "to": kept([chosen[part.host_id].host.host_id for part in generation.hosts if part.host_id in chosen]),
        },
    )


def _gpu_memory(generation: GenerationView) -> str:
    """How much GPU memory each rank had when it found too little, as far as their errors say."""
    found = [
        f"rank {rank.rank} {size}"
        for rank in generation.ranks
        if rank.exited and rank.exited.error and (size := gpu_memory_in_use(rank.exited.error.message))
    ]
    return listed(found)


def choose_spares(
    case: Case, leaving: Collection[str], free: Sequence[HostView]
) -> dict[str, spare_choice.Chosen] | None:
    """leaving host -> the best of the free hosts for its ranks; None if there are too few."""
    generation, claimed = case.this_generation, case.round.claimed_by_others(case.job.spec.job)
    return spare_choice.choose(
        generation.hosts, leaving, free, case.round.hosts, peers=generation.peers, claimed=claimed
    )


def lost_and_leaving(case: Case) -> tuple[list[str], list[str]]:
    """The current generation's hosts that are unreachable or broken, and those to leave while ranks can run there."""
    lost, leaving = [], []
    for part in case.this_generation.hosts:
        host = case.round.hosts.get(part.host_id)
        if host is None or case.round.is_silent(part.host_id) or host.is_broken:
            lost.append(part.host_id)
        elif host.is_leaving or host.state in _LEAVING:
            leaving.append(part.host_id)
    return lost, leaving


def takers(case: Case, host_id: str) -> list[HostView]:
    """The free hosts to which a host's ranks may move: for no more than a warning, only those without one."""
    host = case.round.hosts.get(host_id)
    is_warned = host is not None and has_only_a_warning(host)
    return case.well_hosts if is_warned else case.free_hosts


def has_only_a_warning(host: HostView) -> bool:
    """Whether a host is left for a warning, and for nothing else."""
    return bool(host.pressing) and not host.is_unfit and host.state not in _LEAVING


def fail(case: Case, reason: str, evidence: Evidence) -> Verdict:
    """The verdict to fail the job; `reason` in complete sentences."""
    return Verdict(
        DecisionKind.FAIL_JOB,
        reason,
        plan=plans.end_plan(case, DecisionKind.FAIL_JOB, 0.0),
        evidence={**evidence_of(case, case.job.generation), **evidence},
        job_state=JobState.FAILING,
        gives_up=True,
    )


def _budget(case: Case, generation: GenerationView) -> str:
    after = guardrails.budget_after(generation, case.this_incident, case.settings, case.job.failures)
    if after.restart_count == generation.restart_count:
        return "This burns no restart."
    why = f": {after.refilled_by} since the last failure refilled the budget" if after.refilled_by else ""
    return f"This is restart {after.used} of {case.job.spec.max_restarts}{why}."


def last_failure(case: Case) -> str:
    """The failure of the incident's last action, as a sentence; '' if it did not fail."""
    action = _last_action(case)
    if action is None or not is_retry(case):
        return ""
    return f"{_ended(action)} "


def evidence_of(case: Case, generation: GenerationView | None) -> Evidence:
    """The numbers of the failure, of the hang if one was looked at, and of the restart budget."""
    failure = case.round.diagnoses.get(case.job.spec.job)
    facts: dict[str, str | int | float | bool | None] = {}
    if failure is not None and failure.cause == case.this_incident.cause:
        facts |= failure.evidence
    looked = _last_action(case)
    if looked is not None and (seen := hang_findings.find(looked.stands)) is not None:
        facts |= seen.evidence
    if generation is not None:
        facts |= {
            "generation": generation.generation,
            "restarts": generation.restart_count,
            "restarts_used": generation.used_restarts,
        }
    return {**facts, "max_restarts": case.job.spec.max_restarts}


def _last_action(case: Case) -> ActionView | None:
    return case.round.actions.get(case.this_incident.action_id)


def is_retry(case: Case) -> bool:
    """Whether the incident's last action failed, so that its purpose is known and still wanted."""
    action = _last_action(case)
    return action is not None and action.state in (ActionState.FAILED, ActionState.TIMED_OUT)


def _ended(action: ActionView) -> str:
    return explained(f"{action.action_id} {in_words(action.state)}", action.message)
