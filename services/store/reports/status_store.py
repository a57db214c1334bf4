"""The sensor's side of the database: daemons' reports about their hosts, workers and copies."""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping, Sequence

import msgspec
from sqlalchemy import Connection, delete, select

from flyball.contracts.cluster import HostState, JobState
from flyball.contracts.reports.signals import Sender
from services.record.codec import dump
from services.record.report_events import Received
from services.sensor.detector.watched_job import LearnedJob
from services.sensor.rules.step_log import StepSummary
from services.store.reports import host_rows, vouching
from services.store.reports.steady_documents import Document, SteadyDocuments
from services.store.reports.steady_reports import StoredReport, steady_positions
from services.store.sql import events
from services.store.sql.database import Database
from services.store.sql.rows import upsert
from services.store.sql.shared_reads import GivenPlans, RunningPlans, hosts_of
from services.store.sql.tables import (
    host_reports,
    hosts,
    jobs,
    learned_jobs,
    watermarks,
)

MAX_STORED = 100_000  # hosts that are remembered
_FREE = select(hosts.c.host_id).where(
    hosts.c.state.not_in((HostState.SILENT.value, HostState.IN_REPAIR.value)), hosts.c.left_at == 0.0
)


class SqlStatusStore:
    """Thread-safe; any number of sensors may write."""

    def __init__(self, db: Database) -> None:
        self._db = db
        self._placed = RunningPlans(hosts_of)
        self._plans = GivenPlans()
        self._steady = SteadyDocuments()
        self._stored: dict[str, StoredReport] = {}  # of hosts whose rows this process wrote last, as far as it knows
        self._recording = threading.Lock()  # guards these two

    def record_reports(self, reports: Sequence[Received], steps: Sequence[StepSummary] = ()) -> None:
        """Store (report, received_at) pairs and summaries of steps in one transaction.

        Stores the positions of each host's ranks, and its newest facts if they changed. Writes an event for every new
        mark, new restore and summary. A repeated report changes nothing; a late one adds its steps and leaves newer
        facts alone. Ignores jobs and generations that were never granted.
        """
        if reports or steps:
            with self._recording:
                self._record(reports, steps)

    def record_steady(self, reports: Sequence[Received]) -> None:
        """As `record_reports`. The positions of hosts that report nothing else are stored together."""
        with self._recording:
            known = {report.facts.host_id: self._stored.get(report.facts.host_id) for report, _ in reports}
            steady: dict[str, StoredReport] = {}
            for report, received_at in reports:
                host_id = report.facts.host_id
                before = known[host_id]
                newer = steady_positions(before, report, received_at) if before is not None else None
                if before is not None and newer is not None:
                    steady[host_id] = msgspec.structs.replace(before, newest=newer)
            others = [one for one in reports if one[0].facts.host_id not in steady]
            if steady:
                unwritten = self._record_positions(steady)
                others += [one for one in reports if one[0].facts.host_id in unwritten]
            if others:
                self._record(others, ())

    def _record(self, reports: Sequence[Received], steps: Sequence[StepSummary]) -> None:
        stored = self._db.transact(
            lambda connection: host_rows.record(connection, reports, steps, self._plans, self._steady), durable=False
        )
        if len(self._stored) + len(stored) > MAX_STORED:
            self._stored.clear()
        for report, _ in reports:
            self._stored.pop(report.facts.host_id, None)
        self._stored |= stored

    def _record_positions(self, steady: Mapping[str, StoredReport]) -> set[str]:
        """Store newer positions. Return the hosts whose rows somebody else has written since."""

        def work(connection: Connection) -> tuple[set[str], Mapping[int, Document]]:
            unwritten, documents = self._steady.merge(connection, [one.newest for one in steady.values()])
            newest: dict[str, int] = {}
            for host_id, one in steady.items():
                if host_id not in unwritten:
                    for (job, _, _), place in one.places.items():
                        newest[job] = max(newest.get(job, -1), one.newest.step(place))
            for job, step in sorted(newest.items()):
                host_rows.raise_newest_step(connection, job, step)
            events.append(connection, [])
            return unwritten, documents

        unwritten, documents = self._db.transact(work, durable=False)
        self._steady.written(documents)
        self._stored |= {host_id: one for host_id, one in steady.items() if host_id not in unwritten}
        return unwritten

    def vouch(self, *, sensor: str, at: float, ages_ms: Sequence[int], hosts: Sequence[str] | None) -> None:
        """Store how long before `at` (wall clock) a sensor received a report of each host. `hosts` None: the same as
        last time."""
        self._db.transact(
            lambda connection: vouching.write(connection, sensor=sensor, at=at, ages_ms=ages_ms, hosts=hosts),
            durable=False,
        )

    def learn(self, known: Mapping[str, LearnedJob], at: float) -> None:
        """Store what a sensor learned about running jobs, for the next sensor, and forget other jobs. `at`: wall
        clock."""
        running = select(jobs.c.job).where(jobs.c.state == JobState.RUNNING.value)

        def store(connection: Connection) -> None:
            names = known.keys() & set(connection.scalars(running))
            rows = [{"job": job, "told_at": at, "learned": dump(known[job])} for job in sorted(names)]
            upsert(connection, learned_jobs, rows, replace=("told_at", "learned"))
            connection.execute(delete(learned_jobs).where(learned_jobs.c.job.not_in(running)))

        self._db.transact(store, durable=False)

    def committed(self, senders: Collection[Sender]) -> dict[Sender, int]:
        """Return for each known sender the seq up to which every signal is committed."""
        if not senders:
            return {}
        with self._db.read() as connection:
            return read_watermarks(connection, senders)

    def expected_hosts(self) -> dict[str, float]:
        """Return the hosts that should report -> when any sensor last received one (wall clock): those with ranks of
        running jobs, and the others that did not leave and are not known to be gone."""
        with self._db.read() as connection:
            named = frozenset().union(*self._placed.read(connection).values(), connection.scalars(_FREE))
            received_at = vouching.received_at(connection)
            query = select(host_reports.c.host_id, host_reports.c.received_at)
            for row in connection.execute(query.where(host_reports.c.host_id.in_(sorted(named - received_at.keys())))):
                received_at[row.host_id] = row.received_at
        return {host_id: received_at.get(host_id, 0.0) for host_id in sorted(named)}


def read_watermarks(connection: Connection, senders: Collection[Sender]) -> dict[Sender, int]:
    """Return for each known sender the seq up to which every signal is stored."""
    incarnations = sorted({incarnation for _, incarnation in senders})
    query = select(watermarks).where(watermarks.c.incarnation.in_(incarnations))
    marks = {(row.source, row.incarnation): row.seq for row in connection.execute(query)}
    return {sender: marks[sender] for sender in senders if sender in marks}
