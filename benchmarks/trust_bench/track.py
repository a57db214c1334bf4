"""The steps of a race that all ranks completed, from the lines that they write at each step."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from simulator.inject.processes import look_at

RANKS = 2


class Line(NamedTuple):
    """A rank has completed a step."""

    at_s: float  # when that was seen, monotonic
    step: int
    pid: int


class DoneStep(NamedTuple):
    """All ranks have completed it."""

    at_s: float  # when that was seen, monotonic
    step: int
    pids: tuple[int, ...]


class Track:
    """Reads `rank*.txt` in a folder. After a restart ranks write the same step again, each at its moment: lines of
    processes that made no step together before count together only if all of these are alive. So the last line of a
    killed rank is never taken for one of the restart's."""

    def __init__(self, folder: Path, is_alive: Callable[[int], bool] = lambda pid: look_at(pid) is not None) -> None:
        self._folder = folder
        self._is_alive = is_alive
        self._offsets = dict.fromkeys(range(RANKS), 0)
        self._seen: dict[int, dict[int, Line]] = {rank: {} for rank in range(RANKS)}
        self.lines: list[Line] = []  # of all ranks
        self.pids = dict.fromkeys(range(RANKS), 0)  # that wrote the newest line
        self.done: list[DoneStep] = []

    def pull(self) -> None:
        """Read what was written since."""
        for rank, offset in self._offsets.items():
            path = self._folder / f"rank{rank}.txt"
            try:
                if path.stat().st_size == offset:
                    continue
                with path.open("rb") as file:
                    file.seek(offset)
                    data = file.read()
            except FileNotFoundError:
                continue
            data = data[: data.rfind(b"\n") + 1]
            self._offsets[rank] += len(data)
            now_s = time.monotonic()
            for line in data.decode().splitlines():
                step, _, pid = line.split()
                self.pids[rank] = int(pid)
                self.lines.append(Line(now_s, int(step), int(pid)))
                self._seen[rank][int(step)] = self.lines[-1]
                self._complete(int(step))

    @property
    def newest(self) -> int:
        """-1: no step was completed."""
        return max((one.step for one in self.done), default=-1)

    def _complete(self, step: int) -> None:
        found = [line for rank in range(RANKS) if (line := self._seen[rank].get(step)) is not None]
        if len(found) < RANKS:
            return
        pids = tuple(line.pid for line in found)
        if (self.done and self.done[-1].pids == pids) or all(map(self._is_alive, pids)):
            self.done.append(DoneStep(max(line.at_s for line in found), step, pids))
