"""The verified copies on the persistent tier, which no host owns.

New copies are written once; a step is read again only if one of its copies changed. Only the newest steps of each job
are kept, and only those that a restore may want are read: nobody reports what the store's retention removes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from sqlalchemy import Connection, case, delete, func, select

from flyball.contracts.checkpoints import (
    ShardCopy,
    StoredPoint,
    StoredPoints,
    Tier,
    is_alive,
)
from flyball.contracts.cluster import JobSpec
from services.record.codec import load
from services.record.stored_steps import KEPT_STEPS, Wanted, forgettable, is_outdated, newest_first, restorable
from services.store.sql.rows import new_version, upsert
from services.store.sql.set_aside import readable
from services.store.sql.shared_reads import newest_lineage
from services.store.sql.tables import jobs, persistent_copies, persistent_steps

StepKey: TypeAlias = tuple[str, int, int]  # job, generation, step

FORGET_AT_ONCE = 8  # steps, each with a row per rank
FORGET_ROWS_AT_ONCE = 100_000  # in one transaction, because others wait for it; always at least one step

_CHUNK = 1000  # values in one query


def store(connection: Connection, copies: Iterable[ShardCopy]) -> None:
    """Write the copies that are not stored yet, and mark their steps. A new step displaces old ones."""
    found = {(copy.job, copy.generation, copy.step, copy.rank): copy for copy in copies}
    if not found:
        return
    marked = _marks(connection, {key[0] for key in found})
    forgotten = _forgotten(connection, {key[:3] for key in found}, marked)
    found = {key: copy for key, copy in found.items() if key[:3] not in forgotten}
    if not found:
        return
    known = _known(connection, found)
    fresh = {key: copy for key, copy in found.items() if known.get(key) != (copy.size_bytes, copy.digest)}
    new = {key[:3] for key in found if key[1:3] not in marked.get(key[0], ())}
    changed = sorted({key[:3] for key in fresh} | new)
    rows = [
        {
            "job": job,
            "generation": generation,
            "step": step,
            "rank": rank,
            "size_bytes": copy.size_bytes,
            "digest": copy.digest,
        }
        for (job, generation, step, rank), copy in sorted(fresh.items(), key=lambda item: item[0])
    ]
    upsert(connection, persistent_copies, rows, replace=("size_bytes", "digest"))
    rows = [{"job": job, "generation": gen, "step": step, "version": new_version()} for job, gen, step in changed]
    upsert(connection, persistent_steps, rows, replace=("version",))
    for job in sorted({job for job, _, _ in new}):
        _make_room(connection, job, {*marked.get(job, ()), *(key[1:] for key in new if key[0] == job)})


def _forgotten(
    connection: Connection, keys: Collection[StepKey], marked: Mapping[str, Collection[tuple[int, int]]]
) -> set[StepKey]:
    """Return the steps that are not stored and that stored steps of their job's lineage make outdated."""
    found: set[StepKey] = set()
    for job in {key[0] for key in keys}:
        marks = marked.get(job, ())
        outdated = [key for key in keys if key[0] == job and key[1:] not in marks and is_outdated(key[1:], marks)]
        wanted = _wanted(connection, job) if outdated else None
        if wanted is not None:
            alive = [mark for mark in marks if is_alive(*mark, wanted.lineage)]
            found.update(key for key in outdated if is_outdated(key[1:], alive))
    return found


