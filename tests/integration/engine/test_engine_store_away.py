"""A share that is unmounted for a while, just when the ranks of a lost host have to be restored from it."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.clocks.waits import until
from support.hosts.engine_cluster import EngineCluster
from support.hosts.engines import Trainer

from ckpt_engine.contracts.control_views import RestoreState
from ckpt_engine.host import durable_tiers
from ckpt_engine.host.engine_host import EngineHost
from ckpt_engine.peers.broadcast.bandwidths import MeasuredBandwidths
from ckpt_engine.settings import EngineSettings
from flyball.contracts.checkpoints import CheckpointSpec, JobHistory, LineageEntry, RestorePlan, Tier, branch
from flyball.contracts.clock import SystemClock
from flyball.contracts.on_host.engine_wire import Flush

JOB = "job"  # as in conftest.py
RUN = "20251119-080000-000"


@pytest.mark.parametrize("leaves", ["an empty folder", "nothing"])
def test_a_step_in_a_store_that_is_away_is_waited_for(cluster: EngineCluster, leaves: str) -> None:
    share, elsewhere = cluster.root / "share", cluster.root / "unmounted"
    spec = CheckpointSpec(persistent_dir=str(share), persistent_every_steps=1, replicas=0)
    lost, spare = cluster.host("a"), cluster.host("b")
    cluster.configure(cluster.placement({"a": (0,)}, run=RUN), spec)
    worker = Trainer(lost, 0)
    for step in range(3):
        worker.save(step)
        until(lambda step=step: lost.holds(Tier.PERSISTENT, step, 0))
    lost.lose()
    share.rename(elsewhere)
    if leaves == "an empty folder":
        share.mkdir()

    lineage = branch((LineageEntry(1),), restored_step=2, generation=2)
    plan = RestorePlan(2, {"0": (cluster.source(0, Tier.PERSISTENT, ""),)})
    del cluster.hosts["a"]
    cluster.configure(cluster.placement({"b": (0,)}, generation=2, lineage=lineage, restore=plan, run=RUN), spec)
    again = Trainer(spare, 0, 2, lineage)
    until(lambda: len(spare.logged("restore_source_skipped")) > 1)
    assert again.segments.control.read_restore().state is RestoreState.PENDING
    if share.exists():
        assert list(share.iterdir()) == [], "nothing is written beneath the mount"
        share.rmdir()
    elsewhere.rename(share)
    assert again.await_restore(2) is RestoreState.READY
    assert again.stored(1, 2) == worker.payload(2)
    for step in range(3, 6):
        again.save(step)
        until(lambda step=step: spare.holds(Tier.PERSISTENT, step, 0))


def test_a_step_that_is_gone_from_a_store_that_is_there_is_not_waited_for(cluster: EngineCluster) -> None:
    share: Path = cluster.root / "share"
    spec = CheckpointSpec(persistent_dir=str(share), persistent_every_steps=1, replicas=0)
    host = cluster.host("a")
    cluster.configure(cluster.placement({"a": (0,)}, run=RUN), spec)
    worker = Trainer(host, 0)
    for step in range(3):
        worker.save(step)
        until(lambda step=step: host.holds(Tier.PERSISTENT, step, 0))
    host.lose()
    host.start()
    lineage = branch((LineageEntry(1),), restored_step=7, generation=2)
    plan = RestorePlan(7, {"0": (cluster.source(0, Tier.PERSISTENT, ""),)})  # removed by somebody
    cluster.configure(cluster.placement({"a": (0,)}, generation=2, lineage=lineage, restore=plan, run=RUN), spec)
    again = Trainer(host, 0, 2, lineage)
    assert again.await_restore(2) is RestoreState.FAILED
    assert len(host.logged("restore_source_skipped")) == 1


def test_an_engine_that_does_not_know_the_job_lists_what_is_in_the_store_if_it_is_told_where_to_look(
    cluster: EngineCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All hosts of the job are lost. A spare never heard of it, and one knows a generation that was replaced."""
    share: Path = cluster.root / "share"
    spec = CheckpointSpec(persistent_dir=str(share), persistent_every_steps=1, replicas=0)
    a, b, old, spare = (cluster.host(name) for name in ("a", "b", "old", "spare"))
    cluster.configure(cluster.placement({"a": (0,), "old": (1,)}, run=RUN), spec)
    lineage = (LineageEntry(1, upto_step=-1), LineageEntry(2))
    cluster.configure(cluster.placement({"a": (0,), "b": (1,)}, generation=2, lineage=lineage, run=RUN), spec)
    workers = [Trainer(a, 0, 2, lineage), Trainer(b, 1, 2, lineage)]
    for step in range(3):
        for worker in workers:
            worker.save(step)
        until(lambda step=step: a.holds(Tier.PERSISTENT, step, 0) and b.holds(Tier.PERSISTENT, step, 1))
    a.lose()
    b.lose()
    assert not spare.ask(Flush(JOB, 60.0)).copies
    history = JobHistory(spec, lineage, RUN)
    request = Flush(JOB, 60.0, history=history)
    for host in (spare, old):
        found = {(c.generation, c.step, c.rank) for c in host.ask(request).copies if c.tier is Tier.PERSISTENT}
        assert {(2, 2, 0), (2, 2, 1)} <= found
        assert all(generation == 2 for generation, _, _ in found)
    monkeypatch.setattr(durable_tiers, "_LEFT_COPIES", 3)  # of thousands of ranks, all steps are too long a message
    root = cluster.root / "here"
    root.mkdir()
    bandwidths = MeasuredBandwidths(root / "bandwidths", SystemClock())
    here = EngineHost("here", root, str(root / "flyball-test"), EngineSettings(), bandwidths)
    assert {copy.step for copy in durable_tiers.left_copies(JOB, history, here)} == {2}
