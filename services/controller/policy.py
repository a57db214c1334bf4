"""The policy: decides from the current view, with ordered lists of small rules.

In each list, the first rule that returns a verdict decides, unless a guard replaces its verdict by a hold; a guard may
also amend it. The decision keeps the name of the rule or guard. Rules depend on the view only: for the same facts they
return the same verdict, and a hold that is in force is not decided twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from flyball.contracts.cluster import JobState
from flyball.contracts.decisions import IncidentState
from flyball.contracts.reports.signals import Signal
from services.controller.round import expected_cost
from services.controller.round.diagnosis import (
    CHECKPOINT_REQUESTED,
    DRAIN_REQUESTED,
    HOST_CONDITION,
    PREEMPTION_NOTICE,
    ROOM_TO_GROW,
    SAVES_FAILING,
    STRAGGLER,
    SUPERSEDED_WORKERS,
)
from services.controller.round.round import Case, Round
from services.controller.round.verdict import Verdict
from services.controller.round.view import Outcome, PolicySettings, View
from services.controller.rules import (
    check_rules,
    checkpoint_rules,
    condition_rules,
    drain_rules,
    grow_rules,
    guard_rules,
    hang_rules,
    health_rules,
    job_rules,
    memory_rules,
    preemption_rules,
    recovery_rules,
    rollback_rules,
    save_rules,
    shrink_rules,
    start_rules,
    straggler_rules,
    waiting_rules,
)
from services.controller.updates import (
    adoption,
    correlation,
    host_checks,
    host_history,
    intake,
    operator_orders,
    tracking,
    unreadable_rows,
)

Rule = Callable[[Case], Verdict | None]
Guard = Callable[[Case, Verdict], Verdict | None]

JOB_RULES: tuple[Rule, ...] = (
    job_rules.stop_on_request,
    job_rules.complete_when_all_ranks_are_done,
    check_rules.check_before_the_first_step,
    job_rules.start_when_hosts_suffice,
)

FAILURE_RULES: tuple[Rule, ...] = (
    start_rules.wait_for_the_other_starts,
    start_rules.leave_a_host_that_cannot_start,
    start_rules.fail_what_starts_nowhere,
    start_rules.start_again,
    recovery_rules.fail_after_too_many_decisions,
    hang_rules.see_where_ranks_stand,
    check_rules.check_after_a_hang_without_a_culprit,
    shrink_rules.hold_what_does_not_fit,
    recovery_rules.leave_the_host_of_an_identical_exception,
    recovery_rules.fail_on_identical_exception,
    memory_rules.fail_on_repeated_lack_of_memory,
    recovery_rules.back_off_after_a_failed_action,
    waiting_rules.wait_for_the_root_cause,
    waiting_rules.wait_for_the_others_that_fell,
    waiting_rules.wait_for_the_others_that_return,
    waiting_rules.watch_returned_hosts,
    recovery_rules.fail_when_restarts_are_used_up,
    health_rules.hold_when_a_harm_returns,
    health_rules.hold_without_a_clean_step,
    health_rules.leave_the_host_of_a_bad_device,
    health_rules.restart_before_the_harm,
    health_rules.leave_a_recovery_point_that_fails,
    rollback_rules.fail_when_no_step_restores,
    rollback_rules.restart_from_an_older_recovery_point,
    memory_rules.retry_on_a_larger_host,
    recovery_rules.migrate_to_spare,
    recovery_rules.return_to_a_host_that_was_left,
    recovery_rules.take_a_drained_host_back,
    shrink_rules.go_on_with_fewer_hosts,
    recovery_rules.restart_on_a_broken_host,
    recovery_rules.wait_for_a_spare,
    grow_rules.restart_on_more_hosts,
    memory_rules.retry_with_as_much_memory,
    recovery_rules.restart_in_place,
)

PREEMPTION_RULES: tuple[Rule, ...] = (
    preemption_rules.give_up_after_too_many_decisions,
    preemption_rules.let_the_other_incident_go_first,
    recovery_rules.back_off_after_a_failed_action,
    preemption_rules.restart_ranks_that_did_not_go_on,
    preemption_rules.let_the_ranks_go,
    preemption_rules.save_before_the_host_goes,
    recovery_rules.migrate_to_spare,
    shrink_rules.leave_without_a_spare,
    preemption_rules.wait_for_a_spare,
    recovery_rules.restart_in_place,
)

DRAIN_RULES: tuple[Rule, ...] = (
    drain_rules.refuse_what_took_too_long,
    preemption_rules.let_the_other_incident_go_first,
    recovery_rules.back_off_after_a_failed_action,
    preemption_rules.restart_ranks_that_did_not_go_on,
    preemption_rules.let_the_ranks_go,
    drain_rules.wait_until_all_ranks_step,
    drain_rules.save_before_the_host_is_left,
    recovery_rules.migrate_to_spare,
    shrink_rules.save_before_the_job_shrinks,
    shrink_rules.leave_without_a_spare,
    drain_rules.wait_for_a_spare,
    recovery_rules.restart_in_place,
)

CONDITION_RULES: tuple[Rule, ...] = (
    preemption_rules.give_up_after_too_many_decisions,
    preemption_rules.let_the_other_incident_go_first,
    recovery_rules.back_off_after_a_failed_action,
    preemption_rules.restart_ranks_that_did_not_go_on,
    condition_rules.leave_a_broken_host,
    condition_rules.start_what_a_failed_move_left,
    preemption_rules.let_the_ranks_go,
    shrink_rules.leave_without_a_spare,
    condition_rules.wait_for_a_spare,
    drain_rules.wait_until_all_ranks_step,
    condition_rules.save_before_the_host_is_left,
    condition_rules.migrate_what_is_saved,
    condition_rules.release_what_could_not_be_saved,
    condition_rules.stay_without_a_checkpoint,
)

STRAGGLER_RULES: tuple[Rule, ...] = (
    preemption_rules.give_up_after_too_many_decisions,
    preemption_rules.let_the_other_incident_go_first,
    recovery_rules.back_off_after_a_failed_action,
    straggler_rules.hold_if_a_move_did_not_help,
    straggler_rules.hold_if_a_move_costs_more,
    straggler_rules.move_the_straggler,
    straggler_rules.hold_without_a_spare,
)

GROW_RULES: tuple[Rule, ...] = (
    grow_rules.give_up_after_a_failed_save,
    preemption_rules.let_the_other_incident_go_first,
    recovery_rules.back_off_after_a_failed_action,
    preemption_rules.restart_ranks_that_did_not_go_on,
    condition_rules.start_what_a_failed_move_left,
    grow_rules.let_the_ranks_go,
    grow_rules.grow_onto_free_hosts,
    grow_rules.stay_if_growing_costs_more,
    grow_rules.wait_until_all_ranks_step,
    grow_rules.save_before_the_world_grows,
)

CHECKPOINT_RULES: tuple[Rule, ...] = (
    preemption_rules.let_the_other_incident_go_first,
    checkpoint_rules.wait_for_the_other_action,
    checkpoint_rules.give_up_after_a_failed_save,
    recovery_rules.back_off_after_a_failed_action,
    preemption_rules.restart_ranks_that_did_not_go_on,
    checkpoint_rules.train_on_after_the_save,
    checkpoint_rules.wait_until_all_ranks_step,
    checkpoint_rules.save_on_request,
)

STALE_WORKER_RULES: tuple[Rule, ...] = (
    preemption_rules.give_up_after_too_many_decisions,
    recovery_rules.back_off_after_a_failed_action,
    job_rules.stop_superseded_workers,
)

GUARDS: tuple[Guard, ...] = (
    rollback_rules.never_from_scratch,
    rollback_rules.wait_for_newer_steps,
    guard_rules.act_once_in_a_round,
    guard_rules.wait_for_the_end_of_maintenance,
    guard_rules.cordon_no_more_hosts,
    guard_rules.act_no_more_often,
    guard_rules.only_say_it_in_a_dry_run,
    guard_rules.wait_for_approval,
)

_RULES_OF = {
    PREEMPTION_NOTICE: PREEMPTION_RULES,
    DRAIN_REQUESTED: DRAIN_RULES,
    HOST_CONDITION: CONDITION_RULES,
    SUPERSEDED_WORKERS: STALE_WORKER_RULES,
    SAVES_FAILING: (save_rules.hold_while_saves_fail,),
    STRAGGLER: STRAGGLER_RULES,
    ROOM_TO_GROW: GROW_RULES,
    CHECKPOINT_REQUESTED: CHECKPOINT_RULES,
}


def rules_for(cause: str) -> Sequence[Rule]:
    """Return the rules that are asked about an incident with this cause, in order."""
    return _RULES_OF.get(cause, FAILURE_RULES)


def decide(view: View, signals: Sequence[Signal], settings: PolicySettings, now: float) -> Outcome:
    """Run one round. `signals`: those not seen before; `now`: wall clock. The same arguments give the same outcome, and
    a round without news gives an empty one."""
    round_ = Round(view, settings, now)
    intake.take_signals(round_, signals)
    host_checks.take_in(round_)
    operator_orders.settle(round_)
    host_checks.settle_orders(round_)
    intake.settle_hosts(round_)
    host_history.keep_out_hosts_that_fail(round_)
    unreadable_rows.take_in(round_)
    adoption.take_in(round_)
    for job in round_.jobs.values():
        job_rules.reserve_spares(round_, job)
    for name in list(round_.jobs):
        if name in round_.unadopted:
            continue
        if round_.jobs[name].state.ending:
            job_rules.end_when_workers_are_gone(round_, round_.jobs[name])
            continue
        has_ended, held = round_.jobs[name].state.ended, None
        if has_ended:
            tracking.find_left_behind(round_, round_.jobs[name])
        else:
            tracking.follow(round_, round_.jobs[name])
            tracking.diagnose(round_, round_.jobs[name])
            asked = round_.jobs[name]
            held = _ask(JOB_RULES, Case(round_, asked))
            if asked.state is JobState.SUBMITTED:  # it may run by now
                job_rules.reserve_spares(round_, round_.jobs[name])
        if round_.jobs[name].state is JobState.SUBMITTED:
            job_rules.say_what_is_missing(round_, round_.jobs[name], held)
        for incident_id in [incident.incident_id for incident in round_.open_incidents(name)]:
            incident = round_.incidents[incident_id]  # an earlier rule may have closed it
            if has_ended and incident.cause != SUPERSEDED_WORKERS:
                continue
            if incident.state is IncidentState.DECIDING:
                _ask(rules_for(incident.cause), Case(round_, round_.jobs[name], incident))
    if round_.adoption is None:
        correlation.gather(round_)
    return round_.outcome()


def _ask(rules: Sequence[Rule], case: Case) -> Verdict | None:
    """Apply the verdict of the first rule that has one. Returns a guard's hold of a job that has no incident: it goes
    into the job's message."""
    if case.round.adoption is not None:  # the next round decides, under the epoch and above the numbers adopted here
        return None
    for rule in rules:
        wanted = rule(case)
        if wanted is None:
            continue
        for guard in GUARDS:
            held = guard(case, wanted)
            if held is None:
                continue
            if held.plan is not None:  # the same action, with less
                wanted = held
                continue
            if case.incident is None:
                return held
            _apply(case, guard.__name__, guard_rules.release_meanwhile(case, held))
            return None
        _apply(case, rule.__name__, rollback_rules.say_what_is_given_up(case, wanted))
        return None
    return None


def _apply(case: Case, rule: str, verdict: Verdict) -> None:
    """Apply a verdict. If it is news, weigh it against the other courses first."""
    if case.incident is not None and not verdict.is_in_force(case.incident):
        verdict = msgspec.structs.replace(verdict, alternatives=expected_cost.weigh(case, rule, verdict))
    case.round.apply(case, rule, verdict)
