"""What a disk tier removes over a job's life, with writes that fail on some ranks, lost names, and generations that
branch off."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt_engine.contracts.peer_wire import MAX_REPORTED_STEPS, TierNaming
from ckpt_engine.rules.retention_rules import newest_alive, removable, reported_steps, unconfirmed
from flyball.contracts.checkpoints import Lineage, LineageEntry, ShardCopy, Tier, TierPolicy, branch, is_alive

RANKS = 3


@dataclass
class World:
    """A job with one rank per host. In a persistent tier all hosts see the same copies."""

    tier: Tier
    policy: TierPolicy
    lineage: Lineage = (LineageEntry(1),)
    step: int = 0
    copies: list[dict[tuple[int, int], ShardCopy]] = field(default_factory=lambda: [{} for _ in range(RANKS)])
    sealed: set[tuple[int, int]] = field(default_factory=set)

    @property
    def generation(self) -> int:
        return self.lineage[-1].generation

    def complete(self) -> list[int]:
        """The restorable steps, oldest first."""
        common = set.intersection(*(set(held) for held in self.copies))
        if self.tier is Tier.PERSISTENT:
            common &= self.sealed
        return sorted(step for generation, step in common if is_alive(generation, step, self.lineage))

    def write(self, failing: set[int]) -> None:
        """Name the next step; all ranks but these write it."""
        for rank in set(range(RANKS)) - failing:
            copy = ShardCopy("job", self.generation, self.step, rank, self.tier, "", 1, "")
            self.copies[rank][self.generation, self.step] = copy
        if not failing:
            self.sealed.add((self.generation, self.step))

    def naming(self) -> TierNaming:
        """The coordinator's naming once every rank has reported on the last step, as in `tier_schedule`."""
        kept = tuple(self.complete()[-self.policy.keep_latest :])
        return TierNaming(self.tier, self.step, kept)

    def prune(self, naming: TierNaming, deaf: set[int]) -> None:
        """All but these receive it."""
        for rank in set(range(RANKS)) - deaf:
            shared = self.tier is Tier.PERSISTENT
            seen = [copy for held in self.copies for copy in held.values()] if shared else self.copies[rank].values()
            gone = removable(
                seen,
                naming=naming,
                lineage=self.lineage,
                ranks=(rank,) if shared else None,
                keep_every=self.policy.keep_every,
                sealed=self.sealed if shared else None,
            )
            for copy in gone:
                assert copy.rank == rank
                del self.copies[rank][copy.generation, copy.step]

    def restart(self) -> None:
        """Begin a generation from the newest restorable step."""
        newest = max(self.complete(), default=None)
        self.lineage = branch(self.lineage, restored_step=newest, generation=self.generation + 1)
        self.step = newest if newest is not None else 0


ranks = st.sets(st.integers(0, RANKS - 1))
events = st.lists(
    st.one_of(st.tuples(st.just("write"), ranks | st.just(set()), ranks), st.tuples(st.just("restart"), ranks, ranks)),
    max_size=30,
)


@settings(max_examples=300)
@given(
    st.sampled_from((Tier.DISK, Tier.PERSISTENT)),
    st.builds(TierPolicy, keep_latest=st.integers(1, 3), keep_every=st.sampled_from((0, 2, 3))),
    events,
)
def test_what_can_be_restored_and_shall_stay_stays_on_all_hosts(
    tier: Tier, policy: TierPolicy, history: list[tuple[str, set[int], set[int]]]
) -> None:
    world = World(tier, policy)
    for kind, failing, deaf in history:
        if kind == "restart":
            world.restart()
            continue
        world.step += 1
        world.write(failing)
        before, naming = world.complete(), world.naming()
        world.prune(naming, deaf)
        after = world.complete()
        wanted = set(before[-policy.keep_latest :])
        if policy.keep_every:
            wanted |= {step for step in before if step % policy.keep_every == 0}
        assert wanted <= set(after)
        assert after[-1:] == before[-1:]
        if not deaf:
            assert set(after) == wanted | {step for step in before if step > max(naming.kept)}
            assert all(_is_tidy(world, held, naming) for held in world.copies)


def _is_tidy(world: World, held: Iterable[tuple[int, int]], naming: TierNaming) -> bool:
    """Nothing is left that no restore wants and no rule keeps."""
    for generation, step in held:
        alive = is_alive(generation, step, world.lineage)
        multiple = world.policy.keep_every > 0 and step % world.policy.keep_every == 0
        running = generation == world.generation and step >= naming.step
        if not alive and not any((world.generation, kept) in world.sealed for kept in naming.kept):
            continue  # it may have been left out since it could not be restored
        if naming.kept and not (alive and (step in naming.kept or multiple or running or step >= max(naming.kept))):
            return False
    return True


@given(st.integers(1, 1024), st.integers(0, 7), st.integers(0, 5_000))
def test_a_rank_reports_more_steps_than_are_kept(keep_latest: int, keep_every: int, held: int) -> None:
    steps, policy = range(1, held), TierPolicy(keep_latest=keep_latest, keep_every=keep_every)
    reported = reported_steps(steps, policy)
    assert list(reported) == sorted(set(reported)) and len(reported) <= MAX_REPORTED_STEPS
    assert {*steps[-keep_latest - 1 :]} <= {*reported}
    others = [step for step in steps if keep_every and step % keep_every]
    assert {*others[-min(keep_latest + 1, 900) :]} <= {*reported}


def test_what_a_newer_generation_wrote_is_never_removed() -> None:
    newer = ShardCopy("job", 3, 1, 0, Tier.DISK, "", 1, "")
    naming = TierNaming(Tier.DISK, 9, (8,))
    assert removable([newer], naming=naming, lineage=(LineageEntry(2),), ranks=None) == []


def test_the_newest_steps_of_the_lineage_are_reported() -> None:
    lineage = (LineageEntry(1, 4), LineageEntry(2))
    steps = [(generation, step) for generation, steps in ((1, range(10)), (2, range(6, 9))) for step in steps]
    assert newest_alive(steps, lineage=lineage, count=4) == {(1, 4), (2, 6), (2, 7), (2, 8)}
    assert newest_alive([], lineage=lineage, count=4) == frozenset()


@pytest.mark.parametrize(
    ("stored", "held", "kept"),
    [
        (None, [], set()),
        (None, [3, 1], {1, 3}),
        (5, [3, 5, 8], {5, 8}),
        (5, [], {5}),
        (0, range(40), {0, *range(24, 40)}),
        (None, range(40), set(range(24, 40))),
    ],
)
def test_the_stored_step_and_the_newest_after_it_are_unconfirmed(
    stored: int | None, held: Iterable[int], kept: set[int]
) -> None:
    assert unconfirmed(stored, held) == kept
