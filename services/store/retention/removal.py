"""Removes signals, commands, jobs and events that are over, in short transactions that let others write in between."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from sqlalchemy import (
    Column,
    ColumnElement,
    Connection,
    ScalarSelect,
    Select,
    Table,
    and_,
    delete,
    exists,
    false,
    func,
    select,
)

from services.store.sql.database import Database
from services.store.sql.shared_reads import HAS_ENDED, last_before
from services.store.sql.tables import (
    action_changes,
    actions,
    audit_entries,
    commands,
    decisions,
    events,
    generations,
    goodput_accounts,
    goodput_ratios,
    host_reports,
    hosts,
    idempotency_keys,
    incident_changes,
    incidents,
    job_failures,
    jobs,
    learned_jobs,
    persistent_copies,
    persistent_steps,
    ranks,
    round_pieces,
    rounds,
    signals,
    watermarks,
)

ROWS_AT_ONCE = 500  # in one transaction

# In this order: rows before those that they refer to. What a job needs that goes on goes with the job itself.
_HISTORY = (actions, decisions, incidents, signals, events)
_STATE = (
    *(ranks, persistent_copies, persistent_steps, job_failures, generations, learned_jobs),
    *(goodput_accounts, goodput_ratios, jobs),
)


# --- details of decisions --------------------------------------------------------------------------------------------


def remove_details(db: Database, before: float, max_signals: int) -> Iterator[int]:
    """Remove signals stored and commands of actions ended before a moment, and all but the newest `max_signals`.

    Yields the number of rows that each transaction removed.
    """
    yield from _until_none(db, partial(_remove_signals, before=before, max_signals=max_signals))
    for table, at, kept in (
        (commands, commands.c.created_at, _is_last()),
        (action_changes, action_changes.c.at, false()),
    ):
        of_it = (actions.c.number == table.c.action, actions.c.ended, actions.c.ended_at > 0.0)
        has_ended = exists().where(*of_it, actions.c.ended_at < before)
        query = select(table.c.number).where(_until(db, table, at, before), has_ended, ~kept)
        query = query.order_by(table.c.number).limit(ROWS_AT_ONCE)
        yield from _until_none(db, partial(_remove_found, table=table, query=query))
    yield db.transact(_remove_watermarks, durable=False)


def _is_last() -> ColumnElement[bool]:
    """Whether a command is the last that its host obeyed, which the host names, however old it is: a database without
    it would seem to be an older copy."""
    newer = commands.alias()
    is_newer = (newer.c.host_id == commands.c.host_id, newer.c.progress > 0, newer.c.number > commands.c.number)
    return and_(commands.c.progress > 0, ~exists().where(*is_newer))


def _remove_signals(connection: Connection, before: float, max_signals: int) -> int:
    """Remove the oldest, and the rounds that read them, which cannot be replayed without them. Watermarks stay: they
    identify a signal that arrives again."""
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
    """Remove those of former incarnations that have no signals left. The newest incarnation's stays: a host that was
    paused for weeks continues its numbering."""
    followed = exists().where(
        host_reports.c.host_id == watermarks.c.source, host_reports.c.incarnation != watermarks.c.incarnation
    )
    has_signals = exists().where(
        signals.c.source == watermarks.c.source, signals.c.incarnation == watermarks.c.incarnation
    )
    return int(connection.execute(delete(watermarks).where(followed, ~has_signals)).rowcount)


def remove_audit(db: Database, before: float, keys_before: float) -> Iterator[int]:
    """Remove records of operators' requests from before a moment, and the answers to keys from before another."""
    yield from _remove_where(db, audit_entries, _until(db, audit_entries, audit_entries.c.at, before))
    yield from _remove_where(db, idempotency_keys, idempotency_keys.c.created_at < keys_before)


# --- jobs ------------------------------------------------------------------------------------------------------------


def remove_jobs(db: Database, before: float) -> Iterator[int]:
    """Remove the jobs that ended before a moment, with all their rows.

    Yields the number of rows that each transaction removed. Each looks whether the job is still over: one that goes on
    meanwhile has lost old history at most. The job's own row goes last, so that a job removed in part is found again.
    """
    for job in _ended_jobs(db, before):
        still = select(jobs.c.job).where(jobs.c.job == job, *_over(before)).with_for_update()
        remove = partial(_remove_where, db, still=still)
        own_actions = select(actions.c.number).where(actions.c.job == job)
        yield from remove(commands, commands.c.action.in_(own_actions))
        yield from remove(action_changes, action_changes.c.action.in_(own_actions))
        own_incidents = select(incidents.c.number).where(incidents.c.job == job)
        yield from remove(incident_changes, incident_changes.c.incident.in_(own_incidents))
        for table in _HISTORY:
            yield from remove(table, table.c.job == job)
        yield db.transact(_if_found(still, partial(_remove_state, job=job)), durable=False)


def _remove_state(connection: Connection, job: str) -> int:
    return sum(connection.execute(delete(table).where(table.c.job == job)).rowcount for table in _STATE)


def _over(before: float) -> tuple[ColumnElement[bool], ...]:
    return HAS_ENDED, jobs.c.ended_at > 0.0, jobs.c.ended_at < before


