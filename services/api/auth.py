"""Authorization: one table of all routes and the roles that may use them. A route outside the table is a 404."""

from __future__ import annotations

import re
from typing import Literal, cast

import msgspec
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from flyball.contracts.clock import Clock
from flyball.contracts.errors import FlyballError, Forbidden, NotFound, Unauthorized
from services.api.problems import ErrorAnswer
from services.api.rate_limits import RateLimits
from services.runtime.http.auth import Authenticator, Principal, Role
from services.runtime.http.problem_details import MethodNotAllowed

PUBLIC: frozenset[Role | None] = frozenset({None, *Role})
READERS: frozenset[Role | None] = frozenset({Role.READER, Role.OPERATOR})
OPERATORS: frozenset[Role | None] = frozenset({Role.OPERATOR})
REPORTERS: frozenset[Role | None] = frozenset({Role.OPERATOR, Role.DAEMON})  # scripts on a host have its token
DAEMONS: frozenset[Role | None] = frozenset({Role.DAEMON})  # if the path names a host: the daemon of that host

Method = Literal["GET", "HEAD", "POST", "DELETE"]

# (method, path template) -> roles. Other sites can make a browser send the cookie, which grants the reader's role:
# readers may therefore only GET. Pages check the token themselves: without one they show the login.
ACCESS: dict[tuple[Method, str], frozenset[Role | None]] = {
    ("GET", "/healthz"): PUBLIC,
    ("GET", "/readyz"): PUBLIC,
    ("GET", "/metrics"): PUBLIC,
    ("GET", "/"): PUBLIC,
    ("GET", "/jobs/{job}"): PUBLIC,
    ("GET", "/jobs/{job}/decisions"): PUBLIC,
    ("GET", "/jobs/{job}/goodput"): PUBLIC,
    ("GET", "/jobs/{job}/pace"): PUBLIC,
    ("GET", "/incidents"): PUBLIC,
    ("GET", "/incidents/{incident_id}"): PUBLIC,
    ("GET", "/incidents/{incident_id}/cost"): PUBLIC,
    ("GET", "/decisions/{decision_id}"): PUBLIC,
    ("GET", "/recovery"): PUBLIC,
    ("GET", "/goodput"): PUBLIC,
    ("GET", "/goodput/run"): PUBLIC,
    ("GET", "/goodput/comparison"): PUBLIC,
    ("GET", "/hosts"): PUBLIC,
    ("GET", "/hosts/{host_id}"): PUBLIC,
    ("GET", "/docs"): PUBLIC,
    ("GET", "/login"): PUBLIC,
    ("POST", "/login"): PUBLIC,
    ("POST", "/logout"): PUBLIC,
    ("GET", "/session"): PUBLIC,
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
    ("POST", "/v1/hosts/{host_id}/conditions"): REPORTERS,
    ("DELETE", "/v1/hosts/{host_id}/conditions"): REPORTERS,
    ("POST", "/v1/hosts/{host_id}/cordon"): OPERATORS,
    ("POST", "/v1/hosts/{host_id}/uncordon"): OPERATORS,
    ("POST", "/v1/checks"): OPERATORS,
    ("POST", "/v1/silence"): OPERATORS,
    ("POST", "/v1/approve"): OPERATORS,
    ("GET", "/v1/orders"): READERS,
    ("POST", "/v1/reader-token"): OPERATORS,
    ("GET", "/v1/hosts"): READERS,
    ("GET", "/v1/host-map"): READERS,
    ("GET", "/v1/hosts/{host_id}"): READERS,
    ("DELETE", "/v1/hosts/{host_id}"): OPERATORS,
    ("POST", "/v1/jobs"): OPERATORS,
    ("GET", "/v1/jobs"): READERS,
    ("GET", "/v1/jobs/{job}"): READERS,
    ("POST", "/v1/jobs/{job}/stop"): OPERATORS,
    ("GET", "/v1/jobs/{job}/recoverability"): READERS,
    ("POST", "/v1/jobs/{job}/checkpoint"): OPERATORS,
    ("POST", "/v1/jobs/{job}/adopt"): OPERATORS,
    ("GET", "/v1/jobs/{job}/logs"): READERS,
    ("POST", "/v1/hosts/{host_id}/log-pieces"): DAEMONS,
    ("GET", "/v1/incidents"): READERS,
    ("GET", "/v1/incidents/{incident_id}"): READERS,
    ("GET", "/v1/actions"): READERS,
    ("GET", "/v1/actions/{action_id}"): READERS,
    ("GET", "/v1/signals"): READERS,
    ("GET", "/v1/decisions"): READERS,
    ("GET", "/v1/decisions/{decision_id}"): READERS,
    ("GET", "/v1/audit"): READERS,
    ("GET", "/v1/checkpoints"): READERS,
    ("GET", "/v1/goodput"): READERS,
    ("GET", "/v1/goodput/comparison"): READERS,
    ("GET", "/v1/simulations"): READERS,
    ("GET", "/v1/simulations/{name}"): READERS,
    ("GET", "/v1/events"): READERS,
    ("POST", "/v1/events"): OPERATORS,
    ("GET", "/v1/stream"): READERS,
}
# No user's limit counts these: orchestrators and Prometheus ask for the first, and every page loads many of the last.
UNCOUNTED = ("/healthz", "/readyz", "/metrics", "/static/")
STRANGER = "stranger"  # who shares the limit of an address: those without a token, whom only the login concerns
_PRINCIPAL = "flyball.principal"


