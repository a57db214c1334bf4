"""An event loop for tests of what happens in time, on a machine that may hold the process up at any moment."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from typing import Any, TypeVar

T = TypeVar("T")


class _Skips(selectors.DefaultSelector):
    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.running = 0  # threads that the loop waits for

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None or (self.running and timeout > 0):
            return super().select(None)
        ready = super().select(0)
        if not ready:
            self.now_s += timeout
        return ready


class _SkippingLoop(asyncio.SelectorEventLoop):
    """Its time goes on only while nothing runs: then what is due next is due at once."""

    def __init__(self) -> None:
        self._skips = _Skips()
        super().__init__(self._skips)

    def time(self) -> float:
        return self._skips.now_s

    def run_in_executor(  # type: ignore[override]
        self,
        executor: Executor | None,
        func: Callable[..., Any],
        *args: Any,  # noqa: ANN401 - the loop's own
    ) -> asyncio.Future[Any]:
        self._skips.running += 1
        future = super().run_in_executor(executor, func, *args)
        future.add_done_callback(lambda _: self._done())
        return future

    def _done(self) -> None:
        self._skips.running -= 1


class LoopClock:
    """The time of the event loop, for work that reads a clock beside it."""

    def wall_s(self) -> float:
        return 1_000.0 + self.monotonic_s()

    def monotonic_s(self) -> float:
        return asyncio.get_running_loop().time()


def run_skipping(work: Coroutine[Any, Any, T]) -> T:
    """As `asyncio.run`, without its waits. Not for work that waits for other processes or for threads of its own."""
    with asyncio.Runner(loop_factory=_SkippingLoop) as runner:
        return runner.run(work)
