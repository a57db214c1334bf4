"""The services of a cluster with a history, in this process, and what is measured of them."""

from __future__ import annotations

import asyncio
import os
import re
import statistics
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import httpx
from api_bench.database import drop, fill
from api_bench.rows import host, job
from sqlalchemy import func, select

from flyball.contracts.clock import SystemClock
from flyball.contracts.reports.signals import Signal, WorkerExited
from services.api.app import create_app
from services.api.auth import ACCESS
from services.api.goodput import GoodputReports
from services.assembly import Assembly
from services.controller.loop import ControllerLoop
from services.record.retention_rules import RetentionSettings
from services.rules.engine_keys import EngineKeyring
from services.rules.grant_seals import GrantSeals
from services.runtime.claim import PARTS
from services.runtime.health import Health
from services.runtime.http.auth import Authenticator
from services.runtime.process import favour_event_loop
from services.settings import Settings
from services.store.decisions.decision_store import SqlDecisionStore
from services.store.read.read_models import SqlReadModels
from services.store.reports.goodput_accounts import SqlGoodputAccounts
from services.store.retention.sweep import Sweeper
from services.store.sql import events, tables
from services.store.sql.events import SqlEventLog
from services.store.sql.schema_upgrade import migrate
from year_bench.rows import JOBS, all_rows

SECRET, HOLDER = "only-for-the-benchmark", "bench#1"
QUERIES = {
    "/v1/goodput": f"?job={job(0)}",
    "/v1/checkpoints": f"?job={job(0)}",
    "/goodput/run": f"?run=job:{job(0)}",
    "/v1/events": f"?newest=true&limit=200&job={job(0)}",
}
NAMES = {"job": job(0), "host_id": host(0)}
STATUS = ("/v1/jobs?open=true", "/v1/incidents?state=open&limit=50", "/v1/host-map", "/v1/incidents?limit=1")
STATUS += ("/v1/decisions?limit=5", "/v1/orders", f"/v1/jobs/{job(0)}/recoverability")
OTHERS = re.compile(r"stream|logs|commands|departure|simulations|static|docs|session|login|comparison|_id}")
SWEPT_AFTER_DAYS = 0.01  # all but what is needed


class Times(NamedTuple):
    ms: float
    cpu_ms: float  # of the processor, in this process


