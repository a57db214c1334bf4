"""Slows down GPUs by a lower limit of their power, through NVML."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from flyball.contracts.errors import ConfigurationError, NotFound, UsageError
from simulator.inject.kinds.gpus import PROBE_ROOT, probe_root
from simulator.inject.kinds.kind import FaultSite, FaultTarget, Option, Plan, RealFault


class GpuPower(RealFault):
    name = "gpu-power"
    about = "the driver holds GPUs to a part of their power, so they compute slower"
    target = FaultTarget.HOST
    options = (
        Option("share", 0.5, "of the present limit; never below what the GPU allows"),
        Option("pci", "", "PCI address of one GPU; empty: all of the machine"),
    )
    lasts_s = 60.0

    def lacks(self, site: FaultSite) -> str:
        if probe_root(site) is not None:
            return f"its GPUs are recorded readings ({PROBE_ROOT})"
        try:
            with _nvml():
                return ""
        except ConfigurationError as error:
            return error.message.rstrip(".")

    def plan(self, site: FaultSite) -> Plan:
        share, pci = site.number("share"), site.text("pci").lower()
        if not 0 < share < 1:
            raise UsageError("share must be between 0 and 1.", hint="for example share=0.5")
        gpus = []
        with _nvml() as nvml:
            for index in range(nvml.nvmlDeviceGetCount()):
                handle = nvml.nvmlDeviceGetHandleByIndex(index)
                address = nvml.nvmlDeviceGetPciInfo(handle).busId
                address = address.decode() if isinstance(address, bytes) else str(address)
                if not address.lower().endswith(pci):
                    continue
                before_mw = int(nvml.nvmlDeviceGetPowerManagementLimit(handle))
                least_mw, _ = nvml.nvmlDeviceGetPowerManagementLimitConstraints(handle)
                limit_mw = max(int(before_mw * share), int(least_mw))
                if limit_mw < before_mw:
                    gpus.append({"pci": address, "before_mw": before_mw, "limit_mw": limit_mw})
        if not gpus:
            raise NotFound("No such GPU can be held to less power.", hint="see nvidia-smi -q -d POWER; give pci=...")
        return {"gpus": gpus}

    def inject(self, plan: Plan) -> None:
        with _nvml() as nvml:
            for gpu in plan["gpus"]:
                nvml.nvmlDeviceSetPowerManagementLimit(_handle(nvml, gpu), gpu["limit_mw"])

    def undo(self, plan: Plan) -> None:
        """Where the limit is still the fault's own. A GPU that fails does not keep the others from it."""
        failed = []
        for gpu in plan["gpus"]:
            try:
                with _nvml() as nvml:
                    handle = _handle(nvml, gpu)
                    if nvml.nvmlDeviceGetPowerManagementLimit(handle) == gpu["limit_mw"]:
                        nvml.nvmlDeviceSetPowerManagementLimit(handle, gpu["before_mw"])
            except ConfigurationError as error:
                failed.append(f"{gpu['pci']} ({error.message.rstrip('.')})")
        if failed:
            raise ConfigurationError(
                f"The power limit could not be put back: {', '.join(failed)}.",
                hint="put it back with nvidia-smi --power-limit",
            )


@contextmanager
def _nvml() -> Iterator[Any]:
    """NVML, started. Raises ConfigurationError, also for what it refuses inside."""
    try:
        import pynvml
    except ImportError as error:
        raise ConfigurationError("nvidia-ml-py is not installed.", hint="pip install nvidia-ml-py") from error
    try:
        pynvml.nvmlInit()
        try:
            yield pynvml
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError as error:
        raise ConfigurationError(
            f"NVML refused: {error}.", hint="it needs NVIDIA's driver, and root for a limit of power"
        ) from error


def _handle(nvml: Any, gpu: Plan) -> Any:  # noqa: ANN401 - pynvml has no types
    return nvml.nvmlDeviceGetHandleByPciBusId(gpu["pci"].encode())
