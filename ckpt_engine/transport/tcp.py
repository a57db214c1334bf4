"""Authenticated TCP between engines: small JSON frames, and shards raw between them, straight from and into slots.

Both sides prove that they have the shared token by an HMAC over both nonces; the token itself never travels. Every
wait has a limit: a frame must be whole within its deadline, raw bytes must make progress.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Final, Self, TypeVar

import msgspec

from ckpt_engine.peer_wire import MAX_FRAME_BYTES, PEER_PROTOCOL, Challenge, Hello, Welcome
from ckpt_engine.settings import EngineSettings
from flyball.contracts import wire
from flyball.contracts.errors import FlyballError, InvalidMessage, Unauthorized, Unreachable

T = TypeVar("T")

_LENGTH: Final = struct.Struct("<I")


class ByteCounters:
    """Raw bytes that crossed sockets of this process; frames are not counted."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sent = 0
        self._received = 0

    def add(self, *, sent: int = 0, received: int = 0) -> None:
        with self._lock:
            self._sent += sent
            self._received += received

    @property
    def sent(self) -> int:
        return self._sent

    @property
    def received(self) -> int:
        return self._received


class Identity(msgspec.Struct, frozen=True):
    """What an engine says of itself in a handshake."""

    host_id: str
    address: str
    incarnation: str