class World:
    """Fills an empty database; drops its tables at the end. `years`: how much history there is."""

    def __init__(self, folder: Path, database_url: str, years: float) -> None:
        favour_event_loop(SystemClock())
        self._clock = SystemClock()
        self._seals = GrantSeals("a benchmark")
        settings = Settings(state_dir=folder, database_url=database_url, max_requests_per_s=0.0)
        self._assembly = Assembly(settings, frozenset(PARTS), self._clock, self._seals, EngineKeyring("a benchmark"))
        self._db = self._assembly.db
        migrate(self._db)
        fill(self._db, all_rows(years, self._clock.wall_s()))
        self._assembly.build()
        self._loop = ControllerLoop(
            **{"store": SqlDecisionStore(self._db, self._clock, self._seals), "bus": self._assembly.messaging.bus},
            **{"wakeup": self._assembly.messaging.wakeup, "clock": self._clock, "holder": HOLDER},
            settings=settings.policy_settings,
            lease_ttl_s=600.0,
        )
        self._killed = 0

    def __enter__(self) -> World:
        return self

    def __exit__(self, *_: object) -> None:
        drop(self._db)
        self._assembly.close()

    def measure(self, requests: int, kills: int) -> dict[str, Any]:
        self._bring_accounts_up_to_date()
        parts: tuple[Callable[[], dict[str, Any]], ...] = (
            lambda: asyncio.run(self._requests(requests)),
            lambda: {"round": self._rounds(requests)},
            lambda: {"kill_ms": _spread([self._kill_ms() for _ in range(kills)])},
            lambda: self._sweep(kills) | {"load_1m": os.getloadavg()[0]},
        )
        found: dict[str, Any] = {}
        for part in parts:
            measured = part()
            print(measured, file=sys.stderr)
            found |= measured
        return found

    def _bring_accounts_up_to_date(self) -> None:
        """As the supervisor does all the time."""
        reads, accounts = SqlReadModels(self._db), SqlGoodputAccounts(self._db)
        reports = GoodputReports(
            events=SqlEventLog(self._db), reads=reads, accounts=accounts, clock=self._clock, patience_s=1e9
        )
        reports.report(job(0))
        reports.store()

    async def _requests(self, requests: int) -> dict[str, Any]:
        health = Health(loops=(), checks={}, clock=self._clock)
        app = create_app(self._assembly.dependencies(Authenticator(SECRET, clock=self._clock), health))
        headers = {"Authorization": f"Bearer {SECRET}"}
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://here", headers=headers) as client:

            async def ms(paths: Sequence[str]) -> Times:
                began = _Began()
                for path in paths:
                    (await client.get(path, timeout=600.0)).raise_for_status()
                return began.times()

            await ms(["/healthz"])  # makes the application ready
            first = await ms([f"/v1/goodput?job={job(0)}"])  # that the cost of an incident is a part of
            paths = {path: await _median(lambda p=path: ms([p]), requests) for path in addresses()}
            status = await _median(lambda: ms(STATUS), requests)
            return {"first_report": first, "paths": paths, "status": status}

    def _rounds(self, count: int) -> Times:
        times = []
        for _ in range(count):
            with self._db.write() as connection:
                events.append(connection, [])
            began = _Began()
            self._loop.run_once()
            times.append(began.times())
        return _median_of(times)

    def _kill_ms(self) -> float:
        """Kill the rank of the next job, and wait for the decision about it."""
        self._killed += 1
        number, now = JOBS - self._killed, self._clock.wall_s()
        body = WorkerExited(
            **{"job": job(number), "generation": 1, "rank": 0, "pid": 4000, "exit_code": None, "signal_number": 9},
            last_step=9,
        )
        before = self._decisions(number)
        began_s = time.perf_counter()
        self._assembly.messaging.bus.publish([Signal(host(number), f"inc-{number}", 10**9 + self._killed, now, body)])
        while self._decisions(number) == before:
            self._loop.run_once()
            if time.perf_counter() - began_s > 60.0:
                raise TimeoutError(f"nothing was decided about {job(number)}")
        return (time.perf_counter() - began_s) * 1000.0

    def _decisions(self, number: int) -> int:
        query = select(func.max(tables.decisions.c.number)).where(tables.decisions.c.job == job(number))
        with self._db.read() as connection:
            return connection.scalar(query) or 0

    def _sweep(self, kills: int) -> dict[str, Any]:
        """Sweep almost everything, and kill meanwhile."""
        ages = dict.fromkeys(("detail_days", "history_days", "audit_days", "dead_host_days"), SWEPT_AFTER_DAYS)
        sweeper = Sweeper(self._db, RetentionSettings(**ages), self._clock, HOLDER)
        swept: list[int] = []
        ended = threading.Event()

        def sweep() -> None:
            try:
                swept.extend(sweeper.sweep(self._clock.wall_s()))
            finally:
                ended.set()

        began_s = time.perf_counter()
        thread = threading.Thread(target=sweep)
        thread.start()
        times_ms = []
        for _ in range(kills):
            times_ms.append(self._kill_ms())
            ended.wait(0.2)
        within = not ended.is_set()
        thread.join()
        figures = {"rows": sum(swept), "transactions": len(swept), "seconds": round(time.perf_counter() - began_s, 1)}
        return {"kill_in_sweep_ms": _spread(times_ms), "sweep": figures | {"outlasted_the_kills": within}}


def addresses() -> list[str]:
    """Each list and page that a person can ask for, of one job and one host."""
    return [
        re.sub(r"{(\w+)}", lambda found: NAMES[found[1]], path) + QUERIES.get(path, "")
        for method, path in ACCESS
        if method == "GET" and not OTHERS.search(path.replace("{host_id}", "host"))
    ]


class _Began:
    def __init__(self) -> None:
        self._began = time.perf_counter(), time.process_time()

    def times(self) -> Times:
        now = time.perf_counter(), time.process_time()
        return Times(*(round((end - start) * 1000.0, 2) for start, end in zip(self._began, now, strict=True)))


async def _median(measure: Callable[[], Awaitable[Times]], count: int) -> Times:
    return _median_of([await measure() for _ in range(count + 1)][1:])


def _median_of(times: Sequence[Times]) -> Times:
    return Times(*(round(statistics.median(each), 2) for each in zip(*times, strict=True)))


def _spread(times_ms: Sequence[float]) -> dict[str, float]:
    p99 = statistics.quantiles(times_ms, n=100, method="inclusive")[98] if len(times_ms) > 1 else times_ms[0]
    found = {"p50": statistics.median(times_ms), "p99": p99, "longest": max(times_ms)}
    return {name: round(ms, 1) for name, ms in found.items()}
