"""A server without a free descriptor or thread: it logs one line, pauses, and accepts the next connection."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckpt_engine.counters import Counters
from ckpt_engine.host import daemon_socket
from ckpt_engine.host.daemon_socket import ControlServer
from ckpt_engine.peers import peer_server
from ckpt_engine.peers.peer_server import PeerServer
from ckpt_engine.peers.transport.peer_keys import PeerKeys
from ckpt_engine.peers.transport.port import Identity
from ckpt_engine.settings import EngineSettings
from flyball.contracts import wire
from flyball.contracts.on_host.engine_wire import MAX_ENGINE_FRAME_BYTES, EngineReply, GetStatus
from host_daemon.engine.engine_client import EngineClient

TIMEOUT_S = 60.0
SETTINGS = EngineSettings(reconnect_interval_s=0.01)
NO_DESCRIPTORS, NO_THREADS = os.strerror(errno.EMFILE), "can't start new thread"


class Log:
    """Records errors. Other lines are ignored."""

    def __init__(self) -> None:
        self.errors: list[tuple[str, Any]] = []

    def error(self, event: str, **fields: object) -> None:
        self.errors.append((event, fields.get("reason", fields)))

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_, **__: None


class Door:
    """A listener: out of descriptors at first, then one connection comes, then none until it is closed."""

    def __init__(self, connection: object) -> None:
        self._results = iter((OSError(errno.EMFILE, NO_DESCRIPTORS), (connection, "remote")))
        self.idle, self._closed = threading.Event(), threading.Event()

    def accept(self) -> Any:  # noqa: ANN401 - of either kind of server
        result = next(self._results, None)
        if isinstance(result, OSError):
            raise result
        if result is None:
            self.idle.set()
            assert self._closed.wait(TIMEOUT_S)
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        return result

    def close(self) -> None:
        self._closed.set()

    def shutdown(self, how: int) -> None:
        del how


class Visitor:
    def __init__(self) -> None:
        self.closed = threading.Event()

    def close(self) -> None:
        self.closed.set()


@pytest.fixture
def no_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """No thread can be started for a connection."""
    start = threading.Thread.start

    def start_unless_for_a_connection(thread: threading.Thread) -> None:
        if thread.name in ("peer-remote", "control"):
            raise RuntimeError(NO_THREADS)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_unless_for_a_connection)


@pytest.mark.usefixtures("no_threads")
def test_a_peer_server_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    log, counters, visitor = Log(), Counters(), Visitor()
    monkeypatch.setattr(peer_server, "log", log)
    door: Any = Door(visitor)
    server = PeerServer(
        door,
        identity=Identity("host", "", "1"),
        keys_of=PeerKeys(b"").to_answer,
        settings=SETTINGS,
        counters=counters,
        handle=lambda connection, request: None,
        on_hello=lambda peer: None,
    )
    server.start()
    assert door.idle.wait(TIMEOUT_S)
    server.close()
    assert server._thread.join(TIMEOUT_S)
    assert [event for event, _ in log.errors] == ["accept_failed"] * 2
    assert NO_DESCRIPTORS in log.errors[0][1] and log.errors[1][1] == NO_THREADS
    assert visitor.closed.is_set() and not server._strangers
    assert counters.snapshot() == {}


def test_each_job_of_each_host_has_room() -> None:
    door: Any = Door(Visitor())
    server = PeerServer(
        door,
        identity=Identity("host", "", "1"),
        keys_of=PeerKeys(b"").to_answer,
        settings=SETTINGS,
        counters=Counters(),
        handle=lambda connection, request: None,
        on_hello=lambda peer: None,
    )
    pooled = SETTINGS.pool_connections_per_peer  # of each job: `ConnectionPool` keeps them by host and job
    for hosts, jobs in ((200, 1), (200, 20), (0, 0)):
        server.expect(hosts, jobs)
        assert server._capacity >= max(SETTINGS.max_connections, hosts * (1 + jobs * (pooled + 1)))


@pytest.mark.parametrize(
    "reply", [EngineReply(ok=True, message="\udc80"), EngineReply(ok=True, message="x" * (MAX_ENGINE_FRAME_BYTES + 1))]
)
def test_an_answer_that_cannot_be_sent_is_an_error_and_not_silence(tmp_path: Path, reply: EngineReply) -> None:
    server = ControlServer(tmp_path / "socket", settings=SETTINGS, counters=Counters(), handle=lambda request: reply)
    refusal = wire.decode(server._answer(wire.encode(GetStatus())), EngineReply)
    assert not refusal.ok and refusal.message
    server._listener.close()


@pytest.mark.usefixtures("no_threads")
def test_a_control_server_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log, counters, visitor = Log(), Counters(), Visitor()
    monkeypatch.setattr(daemon_socket, "log", log)
    server = ControlServer(
        tmp_path / "socket", settings=SETTINGS, counters=counters, handle=lambda request: pytest.fail("nobody asked")
    )
    own: socket.socket = server._listener
    door: Any = Door(visitor)
    server._listener = door
    server.start()
    assert door.idle.wait(TIMEOUT_S)
    server.close()
    assert server._thread.join(TIMEOUT_S)
    own.close()
    assert [event for event, _ in log.errors] == ["control_accept_failed"] * 2
    assert NO_DESCRIPTORS in log.errors[0][1] and log.errors[1][1] == NO_THREADS
    assert visitor.closed.is_set()
    assert counters.snapshot() == {}


def test_whoever_says_nothing_makes_room_for_whoever_asks(tmp_path: Path) -> None:
    """A script may hold as many connections as it likes."""
    path, most = tmp_path / "socket", 4
    server = ControlServer(
        path,
        settings=EngineSettings(max_control_connections=most, io_timeout_s=TIMEOUT_S),
        counters=Counters(),
        handle=lambda request: EngineReply(ok=True, message=type(request).__name__),
    )
    server.start()
    with contextlib.ExitStack() as stack:
        for number in range(3 * most):
            silent = stack.enter_context(socket.socket(socket.AF_UNIX))
            silent.connect(str(path))
            silent.sendall(b"\x10\0\0\0{"[: number % 5])  # nothing, or a part of a frame
        for _ in range(3):
            reply = asyncio.run(EngineClient(path).ask(GetStatus(), timeout_s=TIMEOUT_S))
            assert reply.message == "GetStatus"
    server.close()
    assert server._thread.join(TIMEOUT_S)
