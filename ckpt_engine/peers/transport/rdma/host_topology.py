"""Where this host's GPUs and network interfaces are, as the kernel shows it; no driver is asked."""

from __future__ import annotations

from ipaddress import IPv4Network
from pathlib import Path
from typing import Final

from ckpt_engine.peers.transport.rdma.port_choice import Networks
from ckpt_engine.peers.transport.rdma.verbs import SYSFS, kernel_text

ROUTES: Final = Path("/proc/net/route")

# PCI classes. Data-centre GPUs are 3D controllers, display controllers or accelerators. VGA controllers count where
# there are none of these: servers have one that is no GPU, of the board's management.
_GPUS: Final = ("0x0302", "0x0380", "0x1200")
_VGA: Final = ("0x0300",)


def gpu_numa_nodes(root: Path = SYSFS) -> frozenset[int]:
    """The NUMA nodes of the GPUs; empty if there are none, or the kernel does not tell. `root` is where sysfs is."""
    by_class: dict[str, set[int]] = {}
    for device in (root / "bus" / "pci" / "devices").glob("*"):
        kind = kernel_text(device / "class")[:6]  # "0x030200": the last two digits are the programming interface
        if kind in (*_GPUS, *_VGA):
            by_class.setdefault(kind, set()).add(_node(device))
    found = [by_class[kind] for kind in _GPUS if kind in by_class] or [by_class.get(kind, set()) for kind in _VGA]
    return frozenset(node for nodes in found for node in nodes if node >= 0)


def connected_networks(routes: Path = ROUTES) -> Networks:
    """The IPv4 networks that each interface reaches without a router; none if the kernel does not tell."""
    found: dict[str, list[IPv4Network]] = {}
    for line in kernel_text(routes).splitlines()[1:]:
        interface, destination, gateway, *_, mask, _mtu, _window, _rtt = line.split()
        bits = int(mask, 16).bit_count()
        if int(gateway, 16) == 0 and bits:
            address = int.from_bytes(bytes.fromhex(destination), "little")
            found.setdefault(interface, []).append(IPv4Network((address, bits)))
    return found


def _node(device: Path) -> int:
    text = kernel_text(device / "numa_node")
    return int(text) if text.isdigit() else -1
