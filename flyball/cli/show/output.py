"""Tables and fields on stdout, for people. JSON and messages are in `messages`, which is lighter to import."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from contextvars import ContextVar
from enum import StrEnum
from itertools import zip_longest
from typing import Annotated

import msgspec
import typer
from rich.cells import cell_len, set_cell_size
from rich.console import Console
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
    "room",
    "announce",
    "print_error",
    "unescaped",
]

MIN_TEXT_WIDTH = 12  # of a column with sentences, next to columns that are not wrapped
SHORT = 20  # cells of this length are not wrapped where there is room: times, "3 min 20 s ago"
GAP = 2  # between two columns
NO_LIMIT = 100_000  # terminal columns

_is_wide: ContextVar[bool] = ContextVar("is_wide", default=False)  # -o wide was given


class Format(StrEnum):
    TABLE = "table"
    WIDE = "wide"  # a table with all its columns
    JSON = "json"
    YAML = "yaml"

    @property
    def is_for_programs(self) -> bool:
        return self in (Format.JSON, Format.YAML)


def _chosen(output: Format) -> Format:
    _is_wide.set(output is Format.WIDE)
    return output


OutputOption = Annotated[
    Format,
    typer.Option(
        *("-o", "--output"),
        help="table or wide for people, json (the same: --json) or yaml for programs",
        callback=_chosen,
    ),
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


def room() -> int:
    """How many columns a line may have: those of the terminal; in a pipe and with -o wide as many as it needs."""
    console = Console()
    return console.width if console.is_terminal and not _is_wide.get() else NO_LIMIT


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print a table on stdout, a line per row where there is `room`. Cells are plain text, never markup, whatever a
    job's name contains. Words are never cut: a table of too many is wider than the terminal."""
    cells = [[" ".join(cell(value).split("\n")) for value in row] for row in rows]
    console = Console(soft_wrap=True, highlight=False)
    if not cells:
        console.print(Text(f"{title}: none"))
        return
    widths = _widths(columns, cells, room())
    header, *lines = (_line(part, widths) for row in (columns, *cells) for part in _wrapped(row, widths, console))
    console.print(Text(title, style="bold"), "", Text(header, style="bold"), sep="\n")
    console.print(Text("\n".join((" " + "─" * (sum(widths) + GAP * (len(widths) - 1)), *lines, ""))))


def _wrapped(row: Sequence[str], widths: Sequence[int], console: Console) -> Iterable[Sequence[str]]:
    found = ((line.plain for line in Text(one).wrap(console, width)) for one, width in zip(row, widths, strict=True))
    return zip_longest(*found, fillvalue="")


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    return " " + (" " * GAP).join(map(set_cell_size, row, widths)).rstrip()


def _widths(columns: Sequence[str], cells: Sequence[Sequence[str]], width: int) -> list[int]:
    """The columns' widths: first those with sentences get narrower until all fit, then those with short texts; none
    gets narrower than its longest word."""
    texts = [(column, *(row[i] for row in cells)) for i, column in enumerate(columns)]
    widths = [max(map(cell_len, of_column)) for of_column in texts]
    words = [max(cell_len(word) for text in of_column for word in text.split() or [""]) for of_column in texts]
    sentences = [size if size <= SHORT else max(word, MIN_TEXT_WIDTH) for size, word in zip(widths, words, strict=True)]
    for least in (sentences, words):
        while 1 + sum(widths) + GAP * (len(widths) - 1) > width:
            i = max((i for i in range(len(widths)) if widths[i] > least[i]), key=widths.__getitem__, default=-1)
            if i < 0:
                break
            widths[i] -= 1
    return widths


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
