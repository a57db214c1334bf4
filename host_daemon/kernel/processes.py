"""Reads the kernel's facts about processes: start times, sessions, exits. Also starts ones that outlive the daemon."""

from __future__ import annotations

import ctypes
import errno
import os
import signal
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import msgspec

INHERITED_DESCRIPTOR = 3  # where a started process finds the one descriptor that it gets
_PR_SET_CHILD_SUBREAPER = 36
_NO_PROCESS = frozenset({errno.ESRCH, errno.ENOENT, errno.EINVAL})  # the last two: by now it is the id of a thread
_EXIT_CODE = 49  # index among the fields of /proc/<pid>/stat after the name


class ExitStatus(msgspec.Struct, frozen=True):
    """How a process ended; both None if unknown."""

    exit_code: int | None = None
    signal_number: int | None = None
    core_dumped: bool = False

    @classmethod
    def of_wait_status(cls, status: int) -> ExitStatus:
        if os.WIFSIGNALED(status):
            return cls(signal_number=os.WTERMSIG(status), core_dumped=os.WCOREDUMP(status))
        return cls(exit_code=os.WEXITSTATUS(status))


class ProcessStat(msgspec.Struct, frozen=True):
    """A few fields of /proc/<pid>/stat."""

    state: str
    session: int
    start_ticks: int  # since boot; together with the pid it identifies a process


def read_stat(pid: int) -> ProcessStat | None:
    """Read it; None if there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text[text.rindex(")") + 2 :].split()  # the name in parentheses may contain anything
    return ProcessStat(state=fields[0], session=int(fields[3]), start_ticks=int(fields[19]))


def unreaped_failure(pid: int, start_ticks: int) -> ExitStatus | None:
    """How this very process failed, if its parent has not reaped it; None if unknown. Status 0 means unknown too: the
    kernel also shows it to those without permission."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text[text.rindex(")") + 2 :].split()
    status = int(fields[_EXIT_CODE]) if len(fields) > _EXIT_CODE else 0
    if fields[0] != "Z" or int(fields[19]) != start_ticks or status == 0:
        return None
    return ExitStatus.of_wait_status(status)


def is_alive(pid: int, start_ticks: int) -> bool:
    """Whether this very process is still running. A zombie is not."""
    stat = read_stat(pid)
    return stat is not None and stat.start_ticks == start_ticks and stat.state not in "ZX"


def session_members(sessions: Iterable[int]) -> dict[int, int]:
    """The live processes of these sessions: pid -> session."""
    wanted = set(sessions)
    found = {}
    for entry in os.scandir("/proc"):
        if entry.name.isdecimal():
            stat = read_stat(int(entry.name))
            if stat is not None and stat.session in wanted and stat.state not in "ZX":
                found[int(entry.name)] = stat.session
    return found


def open_pidfd(pid: int) -> int | None:
    """A descriptor that becomes readable when the process ends; None if the process is already gone."""
    try:
        return os.pidfd_open(pid)
    except OSError as error:
        if error.errno in _NO_PROCESS:
            return None
        raise


def open_pidfd_of(pid: int, is_it: Callable[[], bool]) -> int | None:
    """Like `open_pidfd`, but only if `is_it()` confirms the process. It is called once the descriptor is open: before
    that, the pid may pass to another process at any moment."""
    descriptor = open_pidfd(pid)
    if descriptor is not None and not is_it():
        os.close(descriptor)
        return None
    return descriptor


def send_signal(pid: int, number: signal.Signals) -> None:
    """Signal one process, if it still exists."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


def signal_pidfd(descriptor: int, number: int) -> None:
    """Signal the very process of this descriptor, if it still exists."""
    try:
        signal.pidfd_send_signal(descriptor, number)
    except ProcessLookupError:
        return


def signal_group(group: int, number: signal.Signals) -> None:
    """Signal a whole process group, if any of it still exists."""
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return


def become_subreaper() -> None:
    """Inherit orphans among our descendants: if a worker's spawner dies, this process can wait for the worker."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def launch(
    argv: list[str],
    *,
    environment: Mapping[str, str],
    log_path: Path,
    descriptor: int | None = None,
    kept: Iterable[int] = (),
) -> int:
    """Start a process in its own session, with stdin from /dev/null and output appended to `log_path`. Returns its pid.

    The process gets `descriptor` as its INHERITED_DESCRIPTOR; those in `kept` keep their numbers. Raises OSError.
    """
    log_flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    actions: list[tuple[int, int, str, int, int] | tuple[int, int, int]] = [
        (os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDONLY, 0),
        (os.POSIX_SPAWN_OPEN, 1, str(log_path), log_flags, 0o600),
        (os.POSIX_SPAWN_DUP2, 1, 2),
    ]
    if descriptor is not None:
        actions.append((os.POSIX_SPAWN_DUP2, descriptor, INHERITED_DESCRIPTOR))
    actions += [(os.POSIX_SPAWN_DUP2, number, number) for number in kept]  # this keeps them open
    return os.posix_spawn(
        argv[0],
        argv,
        environment,
        file_actions=actions,
        setsid=True,
        setsigmask=[],
        setsigdef=[signal.SIGINT, signal.SIGTERM, signal.SIGCHLD, signal.SIGPIPE],
    )
