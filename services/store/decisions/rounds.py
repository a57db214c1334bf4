"""Keeps the inputs of the newest policy rounds, compressed, for replays.

Large inputs are kept in pieces: a MySQL server refuses packets above its `max_allowed_packet`, and rows too large for
its log."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence

import msgspec
import structlog
from sqlalchemy import Connection, delete, func, insert, select

from flyball import __version__
from flyball.contracts import wire
from flyball.contracts.errors import StateVersionMismatch
from flyball.contracts.reports.signals import Signal
from services.controller.replay import RoundInputs, StoredRound
from services.record.codec import dump, load
from services.record.signal_events import SignalKey, key_of
from services.store.sql.tables import round_pieces, rounds, signals

KEPT = 10_000
KEPT_BYTES = 256 * 2**20  # of all rounds together
PIECE_BYTES = 4 * 2**20  # a quarter of a MySQL server's default packet limit
FAST = 1  # views are repetitive: the best compression takes five times as long to save a tenth

_log = structlog.get_logger(__name__)


def pack(inputs: RoundInputs) -> bytes:
    """Return the compressed inputs."""
    return zlib.compress(msgspec.msgpack.encode(inputs), FAST)


def store(connection: Connection, packed: bytes, fresh: Sequence[Signal], *, epoch: int, now: float) -> None:
    """Keep a round, and drop old ones that exceed the bounds."""
    if len(packed) > KEPT_BYTES:
        _log.warning("round_not_kept", size_bytes=len(packed), largest_bytes=KEPT_BYTES)  # a replay lists it as missing
        return
    newest = connection.execute(
        select(func.coalesce(func.max(rounds.c.number), 0), func.coalesce(func.max(rounds.c.total_bytes), 0))
    ).one()
    number, total_bytes = newest[0] + 1, newest[1] + len(packed)
    connection.execute(
        insert(rounds).values(
            number=number,
            at=now,
            epoch=epoch,
            version=__version__,
            signals=dump([key_of(signal) for signal in fresh]),
            inputs=packed[:PIECE_BYTES],
            total_bytes=total_bytes,
        )
    )
    for piece, start in enumerate(range(PIECE_BYTES, len(packed), PIECE_BYTES), 1):
        data = packed[start : start + PIECE_BYTES]
        connection.execute(insert(round_pieces).values(round=number, piece=piece, data=data))
    gone = connection.scalar(
        select(func.max(rounds.c.number)).where(
            (rounds.c.number <= number - KEPT) | (rounds.c.total_bytes <= total_bytes - KEPT_BYTES)
        )
    )
    if gone is not None:
        connection.execute(delete(round_pieces).where(round_pieces.c.round <= gone))
        connection.execute(delete(rounds).where(rounds.c.number <= gone))


def read(connection: Connection) -> Iterator[StoredRound]:
    """Yield the kept rounds, oldest first, with their signals in the order of reading."""
    for row in connection.execute(select(rounds).order_by(rounds.c.number)).yield_per(16):
        try:
            packed = b"".join((row.inputs, *_pieces(connection, row.number)))
            inputs = wire.unpack(zlib.decompress(packed), RoundInputs)
        except (msgspec.MsgspecError, zlib.error) as error:
            raise StateVersionMismatch(
                f"Round {row.number} was written by release {row.version} and cannot be read: {error}.",
                hint=f"replay it with release {row.version}",
            ) from error
        keys = load(row.signals, list[tuple[str, str, int]])
        yield StoredRound(row.number, row.at, row.epoch, row.version, _signals(connection, keys), inputs)


def _pieces(connection: Connection, number: int) -> Sequence[bytes]:
    query = select(round_pieces.c.data).where(round_pieces.c.round == number).order_by(round_pieces.c.piece)
    return connection.scalars(query).all()


def _signals(connection: Connection, keys: Sequence[SignalKey]) -> tuple[Signal, ...]:
    found = []
    for source, incarnation, seq in keys:
        mine = (signals.c.source == source, signals.c.incarnation == incarnation, signals.c.seq == seq)
        found.append(load(connection.execute(select(signals.c.document).where(*mine)).scalar_one(), Signal))
    return tuple(found)
