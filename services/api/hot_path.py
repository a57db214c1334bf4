"""Takes reports straight from the connection, before the application, to save a framework's cost per request.

Handles only the plain case: a daemon's POST /v1/reports on an HTTP/1.1 connection with no other request in flight, and
a Content-Length within the limit. Everything else goes to the application, from the first unexpected byte on. Its route
takes reports too and answers every error.

A daemon sends the same head each time, except for the value of Content-Length. The first one is parsed and its token
checked. A head that equals it in every other byte means the same, because secrets change only with a restart.
"""

from __future__ import annotations

import asyncio
import re
from typing import Any

import httptools
import msgspec
import structlog
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import STATUS_LINE
from uvicorn.server import ServerState

from flyball.contracts.errors import FlyballError
from flyball.contracts.wire import MAX_MESSAGE_BYTES, OtherVersion, encode
from services.runtime.http.auth import Authenticator, Role
from services.runtime.http.bodies import BODY_TIMEOUT_S, too_slow
from services.runtime.http.http_protocol import BoundedProtocol
from services.runtime.http.problem_details import MEDIA_TYPE, ErrorResponse, details, details_of
from services.runtime.telemetry import Metrics
from services.sensor.reports.ingest import LARGE_REPORT_BYTES, NOTHING_NEW, Ingest
from services.sensor.reports.report_decoding import ReportDecoder

PATH = "/v1/reports"

_REQUEST_LINE = f"POST {PATH} HTTP/1.1\r\n".encode()
_END = b"\r\n\r\n"
_MAX_HEAD_BYTES = 8 << 10
MAX_HOSTS = 20_000
MAX_HEADS_OF_HOST = 4  # half a KiB each; a daemon has one until it restarts with another address or release
_LENGTH = re.compile(rb"\r\nContent-Length:[ \t]*", re.IGNORECASE)
_NOTHING_NEW = encode(NOTHING_NEW)
_MAX_DIGITS = len(str(MAX_MESSAGE_BYTES))
# Other body encodings, protocol upgrades and closing connections are left to the application.
_ELSEWHERE = frozenset({b"transfer-encoding", b"expect", b"upgrade", b"connection", b"te", b"trailer"})

log = structlog.get_logger()


class _RequestHead:
    """Collects the parts of a request head from httptools."""

    def __init__(self) -> None:
        self.url = b""
        self.headers: list[tuple[bytes, bytes]] = []
        self.complete = False

    def on_url(self, url: bytes) -> None:
        self.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self.complete = True


class KnownHead(msgspec.Struct, frozen=True, gc=False):
    """A parsed head without the value of Content-Length, and the host whose token it carries."""

    before: bytes
    after: bytes
    host_id: str


class KnownHeads:
    """The plain-case heads of all connections so far. A head is looked up as a whole, by a hash that is keyed per
    process: the time this takes reveals nothing about a token."""

    def __init__(self, authenticator: Authenticator, max_hosts: int = MAX_HOSTS) -> None:
        self._authenticator = authenticator
        self._max_hosts = max_hosts
        self._known: dict[tuple[bytes, bytes], KnownHead] = {}
        self._of_host: dict[str, list[tuple[bytes, bytes]]] = {}  # its heads, the oldest first

    def find(self, data: bytes, at: int = 0) -> tuple[KnownHead, int, int] | None:
        """Return the head at the offset `at` of `data`, and where the body starts and ends. None: not the plain
        case."""
        end = data.find(_END, at, at + _MAX_HEAD_BYTES)
        length = _LENGTH.search(data, at, end + 2) if end >= 0 else None
        if length is None:
            return None
        begin = length.end()
        stop = data.index(b"\r\n", begin)
        digits = data[begin:stop]
        if not digits.isdigit() or len(digits) > _MAX_DIGITS or int(digits) > MAX_MESSAGE_BYTES:
            return None  # the part left out of the key must be unambiguous
        start = end + len(_END)
        before, after = data[at:begin], data[stop:start]
        key = (before, after)
        known = self._known.get(key)
        if known is None:
            host_id = _daemon_in(data[at:start], self._authenticator)
            if not host_id:
                return None
            known = KnownHead(before, after, host_id)
            self._keep(key, known)
        return known, start, start + int(digits)

    def __len__(self) -> int:
        return len(self._known)

    def _keep(self, key: tuple[bytes, bytes], head: KnownHead) -> None:
        mine = self._of_host.get(head.host_id)
        if mine is None:
            while len(self._of_host) >= self._max_hosts:
                for old in self._of_host.pop(next(iter(self._of_host))):
                    del self._known[old]
            mine = self._of_host[head.host_id] = []
        elif len(mine) >= MAX_HEADS_OF_HOST:  # a host that varies its head displaces only its own
            del self._known[mine.pop(0)]
        mine.append(key)
        self._known[key] = head


