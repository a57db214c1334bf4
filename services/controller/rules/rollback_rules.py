"""Rules for a restart that would go further back than the newest recovery point that hosts reported, or that has to,
since that point cannot be restored. If nothing older can be restored either, the job fails and keeps its copies.

If only unreachable hosts hold newer steps, wait for these hosts first, for as long as it would take to recompute
the steps. Waiting and recomputing cost the same, so the loss is at most twice the minimum, whether the hosts come back
or not (the ski rental problem). With `--never-from-scratch` the wait has no end.
"""

from __future__ import annotations

from itertools import takewhile

import msgspec

from flyball.contracts.checkpoints import Lineage, Tier, newest_point
from flyball.contracts.decisions import ActionPlan, DecisionKind, Harm
from flyball.contracts.recovery import complete_points
from services.controller.round import pace, plans
from services.controller.round.diagnosis import RESTORE_FAILED
from services.controller.round.round import Case
from services.controller.round.verdict import Verdict
from services.controller.round.view import JobView
from services.controller.rules import health_rules, recovery_rules
from services.rules import recovery_point
from services.rules.wording import kept, listed, shortened

_ASK_AGAIN_S = 1.0
_TIERS = (Tier.MEMORY, Tier.DISK, Tier.PERSISTENT)


class Rollback(msgspec.Struct, frozen=True):
    """From the newest recovery point that any host reported to the newest in reach; step -1: from scratch."""

    reported_step: int
    reach_step: int
    holders: tuple[str, ...]  # unreachable hosts with copies of the newest reported step
    away_since: float  # wall clock, of the holder that went away last
    step_s: float  # measured duration of a step
    ranks: int

    @property
    def steps(self) -> int:
        return self.reported_step - self.reach_step

    @property
    def redo_s(self) -> float:
        return self.steps * self.step_s

    @property
    def awaited(self) -> str:
        return f"{listed(self.holders)} with step {self.reported_step}"

    @property
    def evidence(self) -> dict[str, str | int | float | bool | None]:
        return {
            "told_step": self.reported_step,
            "reach_step": self.reach_step,
            "steps_given_up": self.steps,
            "holders": kept(self.holders),
            "step_s": round(self.step_s, 3),
            "redo_rank_s": round(self.redo_s * self.ranks, 1),
        }

    @property
    def given_up(self) -> str:
        """ "813 steps (94 s of training on 8 ranks)"."""
        ranks = "1 rank" if self.ranks == 1 else f"{self.ranks} ranks"
        return f"{self.steps} step{'' if self.steps == 1 else 's'} ({self.redo_s:.0f} s of training on {ranks})"

    def until(self, *, since: float, longest_s: float) -> float:
        """When the wait has cost as much as redoing the steps. It starts when both are known: that the job must
        restart, and that the holders are away."""
        return max(since, self.away_since) + min(self.redo_s, longest_s)


def fail_when_no_step_restores(case: Case) -> Verdict | None:
    """If a step could not be restored and no other is in reach, try it once more, and do not start without it. If that
    fails, too, fail the job: starting over would overwrite what is left of its copies. What an unreachable host had in
    memory may be lost with it: then wait for that host (`wait_for_newer_steps`), and start over without it."""
    incident, generation = case.this_incident, case.this_generation
    if incident.cause != RESTORE_FAILED:
        return None
    step, history = generation.restore_step, generation.parent_lineage
    if incident.generation == generation.generation and step is not None:
        history = recovery_point.before(generation.lineage, step)
    elif generation.started_at > 0.0:
        return None  # it restored nothing; one that was not started was to restore what is left of its history
    reached = [name for name in case.round.hosts if not case.round.is_silent(name)]
    if plans.known_step(case, history, reached) >= 0 or _may_be_lost_with_a_host(case):
        return None
    if generation.started_at > 0.0 and step is not None and not _is_second_attempt(case):
        if plans.known_step(case, generation.lineage, reached) >= 0:
            return None  # any restart restores it
        return _once_more(case, step)
    tried = _restores_that_failed(case.job)
    last = next(iter(tried), None)
    before = listed([f"step {at} ({why})" for at, why in tried.items() if at not in (last, step)])
    return recovery_rules.fail(
        case,
        f"{incident.message} {f'Before, it was the same with {before}. ' if before else ''}No other step is left, "
        f"and to start over would overwrite the copies. {recovery_rules.COPIES_STAY}",
        {"steps_tried": kept([str(at) for at in tried])},
    )


