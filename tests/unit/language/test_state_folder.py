"""State folders: locks, versions, and files that survive a power cut whole or not at all."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest

from ckpt_engine.tiers.durable_files import create_file
from flyball.contracts.errors import ConfigurationError, Conflict, StateVersionMismatch, StorageFull
from flyball.state_folder import StateFolder, clear_errors, create_once, make_folder, try_lock, write_private
from host_daemon.store.state_dir import HostStateDir
from services.runtime.state_dir import SupervisorStateDir


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was synced, in order: paths at the time of the call, and `rename` or `link` in between."""
    log: list[str] = []
    fsync, rename, link = os.fsync, Path.rename, os.link

    def recorded_fsync(descriptor: int) -> None:
        log.append(str(Path(f"/proc/self/fd/{descriptor}").readlink()))
        fsync(descriptor)

    def recorded_rename(self: Path, target: Path) -> Path:
        log.append("rename")
        return rename(self, target)

    def recorded_link(source: Path, target: Path) -> None:
        log.append("link")
        link(source, target)

    monkeypatch.setattr(os, "fsync", recorded_fsync)
    monkeypatch.setattr(Path, "rename", recorded_rename)
    monkeypatch.setattr(os, "link", recorded_link)
    return log


def opened(path: Path, version: str = "1") -> StateFolder:
    folder = StateFolder(path, version=version, in_use=lambda lock, pid: Conflict(f"{lock} is held by {pid}."))
    folder.open("a.lock")
    return folder


def test_a_write_syncs_the_file_then_renames_then_syncs_the_folder(tmp_path: Path, synced: list[str]) -> None:
    write_private(tmp_path / "file", b"new")
    temporary, *rest = synced
    assert Path(temporary).parent == tmp_path and Path(temporary).name.startswith(".file.")
    assert rest == ["rename", str(tmp_path)]


def test_a_write_that_means_nothing_after_a_reboot_syncs_nothing(tmp_path: Path, synced: list[str]) -> None:
    write_private(tmp_path / "file", b"new", durable=False)
    assert synced == ["rename"]
    assert (tmp_path / "file").read_bytes() == b"new"


def test_creating_syncs_the_file_then_links_then_syncs_the_folder(tmp_path: Path, synced: list[str]) -> None:
    create_once(tmp_path / "file", b"first")
    assert synced[1:] == ["link", str(tmp_path)]


def test_a_new_state_folder_has_a_synced_version(tmp_path: Path, synced: list[str]) -> None:
    opened(tmp_path / "state").close()
    assert synced[1:] == ["link", str(tmp_path / "state")]


def test_made_folders_have_synced_names(tmp_path: Path, synced: list[str]) -> None:
    make_folder(tmp_path / "a" / "b")
    assert synced == [str(tmp_path), str(tmp_path / "a")]
    assert stat.S_IMODE((tmp_path / "a" / "b").stat().st_mode) == 0o700


@pytest.mark.parametrize("durable", [True, False])
def test_a_written_file_is_private_and_replaces_the_former(tmp_path: Path, durable: bool) -> None:
    path = tmp_path / "file"
    path.write_text("former")
    write_private(path, b"new", durable=durable)
    assert path.read_bytes() == b"new"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(tmp_path.iterdir()) == [path]


def test_a_failed_write_leaves_the_former_file_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    path.write_text("former")

    def full(_descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StorageFull, match="no room"), clear_errors(path):
        write_private(path, b"new")
    assert path.read_text() == "former"
    assert list(tmp_path.iterdir()) == [path]


def test_a_rename_that_fails_leaves_no_other_file(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError):
        write_private(tmp_path / "folder", b"new")
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_of_several_that_create_a_file_one_wins(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda n: create_once(tmp_path / "file", str(n).encode()), range(8)))
    first = (tmp_path / "file").read_bytes()
    create_once(tmp_path / "file", b"later")
    assert (tmp_path / "file").read_bytes() == first
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("number", [errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK])
def test_where_there_are_no_hard_links_one_of_several_wins_too(
    tmp_path: Path, synced: list[str], monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refused(_source: Path, _target: Path) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "link", refused)
    create_once(tmp_path / "single", b"first")
    assert synced[1:] == ["rename", str(tmp_path)], "whole on disk before it has its name"
    assert stat.S_IMODE((tmp_path / "single").stat().st_mode) == 0o600
    starts = Barrier(8)

    def create(text: str) -> bytes:
        starts.wait(60.0)
        create_once(tmp_path / "file", text.encode())
        return (tmp_path / "file").read_bytes()

    with ThreadPoolExecutor(8) as pool:
        seen = set(pool.map(create, (str(n) * 4096 for n in range(8))))
    assert len(seen) == 1 and len(seen.pop()) == 4096
    create_once(tmp_path / "file", b"later")
    assert (tmp_path / "file").stat().st_size == 4096
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "single"]


