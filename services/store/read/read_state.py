"""The present state of jobs for users, with their ranks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

import msgspec
from sqlalchemy import Connection, Row, case, func, select

from flyball.contracts.cluster import JobSpec, JobState
from flyball.contracts.decisions import GenerationPlan
from flyball.contracts.events import Event, EventKind
from flyball.contracts.reports.signals import EngineStatus
from flyball.contracts.reports.training_health import loss_value
from services.record.codec import load, plain, shown
from services.rules import hang_findings
from services.runtime.list_filters import JobFilter
from services.runtime.paging import Page
from services.store.read.job_doings import FoundJob, doings
from services.store.read.readable_pages import readable_page
from services.store.reports.rank_rows import KnownRank, known_ranks
from services.store.sql import tables
from services.store.sql.events import newest_of_jobs
from services.store.sql.set_aside import readable
from services.store.sql.shared_reads import HAS_ENDED, KeptPlans, plan_of

Json = dict[str, Any]
_FIRST = Page()
_ALL_JOBS = JobFilter()


def moment(at: float) -> float | None:
    """Turn the tables' 0.0, which means never, into None."""
    return at or None


def jobs(
    connection: Connection,
    name: str | None = None,
    page: Page = _FIRST,
    *,
    open_only: bool = False,
    wanted: JobFilter = _ALL_JOBS,
    plans: KeptPlans[PlanOutline] | None = None,
    with_ranks: bool = False,
) -> list[Json]:
    """Return a page of all jobs (or of those that have not ended), oldest first, or the one with that name; if asked
    for, with the ranks of its newest granted generation, of which a large job has thousands."""
    kept = plans or job_plans()

    def items_of(rows: Sequence[Row[Any]]) -> list[Json | None]:
        outlines = {row.job: kept.read(connection, row.job, row.generation) for row in rows}
        times = progress(connection, [row.job for row in rows])
        apart = _save_intervals(connection, rows, outlines)
        given = ((row, outlines[row.job], times.get(row.job, JobProgress())) for row in rows)
        found = (readable("jobs", one[0].job, _found, *one, job=one[0].job) for one in given)
        doing = doings(connection, [job for job in found if job is not None])

        def whole(row: Row[Any]) -> Json:
            shown = _job(row, outlines[row.job], times.get(row.job, JobProgress()))
            shown |= {"doing": doing[row.job], "save_interval": apart.get(row.job)}
            return shown | (_ranks(connection, row) if with_ranks else {})

        return [readable("jobs", row.job, whole, row, job=row.job) for row in rows]

    def rows_of(page: Page) -> Sequence[Row[Any]]:
        return _rows(connection, name, page, open_only=open_only, wanted=wanted)

    return readable_page(page, rows_of, lambda row: str(row.job), items_of)


def _rows(
    connection: Connection, name: str | None, page: Page, *, open_only: bool, wanted: JobFilter
) -> Sequence[Row[Any]]:
    columns = tables.jobs.c
    query = select(tables.jobs).order_by(columns.submitted_at.desc(), columns.job.desc()).limit(page.limit)
    if name is not None:
        query = query.where(columns.job == name)
    if open_only:
        query = query.where(~HAS_ENDED)
    if wanted.states:
        query = query.where(columns.state.in_([state.value for state in wanted.states]))
    if wanted.since:
        query = query.where(columns.submitted_at >= wanted.since)
    if page.before:
        at = select(columns.submitted_at).where(columns.job == page.before).scalar_subquery()
        query = query.where((columns.submitted_at < at) | ((columns.submitted_at == at) & (columns.job < page.before)))
    return connection.execute(query).all()[::-1]


LOOKED_AT = 8  # hosts of a job, to see that it trains: all its ranks make steps together


class PlanOutline(msgspec.Struct, frozen=True):
    """What a list shows of a generation's plan."""

    restart_count: int = 0
    used_restarts: int = 0
    hosts: int = 0
    leader: str = ""  # the host of rank 0
    some: Mapping[str, tuple[int, ...]] = {}  # some of its hosts, with their ranks


