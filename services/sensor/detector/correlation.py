"""Hosts that fell silent together: what they share is told once, and decided about once. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

import msgspec


class Fall(msgspec.Struct, frozen=True):
    """A host that is overdue, and that nobody vouches for. Moments are of the sensor's own time."""

    host_id: str
    domain: str  # failure domain, '' if unknown
    last_seen_s: float
    interval_s: float  # between its reports
    due_s: float  # when it is to be called silent, seen alone


class SilentHosts(msgspec.Struct, frozen=True):
    """Hosts that are called silent at once."""

    domain: str  # '' : they share none
    host_ids: tuple[str, ...]
    within_s: float  # between the last reports of the first and the last of them


class CorrelationSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What counts as together. Hosts of different domains do if their last reports lie within one interval."""

    window_s: float = 1.0  # between the last reports of two hosts of a domain, beyond the interval at which they come
    wait_s: float = 1.0  # that one who is due waits for others of its domain, beyond that interval


def groups_of(falls: Iterable[Fall], window_s: float) -> list[list[Fall]]:
    """Falls that follow each other within an interval, or, in one failure domain, within an interval and `window_s`."""
    ordered = sorted(falls, key=lambda fall: (fall.last_seen_s, fall.host_id))
    linked = list(range(len(ordered)))  # position -> one before it in the same group, or itself

    def first(position: int) -> int:
        while linked[position] != position:
            linked[position] = position = linked[linked[position]]
        return position

    farthest_of: dict[str | None, int] = {}  # domain, None for all of them -> whose next report was due last
    for position, fall in enumerate(ordered):
        for domain, beyond_s in ((None, 0.0), (fall.domain, window_s)):
            earlier = farthest_of.get(domain) if domain != "" else None
            if earlier is not None and fall.last_seen_s <= _next_s(ordered[earlier]) + beyond_s:
                low, high = sorted((first(earlier), first(position)))
                linked[high] = low
            if earlier is None or _next_s(fall) > _next_s(ordered[earlier]):
                farthest_of[domain] = position
    groups: dict[int, list[Fall]] = defaultdict(list)
    for position, fall in enumerate(ordered):
        groups[first(position)].append(fall)
    return list(groups.values())


def due_groups(falls: Sequence[Fall], now_s: float, settings: CorrelationSettings) -> list[SilentHosts]:
    """Those to be called silent now. Who is due waits for a while for the others of its group, so that they come as
    one; then those that are due come without the rest."""
    found = []
    for group in groups_of(falls, settings.window_s):
        due = [fall for fall in group if fall.due_s <= now_s]
        if not due or now_s < min(fall.due_s for fall in due) + _patience_s(group, due, settings):
            continue
        domains = {fall.domain for fall in due}
        found.append(
            SilentHosts(
                domain=due[0].domain if len(due) > 1 and len(domains) == 1 else "",
                host_ids=tuple(sorted(fall.host_id for fall in due)),
                within_s=max(fall.last_seen_s for fall in due) - min(fall.last_seen_s for fall in due),
            )
        )
    return found


def _patience_s(group: Sequence[Fall], due: Sequence[Fall], settings: CorrelationSettings) -> float:
    """How long those that are due wait for the rest of their group."""
    if len(due) == len(group):
        return 0.0
    domains = {fall.domain for fall in due if fall.domain}
    has_fellow = any(fall.domain in domains for fall in group if fall not in due)
    return max(fall.interval_s for fall in due) + (settings.wait_s if has_fellow else 0.0)


def _next_s(fall: Fall) -> float:
    """When the next report would have been due."""
    return fall.last_seen_s + fall.interval_s
