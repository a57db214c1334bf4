"""Durations, shares and counts as text: the same in terminal, HTML and recommendations."""

from __future__ import annotations


def words(name: str) -> str:
    """A name as words. The category of recomputed steps also has the part of a step that a fault cut off."""
    return "recomputed or cut off" if name == "recomputed" else str(name).replace("_", " ")


def percent(ratio: float | None) -> str:
    return "-" if ratio is None else f"{100 * ratio:.2f}%"


def points(difference: float | None) -> str:
    """A difference of two ratios, signed: +3.1%."""
    return "-" if difference is None else f"{round(100 * difference, 1) + 0.0:+.1f}%"  # + 0.0: no -0.0


def seconds(value: float | None) -> str:
    """A human-readable duration: 0.134s, 12.5s, 3m 20s, 2h 05m."""
    if value is None:
        return "-"
    if value < 10:
        return f"{value:.3f}s"
    if value < 60:
        return f"{value:.1f}s"
    minutes, rest = divmod(round(value), 60)
    if minutes < 60:
        return f"{minutes}m {rest:02d}s"
    return f"{minutes // 60}h {minutes % 60:02d}m"


def counted(count: int, noun: str) -> str:
    """1 interruption, 2 interruptions."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
