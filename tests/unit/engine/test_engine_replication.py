"""What a peer accepts into its replica slots, over a real socket: nothing altered, truncated, swapped or out of bounds,
and never at the expense of what it holds."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import xxhash
from safetensors.numpy import save
from support.jobs.placements import make_placement
from support.stores.shards import make_manifest

from ckpt_engine.contracts.generation import HostGeneration, WorldView
from ckpt_engine.contracts.peer_wire import PutShard, Reply, ShardVerdict, WorldStep
from ckpt_engine.format import manifest as manifests
from ckpt_engine.peers.replication import receive_replica
from ckpt_engine.peers.transport.port import ByteCounters, Identity
from ckpt_engine.peers.transport.tcp import TcpConnection
from ckpt_engine.settings import EngineSettings
from ckpt_engine.slots.rank_segments import SegmentOptions
from ckpt_engine.tiers.memory import PeerTier
from flyball.contracts.checkpoints import CheckpointSpec, LineageEntry
from flyball.contracts.errors import FlyballError, InvalidMessage, Unreachable
from flyball.contracts.identity import Fence
from flyball.contracts.on_host.engine_wire import Configure

SETTINGS = EngineSettings(io_timeout_s=60)
PLACEMENT = make_placement(
    {"a": (0,), "b": (1,)},
    generation=3,
    peers={"a": ("b",), "b": ("a",)},
    lineage=(LineageEntry(1, 4), LineageEntry(3)),
)


def shard(
    step: int, rank: int = 0, generation: int = 3, *, value: float | None = None, values: int = 20
) -> tuple[bytes, bytes]:
    """(manifest, payload)"""
    payload = save({"w": np.full(values, step if value is None else value, np.float32)}, {"step": str(step)})
    described = make_manifest(payload, step, rank, generation=generation, world_size=2)
    return manifests.encode(described), payload


class Receiver:
    """Host b's replica slots, and the sender's end of connections to it."""

    def __init__(self, prefix: str, options: SegmentOptions | None = None, spec: CheckpointSpec | None = None) -> None:
        self.tier = PeerTier(prefix, "job", "b", options)
        self.generation = HostGeneration(Configure(Fence(1, 3), "b", PLACEMENT, spec or CheckpointSpec()), "b")
        self.world = WorldView(WorldStep("job", 3, 9))
        self._listener = socket.create_server(("127.0.0.1", 0))

    def close(self) -> None:
        self._listener.close()
        self.tier.release()

    def put(self, offered: PutShard, sent: bytes, *, end: bool = False, sender: str = "a") -> Reply | FlyballError:
        """Offer a shard and send these bytes if requested. Returns the reply, or what ended the connection over
        there."""
        outcome: list[Reply | FlyballError] = []
        with socket.create_connection(self._listener.getsockname(), timeout=60) as ours:
            theirs = TcpConnection(self._listener.accept()[0], SETTINGS, ByteCounters())
            theirs.peer = Identity(sender, "", "1")
            arguments = {"tier": self.tier, "generation": self.generation, "world": self.world, "settings": SETTINGS}

            def receive() -> None:
                try:
                    outcome.append(receive_replica(theirs, offered, **arguments))
                except FlyballError as error:
                    outcome.append(error)

            thread = threading.Thread(target=receive)
            thread.start()
            ours.sendall(sent)
            if end:
                ours.shutdown(socket.SHUT_WR)
            thread.join(60)
            theirs.close()
        return outcome[0]

    def held(self) -> dict[int, bytes]:
        """Step -> bytes of rank 0's committed replicas."""
        with self.tier.using(0) as entry:
            assert entry is not None
            return {
                copy.step: bytes(entry.segments.payload(view.index))
                for copy in self.tier.copies()
                if copy.rank == 0 and (view := entry.segments.find(copy.generation, copy.step)) is not None
            }


def offer(manifest: bytes, payload: bytes, step: int, **more: object) -> PutShard:
    facts = {
        "job": "job",
        "running_generation": 3,
        "generation": 3,
        "step": step,
        "rank": 0,
        "manifest_bytes": len(manifest),
        "shard_bytes": len(payload),
    }
    return PutShard(**{**facts, **more})  # type: ignore[arg-type]  # a builder


def wire_bytes(manifest: bytes, payload: bytes) -> bytes:
    return manifest + xxhash.xxh3_128_digest(manifest) + payload


@pytest.fixture
def receiver(tmp_path: Path) -> Iterator[Receiver]:
    made = Receiver(str(tmp_path / "flyball-test"))
    manifest, payload = shard(10)
    assert made.put(offer(manifest, payload, 10), wire_bytes(manifest, payload)) == Reply(
        ShardVerdict.OK, manifests.digest(manifest)
    )
    yield made
    made.close()


def test_every_flipped_byte_of_manifest_and_shard_is_found(receiver: Receiver) -> None:
    _, older = shard(10)
    manifest, payload = shard(11)
    whole = wire_bytes(manifest, payload)
    for position in range(len(whole)):
        altered = bytearray(whole)
        altered[position] ^= 1 << position % 8
        outcome = receiver.put(offer(manifest, payload, 11), bytes(altered))
        in_shard = position >= len(whole) - len(payload)
        if in_shard:
            assert isinstance(outcome, Reply) and outcome.verdict is ShardVerdict.CORRUPT, position
        else:
            assert isinstance(outcome, InvalidMessage), position
    assert receiver.held() == {10: older}
    reply = receiver.put(offer(manifest, payload, 11), whole)
    assert isinstance(reply, Reply) and reply.verdict is ShardVerdict.OK
    assert receiver.held() == {10: older, 11: payload}


