"""What a check of `flyball doctor` finds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from pathlib import Path

import msgspec

from flyball.contracts.errors import FlyballError


class Level(StrEnum):
    OK = "ok"
    WARNING = "warning"  # Flyball works, but not with all that this host could do
    ERROR = "error"


class Finding(msgspec.Struct, frozen=True):
    """One line of the report."""

    subject: str
    level: Level
    detail: str
    mend: str = ""  # the command, or the next step, that mends it
    exit_code: int = 0  # of an error


class CheckedHost(msgspec.Struct, frozen=True):
    """What the checks look at."""

    environ: Mapping[str, str]
    sysfs: Path = Path("/sys")


Check = Callable[[CheckedHost], Iterable[Finding]]  # may raise FlyballError, which is one more finding


def ok(subject: str, detail: str) -> Finding:
    return Finding(subject, Level.OK, detail)


def of_error(subject: str, error: FlyballError, level: Level = Level.ERROR) -> Finding:
    """What an error says, as a finding."""
    return Finding(subject, level, error.message, error.hint, error.exit_code if level is Level.ERROR else 0)


def findings(checks: Sequence[tuple[str, Check]], host: CheckedHost) -> Iterator[Finding]:
    """Run checks, given with the subject that names their errors, in this order."""
    for subject, check in checks:
        try:
            yield from check(host)
        except FlyballError as error:
            yield of_error(subject, error)


def exit_code(found: Iterable[Finding]) -> int:
    """Of the first error; 0 if there is none: warnings do not count."""
    return next((finding.exit_code for finding in found if finding.level is Level.ERROR), 0)
