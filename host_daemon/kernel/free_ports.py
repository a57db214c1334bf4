"""Finds a port for the next generation's MASTER_PORT."""

from __future__ import annotations

import secrets
import socket
from collections import deque
from pathlib import Path

from flyball.contracts.errors import PortInUse

_TRIES = 200
_SPAN = 12_000
_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


class FreePorts:
    """Proposes ports below the range that the kernel uses for outgoing connections, so that none of those can take the
    port before it is used. Ports are drawn at random, since several daemons may share a machine."""

    def __init__(self) -> None:
        self._recent: deque[int] = deque(maxlen=16)

    def find(self) -> int:
        """Return a port that is free right now. Raises PortInUse if there seems to be none."""
        try:
            top = int(_RANGE.read_text().split()[0])
        except (OSError, ValueError):
            top = 32_768
        bottom = max(1_024, top - _SPAN)
        for _ in range(_TRIES):
            port = bottom + secrets.randbelow(max(1, top - bottom))
            if port not in self._recent and is_free(port):
                self._recent.append(port)
                return port
        raise PortInUse(
            f"None of {_TRIES} ports between {bottom} and {top} is free.", hint="stop what listens there on this host"
        )


def is_free(port: int) -> bool:
    """Whether a server could listen on this port on all addresses, as torch's store does."""
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        try:
            probe.bind(("::" if family == socket.AF_INET6 else "", port))
        except OSError:
            return False
    return True