def _make_room(connection: Connection, job: str, marks: Collection[tuple[int, int]]) -> None:
    """Forget steps that no restore will want, a few at a time; later steps forget the rest."""
    if len(marks) <= KEPT_STEPS:
        return
    wanted = _wanted(connection, job)
    if wanted is None:
        return
    columns = persistent_copies.c
    query = select(columns.generation, columns.step, func.count()).group_by(columns.generation, columns.step)
    saved_by = {entry.generation: wanted.saved_by(entry.generation) for entry in wanted.lineage}
    limit = case(saved_by, value=columns.generation, else_=wanted.world_size)
    rows = connection.execute(query.where(columns.job == job, columns.rank < limit))
    ranks = {(generation, step): count for generation, step, count in rows}
    most = max(wanted.world_size, *saved_by.values())
    at_once = max(1, min(FORGET_AT_ONCE, FORGET_ROWS_AT_ONCE // most))
    for generation, step in forgettable(marks, wanted, ranks)[:at_once]:
        for table in (persistent_copies, persistent_steps):
            mine = (table.c.job == job, table.c.generation == generation, table.c.step == step)
            connection.execute(delete(table).where(*mine))


def _wanted(connection: Connection, job: str) -> Wanted | None:
    """Return it for the newest started generation, None if none started."""
    spec = connection.scalar(select(jobs.c.spec).where(jobs.c.job == job))
    lineage = newest_lineage(connection, job)
    found = readable("jobs", job, load, spec, JobSpec, job=job) if spec else None
    return Wanted.of(found, lineage) if found is not None and lineage is not None else None


def read(connection: Connection, jobs: Sequence[str]) -> tuple[ShardCopy, ...]:
    """Return all kept copies of these jobs."""
    query = select(persistent_copies).where(persistent_copies.c.job.in_(sorted(jobs)))
    return tuple(_copy(row) for row in connection.execute(query)) if jobs else ()


class NewestStored:
    """The newest complete step in the store for each job: the one that a restore would name. Read every second, so it
    counts only ranks of steps newer than the one it knows. Belongs to one thread at a time."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[Mapping[tuple[int, int], int], Wanted | None]] = {}
        self._points: dict[str, StoredPoint] = {}

    def read(self, connection: Connection, jobs: Collection[str]) -> StoredPoints:
        """Return the point of each of these jobs that has one, as this transaction sees them."""
        marks = _versions(connection, jobs)
        for job, versions in marks.items():
            seen, before = self._seen.get(job, ({}, None))
            if versions == seen:
                continue
            wanted, known = _wanted(connection, job), self._points.pop(job, None)
            for generation, step in sorted(versions, key=newest_first):
                if wanted is None or not is_alive(generation, step, wanted.lineage):
                    continue
                ranks = wanted.saved_by(generation)
                if (wanted == before and known == StoredPoint(step, generation)) or (
                    _ranks_of(connection, job, generation, step, ranks) == ranks
                ):
                    self._points[job] = StoredPoint(step, generation)
                    break
            self._seen[job] = (versions, wanted)
        self._seen = {job: seen for job, seen in self._seen.items() if job in marks}
        self._points = {job: point for job, point in self._points.items() if job in marks}
        return dict(self._points)


class PersistentCopies:
    """Keeps decoded copies: a job of 80,000 ranks has as many of each step. Belongs to one thread at a time."""

    def __init__(self) -> None:
        self._known: dict[StepKey, tuple[int, tuple[ShardCopy, ...]]] = {}

    def read(self, connection: Connection, wanted: Mapping[str, Wanted]) -> tuple[ShardCopy, ...]:
        """Return the copies of these jobs that a restore may want, as this transaction sees them."""
        if not wanted:
            return ()
        marks = _versions(connection, wanted)
        read: list[StepKey] = []
        for job, versions in sorted(marks.items()):

            def copies_of(
                generation: int, step: int, job: str = job, versions: Mapping[tuple[int, int], int] = versions
            ) -> Sequence[ShardCopy]:
                key, version = (job, generation, step), versions[generation, step]
                of_step = self._known.get(key)
                if of_step is None or of_step[0] != version:
                    of_step = self._known[key] = (version, _of_step(connection, *key))
                return of_step[1]

            read += sorted((job, *mark) for mark in restorable(versions, wanted[job], copies_of))
        present = set(read)
        self._known = {key: of for key, of in self._known.items() if key in present or key[0] not in wanted}
        return tuple(copy for key in read for copy in self._known[key][1])

    def forget_others(self, jobs: Collection[str]) -> None:
        """Drop everything but these jobs."""
        self._known = {key: of for key, of in self._known.items() if key[0] in jobs}


_MARK = (persistent_steps.c.job, persistent_steps.c.generation, persistent_steps.c.step)


def _marks(connection: Connection, names: Collection[str]) -> dict[str, set[tuple[int, int]]]:
    """Return job -> the (generation, step) that have copies."""
    found: dict[str, set[tuple[int, int]]] = {}
    for job, generation, step in connection.execute(select(*_MARK).where(persistent_steps.c.job.in_(sorted(names)))):
        found.setdefault(job, set()).add((generation, step))
    return found


def _versions(connection: Connection, names: Collection[str]) -> dict[str, dict[tuple[int, int], int]]:
    """Return job -> (generation, step) that has copies -> its version."""
    found: dict[str, dict[tuple[int, int], int]] = {}
    query = select(*_MARK, persistent_steps.c.version).where(persistent_steps.c.job.in_(sorted(names)))
    for job, generation, step, version in connection.execute(query):
        found.setdefault(job, {})[generation, step] = version
    return found


def _ranks_of(connection: Connection, job: str, generation: int, step: int, world_size: int) -> int:
    """Return the number of ranks that have a copy of a step."""
    columns = persistent_copies.c
    mine = (columns.job == job, columns.generation == generation, columns.step == step, columns.rank < world_size)
    return connection.scalar(select(func.count()).where(*mine)) or 0


def _of_step(connection: Connection, job: str, generation: int, step: int) -> tuple[ShardCopy, ...]:
    columns = persistent_copies.c
    mine = (columns.job == job, columns.generation == generation, columns.step == step)
    query = select(persistent_copies).where(*mine).order_by(columns.rank)
    return tuple(_copy(row) for row in connection.execute(query))


def _known(
    connection: Connection, found: Mapping[tuple[str, int, int, int], ShardCopy]
) -> dict[tuple[str, int, int, int], tuple[int, str]]:
    known = {}
    columns = persistent_copies.c
    names, generations, steps, ranks = (sorted(set(column)) for column in zip(*found, strict=True))
    for start in range(0, len(ranks), _CHUNK):
        query = select(persistent_copies).where(
            columns.job.in_(names),
            columns.generation.in_(generations),
            columns.step.in_(steps),
            columns.rank.in_(ranks[start : start + _CHUNK]),
        )
        for row in connection.execute(query):
            known[row.job, row.generation, row.step, row.rank] = (row.size_bytes, row.digest)
    return known


def _copy(row: Any) -> ShardCopy:  # noqa: ANN401 - a row's columns have no static type
    return ShardCopy(
        job=row.job,
        generation=row.generation,
        step=row.step,
        rank=row.rank,
        tier=Tier.PERSISTENT,
        host_id="",
        size_bytes=row.size_bytes,
        digest=row.digest,
    )
