"""Serves the API's routes for a state folder whose supervisor has ended: the same read models, without a port. Writes
nothing."""

from __future__ import annotations

import math
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn

from fastapi import FastAPI
from sqlalchemy import text

from flyball.contracts.clock import Clock
from flyball.contracts.cluster import JobState
from flyball.contracts.errors import Conflict
from services.api import problems
from services.api.acts import Acts, ApiStores
from services.api.goodput import GoodputReports
from services.api.routes import audit, history, jobs, observations, runs
from services.api.runs import Runs
from services.record.codec import plain
from services.rules.job_doing import Doing, JobDoing
from services.runtime.list_filters import JobFilter
from services.runtime.paging import Page
from services.store.decisions.audit_store import SqlAuditLog
from services.store.read.read_models import SqlReadModels
from services.store.reports.goodput_accounts import SqlGoodputAccounts
from services.store.sql.database import Database
from services.store.sql.events import SqlEventLog
from services.store.sql.lease import leader
from services.store.sql.left_state import LAST_SIGN_SQL
from services.store.sql.schema_upgrade import check

Json = dict[str, Any]
INTERRUPTED = Doing.INTERRUPTED.value
_FIRST, _ALL_JOBS = Page(), JobFilter()


def supervisor_ended_at(db: Database, *, is_known_dead: bool) -> float | None:
    """Return when the supervisor gave its last sign of life; None while one leads. Raises StateVersionMismatch unless
    the database has this release's schema, and does not upgrade it."""
    with db.read() as connection:
        check(connection, db.name)
        if not is_known_dead and leader(connection):
            return None
        return max(filter(None, connection.execute(text(LAST_SIGN_SQL)).one()), default=None)


class LeftReads(SqlReadModels):
    """Shows jobs that had not ended when their supervisor did as `interrupted`: nothing more is known of them."""

    def __init__(self, db: Database, ended_at: float | None) -> None:
        super().__init__(db)
        self._ended_at = ended_at

    def jobs(self, page: Page = _FIRST, *, open_only: bool = False, wanted: JobFilter = _ALL_JOBS) -> list[Json]:
        return [self._marked(job) for job in super().jobs(page, open_only=open_only, wanted=wanted)]

    def job(self, name: str) -> Json:
        return self._marked(super().job(name))

    def _marked(self, job: Json) -> Json:
        if self._ended_at is None or JobState(job["state"]).ended:
            return job
        at = datetime.fromtimestamp(self._ended_at, UTC)
        was = "waiting for hosts" if job["state"] == JobState.SUBMITTED else job["state"]
        message = f"was {was} when its supervisor ended at {at:%H:%M:%S} UTC"
        return job | {
            "state": INTERRUPTED,
            "doing": plain(JobDoing(Doing.INTERRUPTED, self._ended_at, 0.0, message)),
            "recorded_state": job["state"],
            "message": message,
            "since": self._ended_at,
            "supervisor_ended_at": self._ended_at,
        }


class _NoActs(Acts):
    """Refuses all changes: no supervisor is there to carry them out."""

    def __init__(self) -> None:
        pass

    async def carry_out(
        self, work: Callable[[ApiStores], tuple[int, Any]], *, dry_run: bool = False, status: int = 202
    ) -> NoReturn:
        raise Conflict("The supervisor of this state does not run, so jobs cannot be changed.", hint="`flyball ls`")


class _LeftAccounts(SqlGoodputAccounts):
    """As the supervisor stored them; what it had not read yet is read each time."""

    def save(self, job: str, version: int, position: int, document: bytes) -> None:
        pass


class _StoppedClock:
    """Its wall clock stands at the supervisor's end: the time after that is unknown, and must not count as loss."""

    def __init__(self, clock: Clock, ended_at: float) -> None:
        self.monotonic_s = clock.monotonic_s
        self._ended_at = ended_at

    def wall_s(self) -> float:
        return self._ended_at


def left_state_app(db: Database, clock: Clock, *, ended_at: float | None, simulations: Path) -> FastAPI:
    """Build the application. `ended_at`: the supervisor's end; None if one runs elsewhere on the same database.
    `simulations`: the folder of the simulator's results."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    problems.install(app, lambda _request, error: problems.problem_of(error))
    clock = clock if ended_at is None else _StoppedClock(clock, ended_at)
    reads = LeftReads(db, ended_at)
    accounts = _LeftAccounts(db)
    goodput = GoodputReports(events=SqlEventLog(db), reads=reads, accounts=accounts, clock=clock, patience_s=math.inf)
    app.include_router(jobs.router(_NoActs(), reads, clock))
    app.include_router(observations.router(reads, goodput))
    app.include_router(history.router(reads))
    app.include_router(runs.router(Runs(goodput, simulations)))
    app.include_router(audit.router(SqlAuditLog(db, clock)))
    return app
