"""Given faults in simulated clusters, around the services' own detector, loop, executor and playbook: the decisions."""

from __future__ import annotations

import msgspec
import pytest

from ckpt_engine.tiers.writing import tier_retention
from simulator.checks.history import Parked, Restored, Sealed
from simulator.cluster import Scenario
from simulator.driver import Run, run
from simulator.faults.faults import Fault, FaultKind
from simulator.world.events import BEGAN_AT

WORLDS = range(2)  # for a given fault; any fault may come in any seed of a swarm (test_swarm.py)


@pytest.mark.parametrize("nodes", [1, 3])
def test_a_host_that_returns_empty_before_it_is_missed_is_found_at_once(nodes: int) -> None:
    """A fast reboot, or a container restarted under the same name: nobody reports its ranks' end, and it never stops
    reporting."""
    scenario = Scenario(nodes=nodes, ranks_per_node=2, spares=1, racks=2, step_s=1.0, faults=1)
    for seed in WORLDS:
        done = run(seed, scenario=scenario, faults=(Fault(FaultKind.HOST_RESTARTS, 30.0, 0.5, 0.3, 0.1),))
        assert done.violations == []
        (incident,) = [found.incident for found in done.record.incidents]
        assert incident.cause == "host_restarted"
        assert incident.opened_at - BEGAN_AT < 34.0


@pytest.mark.parametrize(
    ("kind", "lasts_s", "nodes", "spares"),
    [
        (FaultKind.SPARE_LACKS_FILES, 100.0, 1, 2),
        (FaultKind.SPARE_LACKS_FILES, 100.0, 3, 2),
        (FaultKind.SHARE_AWAY, 5.0, 1, 1),
        (FaultKind.SHARE_AWAY, 25.0, 3, 1),
        (FaultKind.PORTS_TAKEN, 0.0, 1, 1),
        (FaultKind.PORTS_TAKEN, 0.0, 2, 1),
    ],
)
def test_a_failed_start_neither_ends_the_job_nor_costs_a_restart(
    kind: FaultKind, lasts_s: float, nodes: int, spares: int
) -> None:
    scenario = Scenario(nodes=nodes, ranks_per_node=2, spares=spares, racks=2, step_s=1.0, faults=1)
    for seed in WORLDS:
        done = run(seed, scenario=scenario, faults=(Fault(kind, 30.0, lasts_s, 0.3, 0.9),))
        assert done.violations == []
        assert done.generations > 2, "nothing was retried"
        assert done.record.generations[-1].plan.restart_count <= 1, "the worker that was killed"


def stood_parked(done: Run) -> float:
    return sum(fact.stood_s for fact in done.facts if isinstance(fact, Parked))


def kinds(done: Run) -> list[str]:
    return [decided.decision.kind.value for decided in done.record.decisions if decided.decision.action is not None]


def test_a_false_preemption_notice_releases_the_ranks() -> None:
    """Nor does a later spare make them move."""
    scenario = Scenario(nodes=2, ranks_per_node=1, spares=1, racks=2, step_s=1.0, faults=1)
    for seed in WORLDS:
        done = run(seed, scenario=scenario, faults=(Fault(FaultKind.NOTICE_IN_VAIN, 30.0, 30.0, 0.3, 0.3),))
        assert done.violations == []
        assert kinds(done) == ["start_job", "emergency_checkpoint", "resume"]
        assert stood_parked(done) < 30.0


def test_a_second_notice_is_handled_again() -> None:
    scenario = Scenario(nodes=2, ranks_per_node=1, spares=1, racks=2, step_s=1.0, faults=2)
    first = Fault(FaultKind.NOTICE_IN_VAIN, 30.0, 30.0, 0.3, 0.3)
    for seed in WORLDS:
        done = run(seed, scenario=scenario, faults=(first, Fault(FaultKind.PREEMPTED, 140.0, 40.0, 0.3, 0.3)))
        assert done.violations == []
        assert kinds(done)[2:5] == ["resume", "emergency_checkpoint", "migrate_to_spare"]
        assert [found.incident.lost_steps for found in done.record.incidents] == [0, 0]


@pytest.mark.parametrize(("noticed_late", "then"), [(0.3, ["migrate_to_spare"] * 2), (0.75, ["resume"])])
def test_a_drain_whose_only_spare_dies_gives_the_ranks_their_host_back(noticed_late: float, then: list[str]) -> None:
    """Whether they have left it by then, or are parked."""
    scenario = Scenario(nodes=2, ranks_per_node=1, spares=1, racks=2, step_s=1.0, faults=1)
    for seed in WORLDS:
        done = run(seed, scenario=scenario, faults=(Fault(FaultKind.DRAIN_IN_VAIN, 30.0, 150.0, 0.3, noticed_late),))
        assert done.violations == []
        assert kinds(done) == ["start_job", "emergency_checkpoint", *then]
        assert stood_parked(done) < 30.0
        assert done.record.incidents[0].incident.resolved_at - BEGAN_AT < 60.0