def _daemon_in(data: bytes, authenticator: Authenticator) -> str:
    """Return the host whose token is in a head of the plain case, else ''."""
    head = _RequestHead()
    parser = httptools.HttpRequestParser(head)
    try:
        parser.feed_data(data)
    except (httptools.HttpParserError, httptools.HttpParserUpgrade):
        return ""
    if not head.complete or head.url != PATH.encode() or parser.get_method() != b"POST":
        return ""
    names = [name for name, _ in head.headers]
    if names.count(b"content-length") != 1 or not _ELSEWHERE.isdisjoint(
        name for name, value in head.headers if (name, value.lower()) != (b"connection", b"keep-alive")
    ):
        return ""
    principal = authenticator.principal(head.headers)
    return principal.host_id if principal is not None and principal.role is Role.DAEMON else ""


class ReportDesk:
    """Shared by all connections: turns the body of a report into the bytes of a response."""

    def __init__(self, ingest: Ingest, authenticator: Authenticator, metrics: Metrics) -> None:
        self.heads = KnownHeads(authenticator)
        self._ingest = ingest
        self._decode = ReportDecoder().decode
        self._requests = metrics.http_requests
        self._taken = metrics.tally(metrics.http_requests.labels(method="POST", route=PATH, status=200))
        self._headers: list[tuple[bytes, bytes]] | None = None  # added by the server to every response
        self._ok = b""  # a response with these headers, up to its content-length
        self._ok_nothing_new = b""  # the whole response if there is nothing new, which is nearly always

    def answer(self, body: bytes, host_id: str, headers: list[tuple[bytes, bytes]]) -> bytes:
        """Take a report and return the response. `headers` go into every response; the server makes a new list when
        they change."""
        if headers is not self._headers:
            self._headers = headers
            self._ok = _head(200, headers, "application/json")
            self._ok_nothing_new = _answer(self._ok, _NOTHING_NEW)
        try:
            if len(body) > LARGE_REPORT_BYTES:
                self._ingest.admit_large(host_id, len(body))
            reply = self._ingest.accept(self._decode(body, host_id), host_id=host_id, size_bytes=len(body))
        except FlyballError as error:
            if isinstance(error, OtherVersion):
                self._ingest.note_alive(host_id)
            return self.refusal(details_of(error), headers)
        except Exception:  # the connection's outermost frame: the daemon retries, and others are not affected
            log.exception("unexpected error while taking a report", host_id=host_id)
            return self.refusal(
                details(
                    500,
                    code="internal",
                    detail="An unexpected error; the sensor's log has the details.",
                    hint="report it with the log entry",
                ),
                headers,
            )
        self._taken.count += 1
        return self._ok_nothing_new if reply is NOTHING_NEW else _answer(self._ok, encode(reply))

    def refusal(self, problem: ErrorResponse, headers: list[tuple[bytes, bytes]]) -> bytes:
        """Return an error response."""
        self._requests.labels(method="POST", route=PATH, status=problem.status).inc()
        log.info("request", method="POST", path=PATH, status=problem.status)
        more = [(name.lower().encode(), value.encode()) for name, value in problem.headers.items()]
        head = _head(problem.status, [*headers, *more], MEDIA_TYPE)
        return _answer(head, problem.body)


