"""Stores the inputs of large rounds in a thread of its own: a view of ten thousand hosts takes longer to write than the
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
from services.runtime.outages import OUTAGES, Outage

BACKLOG = 8  # rounds; successive views share most of their memory
LONGEST_WAIT_S = 0.5  # of the loop, for room in the backlog: replays must not hold up decisions
LONGEST_END_S = 5.0  # of a loop that ends, for its backlog
ATTEMPTS = 10
IDLE_WAIT_S = 0.5

log = structlog.get_logger(__name__)


class _Round(msgspec.Struct, frozen=True):
    inputs: RoundInputs
    signals: Sequence[Signal]
    epoch: int
    now: float


class RoundKeeper:
    """Rounds get their numbers when they are stored, so while one waits, later ones wait behind it."""

    def __init__(self, store: DecisionStore, clock: Clock) -> None:
        self._store = store
        self._outage = Outage("round-keeper", clock)
        self._changed = threading.Condition()
        self._waiting: deque[_Round] = deque()  # the first one is being stored
        self._one_runs = threading.Lock()
        self._is_running = False

    def takes(self, inputs: RoundInputs) -> bool:
        """Whether to store this round here, and not in one transaction with its decisions."""
        return inputs.is_large or bool(self._waiting)

    def keep(self, inputs: RoundInputs, signals: Sequence[Signal], *, epoch: int, now: float) -> None:
        """Store the inputs of a committed round: at once if no thread runs `run`, otherwise soon. Waits for room."""
        with self._changed:
            if self._is_running:
                if self._changed.wait_for(lambda: len(self._waiting) < BACKLOG, LONGEST_WAIT_S):
                    self._waiting.append(_Round(inputs, signals, epoch, now))
                    self._changed.notify_all()
                else:
                    log.warning("round_not_kept", why=f"{BACKLOG} others wait to be stored")
                return
        self._store.keep_round(inputs, signals, epoch=epoch, now=now)

    def run(self, stop: threading.Event) -> None:
        """Run until stopped (and woken), then store the rest."""
        with self._one_runs:
            self._is_running = True
            try:
                while self._waiting or not stop.is_set():
                    self._keep_next(stop)
            finally:
                self._is_running = False

    def wake(self) -> None:
        """Wake `run` so that it notices the stop."""
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
        """Store one round. If that fails it is logged, and missing in replays; decisions do not need it."""
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
