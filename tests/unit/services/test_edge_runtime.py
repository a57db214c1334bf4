"""State folder, listener, loops and health of a supervisor."""

from __future__ import annotations

import asyncio
import socket
import stat
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest
from fastapi import FastAPI
from support.clocks.loops import run_skipping
from support.clocks.waits import until

from flyball.contracts.clock import SystemClock
from flyball.contracts.errors import ConfigurationError, PortInUse, StateVersionMismatch, Unreachable
from services.api import lifespan
from services.runtime.claim import bind_listener, url_of
from services.runtime.health import Health
from services.runtime.loops import MAX_RESTARTS_IN_WINDOW, CrashBudget, LoopThread
from services.runtime.state_dir import SupervisorRecord, SupervisorStateDir
from services.runtime.wakeup import LocalWakeup


class SteppedClock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def wall_s(self) -> float:
        return self.now_s

    def monotonic_s(self) -> float:
        return self.now_s


def test_a_new_folder_is_private_and_versioned(tmp_path: Path) -> None:
    folder = SupervisorStateDir(tmp_path / "a" / "b")
    folder.open(["sensor"])
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
    assert (folder.path / "VERSION").read_text() == "1\n"
    folder.close()


def test_a_folder_of_another_version_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "VERSION").write_text("7\n")
    with pytest.raises(StateVersionMismatch, match="version '7'") as caught:
        SupervisorStateDir(tmp_path).open(["sensor"])
    assert caught.value.hint
    assert (tmp_path / "VERSION").read_text() == "7\n"


def test_one_process_per_part_and_folder(tmp_path: Path) -> None:
    first, second, other_part = SupervisorStateDir(tmp_path), SupervisorStateDir(tmp_path), SupervisorStateDir(tmp_path)
    first.open(["sensor", "api"])
    with pytest.raises(ConfigurationError, match=r"pid \d+.*runs the api"):
        second.open(["api"])
    other_part.open(["controller"])
    first.close()
    second.open(["api"])
    second.close()
    other_part.close()


@pytest.mark.processes
def test_the_lock_ends_with_its_holder(tmp_path: Path) -> None:
    script = (
        "import os, pathlib, sys; from services.runtime.state_dir import SupervisorStateDir;"
        "SupervisorStateDir(pathlib.Path(sys.argv[1])).open(['api']); os.kill(os.getpid(), 9)"
    )
    assert subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=False, timeout=120).returncode == -9
    folder = SupervisorStateDir(tmp_path)
    folder.open(["api"])
    folder.close()


def test_the_token_is_created_once_and_private(tmp_path: Path) -> None:
    folders = [SupervisorStateDir(tmp_path) for _ in range(8)]
    with ThreadPoolExecutor(8) as pool:
        tokens = set(pool.map(lambda folder: folder.token(), folders))
    assert len(tokens) == 1
    assert len(tokens.pop()) >= 32
    assert stat.S_IMODE((tmp_path / "token").stat().st_mode) == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["token"]


def test_a_token_that_others_can_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("a" * 40)
    (tmp_path / "token").chmod(0o644)
    with pytest.raises(ConfigurationError, match="can be read by others"):
        SupervisorStateDir(tmp_path).token()


def test_an_existing_private_file_is_kept(tmp_path: Path) -> None:
    folder = SupervisorStateDir(tmp_path)
    folder.make_private("flyball.sqlite")
    assert stat.S_IMODE((tmp_path / "flyball.sqlite").stat().st_mode) == 0o600
    (tmp_path / "flyball.sqlite").write_text("data")
    folder.make_private("flyball.sqlite")
    assert (tmp_path / "flyball.sqlite").read_text() == "data"


def test_a_folder_that_cannot_be_created_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match="Cannot use") as caught:
        SupervisorStateDir(tmp_path / "file" / "folder").open(["api"])
    assert "--state-dir" in caught.value.hint


def test_the_record_comes_and_goes(tmp_path: Path) -> None:
    folder = SupervisorStateDir(tmp_path)
    folder.write_record("supervisor", SupervisorRecord(url="http://127.0.0.1:1", pid=2))
    data = (tmp_path / "supervisor.json").read_bytes()
    assert msgspec.json.decode(data) == {"url": "http://127.0.0.1:1", "pid": 2, "host": "", "elsewhere": ""}
    folder.remove_record("supervisor")
    folder.remove_record("supervisor")
    assert not list(tmp_path.iterdir())


