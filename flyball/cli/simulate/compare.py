"""`flyball simulate compare`: two scenarios, or one with two settings, run with the same seeds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from flyball.cli.reach.options import command_help
from flyball.cli.show.output import Format, OutputOption, print_fields, print_table, printed
from flyball.cli.simulate.calibrate import Calibrate, calibration
from flyball.cli.simulate.options import (
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

if TYPE_CHECKING:
    from simulator.planning.comparison import ComparedMeasure, SimulationComparison

COMMAND = command_help(
    "Compare two scenarios, or one scenario with two settings. Both run with the same seeds, so both meet the same "
    "faults, and a few seeds show small differences. The answer has a 95 % confidence interval (Student's t, of the "
    "differences by seed). Without B, it is A with --set-b.",
    "flyball simulate compare llama3 --set-b checkpoint.every_s=60",
    "flyball simulate compare llama3 --set-a cluster.spares=8 --set-b cluster.spares=32 --gpu-hour-price 2.5",
    "flyball simulate compare dlrover-before dlrover --seeds 4 --out dlrover.html",
    "flyball simulate compare small my-cluster.toml -o json",
)

OtherScenario = Annotated[
    str, typer.Argument(metavar="[B]", help="the scenario to compare it with (default: the same as A)")
]
SettingsOfA = Annotated[
    list[str] | None, typer.Option("--set-a", metavar="KEY=VALUE", help="set a field of A only; repeatable")
]
SettingsOfB = Annotated[
    list[str] | None, typer.Option("--set-b", metavar="KEY=VALUE", help="set a field of B only; repeatable")
]


def command(
    a: ScenarioName,
    b: OtherScenario = "",
    *,
    settings: Settings = None,
    settings_a: SettingsOfA = None,
    settings_b: SettingsOfB = None,
    seeds: Seeds = 8,
    first_seed: FirstSeed = 1,
    jobs: Jobs = 0,
    gpu_hour_price: GpuHourPrice = None,
    spare_price: SparePrice = None,
    calibrate: Calibrate = "",
    report: Report = None,
    output: OutputOption = Format.TABLE,
) -> None:
    """Exit code 1 if a check failed in any run."""
    from simulator.fleet import scenario
    from simulator.planning.comparison import Side, compare
    from simulator.planning.pool import PlannedRun

    prices = prices_of(gpu_hour_price, spare_price)
    measured = calibration(calibrate)
    names = (a, b or a)
    given = [(*measured, *(settings or ()), *(of_side or ())) for of_side in (settings_a, settings_b)]
    one, two = (scenario.load(name, of_side) for name, of_side in zip(names, given, strict=True))
    if one == two:
        raise UsageError("A and B are the same.", hint="name a second scenario, or what differs with --set-b KEY=VALUE")
    if one.days != two.days:
        raise UsageError(
            f"A takes {one.days:g} days and B {two.days:g}.", hint="give both the same length with --set days=..."
        )
    check_can_write(report)
    chosen = seeds_from(first_seed, seeds)
    runs = [PlannedRun(name, which, seed) for name, which in zip(names, (one, two), strict=True) for seed in chosen]
    outcomes = run_with_bar(runs, jobs)
    side_a, side_b = (
        Side(label, name, of_side, tuple(outcomes[at : at + seeds]))
        for label, name, of_side, at in zip("AB", names, given, (0, seeds), strict=True)
    )
    found = compare(side_a, side_b, prices)
    if report is not None:
        from simulator.planning.pages.compare_page import to_html

        write_report(to_html(found, one, two), report)
    if not printed(found, output):
        _print(found)
    raise typer.Exit(exit_code(outcomes))


def _print(found: SimulationComparison) -> None:
    from simulator.planning.wording import named

    print_fields({side.label: named(side) for side in (found.a, found.b)} | {"answer": found.answer})
    print_table("Means over the seeds", ("", "A", "B", "B - A", "95 % of B - A"), map(_row, found.measures))
    for note in found.notes:
        print_fields({"note": note})


def _row(measure: ComparedMeasure) -> list[object]:
    from simulator.planning.wording import change, span, value

    unit, difference = measure.unit, measure.difference
    return [
        measure.name,
        value(measure.a.mean, unit),
        value(measure.b.mean, unit),
        change(difference.mean, unit),
        span(difference, unit),
    ]
