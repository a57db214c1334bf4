"""Options that the commands of `flyball ckpt` share, and the copies that they choose."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Iterator
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import structlog
import typer

from flyball.cli.reach.options import expand
from flyball.contracts.checkpoints import Tier
from flyball.contracts.errors import UsageError

if TYPE_CHECKING:
    from flyball.cli.ckpt.places import JobCopies

LATEST = "latest"
ATTEMPTS = 3

StepName = Annotated[str, typer.Argument(metavar="STEP", help=f"a step, or `{LATEST}` for the newest recovery point")]
Generation = Annotated[
    int | None, typer.Option("--generation", min=0, help="which generation, if several saved the step")
]
TierName = Annotated[Tier | None, typer.Option("--tier", help="only this tier: disk or persistent")]


class Selection(NamedTuple):
    """Where to look for copies, and of which job."""

    state_dir: str
    folders: tuple[str, ...]
    job: str

    def find(self, *, with_notes: bool = True) -> JobCopies:
        """Find the copies. Raises what `find_copies` does."""
        from flyball.cli.ckpt.places import find_copies

        # The tiers log for an engine's log file. The inventory has everything that a user should see.
        structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
        return find_copies(
            os.environ, state_dir=self.state_dir, folders=self.folders, job=self.job, with_notes=with_notes
        )

    def attempts(self, *, newest: bool, with_notes: bool = True) -> Iterator[tuple[JobCopies, bool]]:
        """Find the copies once or, for the newest step, several times, with whether this is the last attempt.

        A running job may overwrite its newest step while it is read, but then it has a newer one.
        """
        count = ATTEMPTS if newest else 1
        for number in range(1, count + 1):
            yield self.find(with_notes=with_notes), number == count


def with_selection(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command with a parameter `selection` the options of `_selection`."""
    return expand("selection", _selection)(command)


def _selection(
    *,
    state_dir: Annotated[
        str, typer.Option("--state-dir", help="state folder of a host or run (default: all runs on this machine)")
    ] = "",
    folders: Annotated[
        list[str] | None,
        typer.Option("--dir", help="a folder of the disk or persistent tier, or s3://bucket/prefix; repeatable"),
    ] = None,
    job: Annotated[
        str, typer.Option("--job", help="which job, if there are several; JOB/RUN chooses an older run of it")
    ] = "",
) -> Selection:
    return Selection(state_dir, tuple(folders or ()), job)


def parse_step(text: str) -> int | None:
    """Parse a step number; None for the newest recovery point. Raises UsageError."""
    if text == LATEST:
        return None
    if not text.isascii() or not text.isdigit() or len(text) > 18:
        raise UsageError(f"{text!r} is not a step.", hint=f"give a number, or `{LATEST}` for the newest recovery point")
    return int(text)


def storage_tiers(tier: Tier | None) -> Collection[Tier]:
    """The tiers whose steps can be removed and pinned, or only the named one. Raises UsageError for a memory tier."""
    from ckpt_engine.inspect.remove_steps import REMOVABLE

    if tier is not None and tier not in REMOVABLE:
        raise UsageError(
            f"Single steps cannot be removed or pinned in the {tier} tier: its slots are overwritten in turn.",
            hint="use --tier disk or --tier persistent",
        )
    return REMOVABLE if tier is None else (tier,)
