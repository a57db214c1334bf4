"""The only module of the daemon that speaks HTTP."""

from __future__ import annotations

import httpx

from flyball.contracts import wire
from flyball.contracts.decisions import CommandBatch, CommandUpdate
from flyball.contracts.errors import FlyballError, InvalidMessage, NotFound, TooBusy, Unauthorized, Unreachable
from flyball.contracts.signals import Report, ReportReply

CONNECT_TIMEOUT_S = 2.0
ANSWER_TIMEOUT_S = 5.0
DEFAULT_RETRY_AFTER_S = 1.0
MAX_RETRY_AFTER_S = 30.0


class SupervisorClient:
    """The supervisor's API, as far as a daemon needs it. Every call has a deadline.

    Raises Unreachable (no answer, or a 5xx), TooBusy (429), Unauthorized, NotFound, or InvalidMessage for any other
    refusal, which repeating cannot cure.
    """

    def __init__(self, url: str, token: str) -> None:
        self._url = url
        self._http = httpx.AsyncClient(
            base_url=url,
            headers={"Authorization": f"Bearer {token}", "Content-Type": "application/json"},
            timeout=httpx.Timeout(ANSWER_TIMEOUT_S, connect=CONNECT_TIMEOUT_S),
            trust_env=False,  # a proxy of the user's environment is not for traffic inside the cluster
        )

    async def report(self, report: Report) -> ReportReply:
        response = await self._send("POST", "/v1/reports", content=wire.encode(report))
        return wire.decode(response.content, ReportReply)

    async def commands(self, host_id: str, incarnation: str, *, wait_s: float) -> CommandBatch:
        """Long poll: answers as soon as there is a command, or with none after `wait_s`."""
        response = await self._send(
            "GET",
            f"/v1/hosts/{host_id}/commands",
            params={"incarnation": incarnation, "wait_s": str(wait_s)},
            timeout=httpx.Timeout(wait_s + ANSWER_TIMEOUT_S, connect=CONNECT_TIMEOUT_S),
        )
        return wire.decode(response.content, CommandBatch)

    async def update(self, update: CommandUpdate) -> None:
        await self._send("POST", f"/v1/hosts/{update.host_id}/updates", content=wire.encode(update))

    async def close(self) -> None:
        await self._http.aclose()

    async def _send(
        self,
        method: str,
        path: str,
        *,
        content: bytes | None = None,
        params: dict[str, str] | None = None,
        timeout: httpx.Timeout | None = None,
    ) -> httpx.Response:
        try:
            response = await self._http.request(
                method, path, content=content, params=params, timeout=timeout or httpx.USE_CLIENT_DEFAULT
            )
        except httpx.HTTPError as error:
            raise Unreachable(
                f"The supervisor at {self._url} does not answer: {str(error) or type(error).__name__}.",
                hint="training goes on without it; check that `flyball up` runs there",
            ) from error
        if response.is_success:
            return response
        raise _refusal(self._url, response)


def _refusal(url: str, response: httpx.Response) -> FlyballError:
    status = response.status_code
    detail = response.text[:500]
    if status == 429:
        retry_after_s = _retry_after_s(response)
        return TooBusy(f"The supervisor at {url} is busy.", retry_after_s=retry_after_s, hint="the daemon tries again")
    if status in (401, 403):
        return Unauthorized(
            f"The supervisor at {url} refuses this daemon's token.", hint="compare --token-file with the supervisor's"
        )
    if status == 404:
        return NotFound(f"{url} answers 404: {detail}", hint="is this the address of a Flyball supervisor?")
    if status >= 500:
        return Unreachable(f"The supervisor at {url} failed with {status}: {detail}", hint="see its log")
    return InvalidMessage(f"The supervisor at {url} refused with {status}: {detail}", hint="run the same release")


def _retry_after_s(response: httpx.Response) -> float:
    try:
        seconds = float(response.headers.get("Retry-After", ""))
    except ValueError:  # absent, or a date
        return DEFAULT_RETRY_AFTER_S
    return min(max(seconds, 0.05), MAX_RETRY_AFTER_S)
