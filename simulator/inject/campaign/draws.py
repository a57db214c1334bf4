"""What a campaign will do, drawn from its seed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple

from simulator.inject.campaign.mixes import MixedFault


class Draw(NamedTuple):
    """One fault. `place`, from 0 to 1, chooses the rank or host among those that there are."""

    at_s: float  # since the beginning of the campaign
    fault: MixedFault
    place: float


def draw_faults(mix: Sequence[MixedFault], *, rate_per_h: float, duration_s: float, seed: int) -> list[Draw]:
    """Faults at exponential intervals. Times, faults and places have a random stream each: a longer campaign begins
    with the same faults."""
    times, kinds, places = (random.Random(f"{seed}:{name}") for name in ("times", "faults", "places"))
    weights = [fault.weight for fault in mix]
    found: list[Draw] = []
    at_s = times.expovariate(rate_per_h / 3600.0)
    while at_s < duration_s:
        found.append(Draw(at_s, kinds.choices(mix, weights)[0], places.random()))
        at_s += times.expovariate(rate_per_h / 3600.0)
    return found
