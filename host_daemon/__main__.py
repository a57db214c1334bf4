"""`python -P -m host_daemon --state-dir DIR --host-id H --supervisor URL --token-file F`: the agent of one host.

A job waits longest for the import of torch. So the standby that imports it is started first, and the agent's own
modules are imported meanwhile.
"""

from __future__ import annotations

import errno
import os
import shutil
import socket
import sys
from pathlib import Path

from flyball.contracts.errors import ConfigurationError, FlyballError, MemoryTooSmall, StorageFull
from flyball.process_start import import_lean, without_collector
from host_daemon.settings import DaemonSettings, parse_settings
from host_daemon.spawning.spawner_start import StartedSpawner, start_spawner
from host_daemon.store.state_dir import HostStateDir
from host_daemon.workers.worker_environment import expected_environment

MIN_DISK_BYTES = 64 << 20
MIN_SHM_BYTES = 16 << 20  # for beacons and control words only; the engine checks the slots of each job


def main() -> int:
    """Run until SIGTERM. Returns 0, or the exit code of the error that prevented it."""
    try:
        settings = parse_settings(sys.argv[1:])
        state_dir = HostStateDir(settings.state_dir)
        state_dir.open()
        check_host(settings)
        _run(settings, state_dir, _start_standby(settings, state_dir))
    except FlyballError as error:
        sys.stderr.write(f"error: {error.message}\n" + (f"Next step: {error.hint}\n" if error.hint else ""))
        return error.exit_code
    return 0


def _start_standby(settings: DaemonSettings, state_dir: HostStateDir) -> StartedSpawner | None:
    if not settings.warm_nproc:
        return None
    environment = expected_environment(os.environ, settings.warm_nproc)
    try:
        return start_spawner(environment=environment, log_path=state_dir.spawner_log, state_dir=state_dir.root)
    except OSError:  # the agent tries again, and logs the cause
        return None


def _run(settings: DaemonSettings, state_dir: HostStateDir, spawner: StartedSpawner | None) -> None:
    with without_collector():
        import_lean("structlog", "httpx")  # before the modules that import them
        import asyncio

        import structlog

        from flyball.contracts.clock import SystemClock
        from flyball.process_start import log_to_stderr
        from flyball.process_title import set_title
        from host_daemon.agent import Agent

    log_to_stderr()
    set_title(f"host daemon {settings.host_id}", ["host_daemon", *sys.argv[1:]])
    structlog.contextvars.bind_contextvars(host_id=settings.host_id)
    asyncio.run(Agent(settings, state_dir, SystemClock(), spawner).run())


def check_host(settings: DaemonSettings) -> None:
    """Raise the error that names what this host lacks. Call it once the state folder is open."""
    _check_disk(settings.state_dir)
    _check_shm(Path(settings.shm_dir))
    _check_address(settings.address)


def _check_disk(state_dir: Path) -> None:
    free = shutil.disk_usage(state_dir).free
    if free < MIN_DISK_BYTES:
        raise StorageFull(
            f"The disk of {state_dir} has {free >> 20} MiB left; the daemon needs {MIN_DISK_BYTES >> 20}.",
            hint="free space there, or choose another --state-dir",
        )


def _check_shm(shm_dir: Path) -> None:
    if not shm_dir.is_dir() or not os.access(shm_dir, os.W_OK | os.X_OK):
        raise ConfigurationError(
            f"{shm_dir} is not a folder that this user can write to.",
            hint="mount a tmpfs there, or set FLYBALL_SHM_DIR",
        )
    free = shutil.disk_usage(shm_dir).free
    if free < MIN_SHM_BYTES:
        raise MemoryTooSmall(
            f"{shm_dir} has {free >> 20} MiB left. Beacons and control words need {MIN_SHM_BYTES >> 20}, and every "
            "rank also needs twice the size of its state.",
            hint="enlarge it (docker: --shm-size; else mount -o remount,size=...), or set FLYBALL_SHM_DIR",
        )


def _check_address(address: str) -> None:
    try:
        family, _, _, _, target = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)[
            0
        ]
    except socket.gaierror:
        raise ConfigurationError(
            f"--address {address} is not an IP address.", hint="give the address at which other hosts reach this one"
        ) from None
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        try:
            probe.bind(target)
        except OSError as error:
            why = "is not an address of this host" if error.errno == errno.EADDRNOTAVAIL else f"cannot be used: {error}"
            raise ConfigurationError(f"--address {address} {why}.", hint="`ip addr` shows the addresses") from error


if __name__ == "__main__":
    sys.exit(main())
