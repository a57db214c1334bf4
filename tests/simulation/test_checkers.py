"""The checkers find violations: each gets a history that breaks its invariant."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import msgspec
import pytest

from ckpt_engine.contracts.peer_wire import TierNaming
from flyball.contracts.checkpoints import LineageEntry, Tier
from flyball.contracts.decisions import ActionState, IncidentState
from flyball.contracts.identity import Fence
from simulator import driver
from simulator.checks.history import (
    Condemned,
    Cordoned,
    CoreFault,
    Fact,
    FaultBegan,
    Granted,
    Obeyed,
    Restored,
    Saved,
    WorkerBegan,
)
from simulator.checks.history_checks import check_history
from simulator.checks.record import Record
from simulator.checks.record_checks import check_record, check_replay
from simulator.cluster import Cluster, Scenario
from simulator.driver import Run, run
from simulator.faults.faults import Fault, FaultKind
from simulator.supervisor.services import lasting_neighbours
from simulator.watch import Watch
from simulator.world.events import BEGAN_AT

LATE = BEGAN_AT + 1_000_000.0


@pytest.fixture(scope="module")
def good() -> Run:
    """A run in which two workers are killed, one after the other."""
    scenario = Scenario(nodes=2, ranks_per_node=1, spares=1, racks=1, step_s=1.0, faults=0)
    faults = tuple(Fault(FaultKind.WORKER_KILLED, after_s, 0.0, 0.5, 0.5) for after_s in (20.0, 40.0))
    done = run(7, scenario=scenario, faults=faults)
    assert (done.violations, done.generations) == ([], 3)
    return done


def changed(items: tuple[Any, ...], position: int, **changes: object) -> tuple[Any, ...]:
    return (*items[:position], msgspec.structs.replace(items[position], **changes), *items[position + 1 :])


def invariants(record: Record, now: float = LATE) -> set[str]:
    return {violation.invariant for violation in check_record(record, now=now, bound_s=400.0)}


def but(record: Record, **changes: object) -> Record:
    return msgspec.structs.replace(record, **changes)


RECORDS: dict[str, Callable[[Record], Record]] = {
    "decision_lost": lambda r: but(r, decisions=r.decisions[1:]),
    "stale_decision": lambda r: but(r, decisions=changed(r.decisions, 0, epoch=9)),
    "two_open_actions": lambda r: but(r, actions=changed(r.actions, 0, ended=-1, state=ActionState.DISPATCHED)),
    "two_open_incidents": lambda r: but(
        r, incidents=changed(r.incidents, 0, states=((1, IncidentState.DECIDING), (999, IncidentState.RESOLVED)))
    ),
    "generation_skipped": lambda r: but(r, generations=(r.generations[0], r.generations[2])),
    "generation_went_back": lambda r: but(r, generations=changed(r.generations, 1, decision=99)),
    "lineage_broken": lambda r: but(
        r, generations=changed(r.generations, 1, lineage=(LineageEntry(1, 10_000), LineageEntry(2)))
    ),
    "stale_command": lambda r: but(
        r,
        commands=changed(r.commands, 0, command=msgspec.structs.replace(r.commands[0].command, fence=Fence(0, 1))),
    ),
    "incident_left_open": lambda r: but(
        r,
        incidents=changed(
            r.incidents,
            1,
            incident=msgspec.structs.replace(r.incidents[1].incident, state=IncidentState.VERIFYING),
        ),
    ),
    "lost_more_than_there_was": lambda r: but(
        r, incidents=changed(r.incidents, 0, incident=msgspec.structs.replace(r.incidents[0].incident, lost_steps=999))
    ),
    "decision_without_incident": lambda r: but(r, incidents=r.incidents[1:]),
}


@pytest.mark.parametrize("invariant", RECORDS)
def test_a_broken_record_is_found(good: Run, invariant: str) -> None:
    assert invariants(good.record) == set()
    assert invariant in invariants(RECORDS[invariant](good.record))


def test_a_failure_decided_twice_is_found(good: Run) -> None:
    """A second decision about a generation that was already replaced; and one made while the first was carried out."""
    decisions, actions = good.record.decisions, good.record.actions
    twin = msgspec.structs.replace(decisions[-2].decision, decision_id="dec-4")
    assert twin.incident_id
    twice = msgspec.structs.replace(decisions[-2], number=4, decision=twin)
    action = msgspec.structs.replace(actions[-2], number=4, began=9_000, ended=9_001)
    record = but(good.record, decisions=(*decisions, twice), actions=(*actions, action))
    assert "decided_twice" in invariants(record)
    at_once = but(record, actions=(*actions, msgspec.structs.replace(action, began=actions[-2].began)))
    assert "decided_twice" in invariants(at_once)


def obeyed(fence: Fence, command_id: str = "act-1.stop.host-a.1", resumed: bool = False) -> Obeyed:
    return Obeyed(1.0, "host-a", "job", command_id, "StopWorkers", fence, resumed)


FACTS: dict[str, list[Fact]] = {
    "stale_command_obeyed": [obeyed(Fence(2, 1)), obeyed(Fence(1, 9), "act-2.stop.host-a.1")],
    "command_obeyed_twice": [obeyed(Fence(1, 1)), obeyed(Fence(1, 1))],
    "older_rank_alive": [WorkerBegan(1.0, "host-a", "job", 1, 0), WorkerBegan(2.0, "host-a", "job", 2, 0)],
    "restored_torn_step": [Restored(1.0, "job", 1, 5, 1, 5, 5, True)],
    "restored_mixed_steps": [Restored(1.0, "job", 1, -1, -1, -1, -1, False)],
    "lost_steps": [Restored(1.0, "job", 1, -1, -1, 5, 6, True)],
    "lost_steps_of_the_store": [Granted(1.0, "job", 1, 5, 5, 5), Restored(2.0, "job", 1, 3, 0, -1, 6, True)],
    "blast_radius": [Cordoned(1.0, "host-a", ("host-b",), 6, 2)],
    "healthy_host_condemned": [Condemned(1.0, "host-a", True, "host-b")],
    "core_fault": [CoreFault(1.0, "action_cannot_be_moved", "{}")],
}


@pytest.mark.parametrize("invariant", FACTS)
def test_a_broken_history_is_found(good: Run, invariant: str) -> None:
    found = {violation.invariant for violation in check_history(FACTS[invariant], good.record)}
    assert invariant.removesuffix("_of_the_store") in found
    harmless: list[Fact] = [
        obeyed(Fence(1, 1)),
        obeyed(Fence(1, 1), resumed=True),
        Condemned(1.0, "host-a", True, ""),
        Cordoned(1.0, "host-a", (), 6, 2),
        Cordoned(1.0, "host-a", ("host-b",), 10, 2),
        Cordoned(1.0, "host-a", ("host-b",), 10, 1),
    ]
    assert check_history(harmless, good.record) == []


def test_only_current_neighbours_are_witnesses(good: Run) -> None:
    """Its own ranks live on in the old generation after it was replaced, so its former neighbours keep no link with
    it."""
    own = good.record.generations[0].plan
    first, second = own.hosts
    assert lasting_neighbours(second.host_id, own, good.record.generations[1].plan) == [first.host_id]
    spare = msgspec.structs.replace(second, host_id="spare")
    ring = {first.host_id: ("spare",), "spare": (first.host_id,)}
    replaced = msgspec.structs.replace(own, generation=9, hosts=(first, spare), peers=ring)
    assert lasting_neighbours(second.host_id, own, replaced) == []


def test_unexplained_rollbacks_are_found(good: Run) -> None:
    saved: list[Fact] = [Saved(float(step), "job", 1, step) for step in range(40)]
    went_back = [*saved, Granted(50.0, "job", 2, known_step=39, reachable_step=9)]
    anew = [*saved, Restored(50.0, "job", 2, -1, -1, -1, 39, True)]

    def found(facts: list[Fact], record: Record = good.record) -> set[str]:
        return {violation.invariant for violation in check_history(facts, record)}

    assert found(went_back) == {"rollback_unsaid", "rollback_without_a_wait"}
    too_little_to_wait_for = Granted(50.0, "job", 2, known_step=39, reachable_step=30)
    assert found([*saved, too_little_to_wait_for]) == {"rollback_unsaid"}
    assert found([*saved, Granted(50.0, "job", 2, known_step=39, reachable_step=39)]) == set()
    assert found(anew) == {"rollback_unsaid"}
    again = Granted(60.0, "job", 2, known_step=39, reachable_step=39)  # the database had forgotten the first
    assert found([*went_back, again]) == set()
    at = next(place for place, d in enumerate(good.record.decisions) if d.number == good.record.generations[1].decision)
    restart = good.record.decisions[at].decision
    explained = msgspec.structs.replace(restart, evidence={"steps_given_up": 30})
    wait = msgspec.structs.replace(restart, rule="wait_for_newer_steps", at=restart.at - 30.0, action=None)
    decisions = changed(good.record.decisions, at, decision=explained)
    waited = but(good.record, decisions=(msgspec.structs.replace(decisions[at], number=99, decision=wait), *decisions))
    assert found(went_back, waited) == set()
    assert found(anew, waited) == set()


def test_a_generation_that_trains_must_save(good: Run) -> None:
    began: list[Fact] = [Restored(1.0, "job", 1, -1, -1, -1, -1, True)]
    saved: list[Fact] = [Saved(float(at), "job", 1, at) for at in range(10)]

    def found(newest: int, facts: Sequence[Fact] = ()) -> set[str]:
        then = Restored(50.0, "job", 2, 9, 1, 9, newest, True)
        return {violation.invariant for violation in check_history([*facts, *began, *saved, then], good.record)}

    assert found(29) == set(), "it waits for replicas for a while"
    assert found(30) == {"training_not_saved"}
    assert (
        found(30, [FaultBegan(0.5, f"{Fault(FaultKind.HOST_KEEPS_NO_SAVE, 0.5, 60.0, 0.5, 0.5)} on host-1")]) == set()
    )


def test_a_step_beyond_the_branch_of_its_history_is_dead(good: Run) -> None:
    """Generation 2 went back from step 9 to step 4: later saves of generation 1 belong to another history."""
    began: list[Fact] = [Restored(1.0, "job", 1, -1, -1, -1, -1, True)]
    steps: list[Fact] = [Saved(2.0, "job", 1, 4), Saved(3.0, "job", 1, 9)]
    back: list[Fact] = [Restored(4.0, "job", 2, 4, 1, 4, 9, True)]
    fine = Restored(5.0, "job", 3, 4, 1, 4, 4, True)
    newer = Restored(5.0, "job", 3, 9, 1, 4, 4, True)
    heard: list[Fact] = [Saved(4.5, "job", 2, 5), Granted(4.8, "job", 3, 5, 5, heard_of=2)]
    unheard: list[Fact] = [Saved(4.5, "job", 2, 5), Granted(4.8, "job", 3, 9, 9, heard_of=1)]

    def found(facts: list[Fact], record: Record = good.record) -> list[str]:
        return [violation.invariant for violation in check_history([*began, *steps, *back, *facts], record)]

    assert found([*heard, fine]) == []
    assert found([*heard, newer]) == ["restored_dead_branch"]
    # Until somebody hears of a step of it, a generation cuts off only what its decision left out.
    assert found([*unheard, newer]) == []
    first, second, third = good.record.generations
    plan = msgspec.structs.replace(second.plan, parent_lineage=(LineageEntry(1, 4),))
    cut = but(good.record, generations=(first, msgspec.structs.replace(second, plan=plan), third))
    assert found([*unheard, newer], cut) == ["restored_dead_branch"]
    assert found([*unheard, newer], but(good.record, generations=(first, third))) == ["restored_dead_branch"]
    # Of an adopted generation the decision is lost; its hosts know its history.
    plan, lineage = msgspec.structs.replace(second.plan, parent_lineage=()), (LineageEntry(1, 4), LineageEntry(2))
    adopted = but(good.record, generations=(first, msgspec.structs.replace(second, plan=plan, lineage=lineage), third))
    assert found([*unheard, fine], adopted) == []
    assert found([*unheard, newer], adopted) == ["restored_dead_branch"]


def test_a_replay_that_decides_otherwise_is_found(good: Run) -> None:
    assert check_replay(good.rounds, good.record) == []
    decisions = good.record.decisions
    forged = msgspec.structs.replace(decisions[0].decision, reason="somebody's taste")
    (violation,) = check_replay(good.rounds, but(good.record, decisions=changed(decisions, 0, decision=forged)))
    assert violation.what.startswith("dec-1: reason was")


def test_time_that_the_account_loses_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def without_useful(*given: Any, **named: Any) -> Any:  # noqa: ANN401 - as the account
        report = real(*given, **named)
        return msgspec.structs.replace(report, seconds_by_category={**report.seconds_by_category, "useful": 0.0})

    real = driver.calculate
    monkeypatch.setattr(driver, "calculate", without_useful)
    scenario = Scenario(nodes=1, ranks_per_node=1, spares=0, racks=1, step_s=1.0, faults=0)
    assert {violation.invariant for violation in run(7, scenario=scenario, faults=()).violations} == {"account_is_lost"}


def test_a_copy_that_is_dropped_is_found_at_its_event() -> None:
    """A step that is complete only with it; and one that no longer outlives the loss of a host."""
    cluster = Cluster(Scenario(nodes=2, ranks_per_node=1, spares=0, racks=2, step_s=1.0, faults=0), Random(3))
    watch, world = Watch(cluster), cluster.world
    cluster.timeline.run_until(BEGAN_AT + 20.0)
    assert watch.violations == []
    first, second = (host for host in world.hosts.values() if host.workers)
    for host, how in ((first, "complete on two hosts"), (second, "complete")):
        host.copies.clear()
        world.copies_changed += 1
        watch.look()
        assert watch.violations[-1].invariant == "recovery_point_dropped"
        assert f"was {how}," in watch.violations[-1].what


def test_a_step_that_is_removed_from_the_store_is_found_at_its_event() -> None:
    scenario = Scenario(nodes=1, ranks_per_node=1, spares=0, racks=1, step_s=1.0, faults=0, stores_every=4)
    cluster = Cluster(scenario, Random(3))
    watch, store = Watch(cluster), cluster.world.store
    cluster.timeline.run_until(BEGAN_AT + 20.0)
    assert store is not None and watch.violations == []
    (newest, generation) = store.complete(cluster.world.truth.lineage)[-1]
    naming = TierNaming(Tier.PERSISTENT, newest + 1)
    lineage = (LineageEntry(generation),)
    store.prune(naming=naming, lineage=lineage, ranks=(0,), keep_every=0, spared=(), may_go_on=lambda: True)
    watch.look()
    assert [violation.invariant for violation in watch.violations] == ["stored_step_dropped"]
