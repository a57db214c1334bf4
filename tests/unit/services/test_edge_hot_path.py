"""Reports taken from the connection: answered like the application, and left to it if they are unusual."""

from __future__ import annotations

import asyncio
import functools
import json
import tempfile
from collections.abc import Awaitable, Callable

import pytest
import uvicorn
from starlette.types import Receive, Scope, Send
from support.clocks.loops import run_skipping

from flyball.contracts.credentials import host_credential
from flyball.contracts.errors import TooBusy
from flyball.contracts.reports.signals import Report, ReportReply
from flyball.contracts.wire import MAX_MESSAGE_BYTES, WIRE_VERSION
from services.api import hot_path
from services.api.hot_path import KnownHead, KnownHeads, ReportDesk, ReportProtocol
from services.runtime.http.auth import Authenticator
from services.runtime.http.http_protocol import MAX_HEAD_BYTES
from services.runtime.telemetry import Metrics

SECRET = "s" * 32
BODY = json.dumps(
    {
        "version": WIRE_VERSION,
        "incarnation": "i",
        "sent_at": 1.0,
        "interval_s": 1.0,
        "facts": {
            "host_id": "host-a",
            "address": "",
            "failure_domain": "",
            "engine_address": "",
            "free_port": 0,
            "daemon_version": "0",
            "pid": 1,
        },
        "engine": {"alive": True},
    }
).encode()


def head(token: str, *more: str, path: str = "/v1/reports") -> bytes:
    lines = (f"POST {path} HTTP/1.1", "Host: x", f"Authorization: Bearer {token}", *more)
    return "".join(f"{line}\r\n" for line in lines).encode()


def request(token: str = "", *more: str, body: bytes = BODY) -> bytes:
    token = token or host_credential(SECRET, "host-a").token
    return head(token, *more, f"Content-Length: {len(body)}") + b"\r\n" + body


class Taker:
    """An ingest that accepts everything, or nothing."""

    def __init__(self) -> None:
        self.taken: list[str] = []
        self.is_full = False

    def accept(self, report: Report, *, host_id: str, size_bytes: int) -> ReportReply:
        if self.is_full:
            raise TooBusy("full", retry_after_s=1.0)
        self.taken.append(host_id)
        return ReportReply(committed={report.incarnation: size_bytes})


