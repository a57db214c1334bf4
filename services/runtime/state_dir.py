"""The supervisor's state folder: its locks, its token, and the record of its address."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable
from pathlib import Path

import msgspec

from flyball.contracts.errors import ConfigurationError
from flyball.state_folder import StateFolder, clear_errors, create_once, write_private

STATE_VERSION = "1"


class SupervisorRecord(msgspec.Struct, frozen=True):
    """supervisor.json: the address of a running supervisor."""

    url: str
    pid: int
    host: str = ""  # the machine with that process: the folder may be shared with others
    elsewhere: str = ""  # its URL for other machines; '': it listens on this one only


class SupervisorStateDir:
    """Owns the folder from `open` to `close`. Only its owner can read it and its files (0700, 0600)."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._folder = StateFolder(path, version=STATE_VERSION, in_use=self._in_use)

    def open(self, parts: Iterable[str]) -> None:
        """Create the folder or check its version, and lock it for `parts`.

        Raises StateVersionMismatch, StorageFull, or ConfigurationError if it cannot be used or another process runs
        one of the parts in it.
        """
        locks = [f"{part}.lock" for part in parts]
        self._folder.open(*locks)
        for lock in locks:
            self._folder.write_lock(lock, str(os.getpid()))

    def close(self) -> None:
        """Release the locks; the folder stays."""
        self._folder.close()

    def token(self) -> str:
        """The token of this folder, created by the first call. Safe when several processes start at once."""
        path = self.path / "token"
        with clear_errors(path):
            if not path.exists():
                create_once(path, f"{secrets.token_urlsafe(32)}\n".encode())
        return self._secret(path)

    def former_token(self) -> str:
        """The previous token, which `flyball token rotate` kept; '' if there is none."""
        path = self.path / "token.former"
        return self._secret(path) if path.exists() else ""

    def _secret(self, path: Path) -> str:
        with clear_errors(path):
            if path.stat().st_mode & 0o077:
                raise ConfigurationError(
                    f"The token file {path} can be read by others.",
                    hint=f"chmod 600 {path}, or delete it to get a new one",
                )
            token = path.read_text().strip()
        if not token:
            raise ConfigurationError(
                f"The token file {path} is empty.", hint="delete it; the next start creates a new token"
            )
        return token

    def make_private(self, name: str) -> None:
        """Create an empty file that only the owner can read, unless it exists."""
        with clear_errors(self.path / name):
            os.close(os.open(self.path / name, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))

    def write_record(self, name: str, record: SupervisorRecord) -> None:
        """Publish the address as `name`.json."""
        path = self.path / f"{name}.json"
        with clear_errors(path):
            write_private(path, msgspec.json.encode(record), durable=False)  # the process does not survive a power cut

    def remove_record(self, name: str) -> None:
        (self.path / f"{name}.json").unlink(missing_ok=True)

    def _in_use(self, lock: str, pid: str) -> ConfigurationError:
        return ConfigurationError(
            f"Another supervisor (pid {pid}) runs the {lock.removesuffix('.lock')} in {self.path}.",
            hint="stop it, or choose another folder with --state-dir",
        )
