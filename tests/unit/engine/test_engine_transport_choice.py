"""Which transport two engines agree on, and for how long, over real TCP connections. Queue pairs are tested in the
virtual machines (tests/rdma); those that work here are a TCP connection under another name."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import msgspec
import pytest
from structlog.testing import capture_logs

from ckpt_engine.contracts.peer_wire import (
    AnswerQueuePair,
    OfferQueuePair,
    Ping,
    QueuePairEndpoint,
    Reply,
    ShardVerdict,
)
from ckpt_engine.counters import Counters
from ckpt_engine.host.state_dir import TransportsFile
from ckpt_engine.inspect.host_folder import read_host_folder
from ckpt_engine.peers import shard_transports
from ckpt_engine.peers.peer_access import PeerAccess
from ckpt_engine.peers.peer_server import AnswerOffer, PeerServer
from ckpt_engine.peers.shard_transports import RdmaRequired, ShardTransports
from ckpt_engine.peers.transport.handshake import admit, introduce
from ckpt_engine.peers.transport.peer_keys import PeerKeys
from ckpt_engine.peers.transport.port import ByteCounters, Connection, Identity, Transport
from ckpt_engine.peers.transport.rdma.completion_errors import RetryExceeded
from ckpt_engine.peers.transport.tcp import TcpListener, connect_tcp
from ckpt_engine.peers.transport.upgrade import (
    NoQueuePair,
    PathFailed,
    QueuePairs,
    accept_offer,
    answer_offer,
    offer_queue_pair,
    refuse_offer,
)
from ckpt_engine.rules.failed_paths import FIRST_PAUSE_S, IN_A_ROW
from ckpt_engine.settings import EngineSettings
from flyball.contracts import wire
from flyball.contracts.checkpoints import PeerTransport
from flyball.contracts.errors import ConfigurationError, InvalidMessage, Unauthorized, Unreachable

T = TypeVar("T")

TOKEN = b"the token"
PATIENT = EngineSettings(handshake_timeout_s=60, io_timeout_s=60, idle_timeout_s=60)
ENDPOINT = QueuePairEndpoint(17, 4711, "0" * 20 + "ffff0a000001", 0, 1024, False, 16, 32768, 16)
NO_DEVICE = "There is no RDMA device"


class Without:
    """A host without RDMA. Its reason is the one that users read."""

    def prepare(self, peer: QueuePairEndpoint | None = None) -> NoReturn:
        raise ConfigurationError(f"{NO_DEVICE}.", hint="add one")

    def close(self) -> None: ...


class Described:
    """A queue pair of which there is only the description: nothing connects to it, so every way to it fails."""

    endpoint = ENDPOINT

    def __init__(self) -> None:
        self.wanted: list[QueuePairEndpoint] = []

    def prepare(self, peer: QueuePairEndpoint | None = None) -> Described:
        return self

    def connect(self, tcp: Connection, remote: QueuePairEndpoint) -> NoReturn:
        self.wanted.append(remote)
        raise ConfigurationError("The queue pair cannot be connected.")

    def close(self) -> None: ...


class Renamed:
    """A TCP connection that says it is RDMA."""

    transport = Transport.RDMA

    def __init__(self, tcp: Connection, nics: Working) -> None:
        self._tcp = tcp
        self._nics = nics
        self.broke: Callable[[str], None] = lambda reason: None
        self.carried: Callable[[], None] = lambda: None

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - whatever a connection has
        return getattr(self._tcp, name)

    def __enter__(self) -> Renamed:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def watch(self, on_broken: Callable[[str], None], on_carried: Callable[[], None]) -> None:
        self.broke, self.carried = on_broken, on_carried

    def request(self, message: object, kind: type[T], *, timeout_s: float) -> T:
        data = wire.encode(message)
        if len(data) > self._nics.carries_bytes:
            raise RetryExceeded("Nothing was acknowledged.")
        return self._tcp.request(message, kind, timeout_s=timeout_s)


class Working:
    """A host whose queue pairs work, for frames up to a length."""

    endpoint = ENDPOINT

    def __init__(self, carries_bytes: int = 1 << 20) -> None:
        self.carries_bytes = carries_bytes
        self.made: list[Renamed] = []
        self.error: Exception | None = None

    def prepare(self, peer: QueuePairEndpoint | None = None) -> Working:
        if self.error is not None:
            raise self.error
        return self

    def connect(self, tcp: Connection, remote: QueuePairEndpoint) -> Renamed:
        self.made.append(Renamed(tcp, self))
        return self.made[-1]

    def close(self) -> None: ...


class Server:
    """Host b's peer server. Counts the pings that it answered."""

    def __init__(
        self, settings: EngineSettings, queue_pairs: QueuePairs, answer: AnswerOffer | None, incarnation: str
    ) -> None:
        self.listener = TcpListener("127.0.0.1", 0, fallback=False, settings=settings, total=ByteCounters())
        self.address = f"127.0.0.1:{self.listener.port}"
        self._server = PeerServer(
            self.listener,
            identity=Identity("b", "", incarnation),
            keys_of=PeerKeys(TOKEN).to_answer,
            settings=settings,
            counters=Counters(),
            handle=lambda connection, request: connection.send(Reply(ShardVerdict.OK), timeout_s=60),
            on_hello=lambda peer: None,
            answer_offer=answer or ShardTransports("b", settings=settings, queue_pairs=queue_pairs).answer,
        )
        self._server.start()

    def close(self) -> None:
        self._server.close()

    def dial(self) -> tuple[Connection, bytes]:
        """Host a's connection, handshake done, and its key."""
        connection = connect_tcp(self.address, settings=PATIENT, total=ByteCounters())
        key = introduce(connection, identity=Identity("a", "127.0.0.1:1", "2"), token=TOKEN, timeout_s=60)
        return connection, key


