"""Takes chunks from another host that reads them from the store and passes them on. Each is verified by the manifest of
the shard that it was asked of."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby, islice
from typing import TypeVar

from ckpt_engine.contracts.generation import HostGeneration
from ckpt_engine.contracts.peer_wire import GetChunks, Reply, ShardVerdict
from ckpt_engine.format.chunk_runs import runs_of
from ckpt_engine.format.manifest import Manifest
from ckpt_engine.peers.broadcast.bandwidths import MeasuredBandwidths, Way
from ckpt_engine.peers.shard_transfer import receive_chunks
from ckpt_engine.peers.transport.port import Connection
from ckpt_engine.rules.broadcast import ChunkPlace
from ckpt_engine.rules.peer_patience import PeerPatience
from ckpt_engine.settings import EngineSettings
from flyball.contracts.errors import RestoreFailed, Unreachable

_ASKED_AT_ONCE_BYTES = 8 << 20
_LOOK_AGAIN_S = 0.05

Mine = TypeVar("Mine")


class PassedOn:
    """For one restore on one host. Thread-safe, with a connection for each thread."""

    def __init__(
        self,
        generation: HostGeneration,
        *,
        manifest: Callable[[int], Manifest],
        patience: PeerPatience,
        bandwidths: MeasuredBandwidths,
        settings: EngineSettings,
        check: Callable[[], None],
    ) -> None:
        """`manifest` of any rank whose shard is asked for. `check` raises if the chunks are wanted no more."""
        self._generation = generation
        self._manifest = manifest
        self._patience = patience
        self._bandwidths = bandwidths
        self._settings = settings
        self._check = check

    def take(
        self,
        connection: Connection,
        pairs: Iterable[tuple[Mine, ChunkPlace]],
        put: Callable[[Mine, memoryview], None],
    ) -> None:
        """Hand over each of these chunks with the other one of its pair, which has the same bytes. Raises Unreachable
        if the host does not have one in time, RestoreFailed if it will not; CorruptShard; what `check` raises."""
        for rank, some in groupby(pairs, key=lambda pair: pair[1].rank):
            mine = {place.chunk: one for one, place in some}
            manifest = self._manifest(rank)
            there = iter(sorted(mine))
            at_once = max(1, _ASKED_AT_ONCE_BYTES // manifest.chunk_bytes)
            while chunks := list(islice(there, at_once)):
                self._take_some(connection, manifest, chunks, lambda chunk, data, mine=mine: put(mine[chunk], data))  # type: ignore[misc]

    def _take_some(
        self, connection: Connection, manifest: Manifest, chunks: Sequence[int], put: Callable[[int, memoryview], None]
    ) -> None:
        shard = (manifest.job, manifest.generation, manifest.step, manifest.rank)
        self._ask(connection, GetChunks(*shard, tuple(runs_of(chunks)), broadcast=True))
        with self._bandwidths.measuring(Way.NETWORK) as count:

            def take(chunk: int, data: memoryview) -> None:
                count(len(data))
                put(chunk, data)

            receive_chunks(connection, manifest, chunks, take, superseded=self._generation.ended.is_set)

    def _ask(self, connection: Connection, wanted: GetChunks) -> None:
        """Returns once the chunks follow."""
        deadline_s = time.monotonic() + self._patience.left_s
        while True:
            self._check()
            reply = connection.request(wanted, Reply, timeout_s=self._settings.io_timeout_s)
            if reply.verdict is ShardVerdict.OK:
                self._patience.refill()
                return
            if reply.verdict is not ShardVerdict.BUSY:
                raise RestoreFailed(f"its engine answered {reply.verdict}: {reply.message}")
            if time.monotonic() >= deadline_s:
                self._patience.in_vain()
                raise Unreachable(f"{connection.peer.host_id} did not have the chunks in time.")
            self._generation.ended.wait(_LOOK_AGAIN_S)
