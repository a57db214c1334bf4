"""Stores signals with what follows from them by itself: watermarks and exited ranks."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import Connection, and_, insert, or_, select

from flyball.contracts.cluster import Phase
from flyball.contracts.events import Event, EventKind
from flyball.contracts.signals import Signal, WorkerExited
from services.store.codec import dump, subject_of
from services.store.status_store import raise_newest_step
from services.store.tables import generations, ranks, signals, watermarks
from services.store.upsert import upsert

MAX_SOURCE_LENGTH = 128
MAX_NAME_LENGTH = 64
MAX_GAP = 20_000  # seqs that may wait behind a missing one; more than a daemon spools

SignalKey = tuple[str, str, int]


def key_of(signal: Signal) -> SignalKey:
    return signal.source, signal.incarnation, signal.seq


def is_storable(signal: Signal) -> bool:
    """Whether names and numbers fit their columns. Contracts bound neither incarnations nor integers."""
    numbers = (getattr(signal.body, name, 0) for name in ("generation", "pid"))
    steps = (getattr(signal.body, name, 0) for name in ("last_step", "step"))  # some scripts count tokens
    return (
        len(signal.source) <= MAX_SOURCE_LENGTH
        and len(signal.incarnation) <= MAX_NAME_LENGTH
        and 0 <= signal.seq < 2**63
        and all(-(2**31) <= number < 2**31 for number in numbers)
        and all(-(2**63) <= step < 2**63 for step in steps)
    )


def known_keys(connection: Connection, wanted: Sequence[Signal]) -> set[SignalKey]:
    """Which of these are stored already."""
    seqs: dict[tuple[str, str], list[int]] = {}
    for signal in wanted:
        seqs.setdefault((signal.source, signal.incarnation), []).append(signal.seq)
    if not seqs:
        return set()
    found = or_(
        *(
            and_(signals.c.source == source, signals.c.incarnation == incarnation, signals.c.seq.in_(numbers))
            for (source, incarnation), numbers in seqs.items()
        )
    )
    query = select(signals.c.source, signals.c.incarnation, signals.c.seq).where(found)
    return {(row.source, row.incarnation, row.seq) for row in connection.execute(query)}


def store(connection: Connection, fresh: Sequence[Signal], now: float) -> list[Event]:
    """Insert signals that are not stored yet. One that speaks of a job or generation that was never granted is kept as
    it is, and touches nothing else."""
    if not fresh:
        return []
    subjects = [subject_of(signal) for signal in fresh]
    connection.execute(
        insert(signals),
        [
            {
                "source": signal.source,
                "incarnation": signal.incarnation,
                "seq": signal.seq,
                "kind": subject.kind,
                "job": subject.job,
                "generation": subject.generation,
                "host_id": subject.host_id,
                "observed_at": signal.at,
                "stored_at": now,
                "document": dump(signal),
            }
            for signal, subject in zip(fresh, subjects, strict=True)
        ],
    )
    _raise_watermarks(connection, fresh)
    return [
        Event(
            at=now,
            kind=EventKind.SIGNAL,
            job=subject.job,
            generation=subject.generation,
            rank=getattr(signal.body, "rank", -1),
            host_id=subject.host_id,
            data={"kind": subject.kind, "source": signal.source, "observed_at": signal.at},
        )
        for signal, subject in zip(fresh, subjects, strict=True)
    ]


def store_exits(connection: Connection, fresh: Sequence[Signal]) -> None:
    """Note on the ranks that their workers ended. The first word on a worker stands."""
    exits = [(signal, signal.body) for signal in fresh if isinstance(signal.body, WorkerExited)]
    if not exits:
        return
    names = sorted({body.job for _, body in exits})
    granted = {
        (row.job, row.generation)
        for row in connection.execute(
            select(generations.c.job, generations.c.generation).where(generations.c.job.in_(names))
        )
    }
    known = {
        (row.job, row.generation, row.rank)
        for row in connection.execute(
            select(ranks.c.job, ranks.c.generation, ranks.c.rank).where(
                ranks.c.job.in_(names),
                ranks.c.generation.in_(sorted({body.generation for _, body in exits})),
                ranks.c.rank.in_(sorted({body.rank for _, body in exits})),
                ranks.c.exited.is_not(None),
            )
        )
    }
    rows = {}
    for signal, body in exits:
        key = (body.job, body.generation, body.rank)
        if key[:2] in granted and key not in known and key not in rows:
            rows[key] = {
                "job": body.job,
                "generation": body.generation,
                "rank": body.rank,
                "host_id": signal.source,
                "pid": body.pid,
                "step": body.last_step,
                "phase": Phase.STARTING.value,
                "reported_at": signal.at,
                "exited_at": signal.at,
                "exited": dump(body),
                "marks": None,
                "restored_at": 0.0,
                "restored": None,
            }
    upsert(connection, ranks, [rows[key] for key in sorted(rows)], replace=("exited_at", "exited"), maximum=("step",))


def raise_newest_steps(connection: Connection, fresh: Sequence[Signal]) -> None:
    """Let the last steps of ended workers count for their jobs."""
    newest: dict[str, int] = {}
    for signal in fresh:
        if isinstance(signal.body, WorkerExited):
            newest[signal.body.job] = max(signal.body.last_step, newest.get(signal.body.job, -1))
    for job, step in sorted(newest.items()):
        raise_newest_step(connection, job, step)


def _raise_watermarks(connection: Connection, fresh: Sequence[Signal]) -> None:
    sources = {signal.incarnation: signal.source for signal in fresh}
    query = select(watermarks.c.incarnation, watermarks.c.seq).where(watermarks.c.incarnation.in_(sorted(sources)))
    marks = {row.incarnation: row.seq for row in connection.execute(query)}
    rows = []
    for incarnation, source in sorted(sources.items()):
        mark = before = marks.get(incarnation, 0)
        mine = (signals.c.source == source, signals.c.incarnation == incarnation, signals.c.seq > before)
        for seq in connection.scalars(select(signals.c.seq).where(*mine).order_by(signals.c.seq).limit(MAX_GAP)):
            if seq != mark + 1:
                break
            mark = seq
        if mark > before:
            rows.append({"incarnation": incarnation, "seq": mark})
    upsert(connection, watermarks, rows, maximum=("seq",))
