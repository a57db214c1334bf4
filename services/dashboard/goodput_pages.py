"""/goodput: was it worth it? Where the time of a run went, and how two runs differ."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from goodput.account.options import AccountOptions
from services.dashboard import worth
from services.dashboard.site import RUN_PATTERN, Json, Site
from services.runtime.list_filters import JobFilter
from services.runtime.paging import Page

MAX_JOBS = 200  # to choose from, the last submitted
BINS = 160  # slices of the time axis: five pixels each, two on a phone

Run = Annotated[str, Query(pattern=f"^$|{RUN_PATTERN}")]
RunGiven = Annotated[str, Query(pattern=RUN_PATTERN)]
OtherRun = Annotated[str, Query(alias="with", pattern=f"^$|{RUN_PATTERN}")]


def router(site: Site) -> APIRouter:
    routes = APIRouter(include_in_schema=False)

    @routes.get("/goodput")
    def show_goodput(request: Request, run: Run = "", other: OtherRun = "") -> Response:
        return site.page(request, "goodput/page.html", lambda: _choice(site, run, other))

    @routes.get("/goodput/run")
    def show_run(request: Request, run: RunGiven) -> Response:
        """A part of the page: what the supervisor may have to calculate for longer."""
        return site.part(request, "goodput/run.html", lambda: _run(site, run))

    @routes.get("/goodput/comparison")
    def show_comparison(request: Request, run: RunGiven, other: OtherRun) -> Response:
        """Another part."""
        return site.part(request, "goodput/comparison.html", lambda: _comparison(site, run, other))

    return routes


def _choice(site: Site, run: str, other: str) -> Json:
    jobs = site.reads.jobs(Page(MAX_JOBS), open_only=False, wanted=JobFilter())[::-1]
    simulations = site.runs.simulations()
    usable = [one for one in simulations["items"] if not one["problem"]]
    started = next((job for job in jobs if job["started_at"]), None)
    first = f"job:{started['job']}" if started else f"simulation:{usable[0]['name']}" if usable else ""
    return {
        "jobs": jobs,
        "total_jobs": sum(site.reads.job_counts().values()),
        "simulations": usable,
        "broken": [one for one in simulations["items"] if one["problem"]],
        "left_out": simulations["left_out"],
        "folder": simulations["folder"],
        "listed": {f"job:{job['job']}" for job in jobs} | {f"simulation:{one['name']}" for one in usable},
        "run": run or first,
        "other": other if other != (run or first) else "",
    }


def _run(site: Site, run: str) -> Json:
    kind, _, name = run.partition(":")
    if kind == "simulation":
        simulation = site.runs.simulation(name)
        report = simulation["goodput"] | {"timeline": simulation["timeline"]}
    else:
        simulation, report = None, site.runs.of_job(name, AccountOptions(), BINS)
    zoom_s = worth.zoom_s(report)
    rows = worth.waterfall(report, zoom_s)
    return {
        "report": report,
        "simulation": simulation,
        "name": name,
        "rows": rows,
        "zoom_s": zoom_s,
        "groups": worth.groups_of(rows),
        "lanes": worth.lanes(report),
        "marks": worth.marks(report),
        "axis": worth.axis(report),
        "bins": len(report.get("timeline") or ()),
        "lane_height": worth.LANE,
    }


def _comparison(site: Site, run: str, other: str) -> Json:
    found = site.runs.compare(other, run)  # what is different in the run that is looked at
    a, b = _names(other, run)
    return {
        "a": a,
        "b": b,
        "measures": [row for row in found["measures"] if row["a"] is not None or row["b"] is not None],
        "goodput": found["measures"][0],
        "categories": worth.side_by_side(found["categories"]),
        "causes": worth.side_by_side(found["causes"]),
    }


def _names(*runs: str) -> list[str]:
    """What runs are called: a job and a simulation of one name, with their kinds."""
    names = [run.partition(":")[2] for run in runs]
    return names if len(set(names)) == len(names) else [run.replace(":", " ", 1) for run in runs]
