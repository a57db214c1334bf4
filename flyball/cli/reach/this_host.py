"""What the command line must know of the machine it runs on."""

from __future__ import annotations

import ipaddress
import os
import re
import socket
from urllib.parse import urlsplit

import psutil

from flyball.contracts.errors import ConfigurationError

EVERYWHERE = "0.0.0.0"
BEYOND = "http://192.0.2.1"  # an address that nobody has: the way to it is the way to other machines


def host_id() -> str:
    """A stable name of this machine, in the alphabet of names."""
    name = re.sub(r"[^a-z0-9._-]+", "-", socket.gethostname().lower()).strip("-._")[:63]
    return name or "host"


def address_towards(url: str) -> str:
    """The IP by which a host on the way to `url` reaches this machine."""
    parts = urlsplit(url)
    host, port = parts.hostname or "127.0.0.1", parts.port or 80
    try:
        family, kind, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(target)  # a datagram socket: chooses the route, sends nothing
            return str(probe.getsockname()[0])
    except OSError as error:
        raise ConfigurationError(
            f"Cannot find this machine's address on the way to {url}: {error.strerror or error}.",
            hint="give it with --local-addr IP (flyball run) or --address IP (flyball host)",
        ) from error


def is_here(host: str) -> bool:
    """Whether a host name or address is one of this machine's."""
    try:
        wanted = {str(entry[4][0]) for entry in socket.getaddrinfo(host.strip("[]"), None)}
    except OSError:
        return False
    mine = {a.address.partition("%")[0] for addresses in psutil.net_if_addrs().values() for a in addresses}
    return bool(wanted & mine) or any(ipaddress.ip_address(a.partition("%")[0]).is_loopback for a in wanted)


def listen_address(host: str) -> str:
    """Where to listen so that other hosts reach `host`. It may be a name that means 127.0.1.1 on the machine itself (as
    Debian sets it up), or an address that only a gateway in front of this machine has."""
    bare = host.strip("[]")
    if is_loopback_name(host) or (is_here(bare) and not is_here_only(bare)):
        return bare
    return EVERYWHERE


def is_loopback_name(host: str) -> bool:
    """Whether a name or address says by itself that only this machine is meant."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def is_here_only(host: str) -> bool:
    """Whether what listens on this name or address can be reached from this machine only."""
    try:
        found = {str(entry[4][0]).partition("%")[0] for entry in socket.getaddrinfo(host.strip("[]"), None)}
    except OSError:
        return False
    return all(ipaddress.ip_address(address).is_loopback for address in found)


def workers_per_host(text: str) -> int:
    """The number that `--nproc-per-node` stands for here: torchrun's rules. Imports torch only for words."""
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
            hint="give a number, or cpu; torch.cuda.is_available() tells what torch sees",
        )
    return count
