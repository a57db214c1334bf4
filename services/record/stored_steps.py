"""Which steps of a job that are in its store a restore may want, and which can be forgotten. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import msgspec

from flyball.contracts.checkpoints import Lineage, ShardCopy, Tier, is_alive, world_size_of
from flyball.contracts.cluster import JobSpec
from services.rules import recovery_point

KEPT_STEPS = 16  # complete steps of each job, at least: as many as engines report
MULTIPLES = 2  # complete steps that the store keeps for ever, for a restore that has none of the newest


class Wanted(msgspec.Struct, frozen=True):
    """Decides which steps of a job a restore may want. `world_size` is the job's: an older generation may have had
    other ranks. `clean_steps`: the newest steps before known harms, to which a restart may go back."""

    lineage: Lineage
    world_size: int
    keep_latest: int
    keep_every: int
    clean_steps: tuple[int, ...] = ()

    @staticmethod
    def of(spec: JobSpec, lineage: Lineage, clean_steps: Iterable[int] = ()) -> Wanted:
        policy = spec.checkpoint.policy(Tier.PERSISTENT)
        marks = tuple(sorted(clean_steps))
        return Wanted(lineage, spec.world_size, policy.keep_latest, policy.keep_every, marks)

    def saved_by(self, generation: int) -> int:
        """Return how many ranks saved the steps of a generation."""
        return world_size_of(generation, self.lineage, of_job=self.world_size)

    def is_complete(self, generation: int, copies: Iterable[ShardCopy]) -> bool:
        """Return whether the copies of one step of this generation cover all ranks that saved it."""
        ranks = self.saved_by(generation)
        return len({copy.rank for copy in copies if copy.rank < ranks}) == ranks


def restorable(
    marks: Iterable[tuple[int, int]], wanted: Wanted, copies_of: Callable[[int, int], Sequence[ShardCopy]]
) -> list[tuple[int, int]]:
    """Return the (generation, step) of a job that a restore may want.

    These are the newest complete ones of its lineage that retention leaves in the store, and all newer ones; the same
    of the lineage up to each clean step. `copies_of` is called for no others.

    After failed restores some may be steps that retention removed while there were newer ones. Nobody reports which:
    steps that it could not remove, or that somebody pinned, still exist. Naming one that is gone costs a generation;
    not naming one that exists may cost all progress."""
    marks = sorted(marks, key=newest_first)
    found = dict.fromkeys(_newest_complete(marks, wanted, copies_of))
    for step in wanted.clean_steps:
        clean = msgspec.structs.replace(wanted, lineage=recovery_point.before(wanted.lineage, step + 1))
        found.update(dict.fromkeys(_newest_complete(marks, clean, copies_of)))
    return list(found)


def _newest_complete(
    marks: Iterable[tuple[int, int]], wanted: Wanted, copies_of: Callable[[int, int], Sequence[ShardCopy]]
) -> list[tuple[int, int]]:
    """`marks`: newest first."""
    found: list[tuple[int, int]] = []
    complete = 0
    for generation, step in marks:
        if not is_alive(generation, step, wanted.lineage):
            continue
        if complete >= wanted.keep_latest and (wanted.keep_every == 0 or step % wanted.keep_every):
            continue  # retention has removed it, or is about to
        found.append((generation, step))
        complete += wanted.is_complete(generation, copies_of(generation, step))
        if complete == wanted.keep_latest + (MULTIPLES if wanted.keep_every else 0):
            break
    return found


def forgettable(
    marks: Collection[tuple[int, int]], wanted: Wanted, ranks: Mapping[tuple[int, int], int]
) -> list[tuple[int, int]]:
    """Return the (generation, step) of a job that no restore will want, oldest first.

    These are older than KEPT_STEPS complete ones of its lineage. The newest of the multiples that stay in the store for
    ever are kept. Once there are KEPT_STEPS complete ones, those outside the lineage go too: no later generation will
    continue what the newest started one does not. `ranks`: number of ranks with a copy."""
    newest = max(KEPT_STEPS, wanted.keep_latest)
    complete = multiples = 0
    gone = [mark for mark in marks if not is_alive(*mark, wanted.lineage)]
    for mark in sorted(set(marks).difference(gone), key=newest_first):
        is_complete = ranks.get(mark, 0) == wanted.saved_by(mark[0])
        is_multiple = wanted.keep_every > 0 and mark[1] % wanted.keep_every == 0
        if complete < newest:
            complete += is_complete
        elif is_complete and is_multiple and multiples < MULTIPLES:
            multiples += 1
        else:
            gone.append(mark)
    return sorted(gone, key=newest_first, reverse=True) if complete == newest else []


def is_outdated(mark: tuple[int, int], marks: Iterable[tuple[int, int]]) -> bool:
    """Return whether its generation and later ones have enough newer steps. Earlier generations do not count, because
    a generation may go back to the very beginning."""
    return sum(generation >= mark[0] and step > mark[1] for generation, step in marks) >= KEPT_STEPS


def newest_first(mark: tuple[int, int]) -> tuple[int, int]:
    generation, step = mark
    return -step, -generation
