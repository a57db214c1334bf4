"""Group copies by step: which steps are complete and part of the history, and which is the recovery point. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping

import msgspec

from flyball.contracts.checkpoints import Lineage, LineageEntry, ShardCopy, Tier, is_alive

StepKey = tuple[int, int]  # (generation, step)


class TierShare(msgspec.Struct, frozen=True):
    """One tier's copies of a step. `counts` is false for a persistent step without a world manifest. `bad_ranks` have
    copies that are known not to verify."""

    tier: Tier
    hosts: tuple[str, ...]
    ranks: tuple[int, ...]
    size_bytes: int
    counts: bool
    bad_ranks: tuple[int, ...] = ()


class StepListing(msgspec.Struct, frozen=True):
    """One step of one generation. `size_bytes` counts one copy per rank. `committed_at` is the wall-clock time at which
    one of its shards was committed, None if no manifest has it."""

    step: int
    generation: int
    world_size: int
    alive: bool
    complete: bool
    recovery_point: bool
    pinned: bool
    missing_ranks: tuple[int, ...]
    size_bytes: int
    tiers: tuple[TierShare, ...]
    committed_at: float | None = None


def list_steps(
    copies: Iterable[ShardCopy],
    *,
    lineage: Lineage,
    world_sizes: Mapping[StepKey, int],
    unsealed: Collection[StepKey] = (),
    pinned: Collection[StepKey] = (),
    committed_at: Mapping[StepKey, float] | None = None,
    bad: Collection[ShardCopy] = (),
) -> tuple[StepListing, ...]:
    """The steps of these copies, the newest history first. Persistent copies of `unsealed` steps do not count, nor does
    what is known to be `bad`."""
    by_step: dict[StepKey, list[ShardCopy]] = defaultdict(list)
    for copy in copies:
        by_step[copy.generation, copy.step].append(copy)
    found = [
        _step(key, held, lineage, world_sizes[key], is_unsealed=key in unsealed, bad=bad)
        for key, held in by_step.items()
    ]
    whole = [(listing.step, listing.generation) for listing in found if listing.complete and listing.alive]
    newest = max(whole, default=None)
    marked = [
        msgspec.structs.replace(
            listing,
            recovery_point=(listing.step, listing.generation) == newest,
            pinned=(listing.generation, listing.step) in pinned,
            committed_at=(committed_at or {}).get((listing.generation, listing.step)) or None,
        )
        for listing in found
    ]
    return tuple(sorted(marked, key=lambda listing: (listing.alive, listing.step, listing.generation), reverse=True))


def infer_lineage(keys: Iterable[StepKey]) -> Lineage:
    """Infer the history from the steps alone, for folders without a record of it. A generation that saved step s
    branched off before s, so steps from s on of all older generations are dead."""
    lineage: list[LineageEntry] = []
    upto: int | None = None
    first_steps: dict[int, int] = {}
    for generation, step in keys:
        first_steps[generation] = min(step, first_steps.get(generation, step))
    for generation in sorted(first_steps, reverse=True):
        lineage.append(LineageEntry(generation, upto))
        upto = first_steps[generation] - 1 if upto is None else min(upto, first_steps[generation] - 1)
    return tuple(reversed(lineage))


def _step(
    key: StepKey,
    copies: list[ShardCopy],
    lineage: Lineage,
    world_size: int,
    *,
    is_unsealed: bool,
    bad: Collection[ShardCopy],
) -> StepListing:
    generation, step = key
    sizes: dict[int, int] = {}
    for copy in copies:
        if copy.rank < world_size and not (is_unsealed and copy.tier is Tier.PERSISTENT) and copy not in bad:
            sizes.setdefault(copy.rank, copy.size_bytes)
    missing = tuple(rank for rank in range(world_size) if rank not in sizes)
    return StepListing(
        step=step,
        generation=generation,
        world_size=world_size,
        alive=is_alive(generation, step, lineage),
        complete=not missing,
        recovery_point=False,
        pinned=False,
        missing_ranks=missing,
        size_bytes=sum(sizes.values()),
        tiers=tuple(
            _share(tier, held, counts=not (is_unsealed and tier is Tier.PERSISTENT), bad=bad)
            for tier in Tier
            if (held := [copy for copy in copies if copy.tier is tier])
        ),
    )


def _share(tier: Tier, copies: list[ShardCopy], *, counts: bool, bad: Collection[ShardCopy]) -> TierShare:
    return TierShare(
        tier=tier,
        hosts=tuple(sorted({copy.host_id for copy in copies if copy.host_id})),
        ranks=tuple(sorted({copy.rank for copy in copies})),
        size_bytes=sum(copy.size_bytes for copy in copies),
        counts=counts,
        bad_ranks=tuple(sorted({copy.rank for copy in copies if copy in bad})),
    )
