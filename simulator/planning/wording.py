"""Figures of plans as text: the same in the terminal and in HTML. Pure."""

from __future__ import annotations

from math import isfinite, isinf, isnan

from simulator.planning.comparison import Side
from simulator.planning.paired import Estimate


def value(number: float, unit: str) -> str:
    """A figure of a unit of ComparedMeasure: 93.65 %, 422, 1,348,699."""
    if not isfinite(number):
        return "infinite" if isinf(number) else "-"
    match unit:
        case "share":
            return f"{100 * number:.2f} %"
        case "count":
            return f"{number:,.1f}"
        case "hours":
            return f"{number:,.0f}"
        case "money":
            return f"{number:,.2f}" if abs(number) < 10_000 else f"{number:,.0f}"
    return f"{number:.4f}"


def change(number: float, unit: str) -> str:
    """A signed difference of two figures; shares in points."""
    if isnan(number):
        return "-"
    sign = "-" if number < 0.0 else "+"
    text = value(abs(number), unit)
    return f"{sign}{text.removesuffix(' %')} points" if unit == "share" else f"{sign}{text}"


def span(found: Estimate, unit: str) -> str:
    """The confidence interval of a difference."""
    if found.low is None or found.high is None:
        return "-"
    low, high = (change(end, unit).removesuffix(" points") for end in (found.low, found.high))
    return f"{low} to {high}"


def named(side: Side) -> str:
    """A scenario, with what was set over it."""
    return side.scenario + (f" with {', '.join(side.settings)}" if side.settings else "")
