"""A thread whose work can wait uses the time that the process's other threads leave, within bounds."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from services.sensor.reports.report_writer import MAX_SHARE, MIN_SHARE, SpareTime, claimed_s


class Machine:
    """Clocks of a process in which one thread works in turns, while the others constantly use a share of a core."""

    def __init__(self, others: float) -> None:
        self.others = others
        self.wall_s = self.thread_s = self.others_s = 0.0

    def spare_time(self) -> SpareTime:
        return SpareTime(
            monotonic_s=lambda: self.wall_s,
            process_s=lambda: self.others_s + self.thread_s,
            thread_s=lambda: self.thread_s,
        )

    def work(self, cpu_s: float, wall_s: float) -> None:
        self.thread_s += cpu_s
        self.rest(wall_s)

    def rest(self, wall_s: float) -> None:
        self.wall_s += wall_s
        self.others_s += self.others * wall_s

    def share(self, turns: int = 50) -> float:
        """The share of a core that the thread gets in the long run."""
        spare = self.spare_time()
        for _ in range(turns):
            spare.begin()
            self.work(cpu_s=0.01, wall_s=0.015)
            self.rest(spare.rest_s())
        return self.thread_s / self.wall_s


@pytest.mark.parametrize(
    ("others", "share"),
    [(0.0, MAX_SHARE), (0.6, MAX_SHARE), (0.75, MAX_SHARE), (0.9, 0.05), (0.99, MIN_SHARE), (1.9, MIN_SHARE)],
)
def test_its_share_is_a_half_of_what_is_left_within_bounds(others: float, share: float) -> None:
    assert Machine(others).share() == pytest.approx(share)


def test_an_idle_thread_does_not_save_up_time() -> None:
    machine = Machine(others=0.5)
    spare = machine.spare_time()
    machine.rest(100.0)
    spare.begin()
    machine.work(cpu_s=0.01, wall_s=0.02)
    assert spare.rest_s() == pytest.approx(0.01 / MAX_SHARE - 0.02)


def test_a_thread_that_waited_long_within_its_work_does_not_rest() -> None:
    machine = Machine(others=0.5)
    spare = machine.spare_time()
    spare.begin()
    machine.work(cpu_s=0.01, wall_s=10.0)  # for the database
    assert spare.rest_s() == 0.0


def test_a_clock_that_stands_still_is_no_error() -> None:
    spare = Machine(others=0.0).spare_time()
    spare.begin()
    assert spare.rest_s() == 0.0


@pytest.mark.processes
def test_waiting_for_a_core_counts_like_using_it() -> None:
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})  # the process below inherits it
    try:
        with subprocess.Popen(
            [sys.executable, "-c", "print(flush=True)\nwhile True: pass"], stdout=subprocess.PIPE
        ) as rival:
            assert rival.stdout is not None
            rival.stdout.readline()
            began_s, claimed_before_s, used_before_s = time.monotonic(), claimed_s(), time.process_time()
            while time.process_time() - used_before_s < 0.1:
                pass
            elapsed_s, grown_s = time.monotonic() - began_s, claimed_s() - claimed_before_s
            rival.kill()
    finally:
        os.sched_setaffinity(0, allowed)
    assert grown_s >= 0.8 * elapsed_s, "though it used the core for half of that time, or less"