class Connection:
    """One connection to one peer, for one thread at a time. Raises Unreachable when it breaks, InvalidMessage when the
    other side does not keep to the protocol; it is of no use after either."""

    def __init__(self, sock: socket.socket, settings: EngineSettings, total: ByteCounters) -> None:
        self.bytes_sent = 0
        self.bytes_received = 0
        self.peer = Identity("", "", "")  # until the handshake
        self._sock = sock
        self._settings = settings
        self._total = total
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def fileno(self) -> int:
        return self._sock.fileno()

    def close(self) -> None:
        self._sock.close()

    def abort(self) -> None:
        """End it from another thread: whoever waits on it gets Unreachable at once."""
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # it was closed already

    def send(self, message: object, *, timeout_s: float) -> None:
        """One frame."""
        data = wire.encode(message)
        if len(data) > MAX_FRAME_BYTES:
            raise InvalidMessage(f"A frame of {len(data)} bytes exceeds the limit of {MAX_FRAME_BYTES}.")
        with self._broken_is_unreachable("sending to"):
            self._send_all(_LENGTH.pack(len(data)) + data, timeout_s)

    def receive(self, kind: type[T], *, timeout_s: float) -> T:
        """One frame, whole within `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        length_bytes = bytearray(_LENGTH.size)
        with self._broken_is_unreachable("waiting for"):
            self._fill(memoryview(length_bytes), lambda: deadline)
        (length,) = _LENGTH.unpack(length_bytes)
        if length > MAX_FRAME_BYTES:
            raise InvalidMessage(f"A frame of {length} bytes exceeds the limit of {MAX_FRAME_BYTES}.")
        data = bytearray(length)
        with self._broken_is_unreachable("waiting for"):
            self._fill(memoryview(data), lambda: deadline)
        return wire.decode(memoryview(data), kind, max_bytes=MAX_FRAME_BYTES)

    def send_raw(self, data: memoryview) -> None:
        """Bytes without a frame, from where they lie; no progress for `io_timeout_s` breaks the connection."""
        for start in range(0, len(data), self._settings.transfer_bytes):
            piece = data[start : start + self._settings.transfer_bytes]
            with self._broken_is_unreachable("sending to"):
                self._send_all(piece, self._settings.io_timeout_s)
            self.bytes_sent += len(piece)
            self._total.add(sent=len(piece))

    def receive_raw(self, target: memoryview) -> None:
        """Fill `target` with bytes without a frame."""
        io_timeout_s = self._settings.io_timeout_s
        with self._broken_is_unreachable("receiving from"):
            self._fill(target, lambda: time.monotonic() + io_timeout_s)
        self.bytes_received += len(target)
        self._total.add(received=len(target))

    def request(self, message: object, kind: type[T], *, timeout_s: float) -> T:
        """Send a frame and receive the answer."""
        self.send(message, timeout_s=timeout_s)
        return self.receive(kind, timeout_s=timeout_s)

    def _send_all(self, data: bytes | memoryview, timeout_s: float) -> None:
        self._sock.settimeout(timeout_s)
        self._sock.sendall(data)

    def _fill(self, target: memoryview, deadline_s: Callable[[], float]) -> None:
        filled = 0
        while filled < len(target):
            left_s = deadline_s() - time.monotonic()
            if left_s <= 0:  # also when bytes keep dripping in
                raise TimeoutError
            self._sock.settimeout(left_s)
            count = self._sock.recv_into(target[filled:])
            if count == 0:
                raise ConnectionResetError("the other side closed the connection")
            filled += count

    @contextmanager
    def _broken_is_unreachable(self, doing: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:  # TimeoutError is one
            reason = "timed out" if isinstance(error, TimeoutError) else str(error)
            raise Unreachable(
                f"The connection broke while {doing} the engine of {self.peer.host_id or 'a peer'}: {reason}.",
                hint="it is tried again while the generation runs",
            ) from error


def connect(
    address: str, *, identity: Identity, token: bytes, settings: EngineSettings, total: ByteCounters
) -> Connection:
    """A connection to the engine at "ip:port", both sides authenticated. Raises Unreachable or Unauthorized."""
    host, _, port = address.rpartition(":")
    try:
        sock = socket.create_connection((host.strip("[]"), int(port)), timeout=settings.connect_timeout_s)
    except (OSError, ValueError) as error:
        raise Unreachable(
            f"No connection to the engine at {address}: {error}.", hint="see whether that host and its engine are up"
        ) from error
    connection = Connection(sock, settings, total)
    try:
        _introduce(connection, identity, token, settings.handshake_timeout_s)
    except FlyballError:
        connection.close()
        raise
    return connection


def _introduce(connection: Connection, identity: Identity, token: bytes, timeout_s: float) -> None:
    challenge = connection.receive(Challenge, timeout_s=timeout_s)
    if challenge.protocol != PEER_PROTOCOL:
        raise InvalidMessage(
            f"The other side speaks {challenge.protocol!r}, this engine speaks {PEER_PROTOCOL!r}.",
            hint="run the same release of Flyball on all hosts",
        )
    nonce = secrets.token_hex(32)
    proof = _proof(token, "connects", challenge.nonce, nonce, identity)
    hello = Hello(identity.host_id, identity.address, identity.incarnation, nonce, proof)
    connection.send(hello, timeout_s=timeout_s)
    try:
        welcome = connection.receive(Welcome, timeout_s=timeout_s)
    except Unreachable as error:
        raise Unauthorized(
            f"The peer closed the connection during the handshake: {error.message}",
            hint="use the same token on all hosts of the cluster",
        ) from error
    peer = Identity(welcome.host_id, "", welcome.incarnation)
    if not hmac.compare_digest(welcome.proof, _proof(token, "accepts", challenge.nonce, nonce, peer)):
        raise Unauthorized("The peer has another token.", hint="use the same token on all hosts of the cluster")
    connection.peer = peer


def admit(connection: Connection, *, identity: Identity, token: bytes, timeout_s: float) -> None:
    """The accepting side of the handshake. Raises Unauthorized unless the other side has the token."""
    nonce = secrets.token_hex(32)
    connection.send(Challenge(PEER_PROTOCOL, nonce), timeout_s=timeout_s)
    hello = connection.receive(Hello, timeout_s=timeout_s)
    peer = Identity(hello.host_id, hello.address, hello.incarnation)
    if not hmac.compare_digest(hello.proof, _proof(token, "connects", nonce, hello.nonce, peer)):
        raise Unauthorized(
            f"A connection that says it is the engine of {hello.host_id} does not have the token.",
            hint="use the same token on all hosts of the cluster",
        )
    proof = _proof(token, "accepts", nonce, hello.nonce, Identity(identity.host_id, "", identity.incarnation))
    connection.send(Welcome(identity.host_id, identity.incarnation, proof), timeout_s=timeout_s)
    connection.peer = peer


def _proof(token: bytes, role: str, acceptor_nonce: str, connector_nonce: str, who: Identity) -> str:
    # The role keeps a proof from being reflected, the identity keeps it from being used under another name.
    parts = (PEER_PROTOCOL, role, acceptor_nonce, connector_nonce, who.host_id, who.address, who.incarnation)
    return hmac.digest(token, "\0".join(parts).encode(), "sha256").hex()
