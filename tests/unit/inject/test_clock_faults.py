"""A wall clock that jumps, in a process that was started with one of its own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from flyball.contracts.clock import SystemClock
from flyball.contracts.errors import ConfigurationError, NotFound, UsageError
from simulator.inject.kinds import clocks
from simulator.inject.kinds.catalog import KINDS
from simulator.inject.kinds.kind import FaultSite
from simulator.inject.processes import LiveProcess, look_at

pytestmark = pytest.mark.processes

TELL = """
import datetime, json, sys, threading, time
for line in sys.stdin:
    began = time.monotonic()
    time.sleep(0.01)
    threading.Event().wait(0.01)
    waited = time.monotonic() - began
    print(json.dumps([time.time(), datetime.datetime.now().timestamp(), time.monotonic(), waited]), flush=True)
"""
KIND = KINDS["clock-jump"]


class Clocked:
    """A process with a wall clock of its own."""

    def __init__(self, folder: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-S", "-c", TELL],
            env={**os.environ, **clocks.make_clock(folder)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def differences_s(self) -> list[int]:
        """Of its two ways to read the wall clock, and of its monotonic clock, to this process's."""
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        wall_s, date_s, monotonic_s, waited_s = json.loads(self.process.stdout.readline())
        assert waited_s < 60.0, "what waits for a duration waits as long as ever"
        now_s = SystemClock().wall_s()
        return [
            round((theirs - ours) / 60)
            for theirs, ours in zip((wall_s, date_s, monotonic_s), (now_s, now_s, time.monotonic()), strict=True)
        ]


@pytest.fixture
def clocked(tmp_path: Path) -> Iterator[Clocked]:
    if shutil.which("cc") is None:
        pytest.skip("there is no C compiler")
    made = Clocked(tmp_path / "clock")
    with made.process:
        yield made
        made.process.kill()


@pytest.fixture
def daemon(clocked: Clocked, monkeypatch: pytest.MonkeyPatch) -> LiveProcess:
    clocked.differences_s()  # by then it has its own environment
    found = look_at(clocked.process.pid)
    assert found is not None
    monkeypatch.setattr(clocks.ClockJump, "process", lambda *_: found)
    return found


def site(**options: str) -> FaultSite:
    return FaultSite(None, SystemClock(), "a1", host_id="host-a", values=KIND.values(options))  # type: ignore[arg-type]


@pytest.mark.parametrize("minutes", [60, -60])
def test_the_wall_clock_jumps_and_back_and_durations_stay(clocked: Clocked, daemon: LiveProcess, minutes: int) -> None:
    assert KIND.lacks(site()) == "" and clocked.differences_s() == [0, 0, 0]
    plan = json.loads(json.dumps(KIND.plan(site(seconds=f"{60 * minutes}.75"))))
    KIND.inject(plan)
    assert clocked.differences_s() == [minutes, minutes, 0]
    with pytest.raises(NotFound, match="off already"):
        KIND.plan(site())
    for _ in range(2):
        KIND.undo(plan)
        assert clocked.differences_s() == [0, 0, 0]


def test_a_clock_that_somebody_set_since_is_left_alone(clocked: Clocked, daemon: LiveProcess) -> None:
    plan = KIND.plan(site(seconds="3600"))
    KIND.inject(plan)
    KIND.inject(plan | {"offset_ns": 7_200 * clocks.NS})
    KIND.undo(plan)
    assert clocked.differences_s() == [120, 120, 0]


def test_what_cannot_be_done_is_said(tmp_path: Path, daemon: LiveProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    for seconds in ("0", "1e12"):
        with pytest.raises(UsageError, match="seconds must not be 0"):
            KIND.plan(site(seconds=seconds))
    monkeypatch.setattr(clocks.ClockJump, "process", lambda *_: look_at(os.getpid()))
    assert "has no clock of its own" in KIND.lacks(site())
    monkeypatch.setattr(clocks.ClockJump, "process", lambda *_: None)
    with pytest.raises(NotFound, match="does not run"):
        KIND.plan(site())
    monkeypatch.setattr(clocks.shutil, "which", lambda _: None)
    with pytest.raises(ConfigurationError, match="no C compiler"):
        clocks.make_clock(tmp_path / "other")
    for name in ("a folder", "a:folder"):
        with pytest.raises(UsageError, match="blank or colon"):
            clocks.make_clock(tmp_path / name)


def test_a_clock_is_built_when_it_has_to_be_and_keeps_what_is_loaded_already(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built, library = [], tmp_path / clocks.LIBRARY
    monkeypatch.setattr(clocks, "_build", lambda path: built.append(path) or path.touch())
    preload = f"/lib/one.so /old/{clocks.LIBRARY}:/lib/two.so"
    loaded = clocks.make_clock(tmp_path, preload)["LD_PRELOAD"]
    assert loaded == f"{library}:/lib/one.so:/lib/two.so" and built == [library]
    process = LiveProcess(pid=1, start_ticks=1, session=1, argv=())
    environment = {"LD_PRELOAD": f"/lib/one.so:{library}", clocks.WALL_CLOCK: "file"}
    monkeypatch.setattr(clocks, "environment_of", lambda _: environment)
    assert clocks._clock_of(process) == "file"
    clocks.make_clock(tmp_path)
    assert built == [library]
    os.utime(library, (1.0, 1.0))
    clocks.make_clock(tmp_path)
    assert built == [library, library]


def test_a_compiler_that_does_not_end_is_an_error_with_a_next_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = tmp_path / "cc"
    compiler.write_text("#!/bin/sh\nexec sleep 60\n")
    compiler.chmod(0o700)
    monkeypatch.setattr(clocks.shutil, "which", lambda _: str(compiler))
    monkeypatch.setattr(clocks, "BUILD_TIMEOUT_S", 0.01)
    with pytest.raises(ConfigurationError, match="not built within"):
        clocks.make_clock(tmp_path / "clock")
