"""What a check of `flyball doctor` finds."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

import msgspec

from flyball.contracts.errors import FlyballError, Unreachable

DEADLINE_S = 20.0


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
    procfs: Path = Path("/proc")
    dev: Path = Path("/dev")

    @property
    def has_nvidia_gpu(self) -> bool:
        """Whether the kernel's driver shows a GPU; libraries may not find it all the same."""
        return (self.dev / "nvidia0").exists()


class Check(NamedTuple):
    """One check: `look` may raise FlyballError, which is one more finding, and is given up after its deadline."""

    subject: str  # also of the findings about its failure
    look: Callable[[CheckedHost], Iterable[Finding]]
    deadline_s: float = DEADLINE_S


def ok(subject: str, detail: str) -> Finding:
    return Finding(subject, Level.OK, detail)


def not_here(subject: str, why: str) -> Finding:
    """What this host does not have, and need not have."""
    return ok(subject, f"not available here: {why}")


def warning(subject: str, detail: str, mend: str) -> Finding:
    return Finding(subject, Level.WARNING, detail, mend)


def of_error(subject: str, error: FlyballError, level: Level = Level.ERROR) -> Finding:
    """What an error says, as a finding."""
    return Finding(subject, level, error.message, error.hint, error.exit_code if level is Level.ERROR else 0)


def findings(checks: Sequence[Check], host: CheckedHost) -> Iterator[Finding]:
    """Run checks in this order, each in a thread: what hangs in the kernel or in a driver stops only its own check."""
    for check in checks:
        found: list[Finding] = []
        thread = threading.Thread(target=_run, args=(check, host, found), name=check.subject, daemon=True)
        thread.start()
        thread.join(check.deadline_s)
        if thread.is_alive():
            late = Unreachable(
                f"The check has not ended within {check.deadline_s:g} s.",
                hint=f"see what it waits for: `dmesg | tail`; then `flyball doctor '{check.subject}'`",
            )
            yield from (*found, of_error(check.subject, late))
        else:
            yield from found


def _run(check: Check, host: CheckedHost, found: list[Finding]) -> None:
    try:
        found.extend(check.look(host))
    except FlyballError as error:
        found.append(of_error(check.subject, error))
    except Exception as error:  # noqa: BLE001 - what breaks a check may harm a job, too, and is no reason to say nothing
        hint = "the other checks are complete; report this one"
        found.append(of_error(check.subject, FlyballError(f"The check itself failed: {error!r}.", hint=hint)))


def exit_code(found: Iterable[Finding]) -> int:
    """Of the first error; 0 if there is none: warnings do not count."""
    return next((finding.exit_code for finding in found if finding.level is Level.ERROR), 0)
