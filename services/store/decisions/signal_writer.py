"""Stores signals, and what follows from them directly: watermarks and exited ranks."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import msgspec
from sqlalchemy import Connection, and_, insert, or_, select

from flyball.contracts.events import Event
from flyball.contracts.reports.signals import Sender, Signal, WorkerExited
from services.record.codec import dump, subject_of
from services.record.signal_events import (
    SignalKey,
    event_of,
)
from services.store.reports.host_rows import raise_newest_step
from services.store.reports.status_store import read_watermarks
from services.store.sql.rows import upsert
from services.store.sql.shared_reads import GivenPlans
from services.store.sql.tables import ranks, signals, watermarks

MAX_GAP = 20_000  # seqs that may wait after a missing one; more than a daemon spools


def known_keys(connection: Connection, wanted: Sequence[Signal]) -> set[SignalKey]:
    """Return the keys of those that are stored already."""
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
    stored = {(row.source, row.incarnation, row.seq) for row in connection.execute(query)}
    marks = read_watermarks(connection, seqs)  # signals that retention removed may still arrive again
    return stored | {(*sender, seq) for sender, mark in marks.items() for seq in seqs[sender] if seq <= mark}


def store(connection: Connection, fresh: Sequence[Signal], now: float) -> list[Event]:
    """Insert signals that are not stored yet. One that names a job or generation that was never granted is stored
    unchanged, and affects nothing else."""
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
    raise_watermarks(connection, {(signal.source, signal.incarnation) for signal in fresh})
    return [event_of(signal, now) for signal in fresh]


def store_exits(connection: Connection, fresh: Sequence[Signal], plans: GivenPlans) -> None:
    """Record the exits of workers on their ranks, and raise the newest step of their jobs. Accepts only reports of a
    rank's own host; the first one about a worker stands."""
    received = [(signal, signal.body) for signal in fresh if isinstance(signal.body, WorkerExited)]
    exits = [
        (signal, body)
        for signal, body in received
        if body.rank in plans.read(connection, body.job, body.generation).get(signal.source, ())
    ]
    if not exits:
        return
    names = sorted({body.job for _, body in exits})
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
        if key not in known and key not in rows:
            rows[key] = {
                "job": body.job,
                "generation": body.generation,
                "rank": body.rank,
                "host_id": signal.source,
                "exited_at": signal.at,
                "exited": dump(msgspec.structs.replace(body, log_tail="")),  # the signal has it; views are read often
                "marks": None,
                "restored_at": 0.0,
                "restored": None,
            }
    upsert(connection, ranks, [rows[key] for key in sorted(rows)], replace=("exited_at", "exited"))
    newest: dict[str, int] = {}
    for _, body in exits:
        newest[body.job] = max(body.last_step, newest.get(body.job, -1))
    for job, step in sorted(newest.items()):
        raise_newest_step(connection, job, step)


def raise_watermarks(connection: Connection, senders: Collection[Sender]) -> None:
    """Raise each sender's watermark over all signals that are stored directly after it."""
    marks = read_watermarks(connection, senders)
    rows = []
    for source, incarnation in sorted(senders):
        mark = before = marks.get((source, incarnation), 0)
        mine = (signals.c.source == source, signals.c.incarnation == incarnation, signals.c.seq > before)
        for seq in connection.scalars(select(signals.c.seq).where(*mine).order_by(signals.c.seq).limit(MAX_GAP)):
            if seq != mark + 1:
                break
            mark = seq
        if mark > before:
            rows.append({"incarnation": incarnation, "source": source, "seq": mark})
    upsert(connection, watermarks, rows, maximum=("seq",))
