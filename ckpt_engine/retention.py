"""Which copies of a disk tier may go. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from flyball.contracts.checkpoints import LineageEntry, ShardCopy, is_alive


def removable(
    copies: Iterable[ShardCopy],
    *,
    lineage: Collection[LineageEntry],
    needed_ranks: Collection[int],
    own_ranks: Collection[int],
    keep_complete_steps: int,
) -> list[ShardCopy]:
    """Copies of `own_ranks` that no restore will want: older than the newest `keep_complete_steps` complete steps.

    A step is complete when the tier has it for all of `needed_ranks` in a history that counts. Copies outside that
    history go as soon as one complete step is there; until then nothing goes.
    """
    found = list(copies)
    ranks_by_step: dict[int, set[int]] = {}
    for copy in found:
        if is_alive(copy.generation, copy.step, lineage):
            ranks_by_step.setdefault(copy.step, set()).add(copy.rank)
    complete = sorted(step for step, ranks in ranks_by_step.items() if ranks.issuperset(needed_ranks))
    if not complete:
        return []
    oldest_kept = complete[-keep_complete_steps:][0]
    return [
        copy
        for copy in found
        if copy.rank in own_ranks and (copy.step < oldest_kept or not is_alive(copy.generation, copy.step, lineage))
    ]
