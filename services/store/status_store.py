"""The sensor's side of the database: what daemons report of their hosts, workers and copies."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from sqlalchemy import Connection, select, update

from flyball.contracts.checkpoints import Tier
from flyball.contracts.cluster import HostState, JobState
from flyball.contracts.decisions import GenerationPlan
from flyball.contracts.events import Event, EventKind
from flyball.contracts.signals import Report
from services.store import events, report_events
from services.store.codec import dump, load
from services.store.database import Database
from services.store.report_events import RankKey, RankRow
from services.store.tables import generations, hosts, jobs, persistent_copies, ranks, watermarks
from services.store.upsert import upsert

LATE_S = 30.0  # a report that much older than the newest came late; older still, and the host's clock was set back

_FACTS = (
    "address",
    "failure_domain",
    "engine_address",
    "free_port",
    "daemon_version",
    "pid",
    "incarnation",
    "sent_at",
    "last_report_at",
    "interval_s",
    "engine",
    "workers",
    "copies",
)


class SqlStatusStore:
    """Thread-safe; any number of sensors may write."""

    def __init__(self, db: Database) -> None:
        self._db = db

    def record_reports(self, reports: Sequence[tuple[Report, float]]) -> None:
        """Store what (report, received_at) pairs say, in one transaction: the newest facts of each host, the newest
        status of each rank, and an event for every step, mark and restore that is new.

        A report that comes twice changes nothing; one that comes late adds its steps and leaves newer facts alone.
        What it says of jobs and generations that were never granted is ignored.
        """
        if reports:
            self._db.transact(lambda connection: _record(connection, reports), durable=False)

    def committed(self, incarnations: Iterable[str]) -> dict[str, int]:
        """For each incarnation that is known: every signal up to this seq is committed."""
        wanted = sorted(set(incarnations))
        if not wanted:
            return {}
        query = select(watermarks.c.incarnation, watermarks.c.seq).where(watermarks.c.incarnation.in_(wanted))
        with self._db.read() as connection:
            return {row.incarnation: row.seq for row in connection.execute(query)}

    def hosts_with_placement(self) -> dict[str, float]:
        """The hosts on which workers of running jobs should be -> when any sensor last heard of each (wall clock)."""
        query = (
            select(generations.c.plan)
            .join(jobs, (jobs.c.job == generations.c.job) & (jobs.c.generation == generations.c.generation))
            .where(jobs.c.state == JobState.RUNNING.value)
        )
        with self._db.read() as connection:
            plans: list[GenerationPlan] = [load(document, GenerationPlan) for document in connection.scalars(query)]
            heard_at = {
                row.host_id: row.last_report_at
                for row in connection.execute(select(hosts.c.host_id, hosts.c.last_report_at))
            }
        named = sorted({host.host_id for plan in plans for host in plan.hosts})
        return {host_id: heard_at.get(host_id, 0.0) for host_id in named}


def _record(connection: Connection, reports: Sequence[tuple[Report, float]]) -> None:
    known_hosts = _known_hosts(connection, reports)
    current: dict[str, tuple[Report, float]] = {}
    fresh: list[tuple[Report, float]] = []
    for report, received_at in reports:
        host_id = report.facts.host_id
        incarnation, sent_at = known_hosts.get(host_id, ("", 0.0))
        if report.incarnation == incarnation and report.sent_at == sent_at:
            continue
        fresh.append((report, received_at))
        is_late = report.incarnation == incarnation and 0.0 < sent_at - report.sent_at < LATE_S
        if not is_late:
            current[host_id] = (report, received_at)
            known_hosts[host_id] = (report.incarnation, report.sent_at)
    joined = _store_hosts(connection, current)
    granted = _granted(connection, [report for report, _ in fresh])
    rows = _known_ranks(connection, [report for report, _ in fresh], granted)
    news = joined
    for report, received_at in fresh:
        is_current = current.get(report.facts.host_id, (None,))[0] is report
        news.extend(report_events.merge(rows, report, received_at, granted=granted, is_current=is_current))
    _store_ranks(connection, rows)
    _store_persistent_copies(connection, [report for report, _ in fresh], granted)
    events.append(connection, news)


def _known_hosts(connection: Connection, reports: Sequence[tuple[Report, float]]) -> dict[str, tuple[str, float]]:
    wanted = sorted({report.facts.host_id for report, _ in reports})
    query = select(hosts.c.host_id, hosts.c.incarnation, hosts.c.sent_at).where(hosts.c.host_id.in_(wanted))
    return {row.host_id: (row.incarnation, row.sent_at) for row in connection.execute(query)}


def _store_hosts(connection: Connection, current: dict[str, tuple[Report, float]]) -> list[Event]:
    known = set(connection.scalars(select(hosts.c.host_id).where(hosts.c.host_id.in_(sorted(current)))))
    rows = []
    for host_id in sorted(current):  # in one order, so that two sensors do not wait for each other
        report, received_at = current[host_id]
        facts = report.facts
        rows.append(
            {
                "host_id": host_id,
                "state": HostState.HEALTHY.value,
                "since": received_at,
                "reason": "it reported for the first time",
                "preempt_deadline_at": 0.0,
                "joined_at": received_at,
                "address": facts.address,
                "failure_domain": facts.failure_domain,
                "engine_address": facts.engine_address,
                "free_port": facts.free_port,
                "daemon_version": facts.daemon_version,
                "pid": facts.pid,
                "incarnation": report.incarnation,
                "sent_at": report.sent_at,
                "last_report_at": received_at,
                "interval_s": report.interval_s,
                "engine": dump(report.engine),
                "workers": dump(_workers(report)),
                "copies": dump([copy for copy in report.copies if copy.tier is not Tier.PERSISTENT]),
            }
        )
    upsert(connection, hosts, rows, replace=_FACTS)
    return [
        Event(at=current[host_id][1], kind=EventKind.HOST_JOINED, host_id=host_id)
        for host_id in sorted(current)
        if host_id not in known
    ]


def _workers(report: Report) -> dict[str, int]:
    generations_of: dict[str, int] = {}
    for status in report.ranks:
        generations_of[status.job] = max(status.generation, generations_of.get(status.job, -1))
    return generations_of


def _granted(connection: Connection, reports: Sequence[Report]) -> set[tuple[str, int]]:
    named = {part.job for report in reports for parts in report_events.parts_of(report) for part in parts}
    if not named:
        return set()
    query = select(generations.c.job, generations.c.generation).where(generations.c.job.in_(sorted(named)))
    return {(row.job, row.generation) for row in connection.execute(query)}


def _known_ranks(
    connection: Connection, reports: Sequence[Report], granted: set[tuple[str, int]]
) -> dict[RankKey, RankRow]:
    keys = sorted({key for report in reports for key in report_events.ranks_of(report) if key[:2] in granted})
    rows = {key: RankRow() for key in keys}
    if keys:
        named = [sorted(set(column)) for column in zip(*keys, strict=True)]
        query = select(ranks).where(
            ranks.c.job.in_(named[0]), ranks.c.generation.in_(named[1]), ranks.c.rank.in_(named[2])
        )
        for row in connection.execute(query):
            if (row.job, row.generation, row.rank) not in rows:
                continue  # another combination of the same names
            rows[row.job, row.generation, row.rank] = RankRow(
                host_id=row.host_id,
                pid=row.pid,
                step=row.step,
                phase=row.phase,
                reported_at=row.reported_at,
                marks=row.marks,
                restored_at=row.restored_at,
                restored=row.restored,
            )
    return rows


def _store_ranks(connection: Connection, rows: dict[RankKey, RankRow]) -> None:
    values = [
        {
            "job": job,
            "generation": generation,
            "rank": rank,
            "host_id": row.host_id,
            "pid": row.pid,
            "step": row.step,
            "phase": row.phase,
            "reported_at": row.reported_at,
            "exited_at": 0.0,
            "exited": None,
            "marks": row.marks,
            "restored_at": row.restored_at,
            "restored": row.restored,
        }
        for (job, generation, rank), row in sorted(rows.items())
    ]
    upsert(
        connection,
        ranks,
        values,
        replace=("host_id", "pid", "phase", "reported_at", "marks", "restored_at", "restored"),
        maximum=("step",),
    )
    newest: dict[str, int] = {}
    for (job, _, _), row in rows.items():
        newest[job] = max(row.step, newest.get(job, -1))
    for job, step in sorted(newest.items()):
        raise_newest_step(connection, job, step)


def raise_newest_step(connection: Connection, job: str, step: int) -> None:
    """Note that a rank completed `step`, unless a newer one is known."""
    connection.execute(update(jobs).where(jobs.c.job == job, jobs.c.newest_step < step).values(newest_step=step))


def _store_persistent_copies(connection: Connection, reports: Sequence[Report], granted: set[tuple[str, int]]) -> None:
    found = {
        (copy.job, copy.generation, copy.step, copy.rank): {
            "job": copy.job,
            "generation": copy.generation,
            "step": copy.step,
            "rank": copy.rank,
            "size_bytes": copy.size_bytes,
            "digest": copy.digest,
        }
        for report in reports
        for copy in report.copies
        if copy.tier is Tier.PERSISTENT and (copy.job, copy.generation) in granted
    }
    upsert(connection, persistent_copies, [found[key] for key in sorted(found)], replace=("size_bytes", "digest"))
