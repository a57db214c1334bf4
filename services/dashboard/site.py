"""What every page has: the login, the headers, the position of the event log from which it goes on live."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from http import HTTPStatus
from typing import Annotated, Any, Protocol
from urllib.parse import parse_qsl, urlencode

from fastapi import Query, Request
from starlette.responses import HTMLResponse, Response

from flyball.contracts.clock import Clock
from flyball.contracts.errors import FlyballError
from flyball.contracts.events import Event, EventKind
from flyball.contracts.identity import NAME_PATTERN
from goodput.account.options import AccountOptions
from services.dashboard.rendering import templates
from services.runtime.http.auth import Authenticator, Role
from services.runtime.http.problem_details import details_of
from services.runtime.list_filters import DecisionFilter, HostFilter, IncidentFilter, JobFilter, OrderFilter
from services.runtime.paging import EventLogReader, Page

Json = dict[str, Any]
RUN_PATTERN = r"^(job|simulation):[A-Za-z0-9][A-Za-z0-9._-]{0,98}$"
DECISION = re.compile(r"dec-[0-9]{1,18}")
Name = Annotated[str, Query(pattern=f"^$|{NAME_PATTERN}")]  # of a job or a host; '': of any
Before = Annotated[str, Query(max_length=32)]  # the item that a page of a list ends before; '': the newest page
MAX_FILTERS = 32
MAY_LOOK = (Role.READER, Role.OPERATOR)

CONTENT_SECURITY_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "connect-src 'self'",
        "img-src 'self' data:",
        "base-uri 'none'",
        "form-action 'self'",
        "frame-ancestors 'none'",
    )
)
HEADERS = {
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
    "Referrer-Policy": "same-origin",
    "Cache-Control": "no-store",
}


class PageEvents(EventLogReader, Protocol):
    """The event log."""

    def newest(
        self, job: str | None, limit: int, kinds: Collection[EventKind] = (), since: float = 0.0
    ) -> list[tuple[int, Event]]:
        """Return the newest `limit` pairs of what `read` selects, oldest first."""
        ...


class PageReads(Protocol):
    """What pages show, as the API replies it. Raises NotFound."""

    def jobs(self, page: Page, *, open_only: bool, wanted: JobFilter) -> list[Json]: ...

    def job_counts(self) -> dict[str, int]: ...

    def job(self, name: str) -> Json: ...

    def host(self, host_id: str) -> Json: ...

    def hosts(self, page: Page, *, also_left: bool, wanted: HostFilter) -> list[Json]: ...

    def host_states(self) -> dict[str, int]: ...

    def incidents(self, job: str | None, page: Page, wanted: IncidentFilter) -> list[Json]: ...

    def incident(self, incident_id: str) -> Json: ...

    def decisions(self, job: str | None, page: Page, wanted: DecisionFilter) -> list[Json]: ...

    def decision(self, decision_id: str) -> Json: ...

    def checkpoints(self, job: str) -> Json: ...

    def recoverability(self, job: str) -> Json: ...

    def host_map(self) -> Json: ...

    def orders(self, page: Page, wanted: OrderFilter) -> list[Json]: ...


class RunReports(Protocol):
    """Runs by their names, `job:NAME` or `simulation:NAME`, as the API replies them. Raises NotFound, InvalidMessage,
    TooBusy."""

    def of_job(self, job: str, options: AccountOptions, bins: int = 0, *, all_runs: bool = False) -> Json: ...

    def compare(self, a: str, b: str) -> Json: ...

    def simulations(self) -> Json: ...

    def simulation(self, name: str) -> Json: ...


class Site:
    """Renders pages for those who may look, and the login for others."""

    def __init__(
        self,
        authenticator: Authenticator,
        reads: PageReads,
        events: PageEvents,
        runs: RunReports,
        clock: Clock,
    ) -> None:
        self.reads = reads
        self.runs = runs
        self.clock = clock
        self._authenticator = authenticator
        self.events = events

    def page(self, request: Request, template: str, content: Callable[[], Json]) -> Response:
        """Respond with a page about `content()`. Blocks: call it in a thread."""
        if not self.may_look(request):
            return self.login(request)
        position = self.events.last()  # read first: what happens meanwhile is shown again, and nothing is missed
        try:
            page = (
                templates().get_template(template).render(content() | {"here": request.url.path, "position": position})
            )
        except FlyballError as error:
            return self.failed(request, error)
        return HTMLResponse(page, headers=HEADERS)

    def failed(self, request: Request, error: FlyballError) -> Response:
        """Respond with an error as a page: its cause and the next step."""
        page = templates().get_template("error.html").render(here=request.url.path, position=0, error=error)
        problem = details_of(error)
        return HTMLResponse(page, problem.status, HEADERS | problem.headers)

    def refused(self, request: Request, error: FlyballError) -> Response:
        """Respond to a browser that may not have a page, or not now."""
        return self.login(request) if error.status == HTTPStatus.UNAUTHORIZED else self.failed(request, error)

    def part(self, request: Request, template: str, content: Callable[[], Json]) -> Response:
        """Respond with a part of a page, for `data-from`. An error is a line of it; at 503 it stays as it is."""
        if not self.may_look(request):
            return self.login(request)
        try:
            part = templates().get_template(template).render(content())
        except FlyballError as error:
            if error.status == HTTPStatus.SERVICE_UNAVAILABLE:
                return HTMLResponse(error.message, error.status, HEADERS)
            part = templates().get_template("part_error.html").render(error=error)
        return HTMLResponse(part, headers=HEADERS)

    def login(
        self,
        request: Request,
        *,
        problem: str = "",
        status: int = 401,
        after: str = "",
        filters: str = "",
        token: str = "",
    ) -> Response:
        """Respond with the login, which leads on to the page `after` with its `filters`, a query; '': to the page that
        was requested. `token`: is filled in."""
        if not after:
            after, filters = request.url.path, request.url.query
        then = {"after": local_path(after), "filters": filters_of(filters)}
        page = templates().get_template("login.html").render(problem=problem, token=token, **then)
        return HTMLResponse(page, status, HEADERS)

    def may_look(self, request: Request) -> bool:
        principal = self._authenticator.principal(request.scope["headers"])
        return principal is not None and principal.role in MAY_LOOK


def newest(read: Callable[[Page], list[Json]], most: int, before: str = "") -> tuple[list[Json], bool]:
    """Return the newest items of a list, newest first, and whether there are earlier ones."""
    found = read(Page(most + 1, before))
    return found[::-1][:most], len(found) > most


def wants_page(request: Request) -> bool:
    """Whether a browser asks for something to show, rather than a program for data."""
    return "text/html" in request.headers.get("accept", "") and not request.url.path.startswith("/v1/")


def local_path(wanted: str) -> str:
    """Return the path in `wanted` if it is of a page of this site, else "/": nobody is sent to another site, nor to a
    link that logs in, nor to a page with a fragment of another site."""
    path = re.split(r"[?#]", wanted, maxsplit=1)[0]
    is_local = path.startswith("/") and not path.startswith(("//", "/\\", "/login", "/logout"))
    return path if is_local and path.isprintable() and path.isascii() else "/"


def filters_of(query: str) -> str:
    """Return the query of a list, encoded anew and without a token: nothing in it leaves the query."""
    try:
        pairs = parse_qsl(query, max_num_fields=MAX_FILTERS)
    except ValueError:
        return ""
    return urlencode([(name, value) for name, value in pairs if name != "token"])
