"""The signal stream in the SQL database: no extra server, and as durable as the decisions."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

import structlog
from sqlalchemy import Connection, Row, delete, insert, select, update

from flyball.contracts.errors import InvalidMessage, TooBusy
from flyball.contracts.reports.signals import Signal
from flyball.contracts.wire import encode
from services.rules.stream import Cursor, Delivered
from services.rules.unreadable import read_signal
from services.store.sql.database import Database
from services.store.sql.rows import upsert
from services.store.sql.tables import bus_messages, bus_streams

STREAM = "signals"
MAX_LENGTH = 20_000
RETRY_AFTER_S = 1.0

_log = structlog.get_logger(__name__)


class EmbeddedBus:
    """A `SignalBus`. Positions are assigned under the lock of the stream's row and so become visible in order: a reader
    that has seen a position has seen all before it."""

    def __init__(self, db: Database, *, max_length: int = MAX_LENGTH) -> None:
        self._db = db
        self._max_length = max_length

    def publish(self, signals: Sequence[Signal]) -> None:
        """Append all signals or none. Raises TooBusy if the stream would exceed its bound."""
        if signals:
            # Need not be durable: its daemon keeps a signal until the signal is committed with its decisions.
            self._db.transact(lambda connection: self._publish(connection, signals), durable=False)

    def read(self, after: Cursor | None, *, limit: int) -> list[Delivered]:
        """Return up to `limit` signals after a cursor, oldest first."""
        with self._db.read() as connection:
            head = connection.execute(select(bus_streams).where(bus_streams.c.name == STREAM)).first()
            if head is None:
                return []
            position = after.position if after is not None and after.stream == head.stream else 0
            delivered: list[Delivered] = []
            while not delivered and position < head.head:
                rows = connection.execute(
                    select(bus_messages)
                    .where(bus_messages.c.position > position)
                    .order_by(bus_messages.c.position)
                    .limit(limit)
                ).all()
                delivered = [found for row in rows if (found := _delivered(head.stream, row)) is not None]
                position = rows[-1].position if rows else head.head
        return delivered

    def trim(self, upto: Cursor) -> None:
        """Remove the signals up to and including `upto`. Ignores a cursor of another stream."""

        def work(connection: Connection) -> None:
            head = connection.execute(select(bus_streams).where(bus_streams.c.name == STREAM).with_for_update()).first()
            if head is None or head.stream != upto.stream or upto.position <= head.tail:
                return
            tail = min(upto.position, head.head)
            connection.execute(delete(bus_messages).where(bus_messages.c.position <= tail))
            connection.execute(update(bus_streams).where(bus_streams.c.name == STREAM).values(tail=tail))

        self._db.transact(work, durable=False)

    def length(self) -> int:
        """Return the number of signals in the stream."""
        with self._db.read() as connection:
            head = connection.execute(select(bus_streams).where(bus_streams.c.name == STREAM)).first()
        return int(head.head - head.tail) if head is not None else 0

    def _publish(self, connection: Connection, signals: Sequence[Signal]) -> None:
        mine = bus_streams.c.name == STREAM
        moved = connection.execute(update(bus_streams).where(mine).values(head=bus_streams.c.head + len(signals)))
        if moved.rowcount == 0:
            first = {"name": STREAM, "stream": uuid.uuid4().hex, "head": 0, "tail": 0}
            upsert(connection, bus_streams, [first])  # keeps the row if another publisher inserts one at the same time
            connection.execute(update(bus_streams).where(mine).values(head=bus_streams.c.head + len(signals)))
        row = connection.execute(select(bus_streams).where(mine)).one()
        if row.head - row.tail > self._max_length:
            raise TooBusy(
                f"{self._max_length} signals wait for the controller.",
                retry_after_s=RETRY_AFTER_S,
                hint="check that a controller runs and reaches the database; nothing is lost meanwhile",
            )
        connection.execute(
            insert(bus_messages),
            [
                {"position": position, "document": encode(signal).decode()}
                for position, signal in enumerate(signals, row.head - len(signals) + 1)
            ],
        )


def _delivered(stream: str, row: Row[Any]) -> Delivered | None:
    try:
        return Delivered(Cursor(stream, row.position), read_signal(row.document))
    except InvalidMessage as error:  # stopping here would block all later signals for ever; its sender still has it
        _log.error("entry_skipped", position=row.position, error=str(error))
        return None
