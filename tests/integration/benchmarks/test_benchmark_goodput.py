"""The comparison under faults runs on both sides with real launchers, its sums are whole, and nothing of it is left
behind. No time is judged."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from math import fsum
from pathlib import Path

import pytest
from support.commands.own_processes import processes_of

BENCHMARK = Path(__file__).parents[3] / "benchmarks" / "goodput_under_faults.py"
SMALL = ["--width", "64", "--layers", "2", "--step-floor-s", "0.05", "--save-every", "20", "--repeats", "1"]
# The time after the fault is long enough for a launcher that is held up to notice it, and too short for another one.
ONE_KILL = ["--faults", "kill", "--gap-s", "8", "8.5", "--minutes", "0.39"]
PATIENT = ["--hang-timeout-s", "120"]  # no slow start on a busy machine counts as a hang
DEADLINE_S = 300.0


@pytest.fixture
def folder() -> Iterator[Path]:
    """A Unix socket's path is limited, so tmp_path would be too long."""
    with tempfile.TemporaryDirectory(prefix="t-") as name:
        yield Path(name)
        assert processes_of(Path(name)) == []
        assert list(Path(name).iterdir()) == []


@pytest.mark.slow
def test_one_fault_under_both_launchers(folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(BENCHMARK), "--json", *SMALL, *ONE_KILL, *PATIENT, "--folder", str(folder)],
        capture_output=True,
        text=True,
        timeout=2 * DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert [fault["kind"] for fault in result["faults"]] == ["kill"]
    assert result["unmeasured"] == []
    assert [run["side"] for run in result["runs"]] == ["torchrun", "flyball"]
    for run in result["runs"]:
        assert run["faults_met"] == 1, run["faults_missed"]
        assert fsum(run["seconds_by_category"].values()) == pytest.approx(run["elapsed_s"])
        lost_s = run["elapsed_s"] - run["seconds_by_category"]["useful"]
        assert fsum(run["badput_s"].values()) == pytest.approx(lost_s)
        assert fsum(run["lost_s_by_fault"].values()) == pytest.approx(lost_s)
        assert run["steps_kept"] > 0
        assert run["lost_s_by_fault"]["kill"] > 0
        assert any(not incident["began_is_estimate"] for incident in run["incidents"])
        assert result[run["side"]]["goodput"]["runs"] == [run["goodput"]]


def test_ctrl_c_ends_everything_however_often_it_is_pressed(folder: Path) -> None:
    code, said = signalled(folder, signal.SIGINT, times=50)
    assert code == 130, said
    assert "every process that it started has ended" in said


def test_no_process_outlives_a_benchmark_that_is_killed(folder: Path) -> None:
    code, said = signalled(folder, signal.SIGKILL)
    assert code == -signal.SIGKILL, said
    deadline = time.monotonic() + DEADLINE_S
    while processes_of(folder):
        assert time.monotonic() < deadline, processes_of(folder)
        time.sleep(0.05)
    for left in folder.iterdir():
        shutil.rmtree(left)


def signalled(folder: Path, number: signal.Signals, times: int = 1) -> tuple[int, str]:
    """Send a signal to a benchmark whose ranks train; returns its exit code and its stderr."""
    process = subprocess.Popen(
        [sys.executable, str(BENCHMARK), *SMALL, *ONE_KILL, "--folder", str(folder)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        deadline = time.monotonic() + DEADLINE_S
        while len(list(folder.glob("fbg-*/rank*.pid"))) < 2:
            assert process.poll() is None
            assert time.monotonic() < deadline, "the ranks did not start"
            time.sleep(0.05)
        for _ in range(times):
            process.send_signal(number)
            time.sleep(0.02)
        _, said = process.communicate(timeout=DEADLINE_S)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    return process.returncode, said


def test_wrong_arguments_are_refused_before_anything_starts(folder: Path) -> None:
    refused = subprocess.run(
        [sys.executable, str(BENCHMARK), "--minutes", "0.2", "--folder", str(folder)],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert refused.returncode == 2
    assert "No fault fits into 12 s" in refused.stderr
