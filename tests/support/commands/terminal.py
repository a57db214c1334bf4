"""A user's terminal, with a command on it: what is shown on it, what is typed, how large it is."""

from __future__ import annotations

import fcntl
import os
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Mapping
from pathlib import Path

TIMEOUT_S = 300.0


class UserTerminal:
    """A pseudo-terminal that the command has as its controlling terminal, as under a shell."""

    def __init__(
        self, words: list[str], *, cwd: Path, environ: Mapping[str, str], rows: int = 33, columns: int = 111
    ) -> None:
        self._ours, theirs = os.openpty()
        self.resize(rows, columns)
        self.shown = b""
        self.process = subprocess.Popen(
            [sys.executable, "-c", _RUN_ON_TERMINAL, *words],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            cwd=cwd,
            env=dict(environ),
            start_new_session=True,
        )
        os.close(theirs)

    def resize(self, rows: int, columns: int) -> None:
        fcntl.ioctl(self._ours, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def type(self, keys: bytes) -> None:
        os.write(self._ours, keys)

    def is_echoing(self) -> bool:
        return bool(termios.tcgetattr(self._ours)[3] & termios.ECHO)

    def until(self, text: bytes) -> None:
        """Read until this is shown."""
        self.while_waiting_for(lambda: text in self.shown, repr(text))

    def while_waiting_for(self, condition: Callable[[], object], what: str) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while not condition():
            assert time.monotonic() < deadline, f"{what} did not happen; shown: {self.shown!r}"
            assert self._read() or condition(), f"the command ended before {what}; shown: {self.shown!r}"

    def end(self) -> int:
        """Read to the end; the exit code."""
        deadline = time.monotonic() + TIMEOUT_S
        while self._read():
            assert time.monotonic() < deadline, self.shown
        return self.process.wait(TIMEOUT_S)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            try:
                self.process.wait(60.0)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        os.close(self._ours)

    def _read(self) -> bool:
        """Read for a moment; False at the end."""
        ready, _, _ = select.select([self._ours], [], [], 0.05)
        if ready:
            try:
                data = os.read(self._ours, 65536)
            except OSError:
                return False
            self.shown += data
            return bool(data)
        return True


_RUN_ON_TERMINAL = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execvp(sys.argv[1], sys.argv[1:])
"""
