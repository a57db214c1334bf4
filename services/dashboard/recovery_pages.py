"""/recovery: what would we lose right now?"""

from __future__ import annotations

from contextlib import suppress

from fastapi import APIRouter, Request
from starlette.responses import Response

from flyball.contracts.errors import NotFound
from services.dashboard.site import Json, Site
from services.runtime.list_filters import JobFilter
from services.runtime.paging import Page

MAX_JOBS = 20  # open ones, the last submitted: the copies of each are read


def router(site: Site) -> APIRouter:
    routes = APIRouter(include_in_schema=False)

    @routes.get("/recovery")
    def show_recovery(request: Request) -> Response:
        return site.page(request, "recovery.html", lambda: _recovery(site))

    return routes


def _recovery(site: Site) -> Json:
    jobs = site.reads.jobs(Page(MAX_JOBS), open_only=True, wanted=JobFilter())
    found = []
    for job in reversed(jobs):
        with suppress(NotFound):  # removed since
            found.append(site.reads.recoverability(job["job"]))
    return {"open_jobs": site.reads.job_counts()["open"], "jobs": found}
