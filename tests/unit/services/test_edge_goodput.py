"""Goodput of the API: the requested report, with bounded work."""

from __future__ import annotations

import threading
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.jobs.goodput_runs import START, interrupted_run

from flyball.contracts.errors import NotFound, UsageError
from flyball.contracts.events import Event, EventKind
from goodput.account.options import AccountOptions
from goodput.calculator import calculate
from goodput.show.report import to_json
from services.api import goodput
from services.api.goodput import FRESH_S, FRESH_SHARE, MAX_AT_ONCE, PATIENCE_S, Asked, GoodputReports, ReportsBusy
from services.api.runs import Runs
from services.runtime.http.problem_details import details_of

EVENTS = interrupted_run(ended=False)
NOW = EVENTS[-1].at + 10.0


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def monotonic_s(self) -> float:
        return self.now_s

    def wall_s(self) -> float:
        return NOW


class Log:
    """An event log. Some jobs' events take long to read."""

    def __init__(self, events: list[Event], clock: Clock) -> None:
        self.events = list(events)
        self.clock = clock
        self.read_after: list[int] = []
        self.read_s: dict[str, float] = {}
        self.goes_on = threading.Event()
        self.goes_on.set()

    def last(self) -> int:
        return len(self.events)

    def history(self, job: str, after: int, limit: int, of_every_job: object) -> list[tuple[int, Event]]:
        self.read_after.append(after)
        self.clock.now_s += self.read_s.get(job, 0.0)
        assert self.goes_on.wait(60.0)
        numbered = enumerate(self.events, 1)
        return [(number, event) for number, event in numbered if number > after and event.job in (job, "")][:limit]


class Jobs:
    def __init__(self, *names: str) -> None:
        self.names = names or ("llama",)

    def job(self, name: str) -> dict[str, Any]:
        return {"ended_at": None}

    def jobs(self, page: object, *, open_only: bool, wanted: object) -> list[dict[str, Any]]:
        return [{"job": name} for name in self.names]


class Accounts:
    """What is stored."""

    def __init__(self) -> None:
        self.documents: dict[tuple[str, int], bytes] = {}
        self.found: dict[str, float] = {}

    def load(self, job: str, version: int) -> bytes | None:
        return self.documents.get((job, version))

    def save(self, job: str, version: int, position: int, document: bytes) -> None:
        self.documents[job, version] = document

    def ratios(self) -> dict[str, float]:
        return self.found

    def save_ratio(self, job: str, ratio: float) -> None:
        self.found[job] = ratio


class StopsOnceThereIsOne(threading.Event):
    """Set once a ratio is stored; nobody waits for it."""

    def __init__(self, accounts: Accounts) -> None:
        super().__init__()
        self.accounts = accounts

    def wait(self, timeout: float | None = None) -> bool:
        return self.is_set()

    def is_set(self) -> bool:
        return bool(self.accounts.found)


def reports_of(events: list[Event], *jobs: str) -> tuple[GoodputReports, Log, Clock]:
    clock = Clock()
    log = Log(events, clock)
    reports = GoodputReports(events=log, reads=Jobs(*jobs), accounts=Accounts(), clock=clock)  # type: ignore[arg-type]
    return reports, log, clock


def test_the_default_is_the_report_up_to_now() -> None:
    reports, _, _ = reports_of(EVENTS)
    assert reports.report("llama") == to_json(calculate(EVENTS, now=NOW))


def test_a_report_is_of_the_newest_run_and_with_all_runs_of_those_that_it_resumed() -> None:
    pause_s = 800.0
    first = interrupted_run(interruptions=1, steps_between=20)
    again_at = first[-1].at + pause_s
    second = [
        msgspec.structs.replace(event, generation=event.generation + 3) if event.generation > 0 else event
        for event in interrupted_run(interruptions=0, steps_between=20, start=again_at)
    ]
    reports, _, _ = reports_of([*first, *second])
    newest, all_of_them = reports.report("llama"), reports.report("llama", Asked(all_runs=True))
    assert newest["started_at"] == again_at and newest["elapsed_s"] == pytest.approx(second[-1].at - again_at)
    assert (newest["interruptions"], newest["not_running_s"]) == (0, 0.0)
    alone = to_json(calculate(first))
    assert all_of_them["elapsed_s"] == pytest.approx(alone["elapsed_s"] + newest["elapsed_s"])
    assert all_of_them["not_running_s"] == pytest.approx(pause_s)
    for category in ("shutdown", "scheduling"):
        both = [one["seconds_by_category"].get(category, 0.0) for one in (alone, newest, all_of_them)]
        assert both[2] == pytest.approx(both[0] + both[1]), category
    # What an incident of an earlier run cost is asked of all.
    runs = Runs(reports, Path("none"))
    costs = [runs.of_job("llama", AccountOptions(), all_runs=every)["incidents"] for every in (False, True)]
    assert [len(one) for one in costs] == [0, 1]


def test_the_query_is_respected() -> None:
    reports, _, _ = reports_of(EVENTS)
    options = AccountOptions(gpu_hour_price=2.0, window_s=600.0, from_at=START + 1000.0, to_at=START + 5000.0)
    found = reports.report("llama", Asked(options, timeline_bins=20))
    timeline = found.pop("timeline")
    assert found == to_json(calculate(EVENTS, now=NOW, options=options))
    assert len(timeline) == 20
    assert found["cost"] == pytest.approx(2.0 * 8 * 4000.0 / 3600.0)
    assert sum(b["seconds_by_category"].get("useful", 0.0) for b in timeline) == pytest.approx(
        found["seconds_by_category"]["useful"]
    )


