"""Groups hosts that fell silent together, so that there is one decision about what they share. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

import msgspec

WINDOW_S = 1.0  # hosts of a domain fell together if their last reports are within this, plus one report interval
_WAIT_S = 1.0  # how long a due host waits for others of its domain, plus one report interval


class Fall(msgspec.Struct, frozen=True):
    """An overdue host that nobody vouches for. Moments are in the sensor's own time."""

    host_id: str
    domain: str  # failure domain, '' if unknown
    last_seen_s: float
    interval_s: float  # between its reports
    due_s: float  # when it turns red, if it is alone


class SilentHosts(msgspec.Struct, frozen=True):
    """Hosts that turn red together."""

    domain: str  # '' : they share none
    host_ids: tuple[str, ...]
    within_s: float  # between the last reports of the first and the last of them


def groups_of(falls: Iterable[Fall], window_s: float) -> list[list[Fall]]:
    """Groups falls whose last reports lie within one report interval, or, in one failure domain, `window_s` more."""
    ordered = sorted(falls, key=lambda fall: (fall.last_seen_s, fall.host_id))
    linked = list(range(len(ordered)))  # position -> an earlier one of its group, or itself

    def first(position: int) -> int:
        while linked[position] != position:
            linked[position] = position = linked[linked[position]]
        return position

    farthest_of: dict[str | None, int] = {}  # domain (None: any) -> position of the fall whose next report was due last
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


def due_groups(falls: Sequence[Fall], now_s: float) -> list[SilentHosts]:
    """The hosts that turn red now. A due host waits a while for the rest of its group, so that they turn red together;
    after that it turns red without them."""
    found = []
    for group in groups_of(falls, WINDOW_S):
        due = [fall for fall in group if fall.due_s <= now_s]
        if not due or now_s < min(fall.due_s for fall in due) + _patience_s(group, due):
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


def _patience_s(group: Sequence[Fall], due: Sequence[Fall]) -> float:
    """How long the due hosts wait for the rest of their group."""
    if len(due) == len(group):
        return 0.0
    domains = {fall.domain for fall in due if fall.domain}
    has_fellow = any(fall.domain in domains for fall in group if fall not in due)
    return max(fall.interval_s for fall in due) + (_WAIT_S if has_fellow else 0.0)


def _next_s(fall: Fall) -> float:
    """When its next report was due."""
    return fall.last_seen_s + fall.interval_s