def test_saves_that_fail_for_long_are_one_incident_and_no_restart() -> None:
    scenario = Scenario(nodes=2, ranks_per_node=2, spares=1, racks=2, step_s=1.0, faults=1)
    for seed in WORLDS:
        done = run(seed, scenario=scenario, faults=(Fault(FaultKind.HOST_KEEPS_NO_SAVE, 30.0, 100.0, 0.3, 0.3),))
        assert done.violations == []
        assert kinds(done) == ["start_job"]
        (incident,) = (found.incident for found in done.record.incidents)
        assert incident.cause == "saves_failing"
        assert 90.0 < incident.opened_at - BEGAN_AT < 110.0
        assert incident.resolved_at - BEGAN_AT < 150.0


@pytest.mark.parametrize(
    ("kind", "then"),
    [
        (FaultKind.HOST_WARNS, ["emergency_checkpoint", "migrate_to_spare"]),
        (FaultKind.HOST_BROKEN, ["migrate_to_spare"]),
    ],
)
@pytest.mark.parametrize("spares", [0, 1])
def test_a_condition_moves_the_ranks_if_there_is_a_spare_and_ends_with_its_incident(
    kind: FaultKind, then: list[str], spares: int
) -> None:
    scenario = Scenario(nodes=2, ranks_per_node=1, spares=spares, racks=2, step_s=1.0, faults=1)
    for seed in WORLDS:
        done = run(seed, scenario=scenario, faults=(Fault(kind, 30.0, 40.0, 0.3, 0.3),))
        assert done.violations == []
        assert kinds(done) == ["start_job", *(then if spares else [])]
        (incident,) = (found.incident for found in done.record.incidents)
        assert (incident.cause, incident.state.value) == ("host_condition", "resolved")
        assert incident.lost_steps <= (0 if kind is FaultKind.HOST_WARNS else 3)


ALL_SILENT = (FaultKind.ALL_HOSTS_PAUSED, FaultKind.ALL_HOSTS_CUT_FROM_SUPERVISOR)


@pytest.mark.parametrize("kind", ALL_SILENT)
@pytest.mark.parametrize("nodes", [1, 2])
def test_a_job_whose_hosts_are_all_silent_for_a_while_is_not_restarted_from_scratch(
    kind: FaultKind, nodes: int
) -> None:
    """Nor started again: its ranks train, or continue where they were paused."""
    scenario = Scenario(nodes=nodes, ranks_per_node=2, spares=nodes, racks=2, step_s=1.0, faults=1)
    for seed in WORLDS:
        done = run(seed, scenario=scenario, faults=(Fault(kind, 60.0, 35.0, 0.3, 0.3),))
        assert done.violations == []
        assert (kinds(done), done.generations) == (["start_job"], 1)
        assert "wait_for_newer_steps" in {decided.decision.rule for decided in done.record.decisions}


@pytest.mark.parametrize("never", [False, True])
@pytest.mark.parametrize("kind", ALL_SILENT)
def test_the_wait_for_newer_steps_ends_unless_the_user_forbids_a_start_from_scratch(
    kind: FaultKind, never: bool
) -> None:
    scenario = Scenario(nodes=2, ranks_per_node=1, spares=2, racks=2, step_s=1.0, faults=1, never_from_scratch=never)
    done = run(3, scenario=scenario, faults=(Fault(kind, 60.0, 120.0, 0.3, 0.3),))
    assert done.violations == []
    assert kinds(done)[:2] == (["start_job"] if never else ["start_job", "migrate_to_spare"])
    if never:
        (incident,) = [found.incident for found in done.record.incidents]
        assert (incident.cause, incident.lost_steps) == ("host_silent", 0)
    else:
        given_up = next(d.decision for d in done.record.decisions if d.decision.kind.value == "migrate_to_spare")
        assert given_up.evidence["steps_given_up"] > 50
        assert given_up.at - BEGAN_AT < 140.0


def test_a_host_that_floods_delays_no_other_and_loses_nothing() -> None:
    scenario = Scenario(nodes=2, ranks_per_node=1, spares=1, racks=2, step_s=1.0, faults=2)
    flood = Fault(FaultKind.HOST_FLOODS, 30.0, 8.0, 0.3, 0.3)
    done = run(5, scenario=scenario, faults=(flood, Fault(FaultKind.WORKER_KILLED, 36.0, 0.0, 0.9, 0.3)))
    assert done.violations == [], "the spool is empty in the end"
    (incident,) = [found.incident for found in done.record.incidents]
    assert (incident.cause, incident.host_id) == ("worker_killed", "host-1")
    assert incident.opened_at - BEGAN_AT < 37.0


