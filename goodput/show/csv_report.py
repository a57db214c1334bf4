"""A report as CSV: one value per row, ready for a spreadsheet's pivot table or a data frame."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator, Mapping

import msgspec

from goodput.calculator import GoodputReport
from goodput.comparison import ReportComparison

_FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r")
Value = str | float | int | bool | None


def report_csv(report: GoodputReport) -> str:
    """Columns `section, item, field, value`. Has every value of the JSON report under the same names: `section` is
    the report's field, `item` the category, cause, host or row within it."""
    return _csv(("section", "item", "field", "value"), _report_rows(msgspec.to_builtins(report)))


def comparison_csv(comparison: ReportComparison) -> str:
    """Columns `section, item, a, b, difference`; categories and causes in seconds, and again as shares."""
    rows: list[tuple[Value, ...]] = [
        ("measures", row.name, row.a, row.b, row.difference) for row in comparison.measures
    ]
    for section, found in (("categories", comparison.categories), ("causes", comparison.causes)):
        rows += [(f"{section}_s", row.name, row.a_s, row.b_s, row.b_s - row.a_s) for row in found]
        rows += [(f"{section}_share", row.name, row.a_share, row.b_share, row.share_difference) for row in found]
    return _csv(("section", "item", "a", "b", "difference"), rows)


def _report_rows(report: Mapping[str, object]) -> Iterator[tuple[Value, ...]]:
    for section, value in report.items():
        if isinstance(value, Mapping):
            for item, inner in value.items():
                yield from _cells(section, item, inner)
        elif isinstance(value, list | tuple):
            for number, inner in enumerate(value, 1):
                yield from _cells(section, str(number), inner)
        else:
            yield section, "", "", _plain(value)


def _cells(section: str, item: str, value: object, field: str = "") -> Iterator[tuple[Value, ...]]:
    """Nested values get dotted field names."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _cells(section, item, inner, f"{field}.{name}" if field else str(name))
    elif isinstance(value, list | tuple):
        yield section, item, field, " ".join(str(_plain(inner)) for inner in value)
    else:
        yield section, item, field, _plain(value)


def _plain(value: object) -> Value:
    return value if value is None or isinstance(value, str | int | float) else str(value)


def _csv(header: Iterable[str], rows: Iterable[Iterable[Value]]) -> str:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(header)
    writer.writerows([_cell(value) for value in row] for row in rows)
    return out.getvalue()


def _cell(value: Value) -> Value:
    """Names in a log are untrusted: none may become a formula in a spreadsheet."""
    if isinstance(value, str) and value.startswith(_FORMULA_STARTS):
        return f"'{value}"
    return value
