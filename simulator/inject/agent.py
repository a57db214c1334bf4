"""The injection agent: HTTP on the loopback address, for campaigns that run elsewhere (through an SSH tunnel).

GET /v1/hosts, GET /v1/injections, POST /v1/injections (a FaultRequest), DELETE /v1/injections/ID. Every request needs
the agent's token, which is not the supervisor's.
"""

from __future__ import annotations

import hmac
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Self

import msgspec

from flyball.contracts import wire
from flyball.contracts.errors import FlyballError, InvalidMessage, NotFound, PortInUse, Unauthorized
from simulator.inject.injector import FaultInjector, FaultRequest

LOOPBACK = "127.0.0.1"
MAX_REQUEST_BYTES = 16_384
MIN_TOKEN_CHARACTERS = 16


class _Server(ThreadingHTTPServer):
    daemon_threads = False  # closing waits for requests: none may inject after the injector has undone everything


class InjectionAgent:
    """Serves from `with` to its end."""

    def __init__(self, injector: FaultInjector, token: str, *, port: int, announce: Callable[[str], None]) -> None:
        """Raises Unauthorized for a token that can be guessed, and PortInUse."""
        if len(token) < MIN_TOKEN_CHARACTERS:
            raise Unauthorized(
                f"The agent's token has fewer than {MIN_TOKEN_CHARACTERS} characters.",
                hint="remove its file: the agent makes a new one",
            )
        try:
            self._server = _Server((LOOPBACK, port), _handler(injector, token, announce))
        except OSError as error:
            raise PortInUse(f"Port {port} cannot be used: {error.strerror}.", hint="choose another --port") from error
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.1,), name="inject-agent")

    @property
    def url(self) -> str:
        return f"http://{LOOPBACK}:{self._server.server_port}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _handler(injector: FaultInjector, token: str, announce: Callable[[str], None]) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = 10.0  # of a connection that says nothing; the agent's end waits for it

        def do_GET(self) -> None:
            self._answer({"/v1/hosts": injector.hosts, "/v1/injections": lambda: injector.active})

        def do_POST(self) -> None:
            self._answer({"/v1/injections": self._inject})

        def do_DELETE(self) -> None:
            folder, _, injection_id = self.path.rpartition("/")
            self._answer({f"{folder}/{injection_id}": lambda: injector.undo(injection_id)})

        def _inject(self) -> object:
            size = self.headers.get("Content-Length", "")
            if not size.isdecimal() or int(size) > MAX_REQUEST_BYTES:
                raise InvalidMessage(
                    f"A request needs a Content-Length of at most {MAX_REQUEST_BYTES}.", hint="send a smaller one"
                )
            done = injector.inject(wire.decode(self.rfile.read(int(size)), FaultRequest))
            announce(f"injected {done.fault}: {done.target}")
            if done.not_recorded:
                announce(f"warning: {done.not_recorded}")
            return done

        def _answer(self, routes: dict[str, Callable[[], object]]) -> None:
            try:
                self._check_token()
                if not self.path.startswith("/v1/") or self.path not in routes:
                    raise NotFound(f"There is no {self.path}.", hint="/v1/hosts and /v1/injections")
                self._reply(200, routes[self.path]())
            except FlyballError as error:
                problem = {"detail": error.message, "code": error.code, "hint": error.hint}
                self._reply(error.status, problem, kind="application/problem+json")

        def _check_token(self) -> None:
            given = self.headers.get("Authorization", "").removeprefix("Bearer ")
            if not hmac.compare_digest(given.encode(), token.encode()):
                raise Unauthorized("The agent's token is missing or wrong.", hint="give --agent-token-file")

        def _reply(self, status: int, body: object, *, kind: str = "application/json") -> None:
            data = msgspec.json.encode(body)
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(data)))
            self.send_header("Connection", "close")
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *values: object) -> None:
            """Injections are announced; the rest is of no interest."""

    return Handler
