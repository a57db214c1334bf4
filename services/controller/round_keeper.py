"""Keeps the inputs of large rounds beside the loop: writing down a view of ten thousand hosts takes longer than the
next decision may wait."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence

import msgspec
import structlog

from flyball.contracts.clock import Clock
from flyball.contracts.errors import FlyballError
from flyball.contracts.reports.signals import Signal
from services.controller.ports import DecisionStore
from services.controller.replay import RoundInputs
from services.runtime.loops import OUTAGES, Outage

BACKLOG = 8  # rounds; the views of successive ones share most of what they hold
LONGEST_WAIT_S = 0.5  # of the loop, for room in the backlog: decisions do not wait for what is only for replays
LONGEST_END_S = 5.0  # of a loop that ends, for what is in it
ATTEMPTS = 10
IDLE_WAIT_S = 0.5

log = structlog.get_logger(__name__)


class _Round(msgspec.Struct, frozen=True):
    inputs: RoundInputs
    signals: Sequence[Signal]
    epoch: int
    now: float


class RoundKeeper:
    """Rounds are numbered as they are kept, so that while one waits all later ones wait behind it."""

    def __init__(self, store: DecisionStore, clock: Clock) -> None:
        self._store = store
        self._outage = Outage("round-keeper", clock)
        self._changed = threading.Condition()
        self._waiting: deque[_Round] = deque()  # its first one is being kept
        self._one_runs = threading.Lock()
        self._is_running = False

    def takes(self, inputs: RoundInputs) -> bool:
        """Whether a round is to be kept here, and not in one transaction with its decisions."""
        return inputs.is_large or bool(self._waiting)

    def keep(self, inputs: RoundInputs, signals: Sequence[Signal], *, epoch: int, now: float) -> None:
        """Keep a round that is stored already: at once if no thread runs `run`, else soon. Waits for room."""
        with self._changed:
            if self._is_running:
                if self._changed.wait_for(lambda: len(self._waiting) < BACKLOG, LONGEST_WAIT_S):
                    self._waiting.append(_Round(inputs, signals, epoch, now))
                    self._changed.notify_all()
                else:
                    log.warning("round_not_kept", why=f"{BACKLOG} others wait to be kept")
                return
        self._store.keep_round(inputs, signals, epoch=epoch, now=now)

    def run(self, stop: threading.Event) -> None:
        """Until stopped (and woken), and then until nothing waits any more."""
        with self._one_runs:
            self._is_running = True
            try:
                while self._waiting or not stop.is_set():
                    self._keep_next(stop)
            finally:
                self._is_running = False

    def wake(self) -> None:
        """Let `run` see that it is to end."""
        with self._changed:
            self._changed.notify_all()

    def _keep_next(self, stop: threading.Event) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or stop.is_set(), IDLE_WAIT_S)
            if not self._waiting:
                return
        try:
            self._keep(self._waiting[0], stop)
        finally:
            with self._changed:
                self._waiting.popleft()
                self._changed.notify_all()

    def _keep(self, kept: _Round, stop: threading.Event) -> None:
        """Decisions do not depend on it: what cannot be kept is told, and missing in a replay."""
        for _ in range(ATTEMPTS):
            try:
                self._store.keep_round(kept.inputs, kept.signals, epoch=kept.epoch, now=kept.now)
            except OUTAGES as error:
                stop.wait(self._outage.pause_s(error))
            except FlyballError as error:
                log.warning("round_not_kept", why=str(error))
                return
            else:
                self._outage.ended()
                return
        log.warning("round_not_kept", why=f"{ATTEMPTS} attempts failed")
