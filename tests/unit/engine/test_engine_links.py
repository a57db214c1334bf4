"""Links between engines over real sockets: a BUSY message is retried at once, and nothing is lost."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from support.clocks.waits import until

from ckpt_engine.contracts.peer_wire import Ping, Reply, SavedSteps, ShardVerdict
from ckpt_engine.counters import Counters
from ckpt_engine.peers.links import PeerLink, PeerLinks
from ckpt_engine.peers.peer_server import PeerServer
from ckpt_engine.peers.transport.handshake import introduce
from ckpt_engine.peers.transport.peer_keys import PeerKeys
from ckpt_engine.peers.transport.port import ByteCounters, Connection, Identity
from ckpt_engine.peers.transport.tcp import TcpListener, connect_tcp
from ckpt_engine.settings import EngineSettings

TOKEN = b"the token"
SETTINGS = EngineSettings(  # no ping helps out, and no peer is given up
    ping_interval_s=600, ping_timeout_s=60, handshake_timeout_s=60, io_timeout_s=60
)


def never() -> bool:
    return False


class BusyPeer:
    """An engine that answers BUSY a given number of times."""

    def __init__(self, busy: int) -> None:
        self.received: list[object] = []
        self.done = threading.Event()
        self._busy = busy
        self._listener = TcpListener("127.0.0.1", 0, fallback=False, settings=SETTINGS, total=ByteCounters())
        self._server = PeerServer(
            self._listener,
            identity=Identity("host", "", "1"),
            keys_of=PeerKeys(TOKEN).to_answer,
            settings=SETTINGS,
            counters=Counters(),
            handle=self._answer,
            on_hello=lambda peer: None,
        )
        self._server.start()

    def dial(self, host_id: str, address: str) -> Connection:
        connection = connect_tcp(f"127.0.0.1:{self._listener.port}", settings=SETTINGS, total=ByteCounters())
        introduce(connection, identity=Identity("caller", "", "1"), token=TOKEN, timeout_s=60)
        return connection

    def _answer(self, connection: Connection, request: object) -> None:
        self.received.append(request)
        self._busy -= 1
        connection.send(Reply(ShardVerdict.BUSY if self._busy >= 0 else ShardVerdict.OK), timeout_s=60)
        if self._busy < 0:
            self.done.set()

    def close(self) -> None:
        self._server.close()


@pytest.fixture
def link_to(request: pytest.FixtureRequest) -> Iterator[tuple[BusyPeer, PeerLink]]:
    host = BusyPeer(request.param)
    link = PeerLink(
        "host",
        dial=host.dial,
        on_up=lambda host_id, incarnation: None,
        on_lost=lambda host_id: None,
        settings=SETTINGS,
        counters=Counters(),
    )
    yield host, link
    link.stop()
    link.join(60.0)
    host.close()


@pytest.mark.parametrize("link_to", [0, 8], indirect=True)
def test_a_busy_peer_is_asked_again_without_waiting_for_the_next_ping(link_to: tuple[BusyPeer, PeerLink]) -> None:
    host, link = link_to
    message = SavedSteps("job", 1, 0, (3,))
    link.post(("job", 0), message, unless=never)
    assert host.done.wait(60.0)
    assert [request for request in host.received if not isinstance(request, Ping)].count(message) == len(host.received)


@pytest.mark.parametrize("link_to", [3], indirect=True)
def test_a_newer_message_takes_the_place_of_one_that_waits(link_to: tuple[BusyPeer, PeerLink]) -> None:
    host, link = link_to
    link.post(("job", 0), SavedSteps("job", 1, 0, (3,)), unless=never)
    link.post(("job", 0), SavedSteps("job", 1, 0, (3, 4)), unless=never)
    link.post(("job", 1), SavedSteps("job", 1, 1, (3,)), unless=never)
    assert host.done.wait(60.0)
    until(lambda: SavedSteps("job", 1, 0, (3, 4)) in host.received and SavedSteps("job", 1, 1, (3,)) in host.received)


@pytest.mark.parametrize("link_to", [1_000_000], indirect=True)
def test_what_a_peer_does_not_take_is_forgotten_with_its_job(link_to: tuple[BusyPeer, PeerLink]) -> None:
    host, _ = link_to
    links = PeerLinks(
        dial=host.dial,
        on_up=lambda host_id, incarnation: None,
        on_lost=lambda host_id: None,
        settings=SETTINGS,
        counters=Counters(),
    )
    links.set_targets(frozenset({"host"}))
    try:
        for job in ("ended", "ended-too", "runs"):
            links.post("host", (job, 0), SavedSteps(job, 1, 0, (3,)), unless=never)
        until(lambda: {request.job for request in list(host.received) if isinstance(request, SavedSteps)} >= {"ended"})
        for job in ("ended", "ended-too"):
            links.forget(job)
        (link,) = links._links.values()
        assert list(link._waiting) == [("runs", 0)]
        host.received.clear()
        until(lambda: len(host.received) > 3)
        assert {request.job for request in host.received[2:] if isinstance(request, SavedSteps)} == {"runs"}
    finally:
        links.close()


@pytest.mark.parametrize("link_to", [0], indirect=True)
def test_a_link_goes_on_after_an_address_that_is_none(link_to: tuple[BusyPeer, PeerLink]) -> None:
    host, _ = link_to
    addresses = iter(["127.0.0.1:70000"])  # announced first, and then the right one
    up = threading.Event()

    def dial(host_id: str, address: str) -> Connection:
        wrong = next(addresses, "")
        return connect_tcp(wrong, settings=SETTINGS, total=ByteCounters()) if wrong else host.dial(host_id, address)

    link = PeerLink(
        "host",
        dial=dial,
        on_up=lambda *_: up.set(),
        on_lost=lambda host_id: None,
        settings=SETTINGS,
        counters=Counters(),
    )
    try:
        assert up.wait(60.0)
    finally:
        link.stop()
        link.join(60.0)