class ReportProtocol(BoundedProtocol):
    """uvicorn's protocol with a fast path for reports. Pipelined plain requests are answered in order, each before the
    next is read."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        desk: ReportDesk,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._desk = desk
        self._known: KnownHead | None = None
        self._partial = bytearray()  # a plain request whose body is incomplete
        self._wanted = 0  # size of that request in bytes
        self._body_timer: asyncio.TimerHandle | None = None
        self._in_message = False  # the application's parser has part of a request

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_partial()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._partial:
            self._partial += data
            if len(self._partial) < self._wanted:
                return
            data = bytes(self._partial)
            self._end_partial()
        elif self._in_message or (self.cycle is not None and self._is_answering):
            # Not the start of a request, or not the next to be answered.
            super().data_received(data)
            return
        rest = self._take_plain(data)
        if rest:
            super().data_received(rest)

    def on_message_begin(self) -> None:
        self._in_message = True
        super().on_message_begin()

    def on_message_complete(self) -> None:
        self._in_message = False
        super().on_message_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        self.flow.pause_reading()  # a client that does not read its responses gets no more

    def resume_writing(self) -> None:
        super().resume_writing()
        self.flow.resume_reading()

    def _take_plain(self, data: bytes) -> bytes:
        """Answer the plain requests at the start of `data`. Return the rest, for the application."""
        answers = b""
        at, size_bytes = 0, len(data)
        while at < size_bytes:
            start, end = self._measure(data, at)
            if not start:
                break
            self._active_s = self.loop.time()
            if self.timeout_keep_alive_task is not None:
                self._unset_keepalive_if_required()
            if size_bytes < end:
                self._partial += data[at:]
                self._wanted = end - at
                self._body_timer = self.loop.call_later(BODY_TIMEOUT_S, self._give_up_body)
                at = size_bytes
                break
            assert self._known is not None
            answers += self._desk.answer(data[start:end], self._known.host_id, self.server_state.default_headers)
            at = end
        if answers:
            self.transport.write(answers)
        return data[at:]

    def _measure(self, data: bytes, at: int) -> tuple[int, int]:
        """Return where the body of the request at `at` starts and ends; (0, 0) if it is not the plain case."""
        known = self._known
        if known is not None and data.startswith(known.before, at):
            begin = at + len(known.before)
            stop = data.find(b"\r", begin, begin + _MAX_DIGITS + 1)
            digits = data[begin:stop]
            if stop >= 0 and digits.isdigit() and data.startswith(known.after, stop):
                size_bytes = int(digits)
                if size_bytes <= MAX_MESSAGE_BYTES:
                    start = stop + len(known.after)
                    return start, start + size_bytes
        found = self._desk.heads.find(data, at) if data.startswith(_REQUEST_LINE, at) else None
        if found is None:
            return 0, 0
        self._known, start, end = found
        return start, end

    def _end_partial(self) -> None:
        self._partial.clear()
        if self._body_timer is not None:
            self._body_timer.cancel()
            self._body_timer = None

    def _give_up_body(self) -> None:
        self._end_partial()
        if not self.transport.is_closing():
            headers = [*self.server_state.default_headers, (b"connection", b"close")]
            self.transport.write(self._desk.refusal(details_of(too_slow()), headers))
            self.transport.close()


def _answer(head: bytes, content: bytes) -> bytes:
    return b"%b%d\r\n\r\n%b" % (head, len(content), content)


def _head(status: int, headers: list[tuple[bytes, bytes]], media_type: str) -> bytes:
    lines = b"".join(b"%b: %b\r\n" % header for header in headers)
    return b"%b%bcontent-type: %b\r\ncontent-length: " % (STATUS_LINE[status], lines, media_type.encode())
