"""`flyball goodput compare A B`: two runs side by side, and where their time differs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import msgspec
import typer
from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from flyball.cli.goodput.options import (
    ComparisonFormat,
    ComparisonFormatOption,
    OutOption,
    ReportFormat,
    choose_format,
    write_out,
)
from flyball.cli.goodput.query import with_query
from flyball.cli.goodput.sources import Found, Query, find, named_runs
from flyball.cli.reach.options import command_help
from flyball.cli.show.output import NO_LIMIT, document, printable, room

if TYPE_CHECKING:
    from goodput.comparison import CategoryRow, ReportComparison, Row

COMMAND = command_help(
    "Compare two runs: their measures side by side, and the time differences by category and by cause.",
    "flyball goodput compare before.jsonl after.jsonl",
    "flyball goodput compare llama-1 llama-2 -o json",
    "flyball goodput compare all.jsonl:llama-1 all.jsonl:llama-2",
    "flyball goodput compare torchrun.log llama --out difference.csv",
    "flyball goodput compare llama3.json llama",
)


@with_query(without=("logs", "job", "window", "all_runs"))
def command(
    *,
    a: Annotated[
        str,
        typer.Argument(
            metavar="A",
            help="an event log, a folder of them, LOG:JOB for one job in a log, a simulated run's JSON, or a job",
        ),
    ],
    b: Annotated[str, typer.Argument(metavar="B", help="the run to compare it with, named in the same ways")],
    query: Query,
    output: ComparisonFormatOption = None,
    out: OutOption = None,
) -> None:
    """A and B may each be an event log, a folder of them, one job in a log, a result of the simulator, or a job of the
    supervisor."""
    from goodput.comparison import compare
    from goodput.show.report import to_json

    chosen = choose_format(output, out, ComparisonFormat)
    one, other = map(find, named_runs(a, b, query))
    found = compare(one.report, other.report)
    match chosen:
        case ReportFormat.JSON | ReportFormat.YAML:
            whole = msgspec.to_builtins(found) | {
                "a": {"source": one.source, "report": to_json(one.report)},
                "b": {"source": other.source, "report": to_json(other.report)},
            }
            write_out(document(whole, chosen), out)
        case ReportFormat.CSV:
            from goodput.show.csv_report import comparison_csv

            write_out(comparison_csv(found), out)
        case _:
            write_out(_text(found, one, other, width=NO_LIMIT if out else room()), out)


def _text(found: ReportComparison, one: Found, other: Found, *, width: int) -> str:
    from goodput.show.report import plain

    runs = (("A", one), ("B", other))
    names = (Text(printable(f"{name}: {run.report.job or 'a run'} ({run.source})")) for name, run in runs)
    tables = [_measures(found.measures), _categories("Where the time went", found.categories)]
    if found.causes:
        tables.append(_categories("Time lost, by cause", found.causes))
    return plain(Group(*names, *(Padding(table, (1, 0, 0, 0), expand=False) for table in tables)), width)


def _table(title: str, *columns: str) -> Table:
    table = Table(
        title=title, title_justify="left", box=SIMPLE_HEAD, show_edge=False, pad_edge=False, collapse_padding=True
    )
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left", overflow="fold", no_wrap=number > 0)
    return table


def _measures(rows: tuple[Row, ...]) -> Table:
    from goodput.wording import percent, points, seconds

    table = _table("Measures", "measure", "A", "B", "B - A")
    for row in rows:
        if row.a is None and row.b is None:
            continue
        name = row.name.removesuffix("_s").replace("_", " ")
        if row.name in ("goodput", "ettr"):
            table.add_row(name, percent(row.a), percent(row.b), points(row.difference))
        elif row.name.endswith("_s"):
            table.add_row(name, seconds(row.a), seconds(row.b), _signed(row.difference))
        else:
            digits = ".2f" if row.name in ("gpu_hours", "cost", "lost_cost") else ".0f"
            values = ("-" if value is None else f"{value:,{digits}}" for value in (row.a, row.b))
            table.add_row(name, *values, "-" if row.difference is None else f"{row.difference:+,{digits}}")
    return table


def _categories(title: str, rows: tuple[CategoryRow, ...]) -> Table:
    from goodput.wording import percent, points, seconds, words

    table = _table(title, "", "A", "share", "B", "share", "B - A")
    for row in rows:
        table.add_row(
            Text(printable(words(row.name))),
            seconds(row.a_s),
            percent(row.a_share),
            seconds(row.b_s),
            percent(row.b_share),
            points(row.share_difference),
        )
    return table


def _signed(difference_s: float | None) -> str:
    from goodput.wording import seconds

    if difference_s is None:
        return "-"
    return ("-" if difference_s < 0 else "+") + seconds(abs(difference_s))
