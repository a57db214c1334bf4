"""A folder as storage: on a host's own disk, or in a file system that all hosts share."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from ckpt_engine.format.verified_read import FileSource
from ckpt_engine.tiers.durable_files import finished_name, write_durably
from ckpt_engine.tiers.storage import Entry
from flyball.contracts.errors import CorruptShard
from flyball.state_folder import sync_folder
from flyball.worker_files import NotRegularFile, open_worker_file

_DEPTH = 3  # of names, in parts


class _OpenFile(FileSource):
    def __init__(self, descriptor: int, path: Path, size_bytes: int) -> None:
        super().__init__(descriptor)
        self.size_bytes = size_bytes
        self.local_path = self.shard_path = str(path)

    def read_exactly(self, target: memoryview, offset: int) -> None:
        self.read_into(target, offset)


class FolderStorage:
    """Files have mode 0600 and folders 0700: only the job's user can read them."""

    def __init__(self, root: Path) -> None:
        self._root = root

    @property
    def place(self) -> str:
        return str(self._root)

    def write(self, name: str, parts: Iterable[bytes | memoryview], size_bytes: int) -> None:
        path = self._root / name
        try:
            write_durably(path, parts, size_bytes=size_bytes, read_back=True)
        except BaseException:
            self._remove_empty(path.parent)  # a step that keeps failing leaves no folders
            raise

    def read(self, name: str, limit_bytes: int) -> bytes:
        with self.open(name) as file:
            if file.size_bytes > limit_bytes:
                raise CorruptShard(f"{self._root / name} has {file.size_bytes} bytes, the limit is {limit_bytes}.")
            data = bytearray(file.size_bytes)
            file.read_into(memoryview(data), 0)
            return bytes(data)

    @contextmanager
    def open(self, name: str) -> Iterator[_OpenFile]:
        path = self._root / name
        try:
            descriptor = open_worker_file(path)
        except NotRegularFile as error:
            raise CorruptShard(f"{path} is not a file.", hint="nothing to do: another copy is tried") from error
        try:
            yield _OpenFile(descriptor, path, os.fstat(descriptor).st_size)
        finally:
            os.close(descriptor)

    def stat(self, name: str) -> Entry | None:
        try:
            status = (self._root / name).lstat()
        except FileNotFoundError:
            return None
        return _entry(name, status) if stat.S_ISREG(status.st_mode) else None

    def folders(self, folder: str = "") -> list[str]:
        head = f"{folder}/" if folder else ""
        return [head + child.name for child in self._children(folder) if child.is_dir(follow_symlinks=False)]

    def entries(self, folder: str = "") -> Iterator[Entry]:
        for name, child in self._walk(folder):
            if not child.name.startswith("."):
                try:
                    yield _entry(name, child.stat(follow_symlinks=False))
                except FileNotFoundError:
                    continue

    def remove(self, names: Sequence[str]) -> None:
        folders = set()
        for name in names:
            path = self._root / name
            try:
                path.unlink()
            except FileNotFoundError:
                continue
            folders.add(path.parent)
        for folder in folders:
            self._tidy(folder)

    def remove_unfinished(self, wanted: Callable[[str], bool], folders: Iterable[str] = ("",)) -> list[str]:
        removed = []
        for name, child in [found for folder in folders for found in self._walk(folder)]:
            final = finished_name(child.name)
            if final is not None and wanted(f"{name.rpartition('/')[0]}/{final}"):
                removed.append(name)
        self.remove(removed)
        return removed

    def _walk(self, folder: str) -> Iterator[tuple[str, os.DirEntry[str]]]:
        """The plain files in `folder` and below, as deep as names go. Does not follow links."""
        open_folders = [folder]
        while open_folders:
            name = open_folders.pop()
            for child in self._children(name):
                child_name = f"{name}/{child.name}" if name else child.name
                if child.is_dir(follow_symlinks=False):
                    if child_name.count("/") < _DEPTH - 1:
                        open_folders.append(child_name)
                elif child.is_file(follow_symlinks=False):
                    yield child_name, child

    def _children(self, folder: str) -> list[os.DirEntry[str]]:
        try:
            with os.scandir(self._root / folder) as found:
                return list(found)
        except FileNotFoundError:  # nothing was written yet, or it was just removed
            return []

    def _tidy(self, folder: Path) -> None:
        """Make removals durable, and remove folders that are now empty."""
        try:
            sync_folder(folder)
        except FileNotFoundError:
            return  # somebody else removed the last file in it
        self._remove_empty(folder)

    def _remove_empty(self, folder: Path) -> None:
        while folder != self._root:
            try:
                folder.rmdir()
            except OSError:  # not empty, or gone
                return
            folder = folder.parent


def _entry(name: str, status: os.stat_result) -> Entry:
    return Entry(name, status.st_size, f"{status.st_ino}-{status.st_mtime_ns}-{status.st_size}")
