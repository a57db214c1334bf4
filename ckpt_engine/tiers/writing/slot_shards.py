"""The shards of one step in this host's slots, as a plan of how to store them needs them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

from ckpt_engine.contracts.generation import HostGeneration
from ckpt_engine.format import manifest as manifests
from ckpt_engine.format import shard_format
from ckpt_engine.rules.storage_plan import HeldShard
from ckpt_engine.slots.slot_bytes import SlotBytes
from ckpt_engine.tiers.memory import MemoryTier
from flyball.contracts.errors import CorruptShard


class SlotShards:
    """Of the local ranks that have the step."""

    def __init__(
        self,
        using: ExitStack,
        memory: MemoryTier,
        generation: HostGeneration,
        step: int,
        wanted: Callable[[int], bool] = lambda rank: True,
    ) -> None:
        """The slots stay open until `using` ends."""
        self.held: dict[int, HeldShard] = {}
        self.payloads: dict[int, SlotBytes] = {}
        self._unchanged: list[Callable[[], bool]] = []
        for rank in generation.local_ranks:
            entry = using.enter_context(memory.using(rank))
            found = memory.find(entry, generation.number, step) if entry is not None else None
            if entry is None or found is None or not wanted(rank):
                continue
            view, manifest, data = found
            try:
                payload = using.enter_context(entry.segments.bytes_of(view.index))
                header = shard_format.read_header(payload)
            except (CorruptShard, OSError):  # its own writer reports it
                continue
            self.payloads[rank] = payload
            self.held[rank] = HeldShard(header, manifest, manifests.digest(data))
            self._unchanged.append(lambda segments=entry.segments, view=view: segments.unchanged(view))  # type: ignore[misc]

    def unchanged(self) -> bool:
        """Whether all slots still have what they had."""
        return all(is_unchanged() for is_unchanged in self._unchanged)
