from __future__ import annotations

import os
import resource
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.jobs.placements import make_placement

from ckpt_engine.host.state_dir import EngineStateDir, FenceFile, JobFiles
from ckpt_engine.tiers.durable_files import write_durably
from flyball.contracts.checkpoints import CheckpointSpec
from flyball.contracts.errors import (
    ConfigurationError,
    Conflict,
    CorruptShard,
    StaleCommand,
    StateVersionMismatch,
    StorageFull,
)
from flyball.contracts.identity import Fence
from flyball.contracts.on_host.engine_wire import Configure


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
    state = EngineStateDir(tmp_path / "host")
    assert (tmp_path / "host").stat().st_mode & 0o777 == 0o700
    state.write_pid_file(4711)
    with pytest.raises(Conflict, match=str(os.getpid())):
        EngineStateDir(tmp_path / "host")
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "VERSION").write_text("0\n")
    with pytest.raises(StateVersionMismatch):
        EngineStateDir(tmp_path / "old")


def test_a_path_too_long_for_a_socket_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="longer than"):
        EngineStateDir(tmp_path / ("x" * 100)).socket_path("engine.sock")


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match="Cannot use"):
        EngineStateDir(tmp_path / "file" / "host")


def test_configurations_are_kept_until_removed(tmp_path: Path) -> None:
    placement = make_placement({"a": (0,)}, generation=3)
    configure = Configure(Fence(1, 3), "a", placement, CheckpointSpec())
    files = JobFiles(tmp_path / "jobs")
    files.store(configure)
    (tmp_path / "jobs/broken.json").write_bytes(b'{"half')
    assert JobFiles(tmp_path / "jobs").load() == [configure]  # an unreadable one does not stop the others
    files.remove("job")
    files.remove("job")
    assert files.load() == []


def test_configurations_are_loaded_in_the_order_in_which_their_generations_began(tmp_path: Path) -> None:
    files = JobFiles(tmp_path / "jobs")
    made = [
        Configure(Fence(1, 1), "a", make_placement({"a": (0,)}, generation=1, job=job), CheckpointSpec())
        for job in ("y", "x", "z")
    ]
    for age, configure in enumerate(made):
        files.store(configure)
        os.utime(tmp_path / f"jobs/{configure.placement.job}.json", (age, age))
    files.store(made[0])  # a daemon that restarted says again what runs
    assert files.load() == made


def test_a_full_disk_is_an_error_and_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_durably(path, [b"old"])
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2, limits[1]))
    try:
        with pytest.raises(StorageFull, match="no room"):
            write_durably(path, [b"new"])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_two_threads_that_write_one_path_do_not_write_into_one_file(tmp_path: Path) -> None:
    # A superseded generation completes its last write, and the next generation begins with that step.
    path = tmp_path / "shard"
    ended = threading.Event()
    first_half, rest = b"a" * (4 << 20), b"b" * (4 << 20)

    def given_up() -> Iterator[bytes]:
        yield b"a"
        ended.set()
        raise CorruptShard("the slot was overwritten")

    def write_and_give_up() -> None:
        with pytest.raises(CorruptShard):
            write_durably(path, given_up(), size_bytes=8 << 20)

    def parts() -> Iterator[bytes]:
        yield first_half
        other = threading.Thread(target=write_and_give_up)
        other.start()
        other.join(60.0)
        assert ended.is_set()
        yield rest

    write_durably(path, parts(), size_bytes=8 << 20)
    assert path.read_bytes() == first_half + rest
    assert list(tmp_path.iterdir()) == [path]
