"""What one engine reports to the coordinator when several of its threads report at once."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from support.jobs.placements import make_placement

from ckpt_engine.contracts.generation import HostGeneration
from ckpt_engine.contracts.peer_wire import SavedSteps
from ckpt_engine.counters import Counters
from ckpt_engine.peers.links import PeerLinks
from ckpt_engine.peers.transport.port import Connection
from ckpt_engine.settings import EngineSettings
from ckpt_engine.tiers.memory import MemoryTier
from ckpt_engine.world.coordination import Coordination
from flyball.contracts.checkpoints import CheckpointSpec
from flyball.contracts.clock import SystemClock
from flyball.contracts.errors import Unreachable
from flyball.contracts.identity import Fence
from flyball.contracts.on_host.engine_wire import Configure

PLACEMENT = make_placement({"a": (0,), "b": (1,)}, generation=3)


class SlowLinks:
    """Messages to the coordinator; the newest counts. `meanwhile` runs while the first one is posted."""

    def __init__(self) -> None:
        self.messages: list[SavedSteps] = []
        self.meanwhile: Callable[[], None] = lambda: None

    def post(self, host_id: str, key: object, message: SavedSteps, *, unless: Callable[[], bool]) -> None:
        meanwhile, self.meanwhile = self.meanwhile, lambda: None
        meanwhile()
        self.messages.append(message)


def coordinate(links: Any, memory: MemoryTier) -> Coordination:  # noqa: ANN401 - PeerLinks, or what stands for them
    return Coordination(
        HostGeneration(Configure(Fence(1, 3), "b", PLACEMENT, CheckpointSpec()), "b"),
        memory=memory,
        links=links,
        counters=Counters(),
        clock=SystemClock(),
        on_advance=lambda: None,
        on_naming=lambda namings: None,
        on_written=lambda tier, step: None,
    )


def test_a_wish_to_flush_is_not_lost_to_a_report_that_was_made_before_it(tmp_path: Path) -> None:
    links = SlowLinks()
    memory = MemoryTier(str(tmp_path / "flyball-test"), "job", "b")
    coordination = coordinate(links, memory)
    flush = threading.Thread(target=coordination.want_flush, args=(5,))

    def flush_meanwhile() -> None:
        flush.start()
        flush.join(0.3)

    links.meanwhile = flush_meanwhile
    coordination.report(SavedSteps("job", 3, 1, (4, 5)))
    flush.join(60.0)
    assert (links.messages[-1].saved, links.messages[-1].flush) == ((4, 5), 5)
    memory.release()


def test_what_a_thread_posts_while_the_job_is_released_is_not_queued_for_ever(tmp_path: Path) -> None:
    def nobody(host_id: str, address: str) -> Connection:
        raise Unreachable(f"{host_id} is away.")

    links = PeerLinks(
        dial=nobody, on_up=lambda *_: None, on_lost=lambda host_id: None, settings=EngineSettings(), counters=Counters()
    )
    links.set_targets(frozenset({"a"}))
    memory = MemoryTier(str(tmp_path / "flyball-test"), "job", "b")
    coordination = coordinate(links, memory)
    releases: list[threading.Thread] = []

    class EndsNow:
        """The generation has not ended when this is called, but right after that the job is released."""

        def is_set(self) -> bool:
            releases.append(threading.Thread(target=links.forget, args=("job",)))
            releases[-1].start()
            releases[-1].join(0.3)
            return False

    ended: Any = EndsNow()
    coordination._generation.ended = ended
    coordination.report(SavedSteps("job", 3, 1, (4, 5)))
    for release in releases:
        release.join(60.0)
    try:
        assert len(releases) == 1
        assert links._links["a"]._waiting == {}
    finally:
        links.close()
        memory.release()
