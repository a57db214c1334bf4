"""The supervisor's folder: version, lock, token, and the record of where it can be reached."""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from flyball.contracts.errors import ConfigurationError, StateVersionMismatch, StorageFull

STATE_VERSION = "1"


class SupervisorRecord(msgspec.Struct, frozen=True):
    """supervisor.json: how to reach a running supervisor."""

    url: str
    pid: int


class SupervisorStateDir:
    """Owns the folder from `open` to `close`. Files in it are the owner's alone (0700, 0600)."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._locks: list[int] = []

    def open(self, parts: Iterable[str]) -> None:
        """Create the folder or check its version, and lock it for `parts`.

        Raises StateVersionMismatch, StorageFull, and ConfigurationError when it cannot be used or another process
        runs one of the parts in it.
        """
        with _clear_errors(self.path):
            self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
            try:
                for part in parts:
                    self._lock(part)
                self._check_version()
            except BaseException:
                self.close()
                raise

    def close(self) -> None:
        """Release the locks; the folder stays."""
        while self._locks:
            os.close(self._locks.pop())

    def token(self) -> str:
        """The token of this folder, made at the first call. Safe when several processes start at once."""
        path = self.path / "token"
        with _clear_errors(path):
            if not path.exists():
                _create_once(path, secrets.token_urlsafe(32))
        return self._secret(path)

    def former_token(self) -> str:
        """The one before it, which `flyball token rotate` left; '' if there is none."""
        path = self.path / "token.former"
        return self._secret(path) if path.exists() else ""

    def _secret(self, path: Path) -> str:
        with _clear_errors(path):
            if path.stat().st_mode & 0o077:
                raise ConfigurationError(
                    f"The token file {path} can be read by others.",
                    hint=f"chmod 600 {path}, or delete it for a new one",
                )
            token = path.read_text().strip()
        if not token:
            raise ConfigurationError(
                f"The token file {path} is empty.", hint="delete it; a new token is made at the start"
            )
        return token

    def make_private(self, name: str) -> None:
        """Create an empty file for the owner alone, unless it is there."""
        with _clear_errors(self.path / name):
            os.close(os.open(self.path / name, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))

    def write_record(self, name: str, record: SupervisorRecord) -> None:
        """Publish the address as `name`.json, whole or not at all."""
        path = self.path / f"{name}.json"
        with _clear_errors(path):
            temporary = path.with_name(f".{name}.json.{os.getpid()}")
            _write_private(temporary, msgspec.json.encode(record))
            temporary.rename(path)

    def remove_record(self, name: str) -> None:
        (self.path / f"{name}.json").unlink(missing_ok=True)

    def _lock(self, part: str) -> None:
        # The kernel drops the lock with its holder, however that ends; the file itself stays and means nothing.
        descriptor = os.open(self.path / f"{part}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(descriptor, 32, 0).decode("ascii", "replace").strip() or "unknown"
            os.close(descriptor)
            raise ConfigurationError(
                f"Another supervisor (pid {holder}) runs the {part} in {self.path}.",
                hint="stop it, or choose another folder with --state-dir",
            ) from None
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        self._locks.append(descriptor)

    def _check_version(self) -> None:
        path = self.path / "VERSION"
        if not path.exists():
            _create_once(path, STATE_VERSION)
        found = path.read_text().strip()
        if found != STATE_VERSION:
            raise StateVersionMismatch(
                f"The state folder {self.path} has version {found!r}; this release of Flyball uses {STATE_VERSION!r}.",
                hint="start the release that wrote it, or choose another folder with --state-dir; nothing was changed",
            )


def _create_once(path: Path, text: str) -> None:
    """Create a complete file unless there is one: of several processes one wins, and all see its text."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    _write_private(temporary, f"{text}\n".encode())
    try:
        os.link(temporary, path)
    except FileExistsError:
        return  # another process was first, and its text counts
    finally:
        temporary.unlink()


def _write_private(path: Path, data: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def _clear_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StorageFull(
                f"No room for {path}.", hint="free some disk space, or choose another folder with --state-dir"
            ) from error
        raise ConfigurationError(
            f"Cannot use {path}: {error.strerror}.", hint="choose a folder that you may write to with --state-dir"
        ) from error
