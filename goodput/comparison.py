"""Compares two reports: what differs, and in which categories. Pure."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from goodput.calculator import GoodputReport

SCHEMA = "flyball.goodput.comparison.v1"


class Row(msgspec.Struct, frozen=True):
    """One measure of both reports; `difference` is b - a, None if either has no value."""

    name: str
    a: float | None
    b: float | None
    difference: float | None


class CategoryRow(msgspec.Struct, frozen=True):
    """Seconds of one category or cause, and their share of each run's elapsed time."""

    name: str
    a_s: float
    b_s: float
    a_share: float | None
    b_share: float | None
    share_difference: float | None  # b - a: independent of the runs' lengths


class ReportComparison(msgspec.Struct, frozen=True):
    """Shares are fractions of 1. The share differences of all categories sum to 0, since both reports' shares sum to
    1."""

    schema: str
    measures: tuple[Row, ...]
    categories: tuple[CategoryRow, ...]  # largest difference of shares first
    causes: tuple[CategoryRow, ...]


def compare(a: GoodputReport, b: GoodputReport) -> ReportComparison:
    """How report `b` differs from report `a`."""
    return ReportComparison(
        schema=SCHEMA,
        measures=tuple(_row(name, _measures(a)[name], value) for name, value in _measures(b).items()),
        categories=_rows(a.seconds_by_category, b.seconds_by_category, a.elapsed_s, b.elapsed_s),
        causes=_rows(a.badput_s, b.badput_s, a.elapsed_s, b.elapsed_s),
    )


def _measures(report: GoodputReport) -> dict[str, float | None]:
    """In display order. Times are seconds."""
    return {
        "goodput": report.goodput,
        "ettr": report.ettr,
        "elapsed_s": report.elapsed_s,
        "steps_kept": float(report.steps.kept),
        "steps_recomputed": float(report.steps.recomputed),
        "step_s": report.steps.median_s,
        "interruptions": float(report.interruptions),
        "mttr_s": report.mttr_s,
        "mttf_s": report.mttf_s,
        "gpu_hours": report.gpu_hours,
        "cost": report.cost,
        "lost_cost": None if report.cost is None or report.goodput is None else report.cost * (1.0 - report.goodput),
    }


def _row(name: str, a: float | None, b: float | None) -> Row:
    return Row(name, a, b, None if a is None or b is None else b - a)


def _rows(
    a: Mapping[str, float], b: Mapping[str, float], a_elapsed_s: float, b_elapsed_s: float
) -> tuple[CategoryRow, ...]:
    rows = []
    for name in dict.fromkeys([*a, *b]):
        a_s, b_s = a.get(name, 0.0), b.get(name, 0.0)
        if a_s == 0.0 and b_s == 0.0:
            continue
        a_share = a_s / a_elapsed_s if a_elapsed_s > 0 else None
        b_share = b_s / b_elapsed_s if b_elapsed_s > 0 else None
        difference = None if a_share is None or b_share is None else b_share - a_share
        rows.append(CategoryRow(name, a_s, b_s, a_share, b_share, difference))
    return tuple(sorted(rows, key=lambda r: (-abs(r.share_difference or 0.0), r.name)))
