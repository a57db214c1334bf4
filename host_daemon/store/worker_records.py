"""Which processes this host runs for which job, so that a restarted daemon adopts them."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence

import msgspec

from flyball.contracts import wire
from flyball.contracts.cluster import JobSpec, Placement
from flyball.contracts.identity import Fence
from host_daemon.store.database import HostDatabase, Work
from host_daemon.store.facts import Facts

_INSERT = (
    "INSERT OR REPLACE INTO workers (job, generation, rank, pid, start_ticks, spawned_at, log_path)"
    " VALUES (?, ?, ?, ?, ?, ?, ?)"
)
ENDED_FACT = "ended:"  # and a job's name
MAX_ENDED = 500  # that are told
STORE_RANK = -1  # the process that hosts a generation's rendezvous store


class WorkerRecord(msgspec.Struct, frozen=True):
    """One process that was started. (pid, start_ticks) names it for ever, on one boot of the machine."""

    job: str
    generation: int
    rank: int
    pid: int
    start_ticks: int
    spawned_at: float  # wall clock
    log_path: str


class JobRecord(msgspec.Struct, frozen=True):
    """The newest generation that this host was told to start."""

    spec: JobSpec
    placement: Placement
    fence: Fence


class WorkerRecords:
    """The tables `workers` and `jobs`. Other tools may read `workers`; only the daemon writes it."""

    def __init__(self, database: HostDatabase) -> None:
        self._database = database

    async def load(self) -> tuple[list[tuple[WorkerRecord, bool]], list[JobRecord]]:
        """Workers, each with whether its end was made a signal, and the jobs of this host."""

        def work(connection: sqlite3.Connection) -> tuple[list[tuple[WorkerRecord, bool]], list[JobRecord]]:
            rows = connection.execute(
                "SELECT job, generation, rank, pid, start_ticks, spawned_at, log_path, ended FROM workers"
            ).fetchall()
            jobs = connection.execute("SELECT start FROM jobs").fetchall()
            workers = [(WorkerRecord(*row[:-1]), bool(row[-1])) for row in rows]
            return workers, [wire.decoder_of(JobRecord).decode(j) for (j,) in jobs]

        return await self._database.run(work)

    async def begin(self, record: JobRecord) -> None:
        """A generation begins, after all older workers were ended: they are forgotten, as is the last placement."""
        blob = msgspec.json.encode(record)
        job = record.spec.job

        def work(connection: sqlite3.Connection) -> None:
            connection.execute("DELETE FROM workers WHERE job = ? AND ended = 1", (job,))
            connection.execute("DELETE FROM facts WHERE name = ?", (ENDED_FACT + job,))
            connection.execute(
                "INSERT INTO jobs (job, start) VALUES (?, ?) ON CONFLICT (job) DO UPDATE SET start = excluded.start",
                (job, blob),
            )

        await self._database.run(work)

    async def add(self, workers: Sequence[WorkerRecord]) -> None:
        """Processes that exist and wait for leave to run."""
        rows = [msgspec.structs.astuple(w) for w in workers]
        await self._database.run(lambda c: c.executemany(_INSERT, rows))

    async def relabel(self, old: WorkerRecord, new: WorkerRecord) -> None:
        """The same process under another generation."""

        def work(connection: sqlite3.Connection) -> None:
            key = (old.job, old.generation, old.rank)
            connection.execute("DELETE FROM workers WHERE job = ? AND generation = ? AND rank = ?", key)
            connection.execute(_INSERT, msgspec.structs.astuple(new))

        await self._database.run(work)

    async def end(self, worker: WorkerRecord) -> None:
        """A process ended of which no signal tells."""
        await self._database.run(self.mark_ended(worker.job, worker.generation, worker.rank))

    @staticmethod
    def mark_ended(job: str, generation: int, rank: int) -> Work:
        """The statement that says that a worker's end was made a signal; stored together with the signal."""
        return lambda c: c.execute(
            "UPDATE workers SET ended = 1 WHERE job = ? AND generation = ? AND rank = ?", (job, generation, rank)
        )

    async def forget(self, job: str, generation: int) -> None:
        """The job ended, with this generation as its newest."""

        def work(connection: sqlite3.Connection) -> None:
            connection.execute("DELETE FROM workers WHERE job = ?", (job,))
            connection.execute("DELETE FROM jobs WHERE job = ?", (job,))
            Facts.setting(ENDED_FACT + job, str(generation))(connection)

        await self._database.run(work)

    async def ended(self) -> dict[str, int]:
        """Jobs that ended on this host, the newest ones, and the newest generation of each."""
        rows = await self._database.run(
            lambda c: c.execute(
                "SELECT name, value FROM facts WHERE name LIKE ? ORDER BY rowid DESC LIMIT ?",
                (f"{ENDED_FACT}%", MAX_ENDED),
            ).fetchall()
        )
        return {name.removeprefix(ENDED_FACT): int(value) for name, value in rows}
