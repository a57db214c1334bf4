"""`flyball ckpt pin` and `unpin`: steps that a job's retention leaves alone."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from flyball.cli.ckpt.options import (
    Folders,
    Generation,
    JobName,
    StateDir,
    StepName,
    TierName,
    look,
    parse_step,
    storage_tiers,
)
from flyball.cli.reach.options import examples
from flyball.cli.show.output import Format, OutputOption, print_json, say
from flyball.contracts.checkpoints import Tier
from flyball.contracts.errors import NotFound

if TYPE_CHECKING:
    from ckpt_engine.inspect.inventory import CopyInventory

PIN: dict[str, Any] = {
    "help": "Keep a step on disks and in stores, whatever the job's retention says.",
    "epilog": examples("flyball ckpt pin 120", "flyball ckpt unpin 120"),
}
UNPIN: dict[str, Any] = {
    "help": "Let the job's retention have a pinned step.",
    "epilog": examples("flyball ckpt unpin 120"),
}


def pin(
    *,
    step: StepName,
    tier: TierName = None,
    generation: Generation = None,
    state_dir: StateDir = "",
    folders: Folders = None,
    job: JobName = "",
    output: OutputOption = Format.TABLE,
) -> None:
    """In every folder and store that has something of the step."""
    wanted, tiers = parse_step(step), storage_tiers(tier)
    _StepPlaces(wanted, tiers, generation, look(state_dir, folders, job).inventory).change(output, pinned=True)


def unpin(
    *,
    step: StepName,
    tier: TierName = None,
    generation: Generation = None,
    state_dir: StateDir = "",
    folders: Folders = None,
    job: JobName = "",
    output: OutputOption = Format.TABLE,
) -> None:
    """In every folder and store that has something of the step."""
    wanted, tiers = parse_step(step), storage_tiers(tier)
    _StepPlaces(wanted, tiers, generation, look(state_dir, folders, job).inventory).change(output, pinned=False)


class _StepPlaces:
    """The folders and stores that have something of a step."""

    def __init__(
        self, step: int | None, tiers: Collection[Tier], generation: int | None, inventory: CopyInventory
    ) -> None:
        """Raises NotFound if there are none."""
        from ckpt_engine.inspect.copy_places import StoragePlace
        from ckpt_engine.inspect.remove_steps import durable_point

        newest = durable_point(inventory) if step is None else None
        listing = newest or inventory.find(step, generation)
        places = (held.place for held in inventory.copies_of(listing) if held.place.tier in tiers)
        self.found = list(dict.fromkeys(place for place in places if isinstance(place, StoragePlace)))
        self.job, self.step, self.generation = inventory.job, listing.step, listing.generation
        if not self.found:
            raise NotFound(
                f"Step {self.step} of {self.job} is on no disk and in no store.",
                hint="`flyball ckpt ls` shows the steps that are",
            )

    def change(self, output: Format, *, pinned: bool) -> None:
        """Pin or unpin the step in all of them, and say so."""
        for place in self.found:
            change = place.store.pin if pinned else place.store.unpin
            change(self.generation, self.step)
        where = [place.where for place in self.found]
        if output is Format.TABLE:
            say(f"step {self.step} {'is pinned' if pinned else 'is not pinned any more'} in {', '.join(where)}")
            return
        print_json(
            {"job": self.job, "step": self.step, "generation": self.generation, "pinned": pinned, "places": where}
        )
