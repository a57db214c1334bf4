"""The signals of incidents: those about its job and generation, and those about its host and no job."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from sqlalchemy import BigInteger, Connection, Row, TextualSelect, and_, bindparam, select, text

from flyball.contracts.decisions import Incident
from flyball.contracts.reports.signals import Signal
from services.record.codec import load, plain
from services.store.sql import tables
from services.store.sql.broken_text import String
from services.store.sql.set_aside import readable
from services.store.sql.shared_reads import incident_of

Json = dict[str, Any]

MAX_SIGNALS = 2000
LATEST = 1e11  # wall clock: later than any
BEFORE_S = 5.0  # observers' clocks differ: a signal may seem this much older than its incident's first


def signals_before(connection: Connection, incident_number: int, at: float) -> list[Json]:
    """Return the signals of an incident that were stored up to a moment, in the order of storing."""
    document = connection.scalar(
        select(tables.incidents.c.document).where(tables.incidents.c.number == incident_number)
    )
    incident = readable("incidents", f"inc-{incident_number}", incident_of, document) if document else None
    if incident is None:
        return []
    rows = _signals(connection, incident, min(at, LATEST))
    decoded = ((row, readable("signals", f"sig-{row.number}", load, row.document, Signal)) for row in rows)
    return [
        {
            "at": signal.at,
            "stored_at": row.stored_at,
            "source": signal.source,
            "kind": row.kind,
            "body": plain(signal.body),
        }
        for row, signal in decoded
        if signal is not None
    ]


# Of an incident: those about its job and generation, and those about its host and no job, each by an index.
_THEN = tables.signals.c.observed_at.between(bindparam("begin"), bindparam("end"))
_OF_JOB = and_(tables.signals.c.job == bindparam("job"), tables.signals.c.generation == bindparam("generation"), _THEN)
_OF_HOST = and_(tables.signals.c.host_id == bindparam("host_id"), tables.signals.c.job == "", _THEN)
_SIGNALS_OF_JOB, _SIGNALS_OF_HOST = (
    select(tables.signals)
    .where(condition, tables.signals.c.stored_at <= bindparam("stored_until"))
    .order_by(tables.signals.c.number.desc())
    .limit(MAX_SIGNALS)
    for condition in (_OF_JOB, _OF_HOST)
)


def _then(incident: Incident) -> Json:
    """When an incident's signals were observed, as parameters."""
    began = (incident.observed_at or incident.opened_at) - BEFORE_S
    return {"begin": began, "end": incident.resolved_at or LATEST}


# A list asks for the kinds of all its incidents in a few statements: hundreds of small ones take much longer. They are
# text, because the expression language takes longer to build them than the database to answer.
_AT_ONCE = 64  # parts of one statement; SQLite allows 500
_KINDS_OF_JOB = (
    "SELECT :incident{0} AS incident, kind, MIN(number) AS first FROM signals WHERE job = :job{0} "
    "AND generation = :generation{0} AND observed_at BETWEEN :begin{0} AND :end{0} GROUP BY kind"
)
_KINDS_OF_HOST = (
    "SELECT :incident{0} AS incident, kind, MIN(number) AS first FROM signals WHERE host_id = :host_id{0} "
    "AND job = '' AND observed_at BETWEEN :begin{0} AND :end{0} GROUP BY kind"
)


@lru_cache(maxsize=256)
def _kinds_query(parts: tuple[str, ...]) -> TextualSelect:
    query = text(" UNION ALL ".join(part.format(place) for place, part in enumerate(parts)))
    return query.columns(incident=BigInteger, kind=String, first=BigInteger)


def kinds_of(connection: Connection, found: Mapping[int, Incident]) -> dict[int, list[str]]:
    """Return the kinds of the signals of each of these incidents, each once, in the order of storing."""
    wanted: list[tuple[str, Json]] = []
    for number, incident in found.items():
        about = {"incident": number, **_then(incident)}
        if incident.job:
            wanted.append((_KINDS_OF_JOB, about | {"job": incident.job, "generation": incident.generation}))
        if incident.host_id:
            wanted.append((_KINDS_OF_HOST, about | {"host_id": incident.host_id}))
    wanted.sort(key=lambda part: part[0])  # so that pages of any incidents have few statements in common
    firsts: dict[int, dict[str, int]] = {number: {} for number in found}
    for start in range(0, len(wanted), _AT_ONCE):
        parts = wanted[start : start + _AT_ONCE]
        given = {f"{name}{place}": value for place, (_, about) in enumerate(parts) for name, value in about.items()}
        for number, kind, first in connection.execute(_kinds_query(tuple(part for part, _ in parts)), given):
            firsts[number][kind] = min(first, firsts[number].get(kind, first))
    return {number: sorted(kinds, key=kinds.__getitem__) for number, kinds in firsts.items()}


def _signals(connection: Connection, incident: Incident, stored_until: float) -> list[Row[Any]]:
    """Return an incident's newest signals that were stored up to a moment, in the order of storing."""
    about = {**_then(incident), "stored_until": stored_until}
    rows: list[Row[Any]] = []
    if incident.job:
        of_job = {"job": incident.job, "generation": incident.generation}
        rows += connection.execute(_SIGNALS_OF_JOB, about | of_job)
    if incident.host_id:
        rows += connection.execute(_SIGNALS_OF_HOST, about | {"host_id": incident.host_id})
    found = {row.number: row for row in rows}
    return [found[number] for number in sorted(found)[-MAX_SIGNALS:]]
