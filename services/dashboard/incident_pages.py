"""The pages of what went wrong. /incidents: what is wrong? /incidents/ID: what happened, and why was this done?"""

from __future__ import annotations

import re

from fastapi import APIRouter, Request
from starlette.responses import RedirectResponse, Response

from flyball.contracts.decisions import IncidentState
from flyball.contracts.errors import FlyballError, NotFound
from goodput.account.options import AccountOptions
from services.dashboard import story
from services.dashboard.rendering import address
from services.dashboard.site import DECISION, HEADERS, Before, Json, Name, Site, newest
from services.runtime.list_filters import OPEN_INCIDENTS, IncidentFilter

PAGE_SIZE = 50
_INCIDENT = re.compile(r"inc-[0-9]{1,18}")
# The choices of the filter, each with its states.
FILTERS: dict[str, tuple[IncidentState, ...]] = {
    "all": (),
    "open": OPEN_INCIDENTS,
    "escalated": (IncidentState.ESCALATED,),
    "resolved": (IncidentState.RESOLVED,),
}


def router(site: Site) -> APIRouter:
    routes = APIRouter(include_in_schema=False)

    @routes.get("/incidents")
    def list_incidents(
        request: Request, state: str = "all", job: Name = "", host: Name = "", before: Before = ""
    ) -> Response:
        return site.page(request, "incidents.html", lambda: _incidents(site, state, job, host, before))

    @routes.get("/incidents/{incident_id}")
    def show_incident(request: Request, incident_id: str) -> Response:
        return site.page(request, "incident.html", lambda: _incident(site, incident_id))

    @routes.get("/incidents/{incident_id}/cost")
    def show_cost(request: Request, incident_id: str) -> Response:
        """A part of the page: what the supervisor may have to calculate for longer."""
        return site.part(request, "incident_cost.html", lambda: _cost(site, incident_id))

    @routes.get("/decisions/{decision_id}")
    def find_decision(request: Request, decision_id: str) -> Response:
        """Lead to the decision in the story of its incident, else among those of its job, else to the host that it
        checks."""
        if not site.may_look(request):
            return site.login(request)
        try:
            page = _page_of(site.reads.decision(_checked(decision_id, DECISION)))
        except FlyballError as error:
            return site.failed(request, error)
        return RedirectResponse(page, 303, HEADERS)

    return routes


def _incidents(site: Site, state: str, job: str, host_id: str, before: str) -> Json:
    chosen = state if state in FILTERS else "all"
    start = before if _INCIDENT.fullmatch(before) else ""
    wanted = IncidentFilter(FILTERS[chosen], host_id)
    incidents, is_cut = newest(lambda page: site.reads.incidents(job or None, page, wanted), PAGE_SIZE, start)
    return {
        "incidents": incidents,
        "chosen": chosen,
        "job": job,
        "host_id": host_id,
        "filters": list(FILTERS),
        "earlier": incidents[-1]["incident_id"] if is_cut else "",
        "is_first": not start,
    }


def _incident(site: Site, incident_id: str) -> Json:
    incident = site.reads.incident(_checked(incident_id, _INCIDENT))
    return {
        "incident": incident,
        "phases": story.phases(incident, site.clock.wall_s()),
        "lines": story.told(incident),
        "logs": story.log_choices(incident, _ranks(site, incident["job"])),
        "restored_from": story.restored_from(incident["restored_from"]),
    }


def _ranks(site: Site, job: str) -> list[Json]:
    """Return the ranks of a job; none if it was removed, or cannot be read."""
    try:
        return list(site.reads.job(job)["ranks"]) if job else []
    except NotFound:
        return []


def _cost(site: Site, incident_id: str) -> Json:
    incident = site.reads.incident(_checked(incident_id, _INCIDENT))
    report = site.runs.of_job(incident["job"], AccountOptions(), all_runs=True)  # it may be of an earlier one
    costs = (cost for cost in report["incidents"] if cost["incident_id"] == incident_id)
    return {"cost": next(costs, None)}


def _page_of(decision: Json) -> str:
    """Return where a decision is shown. Raises NotFound."""
    name: str = decision["decision_id"]
    if decision["incident_id"]:
        return f"/incidents/{decision['incident_id']}#{name}"
    if decision["job"]:
        next_name = f"dec-{int(name.removeprefix('dec-')) + 1}"
        page = address(f"/jobs/{decision['job']}/decisions", before=next_name)
        return f"{page}#{name}"
    check = (decision["action"] or {}).get("plan", {}).get("check")
    if not check:
        raise NotFound(f"{name} is about no job, incident or host.", hint=f"`flyball explain {name}` shows it")
    return f"/hosts/{check['hosts'][0]['host_id']}"


def _checked(name: str, pattern: re.Pattern[str]) -> str:
    if not pattern.fullmatch(name):
        raise NotFound(f"There is no {name[:80]!r}.", hint="look for it in the list of incidents")
    return name
