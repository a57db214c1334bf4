"""Which copies of a disk tier may go. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from ckpt_engine.peer_wire import TierNaming
from flyball.contracts.checkpoints import LineageEntry, ShardCopy, is_alive


def removable(
    copies: Iterable[ShardCopy],
    *,
    naming: TierNaming,
    lineage: Collection[LineageEntry],
    ranks: Collection[int] | None,
) -> list[ShardCopy]:
    """Copies of `ranks` (None: of all) that no restore will want.

    Kept are the steps that the coordinator says are kept, and everything newer, except for steps of the running
    generation that it has gone past: some rank could not write them. What a newer generation wrote is never removed,
    and nothing of older ones before a step is complete.
    """
    running = max(entry.generation for entry in lineage)
    newest_kept = max(naming.kept, default=-1)

    def goes(copy: ShardCopy) -> bool:
        if copy.generation > running or (copy.step in naming.kept and is_alive(copy.generation, copy.step, lineage)):
            return False
        if copy.generation == running:
            return copy.step < naming.step
        return newest_kept >= 0 and (copy.step < newest_kept or not is_alive(copy.generation, copy.step, lineage))

    return [copy for copy in copies if (ranks is None or copy.rank in ranks) and goes(copy)]
