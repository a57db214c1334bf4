"""When a rank's segments are nobody's any more. Pure."""

from __future__ import annotations


def unused_s(last_use_ns: int, now_ns: int) -> float:
    """Seconds since the last use, both times of the clock that counts since the machine started. A last use to come is
    from before the machine was started anew, in a folder that outlived that; its time to live begins again."""
    return max(0, now_ns - last_use_ns) / 1e9


def is_reclaimable(*, known: bool, in_use: bool, unused_s: float, ttl_s: float) -> bool:
    """Whether segments can go: of no job that the engine knows, open in no process, and unused for the time to live."""
    return not known and not in_use and unused_s > ttl_s
