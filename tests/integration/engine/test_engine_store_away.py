"""A share that is unmounted for a while, just when the ranks of a lost host have to be restored from it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from ckpt_engine.contracts.control_views import RestoreState
from flyball.contracts.checkpoints import CheckpointSpec, LineageEntry, RestorePlan, Tier, branch

if TYPE_CHECKING:
    from tests.integration.engine.conftest import Cluster, Trainer

Until = Callable[..., None]
RUN = "20251119-080000-000"


@pytest.mark.parametrize("leaves", ["an empty folder", "nothing"])
def test_a_step_in_a_store_that_is_away_is_waited_for(
    cluster: Cluster, trainer: Callable[..., Trainer], until: Until, leaves: str
) -> None:
    share, elsewhere = cluster.root / "share", cluster.root / "unmounted"
    spec = CheckpointSpec(persistent_dir=str(share), persistent_every_steps=1, replicas=0)
    lost, spare = cluster.host("a"), cluster.host("b")
    cluster.configure(cluster.placement({"a": (0,)}, run=RUN), spec)
    worker = trainer(lost, 0)
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
    again = trainer(spare, 0, 2, lineage)
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


def test_a_step_that_is_gone_from_a_store_that_is_there_is_not_waited_for(
    cluster: Cluster, trainer: Callable[..., Trainer], until: Until
) -> None:
    share: Path = cluster.root / "share"
    spec = CheckpointSpec(persistent_dir=str(share), persistent_every_steps=1, replicas=0)
    host = cluster.host("a")
    cluster.configure(cluster.placement({"a": (0,)}, run=RUN), spec)
    worker = trainer(host, 0)
    for step in range(3):
        worker.save(step)
        until(lambda step=step: host.holds(Tier.PERSISTENT, step, 0))
    host.lose()
    host.start()
    lineage = branch((LineageEntry(1),), restored_step=7, generation=2)
    plan = RestorePlan(7, {"0": (cluster.source(0, Tier.PERSISTENT, ""),)})  # removed by somebody
    cluster.configure(cluster.placement({"a": (0,)}, generation=2, lineage=lineage, restore=plan, run=RUN), spec)
    again = trainer(host, 0, 2, lineage)
    assert again.await_restore(2) is RestoreState.FAILED
    assert len(host.logged("restore_source_skipped")) == 1
