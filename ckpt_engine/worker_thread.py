"""The one kind of thread in the engine: named, stoppable, and able to survive unexpected errors."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Mapping

from ckpt_engine.counters import Counters
from flyball.backoff import Backoff
from flyball.contracts.errors import FlyballError

RETRY_S = 1.0
LONGEST_RETRY_S = 2.0
LOG_AGAIN_S = 60.0  # a failure that repeats

Work = Callable[[], float | None]
_Cause = tuple[type[Exception], str, int]


class WorkerThread:
    """Calls `work` in a daemon thread until it is done or stopped. The process may exit while `work` hangs.

    `work` returns the seconds to wait before the next call, or None to end the thread. `wake` cuts that wait short.

    If `work` raises, the exception is logged and counted, and `work` is called again after `retry_s`. The pause doubles
    up to LONGEST_RETRY_S while it fails. With `retry_s` None the thread ends instead.
    """

    def __init__(
        self,
        name: str,
        work: Work,
        *,
        stopped: threading.Event | None = None,
        counters: Counters | None = None,
        context: Mapping[str, object] | None = None,
        on_failure: Callable[[Exception], None] | None = None,
        on_end: Callable[[], None] | None = None,
        retry_s: float | None = RETRY_S,
    ) -> None:
        """`counters` belong to an engine: failures go to its JSON log, with the fields of `context`. A training process
        has none and uses Python's logging. `on_failure` and `on_end` run in the thread.

        `stopped` may be shared. Setting it ends the thread only after its current wait (`wake` cuts it short), and
        `stop` sets it for everything that shares it."""
        self._work = work
        self._stopped = stopped or threading.Event()
        self._wake = threading.Event()
        self._counters = counters
        self._context = context or {}
        self._on_failure = on_failure
        self._on_end = on_end
        self._backoff = None if retry_s is None else Backoff(retry_s, max(retry_s, LONGEST_RETRY_S))
        self._logged: dict[_Cause, tuple[float, int]] = {}  # when, and how often it failed since
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    @property
    def stopping(self) -> bool:
        return self._stopped.is_set()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def start(self) -> None:
        """Raises RuntimeError if the process can have no more threads; it may be called again then."""
        self._thread.start()

    def wake(self) -> None:
        """Have `work` called now instead of at the end of its wait."""
        self._wake.set()

    def stop(self) -> None:
        """End after the call of `work` in progress. Does not block."""
        self._stopped.set()
        self._wake.set()

    def join(self, timeout_s: float | None = None) -> bool:
        """Wait until the thread has ended; True if it has, or was never started."""
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            self._work_until_stopped()
        finally:
            if self._on_end is not None:
                self._on_end()

    def _work_until_stopped(self) -> None:
        while not self._stopped.is_set():
            try:
                delay_s = self._work()
            except Exception as error:  # noqa: BLE001 - reported at once
                if not self._recover(error):
                    return
                continue
            if delay_s is None:
                return
            if self._backoff is not None:
                self._backoff.succeeded()
            self._wake.wait(delay_s)
            self._wake.clear()

    def _recover(self, failure: Exception) -> bool:
        """Report the failure and back off; False if the thread has to end. A process that is out of memory may be
        unable to report: it tries again after the pause."""
        while True:
            try:
                self._report(failure)
                is_reported = True
            except Exception:  # noqa: BLE001 - see above
                is_reported = False
            if self._backoff is None or self._stopped.wait(self._backoff.failed()):
                return False
            if is_reported:
                return True

    def _report(self, failure: Exception) -> None:
        self._log(failure)
        if self._counters is not None:
            self._counters.add("worker_failures")
        if self._on_failure is not None:
            self._on_failure(failure)

    def _log(self, failure: Exception) -> None:
        """Log the first failure of a cause, and while it repeats one a minute."""
        cause = _cause_of(failure)
        logged_at_s, unlogged = self._logged.get(cause, (-math.inf, 0))
        now_s = time.monotonic()
        if now_s - logged_at_s < LOG_AGAIN_S:
            self._logged[cause] = (logged_at_s, unlogged + 1)
            return
        if self._counters is None:
            logging.getLogger("flyball.engine").error("The thread %s failed.", self._thread.name, exc_info=failure)
        else:
            import structlog  # training processes do without it

            facts = {"thread": self._thread.name, "times": unlogged + 1, **self._context}
            structlog.get_logger().error("worker_failed", **facts, exc_info=failure)
        self._logged[cause] = (now_s, 0)


def _cause_of(failure: Exception) -> _Cause:
    """The exception's type, and the line that raised it. Messages would not do: they may contain numbers."""
    trace = failure.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None:
        return type(failure), "", 0
    return type(failure), trace.tb_frame.f_code.co_filename, trace.tb_lineno


def describe_failure(error: Exception) -> str:
    """An expected error's message. An unexpected one's type as well: it may have no message."""
    return str(error) if isinstance(error, FlyballError | OSError) else repr(error)
