"""How many steps of a beacon were reported: a file beside it, so that a restarted daemon continues there."""

from __future__ import annotations

import os

import structlog

from flyball.worker_files import open_worker_file, read_worker_file

SEEN_SUFFIX = ".seen"

_log = structlog.get_logger(__name__)


def read_seen(path: str) -> int:
    """The steps of this beacon that were reported."""
    try:
        return int.from_bytes(read_worker_file(path + SEEN_SUFFIX, 8), "little")
    except FileNotFoundError:
        return 0
    except OSError as error:
        _log.warning("reported_steps_unreadable", path=path, error=str(error))
        return 0


def write_seen(path: str, count: int) -> None:
    """Raises OSError."""
    descriptor = open_worker_file(path + SEEN_SUFFIX, os.O_WRONLY | os.O_CREAT)
    try:
        os.pwrite(descriptor, count.to_bytes(8, "little"), 0)
    finally:
        os.close(descriptor)
