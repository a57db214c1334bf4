"""State folders: private, of one version, locked by the process that uses them, with files that are never half written.

Light to import: training processes and every command do.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from flyball.contracts.errors import ConfigurationError, FlyballError, StateVersionMismatch, StorageFull

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
_NO_HARD_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)  # what os.link raises where there are none
_WRITABLE = "choose a folder that you may write to"


class StateFolder:
    """A folder whose locks this process holds from `open` to `close`."""

    def __init__(self, path: Path, *, version: str, in_use: Callable[[str, str], FlyballError]) -> None:
        """`in_use` makes the error for a lock that another process holds, from the lock's name and the holder's pid."""
        self.path = path
        self._version = version
        self._in_use = in_use
        self._locks: dict[str, int] = {}  # descriptors by the lock's name

    def open(self, *locks: str) -> None:
        """Create the folder or check its version, and take these locks. The text of their files stays.

        Raises StateVersionMismatch, StorageFull, ConfigurationError, or what `in_use` returns; then nothing is held.
        """
        try:
            with clear_errors(self.path, hint=f"{_WRITABLE} with --state-dir"):
                self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
                for name in locks:
                    self._take(name)
                self._check_version()
        except BaseException:
            self.close()
            raise

    def write_lock(self, name: str, text: str) -> None:
        """Replace the text of a held lock's file. Not by a rename: the lock is on this very file.

        Raises StorageFull or ConfigurationError; then nothing is held.
        """
        data = f"{text}\n".encode()
        try:
            with clear_errors(self.path / name):
                os.pwrite(self._locks[name], data, 0)
                os.ftruncate(self._locks[name], len(data))
        except FlyballError:
            self.close()
            raise

    def close(self) -> None:
        """Release the locks; the files stay."""
        while self._locks:
            os.close(self._locks.popitem()[1])

    def _take(self, name: str) -> None:
        path = self.path / name
        descriptor = try_lock(path)
        if descriptor is None:
            holder = path.read_text(errors="replace").split()
            raise self._in_use(name, holder[0] if holder else "unknown")
        self._locks[name] = descriptor

    def _check_version(self) -> None:
        path = self.path / "VERSION"
        if not path.exists():
            create_once(path, f"{self._version}\n".encode())
        found = path.read_text().strip()
        if found != self._version:
            raise StateVersionMismatch(
                f"The state folder {self.path} has version {found!r}; this release of Flyball uses {self._version!r}.",
                hint="run the release that wrote it, or choose another folder with --state-dir; nothing was changed",
            )


def try_lock(path: Path) -> int | None:
    """Lock a file, which is created if it is missing. Returns a descriptor, or None if another process holds the lock.

    Closing the descriptor releases the lock, and so does the kernel when the holder dies.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


def write_private(path: Path, data: bytes, *, durable: bool = True) -> None:
    """Replace a file's content; readers see the old or the new one. Only its owner may read it. Raises OSError.

    `durable`: it survives a power cut once this returns. Pass False for what means nothing after a reboot.
    """
    temporary = _write_aside(path, data, durable=durable)
    try:
        temporary.rename(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    if durable:
        sync_folder(path.parent)


def create_once(path: Path, data: bytes) -> None:
    """Create a private file durably, unless it exists. If several processes try, one wins and all see its content."""
    temporary = _write_aside(path, data, durable=True)
    try:
        os.link(temporary, path)
    except FileExistsError:
        pass
    except OSError as error:
        if error.errno not in _NO_HARD_LINKS:
            raise
        _rename_once(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Make the names in a folder durable: without it, a power cut may undo a finished rename, link or removal."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_folder(path: Path) -> None:
    """Create a private folder and its parents durably. Raises FileNotFoundError if another removes one meanwhile."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    for folder in reversed(missing):
        try:
            folder.mkdir(mode=0o700)
        except FileExistsError:  # exist_ok would raise it also where the folder is gone again
            if not stat.S_ISDIR(folder.stat().st_mode):
                raise
        sync_folder(folder.parent)


@contextmanager
def clear_errors(path: Path, *, hint: str = _WRITABLE) -> Iterator[None]:
    """Turn the file system's errors into a StorageFull or ConfigurationError that names the path and the next step."""
    try:
        yield
    except OSError as error:
        if error.errno in _NO_ROOM:
            raise StorageFull(
                f"There is no room for {path}.", hint="free space on that disk, or choose another folder"
            ) from error
        raise ConfigurationError(f"Cannot use {path}: {error.strerror}.", hint=hint) from error


def _rename_once(temporary: Path, path: Path) -> None:
    """Rename, unless `path` exists. A lock on the folder makes all who do so take turns."""
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        if not path.exists():
            temporary.rename(path)
    finally:
        os.close(folder)


def _write_aside(path: Path, data: bytes, *, durable: bool) -> Path:
    """Write to a new file beside `path`, whose name no other process or thread uses."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{os.urandom(4).hex()}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            if durable:
                file.flush()
                os.fsync(descriptor)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return temporary
