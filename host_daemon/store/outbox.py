"""The spool: signals that the controller has not committed yet. Each is stored before it is first sent."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from collections import deque
from collections.abc import Callable, Mapping
from itertools import accumulate

import msgspec
import structlog

from flyball.contracts import wire
from flyball.contracts.clock import Clock
from flyball.contracts.errors import FlyballError, InvalidMessage
from flyball.contracts.reports.signals import Signal, SignalBody
from host_daemon.store.database import HostDatabase, Work
from host_daemon.store.facts import Facts

MAX_SIGNALS = 10_000
MAX_IN_MEMORY = 1_000  # signals while the disk is full or broken
MAX_KEPT = 64  # committed signals, in case the database is restored from an older copy
BATCH = 200  # signals in one report
BATCH_BYTES = 1 << 20  # of signals in one report: sensors refuse a report of more than 4 MiB, and always would
RESEND_AFTER_S = 1.0
COMMITTED_FACT = "signals_committed"  # JSON: highest committed number by incarnation

_log = structlog.get_logger(__name__)


class SignalOutbox:
    """Numbers signals, keeps them on disk, and returns those that are due.

    A signal is no longer due once a reply lists its (incarnation, seq) as committed. The newest committed ones stay in
    the spool in case the database loses them. Signals of this host's earlier daemons keep their numbers. A full spool
    refuses new signals: numbers then have no gap, and the oldest, which show the cause, stay.
    """

    def __init__(self, database: HostDatabase, clock: Clock, *, source: str, incarnation: str) -> None:
        self._database = database
        self._clock = clock
        self._source = source
        self._incarnation = incarnation
        self._next_seq = 1
        self._pending: dict[tuple[str, int], Signal] = {}
        self._sent_at: dict[tuple[str, int], float] = {}
        self._unstored: deque[tuple[Signal, Work | None]] = deque()  # each with the work to store in its transaction
        self._refused = 0
        self._in_memory = False
        self._kept: dict[tuple[str, int], Signal] = {}  # the newest committed ones
        self._committed: dict[str, int] = {}  # highest committed number by incarnation
        self._again: set[tuple[str, int]] = set()  # kept ones that are due again, and have not been sent since
        self.has_gap = False  # the database lacks signals that have left the spool
        self._lock = asyncio.Lock()  # signals are stored in the order of their numbers

    async def load(self) -> int:
        """Take over what earlier incarnations left. Returns how many must be sent."""
        rows = await self._database.run(
            lambda c: c.execute("SELECT signal FROM signals ORDER BY rowid LIMIT ?", (MAX_SIGNALS,)).fetchall()
        )
        self._committed = json.loads(await Facts(self._database).get(COMMITTED_FACT) or "{}")
        for (blob,) in rows:
            signal = wire.decoder_of(Signal).decode(blob)
            is_kept = signal.seq <= self._committed.get(signal.incarnation, 0)
            (self._kept if is_kept else self._pending)[signal.incarnation, signal.seq] = signal
        return len(self._pending)

    async def put(self, body: SignalBody, *, also: Work | None = None) -> None:
        """Number a signal and store it, in one transaction with `also`.

        While the disk is full it stays in memory, and is stored once there is room.
        """
        if len(self._pending) >= MAX_SIGNALS or len(self._unstored) >= MAX_IN_MEMORY:
            self._refused += 1
            _log.error("signal_refused", kind=type(body).__name__, refused=self._refused, why="the spool is full")
            return
        signal = Signal(self._source, self._incarnation, self._next_seq, self._clock.wall_s(), body)
        try:
            wire.decode(wire.encode(signal), Signal)
        except InvalidMessage as error:  # it would be refused forever, and every signal in its report with it
            _log.error("signal_refused", kind=type(body).__name__, why=str(error))
            return
        self._next_seq += 1
        self._unstored.append((signal, also))
        async with self._lock:
            await self._store()

    def due(self) -> tuple[Signal, ...]:
        """Signals for the next report, oldest first: those never sent, or sent a while ago and still not committed.
        Marks them as sent."""
        now = self._clock.monotonic_s()
        due = [
            signal
            for key, signal in self._pending.items()
            if now - self._sent_at.get(key, -RESEND_AFTER_S) >= RESEND_AFTER_S
        ][:BATCH]
        sizes = accumulate(len(wire.encode(signal)) for signal in due)
        due = [
            signal
            for number, (signal, size) in enumerate(zip(due, sizes, strict=True))
            if not number or size <= BATCH_BYTES
        ]
        self._sent_at.update(((s.incarnation, s.seq), now) for s in due)
        self._again.difference_update((s.incarnation, s.seq) for s in due)
        return tuple(due)

    def repeat(self, is_meant: Callable[[SignalBody], bool]) -> None:
        """Have these signals in the next report, too, before all later ones, unless they are committed: what was sent
        may be lost on its way, and would be sent again after what follows it."""
        for key, signal in self._pending.items():
            if is_meant(signal.body):
                self._sent_at.pop(key, None)

    def not_sent(self, signals: tuple[Signal, ...]) -> None:
        """The report that carried them failed: they are due at once."""
        for signal in signals:
            self._sent_at.pop((signal.incarnation, signal.seq), None)

    @property
    def has_uncommitted(self) -> bool:
        return bool(self._pending)

    @property
    def has_unsent(self) -> bool:
        return len(self._sent_at) < len(self._pending)

    async def committed(self, upto: Mapping[str, int]) -> None:
        """Drop what the controller has committed. If that is less than before, its database went back in time. A reply
        that was on its way when signals became due again is of the database from before: it does not cover these."""
        upto = {i: min([seq, *(n - 1 for again, n in self._again if again == i)]) for i, seq in upto.items()}
        if went_back(self._committed, upto):
            await self.send_again()
        is_news = any(self._committed.get(incarnation, 0) != seq for incarnation, seq in upto.items())
        self._committed.update(upto)
        async with self._lock:
            for key in [key for key in self._pending if key[1] <= upto.get(key[0], 0)]:
                self._kept[key] = self._pending.pop(key)
                self._sent_at.pop(key, None)
                self._again.discard(key)
            self._unstored = deque((s, also) for s, also in self._unstored if s.seq > upto.get(s.incarnation, 0))
            room = 0 if self._unstored else MAX_KEPT  # on a full disk, uncommitted signals come first
            gone = list(self._kept)[: max(len(self._kept) - room, 0)]
            for key in gone:
                del self._kept[key]
            if upto:
                forgotten = self.forgotten()
                self.has_gap = any(seq < forgotten.get(incarnation, 0) for incarnation, seq in upto.items())
            if is_news or gone:
                await self._trim(gone)  # this may make room for the signals in memory
            await self._store()

    async def send_again(self) -> bool:
        """Make the kept signals due again: the database may have lost them. This survives a kill -9. Returns whether
        there are any. Raises FlyballError if the disk cannot record it."""
        if not self._kept:
            return False
        again, self._kept = self._kept, {}
        self._pending = {**again, **self._pending}
        self._again.update(again)
        self._committed = {}
        await Facts(self._database).set(COMMITTED_FACT, "{}")
        return True

    def forgotten(self) -> dict[str, int]:
        """By incarnation, the highest number below which signals have left the spool."""
        first = {self._incarnation: self._next_seq}
        for incarnation, seq in (*self._kept, *self._pending):
            first[incarnation] = min(seq, first.get(incarnation, seq))
        return {incarnation: seq - 1 for incarnation, seq in first.items() if seq > 1}

    async def _trim(self, gone: list[tuple[str, int]]) -> None:
        """Delete what the spool no longer keeps, and record the committed numbers of the rest."""
        left = {incarnation for incarnation, _ in (*self._kept, *self._pending)}
        self._committed = {i: seq for i, seq in self._committed.items() if i in left or i == self._incarnation}
        noted = Facts.setting(COMMITTED_FACT, json.dumps(self._committed))

        def trim(connection: sqlite3.Connection) -> None:
            connection.executemany("DELETE FROM signals WHERE incarnation = ? AND seq = ?", gone)
            noted(connection)

        try:
            await self._database.run(trim)
        except FlyballError as error:  # deleting needs room too; a restarted daemon sends them again
            _log.warning("spool_not_trimmed", error=str(error))

    async def _store(self) -> None:
        """Write the signals in memory, oldest first; then they may be sent. One `put` stores for all that wait."""
        waiting = list(self._unstored)
        if not waiting:
            return

        def insert(connection: sqlite3.Connection) -> None:
            connection.executemany(
                "INSERT INTO signals (incarnation, seq, signal) VALUES (?, ?, ?) ON CONFLICT DO NOTHING",
                [(s.incarnation, s.seq, msgspec.json.encode(s)) for s, _ in waiting],
            )
            for _, also in waiting:
                if also is not None:
                    also(connection)

        try:
            await self._database.run(insert)
        except FlyballError as error:  # full or broken: send them anyway, and store them when the disk works again
            if not self._in_memory:
                _log.error("spool_in_memory", error=str(error))
            self._in_memory = True
        else:
            self._stored(len(waiting))
        self._pending.update(((s.incarnation, s.seq), s) for s, _ in waiting)

    def _stored(self, count: int) -> None:
        if self._in_memory:
            _log.info("spool_on_disk_again", signals=count)
        self._in_memory = False
        for _ in range(count):
            self._unstored.popleft()


def went_back(before: Mapping[str, int], upto: Mapping[str, int]) -> bool:
    """Whether less is committed than before. Pure."""
    return any(seq < before.get(incarnation, 0) for incarnation, seq in upto.items())
