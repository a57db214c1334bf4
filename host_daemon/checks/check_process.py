"""One process of a host's check: `python -m host_daemon.checks.check_process ORDER [DEVICE]`. The daemon starts the one
of device 0, which starts one per further GPU; a host without GPUs has only one, for its CPU.

Each multiplies matrices of a fixed size on its device, over and over, and compares the results bit for bit. Then all
processes of all hosts of the group add a tensor up (nccl on GPUs, gloo on CPUs).
"""

from __future__ import annotations

import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from flyball.contracts.reports.host_checks import CheckStage
from flyball.process_start import end_with_parent
from host_daemon.checks.check_files import (
    MAX_MESSAGE,
    CheckOrder,
    DeviceResult,
    read_order,
    read_result,
    result_path,
    write,
)

if TYPE_CHECKING:
    import torch
    from torch._C._distributed_c10d import Store

CPU_SIZE, GPU_SIZE = 1024, 8192  # rows and columns of the square matrices: float32, bfloat16
MATMULS = 8
CPU_REDUCED, GPU_REDUCED = 4 << 20, 64 << 20  # float32 values per all-reduce
ALL_REDUCES = 4
_MARGIN_S = 1.0  # before the daemon's deadline, to write down why it failed
_LOOK_S = 0.02
_GOODBYE_S = 5.0


class StageFailed(Exception):
    """The check failed in this stage."""

    def __init__(self, stage: CheckStage, message: str) -> None:
        super().__init__(message)
        self.stage = stage


