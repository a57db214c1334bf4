"""The contract of every transport between engines, whatever the other side does: one suite for all of them.

The other side is a thread, a proxy that stops forwarding, or a process that is stopped or killed.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from ckpt_engine.contracts.peer_wire import (
    PEER_PROTOCOL,
    Challenge,
    Hello,
    PeerRequest,
    Ping,
    Reply,
    ShardVerdict,
    Welcome,
)
from ckpt_engine.counters import Counters
from ckpt_engine.peers.peer_server import PeerServer
from ckpt_engine.peers.transport.handshake import admit, introduce
from ckpt_engine.peers.transport.peer_keys import PeerKeys
from ckpt_engine.peers.transport.pool import ConnectionPool
from ckpt_engine.peers.transport.port import ByteCounters, Connection, Identity, Listener
from ckpt_engine.peers.transport.tcp import TcpConnection, TcpListener, connect_tcp
from ckpt_engine.settings import EngineSettings
from flyball.contracts.errors import FlyballError, InvalidMessage, PortInUse, Unauthorized, Unreachable
from tests.rdma import rdma_transport

SETTINGS = EngineSettings(handshake_timeout_s=0.3, io_timeout_s=0.3, idle_timeout_s=2.0, max_connections=4)
PATIENT = EngineSettings(handshake_timeout_s=60, io_timeout_s=60, idle_timeout_s=60, max_connections=4)
TOKEN = b"the token"
BULK = bytes(range(256)) * 40_000  # more than the buffers on the way can hold
SERVER = Identity("server", "", "1")
CLIENT = Identity("client", "127.0.0.1:1", "2")


class Tcp:
    """The transport under test. Another one needs the same methods."""

    def listen(self, port: int = 0, *, fallback: bool = False, settings: EngineSettings = SETTINGS) -> Listener:
        return TcpListener("127.0.0.1", port, fallback=fallback, settings=settings, total=ByteCounters())

    def connect(self, port: int, settings: EngineSettings = SETTINGS, total: ByteCounters | None = None) -> Connection:
        return connect_tcp(f"127.0.0.1:{port}", settings=settings, total=total or ByteCounters())

    def impatient(self, connection: Connection, settings: EngineSettings = SETTINGS) -> Connection:
        """The same connection with short time limits."""
        return TcpConnection(socket.socket(fileno=os.dup(connection.fileno())), settings, ByteCounters())

    def inject(self, connection: Connection, data: bytes) -> None:
        """Put bytes on the wire where the other side expects a frame."""
        connection.send_raw(memoryview(data))

    def proxy(self, port: int) -> Proxy:
        return Proxy(port)

    def start_peer(self, port: int) -> subprocess.Popen[bytes]:
        """A process that connects, sends 1000 bytes, says so on its standard output, and takes everything in."""
        return subprocess.Popen([sys.executable, "-c", PEER_PROCESS, str(port)], stdout=subprocess.PIPE)


class Proxy:
    """Forwards to `port` until `hold`: then both sides see a connection on which nothing moves."""

    def __init__(self, port: int) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._target = port
        self._held = threading.Event()
        self._sockets: list[socket.socket] = []
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        with suppress(OSError):
            inner, _ = self._listener.accept()
            outer = socket.create_connection(("127.0.0.1", self._target))
            self._sockets += [inner, outer]
            threading.Thread(target=self._pump, args=(inner, outer), daemon=True).start()
            self._pump(outer, inner)

    def _pump(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                if self._held.is_set():
                    return
                target.sendall(data)

    def hold(self) -> None:
        self._held.set()

    def close(self) -> None:
        for sock in (self._listener, *self._sockets):
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()


class RdmaProxy(Proxy):
    """Forwards what the two sides agree on; `hold` also swallows what they send each other past it."""

    def __init__(self, port: int, transport: rdma_transport.Rdma) -> None:
        super().__init__(port)
        self._transport = transport

    def hold(self) -> None:
        super().hold()
        self._transport.swallow(self._target)


class Rdma(rdma_transport.Rdma):
    """Needs an RDMA device: see `make test-rdma`."""

    def listen(self, port: int = 0, *, fallback: bool = False, settings: EngineSettings = SETTINGS) -> Listener:
        return super().listen(port, fallback=fallback, settings=settings)

    def connect(self, port: int, settings: EngineSettings = SETTINGS, total: ByteCounters | None = None) -> Connection:
        return super().connect(port, settings, total)

    def impatient(self, connection: Connection, settings: EngineSettings = SETTINGS) -> Connection:
        return super().impatient(connection, settings)

    def proxy(self, port: int) -> Proxy:
        return RdmaProxy(port, self)


@pytest.fixture(params=[Tcp, pytest.param(Rdma, marks=pytest.mark.rdma)])
def transport(request: pytest.FixtureRequest) -> Tcp | Rdma:
    return request.param()


class Pair:
    """Both ends of one connection, without a handshake."""

    def __init__(self, transport: Tcp, settings: EngineSettings) -> None:
        self.listener = transport.listen(settings=settings)
        self.ours = transport.connect(self.listener.port, settings)
        self.theirs, _ = self.listener.accept()

    def close(self) -> None:
        self.ours.close()
        self.theirs.close()
        self.listener.close()


@pytest.fixture
def pair(transport: Tcp) -> Iterator[Pair]:
    both = Pair(transport, SETTINGS)
    yield both
    both.close()


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as executor:
        yield executor


class Server:
    """A PeerServer that answers a ping with OK and BULK."""

    def __init__(self, transport: Tcp, settings: EngineSettings = PATIENT) -> None:
        self.transport = transport
        self.met: list[Identity] = []
        self.listener = transport.listen(settings=settings)
        self.port = self.listener.port
        self.server = PeerServer(
            self.listener,
            identity=SERVER,
            keys_of=PeerKeys(TOKEN).to_answer,
            settings=settings,
            counters=Counters(),
            handle=self._answer,
            on_hello=self.met.append,
        )
        self.server.start()

    def _answer(self, connection: Connection, request: object) -> None:
        connection.send(Reply(ShardVerdict.OK), timeout_s=60)
        connection.send_raw(memoryview(BULK))

    def dial(self, token: bytes = TOKEN, port: int = 0, settings: EngineSettings = PATIENT) -> Connection:
        connection = self.transport.connect(port or self.port, settings)
        try:
            introduce(connection, identity=CLIENT, token=token, timeout_s=settings.handshake_timeout_s)
        except FlyballError:
            connection.close()
            raise
        return connection


@pytest.fixture
def server(transport: Tcp) -> Iterator[Server]:
    running = Server(transport)
    yield running
    running.server.close()


def bulk_of(connection: Connection) -> bytes:
    assert connection.request(Ping(), Reply, timeout_s=60) == Reply(ShardVerdict.OK)
    target = bytearray(len(BULK))
    connection.receive_raw(memoryview(target))
    return bytes(target)


# --- frames and bytes ---


def test_frames_and_bytes_arrive_in_order_and_only_bytes_are_counted(
    transport: Tcp, threads: ThreadPoolExecutor
) -> None:
    pair = Pair(transport, PATIENT)

    def send() -> None:
        pair.theirs.send(Reply(ShardVerdict.OK, "first"), timeout_s=60)
        pair.theirs.send_raw(memoryview(BULK))
        pair.theirs.send(Reply(ShardVerdict.HAVE), timeout_s=60)

    sending = threads.submit(send)
    assert pair.ours.receive(Reply, timeout_s=60).message == "first"
    target = bytearray(len(BULK))
    pair.ours.receive_raw(memoryview(target))
    assert target == BULK
    assert pair.ours.receive(Reply, timeout_s=60).verdict is ShardVerdict.HAVE
    sending.result()
    assert pair.theirs.bytes_sent == pair.ours.bytes_received == len(BULK)
    pair.close()


def test_a_file_is_sent_from_any_offset(transport: Tcp, threads: ThreadPoolExecutor, tmp_path: Path) -> None:
    pair = Pair(transport, PATIENT)
    path = tmp_path / "file"
    path.write_bytes(BULK)
    with path.open("rb") as file:
        sending = threads.submit(pair.theirs.send_file, file.fileno(), 1001, 5_000_000)
        target = bytearray(5_000_000)
        pair.ours.receive_raw(memoryview(target))
        sending.result()
        assert target == BULK[1001:][:5_000_000]
        with pytest.raises(Unreachable, match="ended early"):
            pair.theirs.send_file(file.fileno(), len(BULK) - 10, 11)
    pair.close()


def test_nothing_at_all_is_a_frame_and_a_shard_too(pair: Pair) -> None:
    pair.ours.send_raw(memoryview(b""))
    pair.theirs.receive_raw(memoryview(bytearray()))
    pair.ours.send(Ping(), timeout_s=60)
    assert pair.theirs.receive(PeerRequest, timeout_s=60) == Ping()


def test_a_frame_that_is_too_large_is_not_sent(pair: Pair) -> None:
    with pytest.raises(InvalidMessage, match="limit"):
        pair.ours.send({"a": "x" * (1 << 17)}, timeout_s=60)
    pair.ours.send(Ping(), timeout_s=60)  # and the connection is unaffected
    assert pair.theirs.receive(PeerRequest, timeout_s=60) == Ping()


@pytest.mark.parametrize("length", [(64 << 10) + 1, 1 << 31, (1 << 32) - 1])
def test_a_length_that_nobody_can_mean_is_refused_before_memory_is_taken(
    transport: Tcp, pair: Pair, length: int
) -> None:
    transport.inject(pair.theirs, struct.pack("<I", length))
    tracemalloc.start()
    with pytest.raises(InvalidMessage, match="limit"):
        pair.ours.receive(Reply, timeout_s=60)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 1 << 20


@pytest.mark.parametrize(
    "content", [b"", b"null", b"[]", b"\xff" * 40, b'{"verdict":"no such"}', b'{"verdict":"ok"', b"[" * 10_000]
)
def test_a_frame_that_is_no_message_is_invalid(transport: Tcp, pair: Pair, content: bytes) -> None:
    transport.inject(pair.theirs, struct.pack("<I", len(content)) + content)
    with pytest.raises(InvalidMessage):
        pair.ours.receive(Reply, timeout_s=60)


# --- the connection ends, at every point ---


@pytest.mark.parametrize("sent", [b"", b"\x10\0", b"\x10\0\0\0half of it"])
def test_a_frame_cut_off_by_the_end_is_unreachable(transport: Tcp, pair: Pair, sent: bytes) -> None:
    transport.inject(pair.theirs, sent)
    pair.theirs.close()
    with pytest.raises(Unreachable):
        pair.ours.receive(Reply, timeout_s=60)


def test_a_shard_cut_off_by_the_end_is_unreachable_and_not_counted(pair: Pair) -> None:
    pair.theirs.send_raw(memoryview(b"x" * 1000))
    pair.theirs.close()
    with pytest.raises(Unreachable):
        pair.ours.receive_raw(memoryview(bytearray(1001)))
    assert pair.ours.bytes_received == 0


def test_sending_to_one_who_has_gone_is_unreachable(pair: Pair) -> None:
    pair.theirs.close()
    with pytest.raises(Unreachable):
        pair.ours.send_raw(memoryview(bytes(64 << 20)))
    with pytest.raises(Unreachable):
        pair.ours.send(Ping(), timeout_s=60)


def test_a_connection_that_was_closed_here_is_unreachable_as_well(pair: Pair) -> None:
    pair.ours.close()
    with pytest.raises(Unreachable):
        pair.ours.send(Ping(), timeout_s=60)
    with pytest.raises(Unreachable):
        pair.ours.receive(Reply, timeout_s=60)


@pytest.mark.parametrize("waits", ["frame", "bytes", "room"])
def test_abort_wakes_who_waits_at_once(transport: Tcp, threads: ThreadPoolExecutor, waits: str) -> None:
    pair = Pair(transport, PATIENT)
    began = threading.Event()

    def wait() -> None:
        began.set()
        if waits == "frame":
            pair.ours.receive(Reply, timeout_s=600)
        elif waits == "bytes":
            pair.ours.receive_raw(memoryview(bytearray(10)))
        else:
            pair.ours.send_raw(memoryview(bytes(64 << 20)))

    waiting: Future[None] = threads.submit(wait)
    began.wait()
    pair.ours.abort()
    with pytest.raises(Unreachable):
        waiting.result(50)
    pair.close()


# --- time limits ---


def test_silence_ends_a_frame_and_bytes(pair: Pair) -> None:
    with pytest.raises(Unreachable, match="timed out"):
        pair.ours.receive(Reply, timeout_s=0.05)
    with pytest.raises(Unreachable, match="timed out"):
        pair.theirs.receive_raw(memoryview(bytearray(10)))


def drip(send: Callable[[bytes], None], stop: threading.Event) -> None:
    with suppress(FlyballError):
        while not stop.wait(0.005):
            send(b" ")


@pytest.mark.parametrize("what", ["frame", "bytes"])
def test_single_bytes_that_keep_coming_do_not_hold_a_thread(
    transport: Tcp, pair: Pair, threads: ThreadPoolExecutor, what: str
) -> None:
    stop = threading.Event()
    transport.inject(pair.theirs, struct.pack("<I", 60_000))
    dripping = threads.submit(drip, lambda data: transport.inject(pair.theirs, data), stop)
    with pytest.raises(Unreachable, match="timed out"):
        if what == "frame":
            pair.ours.receive(Reply, timeout_s=0.2)
        else:
            pair.ours.receive_raw(memoryview(bytearray(1 << 20)))
    stop.set()
    dripping.result()


def test_one_who_takes_single_bytes_does_not_hold_a_thread(
    transport: Tcp, pair: Pair, threads: ThreadPoolExecutor
) -> None:
    stop = threading.Event()

    def sip() -> None:
        with suppress(FlyballError):
            while not stop.wait(0.005):
                pair.theirs.receive_raw(memoryview(bytearray(1)))

    sipping = threads.submit(sip)
    with pytest.raises(Unreachable, match="timed out"):
        pair.ours.send_raw(memoryview(bytes(64 << 20)))
    stop.set()
    pair.ours.close()
    sipping.result()


def test_a_network_that_swallows_everything_is_noticed_by_both_sides(transport: Tcp) -> None:
    server = Server(transport)
    proxy = transport.proxy(server.port)
    with server.dial(port=proxy.port) as patient:
        assert bulk_of(patient) == BULK
        proxy.hold()  # no FIN and no RST, as in a network partition
        with transport.impatient(patient) as connection:
            with pytest.raises(Unreachable, match="timed out"):
                connection.request(Ping(), Reply, timeout_s=0.2)
            with pytest.raises(Unreachable, match="timed out"):
                connection.send_raw(memoryview(bytes(64 << 20)))
    server.server.close()
    proxy.close()


PEER_PROCESS = """
import socket, sys
sock = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
sock.sendall(b"x" * 1000)
print("sent", flush=True)
while sock.recv(1 << 20):
    pass
