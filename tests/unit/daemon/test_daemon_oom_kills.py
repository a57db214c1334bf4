"""Kills for lack of memory, by the kernel's log and the cgroup's counter."""

from __future__ import annotations

import asyncio
from pathlib import Path

from flyball.contracts.clock import SystemClock
from host_daemon.kernel.oom_kills import OomKills


class SetClock(SystemClock):
    now_s = 10_000.0

    def monotonic_s(self) -> float:  # type: ignore[override]
        return self.now_s


class Kernel:
    """A kernel's log, and a cgroup of version 2 with one kill so far."""

    def __init__(self, root: Path) -> None:
        self.log, self.counter = root / "kmsg", root / "cgroup" / "job" / "memory.events"
        self.counter.parent.mkdir(parents=True)
        (root / "membership").write_text("0::/job\n")
        self.count(1)
        self.clock = SetClock()
        self.kills = OomKills(self.clock, kernel_log=self.log, cgroups=root / "cgroup", membership=root / "membership")

    def count(self, kills: int) -> None:
        self.counter.write_text(f"low 0\nmax 9\noom {kills}\noom_kill {kills}\n")

    def line_about(self, pid: int) -> str:
        return asyncio.run(self.kills.line_about(pid))

    def look(self) -> None:
        asyncio.run(self.kills.look())


def test_each_count_of_the_cgroups_counter_explains_one_kill(tmp_path: Path) -> None:
    kernel = Kernel(tmp_path)
    assert kernel.line_about(629) == ""
    kernel.count(3)
    assert [kernel.line_about(629) for _ in range(3)] == [f"oom_kill 3 in {kernel.counter}"] * 2 + [""]


def test_a_kill_counted_long_ago_explains_no_later_end(tmp_path: Path) -> None:
    kernel = Kernel(tmp_path)
    kernel.count(2)  # a data loader
    kernel.look()
    kernel.clock.now_s += 3_600.0
    kernel.look()
    assert kernel.line_about(629) == ""  # somebody's `kill -9`
    kernel.count(3)
    kernel.look()
    kernel.clock.now_s += 2.0
    kernel.look()
    assert kernel.line_about(630) == f"oom_kill 3 in {kernel.counter}"


def test_a_counter_that_cannot_be_read_for_a_while_counts_nothing_twice(tmp_path: Path) -> None:
    kernel = Kernel(tmp_path)
    kernel.counter.rename(tmp_path / "away")
    kernel.look()
    (tmp_path / "away").rename(kernel.counter)
    assert kernel.line_about(629) == ""


def test_many_ends_at_once_are_looked_up_one_at_a_time(tmp_path: Path) -> None:
    kernel = Kernel(tmp_path)
    kernel.count(4)

    async def all_of_them() -> list[str]:
        return await asyncio.gather(*(kernel.kills.line_about(pid) for pid in range(1, 9)))

    assert sorted(map(bool, asyncio.run(all_of_them()))) == [False] * 5 + [True] * 3


def test_a_recent_line_of_the_kernels_log_names_its_process(tmp_path: Path) -> None:
    kernel = Kernel(tmp_path)
    text = "Memory cgroup out of memory: Killed process {} (python) total-vm:14119556kB, anon-rss:6538204kB"
    for age_s, pid in ((3_600.0, 629), (1.0, 630)):
        at_us = int((kernel.clock.now_s - age_s) * 1e6)
        kernel.log.write_text(f"3,1,{at_us},-;{text.format(pid)}\n SUBSYSTEM=memory\n")
        assert kernel.line_about(pid) == (text.format(pid) if pid == 630 else "")
    assert kernel.line_about(7) == ""


def test_the_counter_of_a_cgroup_of_version_1(tmp_path: Path) -> None:
    counter, membership = tmp_path / "memory" / "box" / "memory.oom_control", tmp_path / "membership"
    counter.parent.mkdir(parents=True)
    membership.write_text("5:cpu:/\n4:memory:/box\n")
    counter.write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 0\n")
    kills = OomKills(SystemClock(), kernel_log=tmp_path / "none", cgroups=tmp_path, membership=membership)
    counter.write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 1\n")
    assert asyncio.run(kills.line_about(7)) == f"oom_kill 1 in {counter}"
