"""The phases that ranks logged: each ends when the rank enters the next. Pure."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from enum import Enum
from typing import NamedTuple

import msgspec

from flyball.contracts.cluster import Phase
from flyball.contracts.events import Event
from goodput.history.values import text


class Waiting(Enum):
    """Phases in which training waits for something."""

    EVALUATION = "eval"
    DATA = "data"
    CHECKPOINT = "checkpoint"
    OTHER = "other"  # neither steps nor anything with a name


class PhaseSpan(NamedTuple):
    """A rank was in a phase from `entered` to `left`; None: the log does not show its end."""

    entered: float
    left: float | None
    rank: int
    host_id: str


class StartUp(msgspec.Struct, frozen=True):
    """When a generation started, by its phases: times of the last rank; None if the phases do not show it."""

    began_at: float | None = None  # of the first rank
    restore_began_at: float | None = None
    restored_at: float | None = None
    starting: bool = False  # some rank has not logged a restore, while others have
    restoring: bool = False  # some rank has not finished restoring


_WAITING = {waiting.value: waiting for waiting in Waiting}
_STARTING = {"init", Phase.STARTING.name.lower()}
_RESTORING = {"restore", Phase.RESTORING.name.lower()}
_TRAINING = {"step", *_WAITING}


class PhaseLog(msgspec.Struct):
    """Collects PHASE events. A set per rank makes order and repetition irrelevant."""

    _entered: dict[int, set[tuple[float, str]]] = {}
    _host_of: dict[int, str] = {}
    _start_up: StartUp | None = None  # once settled

    def add(self, event: Event) -> None:
        """Add a PHASE event."""
        rank = event.rank
        entered = self._entered.get(rank)
        if entered is None:
            entered = self._entered[rank] = set()
        entered.add((event.at, text(event.data, "phase")))
        if event.host_id and event.host_id > self._host_of.get(rank, ""):
            self._host_of[rank] = event.host_id

    def settle(self, until: float) -> None:
        """Forget the phases that ended before a moment, long after the generation's start."""
        self._start_up = self.start_up()
        for rank, entered in self._entered.items():
            last = max((entry for entry in entered if entry[0] <= until), default=None)
            self._entered[rank] = {entry for entry in entered if entry[0] > until or entry == last}

    def __len__(self) -> int:
        return sum(map(len, self._entered.values()))

    def spans(self) -> dict[Waiting, tuple[PhaseSpan, ...]]:
        """When ranks waited, in order of time."""
        found: defaultdict[Waiting, set[PhaseSpan]] = defaultdict(set)
        for rank, at, phase, left in self._each():
            waiting = _WAITING.get(phase)
            if waiting is not None:
                found[waiting].add(PhaseSpan(at, left, rank, self._host_of.get(rank, "")))
        return {waiting: tuple(sorted(spans, key=_in_time)) for waiting, spans in found.items()}

    def start_up(self) -> StartUp:
        """When ranks started, began to restore, and could train."""
        if self._start_up is not None:
            return self._start_up
        began: dict[int, float] = {}
        restoring: dict[int, float] = {}
        ready: dict[int, float] = {}
        for rank, at, phase, _ in self._each():
            if phase in _STARTING:
                began.setdefault(rank, at)
            elif phase in _RESTORING:
                restoring.setdefault(rank, at)
            elif phase in _TRAINING and (rank in began or rank in restoring):
                ready.setdefault(rank, at)
        return StartUp(
            began_at=min((*began.values(), *restoring.values()), default=None),
            restore_began_at=max(restoring.values(), default=None),
            restored_at=max(ready.values(), default=None),
            starting=bool(restoring and began.keys() - restoring.keys() - ready.keys()),
            restoring=bool(restoring.keys() - ready.keys()),
        )

    def _each(self) -> Iterator[tuple[int, float, str, float | None]]:
        """Rank, start, phase, and end."""
        for rank, entered in self._entered.items():
            entries = sorted(entered)
            for index, (at, phase) in enumerate(entries):
                yield rank, at, phase, entries[index + 1][0] if index + 1 < len(entries) else None


def _in_time(span: PhaseSpan) -> tuple[float, float, int]:
    return span.entered, math.inf if span.left is None else span.left, span.rank