def job_plans() -> KeptPlans[PlanOutline]:
    """Return a cache: decoding the plans of thousands of hosts takes long, and they never change."""
    return KeptPlans(_outline, PlanOutline())


def _outline(plan: GenerationPlan) -> PlanOutline:
    leader = next((host.host_id for host in plan.hosts if 0 in host.ranks), "")
    some = {host.host_id: host.ranks for host in plan.hosts[:LOOKED_AT]}
    return PlanOutline(plan.restart_count, plan.used_restarts, len(plan.hosts), leader, some)


def _found(row: Row[Any], outline: PlanOutline, times: JobProgress) -> FoundJob:
    return FoundJob(
        row.job,
        row.generation,
        JobState(row.state),
        row.message,
        row.newest_step,
        row.ended_at or times.started_at or row.submitted_at,
        times.last_step_at,
        times.step_s,
        times.steps_per_s,
        outline.some,
        outline.hosts,
    )


def _ranks(connection: Connection, job: Row[Any]) -> Json:
    """Return a job's ranks, and when the last of them reported."""
    plan = plan_of(connection, job.job, job.generation)
    given = {host.host_id: host.ranks for host in plan.hosts} if plan else {}
    known = known_ranks(connection, {job.job: job.generation}, {job.job: given}).get(job.job, {})
    placed = sorted((rank, host_id) for host_id, ranks in given.items() for rank in ranks)
    return {
        "last_report_at": max((rank.reported_at for rank in known.values()), default=0.0) or None,
        "ranks": [_rank(rank, host_id, known.get(rank)) for rank, host_id in placed],
    }


def _save_intervals(
    connection: Connection, rows: Sequence[Row[Any]], outlines: Mapping[str, PlanOutline]
) -> dict[str, Json]:
    """Return each job's interval of saved steps, as reported by the engine that decides it: rank 0's."""
    leaders = {job: outline.leader for job, outline in outlines.items() if outline.leader}
    generations = {row.job: row.generation for row in rows}
    hosts = tables.hosts.c
    query = select(hosts.host_id, hosts.engine).where(hosts.host_id.in_(sorted(set(leaders.values()))))
    rows_of_engines = connection.execute(query).all()
    engines = {row.host_id: readable("hosts", row.host_id, load, row.engine, EngineStatus) for row in rows_of_engines}
    return {
        reported.job: {"wanted_steps": reported.wanted_steps, "every_steps": reported.every_steps}
        | {"save_s": reported.save_s, "step_s": reported.step_s}
        for job, host_id in leaders.items()
        for engine in [engines.get(host_id)]
        for reported in (engine.intervals if engine is not None else ())
        if (reported.job, reported.generation) == (job, generations[job])
    }


def _job(row: Row[Any], outline: PlanOutline, times: JobProgress) -> Json:
    spec: JobSpec = load(row.spec, JobSpec)
    return {
        "job": row.job,
        "spec": plain(shown(spec)),
        "state": JobState(row.state).value,
        "message": row.message,
        "world_size": spec.world_size,
        "asked_world_size": spec.as_asked.world_size,
        "generation": row.generation,
        "hosts": outline.hosts,
        "restart_count": outline.restart_count,
        "restarts_used": outline.used_restarts,
        "newest_step": row.newest_step,
        "loss": {"value": loss_value(float(row.loss)), "step": row.loss_step} if row.loss else None,
        "submitted_at": row.submitted_at,
        "ended_at": moment(row.ended_at),
        "since": moment(row.ended_at) or times.started_at or row.submitted_at,
        "started_at": times.started_at,
        "generation_started_at": times.generation_started_at,
        "last_step_at": times.last_step_at,
        "step_s": times.step_s,
        "stop_requested": bool(row.stop_requested),
    }


