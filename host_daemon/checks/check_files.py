"""The files through which the daemon and the processes of a check exchange their order and their results."""

from __future__ import annotations

from pathlib import Path

import msgspec

from flyball.contracts import wire
from flyball.contracts.reports.host_checks import CheckStage

MAX_MESSAGE = 500


class CheckOrder(msgspec.Struct, frozen=True):
    """What the processes of one host do."""

    check_id: str
    index: int  # of this host in its group
    group: tuple[str, ...]
    master_address: str
    master_port: int
    timeout_s: float


class DeviceResult(msgspec.Struct, frozen=True):
    """What one process measured on its device so far. Written anew after each stage."""

    devices: int  # of the host
    matmul_s: float = 0.0  # 0.0: not measured
    all_reduce_s: float = 0.0
    failed: CheckStage | None = None
    message: str = ""
    is_done: bool = False


def result_path(order_path: Path, device: int) -> Path:
    """Where the process of a device puts its result."""
    return order_path.with_name(f"{order_path.stem}.device{device}.json")


def write(path: Path, value: CheckOrder | DeviceResult) -> None:
    """Replace a file as a whole, so that a reader never sees half of one. It need not survive a crash of the host."""
    fresh = path.with_suffix(".new")
    fresh.write_bytes(wire.encode(value))
    fresh.replace(path)


def read_order(path: Path) -> CheckOrder:
    return wire.decode(path.read_bytes(), CheckOrder)


def read_result(path: Path) -> DeviceResult | None:
    """None if there is none yet."""
    try:
        return wire.decode(path.read_bytes(), DeviceResult)
    except FileNotFoundError:
        return None
