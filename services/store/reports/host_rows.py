"""Writes what hosts report into their rows: facts when they change, the positions of ranks, moments in their lives."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
import xxhash
from sqlalchemy import Connection, Row, select, update

from flyball.contracts.checkpoints import ShardCopy, Tier
from flyball.contracts.cluster import HostState, JobState
from flyball.contracts.events import Event, EventKind
from flyball.contracts.reports.signals import Report
from flyball.contracts.wire import encode
from services.record import report_events
from services.record.codec import dump
from services.record.positions import document_of, kept, moved, read_positions, rows_of
from services.record.report_events import Before, RankKey, RankRow, Received
from services.sensor.rules.slots import slot_of
from services.sensor.rules.step_log import StepSummary
from services.store.reports import persistent_steps
from services.store.reports.own_ranks import has_ranks, own_part
from services.store.reports.steady_documents import SteadyDocuments
from services.store.reports.steady_reports import StoredReport, stored_report
from services.store.sql import events
from services.store.sql.kept_reads import OF_PROGRESS
from services.store.sql.rows import new_version, upsert
from services.store.sql.set_aside import readable
from services.store.sql.shared_reads import GivenPlans
from services.store.sql.tables import (
    MAX_COPIES_OF,
    UNKNOWN_JOBS,
    generations,
    host_reports,
    hosts,
    jobs,
    ranks,
)

_FACTS = (
    "address",
    "failure_domain",
    "engine_address",
    "free_port",
    "left_at",
    "daemon_version",
    "pid",
    "interval_s",
    "engine",
    "copies",
    "copies_of",
    "version",
    "fabric",
    "memory_bytes",
)

_ENDED = frozenset(state.value for state in JobState if state.ended)


class _Known(msgspec.Struct, frozen=True):
    """A host's newest report, as stored."""

    incarnation: str = ""
    sent_at: float = 0.0
    received_at: float = 0.0
    digest: str = ""
    workers: str = "{}"
    rows: Mapping[RankKey, RankRow] = {}
    interval_s: float = 0.0
    has_left: bool = False

    @property
    def before(self) -> Before:
        return Before(self.incarnation, self.sent_at, self.received_at, self.interval_s, self.has_left)


class _Jobs(msgspec.Struct, frozen=True):
    """The jobs that a batch of reports names."""

    granted: frozenset[tuple[str, int]]  # the named generations that were granted
    newest: Mapping[str, int]  # job -> newest generation; includes jobs that run and had ranks on these hosts


def record(
    connection: Connection,
    reports: Sequence[Received],
    steps: Sequence[StepSummary],
    plans: GivenPlans,
    steady: SteadyDocuments,
) -> dict[str, StoredReport]:
    """Store reports and summaries of steps. Return what was stored whole, by host."""
    reports = [(own_part(connection, report, plans), received_at) for report, received_at in reports]
    known = _known_reports(connection, sorted({report.facts.host_id for report, _ in reports}), steady)
    fresh, current = report_events.sift(reports, {host_id: row.before for host_id, row in known.items()})
    named = _jobs(connection, [report for report, _ in fresh], steps, known)
    granted = named.granted
    digests = {host_id: _digest(report) for host_id, (report, _) in current.items()}
    news = _store_hosts(connection, known, current, digests)
    rows: dict[str, dict[RankKey, RankRow]] = {}  # by host
    recorded: dict[RankKey, RankRow] = {}  # ranks with new marks or restores
    for report, _ in fresh:
        host_id = report.facts.host_id
        if host_id not in rows:
            rows[host_id] = dict(known[host_id].rows) if host_id in known else {}
        of_host = rows[host_id]
        for key in report_events.ranks_of(report):
            if key[:2] in granted and key not in of_host:
                of_host[key] = RankRow()
        recorded |= {key: of_host[key] for key in _recorded_keys(report) if key in of_host}
    _load_recorded(connection, recorded)
    for report, received_at in fresh:
        is_current = current.get(report.facts.host_id, (None,))[0] is report
        of_host = rows[report.facts.host_id]
        news.extend(report_events.merge(of_host, report, received_at, granted=granted, is_current=is_current))
        if is_current:
            report_events.mark_gone(of_host, report, known.get(report.facts.host_id, _Known()).incarnation)
    positions = {host_id: kept(of_host, named.newest) for host_id, of_host in rows.items()}
    versions = _store_reports(connection, known, current, digests, positions)
    _store_recorded(connection, recorded)
    _raise_newest_steps(connection, rows, granted, plans)
    copies = [
        copy
        for report, _ in fresh
        for copy in report.copies
        if copy.tier is Tier.PERSISTENT and has_ranks(connection, report.facts.host_id, copy, named.newest, plans)
    ]
    copies = [copy for copy in copies if (copy.job, copy.generation) in granted]
    persistent_steps.store(connection, copies)
    _store_losses(connection, steps)
    news.extend(report_events.event_of_steps(part) for part in steps if (part.job, part.generation) in granted)
    events.append(connection, news)
    stored: dict[str, StoredReport] = {}
    taken = frozenset(copies)
    for host_id, (report, received_at) in current.items():
        if all(copy in taken for copy in report.copies if copy.tier is Tier.PERSISTENT):
            of_host = positions[host_id]
            given = {key[:2]: plans.read(connection, *key[:2]).get(host_id, ()) for key in of_host}
            one = stored_report(report, received_at, versions[host_id], of_host, given=given)
            if one is not None:
                stored[host_id] = one
    return stored


