"""Options and arguments that the commands of `flyball ckpt` share."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Annotated

import structlog
import typer

from flyball.contracts.checkpoints import Tier
from flyball.contracts.errors import UsageError

if TYPE_CHECKING:
    from flyball.cli.ckpt.places import JobCopies

LATEST = "latest"
LOOKS = 3

StateDir = Annotated[
    str, typer.Option("--state-dir", help="state folder of a host or run (default: all runs of this machine)")
]
Folders = Annotated[
    list[str] | None,
    typer.Option("--dir", help="a disk or persistent folder, or s3://bucket/prefix; may be given several times"),
]
JobName = Annotated[
    str, typer.Option("--job", help="which job, where there are several; JOB/RUN for another run than the newest")
]
StepName = Annotated[str, typer.Argument(metavar="STEP", help=f"a step, or `{LATEST}`: the newest recovery point")]
Generation = Annotated[
    int | None, typer.Option("--generation", min=0, help="which one, if several generations saved the step")
]

TierName = Annotated[Tier | None, typer.Option("--tier", help="only this tier: disk or persistent")]


def look(state_dir: str, folders: list[str] | None, job: str) -> JobCopies:
    """The copies that the options name. Raises what `find_copies` does."""
    from flyball.cli.ckpt.places import find_copies

    # What the tiers log is for an engine's log; a person is told by the inventory.
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    return find_copies(os.environ, state_dir=state_dir, folders=folders or (), job=job)


def looks(state_dir: str, folders: list[str] | None, job: str, *, newest: bool) -> Iterator[tuple[JobCopies, bool]]:
    """`look`, with whether it is the last one. For the newest step several: a job that runs may overwrite it while it
    is read, and has a newer one then."""
    count = LOOKS if newest else 1
    for number in range(1, count + 1):
        yield look(state_dir, folders, job), number == count


def parse_step(text: str) -> int | None:
    """None for the newest recovery point. Raises UsageError."""
    if text == LATEST:
        return None
    if not text.isascii() or not text.isdigit() or len(text) > 18:
        raise UsageError(f"{text!r} is not a step.", hint=f"give a number, or `{LATEST}` for the newest recovery point")
    return int(text)


def storage_tiers(tier: Tier | None) -> Collection[Tier]:
    """Those whose steps can be removed and pinned, or the one that is named. Raises UsageError for memory."""
    from ckpt_engine.inspect.remove_steps import REMOVABLE

    if tier is not None and tier not in REMOVABLE:
        raise UsageError(
            f"Single steps cannot be taken from the {tier} tier: its slots are written in turn.",
            hint="choose --tier disk or --tier persistent",
        )
    return REMOVABLE if tier is None else (tier,)
