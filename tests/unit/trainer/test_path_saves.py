"""`flyball.save` and `flyball.load`: what comes back, and whose word counts when others touch the file."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import nn

from ckpt_engine.path_saves.path_memory import PathMemory, key_of, memories, memory_root
from ckpt_engine.trainer.path_saves.load_path import load_path
from ckpt_engine.trainer.path_saves.path_saver import KEPT_PATHS, PathSaver
from flyball.contracts.errors import ConfigurationError, CorruptShard, UnsupportedState, UsageError

VALUES: dict[str, Any] = {
    "a state": {"model": nn.Linear(3, 2).state_dict(), "epoch": 7, "lr": 1e-3, "best": float("inf")},
    "a state_dict": nn.BatchNorm1d(3).state_dict(),
    "a dict with other keys": {1: torch.ones(2), "$x": None, (1, 2): b"\x00\xff"},
    "a list": [torch.arange(5), (1, 2.5, True, None), "text", [], {}],
    "a tensor": torch.randn(4, 3),
    "no tensor": 42,
    "None": None,
    "an empty dict": {},
    "dtypes": [torch.ones(3, dtype=d) for d in (torch.bfloat16, torch.float8_e4m3fn, torch.bool, torch.complex64)],
    "shapes": [torch.zeros(()), torch.empty(0, 3), torch.arange(12).view(3, 4).t(), torch.float16, np.arange(3)],
    "the seal's name": {"flyball": {"manifest": torch.ones(3)}, "value": 1},
}


@pytest.fixture
def saver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PathSaver]:
    (tmp_path / "shm").mkdir()
    monkeypatch.setenv("FLYBALL_SHM_DIR", str(tmp_path / "shm"))
    made = PathSaver()
    yield made
    made.finish_at_exit()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "run").mkdir()
    return tmp_path / "run" / "ckpt.pt"


def load(path: Path, **options: Any) -> Any:  # noqa: ANN401
    return load_path(path, options.get("map_location"))


def number(path: Path) -> float:
    return float(load(path)["x"][0])


def state(value: float) -> dict[str, torch.Tensor]:
    return {"x": torch.full((1000,), value)}


@contextmanager
def disk_away(path: Path) -> Iterator[None]:
    """Nothing is written to the disk meanwhile."""
    memory = PathMemory.find(memory_root(os.environ) / key_of(str(path)))
    assert memory is not None
    with memory.finishing():
        yield
    memory.close()


def same(one: Any, other: Any) -> bool:  # noqa: ANN401
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and bytes_of(one) == bytes_of(other)
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("name", VALUES)
def test_what_was_saved_comes_back_from_memory_and_from_the_disk(saver: PathSaver, path: Path, name: str) -> None:
    handle = saver.save(VALUES[name], path)
    assert same(load(path), VALUES[name])
    assert handle.wait() and not handle.error
    saver.finish_at_exit()
    assert list(memories(memory_root(os.environ))) == [], "a process that has ended keeps no memory"
    assert same(load(path), VALUES[name])
    assert safetensors.torch.load_file(path).keys() >= {"flyball.manifest"}, "the file is a valid safetensors file"


def test_what_was_loaded_is_nobody_elses(saver: PathSaver, path: Path) -> None:
    saver.save(state(1), path)
    first = load(path)
    for value in (2, 3, 4):
        saver.save(state(value), path)
    assert first["x"].unique().tolist() == [1.0] and number(path) == 4


def test_the_caller_may_change_what_it_saved(saver: PathSaver, path: Path) -> None:
    tensors = state(1)
    saver.save(tensors, path)
    tensors["x"].fill_(2)
    assert number(path) == 1


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({"a": [1, {"b": object()}]}, "'a.1.b'"),
        ({"model": nn.Linear(1, 1)}, "'model' is a Linear"),
        (nn.Linear(1, 1), "is a Linear"),
        ({"x": {"y": torch.ones(2).to_sparse()}}, "'x.y'"),
    ],
)
def test_what_would_have_to_be_pickled_is_refused_by_its_path(
    saver: PathSaver, path: Path, value: object, said: str
) -> None:
    with pytest.raises(UnsupportedState, match=said):
        saver.save(value, path)
    assert not path.exists()


def test_a_file_is_there_at_once_and_memory_has_its_content(saver: PathSaver, path: Path) -> None:
    saver.save(state(0), path).wait()
    path.unlink()
    with disk_away(path):
        handle = saver.save(state(1), path)
        assert path.exists() and path.stat().st_size < 4096, "a placeholder"
        assert number(path) == 1 and not handle.wait(0)
    assert handle.wait() and path.stat().st_size > 4000 and number(path) == 1


@pytest.mark.processes
def test_an_older_file_stays_until_the_newer_one_is_whole(saver: PathSaver, path: Path) -> None:
    saver.save(state(0), path).wait()
    old = path.read_bytes()
    with disk_away(path):
        saver.save(state(1), path)
        assert subprocess.run(["cat", str(path)], capture_output=True, check=True).stdout == old
        assert number(path) == 1


USES = {
    "copy": (lambda path: shutil.copy(path, f"{path}.2"), ".2"),
    "replace": (lambda path: os.replace(path, f"{path}.2"), ".2"),  # noqa: PTH105
    "rename over": (lambda path: Path(f"{path}.new").rename(path), ""),
    "move": (lambda path: shutil.move(path, f"{path}.2"), ".2"),
    "link": (lambda path: os.link(path, f"{path}.2"), ".2"),
    "move the folder": (lambda path: path.parent.rename(path.parent.with_name("moved")), None),
    "read": (lambda path: safetensors.torch.load(path.read_bytes()), ""),
}


@pytest.mark.parametrize("use", USES)
def test_code_that_uses_the_file_right_after_a_save_waits_for_it(saver: PathSaver, path: Path, use: str) -> None:
    saver.save(state(0), path.with_name("ckpt.pt.new")).wait()
    saver.save(state(1), path).wait()
    call, where = USES[use]
    with disk_away(path):
        saver.save(state(2), path)
        user = threading.Thread(target=call, args=(path,))
        user.start()
        user.join(0.1)
        assert user.is_alive(), "it would see the file without the newest save"
    user.join(60)
    found = path.parent.with_name("moved") / path.name if where is None else Path(f"{path}{where}")
    assert number(found) == (0 if use == "rename over" else 2)


def test_a_moved_file_is_known_in_memory(saver: PathSaver, path: Path) -> None:
    saver.save(state(1), path).wait()
    best = path.with_name("best.pt")
    path.rename(best)
    status = best.stat()
    best.write_bytes(best.read_bytes().replace(bytes(8), b"\xff" * 8))  # a bad disk, which leaves no other trace
    os.utime(best, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert number(best) == 1
    with pytest.raises(FileNotFoundError):
        load(path)


def test_a_removed_file_is_gone(saver: PathSaver, path: Path) -> None:
    saver.save(state(1), path).wait()
    path.unlink()
    with pytest.raises(FileNotFoundError):
        load(path)
    saver.save(state(2), path)
    path.unlink()  # waits for the disk, so that nothing comes back
    assert not path.exists()
    with pytest.raises(FileNotFoundError):
        load(path)


def test_whoever_changes_the_file_has_the_last_word(saver: PathSaver, path: Path, tmp_path: Path) -> None:
    saver.save(state(1), path).wait()
    shutil.copy(path, tmp_path / "older.pt")
    saver.save(state(2), path).wait()
    assert number(path) == 2
    shutil.copy(tmp_path / "older.pt", path)  # into the same inode, with the same size
    assert number(path) == 1
    torch.save(state(3), path)
    with pytest.raises(UsageError, match=r"torch\.save.*flyball ckpt import"):
        load(path)
    saver.save(state(4), path).wait()
    assert number(path) == 4


@pytest.mark.processes
@pytest.mark.parametrize("change", ["cp {older} {path}", "mv {older} {path}", "rm {path}"])
def test_a_program_that_changes_the_file_before_the_save_is_written_has_the_last_word(
    saver: PathSaver, path: Path, tmp_path: Path, change: str
) -> None:
    older = tmp_path / "older.pt"
    saver.save(state(1), path).wait()
    shutil.copy(path, older)
    with disk_away(path):
        handle = saver.save(state(2), path)
        subprocess.run(change.format(older=older, path=path).split(), check=True)
    assert not handle.wait() and "removed or changed" in handle.error
    if change.startswith("rm"):
        with pytest.raises(FileNotFoundError):
            load(path)
    else:
        assert number(path) == 1
    saver.save(state(3), path).wait()
    assert number(path) == 3


@pytest.mark.processes
def test_a_moved_placeholder_finds_its_save_in_memory(saver: PathSaver, path: Path) -> None:
    saver.save(state(0), path).wait()
    path.unlink()
    moved, copied = path.with_name("moved.pt"), path.with_name("copied.pt")
    with disk_away(path):
        saver.save(state(1), path)
        subprocess.run(["cp", str(path), str(copied)], check=True)
        subprocess.run(["mv", str(path), str(moved)], check=True)
        assert number(moved) == number(copied) == 1
    saver.finish_at_exit()
    shutil.rmtree(memory_root(os.environ))
    with pytest.raises(CorruptShard, match="placeholder of a save that was not written"):
        load(moved)


def test_permissions_stay_as_the_user_set_them(saver: PathSaver, path: Path) -> None:
    mask = os.umask(0o027)
    try:
        saver.save(state(1), path).wait()
        assert path.stat().st_mode & 0o777 == 0o640
    finally:
        os.umask(mask)
    path.chmod(0o604)
    saver.save(state(2), path).wait()
    assert path.stat().st_mode & 0o777 == 0o604 and number(path) == 2


def test_a_link_is_written_through(saver: PathSaver, path: Path) -> None:
    link = path.with_name("latest.pt")
    link.symlink_to(path)
    saver.save(state(1), link).wait()
    assert link.is_symlink() and number(path) == number(link) == 1


def test_bad_paths_are_refused_before_anything_is_copied(saver: PathSaver, path: Path) -> None:
    with pytest.raises(ConfigurationError, match="no folder"):
        saver.save(state(1), path.parent / "missing" / "x.pt")
    with pytest.raises(ConfigurationError, match="not a regular file"):
        saver.save(state(1), path.parent)
    with pytest.raises(UsageError, match="not to a BytesIO"):
        saver.save(state(1), __import__("io").BytesIO())  # type: ignore[arg-type]
    with pytest.raises(FileNotFoundError):
        load(path)


@pytest.mark.parametrize("size", ["half", "all but the last byte", "nothing"])
def test_a_file_that_was_cut_off_is_refused(saver: PathSaver, path: Path, size: str) -> None:
    saver.save(state(1), path).wait()
    length = path.stat().st_size
    os.truncate(path, {"half": length // 2, "nothing": 0}.get(size, length - 1))
    with pytest.raises(CorruptShard):
        load(path)


def test_every_flipped_byte_on_the_disk_is_found(saver: PathSaver, path: Path) -> None:
    saver.save({"x": torch.arange(4), "y": "text"}, path).wait()
    saver.finish_at_exit()
    whole = path.read_bytes()
    padding = range(whole.rindex(b"\n"), len(whole) - 16)  # of the seal: it says nothing
    for place in range(0, len(whole), 7):
        if place not in padding:
            path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
            with pytest.raises(CorruptShard):
                load(path)


def test_memory_is_bounded_however_many_paths_are_saved_to(saver: PathSaver, path: Path) -> None:
    slot_bytes = 0
    for epoch in range(8):
        saver.save(state(epoch), path.with_name(f"epoch-{epoch}.pt")).wait()
        held = list(memories(memory_root(os.environ)))
        slot_bytes = slot_bytes or held[0].size_bytes
        assert sum(memory.size_bytes for memory in held) <= 2 * KEPT_PATHS * slot_bytes
        assert len(held) <= KEPT_PATHS
        for memory in held:
            memory.close()
    assert [number(path.with_name(f"epoch-{epoch}.pt")) for epoch in range(8)] == list(range(8))


def test_memory_that_another_process_frees_at_the_same_moment_is_nothing_to_free(saver: PathSaver, path: Path) -> None:
    assert saver.save(state(1.0), path).wait()
    folder = memory_root(os.environ) / key_of(str(path))
    ours, others = PathMemory.find(folder), PathMemory.find(folder)
    assert ours is not None
    assert others is not None
    with others.removing() as may_remove:
        assert may_remove
        others.remove()
    with ours.removing() as may_remove:
        assert not may_remove
    ours.close()
    assert saver.save(state(2.0), path).wait()
    assert number(path) == 2.0


def test_without_room_in_memory_the_save_goes_straight_to_the_disk(
    saver: PathSaver, path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    saver.save(state(1), path).wait()
    monkeypatch.setenv("FLYBALL_CKPT_MEMORY_LIMIT_BYTES", "5000")
    for value in VALUES.values():
        path.unlink()
        handle = saver.save(value, path)
        assert path.stat().st_size > 4096 and handle.wait(0), "it returned when the file was whole"
        assert same(load(path), value)
    assert [record.message for record in caplog.records].count(caplog.records[0].message) == 1
    assert "writes to the disk before it returns" in caplog.text


def test_map_location_is_torchs(saver: PathSaver, path: Path) -> None:
    saver.save({"x": torch.ones(3), "tied": (tied := torch.ones(2)), "again": tied}, path)
    assert load(path, map_location="meta")["x"].device.type == "meta"
    assert load(path, map_location=torch.device("meta"))["x"].device.type == "meta"
    assert load(path, map_location={"cpu": "meta"})["x"].device.type == "meta"
    assert load(path, map_location={"cuda:0": "meta"})["x"].device.type == "cpu"
    assert load(path, map_location=lambda storage, _: storage)["x"].device.type == "cpu"
    assert load(path, map_location=lambda _storage, _location: None)["x"].device.type == "cpu"
    found = load(path)
    assert found["tied"] is found["again"]


def test_the_newest_of_many_saves_is_what_the_disk_gets(saver: PathSaver, path: Path) -> None:
    for value in range(30):
        handle = saver.save(state(value), path)
    assert number(path) == 29 and handle.wait()
    saver.finish_at_exit()
    assert number(path) == 29


def test_ordered_dicts_stay_ordered_and_names_are_the_users(saver: PathSaver, path: Path) -> None:
    saver.save(OrderedDict(b=torch.ones(1), a=torch.zeros(2)), path).wait()
    assert list(load(path)) == ["b", "a"] and type(load(path)) is OrderedDict
    assert set(safetensors.torch.load_file(path)) == {"a", "b", "flyball.manifest"}