def allowed_roles(method: str, template: str) -> frozenset[str]:
    """Return the roles that may use a route. Empty: it is public."""
    roles = ACCESS[cast("Method", method), template]
    return frozenset() if None in roles else frozenset(role.value for role in roles if role)


class Rule(msgspec.Struct, frozen=True):
    """The roles that may make a request, and the host in its path ('': none)."""

    roles: frozenset[Role | None]
    host_id: str = ""


class AccessTable:
    """Finds the rule of a request. Raises NotFound or MethodNotAllowed if the table has none."""

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
                raise NotFound("There is no such path.", hint="see /openapi.json for all paths")
        if method not in methods:
            raise MethodNotAllowed(
                f"{path[:200]} does not support {method[:20]}.",
                allowed=sorted(methods),
                hint="see /openapi.json for the methods of this path",
            )
        return Rule(methods[method], host_id)


class Guard:
    """ASGI middleware: admits requests that the table allows their sender, within the limits of users."""

    def __init__(
        self, app: ASGIApp, authenticator: Authenticator, limits: RateLimits, clock: Clock, answer: ErrorAnswer
    ) -> None:
        self._app = app
        self._answer = answer
        self._authenticator = authenticator
        self._limits = limits
        self._clock = clock
        self._table = AccessTable(ACCESS)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            try:
                scope[_PRINCIPAL] = self._admit(scope)
            except FlyballError as error:
                await self._answer(Request(scope), error)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _admit(self, scope: Scope) -> Principal | None:
        principal = self._authenticator.principal(scope["headers"])
        try:
            rule = self._table.rule(scope["method"], scope["path"])
        except FlyballError:
            if principal is None:  # do not reveal to strangers which paths exist
                raise unauthorized() from None
            raise
        if None not in rule.roles:
            if principal is None:
                raise unauthorized()
            check_role(principal, rule)
        if not scope["path"].startswith(UNCOUNTED) and (principal is None or principal.role is not Role.DAEMON):
            address = (scope.get("client") or ("",))[0]
            # Behind a proxy all browsers have one address, but each has its own login.
            user = principal.users(address)[1] if principal else STRANGER
            self._limits.take(user, address, self._clock.monotonic_s())
        return principal


def unauthorized() -> Unauthorized:
    return Unauthorized(
        "The token is missing or wrong.",
        hint="send 'Authorization: Bearer <token>'; the operator's token is in the file 'token' of the supervisor's "
        "state folder, and `flyball token` makes the others",
    )


def check_role(principal: Principal, rule: Rule) -> None:
    """Raise Forbidden unless the rule allows the principal."""
    if principal.role not in rule.roles:
        wanted = " or ".join(sorted(f"the {role.value}'s" for role in rule.roles if role))
        raise Forbidden(
            f"This needs {wanted} token, but the {principal.role.value}'s was sent.",
            hint="`flyball token host HOST_ID` makes a daemon's token, `flyball token reader` a reader's; the "
            "operator's is in the supervisor's state folder",
        )
    if rule.host_id and principal.role is Role.DAEMON and principal.host_id != rule.host_id:
        raise Forbidden(
            f"The token belongs to host {principal.host_id!r}, not to {rule.host_id[:63]!r}.",
            hint="a daemon acts for its own host only; make a token with `flyball token host HOST_ID`",
        )


def principal_in(scope: Scope) -> Principal:
    """Return the sender of a request to a non-public route that the guard admitted."""
    principal: Principal | None = scope[_PRINCIPAL]
    if principal is None:
        raise unauthorized()
    return principal
