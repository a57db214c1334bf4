"""The policy and the playbook, with a check of each outcome: its types are those that a store or a daemon takes, and
what users see of a decision has names that they know."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import msgspec
from support.policy import golden

from flyball.contracts.reports.signals import Signal
from services.actuator.ports import ActionProgress, PlaybookStep
from services.actuator.rules import playbook
from services.controller import policy
from services.controller.round.view import Outcome, PolicySettings, View

T = TypeVar("T", bound=msgspec.Struct)

# Users find both in `flyball explain`, and programs in the HTTP API.
RULE_LISTS = (
    policy.JOB_RULES,
    policy.FAILURE_RULES,
    policy.PREEMPTION_RULES,
    policy.DRAIN_RULES,
    policy.CONDITION_RULES,
    policy.STRAGGLER_RULES,
    policy.GROW_RULES,
    policy.CHECKPOINT_RULES,
    policy.STALE_WORKER_RULES,
    policy.GUARDS,
)
OTHER_RULES = """
    adopt_what_hosts_run believe_hosts_that_a_job_ended cordon_a_drained_host cordon_a_host_with_a_condition
    gather_what_fell_together check_on_request cordon_a_host_that_failed_its_check keep_a_host_that_did_not_pass
    cordon_on_request count_on_above_what_hosts_obeyed give_back_what_is_not_to_blame hold_while_saves_fail
    give_back_a_host_that_fails keep_out_a_host_that_fails refuse_to_cordon release_a_recovered_host
    release_an_undrained_host say_what_cannot_be_adopted refuse_what_cannot_be leave_out_rows_that_cannot_be_read
    wait_for_hosts_to_tell withdraw_a_false_alarm withdraw_an_outlived_notice
"""
EVIDENCE = """
    action actions agree alive as_peer asked away clean_step code core_dumped cost_gpu_s cost_s count
    crashed_after_done culprits deadline_from deadline_s decisions deterministic differ differing epoch equal_step
    error error_class exit_code first_bad_step free from gain_gpu_s gain_s generation hangs hold_gpu_s holders host
    hosts incident job jobs kernel larger_memory_bytes limit loss lost max_restarts memory_bytes newest_step nnodes
    nproc_per_node number own_odd own_runs patience paused_s peer peer_host peer_runs phase pid rank ranks
    ranks_before reach_step redo_rank_s remaining_s restart_step restarts restarts_used samples sealed seen shrink_gpu_s
    signal silent_s spread stance stands step step_s steps_given_up steps_tried tensors times to
    told_by told_step tried unheard usual
    wait_s wanted window_s
"""
RULE_NAMES = {*OTHER_RULES.split(), *(rule.__name__ for rules in RULE_LISTS for rule in rules)}
EVIDENCE_NAMES = set(EVIDENCE.split())


def decide(view: View, signals: Sequence[Signal], settings: PolicySettings, now: float) -> Outcome:
    outcome = well_typed(policy.decide(view, signals, settings, now))
    for decision in outcome.decisions:
        assert decision.rule in RULE_NAMES
        assert decision.evidence.keys() <= EVIDENCE_NAMES
        assert decision.reason.endswith(".") and "None" not in decision.reason
        assert decision.at == now
    golden.note_outcome(view, outcome)
    return outcome


def advance(progress: ActionProgress, now: float) -> PlaybookStep:
    step = well_typed(playbook.advance(progress, now))
    golden.note_step(step)
    return step


def well_typed(value: T) -> T:
    assert msgspec.convert(msgspec.to_builtins(value), type(value)) == value
    return value
