"""`flyball ckpt verify`: read every byte of a step's copies, and report which of them are good."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flyball.cli.ckpt.options import LATEST, Generation, Selection, parse_step, with_selection
from flyball.cli.reach.options import command_help
from flyball.cli.reach.places import bad_copies_file
from flyball.cli.show.output import Format, OutputOption, announce, print_fields, print_table, printed
from flyball.contracts.errors import CorruptShard, FlyballError, RestoreFailed

if TYPE_CHECKING:
    from ckpt_engine.format.step_listing import StepKey
    from ckpt_engine.inspect.copy_places import Ignored
    from ckpt_engine.inspect.inventory import CopyInventory
    from ckpt_engine.inspect.verify_copies import Verified, VerifiedStep

COMMAND = command_help(
    "Read every byte of every copy of a step and compare it with its checksum. Also prove that the good copies "
    "make up the whole step. Exit code 21 if a copy is bad, 23 if a rank has no good copy.",
    "flyball ckpt verify",
    "flyball ckpt verify 120",
    "flyball ckpt verify --all",
)


@with_selection
def command(
    *,
    step: Annotated[
        str, typer.Argument(metavar="[STEP]", help=f"a step, or `{LATEST}` for the newest recovery point")
    ] = LATEST,
    everything: Annotated[bool, typer.Option("--all", help="verify every copy of every step")] = False,
    generation: Generation = None,
    selection: Selection,
    output: OutputOption = Format.TABLE,
) -> None:
    """Changes no store. Bad copies are noted on this machine, for `ckpt ls`."""
    from ckpt_engine.inspect.verify_copies import CopyVerdict

    wanted = None if everything else parse_step(step)
    for found, is_last in selection.attempts(newest=wanted is None and not everything, with_notes=False):
        inventory = found.inventory
        listings = list(inventory.steps) if everything else [inventory.find(wanted, generation)]
        world_sizes = {(listing.generation, listing.step): listing.world_size for listing in listings}
        results, steps = _verify(inventory, world_sizes)
        if is_last or not any(result.verdict is CopyVerdict.GONE for result in results):
            break
    ignored = [i for i in inventory.ignored if everything or (i.key and (i.key.generation, i.key.step) in world_sizes)]
    if not printed(_to_json(inventory.job, results, steps, ignored), output):
        _print(results, steps, ignored)
    problem = _problem(inventory.job, results, steps, ignored, everything=everything)
    if problem is not None:
        raise problem


def _verify(
    inventory: CopyInventory, world_sizes: dict[StepKey, int]
) -> tuple[list[Verified], tuple[VerifiedStep, ...]]:
    from ckpt_engine.inspect.known_bad import KnownBad
    from ckpt_engine.inspect.verify_copies import CopyVerdict, judge_steps, verify_copies
    from flyball.cli.show.progress import bytes_bar

    known = KnownBad(bad_copies_file(os.environ))
    held_copies = [held for held in inventory.held if held.key in world_sizes]
    results: list[Verified] = []
    usable = []
    with bytes_bar("verifying", sum(held.copy.size_bytes for held in held_copies)) as advance:
        for held, (result, shard) in zip(held_copies, verify_copies(held_copies, advance), strict=True):
            results.append(result)
            if result.verdict is CopyVerdict.GOOD and shard is not None and inventory.counts(held):
                usable.append(shard)
    known.learn(zip(held_copies, results, strict=True))
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

    cannot = (CopyVerdict.BAD, CopyVerdict.UNREAD)
    bad = sum(result.verdict in cannot for result in results) + len(ignored)
    if bad:
        return CorruptShard(
            f"{bad} {'copy' if bad == 1 else 'copies'} of {job} cannot be used.",
            hint="a restore skips them; remove a useless step with `flyball ckpt rm STEP`",
        )
    uncovered = [step for step in steps if step.problems]
    if uncovered:
        return CorruptShard(
            f"The copies of step {uncovered[0].step} of {job} are good but do not make up the whole state.",
            hint="restore another step, and report this as a bug",
        )
    if not everything and not steps[0].is_whole:
        return RestoreFailed(
            f"Step {steps[0].step} of {job} has no good copy of ranks {', '.join(map(str, steps[0].missing_ranks))}.",
            hint="`flyball ckpt ls` lists the complete steps; a running job replaces its copies all the time",
        )
    return None


def _to_json(
    job: str, results: Sequence[Verified], steps: Sequence[VerifiedStep], ignored: Sequence[Ignored]
) -> dict[str, Any]:
    from ckpt_engine.inspect.verify_copies import CopyVerdict
    from flyball.cli.ckpt.tables import ignored_json

    counts = {str(verdict): sum(result.verdict is verdict for result in results) for verdict in CopyVerdict}
    return {"job": job, **counts, "copies": results, "steps": steps, "ignored": ignored_json(ignored)}


def _print(results: Sequence[Verified], steps: Sequence[VerifiedStep], ignored: Sequence[Ignored]) -> None:
    from ckpt_engine.inspect.verify_copies import CopyVerdict
    from ckpt_engine.rules.memory_plan import readable_size
    from flyball.cli.ckpt.tables import announce_ignored

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
            ("step", "rank", "tier", "host", "problem", "what to do"),
            ([r.copy.step, r.copy.rank, r.copy.tier, r.copy.host_id, describe(r), advice(r, good)] for r in wrong),
        )
        for result in wrong:
            announce(f"{result.verdict}: {result.path}")
    for step in steps:
        for problem in step.problems:
            announce(f"step {step.step} (generation {step.generation}) is incomplete: {problem}")
    announce_ignored(ignored)


def describe(result: Verified) -> str:
    """The problem with a copy."""
    if not result.bad_chunks:
        return result.problem
    first = result.bad_chunks[0]
    text = f"chunk {first} of {result.chunks} (from byte {first * result.chunk_bytes}) does not match its checksum"
    return text + (f", and {len(result.bad_chunks) - 1} more" if len(result.bad_chunks) > 1 else "")


def advice(result: Verified, good: Sequence[Verified]) -> str:
    """The next step for a copy that is bad or gone."""
    from ckpt_engine.inspect.verify_copies import CopyVerdict

    if result.verdict is CopyVerdict.GONE:
        return "nothing: its job replaced it"
    if result.verdict is CopyVerdict.UNREAD:
        return "try again when it can be read"
    wanted = (result.copy.generation, result.copy.step, result.copy.rank)
    others = sorted({str(g.copy.tier) for g in good if (g.copy.generation, g.copy.step, g.copy.rank) == wanted})
    if others:
        return f"nothing: a restore uses the good copy in {' or '.join(others)}"
    return "find another copy of this rank, or restore another step"
