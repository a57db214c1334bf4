"""A worker's standard streams: where its order says, unbuffered, and in the log once nobody is there any more."""

from __future__ import annotations

import errno
import io
import os
import select
import stat
import sys
from pathlib import Path
from typing import Any, TextIO

from host_daemon.spawning.spawn_wire import WorkerStreamPaths

_LOG_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NONBLOCK  # else a FIFO there would wait
_NOBODY_THERE = (errno.EIO, errno.EPIPE)  # from a write when the pump is dead: to a terminal, to a pipe


def redirect(log_path: str, streams: WorkerStreamPaths) -> None:
    """Send this process's output where the order says, or to its log if that is gone."""
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
    for name, number in (("stdout", 1), ("stderr", 2)):
        stream = _unbuffered(getattr(sys, name), number, log_path)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _open(path: str, access: int) -> int | None:
    """Open a terminal for reading and writing, or a pipe or file for `access`. Returns None if it is gone."""
    if not path:
        return None
    try:
        is_terminal = stat.S_ISCHR(Path(path).stat().st_mode)
        # not as the controlling terminal: the pump's death must not raise a signal here
        flags = (os.O_RDWR if is_terminal else access) | os.O_NOCTTY | os.O_NONBLOCK | os.O_CLOEXEC
        descriptor = os.open(path, flags)
    except OSError:
        return None
    os.set_blocking(descriptor, True)
    return descriptor


def _unbuffered(old: TextIO, descriptor: int, log_path: str) -> io.TextIOWrapper:
    """As of `python -u`, which torchrun starts: what was written is there, whatever ends the process next."""
    raw = _Lasting(descriptor, log_path)
    raw.name = old.name  # '<stdout>'
    return io.TextIOWrapper(raw, encoding=old.encoding, errors=old.errors, newline="\n", write_through=True)


class _Lasting(io.FileIO):
    """A stream that continues in the log when the pump dies, so that a killed pump does not end training."""

    def __init__(self, descriptor: int, log_path: str) -> None:
        super().__init__(descriptor, "wb", closefd=False)
        self._log_path = log_path

    def write(self, data: Any, /) -> int:  # noqa: ANN401 - any buffer
        """All of it, as nobody above asks how much was written."""
        left = memoryview(data).cast("B")
        size_bytes = len(left)
        while left:
            written = self._write(left)
            if written is None:  # the script had its stream not wait, and it is full
                select.select((), (self,), ())
            left = left[written or 0 :]
        return size_bytes

    def _write(self, data: memoryview) -> int | None:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in _NOBODY_THERE:
                raise
        log = os.open(self._log_path, _LOG_FLAGS, 0o600)
        os.dup2(log, self.fileno())
        os.close(log)
        return super().write(data)
