"""Which copies of a disk tier may go. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from ckpt_engine.contracts.peer_wire import TierNaming
from flyball.contracts.checkpoints import LineageEntry, ShardCopy, TierPolicy, is_alive

_BEYOND_KEPT = 16  # steps that some rank could not write, and that are not removed yet

_BEYOND_STORED = 16  # steps that stay until the supervisor has stored one of them; as many as it is told of


def reported_steps(policy: TierPolicy) -> int:
    """How many of its newest steps a rank reports, so that the coordinator sees all that may be kept."""
    return policy.keep_latest + _BEYOND_KEPT


def newest_alive(
    steps: Iterable[tuple[int, int]], *, lineage: Collection[LineageEntry], count: int
) -> frozenset[tuple[int, int]]:
    """Of these (generation, step) the newest `count` of the history that counts."""
    alive = [(generation, step) for generation, step in steps if is_alive(generation, step, lineage)]
    newest = frozenset(sorted({step for _, step in alive})[-count:])
    return frozenset((generation, step) for generation, step in alive if step in newest)


def unconfirmed(stored: int | None, held: Iterable[int]) -> frozenset[int]:
    """Steps of a shared tier that may be the newest that the supervisor knows: `stored`, which was it when it last said
    so, and of those `held` the newest that came after. Where it has stored none since, that one is all it knows,
    however long ago it said so."""
    newer = sorted(step for step in held if stored is None or step > stored)[-_BEYOND_STORED:]
    return frozenset(newer) if stored is None else frozenset((stored, *newer))


def removable(
    copies: Iterable[ShardCopy],
    *,
    naming: TierNaming,
    lineage: Collection[LineageEntry],
    ranks: Collection[int] | None,
    keep_every: int = 0,
    sealed: Collection[tuple[int, int]] | None = None,
    spared: Collection[int] = (),
) -> list[ShardCopy]:
    """Copies of `ranks` (None: of all) that no restore will want.

    Kept are the steps that the coordinator says are kept, those that are multiples of `keep_every` (0: none), and
    everything newer, except for steps of the running generation that the coordinator has gone past: some rank could not
    write them. `sealed` are the (generation, step) that count, where that can be known: others are no multiples worth
    keeping. `spared`: steps of the history that stay as well. What a newer generation wrote is never removed, and
    nothing of older ones before a step is complete.
    """
    running = max(entry.generation for entry in lineage)
    newest_kept = max(naming.kept, default=-1)

    def stays(copy: ShardCopy) -> bool:
        if copy.generation > running:
            return True
        if not is_alive(copy.generation, copy.step, lineage):
            return newest_kept < 0
        if copy.step in naming.kept or copy.step in spared or _is_multiple(copy, keep_every, sealed):
            return True
        if copy.generation == running:
            return copy.step >= naming.step
        return copy.step >= newest_kept

    return [copy for copy in copies if (ranks is None or copy.rank in ranks) and not stays(copy)]


def _is_multiple(copy: ShardCopy, keep_every: int, sealed: Collection[tuple[int, int]] | None) -> bool:
    if keep_every == 0 or copy.step % keep_every:
        return False
    return sealed is None or (copy.generation, copy.step) in sealed
