"""`python -P -m host_daemon --state-dir DIR --host-id H --supervisor URL --token-file F`: the agent of one host.

What a job waits for longest is the import of torch. So the standby that imports it is started first, and the agent's
own parts are imported beside it.
"""

from __future__ import annotations

import os
import sys

from flyball.contracts.errors import FlyballError
from flyball.lean_imports import import_lean, without_collector
from host_daemon.preflight import check_host
from host_daemon.settings import DaemonSettings, parse_settings
from host_daemon.spawning.spawner_start import StartedSpawner, start_spawner
from host_daemon.store.state_dir import HostStateDir
from host_daemon.workers.worker_environment import expected_environment


def main() -> int:
    """Run until SIGTERM; returns the exit code of the class of error that prevented it, else 0."""
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
    except OSError:  # the agent tries again, and says why it cannot
        return None


def _run(settings: DaemonSettings, state_dir: HostStateDir, spawner: StartedSpawner | None) -> None:
    with without_collector():
        import_lean("structlog", "httpx")  # before the modules that import them
        import asyncio

        import structlog

        from flyball.contracts.clock import SystemClock
        from flyball.json_log import log_to_stderr
        from flyball.process_title import set_title
        from host_daemon.agent import Agent

    log_to_stderr()
    set_title(f"host daemon {settings.host_id}", ["host_daemon", *sys.argv[1:]])
    structlog.contextvars.bind_contextvars(host_id=settings.host_id)
    asyncio.run(Agent(settings, state_dir, SystemClock(), spawner).run())


if __name__ == "__main__":
    sys.exit(main())
