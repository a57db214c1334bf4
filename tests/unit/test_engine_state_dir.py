from __future__ import annotations

import os
from pathlib import Path

import pytest

from ckpt_engine.durable_files import UNFINISHED, WRITER, write_durably
from ckpt_engine.state_dir import FenceFile, JobFiles, StateDir
from flyball.contracts.checkpoints import CheckpointSpec, LineageEntry
from flyball.contracts.cluster import HostRanks, Placement
from flyball.contracts.engine_wire import Configure
from flyball.contracts.errors import ConfigurationError, Conflict, StaleCommand, StateVersionMismatch, StorageFull
from flyball.contracts.identity import Fence


def test_the_highest_fence_survives_and_lower_ones_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "fences.json"
    fences = FenceFile(path)
    fences.obey("job", Fence(2, 5))
    fences.obey("job", Fence(2, 5))
    fences.obey("other", Fence(1, 1))
    for stale in (Fence(1, 9), Fence(2, 4)):
        with pytest.raises(StaleCommand):
            FenceFile(path).obey("job", stale)
    FenceFile(path).obey("job", Fence(3, 1))
    with pytest.raises(StaleCommand):
        FenceFile(path).obey("job", Fence(2, 5))


def test_a_fence_file_that_cannot_be_read_is_not_taken_for_an_empty_one(tmp_path: Path) -> None:
    path = tmp_path / "fences.json"
    path.write_text("{")
    with pytest.raises(StateVersionMismatch):
        FenceFile(path)


def test_a_folder_has_one_engine_and_one_version(tmp_path: Path) -> None:
    state = StateDir(tmp_path / "host")
    assert (tmp_path / "host").stat().st_mode & 0o777 == 0o700
    state.write_pid_file(4711)
    with pytest.raises(Conflict, match=str(os.getpid())):
        StateDir(tmp_path / "host")
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "VERSION").write_text("0\n")
    with pytest.raises(StateVersionMismatch):
        StateDir(tmp_path / "old")


def test_a_path_too_long_for_a_socket_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="longer than"):
        StateDir(tmp_path / ("x" * 100)).socket_path("engine.sock")


def test_a_folder_that_cannot_be_made_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match="cannot be made"):
        StateDir(tmp_path / "file" / "host")


def test_configurations_are_kept_until_removed(tmp_path: Path) -> None:
    placement = Placement(
        job="job",
        generation=3,
        world_size=1,
        hosts=(HostRanks("a", "ip", "ip:1", (0,)),),
        master_address="ip",
        master_port=1,
        peers={},
        lineage=(LineageEntry(3),),
        restore=None,
    )
    configure = Configure(Fence(1, 3), "a", placement, CheckpointSpec())
    files = JobFiles(tmp_path / "jobs")
    files.store(configure)
    assert JobFiles(tmp_path / "jobs").load() == [configure]
    files.remove("job")
    files.remove("job")
    assert files.load() == []


def test_a_full_disk_is_an_error_and_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_durably(path, [b"old"])
    (tmp_path / f".file{UNFINISHED}{WRITER}").symlink_to("/dev/full")
    with pytest.raises(StorageFull, match="no room"):
        write_durably(path, [b"new"])
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]