def restart_from_an_older_recovery_point(case: Case) -> Verdict | None:
    """Skip a step that cannot be restored: at once if there is an older recovery point. After a second failed attempt
    if both are in the store alone (a store that does not answer has no older one), or if there is no older one, and a
    host that may have had one cannot be reached."""
    incident, generation = case.this_incident, case.this_generation
    step = generation.restore_step
    if incident.cause != RESTORE_FAILED or step is None or incident.generation != generation.generation:
        return None
    older = recovery_point.before(generation.lineage, step)
    copies = [copy for copy in case.round.view.copies if copy.job == case.job.spec.job]
    newest = recovery_point.newest_step(copies, older, case.job.spec.world_size)
    failed_before = sum(
        1 for f in case.job.failures if f.cause == RESTORE_FAILED and f.generation >= generation.generation - 1
    )
    if newest is None and (failed_before < 2 or not _may_be_lost_with_a_host(case)):
        return None  # restarts do not go to the beginning past copies that are there
    if (
        newest is not None
        and not _is_second_attempt(case)
        and all(
            _is_in_store_alone(case, recovery_point.before(generation.lineage, at + 1), at) for at in (step, newest)
        )
    ):
        return None
    reach = plans.known_step(case, older, [name for name in case.round.hosts if not case.round.is_silent(name)])
    nowhere = "is complete" if newest is None else "is complete on hosts in reach"
    goal = f"step {reach}" if reach >= 0 else f"the beginning, since no older step {nowhere}"
    return recovery_rules.restart(
        case, f"Step {step} is left out: generation {generation.generation + 1} goes back to {goal}.", lineage=older
    )


def never_from_scratch(case: Case, wanted: Verdict) -> Verdict | None:
    """With --never-from-scratch, a job that has saved steps waits for a host with a copy, however long it takes."""
    plan = wanted.plan
    if plan is None or plan.next is None or case.incident is None or not plan.spec.never_from_scratch:
        return None  # a job that continues after its end: its hosts list their copies only when they are asked
    if _reach_step(case, plan) >= 0 or not _has_saved(case.job):
        return None
    found = rollback_of(case, plan)
    whom, awaited = "No host is known to hold one", "a copy of any step"
    if found is not None:
        whom = f"{listed(found.holders)} must come back, which held step {found.reported_step}"
        awaited = found.awaited
    job = case.job.spec.job
    return Verdict(
        DecisionKind.HOLD,
        f"{case.incident.message} --never-from-scratch forbids starting over, and no copy of any step is in reach. "
        f"{whom}. To start over anyway: flyball stop {job}, then the same command with --fresh.",
        evidence={"newest_step": case.job.newest_step, **(found.evidence if found is not None else {})},
        holding_for=awaited,
        hold_until=case.now + _ASK_AGAIN_S,
    )


def wait_for_newer_steps(case: Case, wanted: Verdict) -> Verdict | None:
    """Wait for hosts that hold newer steps, as long as it would take to recompute these."""
    found = rollback_of(case, wanted.plan)
    if found is None or found.redo_s < case.settings.rollback_free_s:
        return None
    since, message = (case.incident.opened_at, case.incident.message) if case.incident is not None else (0.0, "")
    until = found.until(since=since, longest_s=case.settings.rollback_wait_s)
    if case.now >= until:
        return None
    reach = f"step {found.reach_step} is the newest in reach" if found.reach_step >= 0 else "no step is in reach"
    named = listed(found.holders)
    return Verdict(
        DecisionKind.HOLD,
        f"{message} {named} held step {found.reported_step}, and {reach}: to go on without it would give up "
        f"{found.given_up}. So wait for {named} first, for up to {until - case.now:.0f} s.",
        evidence={**found.evidence, "wait_s": round(until - case.now, 1)},
        holding_for=found.awaited,
        hold_until=until,
    )


def say_what_is_given_up(case: Case, wanted: Verdict) -> Verdict:
    """Add to a restart's reason which steps it gives up, if any."""
    found = rollback_of(case, wanted.plan)
    if found is not None:
        named = listed(found.holders)
        why = f"{named}, which held step {found.reported_step}, did not come back in time"
        if found.redo_s < case.settings.rollback_free_s:
            why = f"{named} held step {found.reported_step}, and that is too little to wait for"
        reason = f"{wanted.reason} It gives up {found.given_up}: {why}."
        evidence = found.evidence
    elif (harm := _harm_left_behind(case, wanted)) is not None:
        words, step, lost = health_rules.going_back(case, case.this_incident, harm)
        reason = f"{wanted.reason} {words}"
        evidence = {"clean_step": harm.clean_step, "restart_step": step, "steps_given_up": lost}
    elif _begins_anew(case, wanted.plan):
        lacks = "copy of any step" if _has_saved(case.job) else "checkpoint"
        reason = (
            f"{wanted.reason} No {lacks} of job {case.job.spec.job} is known: unless one of the stopped hosts has one, "
            "the job starts over."
        )
        evidence = {"newest_step": case.job.newest_step}
    else:
        return wanted
    return msgspec.structs.replace(wanted, reason=reason, evidence={**wanted.evidence, **evidence})


