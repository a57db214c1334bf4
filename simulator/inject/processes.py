"""Processes of this machine, identified so that a signal never reaches another process with the same pid."""

from __future__ import annotations

import errno
import os
import select
import signal
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import msgspec

from flyball.contracts.clock import Clock
from flyball.contracts.errors import ConfigurationError
from flyball.process_title import words_of

_NO_PROCESS = frozenset({errno.ESRCH, errno.ENOENT, errno.EINVAL})


class LiveProcess(msgspec.Struct, frozen=True):
    """A live process. (pid, start_ticks) identifies it forever, on one boot of the machine."""

    pid: int
    start_ticks: int  # field 22 of /proc/<pid>/stat
    session: int
    argv: tuple[str, ...]


def look_at(pid: int) -> LiveProcess | None:
    """The live process with that pid; None if there is none (a zombie does not count)."""
    folder = Path(f"/proc/{pid}")
    try:
        stat = (folder / "stat").read_text()
        argv = words_of((folder / "cmdline").read_bytes())
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = stat[stat.rindex(")") + 2 :].split()  # the name before it may contain anything
    if fields[0] in "ZX":
        return None
    return LiveProcess(pid=pid, start_ticks=int(fields[19]), session=int(fields[3]), argv=tuple(argv))


def own_processes() -> Iterator[LiveProcess]:
    """Live processes of this user."""
    for entry in os.scandir("/proc"):
        if not entry.name.isdecimal():
            continue
        try:
            is_own = entry.stat().st_uid == os.geteuid()
        except FileNotFoundError:
            continue
        if is_own and (process := look_at(int(entry.name))) is not None:
            yield process


def pids_of(process: LiveProcess) -> set[int]:
    """The pids of a process: here, and in each pid namespace that it is in. Empty if it has ended."""
    try:
        lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return set()
    return {int(pid) for line in lines if line.startswith("NSpid:") for pid in line.split()[1:]}


def holds_open(pid: int, path: Path) -> bool:
    """Whether a process of this user has a file open."""
    try:
        wanted = path.stat()
        for entry in os.scandir(f"/proc/{pid}/fd"):
            with suppress(OSError):  # closed meanwhile
                found = entry.stat()
                if (found.st_dev, found.st_ino) == (wanted.st_dev, wanted.st_ino):
                    return True
    except OSError:
        pass  # it has ended, or is another user's
    return False


def environment_of(process: LiveProcess) -> dict[str, str]:
    """The environment that a process was started with; empty if it is gone."""
    try:
        block = Path(f"/proc/{process.pid}/environ").read_bytes().decode(errors="replace")
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return {}
    return dict(entry.split("=", 1) for entry in block.split("\0") if "=" in entry)


def send(process: LiveProcess, number: signal.Signals) -> bool:
    """Send a signal to exactly this process; False if it has ended. Raises ConfigurationError if the kernel forbids
    it."""
    descriptor = _open_pidfd(process.pid)
    if descriptor is None:
        return False
    try:
        # The descriptor pins the pid's current owner; compare only after that.
        found = look_at(process.pid)
        if found is None or found.start_ticks != process.start_ticks:
            return False
        signal.pidfd_send_signal(descriptor, number)
    except ProcessLookupError:
        return False
    except PermissionError as error:
        raise ConfigurationError(
            f"The process {process.pid} may not be signalled.", hint="run as the user who runs the host daemon"
        ) from error
    finally:
        os.close(descriptor)
    return True


def _open_pidfd(pid: int) -> int | None:
    """None if there is no such process; by now it may be the id of a thread."""
    try:
        return os.pidfd_open(pid)
    except OSError as error:
        if error.errno in _NO_PROCESS:
            return None
        raise


def wait_ended(processes: Iterable[LiveProcess], *, timeout_s: float, clock: Clock) -> list[LiveProcess]:
    """Wait until all have ended; returns those still alive at the timeout."""
    deadline = clock.monotonic_s() + timeout_s
    with ExitStack() as descriptors:
        poll = select.poll()
        waiting: dict[int, LiveProcess] = {}
        for process in processes:
            descriptor = _open_pidfd(process.pid)
            if descriptor is None:
                continue
            descriptors.callback(os.close, descriptor)
            found = look_at(process.pid)
            if found is not None and found.start_ticks == process.start_ticks:
                waiting[descriptor] = process
                poll.register(descriptor, select.POLLIN)
        while waiting and (left_s := deadline - clock.monotonic_s()) > 0:
            for descriptor, _ in poll.poll(left_s * 1000):
                poll.unregister(descriptor)
                del waiting[descriptor]
        return list(waiting.values())
