"""With real engines: ranks that do not save the same steps, and the interval between saves."""

from __future__ import annotations

import itertools
import threading
import time

import torch
from support.clocks.waits import until
from support.hosts.engine_cluster import EngineCluster
from support.hosts.engines import EngineHost, Trainer
from support.jobs.rank_alone import rank_alone

from flyball.contracts.checkpoints import CheckpointSpec, Tier
from flyball.sdk.trainer import Job


def test_a_step_that_another_rank_passed_by_is_given_up_while_that_rank_stands_still(cluster: EngineCluster) -> None:
    """The rank that has the step finds no free slot, while the other waits for it in a collective."""
    a, b = cluster.host("a"), cluster.host("b")
    cluster.configure(cluster.placement({"a": (0,), "b": (1,)}))
    saves, passes = Trainer(a, 0), Trainer(b, 1)
    for rank in (saves, passes):
        rank.save(0)
    until(lambda: saves.world_step == passes.world_step == 0)
    saves.save(1)
    passes.segments.control.write_position(1)
    passes.segments.control.write_position(2)
    saves.save(2)
    until(lambda: 1 in passes.segments.read_world().abandoned)
    passes.save(3)  # nor is the step that rank 0 holds meanwhile a common one
    saves.save(3)
    until(lambda: saves.world_step == passes.world_step == 3)


class Ranks:
    """Two ranks of one job that train in lock step, as in data-parallel training."""

    def __init__(self, hosts: list[EngineHost], spec: CheckpointSpec) -> None:
        self.jobs = [
            Job(
                rank_alone(
                    host.prefix,
                    rank=rank,
                    world_size=len(hosts),
                    engine_notify=str(host.state_dir / "notify.sock"),
                    checkpoint=spec,
                )
            )
            for rank, host in enumerate(hosts)
        ]
        self.saved: list[list[int]] = [[] for _ in hosts]
        self._states = [{"weight": torch.zeros(300_000)} for _ in hosts]
        self._over = threading.Event()
        self._barrier = threading.Barrier(len(hosts), action=self._sync)
        self._ends = False
        self._threads = [threading.Thread(target=self._train, args=(rank,)) for rank in range(len(hosts))]

    def __enter__(self) -> Ranks:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(90)
        for job in self.jobs:
            job.close()

    def _sync(self) -> None:
        self._ends = self._over.is_set()

    def _train(self, rank: int) -> None:
        job, state = self.jobs[rank], self._states[rank]
        for step in itertools.count():
            time.sleep(0.01)  # training
            self._barrier.wait(90)
            if self._ends:
                return
            job.wait_captured(90)
            state["weight"] += 1.0
            handle = job.save(step, state)
            if not (handle.skipped or handle.error):
                self.saved[rank].append(step)


def interval_of(host: EngineHost) -> int:
    (interval,) = host.status.intervals
    return interval.every_steps


def test_a_slow_peer_makes_saves_less_frequent_for_all_ranks_and_a_fast_one_as_frequent_as_before(
    cluster: EngineCluster,
) -> None:
    slow = {"PEER_BYTES_PER_S": "2MB"}  # over half a second for the changes of a 10 ms step
    a, b = cluster.host("a", **slow), cluster.host("b", **slow)
    spec = CheckpointSpec()
    cluster.configure(cluster.placement({"a": (0,), "b": (1,)}), spec)
    with Ranks([a, b], spec) as ranks:
        until(lambda: interval_of(a) > 1)
        assert b.status.intervals == ()  # rank 0's engine decides
        wide, seen = interval_of(a), ranks.jobs[0].recovery_point
        until(lambda: all(job.recovery_point >= seen + 4 * wide for job in ranks.jobs))
        assert a.status.counters["save_intervals_widened"] >= 1
        widened = a.logged("save_interval_widened")
        assert widened[0]["every_steps"] == wide and widened[0]["wanted_steps"] == 1
        point = ranks.jobs[0].recovery_point
        until(lambda: b.holds(Tier.PEER, ranks.jobs[0].recovery_point, 0) or b.holds(Tier.PEER, point, 0))
        assert not any(job.failed_saves for job in ranks.jobs)
        first, second = ({step for step in saved if step <= point} for saved in ranks.saved)
        assert point in first & second
        # Ranks that received the wider interval late saved extra steps, which were given up.
        assert len(first ^ second) <= 4 * a.status.counters["save_intervals_widened"], (first, second)
        for host in (a, b):
            host.kill()
            host.start(FLYBALL_CKPT_PEER_BYTES_PER_S="0")
            assert interval_of(a) > 1, "a restarted engine goes on with the interval that its ranks know"
        until(lambda: interval_of(a) == 1)
        seen = ranks.jobs[0].recovery_point
        until(lambda: all(job.recovery_point > seen for job in ranks.jobs))


def test_a_job_that_wants_every_step_waits_for_its_slow_peer(cluster: EngineCluster) -> None:
    slow = {"PEER_BYTES_PER_S": "2MB"}
    a, b = cluster.host("a", **slow), cluster.host("b", **slow)
    spec = CheckpointSpec(adapt_interval=False)
    cluster.configure(cluster.placement({"a": (0,), "b": (1,)}), spec)
    with Ranks([a, b], spec) as ranks:
        until(lambda: all(job.recovery_point >= 4 for job in ranks.jobs))
        assert ranks.jobs[0].late_saves >= 3
    assert a.status.intervals == ()
    for saved in ranks.saved:
        assert saved == list(range(len(saved)))