class DeviceCheck:
    """The check of one device."""

    def __init__(self, order_path: Path, device: int, began_s: float) -> None:
        self._order_path = order_path
        self._order: CheckOrder = read_order(order_path)
        self._device = device
        self._until_s = began_s + self._order.timeout_s - _MARGIN_S
        self._result = DeviceResult(devices=1)

    def run(self) -> int:
        """Returns the exit code: 0 if it passed."""
        try:
            self._measure()
        except StageFailed as error:
            self._note(failed=error.stage, message=str(error))
        except Exception as error:  # noqa: BLE001 - whatever torch or a driver raises is the finding
            stage = CheckStage.GROUP if self._result.matmul_s else CheckStage.DEVICE
            self._note(failed=stage, message=_first_line(error))
        else:
            self._note()
            return 0
        return 1

    def _measure(self) -> None:
        import torch

        devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
        place = torch.device("cuda", self._device) if devices else torch.device("cpu")
        self._result = DeviceResult(devices=max(1, devices))
        if devices:
            torch.cuda.set_device(place)  # else a context on GPU 0 is made in each process
        torch.set_num_threads(1)  # so that the times of hosts with other loads can be compared
        others = [self._start(device) for device in range(1, devices)] if self._device == 0 else []
        try:
            matmul_s = time_matmul(place)
            self._keep(matmul_s=matmul_s)
            if others:
                self._await_others(len(others))
            self._keep(all_reduce_s=self._all_reduce(place, max(1, devices)))
            for other in others:
                other.wait(timeout=max(0.1, self._until_s - time.monotonic()))
        finally:
            for other in others:
                other.kill()

    def _start(self, device: int) -> subprocess.Popen[bytes]:
        result_path(self._order_path, device).unlink(missing_ok=True)
        argv = [sys.executable, "-P", "-m", "host_daemon.checks.check_process", str(self._order_path), str(device)]
        return subprocess.Popen(argv, stdin=subprocess.DEVNULL)

    def _await_others(self, count: int) -> None:
        """Wait until every device of this host has multiplied, before the other hosts are involved."""
        for device in range(1, count + 1):
            while (found := read_result(result_path(self._order_path, device))) is None:
                if time.monotonic() > self._until_s:
                    raise StageFailed(CheckStage.DEVICE, f"GPU {device} did not multiply in time")
                time.sleep(_LOOK_S)
            if found.failed is CheckStage.DEVICE:
                raise StageFailed(CheckStage.DEVICE, f"GPU {device}: {found.message}")
            self._keep(matmul_s=max(found.matmul_s, self._result.matmul_s))

    def _all_reduce(self, place: torch.device, devices: int) -> float:
        """Seconds of one all-reduce over all devices of the group."""
        import torch
        import torch.distributed as dist
        from torch._C._distributed_c10d import PrefixStore, TCPStore

        order, is_cuda = self._order, place.type == "cuda"
        serves = order.index == 0 and self._device == 0
        try:
            base = TCPStore(
                order.master_address,
                order.master_port,
                is_master=serves,
                timeout=self._left(),
                wait_for_workers=False,
            )
        except RuntimeError as error:
            if serves and ("EADDRINUSE" in str(error) or "in use" in str(error)):
                raise StageFailed(CheckStage.VOID, f"port {order.master_port} was taken") from error
            raise
        store = PrefixStore(order.check_id, base)
        if self._device == 0:
            store.set(f"devices/{order.index}", str(devices))
        counts = [self._devices_of(store, index) for index in range(len(order.group))]
        rank, world_size = sum(counts[: order.index]) + self._device, sum(counts)
        dist.init_process_group(
            "nccl" if is_cuda else "gloo",
            store=PrefixStore("group", store),
            rank=rank,
            world_size=world_size,
            timeout=self._left(),
        )
        times_s = []
        for _ in range(ALL_REDUCES):
            values = torch.full((GPU_REDUCED if is_cuda else CPU_REDUCED,), float(rank + 1), device=place)
            _wait_for(place)
            began_s = time.perf_counter()
            dist.all_reduce(values)
            _wait_for(place)
            times_s.append(time.perf_counter() - began_s)
            if not bool((values == world_size * (world_size + 1) / 2).all()):
                raise StageFailed(CheckStage.GROUP, "an all-reduce gave a wrong sum")
        store.set(f"done/{rank}", "")
        if serves:  # the store ends with this process
            until_s = min(time.monotonic() + _GOODBYE_S, self._until_s)
            names = [f"done/{number}" for number in range(world_size)]
            while not store.check(names) and time.monotonic() < until_s:
                time.sleep(_LOOK_S)
        return median(times_s[1:])

    def _devices_of(self, store: Store, index: int) -> int:
        """The number of devices of a host of the group, once it is there."""
        name = f"devices/{index}"
        while not store.check([name]):
            if time.monotonic() > self._until_s:
                raise StageFailed(CheckStage.GROUP, f"{self._order.group[index]} did not join the group in time")
            time.sleep(_LOOK_S)
        return int(store.get(name))

    def _left(self) -> timedelta:
        return timedelta(seconds=max(0.5, self._until_s - time.monotonic()))

    def _keep(self, *, matmul_s: float | None = None, all_reduce_s: float | None = None) -> None:
        known = self._result
        self._result = DeviceResult(
            known.devices,
            known.matmul_s if matmul_s is None else matmul_s,
            known.all_reduce_s if all_reduce_s is None else all_reduce_s,
        )
        write(result_path(self._order_path, self._device), self._result)

    def _note(self, *, failed: CheckStage | None = None, message: str = "") -> None:
        known = self._result
        result = DeviceResult(known.devices, known.matmul_s, known.all_reduce_s, failed, message[:MAX_MESSAGE], True)
        write(result_path(self._order_path, self._device), result)


def time_matmul(place: torch.device) -> float:
    """Seconds of one product, the median of several. Raises StageFailed if two products of the same matrices differ."""
    import torch

    is_cuda = place.type == "cuda"
    size, dtype = (GPU_SIZE, torch.bfloat16) if is_cuda else (CPU_SIZE, torch.float32)
    generator = torch.Generator(device="cpu").manual_seed(17)
    left, right = (torch.randn(size, size, generator=generator).to(place, dtype) for _ in range(2))
    first = left @ right
    _wait_for(place)
    times_s = []
    for _ in range(MATMULS):
        began_s = time.perf_counter()
        product = left @ right
        _wait_for(place)
        times_s.append(time.perf_counter() - began_s)
        if not torch.equal(product, first):
            raise StageFailed(CheckStage.DEVICE, "two products of the same matrices differ")
    return median(times_s)


def _wait_for(place: torch.device) -> None:
    import torch

    if place.type == "cuda":
        torch.cuda.synchronize(place)


def _first_line(error: Exception) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0]}" if text else type(error).__name__


def main(argv: list[str]) -> int:
    """Run the check of one device."""
    began_s = time.monotonic()
    end_with_parent()  # the daemon, or device 0, may be killed
    device = int(argv[1]) if len(argv) > 1 else 0
    return DeviceCheck(Path(argv[0]), device, began_s).run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
