"""An hour of healthy jobs, in simulated time: late reports of busy machines, long evaluations, slow saves, slow data.
Nothing is decided but the start."""

from __future__ import annotations

from random import Random

import pytest

from flyball.contracts.cluster import Activity, Phase
from simulator.cluster import Cluster, Scenario
from simulator.world.events import BEGAN_AT

HOUR_S = 3600.0
LONGEST_STEP_S = 2.2
LATE_S = 1.0  # a machine that is busy: its daemon and ranks get no CPU for as long

ALL_WORK, ALL_WAIT = (Activity.ACTIVE,), (Activity.IDLE,)
ONE_WORKS = (Activity.ACTIVE, Activity.IDLE, Activity.IDLE, Activity.IDLE)
ONE_WRITES = (Activity.BLOCKED, Activity.IDLE, Activity.IDLE, Activity.IDLE)
# Phase, what the ranks do, the longest that it takes. The two hosts report to two sensors, and one of these sees only
# ranks that are idle while rank 0 works: its patience is 300 s.
PAUSES = [
    (Phase.EVAL, ALL_WORK, 600.0),
    (Phase.STEP, ALL_WORK, 600.0),  # an evaluation of which the script says nothing
    (Phase.STEP, ONE_WORKS, 280.0),  # rank 0 evaluates, the others wait for it
    (Phase.CHECKPOINT, ALL_WORK, 50.0),
    (Phase.STEP, ONE_WRITES, 280.0),  # rank 0 writes to a slow disk
    (Phase.STEP, ALL_WAIT, 120.0),  # for data
]


@pytest.mark.proof
@pytest.mark.parametrize("seed", range(2))
def test_a_healthy_hour_leads_to_no_decision(seed: int) -> None:
    rng = Random(seed)
    scenario = Scenario(nodes=2, ranks_per_node=2, spares=1, racks=2, step_s=rng.uniform(0.5, 1.5), faults=0)
    cluster = Cluster(scenario, rng)
    world, timeline = cluster.world, cluster.timeline
    world.network.slow_fraction, world.network.delay_s = 0.05, 0.3
    timeline.run_until(BEGAN_AT + 90.0)
    (group,) = {id(group): group for host in world.hosts.values() for group, _ in host.workers.values()}.values()
    usual_s, seen = group.step_s, []
    while timeline.now < BEGAN_AT + HOUR_S:
        timeline.run_until(timeline.now + rng.uniform(5.0, 60.0))
        group.step_s = rng.uniform(usual_s, LONGEST_STEP_S)
        late = rng.choice([*world.hosts.values()])
        late.pause()
        timeline.run_until(timeline.now + rng.uniform(0.1, LATE_S))
        late.resume()
        if rng.random() < 0.3:
            phase, doing, longest_s = rng.choice(PAUSES)
            seconds = rng.uniform(0.1, 1.0) * longest_s
            group.pause(phase, doing, seconds)
            timeline.run_until(timeline.now + seconds + 3.0)
            seen.append(phase)
    memory = cluster.memory
    assert [decision.kind.value for decision, _ in memory.decisions.values()] == ["start_job"]
    assert not memory.incidents
    assert world.truth.newest > 500 and len(seen) > 5, "it trained, and paused"
