"""The hosts for users, a page at a time."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import msgspec
from sqlalchemy import Connection, Row, Select, func, select

from flyball.contracts.cluster import HostState
from flyball.contracts.reports.drains import DrainState
from flyball.contracts.reports.signals import EngineStatus
from services.controller.round.view import StandingCondition
from services.record.codec import load, plain
from services.runtime.list_filters import HostFilter
from services.runtime.paging import Page
from services.sensor.rules.placed import GivenRanks
from services.store.decisions.check_store import load_checks
from services.store.decisions.condition_store import load_conditions
from services.store.read.read_state import moment
from services.store.read.readable_pages import readable_page
from services.store.reports import vouching
from services.store.sql import tables
from services.store.sql.set_aside import readable, worded
from services.store.sql.shared_reads import HAS_ENDED, GivenPlans, open_incidents

Json = dict[str, Any]
_COLUMNS = tables.hosts.c
_OF = tables.drains.c.host_id == _COLUMNS.host_id
_FIRST = Page()
_ALL_HOSTS = HostFilter()
_MAX_NAMED = 1000  # hosts that one query names

# The columns that are shown. A statement is put together for each request: not by parts that are always the same.
_SHOWN = (
    select(
        *(_COLUMNS.host_id, _COLUMNS.state, _COLUMNS.since, _COLUMNS.reason, _COLUMNS.address),
        *(_COLUMNS.failure_domain, _COLUMNS.fabric, _COLUMNS.memory_bytes, _COLUMNS.daemon_version, _COLUMNS.pid),
        *(_COLUMNS.joined_at, _COLUMNS.left_at, _COLUMNS.interval_s, _COLUMNS.preempt_deadline_at),
        *(_COLUMNS.engine_address, _COLUMNS.engine, _COLUMNS.copies, tables.host_reports.c.received_at),
    )
    .join(tables.host_reports, tables.host_reports.c.host_id == _COLUMNS.host_id)
    .order_by(_COLUMNS.host_id.desc())
)


class _Sized(msgspec.Struct, frozen=True, gc=False):
    """What is shown here of a copy."""

    size_bytes: int


def hosts(
    connection: Connection,
    host_id: str | None = None,
    page: Page = _FIRST,
    *,
    also_left: bool = False,
    wanted: HostFilter = _ALL_HOSTS,
    given: GivenPlans | None = None,
) -> list[Json]:
    """Return a page of the hosts by name, or the one with that name, each with the job that has ranks on it. Omits
    hosts that left in an orderly way, unless `also_left`."""
    plans = given or GivenPlans()  # decoding the plans of thousands of hosts takes long, and they never change
    open_jobs = connection.execute(select(tables.jobs.c.job, tables.jobs.c.generation).where(~HAS_ENDED)).all()
    placed = {row.job: plans.read(connection, row.job, row.generation) for row in open_jobs}
    query = _SHOWN
    if host_id is not None:
        query = query.where(_COLUMNS.host_id == host_id)
    elif not also_left:
        # Named are only those that left with ranks, which are few: a name is a parameter, and databases limit these.
        left = connection.scalars(select(_COLUMNS.host_id).where(_COLUMNS.left_at > 0.0))
        missed = sorted(name for name in left if any(name in ranks_of for ranks_of in placed.values()))
        query = query.where((_COLUMNS.left_at == 0.0) | _COLUMNS.host_id.in_(missed))
    if wanted.states:
        query = query.where(_COLUMNS.state.in_([state.value for state in wanted.states]))
    if wanted.failure_domain:
        query = query.where(_COLUMNS.failure_domain == wanted.failure_domain)
    if wanted.host_ids:
        query = query.where(_COLUMNS.host_id.in_(wanted.host_ids))
    of_job = placed.get(wanted.job, {}) if wanted.job else None
    drains = _drains(connection)

    def items_of(rows: Sequence[Row[Any]]) -> list[Json | None]:
        names = [row.host_id for row in rows]
        conditions, checks = load_conditions(connection, names), load_checks(connection, names)
        received_at = vouching.received_at(connection, names)

        def whole(row: Row[Any]) -> Json:
            return (
                _host(row, *_place(placed, row.host_id), received_at.get(row.host_id, 0.0))
                | {"drain": drains.get(row.host_id), "conditions": [*map(_condition, conditions.get(row.host_id, ()))]}
                | {"check": plain(checks[row.host_id]) if row.host_id in checks else None}
            )

        return [readable("hosts", row.host_id, whole, row) for row in rows]

    def rows_of(page: Page) -> Sequence[Row[Any]]:
        return _last_rows(connection, query, page, of_job)[::-1]

    return readable_page(page, rows_of, lambda row: str(row.host_id), items_of)


def _last_rows(connection: Connection, query: Select[Any], page: Page, of_job: GivenRanks | None) -> Sequence[Row[Any]]:
    """Return the last `page.limit` rows, the last one first. `of_job`: only of the hosts that a job has."""
    if page.before:
        query = query.where(_COLUMNS.host_id < page.before)
    if of_job is None:
        return connection.execute(query.limit(page.limit)).all()
    found: list[Row[Any]] = []
    for names in _from_the_end(sorted(name for name in of_job if not page.before or name < page.before), page.limit):
        missing = page.limit - len(found)
        if missing == 0:
            break
        found += connection.execute(query.where(_COLUMNS.host_id.in_(names)).limit(missing)).all()
    return found


def _from_the_end(names: Sequence[str], first: int) -> Iterator[Sequence[str]]:
    """Split names into parts, from the end: a job has thousands of hosts, and a page is mostly the first part."""
    end, size = len(names), min(first, _MAX_NAMED)
    while end > 0:
        yield names[max(0, end - size) : end]
        end, size = end - size, _MAX_NAMED


def _place(placed: dict[str, GivenRanks], host_id: str) -> tuple[str, Collection[int]]:
    """Return the job that has ranks on a host, and these ranks."""
    return next(((job, given[host_id]) for job, given in reversed(placed.items()) if host_id in given), ("", ()))


def host_states(connection: Connection) -> dict[str, int]:
    """Return how many hosts that have not left are in each state."""
    columns = tables.hosts.c
    query = select(columns.state, func.count()).where(columns.left_at == 0.0).group_by(columns.state)
    found = {str(state): int(count) for state, count in connection.execute(query)}
    return {state.value: found.get(state, 0) for state in HostState}


def _condition(standing: StandingCondition) -> Json:
    shown: Json = plain(standing.condition)
    return {**shown, "until": moment(standing.condition.until), "is_overruled": standing.is_overruled}


def _drains(connection: Connection) -> dict[str, Json]:
    """Return host -> its drain request and state. A host is drained once its ranks train elsewhere."""
    drains, host_state = tables.drains, _COLUMNS.state.label("host_state")
    found = connection.execute(select(drains, host_state).join(tables.hosts, _OF)).all()
    rows = worded("drains", found, "{host_id}", state=DrainState)
    if not rows:
        return {}
    moving = {incident.host_id for incident in open_incidents(connection)}
    return {
        row.host_id: {
            "state": "drained"
            if row.state == DrainState.REQUESTED and row.host_state == HostState.CORDONED and row.host_id not in moving
            else row.state,
            "requested_at": row.requested_at,
            "deadline_at": row.deadline_at,
            "reason": row.reason,
            "message": row.message,
        }
        for row in rows
    }


def _host(row: Row[Any], job: str, ranks: Collection[int], received_at: float) -> Json:
    engine: EngineStatus = load(row.engine, EngineStatus)
    copies: list[_Sized] = load(row.copies, list[_Sized])
    return {
        "host_id": row.host_id,
        "state": HostState(row.state).value,
        "since": row.since,
        "reason": row.reason,
        "job": job,
        "ranks": sorted(ranks),
        "address": row.address,
        "failure_domain": row.failure_domain,
        "fabric": row.fabric,
        "memory_bytes": row.memory_bytes,
        "daemon_version": row.daemon_version,
        "daemon_pid": row.pid,
        "joined_at": row.joined_at,
        "left_at": moment(row.left_at),
        "last_report_at": max(row.received_at, received_at),
        "report_interval_s": row.interval_s,
        "preempt_deadline_at": moment(row.preempt_deadline_at),
        "engine_address": row.engine_address,
        "engine_alive": engine.alive,
        "unreachable_peers": list(engine.unreachable_peers),
        "transports": plain(engine.transports),
        "counters": dict(engine.counters),
        "copies": len(copies),
        "copies_size_bytes": sum(copy.size_bytes for copy in copies),
    }
