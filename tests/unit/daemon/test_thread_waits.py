"""Whether anything can end the wait of a process: on real ones, and on what the kernel shows of more."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
from support.clocks.waits import until

from flyball.contracts.reports.rank_stands import RankStand, Stand
from host_daemon.kernel.activity import StalledWorker
from host_daemon.kernel.processes import read_stat
from host_daemon.kernel.thread_waits import (
    ThreadWait,
    awaits,
    may_get_a_signal,
    proof,
    stands_a_signal,
    threads_of,
)
from host_daemon.workers.stacks import StackSource
from host_daemon.workers.stand_watch import StandWatch

MAIN = ThreadWait(1, "python", "S", "futex", endless=True, has_timeout=False, switches=7, origin="libpython3.11.so.1.0")
GLOO = ThreadWait(2, "gloo_tcp_loop", "R", "epoll_wait", endless=False, has_timeout=False, switches=0, origin="")
IDLE = ThreadWait(
    3, "pt_gloo_runloop", "S", "futex", endless=True, has_timeout=False, switches=8, origin="libstdc++.so.6.0.30"
)
SLEEPS = ThreadWait(
    4, "python", "S", "futex", endless=False, has_timeout=True, switches=9, origin="libpython3.11.so.1.0"
)
READS = ThreadWait(5, "python", "S", "recvfrom", endless=False, has_timeout=False, switches=0, origin="")

LOCK = "import threading; lock = threading.Lock(); lock.acquire(); "
ENDLESS = {
    "a lock": LOCK + "lock.acquire()",
    "an event": "import threading; threading.Event().wait()",
    "a queue": "import queue; queue.Queue().get()",
    "a thread that waits for it": LOCK + "threading.Thread(target=lock.acquire).start(); lock.acquire()",
    "two locks in the wrong order": """
import threading
a, b, both = threading.Lock(), threading.Lock(), threading.Barrier(2)
def take(first, second):
    with first:
        both.wait()
        with second: pass
