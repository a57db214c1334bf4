"""Files that a script made: whoever reads them neither waits, nor follows a link, nor reads without end."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from flyball.sdk.beacon import BeaconReader, create_beacon
from flyball.worker_files import (
    NotRegularFile,
    NotWorkersFifo,
    open_worker_fifo,
    open_worker_file,
    read_worker_file,
    read_worker_file_from,
)


def make_fifo(path: Path) -> None:
    os.mkfifo(path)


def make_folder(path: Path) -> None:
    path.mkdir()


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))


def make_link(path: Path) -> None:
    path.symlink_to("/etc/hostname")


def make_device_link(path: Path) -> None:
    path.symlink_to("/dev/zero")


@pytest.mark.parametrize("flags", [os.O_RDONLY, os.O_WRONLY | os.O_CREAT | os.O_APPEND, os.O_RDWR])
@pytest.mark.parametrize("make", [make_fifo, make_folder, make_socket, make_link, make_device_link])
def test_what_is_no_regular_file_is_refused_at_once(tmp_path: Path, make: Callable[[Path], None], flags: int) -> None:
    make(tmp_path / "made")
    before = sum(1 for _ in Path("/proc/self/fd").iterdir())
    with pytest.raises(NotRegularFile, match="not a regular file"):
        os.close(open_worker_file(tmp_path / "made", flags))
    assert sum(1 for _ in Path("/proc/self/fd").iterdir()) == before


def test_a_fifo_with_a_writer_is_refused_too(tmp_path: Path) -> None:
    make_fifo(tmp_path / "made")
    writer = os.open(tmp_path / "made", os.O_RDWR)
    with pytest.raises(NotRegularFile, match="made"):
        read_worker_file(tmp_path / "made", 10)
    os.close(writer)


def test_a_huge_sparse_file_is_read_up_to_the_bound(tmp_path: Path) -> None:
    path = tmp_path / "made"
    path.write_bytes(b"begin")
    os.truncate(path, 6 << 30)
    assert read_worker_file(path, 8) == b"begin\0\0\0"
    assert read_worker_file_from(path, -4, 1 << 20) == (b"\0" * 4, (6 << 30) - 4, 6 << 30)


def test_a_range_is_counted_from_either_end_and_may_lie_behind(tmp_path: Path) -> None:
    path = tmp_path / "made"
    path.write_bytes(b"0123456789")
    assert read_worker_file_from(path, 2, 3) == (b"234", 2, 10)
    assert read_worker_file_from(path, -3, 100) == (b"789", 7, 10)
    assert read_worker_file_from(path, -30, 2) == (b"01", 0, 10)
    assert read_worker_file_from(path, 30, 2) == (b"", 30, 10)


def test_a_new_file_is_private(tmp_path: Path) -> None:
    os.close(open_worker_file(tmp_path / "made", os.O_WRONLY | os.O_CREAT))
    assert (tmp_path / "made").stat().st_mode & 0o777 == 0o600


def test_a_fifo_is_opened_only_if_it_is_one_of_the_user_and_somebody_reads_it(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    with pytest.raises(OSError, match="No such device"):  # nobody reads: no wait
        open_worker_fifo(fifo, os.geteuid())
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    writer = open_worker_fifo(fifo, os.geteuid())
    os.write(writer, b"1")
    assert os.read(reader, 2) == b"1"
    os.close(writer)
    with pytest.raises(NotWorkersFifo):
        open_worker_fifo(fifo, os.geteuid() + 1)
    (tmp_path / "link").symlink_to(fifo)
    (tmp_path / "file").write_text("kept")
    for other in (tmp_path / "link", tmp_path / "file", tmp_path, Path("/dev/null")):
        with pytest.raises(NotWorkersFifo):
            open_worker_fifo(other, os.geteuid())
    os.close(reader)


def test_a_short_read_is_no_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_bytes(bytes(range(100)))
    pread = os.pread
    monkeypatch.setattr(os, "pread", lambda descriptor, size, offset: pread(descriptor, min(size, 7), offset))
    assert read_worker_file_from(tmp_path / "file", 10, 50)[0] == bytes(range(10, 60))
    create_beacon(str(tmp_path / "beacon"))
    reader = BeaconReader(str(tmp_path / "beacon"))
    assert reader.snapshot().step == -1
    reader.close()
