"""How long a replica is offered to a peer, and what becomes of the step."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save
from support.clocks.waits import until
from support.jobs.placements import make_placement
from support.stores.shards import make_manifest, put_in_slot

from ckpt_engine.contracts.generation import HostGeneration, WorldView
from ckpt_engine.contracts.peer_wire import Reply, ShardVerdict, WorldStep
from ckpt_engine.counters import Counters
from ckpt_engine.host.pipeline import RankPipeline
from ckpt_engine.peers.replication import Offer
from ckpt_engine.peers.replicator import ReplicationOutcome, Replicator
from ckpt_engine.rules.peer_patience import PeerPatience
from ckpt_engine.rules.slot_rules import SlotView
from ckpt_engine.settings import EngineSettings
from ckpt_engine.tiers.memory import MemoryTier
from flyball.contracts.checkpoints import CheckpointSpec
from flyball.contracts.clock import SystemClock
from flyball.contracts.identity import Fence
from flyball.contracts.on_host.engine_wire import Configure

PLACEMENT = make_placement({"a": (0,), "b": (1,)}, peers={"a": ("b",), "b": ("a",)})


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[MemoryTier]:
    """Step 4 of rank 0, committed."""
    tier = MemoryTier(str(tmp_path / "flyball-test"), "job", "a")
    payload = save({"w": np.ones(20, np.float32)})
    described = make_manifest(payload, 4, world_size=2)
    with tier.using(0, create=True) as entry:
        assert entry is not None
        put_in_slot(entry.segments, 0, described, payload)
    yield tier
    tier.release()


@pytest.mark.parametrize(("answer", "there"), [(ShardVerdict.FULL, True), (ShardVerdict.BUSY, False)])
def test_a_peer_is_given_up_that_does_not_know_the_job_and_not_one_that_awaits_the_world(
    memory: MemoryTier, answer: ShardVerdict, there: bool
) -> None:
    settled = threading.Event()
    outcomes: list[tuple[SlotView, ReplicationOutcome]] = []
    answers = [Reply(answer)] * 10 + [Reply(ShardVerdict.OK)]  # offered for far longer than the timeout

    def put_replica(peer: str, offer: Offer) -> Reply:
        return answers.pop(0)

    def on_settled(peer: str, view: SlotView, outcome: ReplicationOutcome) -> None:
        outcomes.append((view, outcome))
        settled.set()

    generation = HostGeneration(Configure(Fence(1, 1), "a", PLACEMENT, CheckpointSpec()), "a")
    replicator = Replicator(
        0,
        "b",
        generation,
        memory=memory,
        world=WorldView(WorldStep("job", 1, 3)),
        put_replica=put_replica,
        peer_down_s=lambda peer: 0.0,
        wanted=lambda entry: entry.segments.slots()[:1],
        on_settled=on_settled,
        on_bad=lambda entry, view, reason: None,
        counters=Counters(),
        settings=EngineSettings(replicate_timeout_s=0.001, replicate_retry_s=0.002),
    )
    replicator.start()
    try:
        assert settled.wait(60.0)
    finally:
        generation.ended.set()
        replicator.join(60.0)
    ((view, outcome),) = outcomes[:1]
    assert (view.step, outcome.there) == (4, there)


@given(st.floats(0.001, 3600))
def test_all_steps_together_wait_for_a_peer_that_takes_nothing_no_longer_than_twice_the_first(full_s: float) -> None:
    patience = PeerPatience(full_s)
    waited_s = 0.0
    for _ in range(100):
        waited_s += patience.left_s
        patience.in_vain()
    assert waited_s < 2 * full_s and patience.left_s == 0.0
    patience.refill()
    assert patience.is_full


def test_a_peer_that_is_busy_for_good_is_asked_once_for_each_step_until_it_takes_one(memory: MemoryTier) -> None:
    settled = threading.Semaphore(0)
    outcomes: list[ReplicationOutcome] = []
    asked = [Reply(ShardVerdict.BUSY, "It is not ready."), Reply(ShardVerdict.OK)]
    counters = Counters()

    def on_settled(peer: str, view: SlotView, outcome: ReplicationOutcome) -> None:
        outcomes.append(outcome)
        settled.release()

    generation = HostGeneration(Configure(Fence(1, 1), "a", PLACEMENT, CheckpointSpec()), "a")
    replicator = Replicator(
        0,
        "b",
        generation,
        memory=memory,
        world=WorldView(WorldStep("job", 1, 3)),
        put_replica=lambda peer, offer: asked.pop(0),
        peer_down_s=lambda peer: 0.0,
        wanted=lambda entry: entry.segments.slots()[:1],
        on_settled=on_settled,
        on_bad=lambda entry, view, reason: None,
        counters=counters,
        settings=EngineSettings(replicate_timeout_s=3600.0),  # the first step would wait that long
    )
    for _ in range(20):
        replicator._patience.in_vain()
    replicator.start()
    try:
        assert settled.acquire(timeout=60.0)
        assert "not ready" in outcomes[0].reason
        assert counters.snapshot()["peer_backoffs"] == 1
        with replicator._lock:
            replicator._settled.clear()  # as if it were the next step
        replicator.kick()
        assert settled.acquire(timeout=60.0)
    finally:
        generation.ended.set()
        replicator.join(60.0)
    assert [outcome.there for outcome in outcomes] == [False, True]
    assert replicator._patience.is_full


class Pipeline:
    """Rank 0's pipeline on host a; the test gives the peers' replies."""

    def __init__(self, memory: MemoryTier, peers: tuple[str, ...]) -> None:
        self.answers = dict.fromkeys(peers, ShardVerdict.OK)
        self.down_s = dict.fromkeys(peers, 0.0)
        self.asked = {peer: threading.Semaphore(0) for peer in peers}
        self.may_answer = {peer: threading.Event() for peer in peers}
        self.failures: list[int] = []
        self.counters = Counters()
        placement = msgspec.structs.replace(PLACEMENT, peers={"a": peers, "b": ("a",)})
        self.generation = HostGeneration(Configure(Fence(1, 1), "a", placement, CheckpointSpec()), "a")
        self.pipeline = RankPipeline(
            0,
            self.generation,
            memory=memory,
            world=WorldView(WorldStep("job", 1, 3)),
            put_replica=self._put_replica,
            peer_down_s=self.down_s.__getitem__,
            first=(),
            on_progress=lambda rank: None,
            on_failure=lambda rank, step, message: self.failures.append(step),
            counters=self.counters,
            settings=EngineSettings(scan_interval_s=0.01),
            clock=SystemClock(),
        )
        self.pipeline.start()

    def _put_replica(self, peer: str, offer: Offer) -> Reply:
        self.asked[peer].release()
        assert self.may_answer[peer].wait(60.0)
        return Reply(self.answers[peer])

    def end(self) -> None:
        self.generation.ended.set()
        self.pipeline.join(60.0)


@pytest.fixture
def make_pipeline(memory: MemoryTier) -> Iterator[Callable[..., Pipeline]]:
    made: list[Pipeline] = []

    def make(*peers: str) -> Pipeline:
        made.append(Pipeline(memory, peers))
        return made[-1]

    yield make
    for each in made:
        each.end()


def test_a_step_that_was_saved_is_sent_again_however_often_its_peer_goes_away(
    make_pipeline: Callable[..., Pipeline],
) -> None:
    host = make_pipeline("b")
    host.may_answer["b"].set()
    until(lambda: host.pipeline.saved_steps == (4,))
    host.answers["b"] = ShardVerdict.ERROR  # it came back without memory for replicas
    host.pipeline.peer_is_back("b")
    until(lambda: host.counters.snapshot().get("replicas_given_up") == 1)
    host.answers["b"] = ShardVerdict.OK
    host.pipeline.peer_is_back("b")
    until(lambda: host.counters.snapshot()["replicas_sent"] == 2)
    assert (host.pipeline.saved_steps, host.pipeline.failed_steps, host.failures) == ((4,), (), [])


def test_a_step_is_not_saved_by_a_replica_on_a_host_that_died_meanwhile(
    make_pipeline: Callable[..., Pipeline],
) -> None:
    host = make_pipeline("b", "c")
    host.may_answer["b"].set()
    until(lambda: host.counters.snapshot().get("replicas_sent") == 1)
    assert host.asked["c"].acquire(timeout=60.0)
    host.down_s["b"] = 60.0
    host.answers["c"] = ShardVerdict.ERROR
    host.may_answer["c"].set()
    until(lambda: host.failures == [4])
    assert (host.pipeline.saved_steps, host.pipeline.failed_steps) == ((), (4,))


def test_a_step_with_a_bad_slot_is_no_longer_reported_as_saved(
    make_pipeline: Callable[..., Pipeline],
) -> None:
    host = make_pipeline("b")
    host.may_answer["b"].set()
    until(lambda: host.pipeline.saved_steps == (4,))
    host.pipeline.fail(4, "The slot is corrupt.")
    assert (host.pipeline.saved_steps, host.pipeline.failed_steps) == ((), (4,))


def test_a_peer_gets_its_thread_later_when_there_was_none(
    make_pipeline: Callable[..., Pipeline], monkeypatch: pytest.MonkeyPatch
) -> None:
    start, refused = threading.Thread.start, threading.Event()

    def short_of_threads(thread: threading.Thread) -> None:
        if thread.name == "job-r0-b" and not refused.is_set():
            refused.set()
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", short_of_threads)
    host = make_pipeline("b", "c")
    for peer in "bc":
        host.may_answer[peer].set()
    until(lambda: host.pipeline.saved_steps == (4,))
    assert refused.is_set() and host.counters.snapshot()["replicas_sent"] == 2