def test_a_database_from_before_a_flood_takes_what_the_spool_still_has() -> None:
    scenario = Scenario(nodes=2, ranks_per_node=1, spares=1, racks=2, step_s=1.0, faults=2)
    older = Fault(FaultKind.DATABASE_OLDER, 25.0, 60.0, 0.3, 0.2)  # with new processes: no sensor knows the host
    done = run(5, scenario=scenario, faults=(older, Fault(FaultKind.HOST_FLOODS, 30.0, 8.0, 0.3, 0.3)))
    assert done.violations == [], "the spool is empty in the end"


@pytest.mark.parametrize("lasts_s", [0.5, 20.0, 60.0])
@pytest.mark.parametrize("restarted", [True, False])
def test_a_job_is_adopted_by_a_database_that_went_back(lasts_s: float, restarted: bool) -> None:
    scenario = Scenario(nodes=2, ranks_per_node=2, spares=1, racks=2, step_s=1.0, faults=3)
    older = Fault(FaultKind.DATABASE_OLDER, 30.0, lasts_s, 0.3, 0.2 if restarted else 0.9)
    killed = Fault(FaultKind.WORKER_KILLED, 30.0 + lasts_s / 2, 0.0, 0.3, 0.3)
    later = Fault(FaultKind.HOST_DOWN, 140.0, 60.0, 0.3, 0.3)
    for seed in WORLDS:
        assert run(seed, scenario=scenario, faults=(older, killed, later)).violations == []


def test_a_job_is_adopted_by_an_empty_database() -> None:
    scenario = Scenario(nodes=2, ranks_per_node=2, spares=1, racks=2, step_s=1.0, faults=2)
    lost, killed = (
        Fault(FaultKind.DATABASE_LOST, 30.0, 0.0, 0.3, 0.3),
        Fault(FaultKind.WORKER_KILLED, 80.0, 0.0, 0.3, 0.3),
    )
    for seed in WORLDS:
        done = run(seed, scenario=scenario, faults=(lost, killed))
        assert done.violations == []
        assert {found.incident.cause for found in done.record.incidents} == {"database_new", "worker_killed"}


STORED = Scenario(nodes=2, ranks_per_node=1, spares=2, racks=2, step_s=1.0, faults=1, stores_every=4)
ALL_LOST = Fault(FaultKind.ALL_HOSTS_LOST, 69.0, 30.0, 0.3, 0.3)


def newest_sealed(done: Run) -> list[int]:
    """The steps that were in the store when the hosts were lost, oldest first."""
    sealed = (fact for fact in done.facts if isinstance(fact, Sealed) and fact.at - BEGAN_AT < ALL_LOST.after_s)
    return [fact.step for fact in sealed]


def restored(done: Run) -> int:
    """The step from which the second generation went on."""
    return next(fact.step for fact in done.facts if isinstance(fact, Restored) and fact.generation > 1)


@pytest.mark.parametrize("away", [(), (Fault(FaultKind.STORE_AWAY, 40.0, 45.0, 0.3, 0.3),)], ids=["there", "away"])
def test_a_job_that_lost_all_of_its_hosts_goes_on_from_the_store(away: tuple[Fault, ...]) -> None:
    """From the newest step that has a world manifest; one that does not answer is waited for."""
    done = run(3, scenario=STORED, faults=(*away, ALL_LOST))
    assert done.violations == []
    assert restored(done) == newest_sealed(done)[-1] > 20
    without = run(3, scenario=msgspec.structs.replace(STORED, stores_every=0), faults=(ALL_LOST,))
    assert (without.violations, restored(without)) == ([], -1)


def test_hosts_that_look_into_the_store_find_what_the_database_has_not_heard_of() -> None:
    """It is away while newer steps are stored, and then nobody is left to tell it."""
    away = Fault(FaultKind.DATABASE_AWAY, 40.0, 32.0, 0.3, 0.3)
    sensors = (Fault(FaultKind.SENSOR_KILLED, 70.0, 0.5, pick, 0.3) for pick in (0.1, 0.9))
    done = run(3, scenario=STORED, faults=(away, *sensors, ALL_LOST))
    assert done.violations == []
    assert restored(done) == newest_sealed(done)[-1]


def test_the_store_keeps_the_step_that_the_supervisor_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its database is away while newer steps are stored, and then nobody is left to tell it, or can look into the
    store."""
    faults = (
        Fault(FaultKind.DATABASE_AWAY, 40.0, 32.0, 0.3, 0.3),
        *(Fault(FaultKind.SENSOR_KILLED, 70.0, 0.5, pick, 0.3) for pick in (0.1, 0.9)),
        Fault(FaultKind.STORE_AWAY, 70.0, 40.0, 0.3, 0.3),
        ALL_LOST,
    )
    done = run(3, scenario=STORED, faults=faults)
    assert done.violations == []
    assert 0 < restored(done) < newest_sealed(done)[-3], "the newest that the database had"
    monkeypatch.setattr(tier_retention, "unconfirmed", lambda *_: frozenset())
    found = run(3, scenario=STORED, faults=faults)
    assert "shard_not_there" in {violation.invariant for violation in found.violations}
