"""`python -P -m host_daemon --state-dir DIR --host-id H --supervisor URL --token-file F`: the agent of one host."""

from __future__ import annotations

import asyncio
import logging
import sys

import structlog

from flyball.contracts.clock import SystemClock
from flyball.contracts.errors import FlyballError
from host_daemon.agent import Agent
from host_daemon.preflight import check_host
from host_daemon.settings import parse_settings
from host_daemon.state_dir import StateDir


def main() -> int:
    """Run until SIGTERM; returns the exit code of the class of error that prevented it, else 0."""
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
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
