"""Tables of one line per row, which lose columns where the terminal is narrow. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.cells import cell_len, set_cell_size

_GAP = "  "
ELLIPSIS = "…"


def table(
    columns: Sequence[str], rows: Sequence[Mapping[str, str]], width: int, *, dropped: Sequence[str] = ()
) -> list[str]:
    """The lines of a table, its header first. Columns in which no row has anything are left out and, until the others
    fit into `width`, those named in `dropped`, in this order."""
    shown = [name for name in columns if any(row[name] != "-" for row in rows)]
    for name in dropped:
        if _needed(shown, rows) <= width:
            break
        shown = [one for one in shown if one != name]
    sizes = {name: _size(name, rows) for name in shown}
    header = {name: name for name in shown}
    return [
        " " + _GAP.join(set_cell_size(row[name], sizes[name]) for name in shown).rstrip() for row in (header, *rows)
    ]


def cut(line: str, width: int) -> str:
    """A line of at most this many terminal columns."""
    return line if cell_len(line) <= width else set_cell_size(line, width - 1).rstrip() + ELLIPSIS


def _needed(shown: Sequence[str], rows: Sequence[Mapping[str, str]]) -> int:
    return 1 + sum(_size(name, rows) for name in shown) + len(_GAP) * (len(shown) - 1)


def _size(name: str, rows: Sequence[Mapping[str, str]]) -> int:
    return max(cell_len(name), *(cell_len(row[name]) for row in rows))
