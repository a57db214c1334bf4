"""Replays the decisions of a database, in a copy of their inputs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec
from sqlalchemy import Connection, delete, inspect, select

from flyball.contracts.cluster import PolicyValue
from flyball.contracts.decisions import Decision, Incident
from flyball.contracts.errors import NotFound
from services.controller.replay import OtherDecision, Replay, compared, decide_otherwise, differences
from services.record.codec import load
from services.store.decisions import outcome_writer
from services.store.decisions import rounds as round_store
from services.store.sql.copying import Advance, copy_table
from services.store.sql.database import Database
from services.store.sql.tables import decisions, incidents, metadata, round_pieces, rounds, signals, table_marks

_COPIED = {signals: 200, rounds: 4, round_pieces: 4, incidents: 200, decisions: 200}  # tables, and rows at once


class ReplayResult(msgspec.Struct, frozen=True):
    """`reproduced`: number of decisions that are identical. `before`: number of decisions whose rounds are no longer
    kept. `missing`: decisions between or after the kept rounds whose rounds were never kept."""

    rounds: int
    signals: int
    reproduced: int
    before: int
    missing: tuple[str, ...]
    differences: tuple[str, ...]
    versions: tuple[str, ...]  # of the releases that decided

    @property
    def is_exact(self) -> bool:
        return not (self.missing or self.differences)


def replay_database(db: Database, folder: Path, *, job: str = "", advance: Advance = lambda _: None) -> ReplayResult:
    """Copy the inputs into a database in `folder`, decide again, and compare with the stored decisions.

    Writes nothing to `db`. `job`: compares only its decisions. `advance` is told of each round. Raises NotFound if no
    round is kept.
    """
    copy = Database(f"sqlite:///{folder / 'replay.sqlite'}")
    try:
        _copy(db, copy)
        with copy.write() as connection:
            connection.execute(delete(decisions))
        return _replay(db, copy, job, advance)
    finally:
        copy.close()


class OtherPolicyResult(msgspec.Struct, frozen=True):
    """`decisions`: one per situation and subject, in order."""

    rounds: int
    decisions: tuple[OtherDecision, ...]
    versions: tuple[str, ...]  # of the releases that decided


def replay_with(
    db: Database,
    folder: Path,
    given: Mapping[str, PolicyValue],
    *,
    job: str = "",
    advance: Advance = lambda _: None,
) -> OtherPolicyResult:
    """Decide every stored round by another policy, each in the situation that there was. Writes nothing to `db`.

    `job`: only decisions about it. `advance` is told of each round. Raises NotFound if no round is kept.
    """
    copy = Database(f"sqlite:///{folder / 'replay.sqlite'}")
    try:
        _copy(db, copy)
        with copy.read() as connection:
            by_moment: dict[tuple[float, int], list[Decision]] = {}
            for decision, epoch in _decisions(connection).values():
                by_moment.setdefault((decision.at, epoch), []).append(decision)
            count, versions = 0, dict[str, None]()
            found: list[OtherDecision] = []
            for stored in round_store.read(connection):
                count, versions[stored.version] = count + 1, None
                found += decide_otherwise(stored, given, by_moment.get((stored.at, stored.epoch), ()))
                advance(1)
        if not count:
            raise _no_round(db)
        return OtherPolicyResult(count, tuple(d for d in found if d.job == (job or d.job)), tuple(versions))
    finally:
        copy.close()


def _no_round(db: Database) -> NotFound:
    return NotFound(f"{db.name} keeps no round.", hint="replay a database of a supervisor of this release or newer")


def _copy(db: Database, copy: Database) -> None:
    with copy.write() as target, db.read() as source:
        metadata.create_all(target, tables=[*_COPIED, table_marks])
        there = set(inspect(source).get_table_names())  # an older release has fewer
        for table, at_once in _COPIED.items():
            if table.name in there:
                copy_table(source, target, table, rows_at_once=at_once)


def _replay(db: Database, copy: Database, job: str, advance: Advance) -> ReplayResult:
    run, count, n_signals, first = Replay(), 0, 0, 0
    last_at, last = 0.0, 0
    versions: dict[str, None] = {}
    decided: list[tuple[Decision, int]] = []
    with copy.read() as connection:
        for stored in round_store.read(connection):
            first = first or stored.inputs.view.next_decision
            last_at, last = stored.at, stored.inputs.view.next_decision
            decided += [(decision, stored.epoch) for decision in run.run(stored).decisions]
            count, n_signals, versions[stored.version] = count + 1, n_signals + len(stored.signals), None
            advance(1)
    if not count:
        raise _no_round(db)
    with copy.write() as connection:
        for decision, epoch in decided:
            outcome_writer.insert_decision(connection, decision, epoch)
    with db.read() as connection:
        then = _decisions(connection)
        incidents_then = _incidents(connection)
    with copy.read() as connection:
        now = _decisions(connection)
    unkept = {number for lower, upper in run.missing for number in range(lower, upper + 1)}
    unkept |= {number for number, (decision, _) in then.items() if number >= last and decision.at > last_at}
    wanted = {n: row for n, row in then.items() if n >= first and n not in unkept and row[0].job == (job or row[0].job)}
    mine = {n: row for n, row in now.items() if row[0].job == (job or row[0].job)}
    same, found = compared((decision for decision, _ in wanted.values()), (decision for decision, _ in mine.values()))
    for number, (_, epoch) in wanted.items():
        if number in mine and mine[number][1] != epoch:
            found.append(f"dec-{number} was made in epoch {epoch}, but in {mine[number][1]} here")
    for name, incident in run.incidents.items():
        if name in incidents_then and incident.job == (job or incident.job):
            found += differences(name, incidents_then[name], incident)
    return ReplayResult(
        rounds=count,
        signals=n_signals,
        reproduced=same,
        before=sum(1 for number in then if number < first),
        missing=tuple(f"dec-{number}" for number in sorted(unkept & then.keys())),
        differences=tuple(dict.fromkeys((*found, *run.differences))),
        versions=tuple(versions),
    )


def _decisions(connection: Connection) -> dict[int, tuple[Decision, int]]:
    rows = connection.execute(select(decisions).order_by(decisions.c.number))
    return {row.number: (load(row.document, Decision), row.epoch) for row in rows}


def _incidents(connection: Connection) -> dict[str, Incident]:
    rows = connection.execute(select(incidents).order_by(incidents.c.number))
    return {f"inc-{row.number}": load(row.document, Incident) for row in rows}
