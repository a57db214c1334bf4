"""Conditions that others report on this host: one JSON file each in a folder, for the time that the file is there.

`{"kind": "ecc-corrected", "severity": "warning", "message": "GPU 3 corrected 900 errors."}` in `NAME.json`. A writer
renames the file into place. One that is half-written, huge or wrong changes nothing: what it said before stands. Links
of an operator are followed, those that workers may have made are not.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import msgspec
import structlog

from flyball.contracts.reports.conditions import BOOT, EVENT, MAX_CONDITIONS, MAX_REQUEST_BYTES, ConditionRequest
from flyball.contracts.wire import MALFORMED, decoder_of
from flyball.worker_files import open_operators_file
from flyball.worker_user import WorkerUser
from host_daemon.probes.findings import NotAvailableError, ProbeFinding, Reading

MAX_FILES = 1_000  # that are looked at
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,79}\.json")

_log = structlog.get_logger(__name__)


class ConditionFiles:
    source = "file"
    interval_s = 0.5
    deadline_s = 10.0

    def __init__(self, folder: Path, user: WorkerUser | None = None) -> None:
        """`user`: the workers'; None: this process's."""
        self._folder = folder
        self._user = user
        self._read: dict[str, tuple[tuple[int, int, int], ProbeFinding | None]] = {}  # name -> version, what it says

    def read(self) -> Reading:
        try:
            names = sorted(entry.name for entry in self._folder.iterdir() if _NAME.fullmatch(entry.name))
        except FileNotFoundError:
            names = []
        except OSError as error:
            raise NotAvailableError(f"{self._folder} cannot be read: {error.strerror}") from error
        known, self._read = self._read, {}
        for name in names[:MAX_FILES]:
            version, finding = self._look(name, known.get(name))
            if version is not None:
                self._read[name] = version, finding
        found = [finding for _, finding in self._read.values() if finding is not None]
        return Reading(tuple(found[:MAX_CONDITIONS]))

    def _look(
        self, name: str, before: tuple[tuple[int, int, int], ProbeFinding | None] | None
    ) -> tuple[tuple[int, int, int] | None, ProbeFinding | None]:
        path = self._folder / name
        version = (0, 0, 0)  # it cannot be opened
        said = before[1] if before is not None else None
        try:
            descriptor = open_operators_file(path, self._user)
            try:
                found = os.fstat(descriptor)  # of what is open: the name may be another file's by now
                version = (found.st_ino, found.st_mtime_ns, found.st_size)
                if before is not None and before[0] == version:
                    return before
                with open(descriptor, "rb", closefd=False) as file:
                    data = file.read(MAX_REQUEST_BYTES + 1)
            finally:
                os.close(descriptor)
            if len(data) > MAX_REQUEST_BYTES:
                raise msgspec.DecodeError(f"it has more than {MAX_REQUEST_BYTES} bytes")
            asked = decoder_of(ConditionRequest).decode(data)
        except FileNotFoundError:
            return None, None
        except (*MALFORMED, OSError) as error:
            if before is None or before[0] != version:
                _log.error("condition_file_ignored", path=str(path), error=str(error))
            return version, said
        subject = asked.subject or name.removesuffix(".json")
        evidence = {key: value for key, value in asked.evidence.items() if key not in (BOOT, EVENT)}
        return version, ProbeFinding(asked.kind, asked.severity, asked.message, subject, evidence, asked.ttl_s)
