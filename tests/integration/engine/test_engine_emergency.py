"""What real engines write to disk when training has to stop, compared byte for byte."""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.clocks.waits import until
from support.hosts.engine_cluster import EngineCluster
from support.hosts.engines import EngineHost, Trainer

from ckpt_engine.rules.save_schedule import is_due
from flyball.contracts.checkpoints import CheckpointSpec, RestorePlan, Tier, branch
from flyball.contracts.identity import Fence
from flyball.contracts.on_host.engine_wire import Arm, AwaitSaved, Disarm, EngineReply, Flush, GetStatus

JOB = "job"  # as in conftest.py


def all_tiers(cluster: EngineCluster, **settings: float) -> CheckpointSpec:
    """Both disk tiers, with intervals so long that nothing is written on schedule."""
    settings = {"disk_every_steps": 1000, "persistent_every_steps": 1000, **settings}
    return CheckpointSpec(
        disk_dir=str(cluster.root / "disk"),
        persistent_dir=str(cluster.root / "store"),
        **settings,  # type: ignore[arg-type]
    )


def files(folder: Path, step: int) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.rglob(f"step{step}/*.safetensors")}


def flush(hosts: list[EngineHost], timeout_s: float = 60.0) -> list[EngineReply]:
    """Flush all hosts at once, as the actuator does."""
    replies: dict[str, EngineReply] = {}

    def ask(host: EngineHost) -> None:
        replies[host.host_id] = host.ask(Flush(JOB, timeout_s, durable=True))

    threads = [threading.Thread(target=ask, args=(host,)) for host in hosts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout_s + 30)
    return [replies[host.host_id] for host in hosts]


@contextmanager
def training(trainers: list[Trainer], spec: CheckpointSpec, step_s: float = 0.004) -> Iterator[list[int]]:
    """The ranks' loops, in lock step; yields the steps done so far."""
    done: list[int] = []
    stop = threading.Event()

    def loop() -> None:
        step = 0
        while not stop.is_set():
            for trainer in trainers:
                trainer.segments.control.write_position(step)
                if is_due(spec, step, trainer.segments.control.next_save(1)):
                    deadline_s = time.monotonic() + 90
                    while not trainer.try_save(step) and time.monotonic() < deadline_s:
                        time.sleep(0.001)
            done.append(step)
            step += 1
            time.sleep(step_s)

    thread = threading.Thread(target=loop)
    thread.start()
    try:
        yield done
    finally:
        stop.set()
        thread.join(120)


def test_what_dead_trainers_left_is_written_to_every_tier_out_of_schedule(cluster: EngineCluster) -> None:
    hosts = [cluster.host("a"), cluster.host("b")]
    cluster.configure(cluster.placement({"a": (0,), "b": (1,)}), all_tiers(cluster))
    ranks = [Trainer(host, rank) for rank, host in enumerate(hosts)]
    for step in (1, 2, 3):
        for rank in ranks:
            rank.save(step)
    ranks[0].save(4)  # rank 1 dies before its own: the newest common step is 3
    until(lambda: ranks[0].world_step == 3)
    until(lambda: ranks[0].segments.control.replicated_step(1) == 4)
    replies = flush(hosts)
    assert [reply.flushed for reply in replies] == [{"disk": 3, "persistent": 3, "peer": 4 - n} for n in (0, 1)]
    for tier in ("disk", "store"):
        found = files(cluster.root / tier, 3)
        assert found == {f"rank{rank.rank}.safetensors": rank.payload(3) for rank in ranks}, tier
    assert not files(cluster.root / "disk", 4)
    assert list((cluster.root / "store").rglob("step3/world.manifest"))


def test_the_step_that_a_generation_was_restored_from_is_flushed_if_it_saved_none_itself(
    cluster: EngineCluster,
) -> None:
    host = cluster.host("a")
    spec = all_tiers(cluster)
    first = cluster.placement({"a": (0,)})
    cluster.configure(first, spec)
    rank = Trainer(host, 0)
    for step in (1, 2):
        rank.save(step)
    until(lambda: rank.world_step == 2)
    plan = RestorePlan(2, {"0": (cluster.source(0, Tier.MEMORY, "a"),)})
    second = cluster.placement(
        {"a": (0,)}, generation=2, lineage=branch(first.lineage, restored_step=2, generation=2), restore=plan
    )
    cluster.configure(second, spec)
    rank.await_restore(2)
    (reply,) = flush([host])
    assert reply.flushed == {"disk": 2, "persistent": 2}
    assert files(cluster.root / "disk", 2) == files(cluster.root / "store", 2) == {"rank0.safetensors": rank.payload(2)}


def test_a_deadline_too_short_is_kept_and_the_result_reported(cluster: EngineCluster) -> None:
    hosts = [cluster.host("a"), cluster.host("b")]
    cluster.configure(cluster.placement({"a": (0,), "b": (1,)}), all_tiers(cluster))
    ranks = [Trainer(host, rank) for rank, host in enumerate(hosts)]
    for rank in ranks:
        rank.save(1)
    until(lambda: ranks[1].world_step == 1)
    hosts[0].kill()  # the coordinator's: nobody names a step
    began_s = time.monotonic()
    (reply,) = flush(hosts[1:], timeout_s=1.0)
    assert reply.ok
    assert time.monotonic() - began_s >= 1.0
    assert reply.flushed == {"disk": -1, "persistent": -1, "peer": 1}
    hosts[0].start()
    assert hosts[0].ask(AwaitSaved(JOB, 1, 1, 60.0)).ok  # it has asked its peer
    assert [reply.flushed for reply in flush(hosts)] == [{"disk": 1, "persistent": 1, "peer": 1}] * 2


