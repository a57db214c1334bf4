"""What RDMA this host has, and the way to pyverbs: no other module imports it, and this one only when it is needed.

Devices, ports and GIDs are read from sysfs, so that they are known without pyverbs too. Whatever keeps a host from RDMA
is one `RdmaUnavailable`, with a reason that programs can tell apart and the command that mends it.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import itertools
import re
import resource
import sys
import sysconfig
from collections.abc import Iterable
from enum import StrEnum
from ipaddress import IPv6Address
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from flyball.contracts.errors import ConfigurationError

SYSFS: Final = Path("/sys")
INSTALL: Final = "apt install python3-pyverbs ibverbs-providers && flyball doctor --fix rdma"
ROCE_V2: Final = "RoCE v2"

_ACTIVE: Final = "ACTIVE"
_CAP_IPC_LOCK: Final = 1 << 14  # capabilities(7)
_FREE_GIDS: Final = 64  # in a row; the kernel fills the first free entry, and a table may have a thousand: a file each
_ALL_USERS: Final = ["0", "0", "4294967295"]  # uid_map outside of user namespaces
_SHORTEST_MTU: Final = 128  # ibv_mtu 1 is twice this, each further one doubles it


class Refusal(StrEnum):
    """Why there is no RDMA here."""

    NO_PYVERBS = "no_pyverbs"
    NO_STACK = "no_stack"
    NO_DEVICE = "no_device"
    PORT_DOWN = "port_down"
    NO_ACCESS = "no_access"  # a device is there, but this process cannot open it, or not use it
    MEMLOCK = "memlock"


class RdmaUnavailable(ConfigurationError):
    """This host, or this process, cannot use RDMA. `reason` says why."""

    code = "rdma_unavailable"

    def __init__(self, reason: Refusal, message: str, *, hint: str) -> None:
        super().__init__(message, hint=hint)
        self.reason = reason


class Gid(msgspec.Struct, frozen=True):
    """One entry of a port's GID table."""

    index: int
    text: str  # "0000:0000:0000:0000:0000:ffff:0a00:0001"
    kind: str  # "RoCE v2" or "IB/RoCE v1"

    @property
    def address(self) -> IPv6Address:
        return IPv6Address(self.text)

    @property
    def is_ipv4(self) -> bool:
        return self.address.ipv4_mapped is not None


class RdmaPort(msgspec.Struct, frozen=True):
    """A port of an RDMA device, as the kernel describes it."""

    device: str
    number: int
    state: str  # "ACTIVE", "DOWN", "INIT", "ARMED" and others
    is_infiniband: bool  # else Ethernet: RoCE
    lid: int
    gids: tuple[Gid, ...]
    interface: str = ""  # the network interface of an Ethernet port
    numa_node: int = -1  # -1: unknown, or a device of no node
    mtu: int = 0  # active path MTU in bytes; 0 until pyverbs was asked

    @property
    def name(self) -> str:
        return f"{self.device}/{self.number}"

    @property
    def is_active(self) -> bool:
        return self.state == _ACTIVE

    @property
    def gid(self) -> Gid | None:
        """The GID to use. None: there is none yet, because the interface has no address so far."""
        return choose_gid(self.gids, is_infiniband=self.is_infiniband)


class Pyverbs(NamedTuple):
    """The modules of pyverbs. `enums` has another name since rdma-core 51."""

    device: Any
    pd: Any
    mr: Any
    cq: Any
    qp: Any
    wr: Any
    addr: Any
    enums: Any
    errors: Any


def choose_gid(gids: Iterable[Gid], *, is_infiniband: bool) -> Gid | None:
    """InfiniBand: the port's own GID, index 0. Ethernet: RoCE v2, which routers forward, with an IPv4 address if there
    is one, else a global IPv6 address, else a link-local one. RoCE v1 is never used."""
    if is_infiniband:
        return next((gid for gid in gids if gid.index == 0), None)
    usable = [gid for gid in gids if gid.kind == ROCE_V2]
    return min(usable, key=lambda gid: (not gid.is_ipv4, gid.address.is_link_local, gid.index), default=None)


def read_ports(root: Path = SYSFS) -> tuple[RdmaPort, ...]:
    """All ports of all devices, in the order of their names; needs no pyverbs. `root` is where sysfs is mounted.

    Raises RdmaUnavailable if the kernel has no RDMA stack (NO_STACK) or no device (NO_DEVICE).
    """
    devices = root / "class" / "infiniband"
    if not devices.is_dir() or not (root / "class" / "infiniband_verbs").is_dir():
        missing = "its module ib_uverbs is not loaded" if devices.is_dir() else "/sys/class/infiniband does not exist"
        raise RdmaUnavailable(
            Refusal.NO_STACK,
            f"The kernel has no RDMA stack: {missing}.",
            hint="modprobe ib_uverbs, and the driver of your card (for example mlx5_ib); in a container: on its host",
        )
    names = sorted((entry.name for entry in devices.iterdir()), key=_natural)
    ports = tuple(port for name in names for port in _ports_of(devices / name))
    if not ports:
        raise RdmaUnavailable(
            Refusal.NO_DEVICE,
            "The kernel has an RDMA stack, but no RDMA device.",
            hint="load the driver of your card (for example modprobe mlx5_ib); without a card: "
            "modprobe rdma_rxe && rdma link add rxe0 type rxe netdev eth0",
        )
    return ports


