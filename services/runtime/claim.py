"""Claims a supervisor's folder and listening socket before the rest of the supervisor exists.

Cheap to import. The holder of a claim can announce the address at once: requests wait in the socket's backlog until
the server accepts them.
"""

from __future__ import annotations

import errno
import ipaddress
import socket
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path

from flyball.contracts.errors import ConfigurationError, PortInUse
from services.runtime.state_dir import SupervisorStateDir

BACKLOG = 1024
PARTS = ("sensor", "controller", "actuator", "api")


class Claim:
    """Holds the folder and the address until `close`."""

    def __init__(
        self,
        folder: Path,
        *,
        host: str,
        port: int,
        parts: Iterable[str] = PARTS,
        listener: socket.socket | None = None,
    ) -> None:
        """`listener`: a socket that is bound already. Holds nothing if it raises PortInUse, ConfigurationError,
        StateVersionMismatch or StorageFull."""
        self.state_dir = SupervisorStateDir(folder)
        with ExitStack() as undo:
            if listener is not None:
                undo.callback(listener.close)
            self.state_dir.open(sorted(parts))
            undo.callback(self.state_dir.close)
            self.listener = listener or bind_listener(host, port)
            undo.pop_all()

    def close(self) -> None:
        self.listener.close()
        self.state_dir.close()


def bind_listener(host: str, port: int) -> socket.socket:
    """Return a listening TCP socket. Port 0 takes any free port. Raises PortInUse or ConfigurationError."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except socket.gaierror as error:
        raise ConfigurationError(
            f"Cannot listen on {host!r}: {error.strerror}.", hint="pass an address of this machine with --host"
        ) from error
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise PortInUse(
                f"Port {port} on {host} is in use.",
                hint="stop the process that listens there, or choose another port with --port",
            ) from error
        raise ConfigurationError(
            f"Cannot listen on {host}, port {port}: {error.strerror}.",
            hint="pass an address of this machine and a port that you may use with --host and --port",
        ) from error
    return listener


def is_loopback(listener: socket.socket) -> bool:
    """Return whether only this machine can connect."""
    return ipaddress.ip_address(listener.getsockname()[0].partition("%")[0]).is_loopback


def url_of(listener: socket.socket, *, tls: bool, everywhere: str = "") -> str:
    """Return the base URL under which this machine reaches the listener; one on all addresses, as `everywhere`."""
    host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": everywhere or "127.0.0.1", "::": everywhere or "::1"}.get(host, host)
    return f"{'https' if tls else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"
