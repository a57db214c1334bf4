"""Conditions that stand on hosts: reported by HTTP, or changed by a round of the policy."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache

import msgspec
from sqlalchemy import ColumnElement, Connection, and_, delete, func, select, update

from flyball.contracts.errors import Conflict, NotFound
from flyball.contracts.events import Event
from flyball.contracts.reports.conditions import MAX_CONDITIONS, ConditionKey, HostCondition
from services.controller.round.view import ConditionChange, StandingCondition
from services.record import outcome_events
from services.record.codec import dump, load
from services.store.sql import events
from services.store.sql.database import Database
from services.store.sql.rows import upsert
from services.store.sql.set_aside import aside_so_far, needed, readable
from services.store.sql.tables import host_conditions, hosts, log_head

_COLUMNS = host_conditions.c
_DECODED = 1 << 15  # documents whose conditions are kept: a change of one reads all that stand


class SqlConditionStore:
    """Thread-safe."""

    def __init__(self, db: Database) -> None:
        self._db = db

    def begin(self, host_id: str, condition: HostCondition) -> None:
        """Put a condition on a host, or replace the one with its key, whose beginning stays. Raises NotFound, or
        Conflict if too many stand on the host."""

        def work(connection: Connection) -> None:
            _check_host(connection, host_id)
            mine = _is(host_id, condition.key)
            row = connection.execute(select(host_conditions).where(mine).with_for_update()).first()
            known = readable("host_conditions", host_id, load, row.document, HostCondition) if row is not None else None
            standing = connection.scalar(select(func.count()).where(_COLUMNS.host_id == host_id)) or 0
            if known is None and standing >= MAX_CONDITIONS:
                raise Conflict(
                    f"{standing} conditions stand on host {host_id} already.",
                    hint="end some of them (DELETE), or give them a ttl_s",
                )
            is_same = known is not None and known.severity is condition.severity
            since = known.since if known is not None and is_same else condition.since
            stays = row is not None and bool(row.is_overruled) and is_same
            change = ConditionChange(host_id, msgspec.structs.replace(condition, since=since), is_overruled=stays)
            _put(connection, change)
            is_news = known is None or not is_same
            events.append(connection, [outcome_events.of_condition(change, condition.since)] if is_news else [])
            mark_changed(connection)

        self._db.transact(work)

    def end(self, host_id: str, key: ConditionKey, now: float) -> None:
        """End a condition: the controller takes it away with its next round. Idempotent. Raises NotFound for an
        unknown host."""

        def work(connection: Connection) -> None:
            _check_host(connection, host_id)
            row = connection.execute(select(host_conditions).where(_is(host_id, key)).with_for_update()).first()
            if row is not None:
                condition = needed("host_conditions", host_id, load, row.document, HostCondition)
                ending = msgspec.structs.replace(condition, until=now)
                _put(connection, ConditionChange(host_id, ending, bool(row.is_overruled)))
                events.append(connection, [])
                mark_changed(connection)

        self._db.transact(work)


class ConditionCache:
    """Reads conditions again only when some have changed. Belongs to one thread."""

    def __init__(self) -> None:
        self._seen = (-1, -1)
        self._known: Mapping[str, tuple[StandingCondition, ...]] = {}

    def read(self, connection: Connection) -> Mapping[str, tuple[StandingCondition, ...]]:
        """Return what `load_conditions` returns, as this transaction sees it. The same mapping object as before if
        nothing changed."""
        head = events.head(connection)
        if head[1] != self._seen[1] or head[0] < self._seen[0]:  # an older copy replaced the database
            before = aside_so_far()
            self._known = load_conditions(connection)
            if aside_so_far() > before:
                self._seen = (-1, -1)
                return self._known
        self._seen = head
        return self._known


def mark_changed(connection: Connection) -> None:
    """Let readers see that conditions changed. Call it at the end of the transaction, after `events.append`."""
    connection.execute(update(log_head).values(conditions_revision=log_head.c.revision))


def load_conditions(
    connection: Connection, host_ids: Collection[str] | None = None
) -> dict[str, tuple[StandingCondition, ...]]:
    """Return host -> the conditions that stand on it, in the order of their keys. None: of all hosts."""
    found: defaultdict[str, list[StandingCondition]] = defaultdict(list)
    query = select(host_conditions)
    if host_ids is not None:
        query = query.where(_COLUMNS.host_id.in_(sorted(host_ids)))
    for row in connection.execute(query):
        name = f"{row.host_id} {row.source} {row.kind} {row.subject}"
        one = readable("host_conditions", name, _standing, row.document, bool(row.is_overruled))
        if one is not None:
            found[row.host_id].append(one)
    return {host_id: tuple(sorted(standing, key=lambda one: one.condition.key)) for host_id, standing in found.items()}


@lru_cache(maxsize=_DECODED)
def _standing(document: str, is_overruled: bool) -> StandingCondition:
    return StandingCondition(load(document, HostCondition), is_overruled)


def store(connection: Connection, changes: Sequence[ConditionChange], now: float) -> list[Event]:
    """Store what a round changed. A condition that was reported anew since the round's view does not end."""
    for change in sorted(changes, key=lambda change: (change.host_id, change.condition.key)):
        if not change.has_ended:
            _put(connection, change)
            continue
        mine = _is(change.host_id, change.condition.key)
        connection.execute(delete(host_conditions).where(mine, _COLUMNS.until == change.condition.until))
    return outcome_events.of_expired(changes, now)


def _put(connection: Connection, change: ConditionChange) -> None:
    condition = change.condition
    source, kind, subject = condition.key
    row = {
        "host_id": change.host_id,
        "source": source,
        "kind": kind,
        "subject": subject,
        "until": condition.until,
        "is_overruled": change.is_overruled,
        "document": dump(condition),
    }
    upsert(connection, host_conditions, [row], replace=("until", "is_overruled", "document"))


def _is(host_id: str, key: ConditionKey) -> ColumnElement[bool]:
    source, kind, subject = key
    return and_(
        _COLUMNS.host_id == host_id, _COLUMNS.source == source, _COLUMNS.kind == kind, _COLUMNS.subject == subject
    )


def _check_host(connection: Connection, host_id: str) -> None:
    if connection.scalar(select(hosts.c.host_id).where(hosts.c.host_id == host_id)) is None:
        raise NotFound(f"There is no host {host_id!r}.", hint="`flyball status --hosts` lists the hosts")
