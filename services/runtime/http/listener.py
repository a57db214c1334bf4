"""The socket that a service listens on, bound before anything else starts, so that a taken port is found at once."""

from __future__ import annotations

import errno
import ipaddress
import socket

from flyball.contracts.errors import ConfigurationError, PortInUse

BACKLOG = 1024


def bind_listener(host: str, port: int) -> socket.socket:
    """A bound, listening TCP socket; port 0 takes any free one. Raises PortInUse or ConfigurationError."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except socket.gaierror as error:
        raise ConfigurationError(
            f"Cannot listen on {host!r}: {error.strerror}.", hint="give an address of this machine with --host"
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
                f"Port {port} on {host} is in use.", hint="stop what listens there, or choose another with --port"
            ) from error
        raise ConfigurationError(
            f"Cannot listen on {host}, port {port}: {error.strerror}.",
            hint="give an address of this machine and a port that you may use with --host and --port",
        ) from error
    return listener


def is_loopback(listener: socket.socket) -> bool:
    """Whether only this machine can connect."""
    return ipaddress.ip_address(listener.getsockname()[0].partition("%")[0]).is_loopback


def url_of(listener: socket.socket, *, tls: bool) -> str:
    """The base URL under which this machine reaches the listener."""
    host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"{'https' if tls else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"
