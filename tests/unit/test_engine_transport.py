"""The handshake and the frames, against a real socket: wrong tokens, garbage, silence, and bytes in bulk."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import suppress

import msgspec
import pytest

from ckpt_engine.peer_server import PeerServer, listen
from ckpt_engine.peer_wire import Challenge, Ping, Reply, Verdict
from ckpt_engine.settings import EngineSettings
from ckpt_engine.transport.pool import ConnectionPool
from ckpt_engine.transport.tcp import ByteCounters, Connection, Identity, connect
from flyball.contracts.errors import InvalidMessage, PortInUse, Unauthorized, Unreachable

SETTINGS = EngineSettings(handshake_timeout_s=0.3, io_timeout_s=0.5, idle_timeout_s=0.5, max_connections=4)
TOKEN = b"the token"
BULK = bytes(range(256)) * 40_000


class Server:
    """A PeerServer whose answer to a ping is OK and BULK."""

    def __init__(self) -> None:
        self.total = ByteCounters()
        self.met: list[Identity] = []
        listener = listen("127.0.0.1", 0, fallback=False)
        self.address = f"127.0.0.1:{listener.getsockname()[1]}"
        self.server = PeerServer(
            listener,
            identity=Identity("server", self.address, "1"),
            token=TOKEN,
            settings=SETTINGS,
            total=self.total,
            handle=self._answer,
            on_hello=self.met.append,
        )
        self.server.start()

    def _answer(self, connection: Connection, request: object) -> None:
        connection.send(Reply(Verdict.OK), timeout_s=1)
        connection.send_raw(memoryview(BULK))

    def dial(self, token: bytes = TOKEN) -> Connection:
        return connect(
            self.address,
            identity=Identity("client", "127.0.0.1:1", "2"),
            token=token,
            settings=SETTINGS,
            total=ByteCounters(),
        )


@pytest.fixture
def server() -> Iterator[Server]:
    running = Server()
    yield running
    running.server.close()


def test_both_sides_know_each_other_and_bytes_are_counted(server: Server) -> None:
    with server.dial() as connection:
        assert connection.peer == Identity("server", "", "1")
        assert connection.request(Ping(), Reply, timeout_s=1) == Reply(Verdict.OK)
        target = bytearray(len(BULK))
        connection.receive_raw(memoryview(target))
        assert target == BULK
        assert connection.bytes_received == len(BULK)
    assert server.met == [Identity("client", "127.0.0.1:1", "2")]
    deadline = time.monotonic() + 5.0  # the last bytes may arrive before they are counted as sent
    while server.total.sent < len(BULK) and time.monotonic() < deadline:
        time.sleep(0.001)
    assert server.total.sent == len(BULK)


def test_the_wrong_token_is_refused(server: Server) -> None:
    with pytest.raises(Unauthorized):
        server.dial(b"another token")
    assert server.met == []


def test_a_server_without_the_token_is_refused_too() -> None:
    listener = listen("127.0.0.1", 0, fallback=False)

    def pretend() -> None:
        sock, _ = listener.accept()
        with sock:
            fake = Connection(sock, SETTINGS, ByteCounters())
            fake.send(Challenge("flyball-engine/1", "0" * 64), timeout_s=1)
            fake.receive(msgspec.Raw, timeout_s=1)
            fake.send({"host_id": "server", "incarnation": "1", "proof": "0" * 64}, timeout_s=1)

    thread = threading.Thread(target=pretend)
    thread.start()
    with pytest.raises(Unauthorized, match="another token"):
        connect(
            f"127.0.0.1:{listener.getsockname()[1]}",
            identity=Identity("client", "", "2"),
            token=TOKEN,
            settings=SETTINGS,
            total=ByteCounters(),
        )
    thread.join()
    listener.close()


def test_a_connection_that_says_nothing_is_ended_by_its_deadline(server: Server) -> None:
    host, port = server.address.split(":")
    with socket.create_connection((host, int(port)), timeout=5) as sock:
        reader = sock.makefile("rb")
        (length,) = struct.unpack("<I", reader.read(4))
        reader.read(length)
        assert reader.read() == b""  # closed by the server


@pytest.mark.parametrize("data", [b"\xff\xff\xff\xff", b"\x04\x00\x00\x00null", b"GET / HTTP/1.1\r\n\r\n"])
def test_garbage_ends_the_connection_and_not_the_server(server: Server, data: bytes) -> None:
    host, port = server.address.split(":")
    with socket.create_connection((host, int(port)), timeout=5) as sock:
        sock.sendall(data)
        with suppress(ConnectionResetError):  # closed with some of our bytes unread
            while sock.recv(4096):
                pass
    server.dial().close()


def test_more_connections_than_the_limit_are_turned_away(server: Server) -> None:
    held = [server.dial() for _ in range(SETTINGS.max_connections)]
    with pytest.raises((Unreachable, Unauthorized)):
        server.dial()
    for connection in held:
        connection.close()


def test_a_frame_must_be_whole_in_time_and_bytes_must_move() -> None:
    listener = listen("127.0.0.1", 0, fallback=False)
    client = socket.create_connection(listener.getsockname())
    accepted, _ = listener.accept()
    connection = Connection(accepted, SETTINGS, ByteCounters())
    client.sendall(b"\x10\x00\x00\x00half")
    with pytest.raises(Unreachable, match="timed out"):
        connection.receive(Reply, timeout_s=0.05)
    with pytest.raises(Unreachable, match="timed out"):
        connection.receive_raw(memoryview(bytearray(10)))
    with pytest.raises(InvalidMessage, match="limit"):
        connection.send({"a": "x" * (1 << 17)}, timeout_s=1)
    connection.close()
    client.close()
    listener.close()


def test_a_deadline_also_ends_a_frame_whose_bytes_keep_coming() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as theirs:
        ours, _ = listener.accept()
        with Connection(ours, SETTINGS, ByteCounters()) as connection:
            theirs.sendall(b"\x10\0\0\0")
            with pytest.raises(Unreachable, match="timed out"):
                connection.receive(Ping, timeout_s=0.0)


def test_the_pool_keeps_a_good_connection_and_drops_a_dead_one(server: Server) -> None:
    dialled: list[str] = []

    def dial(host_id: str, address: str) -> Connection:
        dialled.append(host_id)
        return server.dial()

    pool = ConnectionPool(dial, connections_per_peer=1)
    for _ in range(3):
        with pool.connection("server") as connection:
            connection.request(Ping(), Reply, timeout_s=1)
            connection.receive_raw(memoryview(bytearray(len(BULK))))
    assert dialled == ["server"]
    with pytest.raises(RuntimeError), pool.connection("server"):
        raise RuntimeError("a transfer broke off")  # what is left in that connection is unknown
    with pool.connection("server"):
        assert dialled == ["server"] * 2
    server.server.close()
    with pytest.raises(Unreachable), pool.connection("server"):
        pass
    pool.close()


def test_a_taken_port_is_an_error_or_replaced() -> None:
    first = listen("127.0.0.1", 0, fallback=False)
    port = first.getsockname()[1]
    with pytest.raises(PortInUse):
        listen("127.0.0.1", port, fallback=False)
    second = listen("127.0.0.1", port, fallback=True)
    assert second.getsockname()[1] != port
    first.close()
    second.close()
