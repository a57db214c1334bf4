"""Who may do what: one table of all routes. What is not in it does not exist for anybody."""

from __future__ import annotations

import re
from typing import Literal, cast

import msgspec
from starlette.types import ASGIApp, Receive, Scope, Send

from flyball.contracts.errors import FlyballError, Forbidden, NotFound, Unauthorized
from services.api.problems import problem_of
from services.runtime.http.auth import Authenticator, Principal, Role
from services.runtime.http.problem_details import MethodNotAllowed

PUBLIC: frozenset[Role | None] = frozenset({None, *Role})
READERS: frozenset[Role | None] = frozenset({Role.READER, Role.OPERATOR})
OPERATORS: frozenset[Role | None] = frozenset({Role.OPERATOR})
DAEMONS: frozenset[Role | None] = frozenset({Role.DAEMON})  # of the host that the path names, where it names one

Method = Literal["GET", "HEAD", "POST", "DELETE"]

# (method, path template) -> roles. A page of another site can make a browser send the cookie, which stands for a
# reader: readers may GET only.
ACCESS: dict[tuple[Method, str], frozenset[Role | None]] = {
    ("GET", "/healthz"): PUBLIC,
    ("GET", "/readyz"): PUBLIC,
    ("GET", "/metrics"): PUBLIC,
    ("GET", "/"): PUBLIC,  # the page at / does its own check
    ("GET", "/static/{path:path}"): PUBLIC,
    ("HEAD", "/static/{path:path}"): PUBLIC,
    ("GET", "/openapi.json"): READERS,
    ("HEAD", "/openapi.json"): READERS,
    ("POST", "/v1/reports"): DAEMONS,
    ("GET", "/v1/hosts/{host_id}/commands"): DAEMONS,
    ("POST", "/v1/hosts/{host_id}/updates"): DAEMONS,
    ("POST", "/v1/hosts/{host_id}/standing"): DAEMONS,
    ("GET", "/v1/hosts/{host_id}/departure"): DAEMONS,
    ("POST", "/v1/hosts/{host_id}/token"): OPERATORS,
    ("POST", "/v1/hosts/{host_id}/drain"): OPERATORS,
    ("POST", "/v1/hosts/{host_id}/undrain"): OPERATORS,
    ("POST", "/v1/reader-token"): OPERATORS,
    ("GET", "/v1/hosts"): READERS,
    ("GET", "/v1/hosts/{host_id}"): READERS,
    ("DELETE", "/v1/hosts/{host_id}"): OPERATORS,
    ("POST", "/v1/jobs"): OPERATORS,
    ("GET", "/v1/jobs"): READERS,
    ("GET", "/v1/jobs/{job}"): READERS,
    ("POST", "/v1/jobs/{job}/stop"): OPERATORS,
    ("GET", "/v1/jobs/{job}/logs"): READERS,
    ("POST", "/v1/hosts/{host_id}/log-pieces"): DAEMONS,
    ("GET", "/v1/incidents"): READERS,
    ("GET", "/v1/decisions"): READERS,
    ("GET", "/v1/decisions/{decision_id}"): READERS,
    ("GET", "/v1/checkpoints"): READERS,
    ("GET", "/v1/goodput"): READERS,
    ("GET", "/v1/events"): READERS,
    ("POST", "/v1/events"): OPERATORS,
    ("GET", "/v1/stream"): READERS,
}
_PRINCIPAL = "flyball.principal"


def allowed_roles(method: str, template: str) -> frozenset[str]:
    """The roles that may use a route; none if everybody may."""
    roles = ACCESS[cast("Method", method), template]
    return frozenset() if None in roles else frozenset(role.value for role in roles if role)


class Rule(msgspec.Struct, frozen=True):
    """What holds for a request: who may make it, and which host its path names ('' for none)."""

    roles: frozenset[Role | None]
    host_id: str = ""


class AccessTable:
    """Finds the rule of a request. Raises NotFound or MethodNotAllowed for what is not in the table."""

    def __init__(self, access: dict[tuple[Method, str], frozenset[Role | None]]) -> None:
        self._exact: dict[str, dict[str, frozenset[Role | None]]] = {}
        self._patterns: dict[str, tuple[re.Pattern[str], dict[str, frozenset[Role | None]]]] = {}
        for (method, template), roles in access.items():
            if "{" not in template:
                self._exact.setdefault(template, {})[method] = roles
                continue
            pattern = re.compile(re.sub(r"{(\w+)}", r"(?P<\1>[^/]+)", template.replace("{path:path}", ".*")), re.DOTALL)
            self._patterns.setdefault(template, (pattern, {}))[1][method] = roles

    def rule(self, method: str, path: str) -> Rule:
        host_id = ""
        methods = self._exact.get(path)
        if methods is None:
            for pattern, candidates in self._patterns.values():
                if match := pattern.fullmatch(path):
                    methods, host_id = candidates, match.groupdict().get("host_id", "")
                    break
            else:
                raise NotFound("There is no such path.", hint="see /openapi.json for what there is")
        if method not in methods:
            raise MethodNotAllowed(
                f"{path[:200]} does not take {method[:20]}.",
                allowed=sorted(methods),
                hint="see /openapi.json for the methods of this path",
            )
        return Rule(methods[method], host_id)


class Guard:
    """ASGI middleware: lets through what the table allows the sender of a request."""

    def __init__(self, app: ASGIApp, authenticator: Authenticator) -> None:
        self._app = app
        self._authenticator = authenticator
        self._table = AccessTable(ACCESS)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            try:
                scope[_PRINCIPAL] = self._admit(scope)
            except FlyballError as error:
                await problem_of(error)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _admit(self, scope: Scope) -> Principal | None:
        principal = self._authenticator.principal(scope["headers"])
        try:
            rule = self._table.rule(scope["method"], scope["path"])
        except FlyballError:
            if principal is None:  # who may not look is not told what there is
                raise unauthorized() from None
            raise
        if None in rule.roles:
            return principal
        if principal is None:
            raise unauthorized()
        check_role(principal, rule)
        return principal


def unauthorized() -> Unauthorized:
    return Unauthorized(
        "The token is missing or wrong.",
        hint="send 'Authorization: Bearer <token>'; the operator's is in the file 'token' of the supervisor's state "
        "folder, and `flyball token` makes the others",
    )


def check_role(principal: Principal, rule: Rule) -> None:
    """Raise Forbidden unless the rule allows it."""
    if principal.role not in rule.roles:
        wanted = " or ".join(sorted(f"the {role.value}'s" for role in rule.roles if role))
        raise Forbidden(
            f"This needs {wanted} token, and the {principal.role.value}'s was sent.",
            hint="`flyball token host HOST_ID` makes a daemon's token, `flyball token reader` a reader's; the "
            "operator's is in the supervisor's state folder",
        )
    if rule.host_id and principal.role is Role.DAEMON and principal.host_id != rule.host_id:
        raise Forbidden(
            f"The token is that of host {principal.host_id!r}, not of {rule.host_id[:63]!r}.",
            hint="a daemon speaks for its own host; make a token with `flyball token host HOST_ID`",
        )


def principal_in(scope: Scope) -> Principal:
    """Who made a request that the guard let through to a route that is not public."""
    principal: Principal | None = scope[_PRINCIPAL]
    if principal is None:
        raise unauthorized()
    return principal
