"""All kinds of faults by name."""

from __future__ import annotations

from flyball.contracts.errors import NotFound
from simulator.inject.kinds import (
    checkpoints,
    clocks,
    gpu_power,
    gpus,
    hosts,
    limits,
    network,
    processes,
    script,
    services,
)
from simulator.inject.kinds.kind import RealFault

KINDS: dict[str, RealFault] = {
    kind.name: kind()
    for kind in (
        processes.Kill,
        processes.Hang,
        processes.Slow,
        limits.CpuLimit,
        script.HangCollective,
        script.HangData,
        script.SlowSteps,
        script.OutOfMemory,
        script.Exception_,
        script.Exit,
        script.Nan,
        script.FlipBit,
        checkpoints.ShardDamage,
        processes.EngineKill,
        processes.EnginePause,
        processes.EngineSlow,
        processes.DaemonPause,
        hosts.HostDown,
        hosts.HostReboot,
        hosts.Preempt,
        hosts.Condition,
        hosts.DiskFull,
        limits.DiskSlow,
        gpus.Xid,
        gpus.Ecc,
        gpus.GpuLost,
        gpu_power.GpuPower,
        clocks.ClockJump,
        network.NetCut,
        network.NetDelay,
        network.NetLoss,
        network.NetSlow,
        services.ServicePause,
        services.ServiceKill,
        services.ServiceStop,
        clocks.ServiceClockJump,
        services.ServerPause,
        services.ServerKill,
        services.ServerStop,
    )
}


def kind_of(name: str) -> RealFault:
    """Raises NotFound."""
    if name not in KINDS:
        raise NotFound(f"There is no fault {name!r}.", hint="`flyball inject faults` lists all of them")
    return KINDS[name]