@pytest.mark.parametrize("cut", [0, 1, 300, -1])
def test_a_transfer_that_is_cut_off_leaves_what_was_there(receiver: Receiver, cut: int) -> None:
    manifest, payload = shard(11)
    outcome = receiver.put(offer(manifest, payload, 11), wire_bytes(manifest, payload)[:cut], end=True)
    assert isinstance(outcome, Unreachable)
    assert receiver.held() == {10: shard(10)[1]}


def test_another_ranks_or_steps_shard_is_not_taken_for_this_one(receiver: Receiver) -> None:
    wanted, payload = shard(11)
    for other in (shard(11, rank=1), shard(12), shard(11, generation=1)):
        assert len(other[1]) == len(payload)
        outcome = receiver.put(offer(other[0], other[1], 11), wire_bytes(*other))
        assert isinstance(outcome, InvalidMessage)
    outcome = receiver.put(offer(wanted, payload, 11), wire_bytes(wanted, shard(12)[1]))
    assert isinstance(outcome, Reply) and outcome.verdict is ShardVerdict.CORRUPT
    assert receiver.held() == {10: shard(10)[1]}


@pytest.mark.parametrize(
    ("more", "verdict"),
    [
        ({"running_generation": 2}, ShardVerdict.STALE),
        ({"running_generation": 4}, ShardVerdict.BUSY),
        ({"rank": 1}, ShardVerdict.STALE),  # our own
        ({"generation": 2}, ShardVerdict.STALE),  # not in the lineage
        ({"generation": 1, "step": 5}, ShardVerdict.STALE),  # beyond the branch
        ({"shard_bytes": 1 << 60}, ShardVerdict.ERROR),  # more than the memory
        ({"step": 10}, ShardVerdict.HAVE),
    ],
)
def test_what_is_not_to_be_taken_is_refused_before_a_byte_is_sent(
    receiver: Receiver, more: dict[str, object], verdict: ShardVerdict
) -> None:
    manifest, payload = shard(11)
    outcome = receiver.put(offer(manifest, payload, **{"step": 11, **more}), b"")
    assert isinstance(outcome, Reply) and outcome.verdict is verdict
    assert receiver.held() == {10: shard(10)[1]}


def test_steps_that_may_still_be_needed_are_not_overwritten(receiver: Receiver) -> None:
    manifest, payload = shard(11)
    assert isinstance(receiver.put(offer(manifest, payload, 11), wire_bytes(manifest, payload)), Reply)
    newer, payload = shard(12)
    outcome = receiver.put(offer(newer, payload, 12), b"")
    assert isinstance(outcome, Reply) and outcome.verdict is ShardVerdict.FULL
    receiver.world.learn(WorldStep("job", 3, 11))
    outcome = receiver.put(offer(newer, payload, 12), wire_bytes(newer, payload))
    assert isinstance(outcome, Reply) and outcome.verdict is ShardVerdict.OK
    assert set(receiver.held()) == {11, 12}


def test_an_older_replica_that_is_gone_does_not_keep_newer_ones_out(tmp_path: Path) -> None:
    receiver = Receiver(str(tmp_path / "flyball-test"))
    try:
        for step, value in ((10, 0), (11, 1)):
            manifest, payload = shard(step, value=value, values=3 << 20)
            receiver.put(offer(manifest, payload, step), wire_bytes(manifest, payload))
        receiver.world.learn(WorldStep("job", 3, 11))
        with receiver.tier.using(0) as entry:
            assert entry is not None
            gone = entry.segments.find(3, 11)
            assert gone is not None
            Path(f"{entry.segments.base}.s{gone.index}").unlink()
        manifest, payload = shard(12, value=1, values=3 << 20)  # almost the same as step 11
        reply = receiver.put(offer(manifest, payload, 12), wire_bytes(manifest, payload))
        assert isinstance(reply, Reply) and reply.verdict is ShardVerdict.OK, reply
    finally:
        receiver.close()


def test_a_replica_is_planned_with_those_that_this_host_holds(tmp_path: Path) -> None:
    """Two hosts hold one replica for each other, however many are configured."""
    manifest, payload = shard(10)
    limit = SegmentOptions(memory_limit_bytes=4 * len(payload))  # two slots of the own rank, two of the replica
    receiver = Receiver(str(tmp_path / "flyball-test"), limit, CheckpointSpec(replicas=8))
    try:
        reply = receiver.put(offer(manifest, payload, 10), wire_bytes(manifest, payload))
        assert isinstance(reply, Reply) and reply.verdict is ShardVerdict.OK, reply
    finally:
        receiver.close()


def test_a_world_that_stands_still_remembers_the_newest_abandoned_steps_only() -> None:
    world = WorldView(WorldStep("job", 3, 9))
    for step in range(10, 1010):
        assert world.learn(WorldStep("job", 3, 9, (step,)))
    assert world.present.abandoned == tuple(range(994, 1010))  # it is sent with every replica


def test_a_replica_is_taken_from_the_host_of_its_rank_alone(receiver: Receiver) -> None:
    manifest, payload = shard(11, value=7.0)
    for sender in ("c", "b", ""):
        reply = receiver.put(offer(manifest, payload, 11), wire_bytes(manifest, payload), sender=sender)
        assert isinstance(reply, Reply) and reply.verdict is ShardVerdict.FOREIGN, sender
    assert receiver.held() == {10: shard(10)[1]}
