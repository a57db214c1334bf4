"""Options that the planning commands share: seeds, processes, prices, and settings over a scenario's file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flyball.cli.show.messages import announce
from flyball.contracts.errors import UsageError
from simulator.planning.goal import Goal

if TYPE_CHECKING:
    from simulator.planning.goal import Prices
    from simulator.planning.outcome import RunOutcome
    from simulator.planning.pool import PlannedRun

ScenarioName = Annotated[
    str, typer.Argument(metavar="SCENARIO", help="a shipped scenario (see `flyball simulate list`), or a TOML file")
]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="set a field of the scenario, e.g. checkpoint.every_s=60 or causes.nic.count=20; repeatable",
    ),
]
Seeds = Annotated[int, typer.Option(min=1, max=10_000, help="how many seeds each scenario runs with")]
FirstSeed = Annotated[int, typer.Option("--seed", min=0, help="the first seed; the others follow it")]
Jobs = Annotated[int, typer.Option(min=0, help="processes that run at once; 0: one per core")]
Report = Annotated[Path | None, typer.Option("--out", help="also write an HTML report to this file")]
BestBy = Annotated[
    Goal,
    typer.Option("--best", help="goodput: the largest useful share; cost: the cheapest useful GPU hour, with spares"),
]
GpuHourPrice = Annotated[
    float | None, typer.Option(min=0.0, help="price of an hour of one GPU, in any currency; spares are paid, too")
]
SparePrice = Annotated[
    float | None, typer.Option(min=0.0, help="price of an hour of one GPU of a spare (default: --gpu-hour-price)")
]


def prices_of(gpu_hour: float | None, spare: float | None) -> Prices:
    """The prices that the user gave. Raises UsageError."""
    from simulator.planning.goal import Prices

    if spare is not None and gpu_hour is None:
        raise UsageError("--spare-price alone says too little.", hint="give --gpu-hour-price, too")
    if gpu_hour is None:
        return Prices()
    if gpu_hour == 0.0:
        raise UsageError("A GPU hour that costs nothing has no best plan.", hint="give --gpu-hour-price above 0")
    return Prices(gpu_hour, gpu_hour if spare is None else spare, known=True)


def seeds_from(first: int, count: int) -> range:
    """The seeds, which are announced before anything runs."""
    announce(f"seed{'s' if count > 1 else ''} {first}" + (f" to {first + count - 1}" if count > 1 else ""))
    return range(first, first + count)


def run_with_bar(runs: Sequence[PlannedRun], jobs: int, what: str = "runs") -> list[RunOutcome]:
    """Run all, with a progress bar."""
    from flyball.cli.show.progress import count_bar
    from simulator.parallel import usable_cores
    from simulator.planning.pool import run_all

    with count_bar(f"{what}:", len(runs)) as advance:
        return run_all(runs, jobs or usable_cores(), lambda: advance(1))


def write_report(page: str, report: Path) -> None:
    """Write a report or a trace, and say so."""
    from flyball.cli.goodput.options import write_out

    write_out(page, report)
    announce(f"wrote {report}")


def check_can_write(*files: Path | None) -> None:
    """Raises UsageError if a file's folder is not there, before anything runs."""
    for file in files:
        if file is not None and not file.absolute().parent.is_dir():
            raise UsageError(f"Cannot write {file}: there is no folder {file.parent}.", hint="make the folder first")


def exit_code(outcomes: Sequence[RunOutcome]) -> int:
    """1 if a check failed in any run; says which."""
    for outcome in outcomes:
        for violation in outcome.violations:
            announce(f"CHECK FAILED with seed {outcome.seed}: {violation}")
    return 1 if any(outcome.violations for outcome in outcomes) else 0
