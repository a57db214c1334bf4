"""Routes for users: a parameter that a route does not have is refused, with the one that was probably meant; what
operators change is recorded."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable
from difflib import get_close_matches
from typing import Any

from fastapi import APIRouter, Request
from fastapi.routing import APIRoute
from starlette.responses import Response

from services.api.description.openapi import operation_id
from services.api.recorded import CHANGING, recorded
from services.runtime.http.problem_details import FieldError, InvalidFields


class StrictRoute(APIRoute):
    """Refuses unknown query parameters, because ignoring a filter would return everything."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()
        known = [field.alias for field in self.dependant.query_params]

        async def refuse_unknown(request: Request) -> Response:
            check_names(request.query_params, known)
            if request.method in CHANGING:
                return await recorded(request, operation_id(self.name), handle)
            return await handle(request)

        return refuse_unknown


def user_routes(tag: str) -> APIRouter:
    """Return a router for users. Daemons' routes are lenient: a newer daemon may send more."""
    return APIRouter(tags=[tag], route_class=StrictRoute)


def check_names(given: Iterable[str], known: list[str]) -> None:
    """Raise InvalidFields if a given query parameter is not known."""
    wrong = [name for name in dict.fromkeys(given) if name not in known]
    if not wrong:
        return
    errors = tuple(FieldError("query", name[:100], "no such parameter") for name in wrong[:10])
    raise InvalidFields(errors, hint=_hint(wrong[0], known))


def _hint(name: str, known: list[str]) -> str:
    if not known:
        return "this route has no query parameters"
    near = get_close_matches(name[:100], known, n=1)
    return (f"did you mean {near[0]!r}? " if near else "") + f"this route has: {', '.join(sorted(known))}"
