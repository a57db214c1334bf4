"""Ranks that do not save the same steps, and how far apart the steps are that are saved: with real engines."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.integration.engine.conftest import Cluster, Trainer

Until = Callable[..., None]


def test_a_step_that_another_rank_passed_by_is_given_up_while_that_rank_stands_still(
    cluster: Cluster, trainer: type[Trainer], until: Until
) -> None:
    """The rank that has it finds no slot for its next save, and the other waits for it in a collective."""
    a, b = cluster.host("a"), cluster.host("b")
    cluster.configure(cluster.placement({"a": (0,), "b": (1,)}))
    saves, passes = trainer(a, 0), trainer(b, 1)
    for rank in (saves, passes):
        rank.save(0)
    until(lambda: saves.world_step == passes.world_step == 0)
    saves.save(1)
    passes.segments.control.write_position(1)
    passes.segments.control.write_position(2)
    saves.save(2)
    until(lambda: 1 in passes.segments.read_world().abandoned)
    passes.save(3)  # the step that rank 0 holds meanwhile is not theirs together either
    saves.save(3)
    until(lambda: saves.world_step == passes.world_step == 3)