"""


@pytest.mark.processes
@pytest.mark.parametrize("how", [signal.SIGSTOP, signal.SIGKILL])
def test_a_peer_process_stopped_or_killed_in_mid_shard(transport: Tcp, how: signal.Signals) -> None:
    listener = transport.listen()
    process = transport.start_peer(listener.port)
    try:
        connection, _ = listener.accept()
        assert process.stdout is not None and process.stdout.readline() == b"sent\n"
        os.kill(process.pid, how)
        with connection:
            with pytest.raises(Unreachable):
                connection.receive_raw(memoryview(bytearray(1 << 20)))
            with pytest.raises(Unreachable):
                connection.send_raw(memoryview(bytes(64 << 20)))
    finally:
        process.kill()
        process.wait()
        listener.close()


def test_two_connections_at_once_do_not_wait_for_each_other(server: Server, threads: ThreadPoolExecutor) -> None:
    with server.dial() as idle, server.dial() as busy:
        idle.send(Ping(), timeout_s=60)  # without reading the reply yet
        assert bulk_of(busy) == BULK
    results = [threads.submit(lambda: bulk_of(server.dial(settings=PATIENT))) for _ in range(2)]
    assert [result.result() for result in results] == [BULK, BULK]


# --- the handshake ---


def test_both_sides_know_each_other(server: Server) -> None:
    with server.dial() as connection:
        assert connection.peer == SERVER
        assert bulk_of(connection) == BULK
    assert server.met == [CLIENT]


def test_the_wrong_token_is_refused(server: Server) -> None:
    with pytest.raises(Unauthorized):
        server.dial(b"another token")
    assert server.met == []


def test_a_server_without_the_token_is_refused_too(pair: Pair, threads: ThreadPoolExecutor) -> None:
    introducing = threads.submit(introduce, pair.ours, identity=CLIENT, token=TOKEN, timeout_s=60)
    pair.theirs.send(Challenge(PEER_PROTOCOL, "0" * 64), timeout_s=60)
    pair.theirs.receive(Hello, timeout_s=60)
    pair.theirs.send(Welcome("server", "1", "0" * 64), timeout_s=60)
    with pytest.raises(Unauthorized, match="another token"):
        introducing.result()


def test_a_proof_that_was_overheard_is_of_no_use_in_another_connection(
    transport: Tcp, server: Server, threads: ThreadPoolExecutor
) -> None:
    observed = Pair(transport, SETTINGS)  # a listener in the middle, to whom an engine proves that it has the token
    introducing = threads.submit(introduce, observed.ours, identity=CLIENT, token=TOKEN, timeout_s=60)
    observed.theirs.send(Challenge(PEER_PROTOCOL, "5" * 64), timeout_s=60)
    hello = observed.theirs.receive(Hello, timeout_s=60)
    observed.close()
    with pytest.raises(FlyballError):
        introducing.result()
    with transport.connect(server.port) as replayed:
        replayed.receive(Challenge, timeout_s=60)
        replayed.send(hello, timeout_s=60)
        with pytest.raises(Unreachable):
            replayed.receive(Welcome, timeout_s=60)
    assert server.met == []


def test_a_proof_cannot_be_reflected_nor_used_under_another_name(
    transport: Tcp, server: Server, threads: ThreadPoolExecutor
) -> None:
    # An engine connects to an attacker without the token, who passes on the real server's challenge.
    with transport.connect(server.port) as outer:
        challenge = outer.receive(Challenge, timeout_s=60)
        victim = Pair(transport, SETTINGS)
        introducing = threads.submit(introduce, victim.ours, identity=CLIENT, token=TOKEN, timeout_s=60)
        victim.theirs.send(challenge, timeout_s=60)
        hello = victim.theirs.receive(Hello, timeout_s=60)
        victim.theirs.send(Welcome("client", "2", hello.proof), timeout_s=60)  # its own message back
        with pytest.raises(Unauthorized):
            introducing.result()
        outer.send(Hello("another", hello.address, hello.incarnation, hello.nonce, hello.proof), timeout_s=60)
        with pytest.raises(Unreachable):
            outer.receive(Welcome, timeout_s=60)
        victim.close()
    assert server.met == []


def test_another_protocol_is_named(pair: Pair) -> None:
    pair.theirs.send(Challenge("flyball-engine/999", "0" * 64), timeout_s=60)
    with pytest.raises(InvalidMessage, match="999"):
        introduce(pair.ours, identity=CLIENT, token=TOKEN, timeout_s=60)


@pytest.mark.parametrize("stage", ["challenge", "welcome", "hello"])
def test_every_stage_of_the_handshake_has_its_deadline(transport: Tcp, threads: ThreadPoolExecutor, stage: str) -> None:
    pair = Pair(transport, SETTINGS)
    if stage == "hello":
        with pytest.raises(Unreachable, match="timed out"):
            admit(pair.theirs, identity=SERVER, keys_of=PeerKeys(TOKEN).to_answer, timeout_s=0.1, on_shown=lambda: None)
    else:
        if stage == "welcome":
            pair.theirs.send(Challenge(PEER_PROTOCOL, "0" * 64), timeout_s=60)
        with pytest.raises(FlyballError, match="timed out"):
            introduce(pair.ours, identity=CLIENT, token=TOKEN, timeout_s=0.1)
    pair.close()


# --- the server under strangers ---


def test_a_silent_connection_is_ended_by_its_deadline(transport: Tcp) -> None:
    server = Server(transport, SETTINGS)
    with transport.connect(server.port, PATIENT) as silent:
        silent.receive(Challenge, timeout_s=60)
        with pytest.raises(Unreachable, match="closed"):
            silent.receive(Welcome, timeout_s=60)
    server.server.close()


@pytest.mark.parametrize("data", [b"\xff\xff\xff\xff", b"\x04\x00\x00\x00null", b"GET / HTTP/1.1\r\n\r\n"])
def test_garbage_ends_the_connection_and_not_the_server(transport: Tcp, server: Server, data: bytes) -> None:
    with transport.connect(server.port, PATIENT) as stranger:
        stranger.receive(Challenge, timeout_s=60)
        transport.inject(stranger, data)
        with pytest.raises(Unreachable):
            stranger.receive(Welcome, timeout_s=60)
    with server.dial() as connection:
        assert bulk_of(connection) == BULK


def test_a_flood_of_strangers_does_not_lock_out_those_with_the_token(transport: Tcp) -> None:
    server = Server(transport, PATIENT)  # unauthenticated connections may stay for a minute
    with ExitStack() as stack:
        for _ in range(5 * PATIENT.max_connections):
            stack.enter_context(transport.connect(server.port, PATIENT))
        connection = stack.enter_context(server.dial(settings=PATIENT))
        for _ in range(5 * PATIENT.max_connections):
            stack.enter_context(transport.connect(server.port, PATIENT))
        assert bulk_of(connection) == BULK  # authenticated connections are not evicted by others
    server.server.close()


def test_the_door_stays_open_when_there_was_no_thread_for_one(
    transport: Tcp, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, turned_away = threading.Thread.start, threading.Event()

    def short_of_threads(thread: threading.Thread) -> None:
        if thread.name == "peer-127.0.0.1" and not turned_away.is_set():
            turned_away.set()
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", short_of_threads)
    with pytest.raises(Unreachable):
        server.dial()
    with server.dial() as connection:
        assert bulk_of(connection) == BULK


def test_one_too_many_with_the_token_is_refused_with_a_reason(transport: Tcp) -> None:
    server = Server(transport, PATIENT)
    with ExitStack() as stack:
        for _ in range(PATIENT.max_connections):
            stack.enter_context(server.dial(settings=PATIENT))
        with pytest.raises(Unreachable, match="all 4 connections are in use"):
            server.dial(settings=PATIENT)
        server.server.expect(linked_hosts=4, jobs=1)  # room for all hosts of a larger job
        stack.enter_context(server.dial(settings=PATIENT))
    server.server.close()


def test_a_taken_port_is_an_error_or_replaced(transport: Tcp) -> None:
    first = transport.listen()
    with pytest.raises(PortInUse):
        transport.listen(first.port)
    second = transport.listen(first.port, fallback=True)
    assert second.port != first.port
    first.close()
    second.close()


def test_nobody_there_is_unreachable(transport: Tcp) -> None:
    with socket.socket() as bound:  # without listening: a free port may be taken by others
        bound.bind(("127.0.0.1", 0))
        with pytest.raises(Unreachable, match="No connection"):
            transport.connect(bound.getsockname()[1])


# --- the pool ---


def test_the_pool_keeps_a_good_connection_and_drops_a_dead_one(server: Server) -> None:
    dialled: list[str] = []

    def dial(host_id: str, address: str) -> Connection:
        dialled.append(host_id)
        return server.dial()

    pool = ConnectionPool(lambda host_id, job: dial(host_id, ""), connections_per_peer=1)
    for _ in range(3):
        with pool.connection("server", "job") as connection:
            assert bulk_of(connection) == BULK
    assert dialled == ["server"]
    with pytest.raises(RuntimeError), pool.connection("server", "job"):
        raise RuntimeError("a transfer broke off")  # what is left in the connection is unknown
    with pool.connection("server", "job") as connection:
        assert dialled == ["server"] * 2
    server.server.close()
    ended = select.poll()
    ended.register(connection.fileno(), select.POLLIN)
    assert ended.poll(60_000)  # its end is about to arrive
    with pytest.raises(Unreachable), pool.connection("server", "job"):
        pass
    pool.close()


def test_the_pool_closes_what_hosts_ended_that_nobody_asks_any_more(server: Server, transport: Tcp) -> None:
    gone = Server(transport)
    servers = {"gone": gone, "server": server}
    pool = ConnectionPool(lambda host_id, address: servers[host_id].dial(), connections_per_peer=1)
    with pool.connection("gone", "job") as connection:
        assert bulk_of(connection) == BULK
    gone.server.close()
    ended = select.poll()
    ended.register(connection.fileno(), select.POLLIN)
    assert ended.poll(60_000)
    with pool.connection("server", "job") as other:
        assert bulk_of(other) == BULK
    assert connection.fileno() == -1
    assert (set(pool._idle), set(pool._lent)) == ({("server", "job")}, set())  # nothing stays of a host that left
    pool._take(("server", "job"))
    assert not pool._idle
    other.close()
    pool.close()


# --- addresses ---


@pytest.mark.parametrize(
    "address", ["127.0.0.1:65536", "127.0.0.1:70000", "127.0.0.1:0", "127.0.0.1:-1", "127.0.0.1:\u0663", "1:", ":1", ""]
)
def test_an_address_that_nobody_could_call_is_named(address: str) -> None:
    with pytest.raises(InvalidMessage) as caught:
        connect_tcp(address, settings=SETTINGS, total=ByteCounters())
    assert repr(address) in caught.value.message and "65535" in caught.value.hint
