"""Routes of jobs: submit, list, show, stop."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Annotated

from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from flyball.contracts.checkpoints import Lineage, LineageEntry
from flyball.contracts.clock import Clock
from flyball.contracts.cluster import Again, JobSpec
from flyball.contracts.errors import InvalidMessage
from services.api.exchange import (
    JobPath,
    Limit,
    NameOrEmpty,
    json_response,
    notify_all,
    page_response,
    read_message,
)
from services.api.openapi import body_of, media_of
from services.api.ports import JobStore, ReadModels
from services.rules.stream import Wakeup
from services.runtime.paging import DEFAULT_LIMIT, Page

MAX_SPEC_BYTES = 1 << 20
MAX_WORLD_SIZE = 100_000
POINT_PATTERN = r"^$|^[0-9]{8}-[0-9]{6}-[0-9]{3}:[0-9]{1,9}:[0-9]{1,15}$"


def router(jobs: JobStore, reads: ReadModels, wakeup: Wakeup, clock: Clock) -> APIRouter:
    routes = APIRouter(tags=["jobs"])

    @routes.post(
        "/v1/jobs", status_code=201, responses=media_of("application/json", 200), openapi_extra=body_of(JobSpec)
    )
    async def submit_job(
        request: Request,
        again: Annotated[Again, Query()] = Again.NO,
        ended_at: Annotated[float | None, Query(ge=0.0, le=1e11)] = None,
        point: Annotated[str, Query(pattern=POINT_PATTERN)] = "",
    ) -> Response:
        """Submit a job: 201 if it is new, 200 if the same job exists, 409 if a different one has its name.

        `again` reuses the name of a job that has ended (201): "resume" continues from its newest recovery point,
        "fresh" starts another run. With `ended_at` only if it ended then, so that one of several requests wins.
        `point`, RUN:GENERATION:STEP, is where to continue if another database knew that run."""
        spec = await read_message(request, JobSpec, max_bytes=MAX_SPEC_BYTES)
        _check(spec)
        run, adopted = _history(point)
        submit = partial(jobs.submit, ended_at=ended_at, run=run, adopted=adopted)
        is_new = await asyncio.to_thread(submit, spec, clock.wall_s(), again)
        notify_all(wakeup)
        return json_response(await asyncio.to_thread(reads.job, spec.job), 201 if is_new else 200)

    @routes.get("/v1/jobs")
    async def list_jobs(
        limit: Limit = DEFAULT_LIMIT,
        before: NameOrEmpty = "",
        open_only: Annotated[bool, Query(alias="open")] = False,
    ) -> Response:
        """List the jobs submitted last, oldest first. `open`: only those that have not ended. Pass `next_before` as
        `before` for older ones."""
        found = await asyncio.to_thread(reads.jobs, Page(limit, before), open_only=open_only)
        return page_response(found, "job", limit)

    @routes.get("/v1/jobs/{job}")
    async def get_job(job: JobPath) -> Response:
        """Show a job with its ranks."""
        return json_response(await asyncio.to_thread(reads.job, job))

    @routes.post("/v1/jobs/{job}/stop", status_code=202)
    async def stop_job(job: JobPath) -> Response:
        """Request the end of a job. Idempotent. The response shows the job now, most likely still running."""
        await asyncio.to_thread(jobs.request_stop, job, clock.wall_s())
        notify_all(wakeup)
        return json_response(await asyncio.to_thread(reads.job, job), 202)

    return routes


def _history(point: str) -> tuple[str, Lineage]:
    if not point:
        return "", ()
    run, generation, step = point.split(":")
    return run, (LineageEntry(int(generation), int(step)),)


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
            (bool(spec.hosts) and len(set(spec.hosts)) < spec.nnodes, "hosts names fewer hosts than nnodes"),
        )
        if is_wrong
    ]
    if wrong:
        raise InvalidMessage(f"The job cannot be run: {'; '.join(wrong)}.", hint="correct the specification")
