"""Requests for pieces of rank logs, until the host's daemon answers. In memory only: whoever asked asks again.

Requests go down with the replies to the daemons' long polls, beside the commands; the pieces come back as posts.
"""

from __future__ import annotations

import asyncio
import secrets

import msgspec

from flyball.contracts.errors import TooBusy, Unreachable
from flyball.contracts.reports.rank_logs import LogPiece, LogRequest

MAX_OPEN_PER_HOST = 32
ANSWER_TIMEOUT_S = 10.0


class LogRequests:
    """Lives in one event loop."""

    def __init__(self) -> None:
        self._due: dict[str, list[LogRequest]] = {}  # by host
        self._open: dict[str, tuple[str, asyncio.Future[LogPiece]]] = {}  # request -> its host, its answer

    def add(self, host_id: str, request: LogRequest) -> str:
        """Add a request for the host's next poll; returns its id. Raises TooBusy."""
        if sum(host == host_id for host, _ in self._open.values()) >= MAX_OPEN_PER_HOST:
            raise TooBusy(
                f"Too many requests for logs of {host_id} are open.", retry_after_s=1.0, hint="try again in a moment"
            )
        name = secrets.token_hex(16)
        self._due.setdefault(host_id, []).append(msgspec.structs.replace(request, request_id=name))
        self._open[name] = host_id, asyncio.get_running_loop().create_future()
        return name

    async def piece(self, request_id: str) -> LogPiece:
        """Wait for the answer. Raises Unreachable."""
        host_id, answer = self._open[request_id]
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                return await answer
        except TimeoutError:
            raise Unreachable(
                f"The daemon of {host_id} did not answer within {ANSWER_TIMEOUT_S:.0f} s.",
                hint=f"check that it runs and reaches this supervisor; its logs are on {host_id}",
            ) from None
        finally:
            del self._open[request_id]
            due = [one for one in self._due.pop(host_id, []) if one.request_id != request_id]
            if due:
                self._due[host_id] = due

    def take(self, host_id: str) -> tuple[LogRequest, ...]:
        """Take out the requests for the host's daemon."""
        return tuple(self._due.pop(host_id, ()))

    def has_any(self, host_id: str) -> bool:
        return host_id in self._due

    def answered(self, piece: LogPiece) -> None:
        """Take in an answer; without effect if nobody waits for it any more."""
        host_id, answer = self._open.get(piece.request_id, ("", None))
        if answer is not None and host_id == piece.host_id and not answer.done():
            answer.set_result(piece)
