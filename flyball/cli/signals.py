"""Count the signals that end a command, so that it can end in order at a safe point."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from math import inf
from types import FrameType, TracebackType
from typing import Any, Self

from flyball.contracts.errors import UsageError


class Interrupted(KeyboardInterrupt):
    """A signal ended the command at a point where nothing needs an orderly end."""

    def __init__(self, exit_code: int) -> None:
        super().__init__()
        self.exit_code = exit_code


class EndSignals:
    """While entered, counts the named signals instead of raising. `count` 1 means: end in order; more: end at once. One
    that was ignored stays ignored."""

    def __init__(self, names: Iterable[str], notice_s: Callable[[], float] | None = None) -> None:
        """`notice_s`: of a batch system, the time from its first SIGTERM to SIGKILL. It may repeat SIGTERM meanwhile,
        which hurries nothing."""
        self.count = 0
        self._notice_s = notice_s
        self._killed_at = inf  # monotonic
        self.first: signal.Signals | None = None
        self._raises = False
        self._previous: dict[signal.Signals, Any] = {}
        try:
            self._signals = [signal.Signals[name] for name in names]
        except KeyError as error:
            raise UsageError(
                f"There is no signal {error.args[0]} on this system.", hint="use names like SIGTERM,SIGINT"
            ) from None

    def __enter__(self) -> Self:
        for number in self._signals:
            if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup, and shells in the background, want it
                self._previous[number] = signal.signal(number, self._count)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    @property
    def exit_code(self) -> int:
        """The exit code of a process ended by the first signal, as in shells: 130 for Ctrl-C."""
        return 128 + self.first if self.first else 0

    @property
    def left_s(self) -> float:
        """The time until SIGKILL; inf: nobody announced it."""
        return max(0.0, self._killed_at - time.monotonic())

    def check(self) -> None:
        """Raise Interrupted if a signal has arrived."""
        if self.count:
            raise Interrupted(self.exit_code)

    @contextmanager
    def raised(self) -> Iterator[None]:
        """Inside, the first signal raises Interrupted at once: for a long wait that can be broken off anywhere. Later
        ones are counted only, so that they do not break off what is put in order after it."""
        self._raises = True
        try:
            self.check()
            yield
        finally:
            self._raises = False

    def _count(self, number: int, _frame: FrameType | None) -> None:
        if self._notice_s is not None and number == signal.SIGTERM:
            self._killed_at = min(self._killed_at, time.monotonic() + self._notice_s())
            if self.first is not None:
                return
        if number == signal.SIGUSR1 and self.count:
            return  # a warning of what comes, however often a batch system sends it: nothing has to be hurried
        self.count += 1
        self.first = self.first or signal.Signals(number)
        if self._raises:
            self._raises = False
            raise Interrupted(self.exit_code)