def rollback_of(case: Case, plan: ActionPlan | None) -> Rollback | None:
    """How far a start goes back behind the newest recovery point that hosts reported; None if it does not."""
    if plan is None or plan.next is None:
        return None
    copies = [copy for copy in case.round.view.copies if copy.job == plan.job]
    history = plan.next.parent_lineage
    reported = newest_point(complete_points(copies, history, plan.spec.world_size), history)
    reach_step = _reach_step(case, plan)
    if reported is None or reported[0] <= reach_step:
        return None
    holders = {copy.host_id for copy in copies if (copy.step, copy.generation) == reported} - {"", *plan.stop_hosts}
    hosts = case.round.hosts
    away = [hosts[name].since for name in holders if name in hosts and case.round.is_silent(name)]
    return Rollback(
        reported_step=reported[0],
        reach_step=reach_step,
        holders=tuple(sorted(holders)),
        away_since=max(away, default=0.0),
        step_s=pace.step_duration_s(case, reported[0]),
        ranks=plan.spec.world_size,
    )


def _once_more(case: Case, step: int) -> Verdict:
    """Restart from this step, although no host lists it now: an engine that comes back may list it again."""
    following = case.this_generation.generation + 1
    again = recovery_rules.restart(case, f"No other step is left: generation {following} tries step {step} once more.")
    assert again.plan is not None and again.plan.next is not None, "a restart grants a generation"
    must_find = msgspec.structs.replace(again.plan.next, known_step=step)
    return msgspec.structs.replace(again, plan=msgspec.structs.replace(again.plan, next=must_find))


def _may_be_lost_with_a_host(case: Case) -> bool:
    """Whether an unreachable host ran ranks, or had copies, of a job that has nothing in a store."""
    copies = [copy for copy in case.round.view.copies if copy.job == case.job.spec.job]
    if any(copy.tier is Tier.PERSISTENT for copy in copies):
        return False
    names = {part.host_id for part in case.this_generation.hosts} | {copy.host_id for copy in copies}
    return any(case.round.is_silent(name) for name in names)


def _restores_that_failed(job: JobView) -> dict[int, str]:
    """step -> why it could not be restored, of the newest generations that failed so one after the other; the last step
    first."""
    found: dict[int, str] = {}
    for failure in takewhile(lambda failure: failure.cause == RESTORE_FAILED, reversed(job.failures)):
        found.setdefault(failure.step, shortened(failure.error_message) or "its worker gave no reason")
    return found


def _is_second_attempt(case: Case) -> bool:
    """Whether the generation before failed to restore the same step. If it had been left out, its history were cut."""
    generation = case.this_generation
    number = generation.generation - 1
    is_cut = any(e.generation == number and e.upto_step is not None for e in generation.parent_lineage)
    return not is_cut and any((f.cause, f.generation) == (RESTORE_FAILED, number) for f in case.job.failures)


def _is_in_store_alone(case: Case, lineage: Lineage, step: int) -> bool:
    """Whether all ranks can have this newest step of the history now, but not without the persistent tier."""
    reached = {host_id for host_id in case.round.hosts if not case.round.is_silent(host_id)}
    copies = [copy for copy in case.round.view.copies if copy.job == case.job.spec.job]
    on_hosts = [copy for copy in copies if copy.tier is not Tier.PERSISTENT and copy.host_id in reached]
    stored = [copy for copy in copies if copy.tier is Tier.PERSISTENT]
    size = case.job.spec.world_size
    newest = recovery_point.newest_step(on_hosts, lineage, size)
    return newest != step and recovery_point.newest_step((*on_hosts, *stored), lineage, size) == step


def _harm_left_behind(case: Case, wanted: Verdict) -> Harm | None:
    """The harm of an incident with another cause, if the plan goes back before it and the verdict does not say so."""
    incident, plan = case.incident, wanted.plan
    if incident is None or incident.harm is None or plan is None or plan.next is None:
        return None
    if "steps_given_up" in wanted.evidence or incident.generation != case.this_generation.generation:
        return None
    return incident.harm if 0 <= _reach_step(case, plan) <= incident.harm.clean_step else None


def _reach_step(case: Case, plan: ActionPlan) -> int:
    """The newest step of the history that is complete on the hosts of the plan, or in the store; or the one that the
    plan does not start without."""
    assert plan.next is not None, "a plan that starts nothing restores nothing"
    return max(plan.next.known_step, plans.known_step(case, plan.next.parent_lineage, plan.stop_hosts))


def _begins_anew(case: Case, plan: ActionPlan | None) -> bool:
    """Whether a job restarts without any known copy of a step."""
    return plan is not None and plan.next is not None and case.incident is not None and _reach_step(case, plan) < 0


def _has_saved(job: JobView) -> bool:
    """Whether the job should have saved some step."""
    policies = [job.spec.checkpoint.policy(tier) for tier in _TIERS]
    due = (p.every_s > 0.0 or 0 < p.every_steps <= job.newest_step + 1 for p in policies)
    return job.newest_step >= 0 and any(due)
