"""`flyball ckpt verify`: which copies can be relied on, every byte of them read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flyball.cli.ckpt.options import LATEST, Folders, Generation, JobName, StateDir, looks, parse_step
from flyball.cli.reach.options import examples
from flyball.cli.show.output import Format, OutputOption, print_fields, print_json, print_table, say
from flyball.contracts.errors import CorruptShard, FlyballError, RestoreFailed

if TYPE_CHECKING:
    from ckpt_engine.format.step_listing import StepKey
    from ckpt_engine.inspect.copy_places import Ignored
    from ckpt_engine.inspect.inventory import CopyInventory
    from ckpt_engine.inspect.verify_copies import Verified, VerifiedStep

COMMAND: dict[str, Any] = {
    "help": "Read every byte of every copy of a step (default: the newest recovery point), compare it with its "
    "checksum, and prove that the good copies make up the whole step. Exit code 21 if a copy is bad.",
    "epilog": examples("flyball ckpt verify", "flyball ckpt verify 120", "flyball ckpt verify --all"),
}


def command(
    *,
    step: Annotated[str, typer.Argument(metavar="[STEP]", help="a step")] = LATEST,
    everything: Annotated[bool, typer.Option("--all", help="verify every copy of every step")] = False,
    generation: Generation = None,
    state_dir: StateDir = "",
    folders: Folders = None,
    job: JobName = "",
    output: OutputOption = Format.TABLE,
) -> None:
    """Nothing is changed."""
    from ckpt_engine.inspect.verify_copies import CopyVerdict

    wanted = None if everything else parse_step(step)
    for found, is_last in looks(state_dir, folders, job, newest=wanted is None and not everything):
        inventory = found.inventory
        listings = list(inventory.steps) if everything else [inventory.find(wanted, generation)]
        world_sizes = {(listing.generation, listing.step): listing.world_size for listing in listings}
        results, steps = _verify(inventory, world_sizes)
        if is_last or not any(result.verdict is CopyVerdict.GONE for result in results):
            break
    ignored = [i for i in inventory.ignored if everything or (i.key and (i.key.generation, i.key.step) in world_sizes)]
    if output is Format.JSON:
        print_json(_to_json(inventory.job, results, steps, ignored))
    else:
        _show(results, steps, ignored)
    problem = _problem(inventory.job, results, steps, ignored, everything=everything)
    if problem is not None:
        raise problem


def _verify(
    inventory: CopyInventory, world_sizes: dict[StepKey, int]
) -> tuple[list[Verified], tuple[VerifiedStep, ...]]:
    from ckpt_engine.inspect.verify_copies import CopyVerdict, judge_steps, verify_copies
    from flyball.cli.show.progress import bytes_bar

    held_copies = [held for held in inventory.held if held.key in world_sizes]
    results: list[Verified] = []
    usable = []
    with bytes_bar("verifying", sum(held.copy.size_bytes for held in held_copies)) as advance:
        for held, (result, shard) in zip(held_copies, verify_copies(held_copies, advance), strict=True):
            results.append(result)
            if result.verdict is CopyVerdict.GOOD and shard is not None and inventory.counts(held):
                usable.append(shard)
    return results, judge_steps(usable, world_sizes)


def _problem(
    job: str,
    results: Sequence[Verified],
    steps: Sequence[VerifiedStep],
    ignored: Sequence[Ignored],
    *,
    everything: bool,
) -> FlyballError | None:
    from ckpt_engine.inspect.verify_copies import CopyVerdict

    bad = sum(result.verdict is CopyVerdict.BAD for result in results) + len(ignored)
    if bad:
        return CorruptShard(
            f"{bad} {'copy' if bad == 1 else 'copies'} of {job} cannot be relied on.",
            hint="a restore passes over them; `flyball ckpt rm STEP` frees a step that is of no use",
        )
    uncovered = [step for step in steps if step.problems]
    if uncovered:
        return CorruptShard(
            f"The copies of step {uncovered[0].step} of {job} are good and do not make up the whole state.",
            hint="restore another step, and report this",
        )
    if not everything and not steps[0].is_whole:
        return RestoreFailed(
            f"Step {steps[0].step} of {job} has no good copy of ranks {', '.join(map(str, steps[0].missing_ranks))}.",
            hint="`flyball ckpt ls` shows the complete steps; the copies of a job that runs are replaced all the time",
        )
    return None


def _to_json(
    job: str, results: Sequence[Verified], steps: Sequence[VerifiedStep], ignored: Sequence[Ignored]
) -> dict[str, Any]:
    from ckpt_engine.inspect.verify_copies import CopyVerdict
    from flyball.cli.ckpt.tables import ignored_json

    counts = {str(verdict): sum(result.verdict is verdict for result in results) for verdict in CopyVerdict}
    return {"job": job, **counts, "copies": results, "steps": steps, "ignored": ignored_json(ignored)}


def _show(results: Sequence[Verified], steps: Sequence[VerifiedStep], ignored: Sequence[Ignored]) -> None:
    from ckpt_engine.inspect.verify_copies import CopyVerdict
    from ckpt_engine.slots.memory_plan import readable_size
    from flyball.cli.ckpt.tables import say_ignored

    good = [result for result in results if result.verdict is CopyVerdict.GOOD]
    wrong = [result for result in results if result.verdict is not CopyVerdict.GOOD]
    whole = [step.step for step in steps if step.is_whole]
    print_fields(
        {
            "copies": len(results),
            "good": f"{len(good)} ({readable_size(sum(result.copy.size_bytes for result in good))})",
            "steps proven whole": whole,
        }
    )
    if wrong:
        print_table(
            "Not good",
            ("step", "rank", "tier", "host", "what", "next step"),
            ([r.copy.step, r.copy.rank, r.copy.tier, r.copy.host_id, describe(r), advice(r, good)] for r in wrong),
        )
        for result in wrong:
            say(f"{result.verdict}: {result.path}")
    for step in steps:
        for problem in step.problems:
            say(f"step {step.step} (generation {step.generation}) is not whole: {problem}")
    say_ignored(ignored)


def describe(result: Verified) -> str:
    """What is wrong with a copy."""
    if not result.bad_chunks:
        return result.problem
    first = result.bad_chunks[0]
    text = f"chunk {first} of {result.chunks} (from byte {first * result.chunk_bytes}) does not match its checksum"
    return text + (f", and {len(result.bad_chunks) - 1} more" if len(result.bad_chunks) > 1 else "")


def advice(result: Verified, good: Sequence[Verified]) -> str:
    """What to do about a copy that is bad or gone."""
    from ckpt_engine.inspect.verify_copies import CopyVerdict

    if result.verdict is CopyVerdict.GONE:
        return "none: its job has gone on"
    wanted = (result.copy.generation, result.copy.step, result.copy.rank)
    others = sorted({str(g.copy.tier) for g in good if (g.copy.generation, g.copy.step, g.copy.rank) == wanted})
    if others:
        return f"none: a restore takes the good copy in {' or '.join(others)}"
    return "find another copy of this rank, or restore another step"
