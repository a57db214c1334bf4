"""How many steps per second a job made lately, for the small chart of its card. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from flyball.contracts.events import Event

Json = dict[str, Any]

SHOWN_S, BINS = 600.0, 60
HEIGHT = 24.0  # of the chart, in units of its box, which is one unit wide per bin
_LEAST = 0.5  # height of a bin with any step


def pace(events: Iterable[Event], now: float) -> Json | None:
    """Return steps per second in each of BINS slices of the last SHOWN_S seconds, and their picture; None: no step.
    `events`: STEPS of a job, each of all ranks together or of one, of which rank 0 counts."""
    width_s = SHOWN_S / BINS
    steps = [0] * BINS
    for event in events:
        moments = event.data.get("completed_at")
        if event.rank > 0 or not isinstance(moments, list):
            continue
        for at in moments:
            place = int((at - (now - SHOWN_S)) // width_s) if isinstance(at, float | int) else -1
            if 0 <= place < BINS:
                steps[place] += 1
    if not any(steps):
        return None
    most = max(steps)
    bars = (
        f"M{place} {HEIGHT:g}v-{max(_LEAST, count / most * HEIGHT):.1f}h1V{HEIGHT:g}z"
        for place, count in enumerate(steps)
        if count
    )
    return {"rates": [count / width_s for count in steps], "most": most / width_s, "path": "".join(bars)}
