"""`flyball.save` in a process that is killed at every stage, whose disk is full, or whose memory is small."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from support.commands.here import run_here
from support.commands.warm_python import WarmPython

import flyball
from ckpt_engine.path_saves.finish import sweep
from ckpt_engine.path_saves.path_memory import memories, memory_root
from flyball.contracts import fault_points

InTmpfs = Callable[..., str]

SAVER = """
import sys, torch, flyball
for step in range(2):
    handle = flyball.save({"step": step, "x": torch.full((300_000,), float(step))}, sys.argv[1])
    if step == 0:
        assert handle.wait()
print("ended")
"""
FOUND = {  # the save that is found after a kill in the second one
    "slot.begun": 0,
    "capture.half": 0,
    "slot.before_captured": 0,
    "slot.before_manifest": 1,
    "slot.before_committed": 1,
    "slot.committed": 1,
    "file.rename": 1,
    "file.renamed": 1,
}


@pytest.mark.parametrize("point", FOUND)
def test_a_kill_at_any_stage_leaves_the_newest_whole_save(
    tmp_path: Path, warm_python: WarmPython, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    (tmp_path / "shm").mkdir()
    monkeypatch.setenv("FLYBALL_SHM_DIR", str(tmp_path / "shm"))
    path = tmp_path / "ckpt.pt"
    killed = warm_python.run(
        SAVER, str(path), environment={**os.environ, fault_points.VARIABLE: f"{point}:2"}, cwd=tmp_path
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    for _ in range(2):  # the second time from what the first left
        loaded = flyball.load(path)
        assert loaded["step"] == FOUND[point] and loaded["x"].unique().tolist() == [float(FOUND[point])]
    assert [left.state for left in sweep(memory_root(os.environ), ttl_s=0)] == ["freed"]
    assert list(memories(memory_root(os.environ))) == []
    assert flyball.load(path)["x"].unique().tolist() == [float(FOUND[point])]
    assert sorted(found.name for found in tmp_path.iterdir()) == ["ckpt.pt", "shm"]


def test_the_next_process_goes_on_where_a_killed_one_was(
    tmp_path: Path, warm_python: WarmPython, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "shm").mkdir()
    monkeypatch.setenv("FLYBALL_SHM_DIR", str(tmp_path / "shm"))
    path = tmp_path / "ckpt.pt"
    environment = {**os.environ, fault_points.VARIABLE: "slot.before_manifest:2"}
    assert warm_python.run(SAVER, str(path), environment=environment, cwd=tmp_path).returncode == -signal.SIGKILL
    script = """
import sys, torch, flyball
last = flyball.load(sys.argv[1])["step"]
assert last == 1, last
flyball.save({"step": last + 1}, sys.argv[1] + ".other")  # finishes what it finds, too
"""
    done = warm_python.run(script, str(path), environment=dict(os.environ), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for memory in memories(memory_root(os.environ)):
        assert memory.written.step == memory.newest().step  # type: ignore[union-attr]
        memory.close()
    assert flyball.load(path)["step"] == 1 and flyball.load(f"{path}.other")["step"] == 2


def test_the_command_finishes_what_a_killed_process_left(tmp_path: Path, warm_python: WarmPython) -> None:
    (tmp_path / "shm").mkdir()
    path = tmp_path / "ckpt.pt"
    environment = {**os.environ, "FLYBALL_SHM_DIR": str(tmp_path / "shm")}
    armed = {**environment, fault_points.VARIABLE: "slot.before_manifest:2"}
    assert warm_python.run(SAVER, str(path), environment=armed, cwd=tmp_path).returncode == -signal.SIGKILL
    states = []
    for words in ([], [], ["--free"]):
        done = run_here("ckpt", "finish", *words, "-o", "json", environment=environment)
        assert done.returncode == 0, done.stderr
        (save,) = json.loads(done.stdout)["saves"]
        assert save["path"] == str(path) and save["size_bytes"] > 2 * 1_200_000
        states.append(save["state"])
    assert states == ["written", "on disk", "freed"]
    assert json.loads(run_here("ckpt", "finish", "-o", "json", environment=environment).stdout) == {"saves": []}
    assert flyball.load(path)["step"] == 1
    assert "saves in memory: none" in run_here("ckpt", "finish", environment=environment).stdout
    assert warm_python.run(SAVER, str(path), environment=armed, cwd=tmp_path).returncode == -signal.SIGKILL
    path.unlink()
    done = run_here("ckpt", "finish", environment=environment)
    assert done.returncode == 0 and "given up" in done.stdout and not path.exists()


def test_a_full_disk_is_an_error_of_the_next_save_and_memory_has_the_newest(in_tmpfs: InTmpfs, tmp_path: Path) -> None:
    said = in_tmpfs(
        f"""
        import torch, flyball
        os.environ["FLYBALL_SHM_DIR"] = {str(tmp_path)!r}
        path = folder + "/ckpt.pt"
        def state(number):
            return {{"number": number, "x": torch.full((3 * MIB // 4,), float(number))}}
        assert flyball.save(state(0), path).wait()
        fill()
        earlier, failed = (flyball.save(state(1), path) for _ in range(2))
        assert not failed.wait() and "no room" in failed.error, failed.error
        assert not earlier.wait() and earlier.error == failed.error, "neither it nor a newer one is there"
        assert flyball.load(path)["number"] == 1, "memory has it"
        try:
            flyball.save(state(2), path)
        except Exception as error:
            print(type(error).__name__, error)
        else:
            raise SystemExit("no error")
        assert flyball.load(path)["number"] == 2, "this one, too"
        try:
            flyball.save(state(9), folder + "/another.pt")
        except Exception as error:
            print("another path:", type(error).__name__)
        Path(folder, "somebody-elses").unlink()
        assert flyball.save(state(3), path).wait()
        assert flyball.load(path)["number"] == 3
        assert sorted(os.listdir(folder)) == ["ckpt.pt"]
        """,
        size="8m",
    )
    assert "another path: StorageFull" in said
    assert "StorageFull" in said and "free space there" in said and "is in memory, and could not be written" in said


def test_in_a_small_shared_memory_saves_go_straight_to_the_disk(in_tmpfs: InTmpfs, tmp_path: Path) -> None:
    said = in_tmpfs(
        f"""
        import torch, flyball
        os.environ["FLYBALL_SHM_DIR"] = folder
        for number in range(3):
            for name, elements in (("small", 1000), ("large", 3 * MIB)):
                path = f"{tmp_path}/{{name}}.pt"
                assert flyball.save({{"number": number, "x": torch.full((elements,), float(number))}}, path).wait()
                loaded = flyball.load(path)
                assert loaded["number"] == number and loaded["x"].unique().tolist() == [number]
        """,
        size="2m",
    )
    assert said.count("writes to the disk before it returns") == 1