threading.Thread(target=take, args=(a, b)).start()
take(b, a)
""",
}
MAY_END = {
    "a timer's thread": LOCK + "threading.Timer(600, lock.release).start(); lock.acquire()",
    "a wait with a timeout": LOCK + "lock.acquire(timeout=600)",
    "a thread that reads": LOCK
    + "import os; threading.Thread(target=os.read, args=(os.pipe()[0], 1)).start(); lock.acquire()",
    "another process": "import multiprocessing; multiprocessing.Event().wait()",
    "an alarm": LOCK + "import signal; signal.signal(signal.SIGALRM, lambda *_: lock.release()); lock.acquire()",
    "a child's end": LOCK + "import signal; signal.signal(signal.SIGCHLD, lambda *_: lock.release()); lock.acquire()",
    "a signal from outside": LOCK + "import signal; signal.signal(signal.SIGUSR1, lambda *_: None); lock.acquire()",
    "a sleep": "import time; time.sleep(600)",
    "a wait of C code": "import torch, torch.distributed as d; d.TCPStore('127.0.0.1', 0, 2, True)",
}


@pytest.fixture
def start() -> Iterator[Callable[[str], int]]:
    """Runs Python code, and returns its pid once its main thread waits."""
    started: list[subprocess.Popen[bytes]] = []

    def run(code: str) -> int:
        process = subprocess.Popen([sys.executable, "-c", f"print(flush=True)\n{code}"], stdout=subprocess.PIPE)
        started.append(process)
        assert process.stdout is not None
        process.stdout.readline()
        return process.pid

    yield run
    for process in started:
        process.kill()
        process.wait()


def looked(pid: int) -> str:
    before = threads_of(pid)
    return "" if may_get_a_signal(pid) else proof(threads_of(pid), before)


@pytest.mark.processes
@pytest.mark.parametrize("name", ENDLESS)
def test_a_wait_that_nothing_can_end_is_proved(start: Callable[[str], int], name: str) -> None:
    pid = start(ENDLESS[name])
    until(lambda: looked(pid), timeout_s=30.0)
    assert looked(pid).startswith("its main thread waits for a lock without a timeout")


@pytest.mark.processes
@pytest.mark.parametrize("name", MAY_END)
def test_a_wait_that_may_end_is_never_proved(start: Callable[[str], int], name: str) -> None:
    pid = start(MAY_END[name])
    for _ in range(200):  # from its first moment on
        assert not looked(pid)
    until(lambda: threads_of(pid)[0].state == "S", timeout_s=30.0)
    for _ in range(50):
        assert not looked(pid)


@pytest.mark.processes
def test_what_another_thread_waits_for_is_told(start: Callable[[str], int]) -> None:
    pid = start(MAY_END["a thread that reads"])
    until(lambda: awaits(threads_of(pid)) == "read", timeout_s=30.0)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("code", "stands"),
    [
        ("import time; time.sleep(600)", True),
        (ENDLESS["a lock"], True),
        ("while True: pass", True),
        ("import signal; signal.pause()", False),  # would return
        ("import ctypes; ctypes.CDLL(None).sleep(600)", False),  # C code that may take EINTR for an end
    ],
)
def test_only_a_wait_that_a_signal_does_not_end_is_disturbed(
    start: Callable[[str], int], code: str, stands: bool
) -> None:
    pid = start(code)
    until(lambda: threads_of(pid)[0].call or "while" in code, timeout_s=30.0)
    until(lambda: stands_a_signal(pid) is stands, timeout_s=30.0)


@pytest.mark.processes
def test_a_watch_tells_where_a_worker_stands_and_forgets_it_once_it_has_moved(
    start: Callable[[str], int], tmp_path: Path
) -> None:
    pid, key = start(ENDLESS["a lock"]), ("job", 1, 3)
    stat = read_stat(pid)
    assert stat is not None
    source = StackSource(3, pid, stat.start_ticks, str(tmp_path / "beacon"))

    async def run() -> tuple[RankStand, Mapping[tuple[str, int, int], RankStand]]:
        watch, clock = StandWatch(lambda: {key: source}), asyncio.get_running_loop().time
        stand, until_s = None, clock() + 30.0
        while stand is None or not stand.proof or stand.kind == Stand.CODE:
            stand = (await watch.watch([StalledWorker(key, pid)], clock())).get(key)
            assert clock() < until_s, stand
            await asyncio.sleep(0.05)
        moved = await watch.watch([], clock())
        await watch.close()
        return stand, moved

    stand, moved = asyncio.run(run())
    assert (stand.rank, stand.kind, moved) == (3, Stand.LOCK, {}), stand
    assert stand.proof.startswith("its main thread waits for a lock without a timeout")


@pytest.mark.processes
def test_a_process_that_is_gone_proves_nothing(start: Callable[[str], int]) -> None:
    pid = start("")
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    with pytest.raises((OSError, ValueError, IndexError)):
        threads_of(pid)


def test_threads_of_torch_that_are_idle_or_poll_end_no_wait() -> None:
    found = proof((MAIN, GLOO, IDLE), (MAIN, GLOO, IDLE))
    assert found == "its main thread waits for a lock without a timeout, and none of its 2 other threads can release it"
    assert "no other thread" in proof((MAIN,), (MAIN,))


@pytest.mark.parametrize("other", [SLEEPS, READS, IDLE._replace(state="R"), IDLE._replace(endless=False)])
def test_any_other_thread_may_end_it(other: ThreadWait) -> None:
    assert not proof((MAIN, other), (MAIN, other))


@pytest.mark.parametrize(
    "main",
    [
        MAIN._replace(origin="libtorch_cpu.so"),
        MAIN._replace(origin=""),
        MAIN._replace(endless=False),
        MAIN._replace(state="R"),
        MAIN._replace(state="T"),
    ],
)
def test_only_a_lock_of_pythons_is_proved(main: ThreadWait) -> None:
    assert not proof((main,), (main,))


def test_who_moved_meanwhile_proves_nothing() -> None:
    assert not proof((MAIN, IDLE), (MAIN, IDLE._replace(switches=99)))
    assert not proof((MAIN, IDLE), (MAIN,))


def test_a_main_thread_that_waits_for_no_lock_awaits_nothing_by_another_thread() -> None:
    assert awaits((MAIN, GLOO, SLEEPS, READS)) == "recvfrom"
    assert awaits((MAIN, GLOO, IDLE, SLEEPS)) == ""
    assert awaits((READS, READS)) == ""
    assert awaits((MAIN._replace(endless=False, has_timeout=True),)) == "a timeout"
    assert awaits((MAIN, READS._replace(call="", state="R"))) == "running"
