"""Data for users, ready for JSON, one snapshot per call.

Times are wall-clock seconds, null if not reached. Steps are -1 if there is none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from sqlalchemy import Connection

from flyball.contracts.errors import NotFound
from services.record.codec import number_of
from services.runtime.paging import Page
from services.store.read import read_history, read_state
from services.store.sql.database import Database

Json = dict[str, Any]
T = TypeVar("T")
_FIRST = Page()


class SqlReadModels:
    """The data of the API, the live page and the command line. Thread-safe."""

    def __init__(self, db: Database) -> None:
        self._db = db

    def jobs(self, page: Page = _FIRST, *, open_only: bool = False) -> list[Json]:
        """Return a page of all jobs, or of those that have not ended, oldest first."""
        return self._read(lambda c: read_state.jobs(c, page=page, open_only=open_only))

    def job(self, name: str) -> Json:
        """Return one job: spec, state, generation, and each rank with host, step and phase. Raises NotFound."""
        return _only(self._read(lambda c: read_state.jobs(c, name)), f"job {name!r}", "`flyball status` lists the jobs")

    def hosts(self, page: Page = _FIRST, *, also_left: bool = False) -> list[Json]:
        """Return a page of the hosts that have reported, by name; the first page has the last of them. `also_left`:
        includes those that left in an orderly way."""
        return self._read(lambda c: read_state.hosts(c, page=page, also_left=also_left))

    def host(self, host_id: str) -> Json:
        """Return one host. Raises NotFound."""
        return _only(
            self._read(lambda c: read_state.hosts(c, host_id)), f"host {host_id!r}", "`flyball status` lists the hosts"
        )

    def checkpoints(self, job: str) -> Json:
        """Return the verified copies by tier, and the recovery point. Raises NotFound."""
        return _only(
            self._read(lambda c: read_state.checkpoints(c, job)), f"job {job!r}", "`flyball status` lists the jobs"
        )

    def incidents(self, job: str | None, page: Page = _FIRST) -> list[Json]:
        """Return a page of incidents, oldest first: cause, times, signals, decisions, lost steps, sources of restores,
        and the timeline."""
        return self._read(lambda c: read_history.incidents(c, job, page=page))

    def decisions(self, job: str | None, page: Page = _FIRST) -> list[Json]:
        """Return a page of decisions with their reasons, oldest first."""
        return self._read(lambda c: read_history.decisions(c, job, page))

    def decision(self, decision_id: str) -> Json:
        """Return one decision: the incident, the signals before it, its action with phases, commands and answers.
        Raises NotFound."""
        number = number_of(decision_id)
        return _only(
            self._read(lambda c: read_history.decision(c, number)),
            f"decision {decision_id!r}",
            "`flyball status` lists the newest decisions",
        )

    def _read(self, work: Callable[[Connection], T]) -> T:
        with self._db.read() as connection:
            return work(connection)


def _only(found: Sequence[Json], what: str, hint: str) -> Json:
    if not found:
        raise NotFound(f"There is no {what}.", hint=hint)
    return found[0]
