"""The comparison for a terminal: both sides beside each other. Readable without colour."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from goodput.wording import percent, seconds
from goodput_bench.fault_list import Fault
from goodput_bench.figures import SideFigures, Spread
from goodput_bench.save_costs import Interval
from goodput_bench.sides import Side


def show(figures: Mapping[Side, SideFigures], faults: Sequence[Fault], interval: Interval, repeats: int) -> None:
    console = Console(highlight=False, emoji=False)
    struck = ", ".join(f"{fault.kind} {fault.at_s:.0f} s" for fault in faults)
    console.print(
        f"flyball run, and torchrun with dcp.async_save: {repeats} repetitions of each, in turns. "
        f"Faults after the first step: {struck}."
    )
    console.print(f"Both save to the disk every {interval.every_steps} steps. {_why(interval)}")
    table = Table(box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    table.add_column("")
    for side in figures:
        table.add_column(side.value, justify="right")
    table.add_row("goodput", *(_spread(side.goodput, percent) for side in figures.values()))
    table.add_row(
        "goodput at the reference step",
        *(_spread(side.goodput_at_reference_step, percent) for side in figures.values()),
    )
    table.add_row("ETTR", *(_spread(side.ettr, percent) for side in figures.values()))
    table.add_row("MTTR", *(_spread(side.mttr_s, seconds) for side in figures.values()))
    table.add_row(
        "lost steps, all faults", *(_spread(side.lost_steps, lambda n: f"{n:g}") for side in figures.values())
    )
    table.add_row("steps kept", *(_spread(side.steps_kept, lambda n: f"{n:g}") for side in figures.values()))
    table.add_row("median step", *(_spread(side.step_s, seconds) for side in figures.values()))
    table.add_row("faults met", *(", ".join(map(str, side.faults_met)) for side in figures.values()))
    _section(table, "where the time went", [side.seconds_by_category for side in figures.values()])
    _section(table, "lost to", [side.lost_s_by_fault for side in figures.values()])
    _section(table, "from a fault to the next step", [side.resumed_s_by_fault for side in figures.values()])
    console.print(table)
    for side, found in figures.items():
        for failure in found.failures:
            console.print(f"{side}: {failure.splitlines()[0]}", markup=False)  # the rest is on stderr


def _why(interval: Interval) -> str:
    if interval.measured is None or interval.young_s is None:
        return "The interval was given."
    cost = interval.measured
    return (
        f"Young's interval for a save that costs {seconds(cost.cost_s)} and a fault every {seconds(interval.mtti_s)} "
        f"is {seconds(interval.young_s)}; a save takes {seconds(cost.duration_s)}, a step {seconds(cost.step_s)}."
    )


def _section(table: Table, name: str, columns: Sequence[Mapping[str, float]]) -> None:
    table.add_section()
    table.add_row(f"{name}:")
    keys = {key: max(column.get(key, 0.0) for column in columns) for column in columns for key in column}
    for key in sorted((key for key, most in keys.items() if most > 0), key=lambda key: -keys[key]):
        table.add_row(f"  {key.replace('_', ' ')}", *(seconds(column.get(key)) for column in columns))


def _spread(spread: Spread | None, shown: Callable[[float], str]) -> str:
    if spread is None:
        return "-"
    if len(spread.runs) == 1:
        return shown(spread.median)
    return f"{shown(spread.median)} ({shown(spread.min)} to {shown(spread.max)})"
