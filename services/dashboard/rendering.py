"""Templates and what they write with: words, numbers with units, states with a look. Loaded at the first request: a
supervisor starts faster without jinja2."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from functools import cache
from typing import TYPE_CHECKING
from urllib.parse import quote, urlencode

from flyball import __version__
from flyball.contracts.orders import AWAITS_APPROVAL

if TYPE_CHECKING:
    from jinja2 import Environment

NAVIGATION = (
    *(("/", "Training"), ("/incidents", "Incidents"), ("/recovery", "Recovery"), ("/hosts", "Hosts")),
    ("/goodput", "Goodput"),
)

# A state has a word, a colour and a shape: "good", "warn" or "bad"; others are neutral.
LOOKS: Mapping[str, frozenset[str]] = {
    "good": frozenset(
        (
            *("training", "evaluating", "succeeded", "healthy", "spare", "resolved"),
            *("step", "checkpoint", "eval", "data", "done"),
        )
    ),
    "warn": frozenset(
        (
            *("stopping", "failing", "completing", "ending", "running", "recovering", "held"),
            *("submitted", "suspect", "degraded", "cordoned", "in_repair", "stopped", "starting", "restoring"),
            *("waiting", "parked", "open", "deciding", "acting", "verifying", "queued", "dispatched", "acknowledged"),
            "superseded",
        )
    ),
    "bad": frozenset(("failed", "silent", "escalated", "exited", "timed_out", "standing", "unheard")),
}
MARKS = {"good": "●", "warn": "▲", "bad": "■", "": "○"}
NOTHING = "\N{EN DASH}"
_SIZES = ("B", "KiB", "MiB", "GiB", "TiB")


@cache
def templates() -> Environment:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("services.dashboard"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "words": words,
        "look": look,
        "mark": lambda state: MARKS[look(state)],
        "duration": duration,
        "size": size,
        "percent": percent,
        "points": points,
        "amount": amount,
        "iso": iso,
        "utc": utc,
        "segment": lambda name: quote(str(name), safe=""),
        "counted": lambda number, noun: f"{number:,} {noun}{'' if number == 1 else 's'}",
    }
    environment.globals |= {
        "version": __version__,
        "navigation": NAVIGATION,
        "nothing": NOTHING,
        "address": address,
        "awaits_approval": AWAITS_APPROVAL,
        "dict": dict,
        "zip": zip,
    }
    return environment


def address(path: str, **query: str) -> str:
    """Return a link to a page; parameters that are '' are left out."""
    given = urlencode({name: value for name, value in query.items() if value})
    return f"{path}?{given}" if given else path


def words(name: object) -> str:
    return str(name).replace("_", " ")


def look(state: object) -> str:
    return next((name for name, states in LOOKS.items() if str(state) in states), "")


def duration(seconds: float | None) -> str:
    """Return "0.41 s", "12.3 s", "4 min 5 s", "3 h 20 min" or "54 d 2 h"."""
    if seconds is None:
        return NOTHING
    if seconds < 10:
        return f"{seconds:.2f} s"
    if seconds < 120:
        return f"{seconds:.1f} s"
    minutes, rest_s = divmod(int(seconds), 60)
    if minutes < 120:
        return f"{minutes} min {rest_s} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours < 72 else f"{hours // 24} d {hours % 24} h"


def size(size_bytes: float) -> str:
    unit = 0
    while size_bytes >= 1024 and unit < len(_SIZES) - 1:
        size_bytes, unit = size_bytes / 1024, unit + 1
    return f"{size_bytes:.1f} {_SIZES[unit]}" if unit and size_bytes < 100 else f"{size_bytes:.0f} {_SIZES[unit]}"


def percent(share: float | None) -> str:
    return NOTHING if share is None else f"{100 * share:.1f}%"


def points(difference: float) -> str:
    """Return the difference of two shares in points, signed: "+3.10"."""
    text = f"{100 * difference:+.2f}".replace("-", "\N{MINUS SIGN}")
    return text if text[1:] != "0.00" else text[1:]


def amount(number: float) -> str:
    """Return "0.43", "31.2" or "12,345"."""
    return f"{number:,.0f}" if number >= 1000 else f"{number:.1f}" if number >= 10 else f"{number:.2f}"


def iso(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds")


def utc(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
