"""The peer tier: replica slots, in which this host keeps the shards of other hosts' ranks."""

from __future__ import annotations

from ckpt_engine.slots.rank_segments import SlotState
from ckpt_engine.tiers.memory import SlotTier
from flyball.contracts.checkpoints import Tier
from flyball.contracts.on_host.segments import replica_segment


class PeerTier(SlotTier):
    """The slots that this host's engine fills for its peers."""

    tier = Tier.PEER
    _base_path = staticmethod(replica_segment)

    def drop_torn(self) -> None:
        """At the start of an engine: what its predecessor was receiving will never be whole."""
        for rank in self.ranks():
            with self.using(rank) as entry:
                if entry is None:
                    continue
                for view in entry.segments.slots():
                    if view.state in (SlotState.WRITING, SlotState.CAPTURED):
                        entry.segments.discard(view)
