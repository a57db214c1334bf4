"""What an engine keeps of other hosts' shards while it plans how they are stored together."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import xxhash
from support.stores.alike_shards import as_payload
from support.stores.shards import make_manifest

from ckpt_engine.format import manifest as manifests
from ckpt_engine.format.manifest import Manifest
from ckpt_engine.peers import cohort_shards
from ckpt_engine.peers.chunk_sources import Delivery, FoundShard
from ckpt_engine.peers.cohort_shards import RemoteShards
from ckpt_engine.rules.fetch_order import FetchStep
from flyball.contracts.checkpoints import ShardSource, Tier
from flyball.contracts.errors import Unreachable
from flyball.contracts.recovery import Origin

CHUNK_BYTES = 4096
RANKS = range(4)


class SendingPeers:
    """The other hosts' engines, which count the chunks that they send."""

    def __init__(self) -> None:
        self.payloads = {
            rank: as_payload({"w": (np.random.default_rng(rank).random(9 * 1024, np.float32), None)}, "")
            for rank in RANKS
        }
        self.sent: list[tuple[int, int]] = []

    def open(self, rank: int, step: FetchStep) -> FoundShard:
        described = make_manifest(self.payloads[rank], 4, rank, world_size=len(RANKS), chunk_bytes=CHUNK_BYTES)
        return FoundShard(described, manifests.encode(described), memoryview(b""), "", Delivery(Tier.MEMORY))

    def read(self, step: FetchStep, manifest: Manifest, chunks: Sequence[int], take: Any, delivery: Delivery) -> None:  # noqa: ANN401
        for chunk in chunks:
            self.sent.append((manifest.rank, chunk))
            data = self.payloads[manifest.rank][chunk * CHUNK_BYTES : (chunk + 1) * CHUNK_BYTES]
            take(chunk, memoryview(data))


def ask(hosts: SendingPeers, deadline_s: float) -> RemoteShards:
    steps = {rank: FetchStep(Origin.REMOTE_MEMORY, ShardSource(rank, 1, Tier.MEMORY, f"h{rank}", "")) for rank in RANKS}
    return RemoteShards(hosts, steps, deadline_s)  # type: ignore[arg-type]


def test_a_chunk_is_fetched_once_and_forgotten_when_others_take_its_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cohort_shards, "_KEPT_BYTES", 2 * len(RANKS) * CHUNK_BYTES)
    hosts = SendingPeers()
    shards = ask(hosts, time.monotonic() + 60.0)
    for begin in range(0, 10 * CHUNK_BYTES - 1000, 1000):  # small tensors, one after the other, of all ranks
        for rank in RANKS:
            wanted = hosts.payloads[rank][begin : begin + 1000]
            assert shards.hash_range(rank, begin, begin + 1000) == xxhash.xxh3_128_digest(wanted)
            assert sum(map(len, shards._chunks.values())) == shards._kept_bytes <= cohort_shards._KEPT_BYTES
    assert sorted(hosts.sent) == [(rank, chunk) for rank in RANKS for chunk in range(10)]
    hosts.sent.clear()
    assert shards.hash_range(2, 0, 10) == xxhash.xxh3_128_digest(hosts.payloads[2][:10])
    assert hosts.sent == [(2, 0)], "it was forgotten, and is fetched again"


def test_nothing_is_fetched_after_the_deadline() -> None:
    with pytest.raises(Unreachable, match="took too long"):
        ask(SendingPeers(), time.monotonic() - 1.0)
