"""Tells how much of the machine the run used, and how much others did; keeps cores busy beside it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import msgspec
import psutil

OURS = ("mariadbd", "mysqld", "redis-server")  # servers that work for the run, whoever started them


class Use(msgspec.Struct, frozen=True):
    """Processor seconds so far."""

    at_s: float
    all_s: float
    own_s: Mapping[int, float]  # by process: of this one, those it started, and the servers

    @classmethod
    def now(cls) -> Use:
        times = psutil.cpu_times()
        own = {}
        for process in [psutil.Process(), *psutil.Process().children(recursive=True), *_servers()]:
            try:
                used = process.cpu_times()
            except psutil.NoSuchProcess:
                continue
            own[process.pid] = used.user + used.system
            if process.pid == os.getpid():  # with those that it has waited for
                own[process.pid] += used.children_user + used.children_system
        return cls(time.monotonic(), sum(times) - times.idle - times.iowait - times.guest, own)

    def others_since(self, before: Use) -> float:
        """Return how many cores others kept busy meanwhile."""
        own_s = sum(used_s - before.own_s.get(pid, 0.0) for pid, used_s in self.own_s.items())
        return max(0.0, (self.all_s - before.all_s - own_s) / (self.at_s - before.at_s))


def _servers() -> list[psutil.Process]:
    return [process for process in psutil.process_iter(["name"]) if process.info["name"] in OURS]


@contextmanager
def busy_beside(count: int) -> Iterator[None]:
    """Keep `count` processes running that never rest: a load average of that much."""
    command = [sys.executable, "-c", "while True: pass"]
    rivals = [subprocess.Popen(command) for _ in range(count)]
    try:
        yield
    finally:
        for rival in rivals:
            rival.kill()
            rival.wait()


def described() -> dict[str, object]:
    return {"cores": os.cpu_count(), "load": [round(value, 2) for value in os.getloadavg()]}