def device_exists(name: str, root: Path = SYSFS) -> bool:
    """Whether the kernel still has a device of this name."""
    return (root / "class" / "infiniband" / name).exists()


def active_ports(root: Path = SYSFS) -> tuple[RdmaPort, ...]:
    """The ports that can carry data now, never empty, with their MTU. A port may still lack a GID.

    Raises RdmaUnavailable: NO_STACK, NO_DEVICE, PORT_DOWN (of all), NO_PYVERBS, NO_ACCESS (to all).
    """
    known = read_ports(root)
    active = [port for port in known if port.is_active]
    if not active:
        raise port_down(known)
    load_pyverbs()
    opened: list[RdmaPort] = []
    refused: list[RdmaUnavailable] = []
    for port in active:
        try:
            opened.append(_with_mtu(port))
        except RdmaUnavailable as error:
            refused.append(error)
    if not opened:
        raise refused[0]
    return tuple(opened)


def port_down(ports: Iterable[RdmaPort]) -> RdmaUnavailable:
    """The refusal of ports none of which is active."""
    ports = list(ports)
    states = ", ".join(f"{port.name} is {port.state}" for port in ports)
    return RdmaUnavailable(Refusal.PORT_DOWN, f"No RDMA port is active: {states}.", hint=set_up(ports[0]))


def no_gid(ports: Iterable[RdmaPort]) -> RdmaUnavailable:
    """The refusal of active ports none of which has a GID to use."""
    names = ", ".join(port.name for port in ports)
    return RdmaUnavailable(
        Refusal.PORT_DOWN,
        f"No active RDMA port has an address yet: {names}.",
        hint="give its network interface an IP address; over InfiniBand: start a subnet manager",
    )


def set_up(port: RdmaPort) -> str:
    """What makes a port active."""
    if port.is_infiniband:
        return f"check the cable (ibstat {port.device}), and that a subnet manager runs (opensm is one)"
    return f"ip link set {port.interface or 'INTERFACE'} up, and check the cable (rdma link shows all ports)"


def hw_counters(port: RdmaPort, root: Path = SYSFS) -> dict[str, int]:
    """All counters of a port by name; which there are depends on the driver. Empty if the device is gone."""
    folder = root / "class" / "infiniband" / port.device / "ports" / str(port.number)
    found: dict[str, int] = {}
    for file in (file for name in ("counters", "hw_counters") for file in (folder / name).glob("*")):
        value = kernel_text(file)
        if value.isdigit() and file.name != "lifespan":  # that is a setting
            found[file.name] = int(value)
    return found


@functools.cache
def load_pyverbs() -> Pyverbs:
    """Import pyverbs. Raises RdmaUnavailable (NO_PYVERBS) if it, or a library of it, cannot be loaded."""
    try:
        try:
            enums = importlib.import_module("pyverbs.libibverbs_enums")
        except ModuleNotFoundError:
            enums = importlib.import_module("pyverbs.enums")
        names = ("device", "pd", "mr", "cq", "qp", "wr", "addr")
        return Pyverbs(
            **{name: importlib.import_module(f"pyverbs.{name}") for name in names},
            enums=enums,
            errors=importlib.import_module("pyverbs.pyverbs_error"),
        )
    except ImportError as error:
        raise _no_pyverbs(error) from error


def is_importable() -> bool:
    """Whether pyverbs can be used from this environment."""
    try:
        load_pyverbs()
    except RdmaUnavailable:
        return False
    return True


def _no_pyverbs(error: ImportError) -> RdmaUnavailable:
    folder = importlib.util.find_spec("pyverbs")
    if folder is None:
        return RdmaUnavailable(Refusal.NO_PYVERBS, "pyverbs is not installed in this environment.", hint=INSTALL)
    if isinstance(error, ModuleNotFoundError):
        ours = sysconfig.get_config_var("EXT_SUFFIX") or ""
        return RdmaUnavailable(
            Refusal.NO_PYVERBS,
            f"pyverbs is installed, but not for this Python: it has no module {error.name} ending in {ours}.",
            hint=f"use the Python that it was built for, or build rdma-core for Python {sys.version_info.major}."
            f"{sys.version_info.minor} (docs/reference/rdma.md, 'Enable it')",
        )
    return RdmaUnavailable(
        Refusal.NO_PYVERBS,
        f"pyverbs is installed, but cannot be loaded: {error}.",
        hint="apt install libibverbs1 librdmacm1 ibverbs-providers",
    )


