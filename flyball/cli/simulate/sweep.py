"""`flyball simulate sweep`: a scenario with every combination of some values."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flyball.cli.reach.options import command_help
from flyball.cli.show.messages import announce
from flyball.cli.show.output import Format, OutputOption, print_fields, print_table, printed
from flyball.cli.simulate.calibrate import Calibrate, calibration
from flyball.cli.simulate.options import (
    BestBy,
    FirstSeed,
    GpuHourPrice,
    Jobs,
    Report,
    ScenarioName,
    Seeds,
    Settings,
    SparePrice,
    check_can_write,
    exit_code,
    prices_of,
    run_with_bar,
    seeds_from,
    write_report,
)
from flyball.contracts.errors import UsageError
from simulator.planning.goal import Goal

if TYPE_CHECKING:
    from simulator.planning.sweep import Sweep

COMMAND = command_help(
    "Run a scenario with every combination of some values, each with the same seeds, and say which is best. All "
    "combinations are checked before anything runs. The result does not depend on how many processes run side by side.",
    "flyball simulate sweep llama3 --vary checkpoint.every_s=60,150,300,600",
    "flyball simulate sweep llama3 --vary cluster.spares=0,8,16,32 --vary checkpoint.every_s=150,300 --csv spares.csv",
    "flyball simulate sweep small --vary cluster.repair_s=3600,86400 --seeds 8 --out repair.html",
    "flyball simulate sweep llama3 --vary cluster.spares=0,8,32 --best cost --gpu-hour-price 2.5 -o json",
)

Vary = Annotated[
    list[str] | None,
    typer.Option("--vary", metavar="KEY=VALUE,VALUE,...", help="a field and the values that it takes; repeatable"),
]


def command(
    name: ScenarioName,
    *,
    vary: Vary = None,
    settings: Settings = None,
    seeds: Seeds = 8,
    first_seed: FirstSeed = 1,
    jobs: Jobs = 0,
    best: BestBy = Goal.GOODPUT,
    gpu_hour_price: GpuHourPrice = None,
    spare_price: SparePrice = None,
    calibrate: Calibrate = "",
    csv: Annotated[Path | None, typer.Option("--csv", help="also write one row per run to this file")] = None,
    report: Report = None,
    output: OutputOption = Format.TABLE,
) -> None:
    """Exit code 1 if a check failed in any run."""
    from simulator.planning.grid import parse_axis, points_of, scenarios_of
    from simulator.planning.pool import PlannedRun
    from simulator.planning.sweep import sweep_of, to_csv

    if not vary:
        raise UsageError("A sweep needs something to vary.", hint="add for example --vary checkpoint.every_s=30,60")
    prices = prices_of(gpu_hour_price, spare_price)
    axes = [parse_axis(text) for text in vary]
    points = points_of(axes)
    given = (*calibration(calibrate), *(settings or ()))
    scenarios = scenarios_of(name, given, points)
    check_can_write(csv, report)
    chosen = seeds_from(first_seed, seeds)
    runs = [PlannedRun(name, scenario, seed) for scenario in scenarios for seed in chosen]
    outcomes = run_with_bar(runs, jobs, f"{len(points)} points with {seeds} seeds")
    by_point = [outcomes[at : at + seeds] for at in range(0, len(outcomes), seeds)]
    found = sweep_of(name=name, settings=given, axes=axes, points=points, outcomes=by_point, prices=prices, goal=best)
    if csv is not None:
        from flyball.cli.goodput.options import write_out

        write_out(to_csv(found, prices), csv)
        announce(f"wrote {csv}")
    if report is not None:
        from simulator.planning.pages.sweep_page import to_html

        write_report(to_html(found, scenarios[found.best], prices), report)
    if not printed(found, output):
        _print(found)
    raise typer.Exit(exit_code(outcomes))


def _print(found: Sweep) -> None:
    from simulator.planning.wording import change, span, value

    print_fields({"scenario": found.scenario, "set": list(found.settings), "answer": found.answer})
    unit = "share" if found.goal is Goal.GOODPUT else "ratio"
    has_failed = any(point.failed for point in found.points)
    rows = []
    for point in found.points:
        behind = point.behind_best
        rows.append(
            [
                *point.values,
                value(point.useful.mean, "share"),
                f"{point.useful_hour_cost.mean:.4f}",
                "best" if behind is None else change(behind.mean, unit),
                "" if behind is None else span(behind, unit),
                "yes" if point.is_as_good else "no",
                *([f"{point.failed} of {len(point.outcomes)}"] if has_failed else []),
            ]
        )
    columns = (
        *(axis.field for axis in found.axes),
        "useful",
        "cost of a useful hour",
        "to the best",
        "95 %",
        "as good",
    )
    print_table("Points", columns, rows)
