"""Signals, commands and changes of actions: what explains a decision in detail, and is not asked for after a while."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from sqlalchemy import Connection, delete, exists, func, select

from services.store.retention.removal import ROWS_AT_ONCE, remove_found, remove_keys, until_none
from services.store.sql.database import Database
from services.store.sql.tables import (
    action_changes,
    actions,
    commands,
    host_reports,
    round_pieces,
    rounds,
    signals,
    watermarks,
)


def remove_details(db: Database, before: float, max_signals: int) -> Iterator[int]:
    """Remove those that were over before a moment, and signals beyond the newest `max_signals`; yields the rows that
    each transaction removed."""
    yield from until_none(db, partial(_remove_signals, before=before, max_signals=max_signals))
    has_ended = (actions.c.ended, actions.c.ended_at > 0.0, actions.c.ended_at < before)
    # A host names the newest command that it obeyed, however old: a database without it would be called behind.
    newest = select(func.max(commands.c.number)).where(commands.c.progress > 0).group_by(commands.c.host_id)
    for table in (commands, action_changes):
        query = select(table.c.number).join(actions, actions.c.number == table.c.action).where(*has_ended)
        if table is commands:
            query = query.where(commands.c.number.not_in(newest))
        query = query.order_by(table.c.number).limit(ROWS_AT_ONCE)
        yield from until_none(db, partial(remove_found, table=table, query=query))
    yield db.transact(_remove_watermarks, durable=False)


def _remove_signals(connection: Connection, before: float, max_signals: int) -> int:
    """The oldest, with the rounds that read them: a round without its signals cannot be replayed. Their watermarks
    stay, by which one that comes again is known."""
    newest = connection.scalar(select(func.max(signals.c.number))) or 0
    query = select(signals.c.number, signals.c.stored_at).order_by(signals.c.number).limit(ROWS_AT_ONCE)
    gone = [row for row in connection.execute(query) if row.stored_at < before or row.number <= newest - max_signals]
    if not gone:
        return 0
    last = connection.scalar(select(func.max(rounds.c.number)).where(rounds.c.at <= max(r.stored_at for r in gone)))
    if last is not None:
        connection.execute(delete(round_pieces).where(round_pieces.c.round <= last))
        connection.execute(delete(rounds).where(rounds.c.number <= last))
    return remove_keys(connection, signals, [row.number for row in gone])


def _remove_watermarks(connection: Connection) -> int:
    """Of incarnations of hosts that another one followed, and of which no signal is left. The last incarnation's stays:
    a host that was paused for weeks goes on counting."""
    followed = exists().where(
        host_reports.c.host_id == watermarks.c.source, host_reports.c.incarnation != watermarks.c.incarnation
    )
    has_signals = exists().where(
        signals.c.source == watermarks.c.source, signals.c.incarnation == watermarks.c.incarnation
    )
    return int(connection.execute(delete(watermarks).where(followed, ~has_signals)).rowcount)
