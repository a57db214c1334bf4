"""The pages of jobs. "/": are we training? /jobs/NAME: how is this one doing?"""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from flyball.contracts.cluster import JobState
from flyball.contracts.errors import NotFound
from flyball.contracts.events import EventKind
from goodput.account.options import AccountOptions
from services.dashboard import pace
from services.dashboard.rendering import look
from services.dashboard.site import DECISION, Before, Json, Site, newest
from services.dashboard.story import MAX_LOGS
from services.runtime.list_filters import OPEN_INCIDENTS, DecisionFilter, HostFilter, IncidentFilter, JobFilter
from services.runtime.paging import Page

MAX_JOBS = 50  # open ones
MAX_ENDED = 20
MAX_INCIDENTS = 50
MAX_DECISIONS = 50
MAX_RANKS = 256  # of one job; those in trouble first
ENDED = tuple(state for state in JobState if state.ended)
MAX_STEP_EVENTS = 1000  # of a small chart
MAX_BESIDE = 50  # jobs to compare one with
NOW_S = 600.0  # "now" in a report of goodput: the last ten minutes

Midnight = Annotated[float, Query(ge=0.0, le=1e11)]


def router(site: Site) -> APIRouter:
    routes = APIRouter(include_in_schema=False)

    @routes.get("/jobs/{job}")
    def show_job(request: Request, job: str, rank: Annotated[int, Query(ge=0)] = 0) -> Response:
        """`rank`: whose log is shown."""
        return site.page(request, "job.html", lambda: _job(site, job, rank))

    @routes.get("/jobs/{job}/decisions")
    def list_decisions(request: Request, job: str, before: Before = "") -> Response:
        return site.page(request, "decisions.html", lambda: _decisions(site, job, before))

    @routes.get("/jobs/{job}/goodput")
    def show_goodput(request: Request, job: str, since: Midnight = 0.0, part: str = "job") -> Response:
        """A part of a page: what the supervisor may have to calculate for longer."""
        template = "goodput/short.html" if part == "short" else "goodput/part.html"
        return site.part(request, template, lambda: {"report": _goodput(site, job, since)})

    @routes.get("/jobs/{job}/pace")
    def show_pace(request: Request, job: str) -> Response:
        """A part of a page: a small chart."""
        return site.part(request, "pace.html", lambda: _pace(site, job))

    return routes


def overview(site: Site, request: Request) -> Response:
    """Are we training?"""
    return site.page(request, "training.html", lambda: _overview(site))


def _overview(site: Site) -> Json:
    running = site.reads.jobs(Page(MAX_JOBS), open_only=True, wanted=JobFilter())
    ended = site.reads.jobs(Page(MAX_ENDED), open_only=False, wanted=JobFilter(ENDED))
    open_incidents = site.reads.incidents(None, Page(MAX_INCIDENTS), IncidentFilter(OPEN_INCIDENTS))[::-1]
    on_cards = {job["job"] for job in running}
    return {
        "counts": site.reads.job_counts(),
        "running": running[::-1],
        "other_incidents": [incident for incident in open_incidents if incident["job"] not in on_cards],
        "ended": sorted((job for job in ended if job["ended_at"]), key=lambda job: -float(job["ended_at"])),
        "open_incidents": open_incidents,
        "host_states": site.reads.host_states(),
    }


def _pace(site: Site, job: str) -> Json:
    now = site.clock.wall_s()
    events = site.events.newest(job, MAX_STEP_EVENTS, {EventKind.STEPS}, now - pace.SHOWN_S)
    return {"pace": pace.pace((event for _, event in events), now), "bins": pace.BINS, "height": pace.HEIGHT}


def _goodput(site: Site, job: str, since: float) -> Json | None:
    try:
        return site.runs.of_job(job, AccountOptions(from_at=since or None, window_s=NOW_S))
    except NotFound:  # nothing has happened yet
        return None


def _job(site: Site, name: str, rank: int) -> Json:
    job = site.reads.job(name)
    ranks = job["ranks"]
    troubled = sorted(ranks, key=lambda one: look(one["phase"]) == "good")[:MAX_RANKS]  # stable: by rank
    with_log = sorted(ranks, key=lambda one: one["rank"] != rank)[:MAX_LOGS]
    incidents, more_incidents = newest(lambda page: site.reads.incidents(name, page, IncidentFilter()), MAX_INCIDENTS)
    decisions, more_decisions = newest(lambda page: site.reads.decisions(name, page, DecisionFilter()), MAX_DECISIONS)
    others = site.reads.jobs(Page(MAX_BESIDE + 1), open_only=False, wanted=JobFilter())[::-1]
    return {
        "job": job,
        "beside": [other["job"] for other in others if other["job"] != name and other["newest_step"] >= 0],
        "ranks": sorted(troubled, key=lambda one: int(one["rank"])),
        "logs": [{"rank": one["rank"], "host_id": "", "concerned": False} for one in with_log],  # wherever it will be
        "hosts": _hosts(site, {str(one["host_id"]) for one in troubled}),
        "incidents": incidents,
        "more_incidents": more_incidents,
        "open_incidents": site.reads.incidents(name, Page(MAX_INCIDENTS), IncidentFilter(OPEN_INCIDENTS))[::-1],
        "decisions": decisions,
        "more_decisions": more_decisions,
        "checkpoints": site.reads.checkpoints(name),
    }


def _decisions(site: Site, name: str, before: str) -> Json:
    start = before if DECISION.fullmatch(before) else ""
    decisions, is_cut = newest(lambda page: site.reads.decisions(name, page, DecisionFilter()), MAX_DECISIONS, start)
    return {
        "job": site.reads.job(name),
        "decisions": decisions,
        "earlier": decisions[-1]["decision_id"] if is_cut else "",
        "is_first": not start,
    }


def _hosts(site: Site, names: set[str]) -> list[Json]:
    if not names:
        return []
    return site.reads.hosts(Page(len(names)), also_left=False, wanted=HostFilter(host_ids=tuple(sorted(names))))
