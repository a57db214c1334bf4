"""Standing connections between engines, over real sockets: what was busy is tried again at once, nothing is lost."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from ckpt_engine.links import PeerLink
from ckpt_engine.peer_server import PeerServer
from ckpt_engine.peer_wire import Ping, RankSteps, Reply, Verdict
from ckpt_engine.settings import EngineSettings
from ckpt_engine.transport.handshake import introduce
from ckpt_engine.transport.port import ByteCounters, Connection, Identity
from ckpt_engine.transport.tcp import TcpListener, connect_tcp

TOKEN = b"the token"
SETTINGS = EngineSettings(ping_interval_s=600, ping_timeout_s=10)  # a ping never comes to the rescue


class Host:
    """An engine that answers BUSY as often as it is told to."""

    def __init__(self, busy: int) -> None:
        self.heard: list[object] = []
        self.done = threading.Event()
        self._busy = busy
        self._listener = TcpListener("127.0.0.1", 0, fallback=False, settings=SETTINGS, total=ByteCounters())
        self._server = PeerServer(
            self._listener,
            identity=Identity("host", "", "1"),
            token=TOKEN,
            settings=SETTINGS,
            handle=self._answer,
            on_hello=lambda peer: None,
        )
        self._server.start()

    def dial(self, host_id: str, address: str) -> Connection:
        connection = connect_tcp(f"127.0.0.1:{self._listener.port}", settings=SETTINGS, total=ByteCounters())
        introduce(connection, identity=Identity("caller", "", "1"), token=TOKEN, timeout_s=5)
        return connection

    def _answer(self, connection: Connection, request: object) -> None:
        self.heard.append(request)
        self._busy -= 1
        connection.send(Reply(Verdict.BUSY if self._busy >= 0 else Verdict.OK), timeout_s=5)
        if self._busy < 0:
            self.done.set()

    def close(self) -> None:
        self._server.close()


@pytest.fixture
def link_to(request: pytest.FixtureRequest) -> Iterator[tuple[Host, PeerLink]]:
    host = Host(request.param)
    link = PeerLink(
        "host",
        dial=host.dial,
        on_up=lambda host_id, incarnation: None,
        on_lost=lambda host_id: None,
        settings=SETTINGS,
    )
    yield host, link
    link.stop()
    link.join(10)
    host.close()


@pytest.mark.parametrize("link_to", [0, 8], indirect=True)
def test_a_busy_peer_is_asked_again_without_waiting_for_the_next_ping(link_to: tuple[Host, PeerLink]) -> None:
    host, link = link_to
    message = RankSteps("job", 1, 0, (3,))
    link.post("key", message)
    assert host.done.wait(10)
    assert [request for request in host.heard if not isinstance(request, Ping)].count(message) == len(host.heard)


@pytest.mark.parametrize("link_to", [3], indirect=True)
def test_a_newer_message_takes_the_place_of_one_that_waits(link_to: tuple[Host, PeerLink]) -> None:
    host, link = link_to
    link.post("key", RankSteps("job", 1, 0, (3,)))
    link.post("key", RankSteps("job", 1, 0, (3, 4)))
    link.post("other", RankSteps("job", 1, 1, (3,)))
    assert host.done.wait(10)
    deadline = threading.Event()
    for _ in range(1000):
        if RankSteps("job", 1, 0, (3, 4)) in host.heard and RankSteps("job", 1, 1, (3,)) in host.heard:
            return
        deadline.wait(0.01)
    raise AssertionError(host.heard)