def _known_reports(connection: Connection, host_ids: Sequence[str], steady: SteadyDocuments) -> dict[str, _Known]:
    steady.read(connection, {slot_of(host_id) for host_id in host_ids})
    query = (
        select(host_reports, hosts.c.interval_s, hosts.c.left_at)
        .join(hosts, hosts.c.host_id == host_reports.c.host_id)
        .where(host_reports.c.host_id.in_(host_ids))
    )
    return {row.host_id: _known(row, steady) for row in (connection.execute(query) if host_ids else ())}


def _known(row: Row[Any], steady: SteadyDocuments) -> _Known:
    rows = rows_of(readable("host_reports", row.host_id, read_positions, row.positions) or (), row.host_id)
    newer, sent_at, received_at = steady.of(row.host_id, row.version), row.sent_at, row.received_at
    if newer is not None:
        moved(rows.values(), newer)
        sent_at, received_at = newer.sent_at, newer.received_at
    left = row.left_at > 0.0
    return _Known(row.incarnation, sent_at, received_at, row.digest, row.workers, rows, row.interval_s, left)


def _jobs(
    connection: Connection, reports: Sequence[Report], steps: Sequence[StepSummary], known: Mapping[str, _Known]
) -> _Jobs:
    named = {(part.job, part.generation) for part in steps}
    for report in reports:
        named.update((part.job, part.generation) for parts in report_events.parts_of(report) for part in parts)
    live = {job for job, _ in named}
    stored = {job for row in known.values() for job, _, _ in row.rows}
    if not live and not stored:
        return _Jobs(frozenset(), {})
    granted = connection.execute(
        select(generations.c.job, generations.c.generation).where(
            generations.c.job.in_(sorted(live)),
            generations.c.generation.in_(sorted({generation for _, generation in named})),
        )
    )
    newest = connection.execute(
        select(jobs.c.job, jobs.c.generation, jobs.c.state).where(jobs.c.job.in_(sorted(live | stored)))
    )
    return _Jobs(
        granted=frozenset((row.job, row.generation) for row in granted),
        newest={row.job: row.generation for row in newest if row.job in live or row.state not in _ENDED},
    )


def _store_hosts(
    connection: Connection,
    known: Mapping[str, _Known],
    current: Mapping[str, Received],
    digests: Mapping[str, str],
) -> list[Event]:
    """Write the facts of hosts whose facts changed."""
    rows: list[dict[str, Any]] = []
    for host_id in sorted(current):  # in the same order everywhere, so that two sensors do not deadlock
        report, received_at = current[host_id]
        if host_id in known and known[host_id].digest == digests[host_id]:
            continue
        facts = report.facts
        copies = [copy for copy in report.copies if copy.tier is not Tier.PERSISTENT]
        rows.append(
            {
                "host_id": host_id,
                "state": HostState.HEALTHY.value,
                "since": received_at,
                "reason": "it reported for the first time",
                "preempt_deadline_at": 0.0,
                "joined_at": received_at,
                "left_at": received_at if report.leaves else 0.0,
                "address": facts.address,
                "failure_domain": facts.failure_domain,
                "engine_address": facts.engine_address,
                "free_port": facts.free_port,
                "daemon_version": facts.daemon_version,
                "pid": facts.pid,
                "interval_s": report.interval_s,
                "engine": dump(report.engine),
                "copies": dump(copies),
                "copies_of": _jobs_of(copies),
                "version": new_version(),
                "fabric": facts.fabric,
                "memory_bytes": facts.memory_bytes,
            }
        )
    upsert(connection, hosts, rows, replace=_FACTS)
    return [
        Event(at=current[host_id][1], kind=EventKind.HOST_JOINED, host_id=host_id)
        for host_id in sorted(current)
        if host_id not in known
    ]