@pytest.fixture
def serve() -> Iterator[Callable[..., Server]]:
    servers: list[Server] = []

    def start(
        queue_pairs: QueuePairs | None = None,
        transport: str = "auto",
        answer: AnswerOffer | None = None,
        incarnation: str = "1",
    ) -> Server:
        settings = msgspec.structs.replace(PATIENT, transport=transport)
        servers.append(Server(settings, queue_pairs or Without(), answer, incarnation))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


def access(server: Server, queue_pairs: QueuePairs, transport: str = "auto") -> tuple[PeerAccess, ShardTransports]:
    """Host a's connections to the server."""
    settings = msgspec.structs.replace(PATIENT, transport=transport)
    transports = ShardTransports("a", settings=settings, queue_pairs=queue_pairs)
    made = PeerAccess(
        Identity("a", "127.0.0.1:1", "2"),
        keys=PeerKeys(TOKEN),
        settings=settings,
        counters=Counters(),
        total=ByteCounters(),
        transports=transports,
        on_up=lambda host_id: None,
    )
    made.learn_addresses({"b": server.address})
    return made, transports


def chosen(server: Server, queue_pairs: QueuePairs, transport: str = "auto") -> PeerTransport:
    """Dial for shards. The connection must work, and be what is shown."""
    peers, transports = access(server, queue_pairs, transport)
    with peers.dial_shards("b", "", "job") as connection:
        assert connection.request(Ping(), Reply, timeout_s=60).verdict is ShardVerdict.OK
        (shown,) = transports.about({"b"})
        assert shown.transport == connection.transport
    peers.close()
    return shown


# --- auto, rdma and tcp ---


def test_without_rdma_here_shards_go_over_tcp_with_the_reason(serve: Callable[..., Server]) -> None:
    assert chosen(serve(), Without()) == PeerTransport("b", "tcp", f"a: {NO_DEVICE}")


def test_without_rdma_there_shards_go_over_tcp_with_the_peers_reason(serve: Callable[..., Server]) -> None:
    assert chosen(serve(), Described()) == PeerTransport("b", "tcp", f"b: {NO_DEVICE}")


def test_either_side_may_be_set_to_tcp(serve: Callable[..., Server]) -> None:
    there = serve(Described(), "tcp")
    assert chosen(there, Described()) == PeerTransport("b", "tcp", "b: it is set to transport = tcp")
    assert chosen(there, Described(), "tcp") == PeerTransport("b", "tcp", "a is set to transport = tcp")


