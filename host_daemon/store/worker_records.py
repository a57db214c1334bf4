"""The processes that this host runs for each job, so that a restarted daemon adopts them."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence

import msgspec

from flyball.contracts import wire
from flyball.contracts.cluster import JobSpec, Placement
from flyball.contracts.credentials import EngineKeys
from flyball.contracts.identity import Fence
from flyball.contracts.reports.grant_seals import GrantSeal
from host_daemon.store.database import HostDatabase, Work
from host_daemon.store.facts import Facts

_INSERT = (
    "INSERT OR REPLACE INTO workers (job, generation, rank, pid, start_ticks, spawned_at, log_path)"
    " VALUES (?, ?, ?, ?, ?, ?, ?)"
)
ENDED_FACT = "ended:"  # followed by a job's name
END_SEAL_FACT = "end_seal:"  # likewise: the seal of the generation that ended
MAX_ENDED = 500  # newest ended jobs that are reported
STORE_RANK = -1  # the process that hosts a generation's rendezvous store


class WorkerRecord(msgspec.Struct, frozen=True):
    """One process that was started. (pid, start_ticks) identifies it for one boot of the machine."""

    job: str
    generation: int
    rank: int
    pid: int
    start_ticks: int
    spawned_at: float  # wall clock
    log_path: str


class JobRecord(msgspec.Struct, frozen=True):
    """The newest generation that this host was ordered to start."""

    spec: JobSpec
    placement: Placement
    fence: Fence
    seal: GrantSeal = GrantSeal()  # none: of a daemon or a supervisor of an older release
    keys: EngineKeys = EngineKeys()  # likewise


class WorkerRecords:
    """The tables `workers` and `jobs`. Other tools may read `workers`; only the daemon writes it."""

    def __init__(self, database: HostDatabase) -> None:
        self._database = database
        self._unrecorded: dict[str, int] = {}  # jobs that ended on a full disk -> generation

    async def load(self) -> tuple[list[tuple[WorkerRecord, bool]], list[JobRecord]]:
        """All workers, each with whether its end was reported as a signal, and the jobs of this host."""

        def work(connection: sqlite3.Connection) -> tuple[list[tuple[WorkerRecord, bool]], list[JobRecord]]:
            rows = connection.execute(
                "SELECT job, generation, rank, pid, start_ticks, spawned_at, log_path, ended FROM workers"
            ).fetchall()
            jobs = connection.execute("SELECT start FROM jobs").fetchall()
            workers = [(WorkerRecord(*row[:-1]), bool(row[-1])) for row in rows]
            return workers, [wire.decoder_of(JobRecord).decode(j) for (j,) in jobs]

        return await self._database.run(work)

    async def begin(self, record: JobRecord) -> None:
        """A generation begins after all older workers have ended: forget those, and the last placement."""
        blob = msgspec.json.encode(record)
        job = record.spec.job
        self._unrecorded.pop(job, None)

        def work(connection: sqlite3.Connection) -> None:
            connection.execute("DELETE FROM workers WHERE job = ? AND ended = 1", (job,))
            connection.execute("DELETE FROM facts WHERE name IN (?, ?)", (ENDED_FACT + job, END_SEAL_FACT + job))
            connection.execute(
                "INSERT INTO jobs (job, start) VALUES (?, ?) ON CONFLICT (job) DO UPDATE SET start = excluded.start",
                (job, blob),
            )

        await self._database.run(work)

    async def add(self, workers: Sequence[WorkerRecord]) -> None:
        """Add processes that exist and wait for permission to run."""
        rows = [msgspec.structs.astuple(w) for w in workers]
        await self._database.run(lambda c: c.executemany(_INSERT, rows))

    async def relabel(self, old: WorkerRecord, new: WorkerRecord) -> None:
        """Move the same process to another generation."""

        def work(connection: sqlite3.Connection) -> None:
            key = (old.job, old.generation, old.rank)
            connection.execute("DELETE FROM workers WHERE job = ? AND generation = ? AND rank = ?", key)
            connection.execute(_INSERT, msgspec.structs.astuple(new))

        await self._database.run(work)

    async def end(self, worker: WorkerRecord) -> None:
        """Mark a process as ended without a signal."""
        await self._database.run(self.mark_ended(worker.job, worker.generation, worker.rank))

    @staticmethod
    def mark_ended(job: str, generation: int, rank: int) -> Work:
        """Mark a worker's end as reported; run it in the transaction that stores the signal."""
        return lambda c: c.execute(
            "UPDATE workers SET ended = 1 WHERE job = ? AND generation = ? AND rank = ?", (job, generation, rank)
        )

    async def forget(self, job: str, generation: int) -> None:
        """Forget a job that ended, except for its newest generation. Raises StorageFull: then only this daemon knows,
        until `record_ends` finds room."""
        self._unrecorded[job] = generation
        await self.record_ends()

    async def record_ends(self) -> None:
        """Store the ends of jobs that a full disk refused. Raises StorageFull."""
        ends = self._unrecorded.copy()
        if not ends:
            return

        def work(connection: sqlite3.Connection) -> None:
            for job, generation in ends.items():
                connection.execute("DELETE FROM workers WHERE job = ?", (job,))
                row = connection.execute("SELECT start FROM jobs WHERE job = ?", (job,)).fetchone()
                if row is not None:
                    seal = wire.decoder_of(JobRecord).decode(row[0]).seal
                    Facts.setting(END_SEAL_FACT + job, wire.encode(seal).decode())(connection)
                connection.execute("DELETE FROM jobs WHERE job = ?", (job,))
                Facts.setting(ENDED_FACT + job, str(generation))(connection)

        await self._database.run(work)
        for job, generation in ends.items():
            if self._unrecorded.get(job) == generation:
                del self._unrecorded[job]

    async def ended(self) -> dict[str, int]:
        """The jobs that ended last on this host, each with its newest generation."""
        rows = await self._database.run(
            lambda c: c.execute(
                "SELECT name, value FROM facts WHERE name LIKE ? ORDER BY rowid DESC LIMIT ?",
                (f"{ENDED_FACT}%", MAX_ENDED),
            ).fetchall()
        )
        return {name.removeprefix(ENDED_FACT): int(value) for name, value in rows} | self._unrecorded

    async def end_seals(self) -> dict[str, GrantSeal]:
        """The seals of jobs that ended on this host, also of those whose end a full disk has not recorded yet."""

        def work(connection: sqlite3.Connection) -> dict[str, GrantSeal]:
            rows = connection.execute(
                "SELECT name, value FROM facts WHERE name LIKE ? ORDER BY rowid DESC LIMIT ?",
                (f"{END_SEAL_FACT}%", MAX_ENDED),
            )
            seals = {n.removeprefix(END_SEAL_FACT): wire.decoder_of(GrantSeal).decode(value) for n, value in rows}
            for (start,) in connection.execute("SELECT start FROM jobs"):
                record = wire.decoder_of(JobRecord).decode(start)
                if record.spec.job in self._unrecorded:
                    seals[record.spec.job] = record.seal
            return seals

        return await self._database.run(work)
