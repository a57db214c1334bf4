"""The only module of the daemon that speaks HTTP."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence

import httpx
import msgspec

from flyball.client_tls import ClientTls, plain_http
from flyball.contracts import wire
from flyball.contracts.clock import Clock
from flyball.contracts.decisions import CommandBatch, CommandUpdate
from flyball.contracts.errors import (
    ConfigurationError,
    DaemonSuperseded,
    FlyballError,
    Forbidden,
    InvalidMessage,
    NotFound,
    ReportOutOfOrder,
    ReportReplayed,
    TooBusy,
    Unauthorized,
    Unreachable,
    WrongClock,
)
from flyball.contracts.reports.drains import Departure
from flyball.contracts.reports.rank_logs import LogPiece
from flyball.contracts.reports.signals import Report, ReportReply
from flyball.contracts.reports.standings import HostStanding, LastObeyed
from flyball.http_errors import connection_error, problem_of, reply_error, retry_after_s

CONNECT_TIMEOUT_S = 2.0
ANSWER_TIMEOUT_S = 5.0
# Where there is another server to ask, one that is stopped or cut off is given up sooner.
ANSWER_TIMEOUT_OF_SEVERAL_S = 2.0
MAX_POLL_OF_SEVERAL_S = 10.0
GO_HOME_AFTER_S = 300.0  # up to twice that: from a failure until the host tries its own server again


class Endpoints:
    """The servers of one kind, in this host's order. Each host starts at a different one, which spreads the load, and
    returns to it some minutes after it failed: otherwise the server that restarted last would have no hosts."""

    def __init__(self, urls: Sequence[str], host_id: str, clock: Clock) -> None:
        number = int.from_bytes(hashlib.sha256(host_id.encode()).digest()[:8], "big")
        home = number % len(urls)
        self._urls = (*urls[home:], *urls[:home])
        self._clock = clock
        self._current = 0
        self._go_home_after_s = GO_HOME_AFTER_S * (1.0 + number % 1000 / 1000.0)
        self._go_home_at_s = 0.0

    @property
    def are_several(self) -> bool:
        return len(self._urls) > 1

    def in_order(self) -> tuple[str, ...]:
        """All of them once, in the order in which to try them."""
        if self._current != 0 and self._clock.monotonic_s() >= self._go_home_at_s:
            self._current = 0
        return (*self._urls[self._current :], *self._urls[: self._current])

    def failed(self, url: str) -> None:
        """Move on to the next server."""
        if url == self._urls[self._current]:
            if self._current == 0:
                self._go_home_at_s = self._clock.monotonic_s() + self._go_home_after_s
            self._current = (self._current + 1) % len(self._urls)


class _Request(msgspec.Struct, frozen=True):
    method: str
    path: str
    content: bytes | None
    params: Mapping[str, str] | None
    timeout: httpx.Timeout


class SupervisorClient:
    """The part of the supervisor's API that a daemon needs. Every call has a deadline and tries each server at most
    once: reports go to one of the sensors, everything else to one of the actuators.

    Raises Unreachable (no reply, or a 5xx), TooBusy (429), Unauthorized, Forbidden, NotFound, or a refusal of the
    report by `Admission`. Any other refusal raises InvalidMessage, which repeating cannot cure.
    """

    def __init__(
        self,
        sensors: Endpoints,
        actuators: Endpoints,
        read_token: Callable[[], str],
        tls: ClientTls = ClientTls(),  # noqa: B008
    ) -> None:
        """`read_token` is called again when the token is refused: it may have been renewed. Raises what it raises."""
        self._sensors = sensors
        self._actuators = actuators
        self._read_token = read_token
        self._token = read_token()
        self.predecessors: tuple[str, ...] = ()  # incarnations that this daemon succeeds, see `succession`
        urls = (*sensors.in_order(), *actuators.in_order())
        self._http = httpx.AsyncClient(
            headers={"Content-Type": "application/json"},
            verify=tls.context() if any(url.startswith("https:") for url in urls) else plain_http(),
            trust_env=False,  # a proxy of the user's environment is not for traffic inside the cluster
        )

    async def report(self, report: Report) -> ReportReply:
        response = await self._send(self._sensors, "POST", "/v1/reports", content=wire.encode(report))
        return wire.decode(response.content, ReportReply)

    async def commands(
        self,
        host_id: str,
        incarnation: str,
        *,
        wait_s: float,
        obeyed: LastObeyed = LastObeyed(),  # noqa: B008 - frozen
    ) -> CommandBatch:
        """Long poll: returns as soon as there is a command, or with none after `wait_s`."""
        if self._actuators.are_several:
            wait_s = min(wait_s, MAX_POLL_OF_SEVERAL_S)
        response = await self._send(
            self._actuators,
            "GET",
            f"/v1/hosts/{host_id}/commands",
            params={"incarnation": incarnation, "wait_s": str(wait_s), **self._succession(), **_params(obeyed)},
            wait_s=wait_s,
        )
        return wire.decode(response.content, CommandBatch)

    async def report_standing(self, standing: HostStanding) -> None:
        """Send the supervisor what its database does not know."""
        content, path = wire.encode(standing), f"/v1/hosts/{standing.host_id}/standing"
        await self._send(self._actuators, "POST", path, content=content, params=self._succession())

    async def departure(self, host_id: str) -> Departure:
        """Whether a host that gave notice is no longer needed."""
        response = await self._send(self._actuators, "GET", f"/v1/hosts/{host_id}/departure")
        return wire.decode(response.content, Departure)

    async def update(self, update: CommandUpdate) -> None:
        content = wire.encode(update)
        await self._send(
            self._actuators, "POST", f"/v1/hosts/{update.host_id}/updates", content=content, params=self._succession()
        )

    def _succession(self) -> dict[str, str]:
        return {"succeeds": ",".join(self.predecessors)} if self.predecessors else {}

    async def log_piece(self, piece: LogPiece) -> None:
        await self._send(self._actuators, "POST", f"/v1/hosts/{piece.host_id}/log-pieces", content=wire.encode(piece))

    async def close(self) -> None:
        await self._http.aclose()

    async def _send(
        self,
        servers: Endpoints,
        method: str,
        path: str,
        *,
        content: bytes | None = None,
        params: Mapping[str, str] | None = None,
        wait_s: float = 0.0,
    ) -> httpx.Response:
        """`wait_s`: how long the server may wait before it replies."""
        answer_s = wait_s + (ANSWER_TIMEOUT_OF_SEVERAL_S if servers.are_several else ANSWER_TIMEOUT_S)
        request = _Request(method, path, content, params, httpx.Timeout(answer_s, connect=CONNECT_TIMEOUT_S))
        failure: FlyballError | None = None
        for url in servers.in_order():
            try:
                return await self._send_to(url, request)
            except (Unreachable, TooBusy, NotFound) as error:  # other refusals would be the same elsewhere
                servers.failed(url)
                failure = error
        assert failure is not None, "there is at least one server"
        raise failure

    async def _send_to(self, url: str, request: _Request) -> httpx.Response:
        try:
            response = await self._attempt(url, request)
            if response.status_code == 401 and self._renew_token():
                response = await self._attempt(url, request)
        except httpx.HTTPError as error:
            hint = "training continues without it; check that `flyball up` runs there"
            raise connection_error(url, error, hint=hint) from error
        if response.is_success:
            return response
        raise _refusal(url, response)

    async def _attempt(self, url: str, request: _Request) -> httpx.Response:
        return await self._http.request(
            request.method,
            url + request.path,
            content=request.content,
            params=request.params,
            headers={"Authorization": f"Bearer {self._token}"},
            timeout=request.timeout,
        )

    def _renew_token(self) -> bool:
        """Read the token again. Returns whether it differs from the one that was refused."""
        try:
            token = self._read_token()
        except ConfigurationError:  # half written, or gone: the caller reports the refusal of the old one
            return False
        renewed, self._token = token != self._token, token
        return renewed


def _params(obeyed: LastObeyed) -> dict[str, str]:
    return {name: str(value) for name, value in msgspec.structs.asdict(obeyed).items() if value}


# Codes that the daemon handles each in its own way; for all others the status is enough.
_HANDLED = frozenset(k.code for k in (Forbidden, ReportReplayed, ReportOutOfOrder, DaemonSuperseded, WrongClock))


def _refusal(url: str, response: httpx.Response) -> FlyballError:
    status = response.status_code
    detail = response.text[:500]
    problem = problem_of(response)
    if status == 429:
        wait_s = retry_after_s(response)
        return TooBusy(f"The supervisor at {url} is busy.", retry_after_s=wait_s, hint="the daemon will retry")
    if status == 401:
        return Unauthorized(
            f"The supervisor at {url} refuses this daemon's token.",
            hint="make a new one with `flyball token host HOST_ID` and write it to --token-file; it will be read again",
        )
    if problem is not None and problem.code in _HANDLED:
        return reply_error(problem, response)
    if status == 404:
        return NotFound(f"{url} replied 404: {detail}", hint="check that this is the address of a Flyball supervisor")
    if status >= 500:
        return Unreachable(f"The supervisor at {url} failed with {status}: {detail}", hint="see its log")
    return InvalidMessage(f"The supervisor at {url} refused with {status}: {detail}", hint="run the same release")
