"""The ranks of each job's newest generation: their last reported positions, and how they ended."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence

import msgspec
from sqlalchemy import Connection, select

from flyball.contracts.cluster import Phase
from flyball.contracts.reports.rank_stands import RankStand
from flyball.contracts.reports.signals import RankMarks, WorkerExited
from services.record.codec import load
from services.record.positions import JobPositions, read_positions
from services.store.sql.set_aside import readable
from services.store.sql.tables import host_reports, jobs, ranks

_CHUNK = 1000  # hosts that one query names


class KnownRank(msgspec.Struct, gc=False):
    """One rank. `pid` 0 and `reported_at` 0.0: no report has included it."""

    host_id: str
    pid: int = 0
    step: int = -1
    phase: Phase = Phase.STARTING
    reported_at: float = 0.0
    exited: WorkerExited | None = None
    exited_at: float = 0.0
    moved_at: float = 0.0
    stand: RankStand | None = None


class RecordedRank(msgspec.Struct, frozen=True):
    """A rank with a row: it restored, ended, or reported marks."""

    job: str
    rank: int
    host_id: str
    exited: WorkerExited | None
    exited_at: float


def known_ranks(
    connection: Connection, newest: Mapping[str, int], given: Mapping[str, Mapping[str, Collection[int]]]
) -> dict[str, dict[int, KnownRank]]:
    """Return job -> rank -> what is known. `newest`: job -> generation. `given`: job -> host -> its ranks in that
    generation; a host's report of other ranks is ignored."""
    found: defaultdict[str, dict[int, KnownRank]] = defaultdict(dict)
    if not newest:
        return found
    hosts = sorted({host_id for ranks_of in given.values() for host_id in ranks_of})
    for host_id, part in _reported(connection, hosts):
        if newest.get(part.job) != part.generation:
            continue
        mine, of_job = given.get(part.job, {}).get(host_id, ()), found[part.job]
        for rank in part.ranks:
            if rank.rank in mine:
                of_job[rank.rank] = KnownRank(
                    *(host_id, rank.pid, rank.step, Phase(rank.phase), rank.reported_at),
                    moved_at=rank.moved_at,
                    stand=rank.stand,
                )
    for recorded in recorded_ranks(connection, newest):
        known = found[recorded.job].setdefault(recorded.rank, KnownRank(recorded.host_id))
        if recorded.exited is not None:
            known.exited, known.exited_at = recorded.exited, recorded.exited_at
            known.step = max(known.step, recorded.exited.last_step)
            known.pid = known.pid or recorded.exited.pid
            known.reported_at = known.reported_at or recorded.exited_at
    return found


def newest_step(connection: Connection, job: str, generation: int, given: Mapping[str, Collection[int]]) -> int:
    """Return the newest step that a rank of a job's newest generation reported, -1 if none did. `given`: host -> its
    ranks in that generation."""
    newest = -1
    for host_id, part in _reported(connection, sorted(given)):
        if (part.job, part.generation) == (job, generation):
            mine = given[host_id]
            newest = max(newest, max([rank.step for rank in part.ranks if rank.rank in mine], default=-1))
    ended = [one.exited.last_step for one in recorded_ranks(connection, [job], only_ended=True) if one.exited]
    return max([newest, *ended])


def _reported(connection: Connection, hosts: Sequence[str]) -> Iterator[tuple[str, JobPositions]]:
    """Yield (host, positions of its ranks in a generation) from the newest reports of these hosts."""
    for first in range(0, len(hosts), _CHUNK):
        query = select(host_reports.c.host_id, host_reports.c.positions).where(
            host_reports.c.host_id.in_(hosts[first : first + _CHUNK])
        )
        for host_id, document in connection.execute(query).all():
            for part in readable("host_reports", host_id, read_positions, document) or ():
                yield host_id, part


class FirstSteps:
    """When rank 0 of each job's newest generation completed its first step. Belongs to one thread."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, int], float] = {}  # once it is, it stays

    def read(self, connection: Connection, newest: Mapping[str, int]) -> Mapping[str, float]:
        """Return job -> wall clock. `newest`: job -> generation."""
        self._known = {key: at for key, at in self._known.items() if newest.get(key[0]) == key[1]}
        missing = sorted(job for job, generation in newest.items() if (job, generation) not in self._known)
        query = (
            select(ranks.c.job, ranks.c.generation, ranks.c.marks)
            .join(jobs, (jobs.c.job == ranks.c.job) & (jobs.c.generation == ranks.c.generation))
            .where(ranks.c.job.in_(missing), ranks.c.rank == 0, ranks.c.marks.is_not(None))
        )
        for row in connection.execute(query) if missing else ():
            marks = readable("ranks", f"{row.job} 0", load, row.marks, RankMarks, job=row.job)
            if marks is not None and marks.first_step_at > 0.0:
                self._known[row.job, row.generation] = marks.first_step_at
        return {job: at for (job, _), at in self._known.items()}


def recorded_ranks(
    connection: Connection, names: Collection[str], *, only_ended: bool = False
) -> Iterator[RecordedRank]:
    """Yield the ranks of the jobs' newest generations that reported more than a position."""
    if not names:
        return
    query = (
        select(ranks.c.job, ranks.c.rank, ranks.c.host_id, ranks.c.exited, ranks.c.exited_at)
        .join(jobs, (jobs.c.job == ranks.c.job) & (jobs.c.generation == ranks.c.generation))
        .where(ranks.c.job.in_(sorted(names)))
    )
    if only_ended:
        query = query.where(ranks.c.exited.is_not(None))
    for row in connection.execute(query):
        exited: WorkerExited | None = None
        if row.exited:
            name = f"{row.job} {row.rank}"
            exited = readable("ranks", name, load, row.exited, WorkerExited, job=row.job)
        yield RecordedRank(row.job, row.rank, row.host_id, exited, row.exited_at)
