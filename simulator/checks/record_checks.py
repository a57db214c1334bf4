"""Invariants of what a database holds, simulated or real. They hold whatever happened. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

import msgspec

from flyball.contracts.decisions import ActionState, DecisionKind, IncidentState, StartWorkers
from services.controller.replay import Replay, StoredRound, compared, differences
from services.controller.round.diagnosis import BESIDE_FAILURES, DOMAIN_SILENT
from services.controller.updates.adoption import DATABASE_NEW, DATABASE_OLDER
from services.controller.updates.held_jobs import NOT_ADOPTED
from simulator.checks.record import ActionRecord, DecisionRecord, GenerationRecord, IncidentRecord, Record

# Causes that may stay open beside a failure of the generation.
BESIDE = BESIDE_FAILURES | {DOMAIN_SILENT, DATABASE_OLDER, DATABASE_NEW, NOT_ADOPTED}


class Violation(msgspec.Struct, frozen=True):
    """A broken invariant: `invariant` is a stable word, `what` a sentence with the names."""

    invariant: str
    what: str

    def __str__(self) -> str:
        return f"{self.invariant}: {self.what}"


def check_record(record: Record, *, now: float, bound_s: float) -> list[Violation]:
    """All checks that need only a database. Incidents older than `bound_s` at `now` must be closed."""
    return [
        *_numbers(record),
        *_one_action_per_job(record.actions),
        *_one_failure_per_job(record.incidents),
        *_decided_once(record),
        *_carried_out(record),
        *_generations_grow(record),
        *_lineage_holds(record.generations),
        *_fences_fit(record),
        *_closed_in_time(record.incidents, now, bound_s),
    ]


def check_replay(rounds: Iterable[StoredRound], record: Record) -> list[Violation]:
    """Replay the stored rounds through the policy: the decisions must be identical."""
    replay = Replay()
    decided = [decision for stored in rounds for decision in replay.run(stored).decisions]
    same, found = compared((d.decision for d in record.decisions), decided)
    found += replay.differences + [f"dec-{first} to dec-{last} are not kept" for first, last in replay.missing]
    for known in record.incidents:
        now = replay.incidents.get(known.incident.incident_id)
        found += differences(known.incident.incident_id, known.incident, now) if now else ["an incident is missing"]
    if same != len(record.decisions) and not found:
        found = [f"{same} of {len(record.decisions)} decisions are the same"]
    return [Violation("replay_differs", what) for what in found]


def _numbers(record: Record) -> Iterator[Violation]:
    """Decisions are numbered without gaps, except after an adoption, and their epochs never decrease."""
    due, is_adopted = 1, False
    for decided in record.decisions:
        if decided.number < due or (decided.number > due and not is_adopted):
            yield Violation("decision_lost", f"dec-{due} is missing, dec-{decided.number} is there")
            return
        due, is_adopted = decided.number + 1, decided.decision.kind is DecisionKind.ADOPT
    for before, after in pairwise(record.decisions):
        if after.epoch < before.epoch:
            yield Violation(
                "stale_decision", f"dec-{after.number} was stored under epoch {after.epoch} < {before.epoch}"
            )


def _one_action_per_job(actions: Sequence[ActionRecord]) -> Iterator[Violation]:
    """A job's next action begins only after its previous one ended."""
    by_job: dict[str, ActionRecord] = {}
    for action in actions:
        if action.plan.kind is DecisionKind.CORDON:
            continue
        before = by_job.get(action.plan.job)
        if before is not None and not 0 <= before.ended < action.began:
            what = f"act-{action.number} of {action.plan.job} began while act-{before.number} was open"
            yield Violation("two_open_actions", what)
        by_job[action.plan.job] = action


def _one_failure_per_job(incidents: Sequence[IncidentRecord]) -> Iterator[Violation]:
    """One failure of a job is one incident: a second one opens only when the first is closed."""
    by_job: dict[str, IncidentRecord] = {}
    for found in incidents:
        if found.incident.cause in BESIDE or not found.states:
            continue
        before = by_job.get(found.incident.job)
        if before is not None:
            closed = [place for place, state in before.states if state.closed]
            if not closed or closed[0] > found.states[0][0]:
                what = f"{found.incident.incident_id} was opened while {before.incident.incident_id} was open"
                yield Violation("two_open_incidents", what)
        by_job[found.incident.job] = found


