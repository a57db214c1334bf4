"""RDMA as a transport under test: the same methods as `Tcp` of the conformance suite."""

from __future__ import annotations

import queue
import subprocess
import sys
import threading
from contextlib import suppress

from ckpt_engine.contracts.peer_wire import QueuePairEndpoint
from ckpt_engine.peers.transport.port import ByteCounters, Connection
from ckpt_engine.peers.transport.rdma.connection import RdmaConnection
from ckpt_engine.peers.transport.rdma.nics import Nics
from ckpt_engine.peers.transport.tcp import TcpListener, connect_tcp
from ckpt_engine.settings import EngineSettings
from flyball.contracts.errors import FlyballError

EXCHANGE_TIMEOUT_S = 60.0


_nics: dict[EngineSettings, Nics] = {}


def nics_with(settings: EngineSettings) -> Nics:
    """Of this process, for what is connected with these settings."""
    if settings not in _nics:
        _nics[settings] = Nics(settings, ByteCounters())
    return _nics[settings]


def close_nics() -> None:
    """Nothing of this process holds a device any more, but open connections."""
    while _nics:
        _nics.popitem()[1].close()


def connect(
    address: str, settings: EngineSettings, total: ByteCounters | None = None, nics: Nics | None = None
) -> RdmaConnection:
    """To a Listener at "ip:port", without a handshake. If `nics` is given, `settings` and `total` are its own."""
    own = nics or (Nics(settings, total) if total is not None else nics_with(settings))
    tcp = connect_tcp(address, settings=settings, total=ByteCounters())
    try:
        prepared = own.prepare()
        try:
            tcp.send(prepared.endpoint, timeout_s=EXCHANGE_TIMEOUT_S)
            remote = tcp.receive(QueuePairEndpoint, timeout_s=EXCHANGE_TIMEOUT_S)
        except BaseException:
            prepared.close()
            raise
        return prepared.connect(tcp, remote)
    except BaseException:
        tcp.close()
        raise
    finally:
        if total is not None and nics is None:
            own.close()  # once the connection is closed, too


class RdmaListener:
    """Upgrades each connection at once, in a thread, as callers connect before they accept."""

    def __init__(
        self, address: str, port: int, *, fallback: bool, settings: EngineSettings, nics: Nics | None = None
    ) -> None:
        self._listener = TcpListener(address, port, fallback=fallback, settings=settings, total=ByteCounters())
        self.port = self._listener.port
        self.upgraded: list[RdmaConnection] = []
        self._nics = nics or nics_with(settings)
        self._ready: queue.Queue[tuple[Connection, str] | None] = queue.Queue()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        with suppress(OSError):
            while True:
                tcp, remote = self._listener.accept()
                with suppress(FlyballError):
                    endpoint = tcp.receive(QueuePairEndpoint, timeout_s=EXCHANGE_TIMEOUT_S)
                    prepared = self._nics.prepare()
                    connection = prepared.connect(tcp, endpoint)
                    self.upgraded.append(connection)
                    tcp.send(prepared.endpoint, timeout_s=EXCHANGE_TIMEOUT_S)
                    self._ready.put((connection, remote))
        self._ready.put(None)

    def accept(self) -> tuple[Connection, str]:
        found = self._ready.get()
        if found is None:
            self._ready.put(None)
            raise OSError("closed")
        return found

    def close(self) -> None:
        self._listener.close()


PEER_PROCESS = """
import sys
import structlog
structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
from ckpt_engine.settings import EngineSettings
from tests.rdma.rdma_transport import connect
connection = connect(f"127.0.0.1:{sys.argv[1]}", EngineSettings(io_timeout_s=60))
connection.send_raw(memoryview(b"x" * 1000))
print("sent", flush=True)
while True:
    connection.receive_raw(memoryview(bytearray(1)))
"""


class Rdma:
    """Both ends on this host's own device."""

    def __init__(self) -> None:
        self._listeners: dict[int, RdmaListener] = {}

    def listen(self, port: int = 0, *, fallback: bool = False, settings: EngineSettings) -> RdmaListener:
        listener = RdmaListener("127.0.0.1", port, fallback=fallback, settings=settings)
        self._listeners[listener.port] = listener
        return listener

    def connect(self, port: int, settings: EngineSettings, total: ByteCounters | None = None) -> RdmaConnection:
        return connect(f"127.0.0.1:{port}", settings, total)

    def impatient(self, connection: Connection, settings: EngineSettings) -> Connection:
        """There is no other way to it: the settings of a connection do not change in an engine."""
        assert isinstance(connection, RdmaConnection)
        connection._settings = settings
        return connection

    def inject(self, connection: Connection, data: bytes) -> None:
        connection.send_raw(memoryview(data))

    def swallow(self, port: int) -> None:
        """Of what is sent to the listener at `port`, nothing arrives any more, and nobody notices: no way to that, but
        past the queue pair."""
        for connection in self._listeners[port].upgraded:
            verbs = connection._pair._verbs
            attributes = verbs.qp.QPAttr(qp_state=verbs.enums.IBV_QPS_RESET)
            connection._pair._pair.modify(attributes, verbs.enums.IBV_QP_STATE)

    def start_peer(self, port: int) -> subprocess.Popen[bytes]:
        """A process that connects, sends 1000 bytes, says so on its standard output, and takes everything in."""
        return subprocess.Popen([sys.executable, "-c", PEER_PROCESS, str(port)], stdout=subprocess.PIPE)
