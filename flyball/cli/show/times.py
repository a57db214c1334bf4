"""Format times and durations briefly, for tables. Pure."""

from __future__ import annotations

from datetime import UTC, datetime

MINUTE_S, HOUR_S, DAY_S = 60, 3_600, 86_400


def lasted(duration_s: float | None) -> str:
    """0.4 s, 12 s, 3 min 20 s, 2 h 5 min, 3 d 4 h; '-' if unknown."""
    if duration_s is None:
        return "-"
    whole_s = round(max(duration_s, 0.0))
    if duration_s < 9.95:
        return f"{max(duration_s, 0.0):.1f} s"
    if whole_s < MINUTE_S:
        return f"{whole_s} s"
    if whole_s < HOUR_S:
        return _two(whole_s, MINUTE_S, "min", 1, "s")
    if whole_s < DAY_S:
        return _two(whole_s, HOUR_S, "h", MINUTE_S, "min")
    return _two(whole_s, DAY_S, "d", HOUR_S, "h")


def _two(value_s: int, unit_s: int, unit: str, part_s: int, part: str) -> str:
    rest = value_s % unit_s // part_s
    return f"{value_s // unit_s} {unit}" + (f" {rest} {part}" if rest else "")


def short(duration_s: float | None) -> str:
    """Like `lasted`, with more digits below a second: 12 ms, 0.25 s."""
    if duration_s is None or duration_s >= 10.0:
        return lasted(duration_s)
    return f"{duration_s * 1000:.0f} ms" if duration_s < 0.1 else f"{duration_s:.2f} s"


def rough(duration_s: float | None) -> str:
    """Like `lasted`, with one unit if that is precise enough: 12 s, 3 min 20 s, 34 min."""
    first, *rest = lasted(duration_s).split(" ")
    return " ".join((first, *rest[:1])) if first != "-" and float(first) >= 10 else lasted(duration_s)


def ago(at: float | None, now: float) -> str:
    """12 s ago; '-' if unknown. A time slightly in the future counts as now, because clocks differ."""
    return f"{rough(now - at)} ago" if at else "-"


def clock(at: float | None, now: float) -> str:
    """06:05:01 (UTC) today, else with the day, else with the year; '-' if unknown."""
    if not at:
        return "-"
    then, today = datetime.fromtimestamp(at, UTC), datetime.fromtimestamp(now, UTC)
    if then.date() == today.date():
        return f"{then:%H:%M:%S}"
    return f"{then:%b} {then.day} {then:%H:%M}" if then.year == today.year else f"{then:%Y-%m-%d %H:%M}"


def exact_clock(at: float | None) -> str:
    """06:05:01.250 UTC; '-' if unknown. Without the date: it is usually today, and JSON has it."""
    return f"{exact_utc(at)} UTC" if at else "-"


def exact_utc(at: float | None) -> str:
    """The same without its zone, for columns whose title names it."""
    return datetime.fromtimestamp(at, UTC).strftime("%H:%M:%S.%f")[:-3] if at else "-"


def iso(at: float | None) -> str | None:
    """2026-11-23T06:05:01.250Z, for programs; None if unknown."""
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z") if at else None
