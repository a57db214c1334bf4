"""What Ctrl-C and SIGTERM do: a part that can end in order is asked to, what is cleaned up is left alone, and all
else ends at once."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from enum import Enum, auto
from types import FrameType

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class _Manner(Enum):
    AT_ONCE = auto()
    IN_ORDER = auto()
    SHIELDED = auto()


class Interruption:
    """`is_asked`: whether a signal came. It raises KeyboardInterrupt in the main thread, once, so that what is cleaned
    up on the way out is not interrupted; within `in_order` the first signal only asks, and the second raises; within
    `shielded` none raises. One may be inside the other."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._manner = _Manner.AT_ONCE
        self._has_raised = False
        self.is_asked = False

    def listen(self) -> None:
        for number in STOP_SIGNALS:
            signal.signal(number, self._receive)

    def in_order(self) -> AbstractContextManager[None]:
        """What runs inside looks at `is_asked`."""
        return self._within(_Manner.IN_ORDER)

    def shielded(self) -> AbstractContextManager[None]:
        """What runs inside leaves something on the machine if it does not come to its end."""
        return self._within(_Manner.SHIELDED)

    @contextmanager
    def _within(self, manner: _Manner) -> Iterator[None]:
        outside, self._manner = self._manner, manner
        try:
            yield
        finally:
            self._manner = outside

    def _receive(self, _number: int, _frame: FrameType | None) -> None:
        is_first, self.is_asked = not self.is_asked, True
        if self._manner is _Manner.SHIELDED:
            self._say("interrupted: what was started is ended first")
        elif is_first and self._manner is _Manner.IN_ORDER:
            self._say("interrupted: what was done so far is judged; a second Ctrl-C ends that, too")
        elif not self._has_raised:
            self._has_raised = True
            raise KeyboardInterrupt