def test_another_error_of_a_link_is_not_hidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_source: Path, _target: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "link", full)
    with pytest.raises(StorageFull), clear_errors(tmp_path):
        create_once(tmp_path / "file", b"first")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("call", ["pwrite", "ftruncate"])
def test_a_full_disk_while_a_lock_is_written_is_a_clear_error_and_leaves_nothing_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    def full(*_arguments: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    supervisor, host = SupervisorStateDir(tmp_path / "supervisor"), HostStateDir(tmp_path / "host")
    with monkeypatch.context() as patch:
        patch.setattr(os, call, full)
        with pytest.raises(StorageFull, match=r"no room for .*sensor\.lock") as caught:
            supervisor.open(["sensor", "api"])
        assert "free space" in caught.value.hint
        with pytest.raises(StorageFull, match=r"no room for .*daemon\.pid"):
            host.open("host")
    for again in (SupervisorStateDir(tmp_path / "supervisor"), supervisor):
        again.open(["sensor", "api"])
        again.close()
    for another in (HostStateDir(tmp_path / "host"), host):
        another.open("host")
        another.close()


def test_a_folder_of_another_version_is_refused_and_its_locks_are_free(tmp_path: Path) -> None:
    (tmp_path / "VERSION").write_text("7\n")
    with pytest.raises(StateVersionMismatch, match=r"version '7'.*uses '1'"):
        opened(tmp_path)
    assert (tmp_path / "VERSION").read_text() == "7\n"
    opened(tmp_path, version="7").close()


def test_a_held_lock_names_its_holder_and_keeps_its_text(tmp_path: Path) -> None:
    first = opened(tmp_path)
    with pytest.raises(Conflict, match=r"a\.lock is held by unknown"):
        opened(tmp_path)
    first.write_lock("a.lock", "4711 a longer text")
    first.write_lock("a.lock", "4711 x")
    with pytest.raises(Conflict, match=r"a\.lock is held by 4711\."):
        opened(tmp_path)
    first.close()
    opened(tmp_path).close()
    assert (tmp_path / "a.lock").read_text() == "4711 x\n"


def test_what_was_locked_before_a_held_lock_is_let_go(tmp_path: Path) -> None:
    first = opened(tmp_path)
    second = StateFolder(tmp_path, version="1", in_use=lambda lock, pid: Conflict(f"{lock} {pid}"))
    with pytest.raises(Conflict):
        second.open("b.lock", "a.lock")
    lock = try_lock(tmp_path / "b.lock")
    assert lock is not None
    os.close(lock)
    first.close()


@pytest.mark.processes
def test_a_lock_ends_with_its_holder(tmp_path: Path) -> None:
    script = (
        "import os, pathlib, sys; from flyball.state_folder import try_lock;"
        "assert try_lock(pathlib.Path(sys.argv[1])) is not None; os.kill(os.getpid(), 9)"
    )
    path = tmp_path / "lock"
    done = subprocess.run([sys.executable, "-P", "-c", script, str(path)], check=False, timeout=120)
    assert done.returncode == -9
    lock = try_lock(path)
    assert lock is not None and try_lock(path) is None
    os.close(lock)


def test_a_folder_that_cannot_be_made_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match="Cannot use") as caught:
        opened(tmp_path / "file" / "folder")
    assert "--state-dir" in caught.value.hint


def test_a_folder_that_another_makes_and_removes_meanwhile_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks that store a step all make its folder, and one that has no room removes it again."""
    mkdir, refused = os.mkdir, []

    def removed_again(path: Path, mode: int) -> None:
        if not refused and path == tmp_path / "g1" / "step4":
            refused.append(path)
            raise FileExistsError(errno.EEXIST, "File exists", str(path))
        mkdir(path, mode)

    monkeypatch.setattr(os, "mkdir", removed_again)
    os.close(create_file(tmp_path / "g1" / "step4" / "rank0.safetensors"))
    assert refused and (tmp_path / "g1" / "step4" / "rank0.safetensors").is_file()


@pytest.mark.processes
def test_it_brings_little_into_a_training_process() -> None:
    code = "import sys; import flyball.state_folder; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert not set(done.stdout.split()) & {"structlog", "httpx", "psutil", "secrets", "tempfile", "asyncio"}
