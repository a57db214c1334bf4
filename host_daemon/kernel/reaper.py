"""Collects how processes ended: the daemon's own children, orphans that it inherits as their subreaper, and children of
spawners, which report them."""

from __future__ import annotations

import asyncio
import os
import signal

from host_daemon.kernel.processes import ExitStatus


class Reaper:
    """The only part of the daemon that waits for children."""

    def __init__(self) -> None:
        self._watched: dict[int, asyncio.Future[ExitStatus]] = {}

    def start(self) -> None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGCHLD, self._reap)
        self._reap()

    def stop(self) -> None:
        asyncio.get_running_loop().remove_signal_handler(signal.SIGCHLD)

    def watch(self, pid: int) -> asyncio.Future[ExitStatus]:
        """A future of the process's exit status. Call it before the process can end."""
        return self._watched.setdefault(pid, asyncio.get_running_loop().create_future())

    def forget(self, pid: int) -> None:
        self._watched.pop(pid, None)

    def report(self, pid: int, status: ExitStatus) -> None:
        """A process ended with this status."""
        watcher = self._watched.get(pid)
        if watcher is not None and not watcher.done():
            watcher.set_result(status)

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            self.report(pid, ExitStatus.of_wait_status(status))