def test_a_taken_port_is_named() -> None:
    first = bind_listener("127.0.0.1", 0)
    port = first.getsockname()[1]
    with pytest.raises(PortInUse, match=f"Port {port} on 127.0.0.1 is in use"):
        bind_listener("127.0.0.1", port)
    assert url_of(first, tls=False) == f"http://127.0.0.1:{port}"
    assert url_of(first, tls=True) == f"https://127.0.0.1:{port}"
    first.close()


@pytest.mark.parametrize("host", ["no-such-host.invalid", "203.0.113.7"])
def test_an_address_that_is_not_ours_is_a_clear_error(host: str) -> None:
    with pytest.raises(ConfigurationError, match="Cannot listen") as caught:
        bind_listener(host, 0)
    assert "--host" in caught.value.hint


def test_an_ipv6_url_has_brackets() -> None:
    if not socket.has_ipv6:
        pytest.skip("this machine has no IPv6")
    try:
        listener = bind_listener("::1", 0)
    except ConfigurationError:
        pytest.skip("this machine has no IPv6 loopback")
    assert url_of(listener, tls=False).startswith("http://[::1]:")
    listener.close()


def test_a_crashed_loop_restarts() -> None:
    runs: list[int] = []
    restarted: list[str] = []
    done = threading.Event()

    def body(stop: threading.Event) -> None:
        runs.append(1)
        if len(runs) == 1:
            raise RuntimeError("first")
        done.set()
        stop.wait(60.0)

    loop = LoopThread("test", body, SystemClock(), on_restart=restarted.append, pause_s=0.0)
    loop.start()
    assert done.wait(60.0)
    loop.request_stop()
    assert loop.join(60.0)
    assert restarted == ["test"]
    assert not loop.failed


def test_what_keeps_crashing_is_given_up_and_a_rare_crash_is_not() -> None:
    clock = SteppedClock()
    budget = CrashBudget(clock)
    assert [budget.allows_another() for _ in range(MAX_RESTARTS_IN_WINDOW + 1)] == [True] * MAX_RESTARTS_IN_WINDOW + [
        False
    ]
    patient = CrashBudget(clock)
    for _ in range(50):
        assert patient.allows_another()
        clock.now_s += 30.0


def test_health_names_what_is_wrong() -> None:
    def away() -> str:
        raise Unreachable("The database does not answer.")

    clock = SteppedClock()
    health = Health(loops=[], checks={"database": away, "leader": lambda: ""}, clock=clock, patience_s=60.0)
    verdict = health.ready()
    assert not verdict.ok
    assert verdict.checks == {"database": "The database does not answer.", "leader": "ok"}
    assert health.live().ok
    health.give_up("detector")
    assert not health.live().ok
    assert health.live().checks == {"detector": "given up after repeated crashes"}


class SlowCheck:
    """Hangs until it may answer."""

    def __init__(self) -> None:
        self.asked, self.may_answer = threading.Semaphore(0), threading.Event()

    def __call__(self) -> str:
        self.asked.release()
        self.may_answer.wait(60.0)
        return ""


def test_requests_do_not_wait_for_a_check_that_hangs() -> None:
    slow = SlowCheck()
    health = Health(loops=[], checks={"database": slow}, clock=SystemClock(), patience_s=0.01)
    with ThreadPoolExecutor(2) as pool:
        for answer in [pool.submit(health.ready) for _ in range(2)]:
            assert answer.result(60.0).checks == {"database": "no answer for 0.01 s"}
    until(lambda: slow.asked.acquire(blocking=False))
    assert not slow.asked.acquire(blocking=False), "the check runs once"
    slow.may_answer.set()
    until(lambda: health.ready().ok)


def test_a_request_that_waits_gets_the_verdict_of_a_slow_check() -> None:
    slow = SlowCheck()
    health = Health(loops=[], checks={"database": slow}, clock=SystemClock(), patience_s=60.0)
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(health.ready)
        assert slow.asked.acquire(timeout=60.0)
        slow.may_answer.set()
        assert waits.result(60.0).ok


def test_a_task_that_keeps_crashing_is_given_up_and_the_others_run_on() -> None:
    given_up: list[str] = []

    async def crash(_new_events: object) -> None:
        raise RuntimeError("a bug")

    async def live() -> bool:
        reported, runs = asyncio.Event(), asyncio.Event()

        async def run(_new_events: object) -> None:
            runs.set()
            await asyncio.Event().wait()

        def on_given_up(name: str) -> None:
            given_up.append(name)
            reported.set()

        background = {"detector": crash, "committed": run}
        async with lifespan.running(FastAPI(), LocalWakeup(), background, SteppedClock(), on_given_up):
            await asyncio.wait_for(reported.wait(), 60.0)
            return runs.is_set()

    assert run_skipping(live())
    assert given_up == ["detector"]