def _rank(rank: int, host_id: str, known: KnownRank | None) -> Json:
    if known is None:
        return {"rank": rank, "host_id": host_id, "pid": None, "step": -1, "phase": "waiting"} | _NOTHING
    exited = known.exited
    return {
        "rank": rank,
        "host_id": host_id,
        "pid": known.pid or None,
        "step": known.step,
        "phase": "exited" if exited else known.phase.name.lower(),
        "stands": _stands(known),
        "reported_at": moment(known.reported_at),
        "exit_code": exited.exit_code if exited else None,
        "signal_number": exited.signal_number if exited else None,
    }


_NOTHING: Json = {"stands": "", "reported_at": None, "exit_code": None, "signal_number": None}


def _stands(known: KnownRank) -> str:
    found = hang_findings.find([known.stand]) if known.stand is not None and known.exited is None else None
    return found.sentence if found is not None else ""


def job_counts(connection: Connection) -> dict[str, int]:
    """Return how many jobs are open, and how many have ended."""
    total, ended = (select(func.count()).select_from(tables.jobs), select(func.count()).where(HAS_ENDED))
    counted = connection.execute(total).scalar_one(), connection.execute(ended).scalar_one()
    return {"open": counted[0] - counted[1], "ended": counted[1]}


# --- progress --------------------------------------------------------------------------------------------------------

MAX_JOBS = 50  # of a page: for each of them the end of its event log is read
NEWEST_EVENTS = 10  # a sensor summarizes steps about once a second


class JobProgress(msgspec.Struct, frozen=True):
    """Times are wall clock; None: unknown."""

    started_at: float | None = None  # of the first generation since it was submitted; of an adopted job, of all
    generation_started_at: float | None = None  # of the newest one that was started
    last_step_at: float | None = None
    step_s: float | None = None  # recent median
    steps_per_s: float = 0.0  # over the last seconds in which steps were made


def progress(connection: Connection, jobs: Sequence[str]) -> dict[str, JobProgress]:
    """Return the progress of each of these jobs. With more than MAX_JOBS, only the last ones include steps."""
    generations = tables.generations.c
    at = generations.started_at
    since = case((at >= tables.jobs.c.submitted_at, at))
    query = (
        select(generations.job, func.coalesce(func.min(since), func.min(at)), func.max(at))
        .join(tables.jobs, tables.jobs.c.job == generations.job)
        .where(generations.job.in_(sorted(jobs)), at > 0.0)
        .group_by(generations.job)
    )
    found = {job: JobProgress(first, newest) for job, first, newest in connection.execute(query)}
    shown = [job for job in list(jobs)[-MAX_JOBS:] if job in found]
    newest: defaultdict[str, list[Event]] = defaultdict(list)
    for event in newest_of_jobs(connection, shown, EventKind.STEPS, NEWEST_EVENTS):
        newest[event.job].append(event)
    for job in shown:
        last_step_at, step_s, steps_per_s = _steps(newest[job])
        found[job] = msgspec.structs.replace(
            found[job], last_step_at=last_step_at, step_s=step_s, steps_per_s=steps_per_s
        )
    return found


def _steps(newest: Sequence[Event]) -> tuple[float | None, float | None, float]:
    """The last step, the usual time of one, and the steps per second of the newest generation."""
    times: defaultdict[tuple[int, int], dict[int, float]] = defaultdict(dict)  # (generation, rank) -> step -> when
    for event in newest:
        times[event.generation, event.rank] |= _completed(event)
    gaps = [at - found[step - 1] for found in times.values() for step, at in found.items() if step - 1 in found]
    last_step_at = max((at for found in times.values() for at in found.values()), default=None)
    steps = times[max(times)] if times else {}
    spans_s = max(steps.values()) - min(steps.values()) if len(steps) > 1 else 0.0
    steps_per_s = (max(steps) - min(steps)) / spans_s if spans_s > 0.0 else 0.0
    return last_step_at, median(gaps) if gaps else None, steps_per_s


def _completed(event: Event) -> dict[int, float]:
    """Return when each step of a summary was completed. One that takes seconds has a summary of its own."""
    first, times = event.data.get("first_step"), event.data.get("completed_at")
    if not isinstance(first, int) or not isinstance(times, list):
        return {}
    return {first + i: float(at) for i, at in enumerate(times) if isinstance(at, int | float)}
