"""A server without a free descriptor or thread: it logs one line, pauses, and accepts the next connection."""

from __future__ import annotations

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
from ckpt_engine.peers.transport.port import Identity
from ckpt_engine.settings import EngineSettings

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
        token=b"",
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
