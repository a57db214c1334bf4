"""Routes of jobs: submit, list, show, stop."""

from __future__ import annotations

import asyncio
from typing import Annotated

from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from flyball.contracts.checkpoints import Lineage, LineageEntry
from flyball.contracts.clock import Clock
from flyball.contracts.cluster import Again, JobSpec, JobState
from flyball.contracts.errors import ConfigurationError, InvalidMessage
from services.api.acts import Acts, ApiStores, DryRun
from services.api.description.openapi import act_replies, body_of, reply_of
from services.api.exchange import (
    BeforeName,
    JobPath,
    Limit,
    SinceQuery,
    json_response,
    page_response,
    read_message,
)
from services.api.ports import Json, ReadModels
from services.api.replies.acts import DryRunReply
from services.api.replies.jobs import JobPage, JobReply
from services.api.strict_route import user_routes
from services.controller.round import job_policy
from services.runtime.list_filters import JobFilter
from services.runtime.paging import DEFAULT_LIMIT, Page

JobStates = Annotated[list[JobState] | None, Query(alias="state", description="Only in these states; may be repeated.")]
MAX_SPEC_BYTES = 1 << 20
MAX_WORLD_SIZE = 100_000
POINT_PATTERN = r"^$|^[0-9]{8}-[0-9]{6}-[0-9]{3}:[0-9]{1,9}:[0-9]{1,15}(:[0-9]{1,9})?$"


def router(acts: Acts, reads: ReadModels, clock: Clock) -> APIRouter:
    routes = user_routes("jobs")

    @routes.post(
        "/v1/jobs",
        status_code=201,
        responses=reply_of((JobReply, DryRunReply), 200) | reply_of(JobReply, 201),
        openapi_extra=body_of(JobSpec),
    )
    async def submit_job(
        request: Request,
        again: Annotated[Again, Query(description="What to do with a job of this name that has ended.")] = Again.NO,
        ended_at: Annotated[
            float | None, Query(ge=0.0, le=1e11, description="Wall clock, seconds since 1970: only if it ended then.")
        ] = None,
        point: Annotated[
            str, Query(pattern=POINT_PATTERN, description="RUN:GENERATION:STEP:RANKS of another database.")
        ] = "",
        dry_run: DryRun = False,
    ) -> Response:
        """Submit a job: 201 if it is new, 200 if the same job exists, 409 if a different one has its name.

        `again` reuses the name of a job that has ended (201): "resume" continues from its newest recovery point,
        "fresh" starts another run. With `ended_at` only if it ended then, so that one of several requests wins.
        `point`, RUN:GENERATION:STEP:RANKS, is where to continue if another database knew that run. RANKS saved the
        step, by default as many as the job has."""
        spec = (await read_message(request, JobSpec, max_bytes=MAX_SPEC_BYTES)).as_asked
        _check(spec)
        run, adopted = _history(point)
        now = clock.wall_s()

        def submit(on: ApiStores) -> tuple[int, Json]:
            is_new = on.jobs.submit(spec, now, again, ended_at=ended_at, run=run, adopted=adopted)
            return 201 if is_new else 200, on.reads.job(spec.job)

        return await acts.carry_out(submit, dry_run=dry_run)

    @routes.get("/v1/jobs", responses=reply_of(JobPage))
    async def list_jobs(
        *,
        limit: Limit = DEFAULT_LIMIT,
        before: BeforeName = "",
        open_only: Annotated[bool, Query(alias="open", description="Only jobs that have not ended.")] = False,
        states: JobStates = None,
        since: SinceQuery = 0.0,
    ) -> Response:
        """List the jobs submitted last, oldest first, without their ranks. `open`: only those that have not ended. Pass
        `next_before` as `before` for older ones. `since`: submitted then or later."""
        wanted = JobFilter(tuple(states or ()), since)
        found = await asyncio.to_thread(reads.jobs, Page(limit, before), open_only=open_only, wanted=wanted)
        return page_response(found, "job", limit)

    @routes.get("/v1/jobs/{job}", responses=reply_of(JobReply))
    async def get_job(job: JobPath) -> Response:
        """Show a job with its ranks."""
        return json_response(await asyncio.to_thread(reads.job, job))

    @routes.post("/v1/jobs/{job}/stop", status_code=202, responses=act_replies(JobReply))
    async def stop_job(job: JobPath, dry_run: DryRun = False) -> Response:
        """Request the end of a job. Idempotent. The response shows the job now, most likely still running."""
        now = clock.wall_s()

        def stop(on: ApiStores) -> tuple[int, Json]:
            on.jobs.request_stop(job, now)
            return 0, on.reads.job(job)

        return await acts.carry_out(stop, dry_run=dry_run)

    return routes


def _history(point: str) -> tuple[str, Lineage]:
    if not point:
        return "", ()
    run, generation, step, *ranks = point.split(":")
    return run, (LineageEntry(int(generation), int(step), world_size=int(ranks[0]) if ranks else 0),)


def _check(spec: JobSpec) -> None:
    """Check what the types cannot express. Raises InvalidMessage."""
    wrong = [
        text
        for is_wrong, text in (
            (not spec.argv, "argv is empty"),
            (spec.nnodes < 1 or spec.nproc_per_node < 1, "nnodes and nproc_per_node must be at least 1"),
            (spec.nnodes * spec.nproc_per_node > MAX_WORLD_SIZE, f"more than {MAX_WORLD_SIZE} ranks"),
            (spec.max_restarts < 0, "max_restarts must not be negative"),
            (spec.stop_grace_s < 0, "stop_grace_s must not be negative"),
            (spec.min_nodes > spec.nnodes, "min_nodes must not exceed nnodes"),
            (bool(spec.hosts) and len(set(spec.hosts)) < spec.nnodes, "hosts names fewer hosts than nnodes"),
        )
        if is_wrong
    ]
    try:
        job_policy.check(spec.policy)
    except ConfigurationError as error:
        raise InvalidMessage(error.message, hint=error.hint) from error
    if wrong:
        raise InvalidMessage(f"The job cannot be run: {'; '.join(wrong)}.", hint="correct the specification")
