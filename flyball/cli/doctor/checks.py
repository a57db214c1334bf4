"""The checks of `flyball doctor`, in the order in which they are shown. A new one is a function and a row of CHECKS."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from ckpt_engine.settings import check_variables, load_settings
from flyball.cli.doctor import machine_checks, network_checks, python_checks, rdma_checks
from flyball.cli.doctor.findings import Check, CheckedHost, Finding, not_here, ok, warning
from flyball.cli.reach.places import state_root
from flyball.cli.reach.sources import SupervisorChoice
from flyball.contracts.clock import SystemClock
from flyball.contracts.errors import UsageError
from host_daemon.probes.findings import Probe
from host_daemon.probes.gpus import Gpus
from host_daemon.probes.kernel_log import KernelLog
from host_daemon.probes.probing import availability
from host_daemon.probes.suite import REAL_ROOT, probes_of
from host_daemon.settings import CONDITIONS_FOLDER

_MENDS: Final[Mapping[str, str]] = {
    KernelLog.source: "run the daemon as root or with CAP_SYSLOG, or sysctl -w kernel.dmesg_restrict=0; in a "
    "container also: --device /dev/kmsg",
    Gpus.source: "nvidia-smi; install the driver's libraries; in a container: --gpus all",
}


def settings(host: CheckedHost) -> Iterator[Finding]:
    """The checkpoint settings of the environment, and of the file that it names."""
    check_variables(host.environ)
    load_settings(host.environ)
    yield ok("settings", "the checkpoint settings of this environment are valid")


def supervisor(host: CheckedHost) -> Iterator[Finding]:
    """The supervisor that the environment names."""
    if not host.environ.get("FLYBALL_SUPERVISOR"):
        yield not_here("supervisor", "FLYBALL_SUPERVISOR names none; `flyball run` starts its own")
        return
    with SupervisorChoice().connect() as client:
        client.newest("/v1/jobs", 1)
        yield ok("supervisor", f"{client.url} answers and accepts the token")


def database(host: CheckedHost) -> Iterator[Finding]:
    """The database that the environment names."""
    url = host.environ.get("FLYBALL_DATABASE_URL")
    if not url:
        yield not_here("database", "FLYBALL_DATABASE_URL names none; a supervisor makes its own file")
        return
    from sqlalchemy import text

    from services.store.sql.database import open_existing

    opened = open_existing(url)
    try:
        with opened.read() as connection:
            connection.execute(text("SELECT 1"))
    finally:
        opened.close()
    yield ok("database", f"{opened.name} answers")


def probes(host: CheckedHost) -> Iterator[Finding]:
    """What a daemon on this host could watch."""
    folder = next(folder for folder in (state_root(host.environ), Path("/")) if folder.exists())
    for probe in _probes_here(folder):
        yield probe_finding(probe, host)


def _probes_here(folder: Path) -> tuple[Probe, ...]:
    return probes_of(REAL_ROOT, 5.0, folder / CONDITIONS_FOLDER, SystemClock(), lambda: {"the state folder": folder})


def _line_of(probe: Probe) -> str:
    return probe.source if probe.source.startswith("probe ") else f"probe {probe.source}"


def probe_finding(probe: Probe, host: CheckedHost) -> Finding:
    """Whether a probe can read here. What this host has and a probe cannot read is a warning."""
    subject = _line_of(probe)
    why = availability(probe)
    if not why:
        return ok(subject, "works here")
    is_expected = host.has_nvidia_gpu if probe.source == Gpus.source else probe.source in _MENDS
    return warning(subject, why, _MENDS[probe.source]) if is_expected else not_here(subject, why)


CHECKS: Final = (
    Check("python", python_checks.python),
    Check("torch", python_checks.torch, deadline_s=python_checks.IMPORT_TIMEOUT_S + 10.0),
    Check("settings", settings),
    Check("shared memory", machine_checks.shared_memory),
    Check("state folder", machine_checks.state_folder),
    Check("open files", machine_checks.open_files),
    Check("clock", machine_checks.clock),
    Check("stacks", machine_checks.stacks),
    Check("cgroup", machine_checks.cgroup),
    Check("worker user", machine_checks.worker_user),
    Check("loopback", network_checks.loopback),
    Check("host name", network_checks.host_name),
    Check("port", network_checks.port),
    Check("supervisor", supervisor, deadline_s=60.0),
    Check("database", database, deadline_s=60.0),
    Check("probes", probes, deadline_s=60.0),
    Check("pyverbs", rdma_checks.pyverbs),
    Check("rdma devices", rdma_checks.devices),
    Check("rdma ports", rdma_checks.ports),
    Check("memlock", rdma_checks.memlock),
    Check("rdma", rdma_checks.transfers, deadline_s=60.0),
)

# Lines of the report that a check of another name makes.
_MADE_BY: Final[Mapping[str, str]] = {
    "kept memory": "shared memory",
    "rdma gid": "rdma ports",
    "rdma memory": "rdma",
    "rdma write": "rdma",
}


def check_named(name: str) -> Check:
    """Return the check that makes the lines of this name in the report. Raises UsageError."""
    made_by = {**_MADE_BY, **dict.fromkeys(map(_line_of, _probes_here(REAL_ROOT)), "probes")}
    subject = made_by.get(name, name)
    for check in CHECKS:
        if check.subject == subject:
            return check
    names = [check.subject for check in CHECKS]
    near = difflib.get_close_matches(name, [*names, *made_by], n=1, cutoff=0.6)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise UsageError(f"There is no check {name!r}.", hint=f"{hint}all checks: {', '.join(names)}")