def remove_what_has_no_job(db: Database, before: float) -> Iterator[int]:
    """Remove the events of hosts and controllers from before a moment, and the decisions and incidents about hosts that
    were over by then.

    Keeps the newest decision and incident, whose numbers would be given out again, and the last command of each host.
    """
    yield from _remove_where(db, events, events.c.job == "", _until(db, events, events.c.at, before))
    yield from _until_none(
        db, partial(_remove_decisions, old=_until(db, decisions, decisions.c.at, before), before=before)
    )
    old = _until(db, incidents, incidents.c.opened_at, before)
    yield from _until_none(db, partial(_remove_incidents, old=old, before=before))


def _remove_decisions(connection: Connection, old: ColumnElement[bool], before: float) -> int:
    number = decisions.c.number
    goes_on = exists().where(actions.c.number == number, ~(actions.c.ended & (actions.c.ended_at < before)))
    query = select(number).where(
        *(decisions.c.job == "", old, number < _newest(decisions)),
        *(~goes_on, ~exists().where(commands.c.action == number)),
        ~exists().where(incidents.c.number == decisions.c.incident, ~incidents.c.closed),
    )
    gone = connection.scalars(query.order_by(number).limit(ROWS_AT_ONCE)).all()
    connection.execute(delete(action_changes).where(action_changes.c.action.in_(gone)))
    return remove_keys(connection, actions, gone) + remove_keys(connection, decisions, gone)


def _remove_incidents(connection: Connection, old: ColumnElement[bool], before: float) -> int:
    number = incidents.c.number
    of_it = incident_changes.c.incident == number
    query = select(number).where(
        *(incidents.c.job == "", old, number < _newest(incidents), incidents.c.closed),
        *(~exists().where(decisions.c.incident == number), ~exists().where(of_it, incident_changes.c.at >= before)),
    )
    gone = connection.scalars(query.order_by(number).limit(ROWS_AT_ONCE)).all()
    connection.execute(delete(incident_changes).where(incident_changes.c.incident.in_(gone)))
    return remove_keys(connection, incidents, gone)


def _newest(table: Table) -> ScalarSelect[int]:
    return select(func.max(table.c.number)).scalar_subquery()


def _ended_jobs(db: Database, before: float) -> list[str]:
    """Return the jobs to remove.

    Keeps the job of the newest decision and of the newest incident, whose numbers would be given out again. Keeps those
    of the last command that each host obeyed: a database that does not know it would be taken for an older copy.
    """
    of_action = select(actions.c.job).join(commands, commands.c.action == actions.c.number)
    keeping = [
        *(select(table.c.job).where(table.c.number == _newest(table)) for table in (decisions, incidents)),
        of_action.where(_is_last(), commands.c.host_id.in_(select(hosts.c.host_id))),
    ]
    with db.read() as connection:
        over = connection.scalars(select(jobs.c.job).where(*_over(before)).order_by(jobs.c.ended_at)).all()
        return [
            job
            for job in over
            if not any(
                connection.scalars(query.where(query.selected_columns[0] == job).limit(1)).all() for query in keeping
            )
        ]


# --- rows ------------------------------------------------------------------------------------------------------------


def remove_keys(connection: Connection, table: Table, keys: Sequence[int | str]) -> int:
    """Remove the rows with these primary keys. Returns the number of those that were there: a key that is no text is
    read as another one, and matches no row."""
    (key,) = table.primary_key.columns
    return sum(
        connection.execute(delete(table).where(key.in_(keys[start : start + ROWS_AT_ONCE]))).rowcount
        for start in range(0, len(keys), ROWS_AT_ONCE)
    )


def _until(db: Database, table: Table, at: Column[float], before: float) -> ColumnElement[bool]:
    """The condition for the rows written before a moment: by their numbers, which an index has in order."""
    with db.read() as connection:
        return table.c.number <= last_before(connection, table.c.number, at, before)


def _until_none(db: Database, remove: Callable[[Connection], int]) -> Iterator[int]:
    """Call `remove` in one transaction after another until it finds nothing. Yields how much each removed.

    The transactions need not be durable: what a power cut brings back is removed again.
    """
    while removed := db.transact(remove, durable=False):
        yield removed


def _if_found(query: Select[Any], remove: Callable[[Connection], int]) -> Callable[[Connection], int]:
    """Have `remove` do nothing once a query finds nothing: it is asked in the same transaction."""
    return lambda connection: remove(connection) if connection.scalar(query) is not None else 0


def _remove_where(
    db: Database, table: Table, *conditions: ColumnElement[bool], still: Select[Any] | None = None
) -> Iterator[int]:
    """Remove rows, as long as the query `still` finds something."""
    (key,) = table.primary_key.columns
    query = select(key).where(*conditions).order_by(key).limit(ROWS_AT_ONCE)
    remove = partial(_remove_found, table=table, query=query)
    yield from _until_none(db, remove if still is None else _if_found(still, remove))


def _remove_found(connection: Connection, table: Table, query: Select[Any]) -> int:
    """Remove the rows whose primary keys a query finds: MySQL cannot delete from a table that the statement reads."""
    return remove_keys(connection, table, connection.scalars(query).all())
