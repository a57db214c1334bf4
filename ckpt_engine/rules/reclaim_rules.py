"""When segments are so long unused that their memory is reclaimed. Pure."""

from __future__ import annotations


def unused_s(last_use_ns: int, now_ns: int) -> float:
    """Seconds since the last use, both in boot time. Zero if the last use is in the future: it dates from before a
    reboot, in a folder that survived it, so the time to live begins again."""
    return max(0, now_ns - last_use_ns) / 1e9


def is_reclaimable(*, known: bool, in_use: bool, unused_s: float, ttl_s: float) -> bool:
    """Whether segments can go: unknown to the engine, open in no process, unused for longer than the time to live."""
    return not known and not in_use and unused_s > ttl_s
