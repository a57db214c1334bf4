"""How a job gets on: when it began, when its newest step was, how long a step takes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from statistics import median

import msgspec
from sqlalchemy import Connection, func, select

from flyball.contracts.events import Event, EventKind
from services.record.codec import load
from services.store.sql import tables

MAX_JOBS = 50  # of a page: for each the end of its log is read
NEWEST_EVENTS = 4  # a sensor sums steps up once a second or so
LEAST_STEPS = 3  # in one of them, to say how long a step takes


class JobProgress(msgspec.Struct, frozen=True):
    """Moments are wall clock; None: not known."""

    started_at: float | None = None  # of the first generation
    generation_started_at: float | None = None  # of the newest one that was started
    last_step_at: float | None = None
    step_s: float | None = None  # lately, in the median


def progress(connection: Connection, jobs: Sequence[str]) -> dict[str, JobProgress]:
    """Of each of these jobs; of very many, steps are read of the last ones only."""
    generations = tables.generations.c
    query = (
        select(generations.job, func.min(generations.started_at), func.max(generations.started_at))
        .where(generations.job.in_(sorted(jobs)), generations.started_at > 0.0)
        .group_by(generations.job)
    )
    found = {job: JobProgress(first, newest) for job, first, newest in connection.execute(query)}
    for job in list(jobs)[-MAX_JOBS:]:
        if job in found:
            last_step_at, step_s = _steps(connection, job)
            found[job] = msgspec.structs.replace(found[job], last_step_at=last_step_at, step_s=step_s)
    return found


def _steps(connection: Connection, job: str) -> tuple[float | None, float | None]:
    events = tables.events.c
    query = (
        select(events.document)
        .where(events.job == job, events.kind == EventKind.STEPS.value)
        .order_by(events.number.desc())
        .limit(NEWEST_EVENTS)
    )
    times = [_completed(load(document, Event)) for document in connection.scalars(query)]
    gaps = [later - earlier for found in times if len(found) >= LEAST_STEPS for earlier, later in pairwise(found)]
    return max((at for found in times for at in found), default=None), median(gaps) if gaps else None


def _completed(event: Event) -> list[float]:
    told = event.data.get("completed_at")
    return [float(at) for at in told if isinstance(at, int | float)] if isinstance(told, list) else []
