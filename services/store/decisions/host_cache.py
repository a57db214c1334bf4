"""Caches hosts: of many thousands, only those that changed are read and decoded again."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from math import inf
from typing import Any

from sqlalchemy import Connection, Select, select

from flyball.contracts.checkpoints import ShardCopy
from flyball.contracts.clock import Clock
from flyball.contracts.cluster import HostState, Phase
from services.controller.round.view import RankView
from services.record.codec import load
from services.record.host_views import CachedHost
from services.record.positions import SteadyPositions, read_positions
from services.sensor.rules.slots import slot_of
from services.store.reports.steady_documents import SteadyDocuments
from services.store.sql.set_aside import readable
from services.store.sql.tables import host_reports, hosts

PAGE = 1000  # hosts whose versions are read together
AT_ONCE = 250  # hosts that are read in one statement: a round may be broken off between two
PAGES_BUDGET_S = 0.02  # time of a view for pages that are not due yet
MAX_AGE_S = 5.0
_UNREAD = -1  # the version of a row that is read with every view: it is set aside as long as it cannot be decoded
UNREADABLE_STATE = HostState.CORDONED  # what a host counts as whose state cannot be read: it gets no work


class HostCache:
    """Belongs to one thread.

    Even finding out which of ten thousand hosts changed takes longer than a decision may wait. So it happens page by
    page, within a time budget. With PAGE hosts or more, data of a host may be MAX_AGE_S old, plus the time to the next
    round."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._hosts: dict[str, CachedHost] = {}
        self._seen: dict[str, CachedHost] = {}  # on the pages of this cycle so far
        self._joined: dict[str, CachedHost] = {}  # read by name in this cycle; their page may have been read before
        self._read_pages_at_s = -inf  # -inf: never
        self._expired: set[str] = set()
        self._changed: set[str] = set()
        self._steady = SteadyDocuments()

    def expire(self, host_ids: Iterable[str]) -> None:
        """Read these hosts again with the next view."""
        self._expired.update(host_ids)

    def expire_all(self) -> None:
        """Read every host again with the next view."""
        self._read_pages_at_s = -inf

    def read(self, connection: Connection, *, pages: int | None = None) -> Mapping[str, CachedHost]:
        """Return all hosts that have reported, by name; with many hosts some are older than this transaction, and a
        new one may come last.

        `pages`: how many to read, besides expired hosts; None: as many as the budget allows. Unless it is 0, at least
        the share that is due since the last call is read, so that no page waits for long. The first call reads all
        pages, and so does one after a pause of MAX_AGE_S."""
        began_s = self._clock.monotonic_s()
        is_urgent = pages == 0 and self._read_pages_at_s > -inf
        self._read_steady(connection, {slot_of(host_id) for host_id in self._expired} if is_urgent else None)
        self._read_expired(connection)
        if is_urgent:
            return self._hosts
        share = (began_s - self._read_pages_at_s) / MAX_AGE_S
        due = share * (len(self._hosts) // PAGE + 1)
        if share >= 1.0:
            self._seen, due = {}, inf
        done = 0
        while not self._read_page(connection):
            done += 1
            has_time = self._clock.monotonic_s() - began_s <= PAGES_BUDGET_S
            if done >= due and not (has_time and (pages is None or done < pages)):
                break
        self._read_pages_at_s = began_s
        return self._hosts

    def changed(self) -> set[str]:
        """Return the hosts that were read again since the last call."""
        changed, self._changed = self._changed, set()
        return changed

    def _read_steady(self, connection: Connection, slots: Collection[int] | None) -> None:
        for newer in self._steady.read(connection, slots):
            host = self._hosts.get(newer.host_id)
            if host is not None and host.report_version == newer.version:
                host.take_newer(newer)

    def _read_expired(self, connection: Connection) -> None:
        """Read expired hosts again, including those that joined since their page was read. Names that are no hosts are
        dropped: sensors send signals too."""
        again = sorted(self._expired & self._hosts.keys())
        self._take_whole(connection, self._hosts, again)
        if self._read_pages_at_s > -inf:
            unknown = sorted(self._expired - self._hosts.keys())
            joined = {row.host_id: CachedHost(row.host_id) for row in _rows(connection, _MARKS, unknown)}
            self._take_whole(connection, joined, list(joined))
            self._joined |= joined
            self._hosts |= joined
        self._expired.clear()

    def _take_whole(self, connection: Connection, known: Mapping[str, CachedHost], host_ids: Sequence[str]) -> None:
        """As `_take`, in one statement."""
        self._changed.update(host_ids)
        for row in _rows(connection, _WHOLE, host_ids):
            _take_facts(known[row.host_id], row)
            _take_report(known[row.host_id], row, self._steady.of(row.host_id, row.report_version))

    def _take(
        self, connection: Connection, known: Mapping[str, CachedHost], facts: Sequence[str], reports: Sequence[str]
    ) -> None:
        self._changed.update(facts, reports)
        for row in _rows(connection, _FACTS, facts):
            _take_facts(known[row.host_id], row)
        for row in _rows(connection, _REPORTS, reports):
            _take_report(known[row.host_id], row, self._steady.of(row.host_id, row.report_version))

    def _read_page(self, connection: Connection) -> bool:
        """Read the next page. Return whether it was the last. A page that fails half-way counts as not read."""
        if not self._seen:
            self._joined = {}
        query = _MARKS.where(hosts.c.host_id > next(reversed(self._seen))) if self._seen else _MARKS
        marks = connection.execute(query.order_by(hosts.c.host_id).limit(PAGE)).all()
        page: dict[str, CachedHost] = {}
        facts, reports = [], []
        for host_id, version, report_version in marks:
            host = page[host_id] = self._hosts.get(host_id) or CachedHost(host_id)
            if host.version != version:
                facts.append(host_id)
            if host.report_version != report_version:
                reports.append(host_id)
        self._take(connection, page, facts, reports)
        self._seen |= page
        if len(page) == PAGE:
            self._hosts |= page
            return False
        joined = {host_id: host for host_id, host in self._joined.items() if host_id not in self._seen}
        self._hosts, self._seen = self._seen | joined, {}  # drops hosts that are gone
        return True


_MARKS = select(hosts.c.host_id, hosts.c.version, host_reports.c.version).join(
    host_reports, host_reports.c.host_id == hosts.c.host_id
)
_OF_HOSTS = (
    hosts.c.host_id,
    hosts.c.version,
    hosts.c.state,
    hosts.c.since,
    hosts.c.reason,
    hosts.c.preempt_deadline_at,
    hosts.c.address,
    hosts.c.failure_domain,
    hosts.c.engine_address,
    hosts.c.free_port,
    hosts.c.left_at,
    hosts.c.copies,
    hosts.c.fabric,
    hosts.c.memory_bytes,
)
_OF_REPORTS = (
    host_reports.c.version.label("report_version"),
    host_reports.c.sent_at,
    host_reports.c.received_at,
    host_reports.c.workers,
    host_reports.c.positions,
)
_FACTS = select(*_OF_HOSTS)
_REPORTS = select(host_reports.c.host_id, *_OF_REPORTS)
_WHOLE = select(*_OF_HOSTS, *_OF_REPORTS).join(host_reports, host_reports.c.host_id == hosts.c.host_id)


def _rows(connection: Connection, query: Select[Any], host_ids: Sequence[str]) -> Iterator[Any]:
    column = query.selected_columns.host_id
    for start in range(0, len(host_ids), AT_ONCE):
        yield from connection.execute(query.where(column.in_(host_ids[start : start + AT_ONCE])))


def _take_facts(host: CachedHost, row: Any) -> None:  # noqa: ANN401 - a row's columns have no static type
    host.version = row.version
    state = readable("hosts", row.host_id, HostState, row.state)
    copies = readable("hosts", row.host_id, load, row.copies, tuple[ShardCopy, ...])
    if state is None or copies is None:
        host.version = _UNREAD
    host.state, host.copies = state or UNREADABLE_STATE, copies or ()
    host.since = row.since
    host.reason = row.reason
    host.preempt_deadline_at = row.preempt_deadline_at
    host.address = row.address
    host.failure_domain = row.failure_domain
    host.engine_address = row.engine_address
    host.free_port = row.free_port
    host.left_at = row.left_at
    host.fabric = row.fabric
    host.memory_bytes = row.memory_bytes
    host.copies_of = frozenset(copy.job for copy in host.copies)


def _take_report(host: CachedHost, row: Any, newer: SteadyPositions | None) -> None:  # noqa: ANN401
    host.report_version = row.report_version
    host.last_report_at = row.received_at
    host.sent_at = row.sent_at
    workers = readable("host_reports", row.host_id, load, row.workers, dict[str, int])
    positions = readable("host_reports", row.host_id, _ranks, host.host_id, row.positions)
    if workers is None or positions is None:
        host.report_version = _UNREAD
    host.workers, host.ranks, host.newer = workers or {}, positions or {}, None
    if newer is not None:
        host.take_newer(newer)


def _ranks(host_id: str, document: str) -> Mapping[tuple[str, int], tuple[RankView, ...]]:
    return {
        (part.job, part.generation): tuple(
            RankView(rank.rank, host_id, rank.step, Phase(rank.phase), rank.reported_at, is_gone=rank.is_gone)
            for rank in part.ranks
        )
        for part in read_positions(document)
    }
