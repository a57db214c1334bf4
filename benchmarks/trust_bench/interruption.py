"""What Ctrl-C and SIGTERM do: a part that can end in order is asked to; everything else ends at once."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interruption:
    """`is_asked`: whether a signal came. It raises KeyboardInterrupt in the main thread, once, so that what is cleaned
    up on the way out is not interrupted; within `in_order` the first signal only asks, and the second raises."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._ends_in_order = False
        self._has_raised = False
        self.is_asked = False

    def listen(self) -> None:
        for number in STOP_SIGNALS:
            signal.signal(number, self._receive)

    @contextmanager
    def in_order(self) -> Iterator[None]:
        """What runs inside looks at `is_asked`."""
        self._ends_in_order = True
        try:
            yield
        finally:
            self._ends_in_order = False

    def _receive(self, _number: int, _frame: FrameType | None) -> None:
        is_first, self.is_asked = not self.is_asked, True
        if is_first and self._ends_in_order:
            self._say("interrupted: what was done so far is judged; a second Ctrl-C ends that, too")
        elif not self._has_raised:
            self._has_raised = True
            raise KeyboardInterrupt
