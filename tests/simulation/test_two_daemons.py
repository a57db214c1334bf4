"""Two daemons with one host id: no rank is started twice, and the first daemon works as if the second did not exist."""

from __future__ import annotations

from random import Random

import pytest

from simulator.checks import history_checks
from simulator.checks.history import Obeyed
from simulator.cluster import Cluster, Scenario
from simulator.ports.memory import record_of
from simulator.world.events import BEGAN_AT, MachineClock
from simulator.world.host import Host
from simulator.world.training import SIGKILL, ProcessEnd


class Twin(Host):
    """A daemon on another machine with the host id of an existing one."""

    def start_daemon(self) -> None:
        self._incarnations = self._incarnations or 100
        super().start_daemon()


def restart_a_rank(cluster: Cluster) -> None:
    group, worker = next(pair for host in cluster.world.hosts.values() for pair in host.workers.values())
    cluster.world.exit(group, worker, ProcessEnd(signal_number=SIGKILL))


@pytest.mark.parametrize("seed", range(4))
def test_the_second_of_two_daemons_with_one_id_gets_no_commands(seed: int) -> None:
    scenario = Scenario(nodes=2, ranks_per_node=1, spares=1, racks=1, step_s=1.0, faults=0)
    cluster = Cluster(scenario, Random(seed))
    world, timeline = cluster.world, cluster.timeline
    timeline.run_until(BEGAN_AT + 20.0)
    first = next(host for host in world.hosts.values() if host.workers)
    twin = Twin(world, first.control, first.host_id, first.domain, MachineClock(timeline))
    timeline.run_until(BEGAN_AT + 25.0)
    restart_a_rank(cluster)
    timeline.run_until(BEGAN_AT + 45.0)
    first.kill_daemon()  # restarted at once: no chance for the twin
    first.start_daemon()
    restart_a_rank(cluster)
    timeline.run_until(BEGAN_AT + 70.0)

    assert not twin.workers
    assert len(cluster.memory.generations) == 3
    assert cluster.memory.hosts[first.host_id].incarnation == first.incarnation
    assert sum(isinstance(fact, Obeyed) and fact.host_id == first.host_id for fact in world.facts) >= 3
    assert history_checks.check_history(world.facts, record_of(cluster.memory)) == []
    assert world.truth.newest > 40
