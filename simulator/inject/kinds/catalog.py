"""All kinds of faults by name."""

from __future__ import annotations

from flyball.contracts.errors import NotFound
from simulator.inject.kinds import checkpoints, gpus, hosts, limits, processes, script, services
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
        gpus.Xid,
        gpus.Ecc,
        gpus.GpuLost,
        limits.NetCut,
        limits.NetDelay,
        limits.NetLoss,
        limits.NetSlow,
        services.ServicePause,
        services.ServiceKill,
        services.ServiceStop,
        services.ServerPause,
        services.ServerKill,
    )
}


def kind_of(name: str) -> RealFault:
    """Raises NotFound."""
    if name not in KINDS:
        raise NotFound(f"There is no fault {name!r}.", hint="`flyball inject faults` lists all of them")
    return KINDS[name]
