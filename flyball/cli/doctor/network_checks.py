"""What `flyball doctor` says about this machine's names, addresses and ports."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Callable, Iterator
from typing import Final

from flyball.cli.doctor.findings import CheckedHost, Finding, not_here, ok, warning
from flyball.cli.reach.places import live_folders
from flyball.cli.up import DEFAULT_PORT
from flyball.contracts.errors import ConfigurationError

_TIMEOUT_S: Final = 5.0
_WORD: Final = b"flyball"
Resolve = Callable[[str], set[str]]


def loopback(_: CheckedHost) -> Iterator[Finding]:
    """Whether processes of this machine can reach each other: ranks, engine, daemon and supervisor do."""
    try:
        with (
            socket.create_server(("127.0.0.1", 0)) as server,
            socket.create_connection(server.getsockname(), timeout=_TIMEOUT_S) as ours,
        ):
            server.settimeout(_TIMEOUT_S)
            theirs, _address = server.accept()
            with theirs:
                theirs.settimeout(_TIMEOUT_S)
                ours.sendall(_WORD)
                received = theirs.recv(len(_WORD), socket.MSG_WAITALL)
    except OSError as error:
        raise ConfigurationError(
            f"A connection to 127.0.0.1 fails: {error}.", hint="ip link set lo up, and look at the firewall's rules"
        ) from error
    if received != _WORD:
        raise ConfigurationError("A connection to 127.0.0.1 loses bytes.", hint="look at the firewall's rules")
    yield ok("loopback", "processes of this host reach each other over 127.0.0.1")


def port(host: CheckedHost, number: int = DEFAULT_PORT) -> Iterator[Finding]:
    """Whether `flyball up` finds its port free. Jobs take ports that the kernel picks."""
    if live_folders(host.environ):
        yield not_here("port", "a supervisor runs here already")
        return
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # one in TIME_WAIT does not count
        try:
            probe.bind(("127.0.0.1", number))
        except OSError as error:
            mend = f"ss -ltnp 'sport = :{number}' shows by whom; or flyball up --port PORT"
            yield warning("port", f"{number}, the port of `flyball up`, cannot be used: {error.strerror}", mend)
        else:
            yield ok("port", f"{number}, the port of `flyball up`, is free")


def resolved(name: str) -> set[str]:
    """The addresses of a name. Raises OSError."""
    return {str(found[4][0]).partition("%")[0] for found in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)}


def host_name(_: CheckedHost, name: str = "", resolve: Resolve = resolved) -> Iterator[Finding]:
    """Whether this machine's name has an address, and whether other hosts could use it: torch's backends look it up."""
    name = name or socket.gethostname()
    try:
        found = resolve(name)
    except OSError as error:
        mend = f"echo '127.0.1.1 {name}' >> /etc/hosts (one host), or an entry in the cluster's DNS"
        yield warning("host name", f"{name} has no address ({error}): torch may not find its interface", mend)
        return
    if all(ipaddress.ip_address(address).is_loopback for address in found):
        about = "only here: on several hosts give --address (flyball host), --local-addr (flyball run)"
        yield ok("host name", f"{name} is {', '.join(sorted(found))}, {about}")
    else:
        yield ok("host name", f"{name} is {', '.join(sorted(found))}")