async def application(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers with a mark of its own."""
    assert scope["type"] == "http"
    while (await receive()).get("more_body"):
        pass
    await send({"type": "http.response.start", "status": 418, "headers": [(b"content-length", b"0")]})
    await send({"type": "http.response.body", "body": b""})


Scenario = Callable[[asyncio.StreamReader, asyncio.StreamWriter, Taker], Awaitable[None]]


def serve(scenario: Scenario, *, keep_alive_s: int = 600) -> Taker:
    taker = Taker()

    async def run() -> None:
        desk = ReportDesk(taker, Authenticator(SECRET), Metrics())  # type: ignore[arg-type]
        config = uvicorn.Config(application, lifespan="off", log_config=None, timeout_keep_alive=keep_alive_s)
        config.load()
        state = uvicorn.server.ServerState()
        make = functools.partial(ReportProtocol, config, state, {}, desk=desk)
        with tempfile.TemporaryDirectory() as folder:
            path = f"{folder}/socket"
            server = await asyncio.get_running_loop().create_unix_server(make, path)
            async with server, asyncio.timeout(3600):
                reader, writer = await asyncio.open_unix_connection(path)
                await scenario(reader, writer, taker)
                writer.close()

    run_skipping(run())  # bytes in a Unix socket are there once they are sent, so nothing on the way looks idle
    return taker


async def answer(reader: asyncio.StreamReader) -> tuple[int, dict[str, str], bytes]:
    lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines[1:] if line)
    return int(lines[0].split()[1]), headers, await reader.readexactly(int(headers["content-length"]))


def test_reports_of_one_connection_are_answered_in_order_and_whole_or_in_pieces() -> None:
    async def scenario(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, _taker: Taker) -> None:
        longer = BODY + b" " * 1000  # the head differs only in the length
        writer.write(request() + request(body=longer) + request()[:-100])
        sizes = [json.loads((await answer(reader))[2])["committed"]["i"] for _ in range(2)]
        assert sizes == [len(BODY), len(longer)]
        for byte in request()[-100:]:
            writer.write(bytes([byte]))
            await writer.drain()
        status, headers, _ = await answer(reader)
        assert (status, headers["content-type"]) == (200, "application/json")

    assert serve(scenario).taken == ["host-a"] * 3


@pytest.mark.parametrize(
    "unusual",
    [
        request("wrong"),
        request(SECRET),  # the operator's token is not a daemon's
        request("", "Expect: 100-continue"),
        request("", "Connection: close"),
        request("", "Content-Length: 3"),
        request().replace(b"/v1/reports", b"/v1/reports?x=1"),
        request().replace(b"HTTP/1.1", b"HTTP/1.0"),
        request().replace(b"POST", b"PUT"),
        head(host_credential(SECRET, "host-a").token, "Transfer-Encoding: chunked") + b"\r\n0\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    ],
)
def test_what_is_unusual_is_left_to_the_application(unusual: bytes) -> None:
    async def scenario(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, taker: Taker) -> None:
        writer.write(unusual)
        line = await reader.readline()
        while line.split()[1] == b"100":  # it requests the body
            await reader.readline()
            line = await reader.readline()
        assert line.split()[1] in (b"418", b"400")
        assert not taker.taken

    serve(scenario)


def test_a_connection_may_be_used_for_both() -> None:
    async def scenario(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, _taker: Taker) -> None:
        get = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
        writer.write(request() + get)
        assert [(await answer(reader))[0] for _ in range(2)] == [200, 418]
        writer.write(get[:9])
        await asyncio.sleep(0.01)
        writer.write(get[9:] + request())
        assert (await answer(reader))[0] == 418
        assert (await answer(reader))[0] in (200, 418)  # after the other request it may have gone either way
        writer.write(request())
        assert (await answer(reader))[0] == 200

    serve(scenario)


def test_a_refusal_is_a_problem_and_the_connection_goes_on() -> None:
    async def scenario(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, taker: Taker) -> None:
        taker.is_full = True
        writer.write(request())
        status, headers, body = await answer(reader)
        assert (status, headers["retry-after"], json.loads(body)["code"]) == (429, "1", "too_busy")
        taker.is_full = False
        writer.write(request(body=b"{"))
        status, headers, body = await answer(reader)
        assert (status, headers["content-type"]) == (400, "application/problem+json")
        assert json.loads(body)["code"] == "invalid_message"
        writer.write(request())
        assert (await answer(reader))[0] == 200

    serve(scenario)


def test_a_body_that_does_not_arrive_is_given_up() -> None:
    async def scenario(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, _taker: Taker) -> None:
        writer.write(request()[:-1])
        assert (await answer(reader))[0] == 408
        assert await reader.read() == b""

    serve(scenario)


def test_an_idle_connection_is_closed() -> None:
    async def scenario(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, _taker: Taker) -> None:
        writer.write(request())
        assert (await answer(reader))[0] == 200
        assert await reader.read() == b""

    serve(scenario, keep_alive_s=1)


def test_a_head_without_an_end_is_not_kept() -> None:
    async def scenario(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, _taker: Taker) -> None:
        writer.write(b"GET / HTTP/1.1\r\nX: " + b"x" * MAX_HEAD_BYTES)
        assert (await reader.readline()).split()[1] == b"400"

    serve(scenario)


def known_in(heads: KnownHeads, data: bytes) -> KnownHead:
    """The known head of `data`; the rest is measured."""
    found = heads.find(data)
    assert found is not None
    known, start, end = found
    assert data[start:end] == BODY and end == len(data)
    return known


def test_known_heads_are_bounded_and_separate_hosts() -> None:
    heads = KnownHeads(Authenticator(SECRET), max_hosts=2)
    tokens = [host_credential(SECRET, f"host-{n}").token for n in range(4)]
    for _ in range(2):
        assert [known_in(heads, request(token)).host_id for token in tokens] == [f"host-{n}" for n in range(4)]
    forged = tokens[0].replace("host-0", "host-1")
    assert heads.find(request(forged)) is None
    for length in ("+5", "5 ", "", f"{MAX_MESSAGE_BYTES + 1}", "9" * 5000):
        assert heads.find(head(tokens[0], f"Content-Length: {length}") + b"\r\n") is None


def test_a_host_that_varies_its_head_takes_no_room_from_the_others() -> None:
    heads = KnownHeads(Authenticator(SECRET))
    other = known_in(heads, request(host_credential(SECRET, "host-b").token))
    for number in range(100):
        assert known_in(heads, request("", f"X-Number: {number}")).host_id == "host-a"
    assert len(heads) == 1 + hot_path.MAX_HEADS_OF_HOST
    assert known_in(heads, request(host_credential(SECRET, "host-b").token)) is other
