"""Processes of this machine, identified so that a signal never reaches another process with the same pid."""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path

import msgspec

from flyball.contracts.clock import Clock
from flyball.contracts.errors import ConfigurationError
from flyball.process_title import words_of


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
    try:
        descriptor = os.pidfd_open(process.pid)
    except ProcessLookupError:
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


def wait_ended(processes: Iterable[LiveProcess], *, timeout_s: float, clock: Clock) -> list[LiveProcess]:
    """Wait until all have ended; returns those still alive at the timeout."""
    deadline = clock.monotonic_s() + timeout_s
    with ExitStack() as descriptors:
        poll = select.poll()
        waiting: dict[int, LiveProcess] = {}
        for process in processes:
            try:
                descriptor = os.pidfd_open(process.pid)
            except ProcessLookupError:
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
