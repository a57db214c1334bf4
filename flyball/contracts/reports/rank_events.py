"""Events of a host's ranks that came together, as one: the start of 80,000 ranks would fill the log otherwise. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeGuard

import msgspec

from flyball.contracts.events import Event, EventKind

RANKS, AT = "ranks", "at"
_LARGEST = 2.0**63
_SUMMED_UP = (EventKind.RANK_MARKS, EventKind.RESTORED)


def summed_up(events: Sequence[Event]) -> Event:
    """One event for several of a kind, of one host and generation: `ranks`, and of every value a list in their order.
    One alone stays as it is."""
    if len(events) == 1:
        return events[0]
    data = {key: [event.data[key] for event in events] for key in events[0].data}
    data |= {RANKS: [event.rank for event in events], AT: [event.at for event in events]}
    return msgspec.structs.replace(events[0], at=max(event.at for event in events), rank=-1, data=data)


def per_rank(event: Event) -> Iterator[Event]:
    """The events that one sums up; itself, if it is none of those. What is missing or no number in its lists is left
    out."""
    ranks = event.data.get(RANKS)
    if event.kind not in _SUMMED_UP or not isinstance(ranks, list):
        yield event
        return
    lists = {key: values for key, values in event.data.items() if key != RANKS and isinstance(values, list)}
    for place, rank in enumerate(ranks):
        if not _is_number(rank):
            continue
        data = {key: values[place] for key, values in lists.items() if place < len(values)}
        at = data.pop(AT, None)
        moment = float(at) if _is_number(at) else event.at
        yield msgspec.structs.replace(event, rank=int(rank), at=moment, data=data)


def _is_number(value: object) -> TypeGuard[int | float]:
    """One that is finite, and no integer of hundreds of digits."""
    return isinstance(value, int | float) and -_LARGEST <= value <= _LARGEST
