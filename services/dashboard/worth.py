"""What /goodput draws of a report: a waterfall by cause, a lane per category over time, two runs side by side. Pure.

Places and lengths are per cent of the width: the pictures have no size of their own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from goodput.account.categories import GROUPS, Category

Json = dict[str, Any]

MAX_CAUSES = 14  # rows of the waterfall; the smaller ones are summed
MAX_MARKS = 150  # incidents on the time axis
LANE = 20  # height of a lane
LEAST = 3  # height of the least share that is seen
NARROWEST = 0.25  # of a bar
MAX_ZOOMED = 0.3  # losses of less than this share are shown larger
ZOOMED = 0.75  # they then have this share of the width
SHOWN_S = 0.005
GROUP_OF = {category.value: group.name for group in GROUPS for category in group.categories}


def group_of(category: str) -> str:
    """Return the group that gives a category its colour and pattern."""
    return GROUP_OF.get(category, "unknown")


class _Scale(NamedTuple):
    """The part of the elapsed time that fills the width, in seconds from its start."""

    from_s: float
    to_s: float

    def bar(self, group: str, at_s: float, seconds: float) -> Json:
        whole_s = (self.to_s - self.from_s) or 1.0
        left, right = (100.0 * (edge - self.from_s) / whole_s for edge in (at_s, at_s + seconds))
        left = min(max(0.0, left), 100.0 - NARROWEST)
        width = min(max(NARROWEST, right - left), 100.0 - left)
        return {"group": group, "x": f"{left:.3f}%", "width": f"{width:.3f}%", "seconds": seconds}


def zoom_s(report: Mapping[str, Any]) -> float:
    """Return how much of the end of the elapsed time the waterfall shows: small losses would be hairlines in all of it,
    and what is left out at the left is useful in every row."""
    elapsed_s = float(report["elapsed_s"])
    lost_s = elapsed_s - report["seconds_by_category"].get(Category.USEFUL, 0.0)
    return lost_s / ZOOMED if 0.0 < lost_s < MAX_ZOOMED * elapsed_s else elapsed_s


def waterfall(report: Mapping[str, Any], shown_s: float) -> list[Json]:
    """Return the rows from the elapsed time down to the useful time, the largest loss first. Each loss begins where the
    one above ends, and its parts are the kinds of time that it took. The width is the last `shown_s` seconds; `cut_s`
    of a row lie before them."""
    elapsed_s = report["elapsed_s"] or 1.0
    scale = _Scale(elapsed_s - shown_s if shown_s else 0.0, elapsed_s)
    spent: defaultdict[str, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))
    for loss in report["losses"]:
        spent[loss["cause"]][group_of(loss["category"])] += loss["seconds"]
    causes = sorted(((sum(parts.values()), cause, parts) for cause, parts in spent.items()), key=lambda one: -one[0])
    causes = [one for one in causes if one[0] >= SHOWN_S]
    if len(causes) > MAX_CAUSES:
        rest: defaultdict[str, float] = defaultdict(float)
        for _, _, parts in causes[MAX_CAUSES - 1 :]:
            for group, seconds in parts.items():
                rest[group] += seconds
        number = len(causes) - MAX_CAUSES + 1
        causes = [*causes[: MAX_CAUSES - 1], (sum(rest.values()), f"{number} other causes", rest)]
    rows = [_row("elapsed", report["elapsed_s"], elapsed_s, [scale.bar("elapsed", 0.0, elapsed_s)], cut_s=scale.from_s)]
    until_s = elapsed_s
    for seconds, cause, parts in causes:
        bars, at_s = [], until_s - seconds
        for group, part_s in sorted(parts.items(), key=lambda part: -part[1]):
            bars.append(scale.bar(group, at_s, part_s))
            at_s += part_s
        until_s -= seconds
        rows.append(_row(cause, seconds, elapsed_s, bars))
    useful_s = report["seconds_by_category"].get(Category.USEFUL, 0.0)
    return [*rows, _row("useful", useful_s, elapsed_s, [scale.bar("useful", 0.0, useful_s)], cut_s=scale.from_s)]


def _row(name: str, seconds: float, elapsed_s: float, bars: Sequence[Json], *, cut_s: float = 0.0) -> Json:
    return {"name": name, "seconds": seconds, "share": seconds / elapsed_s, "bars": bars, "cut_s": cut_s}


def groups_of(rows: Iterable[Mapping[str, Any]]) -> list[Any]:
    """Return the groups that rows of the waterfall show, for its legend."""
    seen = {bar["group"] for row in rows for bar in row["bars"]}
    return [group for group in GROUPS if group.name in seen]


def lanes(report: Mapping[str, Any]) -> list[Json]:
    """Return a lane per category that took time, the useful one first, then the longest. `path` is drawn in a box of
    one unit per slice, LANE high: the share of each slice."""
    slices = report.get("timeline") or ()
    if not slices:
        return []
    seconds = {name: spent for name, spent in report["seconds_by_category"].items() if spent >= SHOWN_S}
    names = sorted(seconds, key=lambda name: (name != Category.USEFUL, -seconds[name]))
    return [
        {"name": name, "group": group_of(name), "seconds": seconds[name], "path": _path(name, slices)} for name in names
    ]


def _path(category: str, slices: Sequence[Mapping[str, Any]]) -> str:
    drawn = []
    for number, part in enumerate(slices):
        share = part["seconds_by_category"].get(category, 0.0) / (part["seconds"] or 1.0)
        if share > 0.0:
            height = max(LEAST, min(1.0, share) * LANE)
            drawn.append(f"M{number} {LANE}v-{height:.1f}h1V{LANE}z")
    return "".join(drawn)


def marks(report: Mapping[str, Any]) -> list[Json]:
    """Return the newest incidents, with their places on the time axis."""
    length_s = report["ended_at"] - report["started_at"] or 1.0
    found = []
    for incident in report["incidents"][-MAX_MARKS:]:
        place = 100.0 * ((incident["began_at"] or incident["opened_at"]) - report["started_at"]) / length_s
        if 0.0 <= place <= 100.0:
            known = {name: incident[name] for name in ("incident_id", "cause", "badput_s")}
            found.append(known | {"x": f"{place:.3f}%"})
    return found


def axis(report: Mapping[str, Any]) -> list[float]:
    """Return the moments that the time axis names, in wall clock."""
    start, end = report["started_at"], report["ended_at"]
    return [start, (start + end) / 2, end]


def side_by_side(rows: Sequence[Mapping[str, Any]]) -> list[Json]:
    """Return rows of a comparison that have a share, with a bar for each run; the largest share fills the width."""
    shown = [row for row in rows if row["a_share"] is not None and row["b_share"] is not None]
    largest = max((max(row["a_share"], row["b_share"]) for row in shown), default=0.0) or 1.0
    return [
        dict(row)
        | {
            "a_width": f"{100.0 * row['a_share'] / largest:.3f}%",
            "b_width": f"{100.0 * row['b_share'] / largest:.3f}%",
        }
        for row in shown
    ]