def _jobs_of(copies: Iterable[ShardCopy]) -> str:
    document = dump(sorted({copy.job for copy in copies}))
    return document if len(document) <= MAX_COPIES_OF else UNKNOWN_JOBS


def _digest(report: Report) -> str:
    facts = (report.facts, report.interval_s, report.engine, report.copies, report.leaves)
    return xxhash.xxh3_128_hexdigest(encode(facts))


def _store_reports(
    connection: Connection,
    known: Mapping[str, _Known],
    current: Mapping[str, Received],
    digests: Mapping[str, str],
    positions: Mapping[str, Mapping[RankKey, RankRow]],
) -> dict[str, int]:
    """Return the new version of each row."""
    values: list[dict[str, Any]] = []
    for host_id in sorted(positions):
        before = known.get(host_id, _Known())
        report, received_at = current.get(host_id, (None, 0.0))
        values.append(
            {
                "host_id": host_id,
                "incarnation": report.incarnation if report else before.incarnation,
                "sent_at": report.sent_at if report else before.sent_at,
                "received_at": received_at if report else before.received_at,
                "digest": digests.get(host_id, before.digest),
                "workers": dump(report_events.workers_of(report)) if report else before.workers,
                "positions": document_of(positions[host_id]),
                "version": new_version(),
            }
        )
    upsert(
        connection,
        host_reports,
        values,
        replace=("incarnation", "sent_at", "received_at", "digest", "workers", "positions", "version"),
    )
    return {row["host_id"]: row["version"] for row in values}


def _recorded_keys(report: Report) -> set[RankKey]:
    return {(part.job, part.generation, part.rank) for parts in (report.marks, report.restores) for part in parts}


def _load_recorded(connection: Connection, recorded: Mapping[RankKey, RankRow]) -> None:
    """Load the earlier marks and restores of these ranks."""
    if not recorded:
        return
    names, numbers, members = (sorted(set(column)) for column in zip(*recorded, strict=True))
    query = select(ranks).where(ranks.c.job.in_(names), ranks.c.generation.in_(numbers), ranks.c.rank.in_(members))
    for row in connection.execute(query):
        known = recorded.get((row.job, row.generation, row.rank))
        if known is not None:  # the query also matches other combinations of these values
            known.marks, known.restored_at, known.restored = row.marks, row.restored_at, row.restored


def _store_recorded(connection: Connection, recorded: Mapping[RankKey, RankRow]) -> None:
    values = [
        {
            "job": job,
            "generation": generation,
            "rank": rank,
            "host_id": row.host_id,
            "exited_at": 0.0,
            "exited": None,
            "marks": row.marks,
            "restored_at": row.restored_at,
            "restored": row.restored,
        }
        for (job, generation, rank), row in sorted(recorded.items())
    ]
    upsert(connection, ranks, values, replace=("host_id", "marks", "restored_at", "restored"))


def _raise_newest_steps(
    connection: Connection,
    rows: Mapping[str, Mapping[RankKey, RankRow]],
    granted: frozenset[tuple[str, int]],
    plans: GivenPlans,
) -> None:
    newest: dict[str, int] = {}
    for host_id, of_host in rows.items():
        for key, row in of_host.items():
            job, generation, rank = key
            if (
                row.step > newest.get(job, -1)
                and (job, generation) in granted
                and rank in plans.read(connection, job, generation).get(host_id, ())
            ):
                newest[job] = row.step
    for job, step in sorted(newest.items()):
        raise_newest_step(connection, job, step)


def _store_losses(connection: Connection, steps: Sequence[StepSummary]) -> None:
    """Store the losses of each job's newest generation; ignore those that workers of an older one still report."""
    for part in steps:
        if part.loss is not None:
            mine = (jobs.c.job == part.job, jobs.c.generation == part.generation)
            values = {"loss": repr(float(part.loss)), "loss_step": part.loss_step}
            connection.execute(update(jobs).where(*mine).values(values).execution_options(**OF_PROGRESS))


def raise_newest_step(connection: Connection, job: str, step: int) -> None:
    """Record that a rank completed `step`, unless a newer step is known."""
    raised = update(jobs).where(jobs.c.job == job, jobs.c.newest_step < step).values(newest_step=step)
    connection.execute(raised.execution_options(**OF_PROGRESS))
