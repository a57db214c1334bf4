"""`python -P -m host_daemon --state-dir DIR --host-id H --supervisor URL --token-file F`: the agent of one host."""

from __future__ import annotations

import asyncio
import sys

import structlog

from flyball.contracts.clock import SystemClock
from flyball.contracts.errors import FlyballError
from flyball.json_log import log_to_stderr
from host_daemon.agent import Agent
from host_daemon.preflight import check_host
from host_daemon.settings import parse_settings
from host_daemon.state_dir import StateDir


def main() -> int:
    """Run until SIGTERM; returns the exit code of the class of error that prevented it, else 0."""
    log_to_stderr()
    try:
        settings = parse_settings(sys.argv[1:])
        state_dir = StateDir(settings.state_dir)
        state_dir.open()
        check_host(settings)
        structlog.contextvars.bind_contextvars(host_id=settings.host_id)
        asyncio.run(Agent(settings, state_dir, SystemClock()).run())
    except FlyballError as error:
        sys.stderr.write(f"error: {error.message}\n" + (f"Next step: {error.hint}\n" if error.hint else ""))
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
