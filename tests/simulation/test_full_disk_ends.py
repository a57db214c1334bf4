"""A simulated host whose disk is full ends a job as the daemon does."""

from __future__ import annotations

from random import Random

import pytest

from flyball.contracts.decisions import Command, CommandUpdate, EndJob, UpdateState
from flyball.contracts.identity import Fence
from flyball.contracts.reports.signals import Report
from flyball.contracts.reports.standings import HostStanding
from simulator.cluster import JOB, Cluster, Scenario
from simulator.world.events import BEGAN_AT, EventQueue
from simulator.world.host import Host


class NoServices:
    """Keeps the answers."""

    def __init__(self) -> None:
        self.answers: list[CommandUpdate] = []

    def report(self, host: Host, report: Report) -> None:
        """Nobody is there."""

    def poll(self, host: Host) -> None:
        """Nobody is there."""

    def reply(self, host: Host, update: CommandUpdate) -> None:
        self.answers.append(update)

    def send_standing(self, host: Host, standing: HostStanding) -> None:
        """Nobody is there."""


@pytest.fixture
def full() -> tuple[EventQueue, Host, NoServices, Fence]:
    """A host with a rank and copies; its disk is full now, and it is out of touch."""
    scenario = Scenario(nodes=1, ranks_per_node=1, spares=1, racks=1, step_s=1.0, faults=0)
    cluster = Cluster(scenario, Random(1))
    cluster.timeline.run_until(BEGAN_AT + 20.0)
    host = next(host for host in cluster.world.hosts.values() if host.workers)
    services = NoServices()
    host.control, host.is_disk_full = services, True
    (held,) = host.commands.held()
    assert host.copies and held.ranks == (0,)
    return cluster.timeline, host, services, held.fence


def end(timeline: EventQueue, host: Host, fence: Fence, command_id: str = "act-9.end.host.1") -> None:
    host.commands.obey(Command(command_id, "act-9", host.host_id, fence, EndJob(JOB, 1, 0.0), 30.0), "cluster")
    timeline.run_until(timeline.now + 1.0)


def test_its_memory_is_free_and_the_end_recorded_once_there_is_room(
    full: tuple[EventQueue, Host, NoServices, Fence],
) -> None:
    timeline, host, services, fence = full
    end(timeline, host, fence)
    assert services.answers[0].state is UpdateState.SUCCEEDED
    assert (host.workers, host.copies, host.commands.held(), host.commands.ended) == ({}, [], (), {JOB: 1})
    host.is_disk_full = False
    timeline.run_until(timeline.now + 5.0)
    host.is_disk_full = True
    host.kill_daemon()
    host.start_daemon()
    assert (host.commands.held(), host.commands.ended) == ((), {JOB: 1})


def test_a_daemon_that_is_killed_before_there_is_room_has_forgotten_the_end(
    full: tuple[EventQueue, Host, NoServices, Fence],
) -> None:
    timeline, host, _, fence = full
    end(timeline, host, fence)
    host.kill_daemon()
    host.start_daemon()
    (held,) = host.commands.held()
    assert (held.spec.job, held.ranks, host.commands.ended, host.copies) == (JOB, (), {}, [])


def test_under_a_newer_fence_its_memory_is_freed_once_there_is_room(
    full: tuple[EventQueue, Host, NoServices, Fence],
) -> None:
    timeline, host, services, fence = full
    end(timeline, host, Fence(fence.epoch + 1, fence.generation))
    assert (services.answers[0].state, services.answers[0].code) == (UpdateState.FAILED, "storage_full")
    assert host.copies and not host.workers
    host.is_disk_full = False
    timeline.run_until(timeline.now + 5.0)
    assert host.copies == []
