"""The pages of hosts. /hosts: which machines? /hosts/NAME: how is this one?"""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from services.dashboard.site import Json, Site, newest
from services.runtime.list_filters import IncidentFilter, OrderFilter
from services.runtime.paging import MAX_LIMIT, Page

MAX_INCIDENTS = 20  # of one host


def router(site: Site) -> APIRouter:
    routes = APIRouter(include_in_schema=False)

    @routes.get("/hosts")
    def show_hosts(request: Request) -> Response:
        """The grid itself is drawn from /v1/host-map."""
        return site.page(request, "hosts.html", lambda: {"map": site.reads.host_map()})

    @routes.get("/hosts/{host_id}")
    def show_host(request: Request, host_id: str) -> Response:
        return site.page(request, "host.html", lambda: _host(site, host_id))

    return routes


def _host(site: Site, host_id: str) -> Json:
    host = site.reads.host(host_id)
    targets = (host_id, f"domain:{host['failure_domain']}")
    incidents, is_cut = newest(
        lambda page: site.reads.incidents(None, page, IncidentFilter(host_id=host_id)), MAX_INCIDENTS
    )
    return {
        "host": host,
        "orders": site.reads.orders(Page(MAX_LIMIT), OrderFilter(targets=targets)),
        "incidents": incidents,
        "more_incidents": is_cut,
    }
