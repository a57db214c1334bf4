"""Chooses the copies in a disk tier that may be removed. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence

from ckpt_engine.contracts.peer_wire import MAX_REPORTED_STEPS, TierNaming
from flyball.contracts.checkpoints import LineageEntry, ShardCopy, TierPolicy, is_alive

_BEYOND_STORED = 16  # steps kept until the supervisor has stored one of them; as many as are reported
_BEYOND_KEPT = 16 + _BEYOND_STORED  # others: steps that some rank could not write, not removed yet


def reported_steps(held: Sequence[int], policy: TierPolicy) -> tuple[int, ...]:
    """The steps that a rank reports of those it holds, oldest first, so that the coordinator sees all that may have to
    be kept.

    These are the newest ones, and as many of those that are no multiples of `keep_every`. Multiples stay for ever and
    grow in number. A step that stays because newer ones are suspect must not get lost behind them: what is not reported
    is removed. This needs no memory of what was kept, so it holds for a coordinator that was restarted too.
    """
    newest = slice(-policy.keep_latest - _BEYOND_KEPT, None)
    every = policy.keep_every
    others = [step for step in held if step % every] if every else []
    return tuple(sorted({*held[newest], *others[newest]}))[-MAX_REPORTED_STEPS:]


def newest_that_fit(copies: Iterable[ShardCopy], most: int) -> list[ShardCopy]:
    """The copies of the newest steps, whole steps only: as many as make no more than `most`, and always one."""
    by_step: defaultdict[int, list[ShardCopy]] = defaultdict(list)
    for copy in copies:
        by_step[copy.step].append(copy)
    found: list[ShardCopy] = []
    for step in sorted(by_step, reverse=True):
        if found and len(found) + len(by_step[step]) > most:
            break
        found += by_step[step]
    return found


def newest_alive(
    steps: Iterable[tuple[int, int]], *, lineage: Collection[LineageEntry], count: int
) -> frozenset[tuple[int, int]]:
    """The newest `count` of these (generation, step) that are in the lineage."""
    alive = [(generation, step) for generation, step in steps if is_alive(generation, step, lineage)]
    newest = frozenset(sorted({step for _, step in alive})[-count:])
    return frozenset((generation, step) for generation, step in alive if step in newest)


def unconfirmed(stored: int | None, held: Iterable[int]) -> frozenset[int]:
    """Steps of a shared tier that the supervisor may know as the newest: the one it last reported as `stored`, and the
    newest of `held` after it. If it has stored none since, `stored` is still all it knows."""
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
    """The copies of `ranks` (None: all) that no restore will want.

    Kept are the steps that the coordinator keeps, multiples of `keep_every` (0: none), and everything newer. Steps of
    the running generation that the coordinator has passed are removed, though: some rank could not write them. `sealed`
    are the complete (generation, step), if known; incomplete multiples are not kept. Steps in `spared` stay too. Copies
    of a newer generation are never removed, and none outside the lineage before the running generation has a complete
    step of its own: they may have been left out since they could not be restored, and the older step cannot either.
    """
    running = max(entry.generation for entry in lineage)
    newest_kept = max(naming.kept, default=-1)
    earlier = (entry.upto_step for entry in lineage if entry.generation != running)
    restored = max((upto for upto in earlier if upto is not None), default=-1)

    def stays(copy: ShardCopy) -> bool:
        if copy.generation > running:
            return True
        if not is_alive(copy.generation, copy.step, lineage):
            return newest_kept <= restored
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
