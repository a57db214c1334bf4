"""What a daemon sees of processes from outside, tested on real ones."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from flyball.contracts.cluster import DUE_SLEEP, Activity
from host_daemon.kernel.activity import ActivityWatch, Seen, StalledWorker

pytestmark = pytest.mark.processes


DEADLINE_S = 40.0
KEY = ("job", 1, 0)

BURNS = "while True: pass"
SLEEPS = "import time; time.sleep(600)"
PLAIN_SLEEP = "ctypes.CDLL(None).nanosleep((ctypes.c_long * 2)(100, 0), None)"
POLLS = "import time\nwhile True: time.sleep(0.1)"
WAITS = "import threading; lock = threading.Lock(); lock.acquire(); lock.acquire()"
READS = "input()"
BURNS_IN_A_THREAD = "import threading; threading.Thread(target=exec, args=('while True: pass',)).start()"
CHILD_BURNS = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'while True: pass'])"
ORPHAN_BURNS = """
import subprocess, sys, time
subprocess.run(['sh', '-c', sys.executable + ' -c "while True: pass" &'])
time.sleep(600)
"""
WRITES = """
import os, time
path = os.environ['TARGET']
block = os.urandom(1 << 20)
while True:
    with open(path, 'wb') as file: file.write(block)
    time.sleep(2.0)
"""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[str], int]]:
    """Runs Python code in its own session, like a worker. Returns the pid."""
    started: list[subprocess.Popen[bytes]] = []

    def run(code: str) -> int:
        process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.PIPE,
            start_new_session=True,
            env={**os.environ, "TARGET": str(tmp_path / "file")},
        )
        started.append(process)
        return process.pid

    yield run
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if process.stdin is not None:
            process.stdin.close()


def watch_for(pid: int, wanted: Activity, *, at_least_s: float = 0.0) -> Seen:
    """Look until the activity is seen, up to a deadline."""
    watch = ActivityWatch(lambda pids: False)
    deadline = time.monotonic() + DEADLINE_S
    seen = {}
    while time.monotonic() < deadline:
        now_s = time.monotonic()
        seen = watch.look([StalledWorker(KEY, pid)], now_s)
        if seen[KEY].activity is wanted and now_s - seen[KEY].since_s >= at_least_s:
            return seen[KEY]
        time.sleep(0.2)
    raise AssertionError(f"never {wanted!r} for {at_least_s} s, at last {seen}")


def test_any_kind_of_work_is_active(start: Callable[[str], int]) -> None:
    codes = {"burns": BURNS, "thread": BURNS_IN_A_THREAD, "child": CHILD_BURNS, "orphan": ORPHAN_BURNS}
    codes |= {"writes": WRITES, "polls": POLLS}
    standing = [StalledWorker((name, 1, 0), start(code)) for name, code in codes.items()]
    watch = ActivityWatch(lambda pids: False)
    began = time.monotonic()
    looks = []
    while time.monotonic() < began + 12.0:
        looks.append(watch.look(standing, time.monotonic()))
        time.sleep(0.4)
    for worker in standing:
        seen = [look[worker.key].activity for look in looks]
        assert Activity.ACTIVE in seen and seen[-1] is Activity.ACTIVE, worker
        assert Activity.IDLE not in seen[len(seen) // 2 :], worker


@pytest.mark.parametrize(("code", "place"), [(SLEEPS, "clock_nanosleep"), (WAITS, "futex")])
def test_an_inactive_process_is_idle_with_its_system_call(start: Callable[[str], int], code: str, place: str) -> None:
    seen = watch_for(start(code), Activity.IDLE, at_least_s=5.0)
    assert seen.place == place


def test_a_sleep_that_ends_soon_is_known_as_such(start: Callable[[str], int]) -> None:
    """What is left of it is in the call's arguments."""
    codes = [f"import ctypes, time; {sleep}" for sleep in ("time.sleep(100)", "time.sleep(600)", PLAIN_SLEEP)]
    standing = [StalledWorker(("job", 1, rank), start(code)) for rank, code in enumerate(codes)]

    async def places() -> list[str]:
        watch = ActivityWatch(lambda pids: False)
        async with asyncio.timeout(DEADLINE_S):
            while True:
                seen = await watch.watch(standing, time.monotonic())
                if all(found.activity is Activity.IDLE for found in seen.values()):
                    return [seen[worker.key].place for worker in standing]
                await asyncio.sleep(0.2)

    assert asyncio.run(places()) == [DUE_SLEEP, "clock_nanosleep", DUE_SLEEP]


def test_one_short_sleep_after_the_other_is_no_sleep_that_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits for something that may never come."""
    watch, worker = ActivityWatch(lambda pids: False), StalledWorker(KEY, os.getpid())
    monkeypatch.setattr(watch, "look", lambda _standing, _now_s: {KEY: Seen(Activity.IDLE, 0.0, "nanosleep")})
    monkeypatch.setattr("host_daemon.kernel.activity.sleeps_for_s", lambda _pid: 3.0)
    places = [asyncio.run(watch.watch([worker], now_s))[KEY].place for now_s in (10.0, 12.0, 15.0, 18.0, 30.0)]
    assert places == [DUE_SLEEP] * 3 + ["nanosleep"] * 2


def test_waiting_for_typed_input_is_not_idle(start: Callable[[str], int]) -> None:
    watch_for(start(READS), Activity.READS_INPUT)


def test_a_stopped_process_is_seen_at_once_with_its_start_time(start: Callable[[str], int]) -> None:
    pid = start(BURNS)
    os.kill(pid, signal.SIGSTOP)
    began = time.monotonic()
    watch_for(pid, Activity.STOPPED, at_least_s=1.0)
    assert time.monotonic() - began >= 1.0
    os.kill(pid, signal.SIGCONT)
    watch_for(pid, Activity.ACTIVE)


def test_a_process_with_a_busy_or_unknown_gpu_is_not_idle(start: Callable[[str], int]) -> None:
    pid = start(SLEEPS)
    watch_for(pid, Activity.IDLE)  # a busy machine is still starting it
    for answer, expected in ((True, Activity.ACTIVE), (None, Activity.UNKNOWN)):
        watch = ActivityWatch(lambda pids, answer=answer: answer)  # type: ignore[misc]
        seen = [watch.look([StalledWorker(KEY, pid)], at)[KEY].activity for at in (100.0, 105.0, 110.0)]
        assert seen[1:] == [expected] * 2


def test_a_process_that_is_gone_is_unknown(start: Callable[[str], int]) -> None:
    pid = start(SLEEPS)
    os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + DEADLINE_S
    while os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None and time.monotonic() < deadline:
        time.sleep(0.01)
    os.waitpid(pid, 0)
    assert ActivityWatch(lambda pids: False).look([StalledWorker(KEY, pid)], 1.0)[KEY].activity is Activity.UNKNOWN
