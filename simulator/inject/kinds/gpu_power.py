"""Slows down GPUs by a lower limit of their power, through NVML: those that the host's workers hold open, and that
nobody else uses. The limit is the GPU's own, so whoever shares it would be slowed down too."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

from flyball.contracts.errors import ConfigurationError, Forbidden, NotFound, UsageError
from host_daemon.probes.gpu_use import held_gpus
from simulator.inject.host_files import HostFiles, is_daemon, state_dir_of
from simulator.inject.kinds.gpus import PROBE_ROOT, probe_root
from simulator.inject.kinds.kind import FaultSite, FaultTarget, Option, Plan, RealFault
from simulator.inject.processes import own_processes, pids_of

WATT = 1_000  # in milliwatts. Drivers may round a limit, by less than this


class GpuPower(RealFault):
    name = "gpu-power"
    about = "the driver holds GPUs to a part of their power, so they compute slower"
    target = FaultTarget.HOST
    options = (
        Option("share", 0.5, "of the present limit; never below what the GPU allows"),
        Option("pci", "", "PCI address of one GPU; empty: all that its workers use"),
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
        gpus, users = [], _users(site.host)
        with _nvml() as nvml:
            for index in range(nvml.nvmlDeviceGetCount()):
                handle = nvml.nvmlDeviceGetHandleByIndex(index)
                address = nvml.nvmlDeviceGetPciInfo(handle).busId
                address = address.decode() if isinstance(address, bytes) else str(address)
                minor = nvml.nvmlDeviceGetMinorNumber(handle)
                if minor not in users.own or not address.lower().endswith(pci):
                    continue
                _check_is_alone(nvml, handle, address, minor, users)
                before_mw = int(nvml.nvmlDeviceGetPowerManagementLimit(handle))
                if before_mw < int(nvml.nvmlDeviceGetPowerManagementDefaultLimit(handle)):
                    raise NotFound(
                        f"The GPU {address} is held to less than its usual power already: nothing was done.",
                        hint="wait until an earlier fault is over, or set it back with nvidia-smi --power-limit",
                    )
                least_mw, _ = nvml.nvmlDeviceGetPowerManagementLimitConstraints(handle)
                limit_mw = max(int(before_mw * share) // WATT * WATT, int(least_mw))
                if before_mw - limit_mw >= WATT:
                    gpus.append({"pci": address, "before_mw": before_mw, "limit_mw": limit_mw})
        if not gpus:
            raise NotFound(
                f"No such GPU that a worker of {site.host_id} uses can be held to less power.",
                hint="wait until its ranks run; see nvidia-smi -q -d POWER; give pci=...",
            )
        return {"gpus": gpus}

    def inject(self, plan: Plan) -> None:
        with _nvml() as nvml:
            for gpu in plan["gpus"]:
                handle = _handle(nvml, gpu)
                nvml.nvmlDeviceSetPowerManagementLimit(handle, gpu["limit_mw"])
                if not _has_limit(nvml, handle, gpu):  # then `undo` would take it for somebody else's
                    nvml.nvmlDeviceSetPowerManagementLimit(handle, gpu["before_mw"])
                    raise ConfigurationError(
                        f"The driver sets the GPU {gpu['pci']} to another limit than {gpu['limit_mw'] // WATT} W.",
                        hint="choose another share",
                    )

    def undo(self, plan: Plan) -> None:
        """Where the limit is still the fault's own, but for the driver's rounding. A GPU that fails keeps no other from
        it."""
        failed = []
        for gpu in plan["gpus"]:
            try:
                with _nvml() as nvml:
                    handle = _handle(nvml, gpu)
                    if _has_limit(nvml, handle, gpu):
                        nvml.nvmlDeviceSetPowerManagementLimit(handle, gpu["before_mw"])
            except ConfigurationError as error:
                failed.append(f"{gpu['pci']} ({error.message.rstrip('.')})")
        if failed:
            raise ConfigurationError(
                f"The power limit could not be put back: {', '.join(failed)}.",
                hint="put it back with nvidia-smi --power-limit",
            )


class _Users(NamedTuple):
    """Who uses GPUs, by their minor numbers."""

    own: frozenset[int]  # of the host's workers. Its daemon has all of them open, for its probes
    own_pids: frozenset[int]
    others: Mapping[int, str]  # the state folder of another host on this machine whose workers do


def _users(host: HostFiles) -> _Users:
    workers = host.worker_processes()
    own = frozenset(minor for worker in workers for minor in held_gpus(worker.pid))
    folders = {folder for p in own_processes() if is_daemon(p) and (folder := state_dir_of(p)) is not None}
    others: dict[int, str] = {}
    for folder in folders - {host.root}:
        with suppress(NotFound):  # it is no state folder any more
            for worker in HostFiles(folder).worker_processes():
                others |= dict.fromkeys(held_gpus(worker.pid), str(folder))
    return _Users(own, frozenset().union(*map(pids_of, workers)), others)


def _check_is_alone(nvml: Any, handle: Any, address: str, minor: int, users: _Users) -> None:  # noqa: ANN401
    """Raises Forbidden if anybody else uses the GPU, whose job may not have the mark."""
    processes = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
    foreign = sorted(process.pid for process in processes if process.pid not in users.own_pids)
    if minor in users.others or foreign:
        user = f"a worker of {users.others[minor]}" if minor in users.others else f"the process {foreign[0]}"
        raise Forbidden(
            f"The GPU {address} is also used by {user}, which is not of this host: nothing was done.",
            hint="name a GPU that this host alone uses: pci=...",
        )


def _has_limit(nvml: Any, handle: Any, gpu: Plan) -> bool:  # noqa: ANN401
    return bool(abs(nvml.nvmlDeviceGetPowerManagementLimit(handle) - gpu["limit_mw"]) < WATT)


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