def test_a_repeated_request_is_free_for_a_moment_and_then_calculated() -> None:
    reports, log, clock = reports_of(EVENTS[:40])
    first = reports.report("llama")
    reads = len(log.read_after)
    log.events = list(EVENTS)
    assert reports.report("llama") is first
    assert len(log.read_after) == reads
    assert reports.report("llama", Asked(timeline_bins=5))["steps"] != first["steps"]
    assert 0 not in log.read_after[1:], "nothing is read again"
    clock.now_s = FRESH_S + 0.1
    assert reports.report("llama") == to_json(calculate(EVENTS, now=NOW))


def test_what_took_long_is_fresh_for_longer() -> None:
    """Otherwise a client that polls would keep the supervisor calculating."""
    reports, log, clock = reports_of(EVENTS)
    log.read_s["llama"] = 3.0
    first = reports.report("llama")
    took_s = clock.now_s
    assert took_s == 9.0, "three pages"
    clock.now_s += FRESH_SHARE * took_s
    assert reports.report("llama") is first
    clock.now_s += 0.1
    assert reports.report("llama") is not first


def test_the_number_of_kept_reports_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(goodput, "MAX_REPORTS_KEPT", 2)
    reports, _, _ = reports_of(EVENTS[:40])
    first = reports.report("llama")
    second = reports.report("llama", Asked(timeline_bins=1))
    assert reports.report("llama") is first
    reports.report("llama", Asked(timeline_bins=2))
    assert reports.report("llama", Asked(timeline_bins=1)) is second
    assert reports.report("llama") is not first


def test_who_would_wait_too_long_is_refused_at_once() -> None:
    reports, log, _ = reports_of(EVENTS)
    log.goes_on.clear()
    with ThreadPoolExecutor(MAX_AT_ONCE + 1) as clients:
        asked = [clients.submit(reports.report, "llama") for _ in range(MAX_AT_ONCE + 1)]
        try:
            (refused,), others = wait(asked, timeout=60.0, return_when=FIRST_COMPLETED)
        finally:
            log.goes_on.set()
        error = refused.exception()
        assert isinstance(error, ReportsBusy)
        problem = details_of(error)
        assert (problem.status, problem.headers) == (503, {"Retry-After": "2"})
        expected = to_json(calculate(EVENTS, now=NOW))
        assert [answer.result(60.0) for answer in others] == [expected] * MAX_AT_ONCE
    assert reports.report("llama") == expected, "there is room again"


def test_a_request_for_a_fresh_report_waits_for_nobody() -> None:
    reports, log, _ = reports_of(EVENTS[:40])
    expected = reports.report("llama")
    log.goes_on.clear()
    with ThreadPoolExecutor(MAX_AT_ONCE + 1) as clients:
        asked = [clients.submit(reports.report, "llama", Asked(timeline_bins=n + 1)) for n in range(MAX_AT_ONCE + 1)]
        try:
            wait(asked, timeout=60.0, return_when=FIRST_COMPLETED)  # this one is refused: the others are waiting
            assert reports.report("llama") is expected
        finally:
            log.goes_on.set()


def test_an_account_that_is_not_kept_goes_on_from_where_it_was_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(goodput, "MAX_ACCOUNTS_KEPT", 1)
    one, other = (interrupted_run(job=job, interruptions=1, steps_between=20) for job in ("a", "b"))
    reports, log, clock = reports_of([*one, *other])
    for job in ("a", "b", "a", "b"):
        clock.now_s += FRESH_S + 0.1
        assert reports.report(job) == to_json(calculate([*one, *other], now=NOW, job=job))
    assert log.read_after.count(0) == 2, "each is read once"


def test_who_asks_for_a_long_log_is_told_to_come_back_and_it_goes_on_from_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(goodput, "PAGE", 10)
    reports, log, _ = reports_of(EVENTS)
    log.read_s["llama"] = PATIENCE_S + 1.0
    with pytest.raises(ReportsBusy, match=f"still being read: 10 of {len(EVENTS)}"):
        reports.report("llama")
    log.read_s.clear()
    assert reports.report("llama") == to_json(calculate(EVENTS, now=NOW))
    assert log.read_after[:2] == [0, 10]


def test_a_ratio_is_stored_for_metrics_without_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(goodput, "RATIO_INTERVAL_S", 0.0)
    monkeypatch.setattr(goodput, "PAGE", 10)
    reports, _, _ = reports_of(EVENTS)
    accounts = reports._stored
    assert isinstance(accounts, Accounts)
    reports.run(StopsOnceThereIsOne(accounts))
    assert accounts.ratios() == {"llama": calculate(EVENTS, now=NOW).goodput}
    assert accounts.documents, "and so is the account, at the end"


def test_a_job_whose_account_fails_keeps_no_other_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(goodput, "RATIO_INTERVAL_S", 0.0)
    of_no_job = msgspec.structs.replace(EVENTS[0], kind=EventKind.CONTROLLER_ELECTED, job="")
    reports, _, _ = reports_of([of_no_job, *EVENTS], "nothing-of-its-own", "llama")
    accounts = reports._stored
    assert isinstance(accounts, Accounts)
    reports.run(StopsOnceThereIsOne(accounts))
    assert accounts.ratios().keys() == {"llama"}


def test_an_impossible_query_is_refused() -> None:
    with pytest.raises(UsageError):
        AccountOptions(from_at=10.0, to_at=5.0)
    reports, _, _ = reports_of([])
    with pytest.raises(NotFound):
        reports.report("llama")
