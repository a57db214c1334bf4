"""Tables and fields on stdout, for people. JSON and messages are in `messages`, which is lighter to import."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from flyball.cli.show.messages import announce, print_error, print_json, printable

# The commands import all their output functions from here.
__all__ = [
    "Format",
    "OutputOption",
    "cell",
    "print_fields",
    "print_json",
    "print_table",
    "printable",
    "announce",
    "print_error",
]

MIN_TEXT_WIDTH = 12  # of a column with sentences, next to columns that are not wrapped


class Format(StrEnum):
    TABLE = "table"
    JSON = "json"


OutputOption = Annotated[
    Format, typer.Option("-o", "--output", help="output format: table for people, json for programs")
]


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print a table on stdout. Cells are plain text, never markup, whatever a job's name contains."""
    console = Console(soft_wrap=False)
    cells = [[cell(value) for value in row] for row in rows]
    if not cells:
        console.print(Text(f"{title}: none"))
        return
    table = Table(box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    whole = _whole_columns(columns, cells, console.width)
    for column, is_whole in zip(columns, whole, strict=True):
        table.add_column(column, overflow="fold", no_wrap=is_whole)
    for row in cells:
        table.add_row(*map(Text, row))
    console.print(Text(title, style="bold"))
    console.print(table)


def _whole_columns(columns: Sequence[str], cells: Sequence[Sequence[str]], width: int) -> list[bool]:
    """Which columns must not wrap: those of single words, for example ids, if the others still have enough room."""
    words = [not any(" " in row[i] for row in cells) for i in range(len(columns))]
    needed = sum(
        2 + (max(len(column), *(len(row[i]) for row in cells)) if words[i] else MIN_TEXT_WIDTH)
        for i, column in enumerate(columns)
    )
    return words if needed <= width else [False] * len(columns)


def print_fields(fields: Mapping[str, object]) -> None:
    """Print one name and value per line on stdout."""
    width = max((len(name) for name in fields), default=0)
    console = Console(soft_wrap=True, highlight=False)
    for name, value in fields.items():
        console.print(Text(f"{name.ljust(width)}  {cell(value)}"))


def cell(value: object) -> str:
    """Format a value for people; '-' if unknown."""
    if value is None or value == "":
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.3f}".rstrip("0").rstrip(".")
    if isinstance(value, list | tuple):
        return ", ".join(cell(v) for v in value) or "-"
    if isinstance(value, Mapping):
        return ", ".join(f"{k}={cell(v)}" for k, v in value.items()) or "-"
    return printable(str(value))
