"""A notice that the host will be taken away: a file that an external agent renames into place.

`{"deadline_s": 30.0, "source": "gce"}` in `preemption-notice.json` means: 30 s after the file's modification time.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import msgspec
import structlog

from flyball.contracts.reports.signals import PreemptionNotice
from flyball.contracts.wire import MALFORMED, decoder_of

MAX_NOTICE_BYTES = 4_096

_log = structlog.get_logger(__name__)


class NoticeFile(msgspec.Struct, frozen=True):
    deadline_s: Annotated[float, msgspec.Meta(ge=0, le=86_400)]
    source: Annotated[str, msgspec.Meta(max_length=200)] = ""


class PreemptionProbe:
    """Checks the file. Each version of it is reported once, also across restarts, thanks to its `identity`."""

    def __init__(self, path: Path, reported: str | None) -> None:
        self._path = path
        self._identity = reported or ""

    @property
    def identity(self) -> str:
        """Identity of the version that was checked last."""
        return self._identity

    def check(self) -> PreemptionNotice | None:
        """Return a new notice, else None. A malformed one is logged once and ignored."""
        try:
            with self._path.open("rb") as file:
                stat = os.fstat(file.fileno())
                identity = f"{stat.st_ino}.{stat.st_mtime_ns}"
                if identity == self._identity:
                    return None
                data = file.read(MAX_NOTICE_BYTES + 1)
        except FileNotFoundError:
            return None
        except OSError as error:
            _log.warning("preemption_notice_unreadable", path=str(self._path), error=str(error))
            return None
        self._identity = identity
        try:
            notice = decoder_of(NoticeFile).decode(data)
        except MALFORMED as error:
            _log.error("preemption_notice_malformed", path=str(self._path), error=str(error))
            return None
        return PreemptionNotice(deadline_at=stat.st_mtime + notice.deadline_s, source=notice.source)
