"""The log of a process of its own: one JSON object per line on stderr."""

from __future__ import annotations

import logging
import sys

import structlog


def log_to_stderr() -> None:
    """Configure structlog; whoever starts the process says where stderr goes."""
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,  # not as dicts: those show local variables, tokens among them
            structlog.processors.JSONRenderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
