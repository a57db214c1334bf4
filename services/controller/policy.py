"""The policy: decides from the current view, with ordered lists of small rules.

In each list, the first rule that returns a verdict decides, unless a guard replaces its verdict by a hold. The decision
keeps the name of the rule or guard. Rules depend on the view only: for the same facts they return the same verdict, and
a hold that is in force is not decided twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from flyball.contracts.cluster import JobState
from flyball.contracts.decisions import IncidentState
from flyball.contracts.reports.signals import Signal
from services.controller.round.diagnosis import DRAIN_REQUESTED, PREEMPTION_NOTICE, SAVES_FAILING, SUPERSEDED_WORKERS
from services.controller.round.round import Case, Round, Verdict
from services.controller.round.view import Outcome, PolicySettings, View
from services.controller.rules import (
    adoption,
    drain_rules,
    intake,
    job_rules,
    preemption_rules,
    recovery_rules,
    rollback_rules,
    save_rules,
    start_rules,
    tracking,
    waiting_rules,
)

Rule = Callable[[Case], Verdict | None]
Guard = Callable[[Case, Verdict], Verdict | None]

JOB_RULES: tuple[Rule, ...] = (
    job_rules.stop_on_request,
    job_rules.complete_when_all_ranks_are_done,
    job_rules.start_when_hosts_suffice,
)

FAILURE_RULES: tuple[Rule, ...] = (
    start_rules.wait_for_the_other_starts,
    start_rules.leave_a_host_that_cannot_start,
    start_rules.fail_what_starts_nowhere,
    start_rules.start_again,
    recovery_rules.fail_after_too_many_decisions,
    recovery_rules.fail_on_identical_exception,
    recovery_rules.back_off_after_a_failed_action,
    waiting_rules.wait_for_the_root_cause,
    waiting_rules.wait_for_the_others_that_fell,
    waiting_rules.wait_for_the_others_that_return,
    waiting_rules.watch_returned_hosts,
    recovery_rules.fail_when_restarts_are_used_up,
    recovery_rules.restart_from_an_older_recovery_point,
    recovery_rules.migrate_to_spare,
    recovery_rules.take_a_drained_host_back,
    recovery_rules.wait_for_a_spare,
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
    drain_rules.wait_for_a_spare,
    recovery_rules.restart_in_place,
)

STALE_WORKER_RULES: tuple[Rule, ...] = (
    preemption_rules.give_up_after_too_many_decisions,
    recovery_rules.back_off_after_a_failed_action,
    job_rules.stop_superseded_workers,
)

GUARDS: tuple[Guard, ...] = (
    rollback_rules.never_from_scratch,
    rollback_rules.wait_for_newer_steps,
)

_RULES_OF = {
    PREEMPTION_NOTICE: PREEMPTION_RULES,
    DRAIN_REQUESTED: DRAIN_RULES,
    SUPERSEDED_WORKERS: STALE_WORKER_RULES,
    SAVES_FAILING: (save_rules.hold_while_saves_fail,),
}


def decide(view: View, signals: Sequence[Signal], settings: PolicySettings, now: float) -> Outcome:
    """Run one round. `signals`: those not seen before; `now`: wall clock. The same arguments give the same outcome, and
    a round without news gives an empty one."""
    round_ = Round(view, settings, now)
    intake.take_signals(round_, signals)
    intake.settle_hosts(round_)
    adoption.take_in(round_)
    for job in round_.jobs.values():
        job_rules.reserve_spares(round_, job)
    for name in list(round_.jobs):
        if name in round_.unadopted:
            continue
        has_ended, held = round_.jobs[name].state.ended, None
        if has_ended:
            tracking.find_left_behind(round_, round_.jobs[name])
        else:
            tracking.follow(round_, round_.jobs[name])
            tracking.diagnose(round_, round_.jobs[name])
            asked = round_.jobs[name]
            held = _ask(round_, JOB_RULES, Case(round_, asked))
            if asked.state is JobState.SUBMITTED:  # it may run by now
                job_rules.reserve_spares(round_, round_.jobs[name])
        if round_.jobs[name].state is JobState.SUBMITTED:
            job_rules.say_what_is_missing(round_, round_.jobs[name], held)
        for incident_id in [incident.incident_id for incident in round_.open_incidents(name)]:
            incident = round_.incidents[incident_id]  # an earlier rule may have closed it
            if has_ended and incident.cause != SUPERSEDED_WORKERS:
                continue
            if incident.state is IncidentState.DECIDING:
                _ask(round_, _RULES_OF.get(incident.cause, FAILURE_RULES), Case(round_, round_.jobs[name], incident))
    return round_.outcome()


def _ask(round_: Round, rules: Sequence[Rule], case: Case) -> Verdict | None:
    """Apply the verdict of the first rule that has one. Returns a guard's hold of a job that has no incident: it goes
    into the job's message."""
    for rule in rules:
        wanted = rule(case)
        if wanted is None:
            continue
        for guard in GUARDS:
            held = guard(case, wanted)
            if held is None:
                continue
            if case.incident is None:
                return held
            round_.apply(case, guard.__name__, held)
            return None
        round_.apply(case, rule.__name__, rollback_rules.say_what_is_given_up(case, wanted))
        return None
    return None
