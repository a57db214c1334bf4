"""Lists all copies of one run of a job in some places, and derives its steps and recovery point."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ckpt_engine.format.manifest import Manifest, TensorEntry
from ckpt_engine.format.step_listing import StepKey, StepListing, infer_lineage, list_steps
from ckpt_engine.inspect.copy_places import Ignored, Place, reason
from ckpt_engine.inspect.shard_reading import CopyGone
from flyball.contracts.checkpoints import Lineage, ShardCopy, Tier
from flyball.contracts.errors import CorruptShard, FlyballError, NotFound


@dataclass(frozen=True, slots=True)
class HeldCopy:
    """A copy and the place that holds it."""

    place: Place
    copy: ShardCopy

    @property
    def key(self) -> StepKey:
        return self.copy.generation, self.copy.step

    @property
    def path(self) -> str:
        return self.place.path(self.copy)


class CopyInventory:
    """All copies of one run of a job in some places, at the time of construction."""

    def __init__(self, job: str, places: Sequence[Place], *, run: str = "", lineage: Lineage = ()) -> None:
        """Reads the places. `run`: the one that they hold. `lineage`: () if it is not recorded; then it is inferred
        from the steps."""
        self.job = job
        self.run = run
        self.places = tuple(places)
        self.held: list[HeldCopy] = []
        self.ignored: list[Ignored] = []
        self.sealed: set[StepKey] = set()
        self.damaged: dict[StepKey, str] = {}  # steps that were whole once -> what is damaged
        self.pinned: set[StepKey] = set()
        for place in places:
            try:
                self.held += [HeldCopy(place, copy) for copy in place.copies()]
                self.pinned |= place.pinned()
            except (OSError, FlyballError) as error:
                self.ignored.append(Ignored(place.where, reason(error)))
            self.ignored += place.ignored()
            self.sealed |= place.sealed()
            self.damaged = place.damaged() | self.damaged
        self.held.sort(key=lambda held: (held.copy.step, held.copy.generation, held.copy.rank, _ORDER[held.copy.tier]))
        manifests = self._first_manifests()
        world_sizes = {key: manifest.world_size for key, manifest in manifests.items()}
        self.held = [held for held in self.held if held.key in world_sizes]  # of other steps all copies are gone by now
        self.lineage = lineage or infer_lineage(held.key for held in self.held)
        self.unsealed = {held.key for held in self.held if held.copy.tier is Tier.PERSISTENT} - self.sealed
        self._world_sizes = world_sizes
        self._committed_at = {key: manifest.committed_at for key, manifest in manifests.items()}
        self.bad: set[ShardCopy] = set()  # as far as is known
        self.steps = self._list()

    def leave_out(self, is_bad: Callable[[HeldCopy], bool]) -> None:
        """These copies are known to be bad: no step counts because of them."""
        good: set[ShardCopy] = set()
        bad: set[ShardCopy] = set()
        for held in self.held:
            (bad if is_bad(held) else good).add(held.copy)
        self.bad = bad - good  # the same copy may be in two places
        self.steps = self._list()

    def _list(self) -> tuple[StepListing, ...]:
        return list_steps(
            (held.copy for held in self.held),
            lineage=self.lineage,
            world_sizes=self._world_sizes,
            unsealed=self.unsealed,
            pinned=self.pinned,
            committed_at=self._committed_at,
            bad=self.bad,
        )

    @property
    def recovery_point(self) -> StepListing | None:
        return next((listing for listing in self.steps if listing.recovery_point), None)

    def find(self, step: int | None, generation: int | None = None) -> StepListing:
        """The recovery point (`step` None) or the given step, preferably of the job's lineage unless a generation is
        given. Raises NotFound."""
        if step is None:
            if self.recovery_point is None:
                raise NotFound(
                    f"No step of {self.job} has a copy of every rank.",
                    hint="`flyball ckpt ls --all` lists all copies; other places may hold the rest",
                )
            return self.recovery_point
        found = [s for s in self.steps if s.step == step and generation in (None, s.generation)]
        if not found:
            known = sorted({s.step for s in self.steps}, reverse=True)
            raise NotFound(
                f"There is no copy of step {step} of {self.job}"
                + (f", generation {generation}." if generation is not None else "."),
                hint=f"choose one of {', '.join(map(str, known[:8]))}" if known else "search other places",
            )
        return max(found, key=lambda s: (s.recovery_point, s.alive, s.complete, s.generation))

    def copies_of(self, listing: StepListing) -> list[HeldCopy]:
        """The copies of a step by rank, nearest tier first."""
        return [held for held in self.held if held.key == (listing.generation, listing.step)]

    def counts(self, held: HeldCopy) -> bool:
        """Whether a restore may use it."""
        return held.copy.tier is not Tier.PERSISTENT or held.key not in self.unsealed

    def _first_manifests(self) -> dict[StepKey, Manifest]:
        """One readable manifest per step."""
        found: dict[StepKey, Manifest] = {}
        for held in self.held:
            if held.key not in found and (manifest := read_manifest(held)) is not None:
                found[held.key] = manifest
        return found


_ORDER = {tier: order for order, tier in enumerate(Tier)}


def read_manifest(held: HeldCopy) -> Manifest | None:
    """The copy's manifest; None if it is gone or bad by now."""
    try:
        with held.place.reading(held.copy) as reading:
            return reading.manifest
    except (CopyGone, CorruptShard, OSError):
        return None


def read_tensors(held: HeldCopy) -> tuple[TensorEntry, ...] | None:
    """The copy's tensors, from its header; None if it is gone or bad by now."""
    try:
        with held.place.reading(held.copy) as reading:
            return reading.tensors()
    except (CopyGone, CorruptShard, OSError):
        return None
