"""Who did what: the requests of operators, and the answers that repetitions of their keys get."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from sqlalchemy import Connection, delete, insert, select, update

from flyball.contracts.clock import Clock
from flyball.contracts.errors import Conflict
from flyball.contracts.reports.signals import (
    ConditionBegan,
    ConditionEnded,
    ConditionsStand,
    PreemptionNotice,
    Signal,
    SignalBody,
)
from services.record.audit_records import IN_PROGRESS_S, KEY_KEPT_S, OPERATOR, Answer, Attempt, Begun, Noted
from services.record.codec import load, number_of
from services.runtime.http.auth import Role
from services.runtime.list_filters import AuditFilter
from services.runtime.paging import Page
from services.store.sql.database import Database
from services.store.sql.rows import new_version, upsert
from services.store.sql.set_aside import readable
from services.store.sql.shared_reads import DISORDER_S, last_before
from services.store.sql.tables import audit_entries, idempotency_keys

Json = dict[str, Any]
_KEYS = idempotency_keys.c
UNREADABLE_DETAIL = {"unreadable": True}  # of a record that somebody changed: it is shown with what can be read


class SqlAuditLog:
    """Thread-safe."""

    def __init__(self, db: Database, clock: Clock) -> None:
        self._db = db
        self._clock = clock

    def begin(self, attempt: Attempt) -> Begun:
        """Record a request before it is carried out, or return the answer that its key got before. Raises Conflict if
        the key was used for another request, or its first request is in progress."""
        now = self._clock.wall_s()

        def work(connection: Connection) -> Begun:
            claim = 0
            if attempt.key:
                claim = new_version()
                if (answer := _claimed(connection, attempt, claim, now)) is not None:
                    return Begun(0, answer)
            row = {name: getattr(attempt, name) for name in ("role", "token", "client", "operation", "target")}
            row |= {"detail": attempt.detail, "idempotency_key": attempt.key, "claim": claim}
            done = connection.execute(insert(audit_entries).values(at=now, ended_at=0.0, status=0, code="", **row))
            (number,) = done.inserted_primary_key or (0,)
            return Begun(int(number))

        return self._db.transact(work)

    def end(self, number: int, status: int, code: str, answer: bytes | None) -> None:
        """Record the result, and the answer to repetitions. None: there is none, the key may be used again."""
        now = self._clock.wall_s()

        def work(connection: Connection) -> None:
            mine = audit_entries.c.number == number
            connection.execute(update(audit_entries).where(mine).values(ended_at=now, status=status, code=code))
            claim = connection.scalar(select(audit_entries.c.claim).where(mine))
            if not claim:
                return
            if answer is not None:
                values = {"status": status, "answer": answer.decode()}
                connection.execute(update(idempotency_keys).where(_KEYS.claim == claim).values(values))
            else:
                connection.execute(delete(idempotency_keys).where(_KEYS.claim == claim))

        self._db.transact(work)

    def entries(self, page: Page, wanted: AuditFilter) -> list[Json]:
        """Return a page of the records, oldest first."""
        columns = audit_entries.c
        query = select(audit_entries)
        for column, value in ((columns.operation, wanted.operation), (columns.target, wanted.target)):
            if value:
                query = query.where(column == value)
        if page.before:
            query = query.where(columns.number < number_of(page.before))
        with self._db.read() as connection:
            if wanted.since:
                first = last_before(connection, columns.number, columns.at, wanted.since - DISORDER_S)
                query = query.where(columns.at >= wanted.since, columns.number > first)
            rows = connection.execute(query.order_by(columns.number.desc()).limit(page.limit)).all()[::-1]
        details = [readable("audit_entries", f"aud-{row.number}", load, row.detail, Json) for row in rows]
        return [
            {
                "audit_id": f"aud-{row.number}",
                "at": row.at,
                "ended_at": row.ended_at or None,
                "role": row.role,
                "operator": str(detail.pop(OPERATOR, "")) if detail is not None else "",
                "token": row.token,
                "client": row.client,
                "operation": row.operation,
                "target": row.target,
                "detail": UNREADABLE_DETAIL if detail is None else detail,
                "status": row.status,
                "code": row.code,
                "idempotency_key": row.idempotency_key,
            }
            for row, detail in zip(rows, details, strict=True)
        ]


def note(connection: Connection, noted: Noted) -> None:
    """Record what a host said, in the transaction that stores it."""
    row = {"at": noted.at, "ended_at": noted.at, "operation": noted.operation, "target": noted.target}
    row |= {"role": Role.DAEMON.value, "token": "", "client": "", "status": 200, "code": ""}
    detail = msgspec.json.encode(noted.detail).decode()
    connection.execute(insert(audit_entries).values(detail=detail, idempotency_key="", claim=0, **row))


def note_signals(connection: Connection, signals: Sequence[Signal], now: float) -> None:
    """Record what hosts said of themselves that work leaves them for, or may return for."""
    for signal in signals:
        body = signal.body
        if isinstance(body, PreemptionNotice | ConditionBegan | ConditionEnded | ConditionsStand):
            detail = _detail_of(body)
            tag = str(body.__struct_config__.tag)
            note(connection, Noted(now, f"report_{tag}", signal.source, detail))


def _detail_of(body: SignalBody) -> dict[str, object]:
    match body:
        case PreemptionNotice():
            return {"deadline_at": body.deadline_at}
        case ConditionBegan():
            condition = body.condition
            return {"kind": condition.kind, "severity": condition.severity.value, "subject": condition.subject}
        case ConditionEnded():
            return {"kind": body.kind, "subject": body.subject}
        case ConditionsStand():
            return {"stand": len(body.keys)}
    return {}


def _claimed(connection: Connection, attempt: Attempt, claim: int, now: float) -> Answer | None:
    """Claim the key of a request, or return the answer that it got before."""
    mine = _KEYS.idempotency_key == attempt.key
    row = {"idempotency_key": attempt.key, "digest": attempt.digest, "claim": claim}
    row |= {"created_at": now, "status": 0, "answer": ""}
    upsert(connection, idempotency_keys, [row])  # one of two requests at once inserts it
    found = connection.execute(select(idempotency_keys).where(mine).with_for_update()).one()
    if found.claim == claim:
        return None
    is_over = not found.status and found.created_at < now - IN_PROGRESS_S
    if is_over or found.created_at < now - KEY_KEPT_S:
        connection.execute(update(idempotency_keys).where(mine).values(row))
        return None
    if found.digest != attempt.digest:
        raise Conflict("This Idempotency-Key was used for another request.", hint="use a new key for a new request")
    if not found.status:
        raise Conflict("The first request with this Idempotency-Key is in progress.", hint="try again in a second")
    return Answer(found.status, found.answer.encode())