def open_device(port: RdmaPort) -> Any:  # noqa: ANN401 - a pyverbs.device.Context
    """Open the port's device. The caller closes it. Raises RdmaUnavailable: NO_PYVERBS, NO_ACCESS."""
    pyverbs, device = load_pyverbs(), port.device
    try:
        return pyverbs.device.Context(name=device)
    except pyverbs.errors.PyverbsRDMAError as error:
        raise RdmaUnavailable(
            Refusal.NO_ACCESS,
            f"The RDMA device {device} cannot be opened: {error}.",
            hint="start the container with --device /dev/infiniband, or let this user read and write /dev/infiniband/*",
        ) from error
    except pyverbs.errors.PyverbsError as error:  # it is in sysfs, and not in libibverbs' list
        raise RdmaUnavailable(
            Refusal.NO_ACCESS,
            f"libibverbs has no driver for the RDMA device {device}: {error}.",
            hint="apt install ibverbs-providers (it must be of the same release as libibverbs1)",
        ) from error


def _with_mtu(port: RdmaPort) -> RdmaPort:
    context = open_device(port)
    try:
        return msgspec.structs.replace(port, mtu=path_mtu_bytes(context, port.number))
    finally:
        context.close()


def path_mtu_bytes(context: Any, port_number: int) -> int:  # noqa: ANN401 - a pyverbs.device.Context
    """The active path MTU of an opened device's port: 256 to 4096."""
    return _SHORTEST_MTU << int(context.query_port(port_number).active_mtu)


def memlock_limit() -> int | None:
    """Bytes that this process may register with RDMA devices in total. None: any number."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY or _may_lock_all() else soft


def check_memlock(needed_bytes: int) -> None:
    """Raise RdmaUnavailable (MEMLOCK) if this process may not register so many bytes in total."""
    limit = memlock_limit()
    if limit is not None and limit < needed_bytes:
        raise memlock_refusal(needed_bytes)


def memlock_refusal(needed_bytes: int) -> RdmaUnavailable:
    """The refusal of a registration that the kernel does not allow: it answers ENOMEM."""
    limit = memlock_limit()
    if limit is None:
        return RdmaUnavailable(
            Refusal.MEMLOCK,
            f"{-(-needed_bytes >> 10)} KiB could not be locked for RDMA, although this process may lock any amount.",
            hint="look into the kernel log (dmesg): the host or the NIC is out of memory",
        )
    return RdmaUnavailable(
        Refusal.MEMLOCK,
        f"This process may lock {limit >> 10} KiB of memory, and needs {-(-needed_bytes >> 10)} KiB: slots are locked "
        "for RDMA.",
        hint="ulimit -l unlimited; for good: LimitMEMLOCK=infinity in the systemd unit, 'memlock unlimited' in "
        "/etc/security/limits.conf, or docker run --ulimit memlock=-1",
    )


def _may_lock_all() -> bool:
    """Whether the kernel ignores the limit: CAP_IPC_LOCK, which counts in no user namespace but the first."""
    capabilities = re.search(r"^CapEff:\s*([0-9a-f]+)", kernel_text(Path("/proc/self/status")), re.MULTILINE)
    is_first = kernel_text(Path("/proc/self/uid_map")).split() == _ALL_USERS
    return is_first and capabilities is not None and bool(int(capabilities[1], 16) & _CAP_IPC_LOCK)


def _ports_of(device: Path) -> list[RdmaPort]:
    numa = kernel_text(device / "device" / "numa_node")
    ports = [folder for folder in (device / "ports").glob("*") if folder.name.isdigit()]
    return [
        RdmaPort(
            device=device.name,
            number=int(folder.name),
            state=kernel_text(folder / "state").partition(": ")[2] or "unknown",  # "4: ACTIVE"
            is_infiniband=kernel_text(folder / "link_layer") == "InfiniBand",
            lid=int(kernel_text(folder / "lid") or "0", 16),
            gids=tuple(_gids_of(folder)),
            interface=kernel_text(folder / "gid_attrs" / "ndevs" / "0"),
            numa_node=int(numa) if numa.isdigit() else -1,
        )
        for folder in sorted(ports, key=lambda folder: int(folder.name))
    ]


def _gids_of(port: Path) -> Iterable[Gid]:
    free = 0
    for index in itertools.count():
        text = kernel_text(port / "gids" / str(index))
        if text.strip("0:"):
            free = 0
            yield Gid(index, text, kernel_text(port / "gid_attrs" / "types" / str(index)))
        elif (free := free + 1) > _FREE_GIDS:
            return


def kernel_text(file: Path) -> str:
    """What a file of the kernel says; empty if it has none, cannot be read now, or is gone with its device."""
    try:
        return file.read_text().strip()
    except OSError:
        return ""


def _natural(name: str) -> list[tuple[int, str]]:
    """mlx5_2 before mlx5_10."""
    return [(int(part) if part.isdigit() else 0, part) for part in re.split(r"(\d+)", name)]
