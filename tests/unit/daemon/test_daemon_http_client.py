"""The daemon's client with several servers: real sockets that reply, refuse, hang up or stay silent."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from flyball.contracts.clock import SystemClock
from flyball.contracts.decisions import CommandUpdate, UpdateState
from flyball.contracts.errors import FlyballError, InvalidMessage, TooBusy, Unreachable
from host_daemon.link import http_client
from host_daemon.link.http_client import Endpoints, SupervisorClient

OK = b'HTTP/1.1 200 OK\r\nContent-Length: 15\r\n\r\n{"commands":[]}'
REFUSALS = {
    "broken": b"HTTP/1.1 503 No\r\nContent-Length: 0\r\n\r\n",
    "busy": b"HTTP/1.1 429 Busy\r\nRetry-After: 7\r\nContent-Length: 0\r\n\r\n",
    "another program": b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n",
}
INVALID = b"HTTP/1.1 400 Bad\r\nContent-Length: 0\r\n\r\n"


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(120):
            await scenario()

    asyncio.run(bounded())


class Server:
    def __init__(self, answer: bytes | None) -> None:
        self.answer = answer  # None: it takes the request and stays silent; b"": it hangs up
        self.asked: list[str] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = next(
                    (int(h.split(b":")[1]) for h in head.lower().split(b"\r\n") if b"content-length:" in h), 0
                )
                await reader.readexactly(length)
                self.asked.append(head.split()[1].decode().partition("?")[0])
                if self.answer is None:
                    await asyncio.sleep(3600)
                writer.write(self.answer or b"")
                await writer.drain()
                if not self.answer:
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do not mistake servers on a busy machine for silent ones."""
    monkeypatch.setattr(http_client, "ANSWER_TIMEOUT_OF_SEVERAL_S", 60.0)
    monkeypatch.setattr(http_client, "CONNECT_TIMEOUT_S", 60.0)


@asynccontextmanager
async def cluster(*answers: bytes | None) -> AsyncIterator[tuple[SupervisorClient, list[Server]]]:
    """A client whose sensors and actuators have the same addresses, and the servers in the order it tries them."""
    servers = [Server(answer) for answer in answers]
    listening = [await asyncio.start_server(server.serve, "127.0.0.1", 0) for server in servers]
    urls = [f"http://127.0.0.1:{one.sockets[0].getsockname()[1]}" for one in listening]
    sensors, actuators = (Endpoints(urls, "host-a", SystemClock()) for _ in range(2))
    by_url = dict(zip(urls, servers, strict=True))
    ordered = [by_url[url] for url in sensors.in_order()]
    for server, answer in zip(ordered, answers, strict=True):
        server.answer = answer
    client = SupervisorClient(sensors, actuators, lambda: "token")
    try:
        yield client, ordered
    finally:
        await client.close()
        for one in listening:
            one.close()


async def poll(client: SupervisorClient, wait_s: float = 0.0) -> None:
    assert (await client.commands("host-a", "i", wait_s=wait_s)).commands == ()


@pytest.mark.parametrize("why", [*REFUSALS, "hangs up"])
def test_the_next_server_is_tried_at_once_and_kept(why: str) -> None:
    async def scenario() -> None:
        async with cluster(REFUSALS.get(why, b""), OK, OK) as (client, (first, second, third)):
            await poll(client)
            await poll(client)
            assert (len(first.asked), len(second.asked), len(third.asked)) == (1, 2, 0)
            second.answer = b""
            await poll(client)
            assert (len(first.asked), len(third.asked)) == (1, 1)

    run(scenario)


def test_a_silent_server_is_given_up_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_client, "ANSWER_TIMEOUT_OF_SEVERAL_S", 0.1)
    monkeypatch.setattr(http_client, "MAX_POLL_OF_SEVERAL_S", 0.1)

    async def scenario() -> None:
        async with cluster(None, OK) as (client, _):
            began = time.monotonic()
            while True:
                try:
                    await poll(client, wait_s=600.0)
                    break
                except Unreachable:  # the other one was delayed too
                    continue
            assert time.monotonic() - began > 0.15

    run(scenario)


def test_commands_and_reports_fail_over_separately() -> None:
    async def scenario() -> None:
        async with cluster(b"", OK) as (client, (first, second)):
            await poll(client)
            first.answer = b"HTTP/1.1 204 No\r\nContent-Length: 0\r\n\r\n"
            update = CommandUpdate("act-1.stop.host-a.1", "host-a", "i", UpdateState.SUCCEEDED, 1.0)
            await client.update(update)
            assert second.asked[-1].endswith("/updates"), "answers go to the server that commands come from"
            first.asked.clear()
            first.answer = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"
            await client._send(client._sensors, "POST", "/v1/reports", content=b"{}")
            assert first.asked == ["/v1/reports"]

    run(scenario)


@pytest.mark.parametrize(("answers", "error"), [((b"", b""), Unreachable), ((b"", REFUSALS["busy"]), TooBusy)])
def test_each_server_is_tried_once_before_a_call_fails(answers: tuple[bytes, ...], error: type[FlyballError]) -> None:
    async def scenario() -> None:
        async with cluster(*answers) as (client, servers):
            with pytest.raises(error):
                await poll(client)
            assert [len(server.asked) for server in servers] == [1, 1]

    run(scenario)


def test_a_refusal_that_would_be_the_same_everywhere_is_not_retried() -> None:
    async def scenario() -> None:
        async with cluster(INVALID, OK) as (client, (_, second)):
            with pytest.raises(InvalidMessage):
                await poll(client)
            assert second.asked == []

    run(scenario)
