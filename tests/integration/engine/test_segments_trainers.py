"""Real trainers with real engines: all save the named step, a host is lost, and the spare resumes from it."""

from __future__ import annotations

import os
import signal

from support.clocks.waits import until
from support.commands.warm_python import WarmPython, WarmScript
from support.hosts.engine_cluster import EngineCluster
from support.hosts.engines import EngineHost

from ckpt_engine.slots.rank_segments import RankSegments
from flyball.contracts import wire
from flyball.contracts.checkpoints import Lineage, LineageEntry, RestorePlan, Tier, branch
from flyball.contracts.cluster import Phase
from flyball.contracts.identity import Fence
from flyball.contracts.on_host import worker_env
from flyball.contracts.on_host.engine_wire import Arm, AwaitSaved, Disarm, GetStatus
from flyball.contracts.on_host.segments import beacon_path, rank_segment
from flyball.sdk.beacon import BeaconReader, create_beacon

JOB = "job"  # as in conftest.py

TRAINER = """
import sys, time, torch, flyball
job = flyball.attach()
state = {"weight": torch.full((100_000,), float(job.rank)), "steps": []}
start = job.restore(state)
if start:
    assert state["steps"] == list(range(start)), state["steps"]
    assert state["weight"].eq(job.rank + start).all()
for step in range(start, int(sys.argv[1])):
    state["weight"] += 1
    state["steps"].append(step)
    job.step(step)
    handle = job.save(step, state)
    if not handle.staged:
        sys.exit(f"step {step}: {handle!r}")
    time.sleep(0.002)  # there is nothing to compute
if not handle.replicated.wait(120):
    sys.exit(f"step {step} was not replicated")
job.close()
"""


def start_trainer(
    python: WarmPython, host: EngineHost, rank: int, lineage: Lineage, restore_step: int | None, steps: int
) -> WarmScript:
    generation = lineage[-1].generation
    beacon = beacon_path(host.prefix, JOB, generation, rank)
    create_beacon(beacon)
    environment = {
        **os.environ,
        "RANK": str(rank),
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "1",
        worker_env.JOB: JOB,
        worker_env.GENERATION: str(generation),
        worker_env.BEACON: beacon,
        worker_env.SHM_PREFIX: host.prefix,
        worker_env.ENGINE_NOTIFY: str(host.state_dir / "notify.sock"),
        worker_env.RESTORE_STEP: "" if restore_step is None else str(restore_step),
        worker_env.LINEAGE: wire.encode(lineage).decode(),
    }
    return python.start(TRAINER, str(steps), environment=environment)


def test_an_emergency_step_survives_the_loss_of_its_host(warm_python: WarmPython, cluster: EngineCluster) -> None:
    a, b = cluster.host("a"), cluster.host("b")
    cluster.configure(cluster.placement({"a": (0,), "b": (1,)}))
    first = (LineageEntry(1),)
    trainers = [
        start_trainer(warm_python, a, 0, first, None, 1_000_000),
        start_trainer(warm_python, b, 1, first, None, 1_000_000),
    ]
    try:
        beacons = [BeaconReader(beacon_path(host.prefix, JOB, 1, rank)) for rank, host in enumerate((a, b))]
        until(lambda: all(beacon.snapshot().step >= 3 for beacon in beacons), 180.0)
        for ahead in (50, 400, 3200):  # on a busy machine trainers may pass a step before they receive its name
            named = max(beacon.snapshot().step for beacon in beacons) + ahead
            armed = [host.ask(Arm(Fence(1, 1), JOB, named)) for host in (a, b)]
            if all(reply.ok for reply in armed):
                break
            assert all(host.ask(Disarm(Fence(1, 1), JOB)).ok for host in (a, b))
        assert all(reply.ok for reply in armed), armed
        for host in (a, b):  # 3200 steps may take minutes
            until(lambda host=host: host.ask(AwaitSaved(JOB, 1, named, 20.0)).ok, 600.0)
        until(lambda: all(beacon.snapshot().phase is Phase.PARKED for beacon in beacons))
        assert all(beacon.snapshot().step == named for beacon in beacons)
    finally:
        for trainer in trainers:
            trainer.kill()
            assert trainer.wait() == -signal.SIGKILL, trainer.stderr.read()
            trainer.close()
    a.lose()

    c = cluster.host("c")
    second = branch(first, restored_step=named, generation=2)
    plan = RestorePlan(
        named,
        {"0": (cluster.source(0, Tier.PEER, "b"),), "1": (cluster.source(1, Tier.MEMORY, "b"),)},
    )
    placement = cluster.placement({"c": (0,), "b": (1,)}, generation=2, lineage=second, restore=plan)
    assert all(reply.ok for reply in cluster.configure(placement).values())
    resumed = [start_trainer(warm_python, host, rank, second, named, named + 20) for rank, host in enumerate((c, b))]
    for trainer in resumed:
        _, errors = trainer.communicate(timeout_s=180)
        assert trainer.wait() == 0, errors
        trainer.close()
    reports = {report.rank: report for report in c.ask(GetStatus()).restores}
    assert (reports[0].source_tier, reports[0].source_host) == (Tier.PEER, "b")
    assert reports[0].socket_bytes >= reports[0].size_bytes > 400_000
    for rank, host in enumerate((c, b)):
        segments = RankSegments.open(rank_segment(host.prefix, JOB, rank))
        until(lambda segments=segments: segments.read_world().step == named + 19)
        segments.close()