def _decided_once(record: Record) -> Iterator[Violation]:
    """An incident's second action begins only after the first ended. If the first succeeded, a newer generation must
    have failed, or the first was the save before a move."""
    actions = {action.number: action for action in record.actions}
    acted: dict[str, DecisionRecord] = {}
    for decided in record.decisions:
        decision = decided.decision
        if decision.action is None or not decision.incident_id:
            continue
        before = acted.get(decision.incident_id)
        acted[decision.incident_id] = decided
        if before is None or before.decision.action is None:
            continue
        ended = actions[before.number]
        names = f"dec-{before.number} and dec-{decided.number} of {decision.incident_id}"
        if not 0 <= ended.ended < actions[decided.number].began:
            yield Violation("decided_twice", f"{names}: the first was still being carried out")
        elif (
            ended.state is ActionState.SUCCEEDED
            and ended.plan.kind is not DecisionKind.EMERGENCY_CHECKPOINT
            and ended.plan.next is not None
            and decision.action.generation < ended.plan.next.generation
        ):
            yield Violation(
                "decided_twice", f"{names} are about generation {decision.action.generation}, which is over"
            )


def _carried_out(record: Record) -> Iterator[Violation]:
    """Every decision was begun: its first commands are stored with it."""
    actions = {action.number for action in record.actions}
    commanded = {command.action for command in record.commands}
    granted = {generation.decision for generation in record.generations}
    adopted_by = adopting(record)
    # A generation whose decision was lost with a database is recorded with the decision that adopted it.
    adopted = {(g.plan.job, g.plan.generation) for g in record.generations if g.decision in adopted_by}
    known = {found.incident.incident_id for found in record.incidents}
    for decided in record.decisions:
        plan, name = decided.decision.action, f"dec-{decided.number}"
        if decided.decision.incident_id and decided.decision.incident_id not in known:
            yield Violation("decision_without_incident", f"{name} names {decided.decision.incident_id}")
        if plan is None:
            continue
        if decided.number not in actions:
            yield Violation("decision_lost", f"{name} has no action")
        elif decided.number not in commanded and (plan.stop_hosts or plan.next is not None):
            yield Violation("decision_lost", f"{name} has no command")
        if plan.next is not None and decided.number not in granted and (plan.job, plan.next.generation) not in adopted:
            yield Violation("decision_lost", f"{name} granted generation {plan.next.generation}, which is not there")


def adopting(record: Record) -> set[int]:
    """Numbers of the decisions that adopted jobs from hosts."""
    return {decided.number for decided in record.decisions if decided.decision.kind is DecisionKind.ADOPT}


def _generations_grow(record: Record) -> Iterator[Violation]:
    adopted_by = adopting(record)
    for before, after in pairwise(record.generations):
        if before.plan.job != after.plan.job:
            continue
        step = f"generation {after.plan.generation} of {after.plan.job}"
        is_next = after.plan.generation == before.plan.generation + 1
        if not is_next and not (after.decision in adopted_by and after.plan.generation > before.plan.generation):
            yield Violation("generation_skipped", f"{step} follows {before.plan.generation}")
        if after.decision <= before.decision:
            yield Violation("generation_went_back", f"{step} was granted before its predecessor")
        if after.plan.parent is not None and after.plan.parent >= after.plan.generation:
            yield Violation("generation_went_back", f"{step} has parent {after.plan.parent}")


def _lineage_holds(generations: Sequence[GenerationRecord]) -> Iterator[Violation]:
    """A generation's lineage is that of its predecessors, cut at its restore step."""
    for found in generations:
        if found.lineage is None:
            continue
        name = f"generation {found.plan.generation} of {found.plan.job}"
        numbers = [entry.generation for entry in found.lineage]
        if numbers != sorted(set(numbers)) or numbers[-1] != found.plan.generation:
            yield Violation("lineage_broken", f"{name} has the history {numbers}")
        if found.lineage[-1].upto_step is not None:
            yield Violation("lineage_broken", f"{name} ends before it began")
        for entry in found.lineage[:-1]:
            if found.restore_step is None or entry.upto_step is None or entry.upto_step > found.restore_step:
                yield Violation("lineage_broken", f"{name} keeps {entry} and went on from {found.restore_step}")


def _fences_fit(record: Record) -> Iterator[Violation]:
    """No command's epoch is older than its decision's; a start carries its own generation."""
    epochs = {decided.number: decided.epoch for decided in record.decisions}
    for found in record.commands:
        command, body = found.command, found.command.body
        if not epochs.get(found.action, 0) <= command.fence.epoch <= record.epoch:
            yield Violation("stale_command", f"{command.command_id} carries epoch {command.fence.epoch}")
        if isinstance(body, StartWorkers) and command.fence.generation != body.placement.generation:
            yield Violation("stale_command", f"{command.command_id} carries generation {command.fence.generation}")


def _closed_in_time(incidents: Sequence[IncidentRecord], now: float, bound_s: float) -> Iterator[Violation]:
    for found in incidents:
        incident = found.incident
        if not incident.state.closed and now - incident.opened_at > bound_s:
            yield Violation("incident_left_open", f"{incident.incident_id} for {now - incident.opened_at:.0f} s")
        if incident.state is IncidentState.RESOLVED and incident.lost_steps > max(0, incident.failed_step + 1):
            what = f"{incident.incident_id} lost {incident.lost_steps} of {incident.failed_step + 1} steps"
            yield Violation("lost_more_than_there_was", what)
