"""The supervisor's HTTP interface for one host's daemon, played by a test."""

from __future__ import annotations

import re
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from support.clocks.waits import until

from flyball.contracts import wire
from flyball.contracts.credentials import host_credential
from flyball.contracts.decisions import Command, CommandBatch, CommandUpdate, UpdateState
from flyball.contracts.reports.drains import Departure
from flyball.contracts.reports.signals import Report, ReportReply, Signal, WorkerExited

TOKEN = "a-token-for-tests"
HOST_TOKEN = host_credential(TOKEN, "host-a").token


class PlayedSupervisor:
    """Replies as the real one would, by the contracts. Keeps everything that it receives."""

    def __init__(self) -> None:
        self.lock = threading.Condition()
        self.reports: list[Report] = []
        self.updates: list[CommandUpdate] = []
        self.open: list[Command] = []  # without a final answer
        self.handed_out: dict[str, float] = {}
        self.committed: dict[str, int] = {}
        self.commits = True  # False: signals are accepted, but never reported as committed
        self.refusal: tuple[int, dict[str, str]] | None = None
        self.refusal_body = b"{}"
        self.refused = 0
        self.departure = Departure(may_leave=False, waits_for="the test")
        supervisor = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def do_GET(self) -> None:
                supervisor._poll(self)

            def do_POST(self) -> None:
                supervisor._post(self)

            def log_message(self, *_: object) -> None:
                return

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def send(self, command: Command) -> None:
        with self.lock:
            self.open.append(command)
            self.handed_out.pop(command.command_id, None)
            self.lock.notify_all()

    def answer(self, command: Command, *, final: bool = True, count: int = 1) -> CommandUpdate:
        """The `count`-th answer to a command."""

        def found() -> CommandUpdate | None:
            with self.lock:
                updates = [
                    u
                    for u in self.updates
                    if u.command_id == command.command_id and (not final or u.state is not UpdateState.ACKNOWLEDGED)
                ]
            return updates[count - 1] if len(updates) >= count else None

        return until(found, f"an answer to {command.command_id}")

    def signals(self) -> list[Signal]:
        """Every signal once, in order of arrival."""
        with self.lock:
            seen = {(s.incarnation, s.seq): s for report in self.reports for s in report.signals}
        return list(seen.values())

    def exits(self, rank: int | None = None, job: str = "job") -> list[WorkerExited]:
        bodies = [s.body for s in self.signals() if isinstance(s.body, WorkerExited)]
        return [b for b in bodies if b.job == job and (rank is None or b.rank == rank)]

    def exit_of(self, rank: int, job: str = "job") -> WorkerExited:
        return until(lambda: next(iter(self.exits(rank, job)), None), f"the exit of rank {rank}")

    @property
    def newest(self) -> Report | None:
        return self.reports[-1] if self.reports else None

    def _post(self, request: BaseHTTPRequestHandler) -> None:
        body = request.rfile.read(int(request.headers["Content-Length"]))
        if not self._admitted(request):
            return
        if request.path == "/v1/reports":
            report = wire.decode(body, Report)
            with self.lock:
                self.reports.append(report)
                if self.commits:
                    for s in report.signals:
                        self.committed[s.incarnation] = max(self.committed.get(s.incarnation, 0), s.seq)
                reply = ReportReply(dict(self.committed))
            self._reply(request, 200, wire.encode(reply))
        elif re.fullmatch(r"/v1/hosts/[^/]+/updates", request.path.partition("?")[0]):
            update = wire.decode(body, CommandUpdate)
            with self.lock:
                self.updates.append(update)
                if update.state is not UpdateState.ACKNOWLEDGED:
                    self.open = [c for c in self.open if c.command_id != update.command_id]
            self._reply(request, 204, b"")
        else:
            self._reply(request, 404, b"{}")

    def _poll(self, request: BaseHTTPRequestHandler) -> None:
        if not self._admitted(request):
            return
        if request.path.endswith("/departure"):
            self._reply(request, 200, wire.encode(self.departure))
            return
        with self.lock:
            self.lock.wait_for(self._due, timeout=1.0)
            due = self._due()
            self.handed_out.update((command.command_id, time.monotonic()) for command in due)
        self._reply(request, 200, wire.encode(CommandBatch(tuple(due))))

    def _due(self) -> list[Command]:
        """Commands not sent yet, or sent a while ago: the daemon may have been killed before it read them."""
        now = time.monotonic()
        return [c for c in self.open if now - self.handed_out.get(c.command_id, -1.0) > 1.0]

    def _admitted(self, request: BaseHTTPRequestHandler) -> bool:
        if request.headers.get("Authorization") != f"Bearer {HOST_TOKEN}":
            self.refused += 1
            self._reply(request, 401, b"{}")
            return False
        if self.refusal is not None:
            self.refused += 1
            self._reply(request, self.refusal[0], self.refusal_body, self.refusal[1])
            return False
        return True

    def _reply(
        self, request: BaseHTTPRequestHandler, status: int, body: bytes, headers: dict[str, str] | None = None
    ) -> None:
        try:
            request.send_response(status)
            for name, value in (headers or {}).items():
                request.send_header(name, value)
            request.send_header("Content-Length", str(len(body)))
            request.end_headers()
            request.wfile.write(body)
        except OSError:
            return  # the daemon was killed while it waited
