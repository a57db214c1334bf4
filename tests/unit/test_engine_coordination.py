"""What one engine tells the coordinator, when several of its threads have something to say at once."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ckpt_engine.coordination import Coordination
from ckpt_engine.counters import Counters
from ckpt_engine.generation import Generation
from ckpt_engine.peer_wire import RankSteps
from ckpt_engine.tiers.memory import MemoryTier
from flyball.contracts.checkpoints import CheckpointSpec, LineageEntry
from flyball.contracts.clock import SystemClock
from flyball.contracts.cluster import HostRanks, Placement
from flyball.contracts.engine_wire import Configure
from flyball.contracts.identity import Fence

PLACEMENT = Placement(
    job="job",
    generation=3,
    world_size=2,
    hosts=(HostRanks("a", "127.0.0.1", "a:1", (0,)), HostRanks("b", "127.0.0.1", "b:1", (1,))),
    master_address="127.0.0.1",
    master_port=1,
    peers={},
    lineage=(LineageEntry(3),),
    restore=None,
)


class SlowLinks:
    """Messages to the coordinator, of which the newest counts; something happens while the first one is handed in."""

    def __init__(self) -> None:
        self.messages: list[RankSteps] = []
        self.meanwhile: Callable[[], None] = lambda: None

    def post(self, host_id: str, key: object, message: RankSteps) -> None:
        meanwhile, self.meanwhile = self.meanwhile, lambda: None
        meanwhile()
        self.messages.append(message)


def test_a_wish_to_flush_is_not_lost_to_a_report_that_was_made_before_it(tmp_path: Path) -> None:
    links = SlowLinks()
    given: Any = links
    memory = MemoryTier(str(tmp_path / "flyball-test"), "job", "b")
    coordination = Coordination(
        Generation(Configure(Fence(1, 3), "b", PLACEMENT, CheckpointSpec()), "b"),
        memory=memory,
        links=given,
        counters=Counters(),
        clock=SystemClock(),
        on_advance=lambda: None,
        on_naming=lambda namings: None,
        on_written=lambda tier, step: None,
    )
    flush = threading.Thread(target=coordination.want_flush, args=(5,))

    def flush_meanwhile() -> None:
        flush.start()
        flush.join(0.3)

    links.meanwhile = flush_meanwhile
    coordination.report(1, (4, 5), ())
    flush.join(10)
    assert (links.messages[-1].saved, links.messages[-1].flush) == ((4, 5), 5)
    memory.release()
