"""Faults that a training loop does to itself when it is told to: a signal sets the order, the loop obeys it."""

from __future__ import annotations

import signal
import time
from types import FrameType

RAISE = signal.SIGUSR1
HANG = signal.SIGUSR2
_A_LONG_TIME_S = 3600.0


class InjectedFault(RuntimeError):
    """The exception of the fault `exception`."""


class Orders:
    """Listens from its creation on, in the main thread."""

    def __init__(self) -> None:
        self._given: int = 0
        for number in (RAISE, HANG):
            signal.signal(number, self._note)

    def obey(self, step: int) -> None:
        """Between two steps, so that no library's own work is cut in half."""
        if self._given == RAISE:
            raise InjectedFault(f"the training loop was told to fail before step {step}")
        while self._given == HANG:
            time.sleep(_A_LONG_TIME_S)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self._given = number
