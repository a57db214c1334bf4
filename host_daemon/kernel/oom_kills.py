"""Whether the kernel killed a process for lack of memory: by its own log, or by the counter of this cgroup.

The log needs permission, and shows other pids to containers; the counter does not say which process it was, so it is
looked at all the time, and only a kill of the last seconds explains an end.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
from collections import deque
from pathlib import Path

from flyball.contracts.clock import Clock

_KILLED = re.compile(r"out of memory: killed process (\d+)", re.IGNORECASE)
_RECENT_S = 60.0  # older lines are about another process with this pid
_RISE_S = 10.0  # from a count to the process's end: it may have much memory to give back
_MAX_RISES = 1_000
_MAX_RECORDS = 50_000  # of the kernel's log
_RECORD_BYTES = 8192  # no record is larger, and a smaller read fails


class OomKills:
    """Reads in other threads, one at a time: the kernel's log may have megabytes."""

    def __init__(
        self,
        clock: Clock,
        *,
        kernel_log: Path = Path("/dev/kmsg"),
        cgroups: Path = Path("/sys/fs/cgroup"),
        membership: Path = Path("/proc/self/cgroup"),
    ) -> None:
        self._clock = clock
        self._kernel_log = kernel_log
        self._counter = _counter_file(cgroups, membership)
        self._seen = self._count()
        self._rises_s: deque[float] = deque(maxlen=_MAX_RISES)  # when each kill was counted that explains no end yet
        self._lock = asyncio.Lock()

    async def look(self) -> None:
        """Note when the cgroup's counter rises. Call it every second or so."""
        async with self._lock:
            await asyncio.to_thread(self._look)

    async def line_about(self, pid: int) -> str:
        """What shows that this process, which SIGKILL has just ended, was killed for lack of memory; '' if nothing
        does. Each count of the cgroup's counter explains one kill, of the last seconds."""
        async with self._lock:
            return await asyncio.to_thread(self._line_about, pid)

    def _line_about(self, pid: int) -> str:
        line = self._logged(pid)
        self._look()
        if self._rises_s:
            self._rises_s.popleft()
            line = line or f"oom_kill {self._seen} in {self._counter}"
        return line

    def _look(self) -> None:
        now_s, count = self._clock.monotonic_s(), self._count()
        self._rises_s.extend([now_s] * min(count - self._seen, _MAX_RISES))
        self._seen = max(self._seen, count)
        while self._rises_s and now_s - self._rises_s[0] > _RISE_S:
            self._rises_s.popleft()

    def _logged(self, pid: int) -> str:
        found = ""
        with contextlib.suppress(OSError):
            descriptor = os.open(self._kernel_log, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                for _ in range(_MAX_RECORDS):
                    try:
                        record = os.read(descriptor, _RECORD_BYTES)
                    except BrokenPipeError:  # it was overwritten meanwhile; the next read continues behind it
                        continue
                    if not record:
                        break
                    found = self._about(pid, record.decode(errors="replace")) or found
            finally:
                os.close(descriptor)
        return found

    def _about(self, pid: int, record: str) -> str:
        """The text of a record "level,number,microseconds,flags;text", if it is about this process and recent."""
        head, _, text = record.partition(";")
        match = _KILLED.search(text)
        if match is None or int(match[1]) != pid:
            return ""
        try:
            at_s = int(head.split(",")[2]) / 1e6
        except (IndexError, ValueError):
            return ""
        return text.split("\n")[0] if self._clock.monotonic_s() - at_s < _RECENT_S else ""

    def _count(self) -> int:
        try:
            lines = self._counter.read_text().splitlines() if self._counter else []
        except OSError:
            return 0
        return sum(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))


def _counter_file(cgroups: Path, membership: Path) -> Path | None:
    """The file that counts kills in this process's cgroup and those below it; None if there is none."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            file = cgroups / path.lstrip("/") / "memory.events"
        elif "memory" in controllers.split(","):
            file = cgroups / "memory" / path.lstrip("/") / "memory.oom_control"
        else:
            continue
        if file.exists():
            return file
    return None
