"""What a worker thread survives, and when it ends."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
from structlog.testing import capture_logs

from ckpt_engine import worker_thread
from ckpt_engine.counters import Counters
from ckpt_engine.worker_thread import LONGEST_RETRY_S, WorkerThread

TIMEOUT_S = 60.0


def script(*results: float | Exception | None) -> Callable[[], float | None]:
    """A `work` that returns or raises these, one per call."""
    left = iter(results)

    def work() -> float | None:
        result = next(left)
        if isinstance(result, Exception):
            raise result
        return result

    return work


def test_it_works_until_there_is_nothing_left() -> None:
    ended = threading.Event()
    worker = WorkerThread("a", script(0.0, 0.0, None), on_end=ended.set)
    worker.start()
    assert ended.wait(TIMEOUT_S)
    assert worker.join(TIMEOUT_S) and not worker.is_alive


def test_a_failure_is_counted_and_the_work_goes_on() -> None:
    counters, failures = Counters(), list[Exception]()
    work = script(KeyError("first"), 0.0, MemoryError(), None)
    worker = WorkerThread("a", work, counters=counters, on_failure=failures.append, retry_s=0.001)
    worker.start()
    assert worker.join(TIMEOUT_S)
    assert [type(failure) for failure in failures] == [KeyError, MemoryError]
    assert counters.snapshot() == {"worker_failures": 2}


def test_a_failure_that_cannot_be_reported_is_reported_later() -> None:
    reported: list[Exception] = []
    attempts = 0

    def report(failure: Exception) -> None:
        nonlocal attempts
        attempts += 1
        if attempts < 3:
            raise MemoryError
        reported.append(failure)

    worker = WorkerThread("a", script(KeyError("it"), None), on_failure=report, retry_s=0.001)
    worker.start()
    assert worker.join(TIMEOUT_S)
    assert [type(failure) for failure in reported] == [KeyError]


def test_a_failure_is_logged_with_its_context() -> None:
    with capture_logs() as lines:
        worker = WorkerThread("a", script(KeyError("it")), counters=Counters(), context={"rank": 3}, retry_s=None)
        worker.start()
        assert worker.join(TIMEOUT_S)
    assert [(line["event"], line["thread"], line["rank"]) for line in lines] == [("worker_failed", "a", 3)]


def test_a_failure_that_repeats_is_logged_once_for_each_cause() -> None:
    counters = Counters()
    work = script(ValueError(1), KeyError(1), ValueError(2), KeyError(2), None)
    with capture_logs() as lines:
        worker = WorkerThread("a", work, counters=counters, retry_s=1e-6)
        worker.start()
        assert worker.join(TIMEOUT_S)
    assert [str(line["exc_info"]) for line in lines] == ["1", "1"]
    assert counters.snapshot() == {"worker_failures": 4}


def test_a_failure_that_goes_on_is_logged_again_with_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    counters = Counters()

    def fail() -> float | None:
        failures = counters.snapshot().get("worker_failures", 0)
        if failures == 3:
            monkeypatch.setattr(worker_thread, "LOG_AGAIN_S", -1.0)
        if failures == 4:
            return None
        raise KeyError(failures)

    with capture_logs() as lines:
        worker = WorkerThread("a", fail, counters=counters, retry_s=1e-6)
        worker.start()
        assert worker.join(TIMEOUT_S)
    assert [(str(line["exc_info"]), line["times"]) for line in lines] == [("0", 1), ("3", 3)]


def test_the_pause_doubles_while_it_fails_and_starts_anew_after_a_success() -> None:
    pauses: list[float] = []

    class Stopped(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            assert timeout is not None
            pauses.append(timeout)
            return False

    failure = KeyError("it")
    work = script(*[failure] * 8, 0.0, failure, None)
    worker = WorkerThread("a", work, stopped=Stopped(), counters=Counters(), retry_s=0.05)
    worker.start()
    assert worker.join(TIMEOUT_S)
    assert pauses == [0.05, 0.1, 0.2, 0.4, 0.8, 1.6, LONGEST_RETRY_S, LONGEST_RETRY_S, 0.05]


def test_without_a_retry_a_failure_ends_it(caplog: pytest.LogCaptureFixture) -> None:
    worker = WorkerThread("lonely", script(KeyError("it")), retry_s=None)
    worker.start()
    assert worker.join(TIMEOUT_S)
    assert "lonely" in caplog.text


def test_it_is_woken_and_stopped_out_of_a_long_wait() -> None:
    called = threading.Semaphore(0)

    def work() -> float:
        called.release()
        return 3600.0

    worker = WorkerThread("a", work)
    worker.start()
    assert called.acquire(timeout=TIMEOUT_S)
    worker.wake()
    assert called.acquire(timeout=TIMEOUT_S)
    worker.stop()
    assert worker.stopping and worker.join(TIMEOUT_S)


def test_a_stop_cuts_the_pause_after_a_failure_short() -> None:
    failed = threading.Event()
    worker = WorkerThread("a", script(KeyError("it")), on_failure=lambda failure: failed.set(), retry_s=3600.0)
    worker.start()
    assert failed.wait(TIMEOUT_S)
    worker.stop()
    assert worker.join(TIMEOUT_S)


def test_one_that_was_never_started_is_not_waited_for() -> None:
    assert WorkerThread("a", lambda: None).join()
