"""`python -P -m host_daemon --state-dir DIR --host-id H --supervisor URL --token-file F`: the agent of one host.

A job waits longest for the import of torch. So the standby that imports it is started first, and the agent's own
modules are imported meanwhile.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from flyball.batch_step import block_term, ignore_warnings, is_batch_step, lead_step, leader_of
from flyball.contracts.clock import SystemClock
from flyball.contracts.errors import FlyballError
from flyball.process_start import import_lean, without_collector
from flyball.service_manager import ServiceManager
from host_daemon.probes.host_needs import check_host
from host_daemon.settings import DaemonSettings, parse_settings
from host_daemon.spawning.spawner_start import StartedSpawner, start_spawner
from host_daemon.store.state_dir import HostStateDir
from host_daemon.workers.worker_environment import expected_environment

if TYPE_CHECKING:
    from host_daemon.agent import Agent


def main() -> int:
    """Run until SIGTERM. Returns 0, or the exit code of the error that prevented it."""
    if leader_of(os.environ):
        block_term()
    elif is_batch_step(os.environ):
        lead_step(os.environ)
        ignore_warnings()
    try:
        settings = parse_settings(sys.argv[1:])
        state_dir = HostStateDir(settings.state_dir, settings.worker_user)
        state_dir.open(settings.host_id)
        check_host(settings)
        manager = ServiceManager(os.environ, SystemClock())  # before child processes inherit its variables
        _run(settings, state_dir, _start_standby(settings, state_dir), manager)
    except FlyballError as error:
        sys.stderr.write(f"error: {error.message}\n" + (f"Next step: {error.hint}\n" if error.hint else ""))
        return error.exit_code
    return 0


def _start_standby(settings: DaemonSettings, state_dir: HostStateDir) -> StartedSpawner | None:
    if not settings.warm_nproc:
        return None
    user = settings.worker_user
    environment = expected_environment(os.environ | (user.environment() if user else {}), settings.warm_nproc)
    log_path, root = state_dir.spawner_log, state_dir.root
    try:
        return start_spawner(environment=environment, log_path=log_path, state_dir=root, user=user)
    except OSError:  # the agent tries again, and logs the cause
        return None


def _run(
    settings: DaemonSettings, state_dir: HostStateDir, spawner: StartedSpawner | None, manager: ServiceManager
) -> None:
    with without_collector():
        import_lean("structlog", "httpx")  # before the modules that import them
        import asyncio

        import structlog

        from flyball.process_start import log_to_stderr
        from flyball.process_title import set_title
        from host_daemon.agent import Agent

    log_to_stderr(for_people=settings.logs_text and sys.stdout.isatty() and sys.stderr.isatty())
    set_title(f"host daemon {settings.host_id}", ["host_daemon", *sys.argv[1:]])
    structlog.contextvars.bind_contextvars(host_id=settings.host_id)
    asyncio.run(_serve(Agent(settings, state_dir, SystemClock(), spawner), manager))


async def _serve(agent: Agent, manager: ServiceManager) -> None:
    """Run the agent, with signs of life from its event loop."""
    import asyncio

    signs = asyncio.create_task(_give_signs(manager))
    try:
        await agent.run(manager.ready)
    finally:
        manager.stopping()
        signs.cancel()


async def _give_signs(manager: ServiceManager) -> None:
    import asyncio

    while manager.sign_every_s:
        manager.alive()
        await asyncio.sleep(manager.sign_every_s / 2)


if __name__ == "__main__":
    sys.exit(main())
