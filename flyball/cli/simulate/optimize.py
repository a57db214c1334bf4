"""`flyball simulate optimize`: the save interval, spares and replicas that are best for a scenario."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import typer

from flyball.cli.reach.options import command_help
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
from simulator.planning.goal import Goal

if TYPE_CHECKING:
    from simulator.fleet.scenario import FleetScenario
    from simulator.planning.optimum import Optimum, SearchedField
    from simulator.planning.outcome import RunOutcome

COMMAND = command_help(
    "Find the save interval, the number of spares and of replicas for the best goodput, or for the cheapest useful GPU "
    "hour. Starts from closed forms (Young and Daly, and how many hosts are broken at once), runs candidates with the "
    "same seeds, drops those that are worse beyond doubt, and checks what it found on other seeds.",
    "flyball simulate optimize small",
    "flyball simulate optimize llama3 --best cost --gpu-hour-price 2.5 --spare-price 1 --out plan.html",
    "flyball simulate optimize my-cluster.toml --calibrate demo.json --seeds 16 -o json",
)


def command(
    name: ScenarioName,
    *,
    settings: Settings = None,
    best: BestBy = Goal.GOODPUT,
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
    from simulator.planning.pool import PlannedRun
    from simulator.planning.search import Search

    prices = prices_of(gpu_hour_price, spare_price)
    given = (*calibration(calibrate), *(settings or ()))
    chosen = scenario.load(name, given)
    ran: list[RunOutcome] = []

    def run(what: str, scenarios: Sequence[FleetScenario], seeds: Sequence[int]) -> list[list[RunOutcome]]:
        outcomes = run_with_bar([PlannedRun(name, one, seed) for one in scenarios for seed in seeds], jobs, what)
        ran.extend(outcomes)
        return [outcomes[at : at + len(seeds)] for at in range(0, len(outcomes), len(seeds))]

    search = Search(chosen, goal=best, prices=prices, first_seed=first_seed, seeds=seeds, run=run)
    check_can_write(report)
    seeds_from(first_seed, 2 * seeds)
    found = search.find(name, given)
    if report is not None:
        from simulator.planning.pages.optimum_page import to_html

        write_report(to_html(found, chosen, ran), report)
    if not printed(found, output):
        _print(found)
    raise typer.Exit(exit_code(ran))


def _print(found: Optimum) -> None:
    from goodput.wording import seconds

    closed = found.closed_form
    print_fields(
        {
            "scenario": found.scenario,
            "set": list(found.settings),
            "answer": found.answer,
            "closed form": f"one interruption per {seconds(closed.mtti_s)} of running, {seconds(closed.repair_s)} down "
            f"each: Young {seconds(closed.young_s)}, Daly {seconds(closed.daly_s)}",
        }
    )
    for field in found.fields:
        print_table(
            f"{field.field} ({field.start})",
            ("value", "seeds", "useful", "to the best", "95 %", ""),
            _rows(field, found.goal),
        )
    for note in found.notes:
        print_fields({"note": note})
    print_fields({"runs": found.runs})


def _rows(field: SearchedField, goal: Goal) -> list[list[object]]:
    from simulator.planning.wording import change, span, value

    unit = "share" if goal is Goal.GOODPUT else "ratio"
    rows: list[list[object]] = []
    for point in field.points:
        behind = point.behind_best
        marks = [
            "chosen" if point.value == field.chosen else "",
            "given" if point.value == field.given else "",
            point.mark,
        ]
        rows.append(
            [
                point.value,
                point.seeds,
                value(point.useful.mean, "share"),
                "" if behind is None else change(behind.mean, unit),
                "" if behind is None else span(behind, unit),
                ", ".join(filter(None, marks)),
            ]
        )
    return rows
