"""Reads the kernel's facts about processes: start times, sessions, exits. Also starts ones that outlive the daemon."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import os
import signal
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import msgspec

from flyball.worker_files import open_worker_file
from flyball.worker_user import WorkerUser
from host_daemon.kernel import become

INHERITED_DESCRIPTOR = 3  # where a started process finds the one descriptor that it gets
_OUT_OF_THE_WAY = 16  # of the descriptors that processes get
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
    parent: int = 0


def read_stat(pid: int) -> ProcessStat | None:
    """Read it; None if there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text[text.rindex(")") + 2 :].split()  # the name in parentheses is anything that its program likes
    return ProcessStat(fields[0], session=int(fields[3]), start_ticks=int(fields[19]), parent=int(fields[1]))


def unreaped_failure(pid: int, start_ticks: int) -> ExitStatus | None:
    """How this very process failed, if its parent has not reaped it; None if unknown. Status 0 means unknown too: the
    kernel also shows it to those without permission."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
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


def group_of(pid: int) -> int:
    """Its process group; 0 if it has ended."""
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return 0


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
    """Signal one process, if it still exists and is ours to signal."""
    try:
        os.kill(pid, number)
    except (ProcessLookupError, PermissionError):
        return


def signal_pidfd(descriptor: int, number: int) -> None:
    """Signal the very process of this descriptor, if it still exists."""
    try:
        signal.pidfd_send_signal(descriptor, number)
    except ProcessLookupError:
        return


def ignores_signal(pid: int, number: signal.Signals) -> bool:
    """Whether a process ignores a signal."""
    return _is_in_mask(pid, "SigIgn:", number)


def catches_signal(pid: int, number: signal.Signals) -> bool:
    """Whether a process has a handler for a signal."""
    return _is_in_mask(pid, "SigCgt:", number)


def _is_in_mask(pid: int, name: str, number: signal.Signals) -> bool:
    try:
        status = Path(f"/proc/{pid}/status").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return False
    masks = (line.split()[1] for line in status.splitlines() if line.startswith(name))
    return bool(int(next(masks, "0"), 16) >> (number - 1) & 1)


def signal_group(group: int, number: signal.Signals) -> None:
    """Signal a whole process group, if any of it still exists and is ours to signal."""
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):
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
    user: WorkerUser | None = None,
) -> int:
    """Start a process in its own session, with stdin from /dev/null and output appended to `log_path`. Returns its pid.

    The process gets `descriptor` as its INHERITED_DESCRIPTOR; those in `kept` keep their numbers. With a `user` it is
    that user's before anything of `environment` counts. Raises OSError.
    """
    opened: list[int] = []
    log = open_worker_file(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    opened.append(log)
    try:
        if user is not None:
            opened.append(memory := os.memfd_create("environment"))
            opened.append(described := fcntl.fcntl(memory, fcntl.F_DUPFD_CLOEXEC, _OUT_OF_THE_WAY))
            os.write(described, json.dumps(dict(environment)).encode())
            os.lseek(described, 0, os.SEEK_SET)
            groups = ",".join(map(str, user.groups))
            words = (become.__file__, str(user.uid), str(user.gid), groups, str(described))
            argv = [sys.executable, "-I", "-S", *words, *argv]
            environment, kept = {}, (*kept, described)
        os.set_blocking(log, True)
        actions: list[tuple[int, int, str, int, int] | tuple[int, int, int]] = [
            (os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDONLY, 0),
            (os.POSIX_SPAWN_DUP2, log, 1),
            (os.POSIX_SPAWN_DUP2, log, 2),
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
    finally:
        for number in opened:
            os.close(number)


def user_of(pid: int) -> int:
    """The user that a process runs as. Raises OSError, ValueError if it has ended."""
    status = Path(f"/proc/{pid}/status").read_text(errors="replace")
    uids = next(line for line in [*status.splitlines(), "Uid:"] if line.startswith("Uid:")).split()
    if len(uids) < 3:
        raise ValueError(f"process {pid} has ended")
    return int(uids[2])  # the effective one
