"""Checks invariants that hold whatever happened. Pure.

Some checks read a database, simulated or real; others compare it with what truly happened in a simulation.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from statistics import median

import msgspec

from flyball.contracts.decisions import ActionState, DecisionKind, IncidentState, StartWorkers
from flyball.contracts.identity import Fence
from services.controller.replay import Replay, StoredRound, compared, differences
from services.controller.round.diagnosis import BESIDE_FAILURES, DOMAIN_SILENT
from services.controller.updates.adoption import DATABASE_NEW, DATABASE_OLDER, NOT_ADOPTED
from simulator.checks.history import (
    EXPECTED,
    HOST_LOST,
    NO_SOURCE,
    Condemned,
    Cordoned,
    CoreFault,
    Fact,
    Granted,
    Obeyed,
    Parked,
    Restored,
    Saved,
    StartFailed,
    WorkerBegan,
    WorkerEnded,
)
from simulator.checks.record import ActionRecord, DecisionRecord, GenerationRecord, IncidentRecord, Record

# Causes that may stay open beside a failure of the generation.
BESIDE = BESIDE_FAILURES | {DOMAIN_SILENT, DATABASE_OLDER, DATABASE_NEW, NOT_ADOPTED}


_PARKED_S = 110.0  # for a save before a move, while the control plane is away
_WORTH_A_WAIT_S = 20.0  # of training; the policy's own threshold is lower, and its clock an estimate


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


def check_history(facts: Sequence[Fact], record: Record) -> list[Violation]:
    """All checks that need the truth."""
    return [
        *_fences_grow(facts),
        *_obeyed_once(facts),
        *_no_older_rank_beside_a_newer(facts),
        *_restored_whole_steps(facts, record),
        *_rollbacks_are_explained(facts, record),
        *_reachable_hosts_are_not_condemned(facts),
        *_few_hosts_are_cordoned(facts),
        *_failed_starts_are_free(facts, record),
        *_nobody_stays_parked(facts),
        *(Violation("core_fault", f"{f.event} {f.detail}") for f in facts if isinstance(f, CoreFault)),
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


# --- the database ----------------------------------------------------------------------------------------------------


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
    adopting = _adopting(record)
    # A generation whose decision was lost with a database is recorded with the decision that adopted it.
    adopted = {(g.plan.job, g.plan.generation) for g in record.generations if g.decision in adopting}
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


def _adopting(record: Record) -> set[int]:
    """Numbers of the decisions that adopted jobs from hosts."""
    return {decided.number for decided in record.decisions if decided.decision.kind is DecisionKind.ADOPT}


def _generations_grow(record: Record) -> Iterator[Violation]:
    adopting = _adopting(record)
    for before, after in pairwise(record.generations):
        if before.plan.job != after.plan.job:
            continue
        step = f"generation {after.plan.generation} of {after.plan.job}"
        is_next = after.plan.generation == before.plan.generation + 1
        if not is_next and not (after.decision in adopting and after.plan.generation > before.plan.generation):
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


# --- the truth -------------------------------------------------------------------------------------------------------


def _fences_grow(facts: Iterable[Fact]) -> Iterator[Violation]:
    """A host obeys nothing older than what it obeyed before."""
    highest: dict[tuple[str, str], Fence] = {}
    for fact in facts:
        if not isinstance(fact, Obeyed):
            continue
        before = highest.get((fact.host_id, fact.job))
        if before is not None and fact.fence < before:
            yield Violation(
                "stale_command_obeyed", f"{fact.host_id} obeyed {fact.command_id} at {fact.fence} after {before}"
            )
        highest[fact.host_id, fact.job] = fact.fence


def _obeyed_once(facts: Iterable[Fact]) -> Iterator[Violation]:
    seen: set[tuple[str, str]] = set()
    for fact in facts:
        if isinstance(fact, Obeyed) and not fact.resumed:
            if (fact.host_id, fact.command_id) in seen:
                yield Violation("command_obeyed_twice", f"{fact.command_id} on {fact.host_id}")
            seen.add((fact.host_id, fact.command_id))


def granted_twice(facts: Iterable[Fact]) -> set[int]:
    """Generations whose number a restored database granted again before any host could report the first grant. The
    simulation has one group of ranks per number, so it cannot tell where the ranks of these run."""
    granted = [fact.generation for fact in facts if isinstance(fact, Granted)]
    return {generation for generation in granted if granted.count(generation) > 1}


def _no_older_rank_beside_a_newer(facts: Sequence[Fact]) -> Iterator[Violation]:
    alive: dict[tuple[str, str], set[tuple[int, int]]] = {}
    unknown = granted_twice(facts)
    for fact in facts:
        if isinstance(fact, WorkerBegan):
            here = alive.setdefault((fact.host_id, fact.job), set())
            for generation, rank in sorted(place for place in here if place[0] not in unknown):
                if generation < fact.generation or (generation, rank) == (fact.generation, fact.rank):
                    what = f"rank {rank} of {generation} lived on {fact.host_id} when {fact.generation} began"
                    yield Violation("older_rank_alive", what)
            here.add((fact.generation, fact.rank))
        elif isinstance(fact, WorkerEnded):
            alive.get((fact.host_id, fact.job), set()).discard((fact.generation, fact.rank))


def _restored_whole_steps(facts: Iterable[Fact], record: Record) -> Iterator[Violation]:
    """A restored step was saved by all ranks, belongs to the lineage, and is no older than necessary."""
    saved: set[tuple[int, int]] = set()
    upto: dict[int, float] = {}  # the lineage, tracked without any of the core's code
    has_failed_restore = False
    for fact in facts:
        match fact:
            case Saved():
                saved.add((fact.generation, fact.step))
            case WorkerEnded() if fact.why == NO_SOURCE:
                has_failed_restore = True
            case Restored():
                name = f"generation {fact.generation} restored step {fact.step} of {fact.source_generation}"
                if fact.generation <= max(upto, default=0):
                    yield Violation("generation_went_back", f"{name} after generation {max(upto)}")
                if not fact.is_one_step:
                    yield Violation("restored_mixed_steps", f"{name}, and not all ranks did")
                if fact.step >= 0 and (fact.source_generation, fact.step) not in saved:
                    yield Violation("restored_torn_step", f"{name}, which not all ranks had saved")
                if fact.step > upto.get(fact.source_generation, -1):
                    yield Violation("restored_dead_branch", f"{name}, beyond the branch of its history")
                if fact.step < fact.held_step and not has_failed_restore:
                    yield Violation("lost_steps", f"{name}, where step {fact.held_step} was there")
                upto = {g: min(step, fact.step) for g, step in upto.items() if g <= fact.source_generation}
                upto[fact.generation] = float("inf")
                has_failed_restore = False
            case _:
                pass


def _rollbacks_are_explained(facts: Iterable[Fact], record: Record) -> Iterator[Violation]:
    """A restart that goes back behind the newest reported recovery point says so, and has waited for the hosts that
    hold it, or spent as long as it gives up on other attempts. A restart from scratch says so."""
    decided = {decided.number: decided.decision for decided in record.decisions}
    granted_by = {
        found.plan.generation: decided[found.decision]
        for found in record.generations
        if decided[found.decision].kind is not DecisionKind.ADOPT  # a lost database's decisions are not recorded
    }
    waits = ("wait_for_newer_steps", "wait_for_a_spare")  # waiting for a spare also waits for the holders
    waited = {d.incident_id: d.at for d in reversed(decided.values()) if d.rule in waits}
    opened_at = {found.incident.incident_id: found.incident.opened_at for found in record.incidents}
    facts = list(facts)
    step_s = _usual_step_s([fact for fact in facts if isinstance(fact, Saved)])
    has_saved = False
    for fact in facts:
        if isinstance(fact, Saved):
            has_saved = True
        elif isinstance(fact, Granted) and fact.known_step > fact.reachable_step and fact.generation in granted_by:
            decision = granted_by[fact.generation]
            name = f"generation {fact.generation} goes back from step {fact.known_step} to {fact.reachable_step}"
            if "steps_given_up" not in decision.evidence:
                yield Violation("rollback_unsaid", f"{name}, but {decision.decision_id} does not say so")
            lost_s = (fact.known_step - fact.reachable_step) * step_s
            passed_s = decision.at - opened_at.get(decision.incident_id, decision.at)  # with restarts that failed
            if (
                lost_s > _WORTH_A_WAIT_S
                and passed_s < lost_s
                and waited.get(decision.incident_id, decision.at) >= decision.at
            ):
                yield Violation("rollback_without_a_wait", f"{name}, but did not wait for anybody")
        elif isinstance(fact, Restored) and fact.step < 0 and fact.generation in granted_by:
            decision = granted_by[fact.generation]
            is_explained = bool(decision.evidence.keys() & {"steps_given_up", "newest_step"})
            if decision.incident_id and has_saved and not is_explained:
                what = f"generation {fact.generation} starts from scratch, but {decision.decision_id} does not say so"
                yield Violation("rollback_unsaid", what)


def _usual_step_s(saved: Sequence[Saved]) -> float:
    took = [(b.at - a.at) / (b.step - a.step) for a, b in pairwise(saved) if a.generation == b.generation]
    return median(took) if took else 0.0


def _reachable_hosts_are_not_condemned(facts: Iterable[Fact]) -> Iterator[Violation]:
    for fact in facts:
        if isinstance(fact, Condemned) and fact.is_up and fact.witness:
            yield Violation("healthy_host_condemned", f"{fact.host_id}, which {fact.witness} reached all the time")


def _few_hosts_are_cordoned(facts: Iterable[Fact]) -> Iterator[Violation]:
    """Within an hour no more hosts are cordoned than a fifth of all, one at least, or than the largest domain has."""
    for fact in facts:
        if not isinstance(fact, Cordoned):
            continue
        allowed = max(1, fact.hosts // 5)
        if fact.largest_domain > 1:  # else each host is a domain of its own
            allowed = min(allowed, fact.largest_domain)
        if len(fact.beside) + 1 > allowed:
            what = f"{fact.host_id} of {fact.hosts} hosts, beside {', '.join(fact.beside)}"
            yield Violation("blast_radius", f"{what}, is cordoned; {allowed} may be within an hour")


def _failed_starts_are_free(facts: Iterable[Fact], record: Record) -> Iterator[Violation]:
    """A start that failed on a host is not a failure of its workers, and costs none of their restarts."""
    not_started: set[int] = set()
    has_failed: set[int] = set()
    for fact in facts:
        if isinstance(fact, StartFailed):
            not_started.add(fact.generation)
        elif isinstance(fact, WorkerEnded) and fact.why not in (EXPECTED, HOST_LOST):
            has_failed.add(fact.generation)
    adopting = _adopting(record)
    for before, after in pairwise(record.generations):
        number = before.plan.generation
        if after.decision in adopting:
            continue  # restarts used in between were lost with the database
        if number in not_started - has_failed and after.plan.restart_count > before.plan.restart_count:
            yield Violation("start_charged", f"generation {number} could not be started, but cost a restart")


def _nobody_stays_parked(facts: Iterable[Fact]) -> Iterator[Violation]:
    """Ranks stay parked only until they are moved or released."""
    for fact in facts:
        if isinstance(fact, Parked) and fact.stood_s > _PARKED_S:
            yield Violation("parked_in_vain", f"ranks of generation {fact.generation} stood for {fact.stood_s:.0f} s")
