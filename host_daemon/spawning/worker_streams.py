"""A worker's stdin, stdout and stderr: the log, or a terminal or pipe whose other side a pump copies to the log."""

from __future__ import annotations

import errno
import io
import os
import stat
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from host_daemon.spawning.spawn_wire import Streams

_LOG_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
_NOBODY_THERE = (errno.EIO, errno.EPIPE)  # what a write says when the pump is dead: of a terminal, of a pipe


def redirect(log_path: str, streams: Streams) -> None:
    """Have this process write where it was told, or, where that is gone already, to its log."""
    log = os.open(log_path, _LOG_FLAGS, 0o600)
    for descriptor, path in ((1, streams.stdout), (2, streams.stderr)):
        device = _open(path, os.O_WRONLY)
        os.dup2(log if device is None else device, descriptor)
        if device is not None:
            os.close(device)
    os.close(log)
    given = _open(streams.stdin, os.O_RDONLY)
    if given is not None:
        os.dup2(given, 0)
        os.close(given)
    if streams.stdout or streams.stderr:
        for name, number in (("stdout", 1), ("stderr", 2)):
            stream = _lasting(getattr(sys, name), number, log_path)
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)
    elif isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # a log is read while it is written, and its writer may be killed


def _open(path: str, access: int) -> int | None:
    """A terminal, for reading and writing, or a pipe or file for `access`; None if it is not there any more."""
    if not path:
        return None
    try:
        is_terminal = stat.S_ISCHR(Path(path).stat().st_mode)
        # no controlling terminal: when the pump dies no signal comes of it
        flags = (os.O_RDWR if is_terminal else access) | os.O_NOCTTY | os.O_NONBLOCK | os.O_CLOEXEC
        descriptor = os.open(path, flags)
    except OSError:
        return None
    os.set_blocking(descriptor, True)
    return descriptor


def _lasting(old: TextIO, descriptor: int, log_path: str) -> io.TextIOWrapper:
    raw = _Lasting(descriptor, log_path)
    raw.name = old.name  # '<stdout>'
    return io.TextIOWrapper(
        io.BufferedWriter(raw), encoding=old.encoding, errors=old.errors, newline="\n", line_buffering=True
    )


class _Lasting(io.FileIO):
    """A stream that goes on in the log when the pump is dead, so that a killed pump ends no training."""

    def __init__(self, descriptor: int, log_path: str) -> None:
        super().__init__(descriptor, "wb", closefd=False)
        self._log_path = log_path

    def write(self, data: Any, /) -> int:  # noqa: ANN401 - any buffer
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in _NOBODY_THERE:
                raise
        log = os.open(self._log_path, _LOG_FLAGS, 0o600)
        os.dup2(log, self.fileno())
        os.close(log)
        return super().write(data)
