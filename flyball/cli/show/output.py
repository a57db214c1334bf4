"""Tables and fields on stdout, for people. JSON and messages are in `messages`, which is lighter to import."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Annotated

import msgspec
import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from flyball.cli.show.messages import announce, json_text, print_error, printable, unescaped

# The commands import all their output functions from here.
__all__ = [
    "Format",
    "OutputOption",
    "RawOption",
    "cell",
    "print_fields",
    "print_table",
    "printable",
    "printed",
    "document",
    "record",
    "announce",
    "print_error",
    "unescaped",
]

MIN_TEXT_WIDTH = 12  # of a column with sentences, next to columns that are not wrapped
SHORT = 20  # cells of this length are not wrapped where there is room: times, "3 min 20 s ago"


class Format(StrEnum):
    TABLE = "table"
    WIDE = "wide"  # a table with all its columns
    JSON = "json"
    YAML = "yaml"

    @property
    def is_for_programs(self) -> bool:
        return self in (Format.JSON, Format.YAML)


OutputOption = Annotated[
    Format,
    typer.Option("-o", "--output", help="table or wide for people, json (the same: --json) or yaml for programs"),
]


RawOption = Annotated[
    bool, typer.Option("--raw", help="let control characters of the job's output reach your terminal")
]


def printed(value: object, output: Format) -> bool:
    """Print one value on stdout if the output is for programs, and return whether it is."""
    if output.is_for_programs:
        sys.stdout.write(document(value, output))
        sys.stdout.flush()
    return output.is_for_programs


def record(value: object, output: Format) -> str:
    """One of many values: a line of JSON, or a YAML document."""
    return document(value, output) if output is Format.YAML else msgspec.json.encode(value).decode() + "\n"


def document(value: object, output: str) -> str:
    """A value as a JSON or YAML document. A YAML document begins with ---, so that one may follow another."""
    if output == Format.YAML:
        import yaml  # only here: most commands do without

        plain = msgspec.to_builtins(value)
        return str(yaml.safe_dump(plain, explicit_start=True, sort_keys=False, allow_unicode=True))
    return json_text(value)


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
    """Find the columns that must not wrap: those of single words such as ids, and of short texts. If the others would
    have too little room, the widest of them may wrap after all."""
    sizes = [max(len(column), *(len(row[i]) for row in cells)) for i, column in enumerate(columns)]
    whole = [sizes[i] <= SHORT or not any(" " in row[i] for row in cells) for i in range(len(columns))]

    def needed() -> int:
        return sum(
            2 + (size if is_whole else min(size, MIN_TEXT_WIDTH)) for size, is_whole in zip(sizes, whole, strict=True)
        )

    while any(whole) and needed() > width:
        whole[max((i for i in range(len(columns)) if whole[i]), key=lambda i: sizes[i])] = False
    return whole


def print_fields(fields: Mapping[str, object]) -> None:
    """Print one name and value per line on stdout. On a terminal, long values are wrapped beside their names."""
    width = max((len(name) for name in fields), default=0)
    console = Console(soft_wrap=True, highlight=False)
    for name, value in fields.items():
        line = f"{name.ljust(width)}  {cell(value)}"
        if console.is_terminal:
            indent = " " * (width + 2)
            whole = textwrap.TextWrapper(  # names of hosts have hyphens
                console.width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
            )
            line = whole.fill(line)
        console.print(Text(line))


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