def test_an_engine_that_is_killed_in_the_middle_of_it_flushes_when_it_is_asked_again(cluster: EngineCluster) -> None:
    host = cluster.host("a", start=False).start(FLYBALL_FAULT_POINT="engine.flush")
    cluster.configure(cluster.placement({"a": (0,)}), all_tiers(cluster))
    rank = Trainer(host, 0)
    for step in (1, 2):
        rank.save(step)
    until(lambda: rank.world_step == 2)
    with pytest.raises((OSError, struct.error)):
        host.ask(Flush(JOB, 60.0, durable=True))
    until(lambda: host.process is not None and host.process.poll() is not None)
    host.start()
    (reply,) = flush([host])
    assert reply.flushed == {"disk": 2, "persistent": 2}
    assert files(cluster.root / "disk", 2) == files(cluster.root / "store", 2) == {"rank0.safetensors": rank.payload(2)}


@pytest.mark.parametrize("given_up", [False, True])
def test_an_engine_killed_before_it_reports_armed_ranks_knows_of_them_when_asked_again(
    cluster: EngineCluster, given_up: bool
) -> None:
    host = cluster.host("a", start=False).start(FLYBALL_FAULT_POINT="engine.armed")
    cluster.configure(cluster.placement({"a": (0,)}), all_tiers(cluster))
    rank = Trainer(host, 0)
    rank.save(1)
    until(lambda: rank.world_step == 1)
    with pytest.raises((OSError, struct.error)):
        host.ask(Arm(Fence(1, 1), JOB, 10))
    until(lambda: host.process is not None and host.process.poll() is not None)
    control = rank.segments.control
    assert control.emergency_step(1) == 10
    rank.save(2)
    host.start()
    if given_up:
        assert host.ask(Disarm(Fence(1, 1), JOB)).ok
        assert control.emergency_step(1) == -1
    else:
        assert host.ask(Arm(Fence(1, 1), JOB, 10)).ok
        rank.save(10)
        assert host.ask(AwaitSaved(JOB, 1, 10, 60.0)).ok
    newest = 2 if given_up else 10
    until(lambda: rank.world_step == newest)  # commits later than 2 s after the request are not waited for
    (reply,) = flush([host])
    assert reply.flushed == {"disk": newest, "persistent": newest}
    assert files(cluster.root / "disk", newest) == {"rank0.safetensors": rank.payload(newest)}


def test_ranks_that_were_armed_are_let_go(cluster: EngineCluster) -> None:
    host = cluster.host("a")
    cluster.configure(cluster.placement({"a": (0,)}))
    control = Trainer(host, 0).segments.control
    assert host.ask(Arm(Fence(1, 1), JOB, 10)).ok
    assert control.emergency_step(1) == 10
    assert host.ask(Disarm(Fence(1, 1), JOB)).ok
    assert control.emergency_step(1) == -1
    assert host.ask(Disarm(Fence(0, 1), JOB)).code == "stale_command"


@pytest.mark.parametrize("every_steps", [0, 7])
def test_intervals_in_seconds_name_steps_that_all_ranks_have(cluster: EngineCluster, every_steps: int) -> None:
    hosts = [cluster.host("a"), cluster.host("b")]
    spec = CheckpointSpec(
        every_steps=every_steps,
        every_s=0.3,
        disk_dir=str(cluster.root / "disk"),
        disk_every_s=0.5,
        disk_keep_latest=1000,
    )
    cluster.configure(cluster.placement({"a": (0,), "b": (1,)}), spec)
    ranks = [Trainer(host, rank) for rank, host in enumerate(hosts)]

    def on_disks() -> set[int]:
        held = [{c.step for c in host.status.copies if c.tier is Tier.DISK} for host in hosts]
        return set.intersection(*held)

    with training(ranks, spec):
        until(lambda: ranks[0].world_step >= 0 and ranks[1].world_step >= 0)
        first = ranks[0].world_step
        until(lambda: ranks[0].world_step > first and len(on_disks()) >= 2)
    for step in on_disks():
        assert files(cluster.root / "disk", step) == {
            f"rank{rank.rank}.safetensors": rank.payload(step) for rank in ranks
        }


def test_a_save_that_was_aborted_is_known_although_its_notice_was_lost(cluster: EngineCluster) -> None:
    hosts = [cluster.host("a"), cluster.host("b")]
    cluster.configure(cluster.placement({"a": (0,), "b": (1,)}))
    ranks = [Trainer(host, rank) for rank, host in enumerate(hosts)]
    for rank in ranks:
        rank.save(1)
    until(lambda: ranks[0].world_step == 1)
    ranks[0].save(2)
    ranks[1].segments.control.note_aborted(2)
    until(lambda: 2 in ranks[0].segments.read_world().abandoned)
    ranks[0].save(3)  # in the slot of step 2
    ranks[1].save(3)
    until(lambda: all(rank.world_step == 3 for rank in ranks))
    assert hosts[0].ask(GetStatus()).counters["steps_skipped"] == 1
    assert [(failure.rank, failure.step) for failure in hosts[1].status.failures] == [(1, 2)]
