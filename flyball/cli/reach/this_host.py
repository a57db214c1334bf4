"""Facts about this machine: its name, its addresses, and how many workers it takes."""

from __future__ import annotations

import ipaddress
import os
import re
import socket
from urllib.parse import urlsplit

import psutil

from flyball.contracts.errors import ConfigurationError

EVERYWHERE = "0.0.0.0"
BEYOND = "http://192.0.2.1"  # reserved, so nobody has it: the route to it is the route to other machines


def host_id() -> str:
    """A stable name for this machine, with only the characters allowed in names."""
    name = re.sub(r"[^a-z0-9._-]+", "-", socket.gethostname().lower()).strip("-._")[:63]
    return name or "host"


def address_towards(url: str) -> str:
    """The IP address of this machine on the route to `url`."""
    parts = urlsplit(url)
    host, port = parts.hostname or "127.0.0.1", parts.port or 80
    try:
        family, kind, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(target)  # on a datagram socket, this picks the route and sends nothing
            return str(probe.getsockname()[0])
    except OSError as error:
        raise ConfigurationError(
            f"Cannot find this machine's address on the route to {url}: {error.strerror or error}.",
            hint="set it with --local-addr IP (flyball run) or --address IP (flyball host)",
        ) from error


def is_here(host: str) -> bool:
    """Whether a host name or address is one of this machine's."""
    try:
        wanted = {str(entry[4][0]) for entry in socket.getaddrinfo(host.strip("[]"), None)}
    except OSError:
        return False
    mine = {a.address.partition("%")[0] for addresses in psutil.net_if_addrs().values() for a in addresses}
    return bool(wanted & mine) or any(ipaddress.ip_address(a.partition("%")[0]).is_loopback for a in wanted)


def is_known(host: str) -> bool:
    """Whether a host name can be resolved; an address needs no resolving."""
    try:
        return bool(socket.getaddrinfo(host.strip("[]"), None))
    except OSError:
        return False


def listen_address(host: str) -> str:
    """The address to listen on so that other hosts can reach `host`.

    `host` may resolve to 127.0.1.1 on this machine (as on Debian), or be the address of a gateway in front of it.
    """
    bare = host.strip("[]")
    if is_loopback_name(host) or (is_here(bare) and not is_here_only(bare)):
        return bare
    return EVERYWHERE


def is_loopback_name(host: str) -> bool:
    """Whether a name or address, without resolving it, means only this machine."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def is_here_only(host: str) -> bool:
    """Whether a listener on this name or address is reachable only from this machine."""
    try:
        found = {str(entry[4][0]).partition("%")[0] for entry in socket.getaddrinfo(host.strip("[]"), None)}
    except OSError:
        return False
    return all(ipaddress.ip_address(address).is_loopback for address in found)


def workers_per_host(text: str) -> int:
    """The number of workers that `--nproc-per-node` means here, by torchrun's rules. Imports torch only for words."""
    if text.isdecimal():
        return int(text)
    cpus = len(os.sched_getaffinity(0))
    if text == "cpu":
        return cpus
    import torch

    if text == "gpu":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    elif text == "xpu":
        count = torch.xpu.device_count() if torch.xpu.is_available() else 0
    else:
        accelerator = torch.accelerator.is_available() if hasattr(torch, "accelerator") else torch.cuda.is_available()
        count = (torch.accelerator.device_count() if hasattr(torch, "accelerator") else 0) if accelerator else cpus
    if count < 1:
        raise ConfigurationError(
            f"--nproc-per-node {text}: torch finds no {text} on this machine.",
            hint="give a number, or cpu; check torch.cuda.is_available()",
        )
    return count