@pytest.mark.parametrize(("here", "whose"), [(Without(), "a"), (Described(), "b")])
def test_required_rdma_is_an_error_and_never_tcp(serve: Callable[..., Server], here: QueuePairs, whose: str) -> None:
    peers, transports = access(serve(), here, "rdma")
    with pytest.raises(RdmaRequired, match=f"transport = rdma.* with b: {whose}: {NO_DEVICE}") as caught:
        peers.dial_shards("b", "", "job")
    assert caught.value.hint
    assert transports.about({"b"}) == (PeerTransport("b", "none", f"{whose}: {NO_DEVICE}"),)
    with peers.dial("b", "") as link:  # links stay with TCP
        assert link.request(Ping(), Reply, timeout_s=60).verdict is ShardVerdict.OK
    peers.close()


def test_a_way_that_carries_no_rdma_is_tried_once_and_then_it_is_tcp(serve: Callable[..., Server]) -> None:
    def accept(connection: Connection, offer: OfferQueuePair, key: bytes) -> Connection:
        accept_offer(connection, ENDPOINT, key=key, timeout_s=60)
        return connection

    here = Described()
    peers, transports = access(serve(answer=accept), here)
    for _ in range(3):
        with peers.dial_shards("b", "", "job") as connection:
            assert connection.transport is Transport.TCP
            assert connection.request(Ping(), Reply, timeout_s=60).verdict is ShardVerdict.OK
    assert here.wanted == [ENDPOINT]
    assert transports.about({"b"}) == (PeerTransport("b", "tcp", "a: The queue pair cannot be connected"),)
    peers.close()


def test_a_queue_pair_that_cannot_be_connected_there_is_a_refusal(serve: Callable[..., Server]) -> None:
    there = Described()
    assert chosen(serve(there), Described()).reason == "b: The queue pair cannot be connected"
    assert there.wanted == [ENDPOINT]


@pytest.mark.parametrize("error", [OSError(24, "Too many open files"), ValueError("17"), RuntimeError("no thread")])
@pytest.mark.parametrize("whose", ["a", "b"])
def test_whatever_making_a_queue_pair_raises_shards_go_over_tcp(
    serve: Callable[..., Server], error: Exception, whose: str
) -> None:
    here, there = Working(), Working()
    (here if whose == "a" else there).error = error
    shown = chosen(serve(there), here)
    assert shown.transport == "tcp"
    assert shown.reason.startswith(f"{whose}: The queue pair could not be made: ") and str(error) in shown.reason


def test_a_way_that_carries_only_short_messages_is_none(serve: Callable[..., Server]) -> None:
    here = Working(carries_bytes=4096)
    peers, transports = access(serve(Working()), here)
    for _ in range(2):
        with peers.dial_shards("b", "", "job") as connection:
            assert connection.transport is Transport.TCP
    assert len(here.made) == 1
    (shown,) = transports.about({"b"})
    assert "Nothing gets through to b over RDMA" in shown.reason and "acknowledged" in shown.reason
    peers.close()


def test_required_rdma_is_tried_again_at_once_on_a_way_that_failed(serve: Callable[..., Server]) -> None:
    here = Working(carries_bytes=4096)
    peers, _ = access(serve(Working()), here, "rdma")
    for _ in range(3):
        with pytest.raises(RdmaRequired, match="Nothing gets through"):
            peers.dial_shards("b", "", "job")
    here.carries_bytes = 1 << 20
    with peers.dial_shards("b", "", "job") as connection:
        assert connection.transport is Transport.RDMA
    assert len(here.made) == 4
    peers.close()


@pytest.mark.parametrize("transport", ["auto", "rdma"])
def test_a_peer_that_is_killed_while_the_way_is_tried_out_says_nothing_about_it(
    serve: Callable[..., Server], transport: str
) -> None:
    killed = threading.Event()

    def accept(connection: Connection, offer: OfferQueuePair, key: bytes) -> Connection:
        if killed.is_set():
            return answering(connection, offer, key)
        killed.set()
        accept_offer(connection, ENDPOINT, key=key, timeout_s=60)
        connection.close()
        raise Unreachable("killed")

    answering = ShardTransports("b", settings=PATIENT, queue_pairs=Working()).answer
    peers, transports = access(serve(answer=accept), Working(), transport)
    with pytest.raises(Unreachable):
        peers.dial_shards("b", "", "job")
    assert transports.about({"b"}) == ()
    with peers.dial_shards("b", "", "job") as connection:
        assert connection.transport is Transport.RDMA
    peers.close()


