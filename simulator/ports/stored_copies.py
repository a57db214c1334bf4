"""The copies on the persistent tier that a simulated database has, as its readers see them. Which of them a restore may
want, the services' own rule says."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from flyball.contracts.checkpoints import Lineage, ShardCopy, StoredPoint, StoredPoints, is_alive
from flyball.contracts.cluster import JobSpec
from services.record.stored_steps import Wanted, newest_first, restorable
from simulator.ports.memory import Memory

_OfJob = dict[tuple[int, int], list[ShardCopy]]  # by generation and step


def wanted_copies(memory: Memory, spec: JobSpec, lineage: Lineage) -> tuple[ShardCopy, ...]:
    """Those of a job that a restore in this history may want."""
    found = _of(memory, spec.job)

    def copies_of(generation: int, step: int) -> Sequence[ShardCopy]:
        return found[generation, step]

    marks = restorable(found, Wanted.of(spec, lineage), copies_of)
    return tuple(copy for mark in sorted(marks) for copy in found[mark])


def stored_points(memory: Memory) -> StoredPoints:
    """The newest complete step of each job, in the history of its newest started generation."""
    points: dict[str, StoredPoint] = {}
    for name, job in memory.jobs.items():
        started = [row.lineage for (of, _), row in memory.generations.items() if of == name and row.lineage]
        found = _of(memory, name)
        if not started or not found:
            continue
        wanted = Wanted.of(job.spec, started[-1])
        for mark in sorted(found, key=newest_first):
            if is_alive(*mark, wanted.lineage) and wanted.is_complete(mark[0], found[mark]):
                points[name] = StoredPoint(mark[1], mark[0])
                break
    return points


def _of(memory: Memory, job: str) -> _OfJob:
    found: _OfJob = defaultdict(list)
    for copy in memory.persistent_copies.values():
        if copy.job == job:
            found[copy.generation, copy.step].append(copy)
    return found
