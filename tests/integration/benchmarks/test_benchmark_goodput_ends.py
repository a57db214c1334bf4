"""The comparison under faults when its launcher is killed, and when a save on torchrun's side fails."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist
from support.clocks.waits import until
from support.commands.own_processes import processes_of

sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))
sys.path.append(str(Path(__file__).parents[3] / "examples"))

from goodput_bench import runs, sides
from goodput_bench.dcp_saver import DcpSaver
from goodput_bench.saves import read_saves
from goodput_bench.sides import Job, Side
from train_gpt import StandardLibrary

from flyball.contracts.events import EventKind
from goodput.read.event_files import read_logs

DEADLINE_S = 300.0
SMALL = Job(every_steps=20, hang_timeout_s=10.0, step_floor_s=0.05, width=64, layers=2)


@pytest.fixture
def folder() -> Iterator[Path]:
    """A Unix socket's path is limited, so tmp_path would be too long."""
    with tempfile.TemporaryDirectory(prefix="t-") as name:
        yield Path(name).resolve()


@pytest.fixture
def onlookers() -> Iterator[list[subprocess.Popen[bytes]]]:
    started: list[subprocess.Popen[bytes]] = []
    yield started
    for process in started:
        process.kill()
        process.wait()


def test_nothing_is_left_of_a_flyball_run_that_was_killed(
    folder: Path, onlookers: list[subprocess.Popen[bytes]]
) -> None:
    left: list[Path] = []

    def kill_the_launcher() -> None:
        until(lambda: len(list(folder.glob("fbg-*/rank*.pid"))) == 2)
        run_folder = next(folder.glob("fbg-*"))
        onlookers.append(subprocess.Popen(["tail", "-f", str(run_folder / "output.log")]))
        left.extend(sides.segments(run_folder))
        for child in psutil.Process().children():
            if "flyball.cli.main" in words_of(child):
                child.kill()

    killer = threading.Thread(target=kill_the_launcher, daemon=True)
    killer.start()
    try:
        failure = runs.run(Side.FLYBALL, SMALL, (), length_s=DEADLINE_S, parent=folder).failure
    except runs.RunFailed as error:  # the first step may not have been seen yet
        failure = error.message
    killer.join()
    assert "ended by itself with exit code -9" in failure
    assert left
    assert [path for path in left if path.exists()] == []
    (onlooker,) = onlookers
    assert onlooker.poll() is None
    assert [p.pid for p in processes_of(folder)] == [onlooker.pid]
    assert list(folder.iterdir()) == []


def words_of(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def test_a_failed_save_is_reported_and_training_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("TORCHELASTIC_RESTART_COUNT", "0")):
        monkeypatch.setenv(name, value)
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        saver = DcpSaver(tmp_path, job="j", every_steps=1)
        model = torch.nn.Linear(2, 2)
        saver.restore(model, torch.optim.AdamW(model.parameters()), StandardLibrary(1, 2, 0, 0, limit_bytes=100))
        in_the_way = tmp_path / "checkpoints"
        in_the_way.write_text("no folder")
        saver.save(0)
        saver.save(1)
        assert "the save of step 0 failed" in capsys.readouterr().err
        saver.wait()
        in_the_way.unlink()
        saver.save(2)
        saver.wait()
    finally:
        dist.destroy_process_group()
    saves = tmp_path / "saves.txt"
    until(lambda: saves.exists() and saves.read_bytes().endswith(b"\n"))  # the save's own thread writes it, afterwards
    assert [save.step for save in read_saves(saves)] == [2]
    told = [
        event for event in read_logs([tmp_path / "events" / "rank0.jsonl"]).events if event.kind is EventKind.SIGNAL
    ]
    assert [event.data["kind"] for event in told] == ["save_failed", "save_failed"]
