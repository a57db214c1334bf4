"""The operators with names and tokens of their own, as a file in the state folder lists them.

The file is read again whenever it has changed: a token that is taken back is refused by the next request.
"""

from __future__ import annotations

import hmac
import threading
from pathlib import Path

import structlog

from flyball.contracts.credentials import OPERATOR_PREFIX, read_operators, token_digest
from flyball.contracts.errors import ConfigurationError

log = structlog.get_logger()

_Version = tuple[int, int, int]


class Operators:
    """Thread-safe. Without a file there are none."""

    def __init__(self, path: Path | None = None) -> None:
        """Raises ConfigurationError if the file cannot be used."""
        self._path = path
        self._lock = threading.Lock()
        self._version: _Version | None = None
        self._digests: dict[str, str] = {}
        self._read_again(strict=True)

    def digest_of(self, name: str) -> str:
        """The digest of an operator's token, '' if nobody has this name."""
        return self._current().get(name, "")

    def owner(self, token: bytes) -> str:
        """The name of the operator with this token, '' if it is nobody's."""
        if not token.startswith(OPERATOR_PREFIX.encode()):
            return ""
        name = token[len(OPERATOR_PREFIX) :].rpartition(b".")[0].decode("ascii", "replace")
        digest = self._current().get(name, "")
        return name if hmac.compare_digest(token_digest(token), digest) else ""

    def _current(self) -> dict[str, str]:
        self._read_again(strict=False)
        return self._digests

    def _read_again(self, *, strict: bool) -> None:
        """If that fails, nobody is an operator by this file, until it can be read again."""
        if self._path is None:
            return
        with self._lock:
            try:
                status = self._path.stat()
                version = (status.st_ino, status.st_mtime_ns, status.st_size)
                if version == self._version:
                    return
                if status.st_mode & 0o022:
                    raise ConfigurationError(
                        f"Others may write to {self._path}, and so make themselves operators.",
                        hint=f"chmod 600 {self._path}",
                    )
                self._version, self._digests = version, read_operators(self._path.read_text())
            except FileNotFoundError:
                self._version, self._digests = None, {}
            except (OSError, UnicodeDecodeError, ConfigurationError) as error:
                if strict and isinstance(error, ConfigurationError):
                    raise
                self._version, self._digests = None, {}
                log.error("operators_not_read", path=str(self._path), error=str(error))