# --- transfers that fail, again and again ---


class Clock:
    """What the choice reads. It all but stands still."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def monotonic(self) -> float:
        self.now_s += 1e-6
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(shard_transports, "time", made)
    return made


def transport_of_the_next(peers: PeerAccess) -> Transport:
    with peers.dial_shards("b", "", "job") as connection:
        return connection.transport


def break_transfers(peers: PeerAccess, queue_pairs: Working, count: int) -> None:
    for _ in range(count):
        with peers.dial_shards("b", "", "job") as connection:
            assert connection.transport is Transport.RDMA
            queue_pairs.made[-1].broke("A window could not be bound.")


def test_transfers_that_fail_in_a_row_go_over_tcp_for_a_while_and_each_time_for_longer(
    serve: Callable[..., Server], clock: Clock
) -> None:
    here = Working()
    peers, transports = access(serve(Working()), here)
    break_transfers(peers, here, IN_A_ROW)
    assert transport_of_the_next(peers) is Transport.TCP
    (shown,) = transports.about({"b"})
    assert shown == PeerTransport("b", "tcp", f"RDMA failed {IN_A_ROW} times in a row: A window could not be bound.")
    for pause_s in (FIRST_PAUSE_S, 2 * FIRST_PAUSE_S, 4 * FIRST_PAUSE_S):
        clock.now_s += pause_s - 1
        assert transport_of_the_next(peers) is Transport.TCP
        clock.now_s += 1
        break_transfers(peers, here, 1)
        assert transport_of_the_next(peers) is Transport.TCP
    peers.close()


def test_a_shard_that_arrives_makes_the_next_failure_the_first(serve: Callable[..., Server], clock: Clock) -> None:
    here = Working()
    peers, _ = access(serve(Working()), here)
    for _ in range(3):
        break_transfers(peers, here, IN_A_ROW - 1)
        here.made[-1].carried()
    assert transport_of_the_next(peers) is Transport.RDMA
    peers.close()


def test_the_failures_of_a_peer_that_was_restarted_are_not_counted(serve: Callable[..., Server], clock: Clock) -> None:
    here = Working()
    peers, _ = access(serve(Working()), here)
    break_transfers(peers, here, IN_A_ROW)
    late = here.made[-1]
    assert transport_of_the_next(peers) is Transport.TCP
    peers.learn_addresses({"b": serve(Working(), incarnation="2").address})
    assert transport_of_the_next(peers) is Transport.RDMA
    for _ in range(IN_A_ROW):
        late.broke("of the former process")
    assert transport_of_the_next(peers) is Transport.RDMA
    peers.close()


def test_the_called_side_refuses_rdma_too_after_failures_of_its_own(serve: Callable[..., Server], clock: Clock) -> None:
    there = Working()
    peers, transports = access(serve(there), Working())
    break_transfers(peers, there, IN_A_ROW)
    assert transport_of_the_next(peers) is Transport.TCP
    (shown,) = transports.about({"b"})
    assert shown.reason == f"b: RDMA failed {IN_A_ROW} times in a row: A window could not be bound"
    peers.close()


def test_required_rdma_goes_on_after_failures_in_a_row(serve: Callable[..., Server], clock: Clock) -> None:
    here = Working()
    peers, _ = access(serve(Working(), "rdma"), here, "rdma")
    break_transfers(peers, here, 3 * IN_A_ROW)
    peers.close()


def test_a_peer_that_requires_rdma_is_not_refused_after_failures(serve: Callable[..., Server], clock: Clock) -> None:
    there = Working()
    peers, _ = access(serve(there), Working(), "rdma")
    break_transfers(peers, there, 2 * IN_A_ROW)
    peers.close()


def idle_transport(peers: PeerAccess) -> Transport:
    """Of the connection that the pool lends."""
    with peers._pool.connection("b", "job") as connection:
        assert connection.request(Ping(), Reply, timeout_s=60).verdict is ShardVerdict.OK
        return connection.transport


def test_a_connection_that_is_kept_gives_way_when_rdma_is_to_be_tried_again(
    serve: Callable[..., Server], clock: Clock
) -> None:
    here, there = Working(), Working()
    peers, _ = access(serve(there), here)
    there.error = ConfigurationError("The port is down.")
    assert idle_transport(peers) is Transport.TCP
    there.error = None
    clock.now_s += FIRST_PAUSE_S - 1
    assert idle_transport(peers) is Transport.TCP  # the one that was kept
    clock.now_s += 1
    assert idle_transport(peers) is Transport.RDMA
    kept = here.made[-1]
    assert idle_transport(peers) is Transport.RDMA and here.made[-1] is kept
    break_transfers(peers, here, IN_A_ROW)
    assert idle_transport(peers) is Transport.TCP
    clock.now_s += FIRST_PAUSE_S
    assert idle_transport(peers) is Transport.RDMA
    peers.close()


def test_a_host_that_is_set_to_tcp_keeps_its_connections(serve: Callable[..., Server], clock: Clock) -> None:
    peers, _ = access(serve(Working()), Working(), "tcp")
    with peers._pool.connection("b", "job") as first:
        pass
    clock.now_s += 1e6
    with peers._pool.connection("b", "job") as second:
        assert second is first
    peers.close()


def test_a_queue_pair_that_is_made_while_the_server_ends_is_closed_and_not_served(
    serve: Callable[..., Server],
) -> None:
    servers: list[Server] = []
    served: list[Any] = []
    upgraded: list[Connection] = []
    ended = threading.Event()

    class Late(Renamed):
        def close(self) -> None:
            self._tcp.close()
            ended.set()

        def receive(self, kind: Any, *, timeout_s: float) -> Any:  # noqa: ANN401 - as a connection's
            served.append(kind)
            raise Unreachable("its end was seen only now")

    def answer(connection: Connection, offer: OfferQueuePair, key: bytes) -> Connection:
        servers[0].close()
        upgraded.append(Late(connection, Working()))
        return upgraded[0]

    servers.append(serve(answer=answer))
    connection, _ = servers[0].dial()
    with connection:
        connection.send(OfferQueuePair(ENDPOINT, "0" * 64), timeout_s=60)
        assert ended.wait(60)
    assert served == []


# --- shown ---


def test_the_called_side_logs_why_it_refused_once(serve: Callable[..., Server]) -> None:
    there = Working()
    server = serve(there)
    with capture_logs() as logs:
        for error in (ConfigurationError("No port."), ConfigurationError("No port."), OSError("no memory")):
            there.error = error
            chosen(server, Working())
    said = [(log["peer"], log["reason"]) for log in logs if log["event"] == "queue_pair_refused"]
    assert said == [("a", "No port"), ("a", "The queue pair could not be made: no memory")]


def test_a_slow_disk_does_not_hold_up_who_asks_what_is_known(serve: Callable[..., Server]) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def store(known: tuple[PeerTransport, ...]) -> None:
        begun.set()
        assert go_on.wait(60)

    transports = ShardTransports("a", settings=PATIENT, queue_pairs=Without(), on_change=store)
    connection, key = serve().dial()
    with ThreadPoolExecutor(2) as threads, connection:
        choosing = threads.submit(transports.choose, connection, key)
        assert begun.wait(60)
        try:
            (shown,) = threads.submit(transports.about, {"b"}).result(10)
            assert shown.transport == "tcp"
        finally:
            go_on.set()
        assert choosing.result() is connection


def test_what_is_known_is_logged_and_stored_when_it_changes_and_only_of_linked_hosts(
    serve: Callable[..., Server], tmp_path: Path
) -> None:
    server, stored = serve(), TransportsFile(tmp_path)
    changes: list[tuple[PeerTransport, ...]] = []
    transports = ShardTransports("a", settings=PATIENT, queue_pairs=Without(), on_change=changes.append)
    for _ in range(2):
        connection, key = server.dial()
        assert transports.choose(connection, key) is connection
        connection.close()
    assert changes == [(PeerTransport("b", "tcp", f"a: {NO_DEVICE}"),)]
    assert transports.about({"c"}) == ()
    assert read_host_folder(tmp_path, str(tmp_path)).transports == ()
    stored.store(changes[0])
    assert read_host_folder(tmp_path, str(tmp_path)).transports == changes[0]


# --- a tampered offer or answer ---

OTHERS = {
    "qp_number": 18,
    "first_psn": 1,
    "gid": "f" * 32,
    "lid": 7,
    "mtu_bytes": 4096,
    "is_infiniband": True,
    "receive_buffers": 17,
    "receive_buffer_bytes": 1024,
    "reads": 1,
}


def test_every_field_of_an_endpoint_is_tampered_with_below() -> None:
    assert set(OTHERS) == {field.name for field in msgspec.structs.fields(QueuePairEndpoint)}


class Pair:
    """Both ends of a connection, handshake done."""

    def __init__(self) -> None:
        self._listener = TcpListener("127.0.0.1", 0, fallback=False, settings=PATIENT, total=ByteCounters())
        self.ours = connect_tcp(f"127.0.0.1:{self._listener.port}", settings=PATIENT, total=ByteCounters())
        self.theirs, _ = self._listener.accept()
        with ThreadPoolExecutor(1) as threads:
            admitted = threads.submit(
                admit,
                self.theirs,
                identity=Identity("b", "", "1"),
                keys_of=PeerKeys(TOKEN).to_answer,
                timeout_s=60,
                on_shown=lambda: None,
            )
            self.key = introduce(self.ours, identity=Identity("a", "", "2"), token=TOKEN, timeout_s=60)
            assert admitted.result() == self.key

    def close(self) -> None:
        self.ours.close()
        self.theirs.close()
        self._listener.close()

    def offer(self, key: bytes) -> OfferQueuePair:
        """What the connecting side sends, as the accepting side receives it."""
        with ThreadPoolExecutor(1) as threads:
            asking = threads.submit(
                offer_queue_pair, self.ours, Described(), own_host="a", required=False, key=key, timeout_s=60
            )
            received = self.theirs.receive(OfferQueuePair, timeout_s=60)
            refuse_offer(self.theirs, "only looking", key=key, timeout_s=60)
            with pytest.raises(NoQueuePair, match="b: only looking"):
                asking.result()
        return received

    def ask(self, answer: AnswerQueuePair, here: Described) -> Connection:
        """The connecting side, if this is the answer."""
        with ThreadPoolExecutor(1) as threads:
            asking = threads.submit(
                offer_queue_pair, self.ours, here, own_host="a", required=False, key=self.key, timeout_s=60
            )
            self.theirs.receive(OfferQueuePair, timeout_s=60)
            self.theirs.send(answer, timeout_s=60)
            return asking.result()


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    made.close()


def answer(pair: Pair, offer: OfferQueuePair, there: QueuePairs) -> Connection:
    return answer_offer(
        pair.theirs,
        offer,
        there,
        key=pair.key,
        timeout_s=60,
        on_broken=lambda reason: None,
        on_carried=lambda: None,
    )


def test_every_connection_has_its_own_key(pair: Pair) -> None:
    other = Pair()
    assert pair.key != other.key and len(pair.key) == 32
    offered = other.offer(other.key)
    there = Described()
    with pytest.raises(Unauthorized, match="in the name of a"):  # replayed on another connection
        answer(pair, offered, there)
    assert there.wanted == []
    other.close()


def test_an_offer_that_is_made_a_requirement_on_the_way_is_refused(pair: Pair) -> None:
    offered = pair.offer(pair.key)
    with pytest.raises(Unauthorized):
        answer(pair, OfferQueuePair(ENDPOINT, offered.proof, required=True), Described())


@pytest.mark.parametrize("field", OTHERS)
def test_an_offer_with_any_field_changed_is_refused_before_anything_is_made(pair: Pair, field: str) -> None:
    offered = pair.offer(pair.key)
    changed = msgspec.structs.replace(ENDPOINT, **{field: OTHERS[field]})
    there = Described()
    with pytest.raises(Unauthorized):
        answer(pair, OfferQueuePair(changed, offered.proof), there)
    assert there.wanted == []


def acceptance(pair: Pair) -> AnswerQueuePair:
    accept_offer(pair.theirs, ENDPOINT, key=pair.key, timeout_s=60)
    return pair.ours.receive(AnswerQueuePair, timeout_s=60)


def refusal(pair: Pair) -> AnswerQueuePair:
    refuse_offer(pair.theirs, NO_DEVICE, key=pair.key, timeout_s=60)
    return pair.ours.receive(AnswerQueuePair, timeout_s=60)


@pytest.mark.parametrize("field", OTHERS)
def test_an_answer_with_any_field_changed_is_refused_before_anything_is_connected(pair: Pair, field: str) -> None:
    changed = msgspec.structs.replace(ENDPOINT, **{field: OTHERS[field]})
    here = Described()
    with pytest.raises(Unauthorized, match="in the name of b"):
        pair.ask(AnswerQueuePair(acceptance(pair).proof, changed), here)
    assert here.wanted == []


def test_a_refusal_is_proved_too(pair: Pair) -> None:
    proof = refusal(pair).proof
    for changed in (AnswerQueuePair(proof, None, "another reason"), AnswerQueuePair(proof, ENDPOINT)):
        with pytest.raises(Unauthorized):
            pair.ask(changed, Described())


def test_an_offer_is_no_answer(pair: Pair) -> None:
    offered = pair.offer(pair.key)
    here = Described()
    with pytest.raises(Unauthorized):
        pair.ask(AnswerQueuePair(offered.proof, ENDPOINT), here)
    assert here.wanted == []


def test_a_genuine_answer_is_followed(pair: Pair) -> None:
    here = Described()
    with pytest.raises(NoQueuePair, match=f"b: {NO_DEVICE}"):
        pair.ask(refusal(pair), here)
    assert here.wanted == []
    with pytest.raises(PathFailed, match="a: The queue pair cannot be connected"):
        pair.ask(acceptance(pair), here)
    assert here.wanted == [ENDPOINT]


def test_a_tampered_offer_ends_the_connection_and_a_second_one_too(serve: Callable[..., Server]) -> None:
    server = serve()
    connection, _ = server.dial()
    connection.send(OfferQueuePair(ENDPOINT, "0" * 64), timeout_s=60)
    with pytest.raises(Unreachable):
        connection.receive(AnswerQueuePair, timeout_s=60)
    connection.close()

    connection, key = server.dial()
    with pytest.raises(NoQueuePair):
        offer_queue_pair(connection, Described(), own_host="a", required=False, key=key, timeout_s=60)
    with pytest.raises(Unreachable):
        offer_queue_pair(connection, Described(), own_host="a", required=False, key=key, timeout_s=60)
    connection.close()


# --- endpoints that cannot be ---

BEYOND: list[tuple[str, object]] = [
    *(("qp_number", value) for value in (-1, 0, 1, 0xFFFFFF, 1 << 24, 1.5, "2", None)),
    *(("first_psn", value) for value in (-1, 1 << 24)),
    *(("gid", value) for value in ("", "0" * 31, "0" * 33, "g" * 32, "0" * 32 + "\n", "::1", None)),
    *(("lid", value) for value in (-1, 0xC000, 1 << 16)),
    *(("mtu_bytes", value) for value in (0, 255, 1500, 8192, -256, "1024")),
    *(("is_infiniband", value) for value in (1, None, "false")),
    *(("receive_buffers", value) for value in (-1, 0, 1, 15, 1025)),
    *(("receive_buffer_bytes", value) for value in (0, 1023, (1 << 20) + 1)),
    *(("reads", value) for value in (-1, 0, 256)),
]


@pytest.mark.parametrize(("field", "value"), BEYOND)
def test_an_endpoint_beyond_its_bounds_is_invalid(field: str, value: object) -> None:
    offer = OfferQueuePair(msgspec.structs.replace(ENDPOINT, **{field: value}), "0" * 64)
    with pytest.raises(InvalidMessage):
        wire.decode(wire.encode(offer), OfferQueuePair)


def test_what_a_queue_pair_may_be_is_within_the_bounds() -> None:
    for field, value in (("qp_number", 2), ("gid", "f" * 32), ("lid", 0xBFFF), ("receive_buffers", 16), ("reads", 1)):
        offer = OfferQueuePair(msgspec.structs.replace(ENDPOINT, **{field: value}), "0" * 64)
        assert wire.decode(wire.encode(offer), OfferQueuePair) == offer
