"""Notifies the service manager that started this process: ready, alive, stopping. systemd's protocol, sd_notify(3), for
units with Type=notify and WatchdogSec. Elsewhere everything here does nothing."""

from __future__ import annotations

import os
import socket
from collections.abc import MutableMapping

from flyball.contracts.clock import Clock

SHARE_OF_WATCHDOG = 0.4  # of its time between two signs of life: one may be late


class ServiceManager:
    """Takes its variables out of the environment, so that no child process reports in this one's name."""

    def __init__(self, environ: MutableMapping[str, str], clock: Clock) -> None:
        self._clock = clock
        address = environ.pop("NOTIFY_SOCKET", "")
        self._address = f"\0{address[1:]}" if address.startswith("@") else address
        watchdog_us, pid = environ.pop("WATCHDOG_USEC", ""), environ.pop("WATCHDOG_PID", "")
        is_watched = watchdog_us.isdecimal() and pid in ("", str(os.getpid()))
        self.sign_every_s = int(watchdog_us) / 1e6 * SHARE_OF_WATCHDOG if is_watched else 0.0  # 0: nobody waits for one
        self._next_sign_s = 0.0

    def ready(self) -> None:
        """The process serves."""
        self._send("READY=1")

    def alive(self) -> None:
        """Send a sign of life if one is due. Call it often, from a loop whose standstill is that of the process."""
        now_s = self._clock.monotonic_s()
        if self.sign_every_s and now_s >= self._next_sign_s and self._send("WATCHDOG=1"):
            self._next_sign_s = now_s + self.sign_every_s

    def stopping(self) -> None:
        """The process ends in order, which may take as long as the unit allows."""
        self._send("STOPPING=1")

    def _send(self, state: str) -> bool:
        """Return whether the manager took it. It may be restarting itself: then a later sign of life counts."""
        if not self._address:
            return False
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
                sender.setblocking(False)
                sender.sendto(state.encode(), self._address)
        except OSError:
            return False
        return True
