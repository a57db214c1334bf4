"""Finds where ranks stand that have stood still for long: once for each standstill, beside all else.

Their stacks are read once. What the kernel shows of their threads is compared again at each look: whether their wait
can end is a finding of now.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Final, NamedTuple

import msgspec

from flyball.contracts.reports.rank_stands import RankStand, Stand
from host_daemon.kernel.activity import Key, StalledWorker
from host_daemon.kernel.thread_waits import ThreadWait, awaits, may_get_a_signal, proof, threads_of
from host_daemon.kernel.worker_reads import NotReadable, WorkerReads
from host_daemon.workers.stacks import StackSource, take_stands

TAKEN_WITHIN_S: Final = 1.5
_THREADS_WITHIN_S: Final = 0.5
_PROVED_AFTER_S: Final = 1.0  # nothing moved for so long
_OFTEN_FOR_S, _SELDOM_S = 10.0, 2.0  # how long each look is a new one, and between looks after that


class _SeenStand(NamedTuple):
    """What was seen of a worker that stands."""

    of: RankStand
    stand: RankStand
    began_s: float  # of the first look
    until_s: float  # until then it holds


class StandWatch:
    """Lives in one event loop. Call `close` when it ends."""

    def __init__(self, sources: Callable[[], Mapping[Key, StackSource]]) -> None:
        """`sources`: the live workers."""
        self._sources = sources
        self._reads = WorkerReads()
        self._stands: dict[StalledWorker, RankStand] = {}
        self._taking: dict[StalledWorker, asyncio.Task[None]] = {}
        self._threads: dict[StalledWorker, tuple[float, tuple[ThreadWait, ...]]] = {}
        self._seen: dict[StalledWorker, _SeenStand] = {}
        self._here: set[StalledWorker] = set()

    async def watch(self, standing: Sequence[StalledWorker], now_s: float) -> dict[Key, RankStand]:
        """Where these workers stand, as far as it is known by now. Others have moved, and are forgotten."""
        here = self._here = {*standing}
        self._seen = {worker: one for worker, one in self._seen.items() if worker in here}
        self._stands = {worker: stand for worker, stand in self._stands.items() if worker in here}
        self._threads = {worker: seen for worker, seen in self._threads.items() if worker in here}
        for worker in standing:
            if worker not in self._stands and worker not in self._taking:
                self._taking[worker] = asyncio.create_task(self._take(worker))
        known = list(self._stands.items())
        judged = await asyncio.gather(*(self._judged(worker, stand, now_s) for worker, stand in known))
        return {worker.key: stand for (worker, _), stand in zip(known, judged, strict=True)}

    async def close(self) -> None:
        """End what is under way."""
        for task in self._taking.values():
            task.cancel()
        await asyncio.gather(*self._taking.values(), return_exceptions=True)

    async def _take(self, worker: StalledWorker) -> None:
        try:
            source = self._sources().get(worker.key)
            if source is not None and source.pid == worker.pid:
                for stand in await take_stands([source], TAKEN_WITHIN_S, self._reads, gently=True):
                    if worker in self._here:  # it may have moved meanwhile
                        self._stands[worker] = msgspec.structs.replace(stand, stack="")
        finally:
            del self._taking[worker]

    async def _judged(self, worker: StalledWorker, stand: RankStand, now_s: float) -> RankStand:
        """The same with what its threads show now, or did a moment ago: what they wait for, and whether it can end."""
        known = self._seen.get(worker)
        if known is not None and known.of is stand and now_s < known.until_s:
            return known.stand
        began_s = known.began_s if known is not None else now_s
        judged = await self._look(worker, stand, now_s)
        until_s = now_s if now_s - began_s < _OFTEN_FOR_S else now_s + _SELDOM_S
        self._seen[worker] = _SeenStand(stand, judged, began_s, until_s)
        return judged

    async def _look(self, worker: StalledWorker, stand: RankStand, now_s: float) -> RankStand:
        """The same with what its threads show now. What cannot be read may end the wait."""
        try:
            threads = await self._reads.read(worker.pid, partial(_waits_of, worker.pid), timeout_s=_THREADS_WITHIN_S)
        except (NotReadable, OSError, ValueError):
            threads = ()
        if not threads:
            self._threads.pop(worker, None)
            return msgspec.structs.replace(stand, awaits="unknown")
        since_s, before = self._threads.setdefault(worker, (now_s, threads))
        found = proof(threads, before)
        if not found:
            self._threads[worker] = now_s, threads
        is_sure = now_s - since_s >= _PROVED_AFTER_S
        if found and is_sure and stand.kind == Stand.CODE:
            self._stands.pop(worker, None)  # it ran when it was looked at: look again
        return msgspec.structs.replace(stand, awaits=awaits(threads), proof=found if is_sure else "")


def _waits_of(pid: int) -> tuple[ThreadWait, ...]:
    """The threads of a process; () if a handler of a signal may run."""
    return () if may_get_a_signal(pid) else threads_of(pid)
