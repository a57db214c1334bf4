"""Invariants of what truly happened in a simulation, beside what its database holds. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from statistics import median

from flyball.contracts.decisions import DecisionKind
from flyball.contracts.identity import Fence
from simulator.checks.history import (
    EXPECTED,
    HOST_LOST,
    NO_SOURCE,
    Condemned,
    Cordoned,
    CoreFault,
    Fact,
    FaultBegan,
    Granted,
    Obeyed,
    Parked,
    Restored,
    Saved,
    StartFailed,
    WorkerBegan,
    WorkerEnded,
)
from simulator.checks.record import Record
from simulator.checks.record_checks import Violation, adopting

_PARKED_S = 110.0  # for a save before a move, while the control plane is away
_SAVES_FAIL = "host_keeps_no_save"  # how that fault begins
_UNSAVED_S = 20.0  # of training; a save waits for replicas of the one before for half as long
_WORTH_A_WAIT_S = 20.0  # of training; the policy's own threshold is lower, and its clock an estimate


def check_history(facts: Sequence[Fact], record: Record) -> list[Violation]:
    """All checks that need the truth."""
    return [
        *_fences_grow(facts),
        *_obeyed_once(facts),
        *_no_older_rank_beside_a_newer(facts),
        *_restored_whole_steps(facts, record),
        *_rollbacks_are_explained(facts, record),
        *_what_trains_saves(facts),
        *_reachable_hosts_are_not_condemned(facts),
        *_few_hosts_are_cordoned(facts),
        *_failed_starts_are_free(facts, record),
        *_nobody_stays_parked(facts),
        *(Violation("core_fault", f"{f.event} {f.detail}") for f in facts if isinstance(f, CoreFault)),
    ]


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
    """A restored step was saved by all ranks, belongs to the lineage, and is no older than necessary.

    If nobody had heard of a step of a generation when the next one was granted, the newer steps before it are still
    alive, but for those that its decision left out.
    """
    saved: set[tuple[int, int]] = set()
    upto: dict[int, float] = {}  # the lineage, tracked without any of the core's code
    uncut: dict[int, float] = {}  # the same, if nobody hears of a step of the newest generation
    let_in = _let_in(record)
    stored: dict[int, int] = {}  # by generation: the newest step in the store that was known when it was granted
    heard_of: dict[int, int] = {}  # by generation: the newest one of which a step was known then
    has_failed_restore = False
    for fact in facts:
        match fact:
            case Saved():
                saved.add((fact.generation, fact.step))
            case WorkerEnded() if fact.why == NO_SOURCE:
                has_failed_restore = True
            case Granted():
                stored[fact.generation] = fact.stored_step
                heard_of[fact.generation] = fact.heard_of
            case Restored():
                name = f"generation {fact.generation} restored step {fact.step} of {fact.source_generation}"
                newest = max(upto, default=0)
                if newest in let_in and heard_of.get(fact.generation, newest) < newest:
                    upto = uncut
                if fact.generation <= max(upto, default=0):
                    yield Violation("generation_went_back", f"{name} after generation {max(upto)}")
                if not fact.is_one_step:
                    yield Violation("restored_mixed_steps", f"{name}, and not all ranks did")
                if fact.step >= 0 and (fact.source_generation, fact.step) not in saved:
                    yield Violation("restored_torn_step", f"{name}, which not all ranks had saved")
                if fact.step > upto.get(fact.source_generation, -1):
                    yield Violation("restored_dead_branch", f"{name}, beyond the branch of its history")
                if not has_failed_restore:
                    yield from _lost_steps(fact, stored.get(fact.generation, -1), name)
                planned = let_in.get(fact.generation, {})
                own = {fact.generation: float("inf")}
                uncut = {g: min(step, planned.get(g, -1.0)) for g, step in upto.items()} | own
                upto = {g: min(step, fact.step) for g, step in upto.items() if g <= fact.source_generation} | own
                has_failed_restore = False
            case _:
                pass


def _lost_steps(fact: Restored, stored_step: int, name: str) -> Iterator[Violation]:
    for newer, where in ((fact.held_step, "there"), (stored_step, "in the store")):
        if fact.step < newer:
            yield Violation("lost_steps", f"{name}, where step {newer} was {where}")


def _let_in(record: Record) -> dict[int, dict[int, float]]:
    """By recorded generation: the newest step of each earlier one that its decision let it go on from. The decision of
    an adopted one is lost: its history counts."""
    return {
        found.plan.generation: {
            entry.generation: float("inf") if entry.upto_step is None else entry.upto_step
            for entry in found.plan.parent_lineage or (found.lineage or ())[:-1]
        }
        for found in record.generations
    }


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
    # Of a number that was granted twice, the decision of the first grant was lost with the database.
    last_granted_at = {fact.generation: fact.at for fact in facts if isinstance(fact, Granted)}
    for fact in facts:
        if isinstance(fact, Granted | Restored) and fact.at < last_granted_at.get(fact.generation, fact.at):
            continue
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


def _what_trains_saves(facts: Sequence[Fact]) -> Iterator[Violation]:
    """A generation that trains saves, unless a host cannot: else all that it does is lost with it."""
    if any(isinstance(fact, FaultBegan) and fact.fault.startswith(_SAVES_FAIL) for fact in facts):
        return
    step_s = _usual_step_s([fact for fact in facts if isinstance(fact, Saved)])
    generation, saved = 0, -1  # that trains, and the newest step that it restored or saved
    for fact in facts:
        if isinstance(fact, Saved) and fact.generation == generation:
            saved = max(saved, fact.step)
        elif isinstance(fact, Restored):
            if generation and (fact.newest_step - saved) * step_s > _UNSAVED_S:
                what = f"generation {generation} reached step {fact.newest_step}, and saved none after {saved}"
                yield Violation("training_not_saved", what)
            generation, saved = fact.generation, fact.step


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
    adopted_by = adopting(record)
    for before, after in pairwise(record.generations):
        number = before.plan.generation
        if adopted_by & {before.decision, after.decision}:
            continue  # restarts used in between, or why a start failed, were lost with the database
        if number in not_started - has_failed and after.plan.restart_count > before.plan.restart_count:
            yield Violation("start_charged", f"generation {number} could not be started, but cost a restart")


def _nobody_stays_parked(facts: Iterable[Fact]) -> Iterator[Violation]:
    """Ranks stay parked only until they are moved or released."""
    for fact in facts:
        if isinstance(fact, Parked) and fact.stood_s > _PARKED_S:
            yield Violation("parked_in_vain", f"ranks of generation {fact.generation} stood for {fact.stood_s:.0f} s")
