"""Saves that training waited for: each is counted, and the supervisor is told now and then, and of the rest when the
generation ends. Pure."""

from __future__ import annotations

import threading
from collections import deque
from typing import Final

import msgspec

from ckpt_engine.contracts.notices import SaveWaited
from flyball.contracts.on_host.engine_wire import LateSaves

TELL_EVERY_S: Final = 60.0  # per rank: a store that is too slow makes every save late
REMEMBERED_LATE: Final = 64


class _SinceTold(msgspec.Struct):
    count: int = 0
    longest_s: float = 0.0
    generation: int = 0  # of the last one
    step: int = 0
    told_at: float | None = None


class LateSaveLog:
    """Of one job. The first late save of a rank is told at once, later ones together."""

    def __init__(self, job: str) -> None:
        self._job = job
        self._ranks: dict[int, _SinceTold] = {}
        self._told: deque[LateSaves] = deque(maxlen=REMEMBERED_LATE)
        self._lock = threading.Lock()

    def note(self, notice: SaveWaited, now: float) -> None:
        """`now` is wall clock; one that was set back tells."""
        with self._lock:
            since = self._ranks.setdefault(notice.rank, _SinceTold())
            since.count += 1
            since.longest_s = max(since.longest_s, notice.waited_s)
            since.generation, since.step = notice.generation, notice.step
            if since.told_at is None or not 0.0 <= now - since.told_at < TELL_EVERY_S:
                self._tell(notice.rank, now)

    def tell_rest(self, now: float) -> list[LateSaves]:
        """The generation ends: there may be no later save with which these would be told."""
        with self._lock:
            return [self._tell(rank, now) for rank, since in list(self._ranks.items()) if since.count > 0]

    def _tell(self, rank: int, now: float) -> LateSaves:
        since = self._ranks[rank]
        told = LateSaves(self._job, since.generation, rank, since.step, since.longest_s, since.count, at=now)
        self._told.append(told)
        self._ranks[rank] = _SinceTold(told_at=now)
        return told

    def newest(self) -> list[LateSaves]:
        """What was told, oldest first; the newest few."""
        with self._lock:
            return list(self._told)
