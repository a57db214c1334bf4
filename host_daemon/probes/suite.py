"""The probes of a daemon, and the loop that runs them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType

from flyball.contracts.checkpoints import Tier
from flyball.contracts.clock import Clock
from flyball.contracts.cluster import JobSpec
from flyball.contracts.on_host.os_text import from_text
from flyball.contracts.reports.conditions import HostCondition
from flyball.worker_user import WorkerUser
from host_daemon.probes.clock_jumps import ClockJumps
from host_daemon.probes.condition_files import ConditionFiles
from host_daemon.probes.disks import Disks
from host_daemon.probes.findings import Probe
from host_daemon.probes.gpus import GPU_LOST, Gpus, RecordedNvml
from host_daemon.probes.kernel_log import KernelLog
from host_daemon.probes.links import LINK_DOWN, Links
from host_daemon.probes.notices.node_taints import NodeApi, NodeTaints, api_of
from host_daemon.probes.pressure import Pressure
from host_daemon.probes.probing import Probing
from host_daemon.settings import DaemonSettings
from host_daemon.store.condition_book import ConditionBook
from host_daemon.store.facts import Facts

BOOT_FACT = "boot_id"  # of the kernel under which probes reported last
REAL_ROOT = Path("/")


async def watch_conditions(
    settings: DaemonSettings,
    *,
    facts: Facts,
    book: ConditionBook,
    clock: Clock,
    host_clock: Clock,
    jobs: Callable[[], Iterable[JobSpec]],
    wake: Callable[[], None],
) -> None:
    """Run all probes until cancelled. `clock`: the cluster's; `host_clock`: this host's own, which may jump; `jobs()`:
    those of this host, from any thread."""
    boot, before = _boot_id(settings.probe_root), await facts.get(BOOT_FACT) or ""
    rebooted = boot != before
    book.boot = boot
    probing = Probing(book, facts, clock, wake)
    marks = await probing.marks(keep=not rebooted)
    await facts.set(BOOT_FACT, boot)
    probes = probes_of(
        settings.probe_root,
        settings.probe_interval_s,
        settings.conditions_dir,
        host_clock,
        lambda: written_folders(settings.state_dir, settings.shm_dir, jobs()),
        standing=book.standing.values(),
        marks=marks,
        same_boot=not rebooted,
        node=api_of(settings),
        user=settings.worker_user,
    )
    await probing.run(probes, rebooted=rebooted)


def probes_of(
    root: Path,
    interval_s: float,
    conditions_dir: Path,
    host_clock: Clock,
    folders: Callable[[], Mapping[str, Path]],
    *,
    standing: Iterable[HostCondition] = (),
    marks: Mapping[str, str] = MappingProxyType({}),
    same_boot: bool = True,
    node: NodeApi | None = None,
    user: WorkerUser | None = None,
) -> tuple[Probe, ...]:
    """`root`: what stands for / in tests. `standing`: what earlier daemons reported, `same_boot`: under this boot.
    `marks`: how far the probes of this boot had read, by source. `user`: the workers'; None: this process's."""
    nvml = None if root == REAL_ROOT else RecordedNvml(root / "nvml.json")
    known = tuple(standing)
    lost = [c.subject for c in known if same_boot and c.kind == GPU_LOST and c.source == Gpus.source]
    down = {c.subject: c.severity for c in known if c.kind == LINK_DOWN and c.source == Links.source}
    return (
        KernelLog(root / "dev/kmsg", marks.get(KernelLog.source, ""), root / "sys/block"),
        Pressure(root, interval_s),
        Disks(folders, interval_s),
        ClockJumps(host_clock),
        Gpus(nvml, host_clock.monotonic_s, interval_s, lost),
        Links(root, down, interval_s),
        NodeTaints(node or NodeApi("", "")),
        ConditionFiles(conditions_dir, user),
    )


def written_folders(state_dir: Path, shm_dir: str, jobs: Iterable[JobSpec]) -> dict[str, Path]:
    """What a host writes to, by purpose."""
    found = {"the state folder": state_dir, "the shared memory": Path(shm_dir)}
    for spec in jobs:
        if spec.checkpoint.policy(Tier.DISK).is_on:
            found[f"the disk tier of job {spec.job}"] = Path(spec.checkpoint.disk_folder(state_dir))
        if spec.log_dir:
            found[f"the logs of job {spec.job}"] = Path(from_text(spec.log_dir))
    return found


def _boot_id(root: Path) -> str:
    try:
        return (root / "proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
