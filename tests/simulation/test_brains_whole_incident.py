"""Whole incidents: detector, policy and playbook together, from the fault until steps advance again."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
from support.policy.small_world import World

from flyball.contracts.cluster import HostState, JobSpec, JobState
from flyball.contracts.decisions import DecisionKind, Incident, IncidentState
from flyball.contracts.identity import run_id

NewWorld = Callable[..., World]


def started(new_world: NewWorld, spec: JobSpec, **options: object) -> World:
    world = new_world(**options)
    world.submit(spec)
    world.run(lambda: world.step() >= 20, within_s=30.0)
    assert world.job.state is JobState.RUNNING
    return world


def only_incident(world: World) -> Incident:
    (incident,) = world.store.incidents.values()
    return incident


def kinds(world: World) -> list[DecisionKind]:
    return [decision.kind for decision in world.store.decisions]


def test_a_killed_worker_restarts_in_place(new_world: NewWorld, spec: JobSpec) -> None:
    world = started(new_world, spec)
    fault_at, step = world.now, world.step()
    world.kill(3)
    world.settle()
    incident = only_incident(world)
    assert incident.state is IncidentState.RESOLVED
    assert incident.cause == "worker_killed"
    assert "Rank 3 on host-b" in incident.message and "SIGKILL" in incident.message
    assert (incident.failed_step, incident.restored_step, incident.lost_steps) == (step, step, 0)
    assert kinds(world) == [DecisionKind.START_JOB, DecisionKind.RESTART_IN_PLACE]
    assert incident.since - fault_at < 5.0
    assert world.job.generation.restart_count == 1


def test_a_hang_is_found_by_its_beacons(new_world: NewWorld, spec: JobSpec) -> None:
    world = started(new_world, spec)
    fault_at = world.now
    world.hang(1)
    world.settle()
    incident = only_incident(world)
    assert incident.cause == "rank_stalled"
    assert incident.lost_steps == 0
    assert incident.observed_at - fault_at < 3.0
    assert kinds(world)[-1] is DecisionKind.RESTART_IN_PLACE


def test_a_lost_host_is_replaced_though_secondary_failures_come_first(new_world: NewWorld, spec: JobSpec) -> None:
    world = started(new_world, spec)
    step = world.step()
    world.host_down("host-b")
    world.settle()
    incident = only_incident(world)
    assert incident.cause == "host_silent"
    assert kinds(world)[1] is DecisionKind.HOLD  # lost connections are not the cause
    assert kinds(world)[-1] is DecisionKind.MIGRATE_TO_SPARE
    assert [part.host_id for part in world.job.generation.hosts] == ["host-a", "host-c"]
    assert step - 1 <= incident.restored_step <= step
    assert incident.lost_steps <= 1
    assert world.store.hosts["host-b"].state is HostState.SILENT
    assert world.job.generation.restart_count == 0  # a machine fault costs no restart


def test_a_preemption_loses_nothing(new_world: NewWorld, spec: JobSpec) -> None:
    world = started(new_world, spec)
    world.preempt("host-a", 30.0)
    world.run(lambda: bool(world.store.incidents), within_s=5.0)
    world.settle()
    incident = only_incident(world)
    assert incident.cause == "preemption_notice"
    assert incident.state is IncidentState.RESOLVED
    assert kinds(world)[1:] == [DecisionKind.EMERGENCY_CHECKPOINT, DecisionKind.MIGRATE_TO_SPARE]
    assert incident.lost_steps == 0
    assert incident.restored_step == incident.failed_step
    assert [part.host_id for part in world.job.generation.hosts] == ["host-c", "host-b"]
    assert world.store.hosts["host-a"].state is HostState.CORDONED


def test_the_four_faults_one_after_the_other(new_world: NewWorld, spec: JobSpec) -> None:
    world = started(new_world, spec, hosts={f"host-{letter}": f"rack-{letter}" for letter in "abcd"})
    for fault in (
        lambda: world.kill(0),
        lambda: world.hang(2),
        lambda: world.host_down("host-b"),
        lambda: world.preempt("host-a", 30.0),
    ):
        before = len(world.store.incidents)
        fault()
        world.run(lambda before=before: len(world.store.incidents) > before, within_s=15.0)
        world.settle()
        goal = world.step() + 10
        world.run(lambda goal=goal: world.step() >= goal, within_s=20.0)
    assert [i.cause for i in world.store.incidents.values()] == [
        "worker_killed",
        "rank_stalled",
        "host_silent",
        "preemption_notice",
    ]
    assert all(i.lost_steps <= 1 for i in world.store.incidents.values())
    assert world.job.generation.generation == 5
    runs = [placement.run for _, placement in world.store.started.values()]
    assert runs == [run_id(world.job.submitted_at)] * 5


def test_without_a_spare_the_job_waits_for_a_host(new_world: NewWorld, spec: JobSpec) -> None:
    world = started(new_world, spec, hosts={"host-a": "r1", "host-b": "r2"})
    world.host_down("host-b")
    world.run(lambda: any(i.holding_for == "a spare host" for i in world.open_incidents()), within_s=30.0)
    decided = len(world.store.decisions)
    for _ in range(100):
        world.tick()
    assert len(world.store.decisions) == decided  # waiting is one decision
    other = type(world.hosts["host-a"])("host-z", "r3")
    world.hosts["host-z"] = other
    world.settle()
    assert [part.host_id for part in world.job.generation.hosts] == ["host-a", "host-z"]


def test_a_host_that_comes_back_is_cleaned_and_becomes_a_spare(new_world: NewWorld, spec: JobSpec) -> None:
    world = started(new_world, spec)
    world.hosts["host-b"].cut_off = True
    world.run(lambda: world.store.hosts["host-b"].state is HostState.SILENT, within_s=20.0)
    world.settle()
    world.hosts["host-b"].workers[2].alive = True  # it never learnt that it was superseded
    world.hosts["host-b"].workers[2].hung = True
    world.hosts["host-b"].cut_off = False
    world.run(lambda: world.store.hosts["host-b"].state is HostState.SPARE, within_s=30.0)
    world.settle()
    assert not any(worker.alive for worker in world.hosts["host-b"].workers.values())
    assert DecisionKind.CORDON in kinds(world)
    assert world.job.generation.generation == 2  # the job itself was left alone


def test_an_identical_exception_fails_the_job(new_world: NewWorld, spec: JobSpec) -> None:
    world = new_world()
    world.fails_at = {30: "loss is nan at 0x7f00"}
    world.submit(spec)
    world.run(lambda: world.job.state.ended, within_s=60.0)
    assert world.job.state is JobState.FAILED
    assert world.store.decisions[-1].rule == "fail_on_identical_exception"
    assert "loss is nan" in world.job.message
    assert only_incident(world).state is IncidentState.ESCALATED
    rules = [decision.rule for decision in world.store.decisions if decision.incident_id]
    assert rules == ["restart_in_place", "leave_the_host_of_an_identical_exception", "fail_on_identical_exception"]
    assert world.job.generation.generation == 3, "the host was to blame, before the job is"
    world.run(lambda: all(action.state.ended for action in world.store.actions.values()), within_s=30.0)


def kill_and_wait(world: World, new_steps: int) -> None:
    """Kill a rank once it is this many steps beyond the furthest step of all earlier generations."""
    generation = world.job.generation
    past = max(generation.furthest_step, -1 if generation.restore_step is None else generation.restore_step)
    world.run(lambda: world.step() >= past + new_steps, within_s=30.0)
    world.kill(1)
    world.run(lambda: world.job.state.ended or world.job.generation.generation > generation.generation, within_s=20.0)
    if not world.job.state.ended:
        number = world.job.generation.generation
        world.run(lambda: world.job.generation.started_at > 0.0 and world.step() > 0, within_s=20.0)
        assert world.job.generation.generation == number


def test_restarts_without_progress_are_used_up(new_world: NewWorld, spec: JobSpec) -> None:
    world = started(new_world, msgspec.structs.replace(spec, max_restarts=2))
    for used in (1, 2):
        kill_and_wait(world, 20 if used == 1 else 2)
        assert world.job.generation.used_restarts == used
    kill_and_wait(world, 2)
    assert world.job.state is JobState.FAILED
    assert world.store.decisions[-1].rule == "fail_when_restarts_are_used_up"
    assert "All 2 restarts" in world.job.message and "without progress" in world.job.message


def test_progress_refills_the_restarts(new_world: NewWorld, spec: JobSpec) -> None:
    """A job of many hours meets more ordinary kills than --max-restarts."""
    world = started(new_world, msgspec.structs.replace(spec, max_restarts=2))
    for number in range(1, 8):
        kill_and_wait(world, 20)
        assert (world.job.generation.restart_count, world.job.generation.used_restarts) == (number, 1)
        reason = world.store.decisions[-1].reason
        assert "This is restart 1 of 2" in reason
        assert ("new steps since the last failure refilled the budget" in reason) == (number > 1)
    kill_and_wait(world, 2)
    assert world.job.generation.used_restarts == 2
    kill_and_wait(world, 20)  # also after the budget was nearly used up
    assert (world.job.generation.restart_count, world.job.generation.used_restarts) == (9, 1)


def test_a_job_that_is_done_succeeds(new_world: NewWorld, spec: JobSpec) -> None:
    world = new_world()
    world.last_step = 25
    world.submit(spec)
    world.run(lambda: world.job.state.ended, within_s=30.0)
    assert world.job.state is JobState.SUCCEEDED
    assert not world.store.incidents


def test_a_host_that_dies_while_a_restart_stops_its_workers(new_world: NewWorld, spec: JobSpec) -> None:
    world = started(new_world, spec)
    world.kill(0)
    world.hosts["host-b"].cut_off = True  # it will not reply to the stop
    world.host_down("host-b")
    world.settle()
    (incident,) = world.store.incidents.values()
    assert incident.cause == "host_silent"
    assert DecisionKind.RESTART_IN_PLACE in kinds(world) and kinds(world)[-1] is DecisionKind.MIGRATE_TO_SPARE
    assert incident.lost_steps <= 1


@pytest.mark.parametrize("seed", range(25))
def test_any_sequence_of_faults_ends_with_every_incident_closed(new_world: NewWorld, spec: JobSpec, seed: int) -> None:
    hosts = {f"host-{letter}": f"rack-{letter}" for letter in "abcdef"}
    world = started(new_world, spec, seed=seed, hosts=hosts)
    lost = 0
    for _ in range(5):
        placed = [part.host_id for part in world.job.generation.hosts]
        fault = world.random.choice(["kill", "hang", "host_down", "preempt", "kill", "hang"])
        try:
            match fault:
                case "kill":
                    world.kill(world.random.randrange(4))
                case "hang":
                    world.hang(world.random.randrange(4))
                case "host_down" if lost < 3 and not world.open_incidents():  # with one replica, one host at a time
                    world.host_down(world.random.choice(placed))
                    lost += 1
                case "preempt" if lost < 3:
                    world.preempt(world.random.choice(placed), 30.0)
                    lost += 1
        except LookupError:
            pass  # it is being restarted
        if world.random.random() < 0.5:  # the next fault comes during this one
            for _ in range(world.random.randrange(25)):
                world.tick()
        else:
            for _ in range(60):
                world.tick()
            world.settle(within_s=300.0)
            goal = world.step() + 5
            world.run(lambda goal=goal: world.step() >= goal or bool(world.open_incidents()), within_s=60.0)
    for _ in range(60):
        world.tick()
    world.settle(within_s=600.0)
    goal = world.step() + 5
    world.run(lambda: world.step() >= goal, within_s=60.0)
    assert world.job.state is JobState.RUNNING
    assert all(incident.state.closed for incident in world.store.incidents.values())
    assert all(step is not None for _, step in world.restored[1:]), "a restart from scratch lost everything"


def test_a_notice_too_short_for_the_save_flushes_the_newest_recovery_point(new_world: NewWorld, spec: JobSpec) -> None:
    durable = msgspec.structs.replace(spec.checkpoint, persistent_dir="/store", persistent_every_s=60.0)
    world = started(new_world, msgspec.structs.replace(spec, checkpoint=durable))
    world.preempt("host-a", 5.4)  # minus the reserve for moving: too little for the margin of three steps
    world.run(lambda: bool(world.store.incidents), within_s=5.0)
    world.settle()
    incident = only_incident(world)
    assert incident.state is IncidentState.RESOLVED
    assert kinds(world)[1:] == [DecisionKind.EMERGENCY_CHECKPOINT, DecisionKind.MIGRATE_TO_SPARE]
    assert "The newest recovery point was flushed instead" in world.store.decisions[-1].reason
    assert incident.lost_steps <= 1
