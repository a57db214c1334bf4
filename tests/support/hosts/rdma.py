"""Hosts with and without RDMA: a made-up sysfs, as a kernel with devices writes it; processes that may lock little."""

from __future__ import annotations

import sys
from pathlib import Path

EMPTY = "0000:0000:0000:0000:0000:0000:0000:0000"
LINK_LOCAL = "fe80:0000:0000:0000:5054:00ff:fe12:3456"
GLOBAL = "2001:0db8:0000:0000:0000:0000:0000:0007"
IPV4 = "0000:0000:0000:0000:0000:ffff:0a00:0002"  # ::ffff:10.0.0.2
V1, V2 = "IB/RoCE v1", "RoCE v2"


def add_stack(root: Path) -> Path:
    """The modules ib_core and ib_uverbs are loaded. Returns `root`."""
    for name in ("infiniband", "infiniband_verbs"):
        (root / "class" / name).mkdir(parents=True, exist_ok=True)
    return root


def add_port(
    root: Path,
    device: str,
    number: int = 1,
    *,
    state: str = "4: ACTIVE",
    link_layer: str = "Ethernet",
    lid: str = "0x0",
    gids: tuple[tuple[str, str], ...] = ((LINK_LOCAL, V1), (LINK_LOCAL, V2), (IPV4, V1), (IPV4, V2)),
    interface: str = "eth0",
    numa_node: str = "",
    counters: dict[str, str] | None = None,
) -> Path:
    """A port of a device, which is made if there is none of that name. `gids`: address and type, by index."""
    folder = add_stack(root) / "class" / "infiniband" / device / "ports" / str(number)
    files = {"state": state, "link_layer": link_layer, "lid": lid}
    files |= {f"gids/{index}": address for index, (address, _) in enumerate(gids)}
    files |= {f"gid_attrs/types/{index}": kind for index, (_, kind) in enumerate(gids) if kind}
    files |= {f"hw_counters/{name}": value for name, value in (counters or {}).items()}
    if link_layer == "Ethernet":
        files["gid_attrs/ndevs/0"] = interface
    if numa_node:
        files["../../device/numa_node"] = numa_node
    for name, text in files.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")
    return root


def add_gpu(root: Path, address: str, kind: str, numa_node: str) -> None:
    """A PCI device of a class."""
    folder = root / "bus" / "pci" / "devices" / address
    folder.mkdir(parents=True)
    (folder / "class").write_text(f"{kind}\n")
    (folder / "numa_node").write_text(f"{numa_node}\n")


def with_low_memlock(limit_bytes: int) -> list[str]:
    """The beginning of a command line of Python that may lock only so much memory, root's too."""
    code = f"""
import ctypes, os, resource, sys
resource.setrlimit(resource.RLIMIT_MEMLOCK, ({limit_bytes}, {limit_bytes}))
ctypes.CDLL(None).prctl(24, 14, 0, 0, 0)  # PR_CAPBSET_DROP, CAP_IPC_LOCK; only root needs it, and only root may
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""
    return [sys.executable, "-c", code]
