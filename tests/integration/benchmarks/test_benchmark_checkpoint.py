"""The checkpoint benchmark runs, with real engines, and prints the object that it says it prints. No time is judged."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from support.clocks.waits import until

from flyball.contracts.on_host.engine_wire import ENGINE_SOCKET
from flyball.contracts.on_host.segments import shm_prefix

BENCHMARK = Path(__file__).parents[3] / "benchmarks" / "checkpoint.py"
FLOORS = {"memcpy_s", "copy2_s", "disk_write_gbs", "tcp_gbs"}
FIGURES = {
    *("lost_ratio", "blocking_ratio", "durable_ratio", "peer_copy_ratio", "restore_memory_ratio"),
    *("restore_disk_ratio", "extra_mib", "interference_p50", "interference_p99"),
}


def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BENCHMARK), *arguments]
    environment = {**os.environ, **variables}
    return subprocess.run(command, capture_output=True, text=True, timeout=900, check=False, env=environment)


def test_one_object_with_every_figure_and_the_runs_behind_it(tmp_path: Path) -> None:
    parts = "blocking,durable,restore_memory"
    done = run("--json", "--size", "0.006", "--repeats", "1", "--only", parts, "--folder", str(tmp_path))
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert set(result) == {"floors", "flyball", "peers", "detail"}
    assert set(result["floors"]) == FLOORS
    assert set(result["flyball"]) == FIGURES
    assert result["peers"] == {}
    measured = {name for name, value in result["flyball"].items() if value is not None}
    assert measured == {"blocking_ratio", "durable_ratio", "restore_memory_ratio"}
    assert all(result["flyball"][name] > 0 for name in measured)
    assert result["detail"]["flyball"]["blocking"]["blocking_ratio"]["runs"]
    assert result["detail"]["machine"]["load_average"]
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_measured_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    too_large = run("--size", "100000", "--folder", str(tmp_path))
    assert too_large.returncode == 7
    assert "GiB of memory are free" in too_large.stderr
    unknown = run("--only", "nonsense", "--folder", str(tmp_path))
    assert unknown.returncode == 2
    assert "no such part 'nonsense'" in unknown.stderr
    assert list(tmp_path.iterdir()) == []


def runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:  # it ended between the two questions
        return False


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """A Unix socket's path is limited."""
    with tempfile.TemporaryDirectory(prefix="t-") as name:
        yield Path(name)
        for state_dir in Path(name).glob("fbb-*/host0"):
            for segment in segments(state_dir.parent):
                segment.unlink(missing_ok=True)


def segments(root: Path) -> list[Path]:
    prefix = Path(shm_prefix(str((root / "host0").resolve())))
    return list(prefix.parent.glob(prefix.name + ".*"))


@pytest.mark.parametrize("killed", ["benchmark", "benchmark and part"])
def test_a_benchmark_that_is_killed_leaves_no_process_and_the_next_one_finds_no_memory_taken(
    short_folder: Path, killed: str
) -> None:
    command = [sys.executable, str(BENCHMARK), "--size", "0.006", "--repeats", "100000", "--only", "blocking"]
    process = subprocess.Popen(
        [*command, "--folder", str(short_folder)],
        env={**os.environ, "TMPDIR": str(short_folder)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    family: list[psutil.Process] = []
    try:
        until(lambda: any(segments(socket.parents[1]) for socket in short_folder.glob(f"fbb-*/host0/{ENGINE_SOCKET}")))
        (socket,) = short_folder.glob(f"fbb-*/host0/{ENGINE_SOCKET}")
        root = socket.parents[1]
        family = psutil.Process(process.pid).children(recursive=True)
        assert len(family) >= 2, "a part and its engine"
        if killed == "benchmark and part":
            family[0].kill()  # it cannot end its engine
        process.kill()
        until(lambda: not any(map(runs, family)))
    finally:
        process.kill()
        process.wait()
        for one in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
    if killed == "benchmark and part":
        assert segments(root)
        done = run("--size", "100000", "--folder", str(short_folder), TMPDIR=str(short_folder))
        assert done.returncode == 7
        assert list(short_folder.glob("fbb-*")) == []
    assert not root.exists()
    assert segments(root) == []
