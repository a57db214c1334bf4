"""The system calls in which workers wait, from /proc."""

from __future__ import annotations

import os
import platform
import struct
import time
from math import inf
from pathlib import Path
from typing import Final

# Calls in which processes wait for long. Others are shown by their number.
_NUMBERS = {
    "x86_64": {
        0: "read",
        1: "write",
        2: "open",
        4: "stat",
        5: "fstat",
        7: "poll",
        16: "ioctl",
        17: "pread64",
        18: "pwrite64",
        23: "select",
        34: "pause",
        35: "nanosleep",
        42: "connect",
        43: "accept",
        44: "sendto",
        45: "recvfrom",
        46: "sendmsg",
        47: "recvmsg",
        61: "wait4",
        72: "fcntl",
        73: "flock",
        74: "fsync",
        75: "fdatasync",
        128: "rt_sigtimedwait",
        130: "rt_sigsuspend",
        202: "futex",
        230: "clock_nanosleep",
        232: "epoll_wait",
        247: "waitid",
        257: "openat",
        262: "newfstatat",
        270: "pselect6",
        271: "ppoll",
        281: "epoll_pwait",
        288: "accept4",
        332: "statx",
    },
    "aarch64": {
        22: "epoll_pwait",
        25: "fcntl",
        29: "ioctl",
        32: "flock",
        56: "openat",
        63: "read",
        64: "write",
        67: "pread64",
        68: "pwrite64",
        72: "pselect6",
        73: "ppoll",
        79: "newfstatat",
        82: "fsync",
        83: "fdatasync",
        95: "waitid",
        98: "futex",
        101: "nanosleep",
        115: "clock_nanosleep",
        133: "rt_sigsuspend",
        137: "rt_sigtimedwait",
        202: "accept",
        203: "connect",
        206: "sendto",
        207: "recvfrom",
        211: "sendmsg",
        212: "recvmsg",
        242: "accept4",
        260: "wait4",
        291: "statx",
    },
}
_NAMES = _NUMBERS.get(platform.machine(), {})


def in_call(pid: int) -> str:
    """The system call in which the main thread waits, '' if unknown."""
    return named_call(_call(pid)[0])


def sleeps_for_s(pid: int) -> float:
    """At most how long the main thread sleeps on; inf if it is in another call, or cannot be read. Reads the process's
    memory, which a script can have hang."""
    number, arguments = _call(pid)
    name = named_call(number)
    if name not in SLEEPS:
        return inf
    is_plain = name == "nanosleep"
    try:
        with Path(f"/proc/{pid}/mem").open("rb", buffering=0) as memory:
            memory.seek(arguments[0 if is_plain else 2])
            until: tuple[int, int] = struct.unpack("qq", memory.read(16))  # seconds, nanoseconds
        now_s = time.clock_gettime(arguments[0]) if not is_plain and arguments[1] & _ABSOLUTE else 0.0
    except (OSError, ValueError, OverflowError, struct.error):
        return inf
    return until[0] + until[1] * 1e-9 - now_s


SLEEPS: Final = frozenset({"nanosleep", "clock_nanosleep"})
_ABSOLUTE: Final = 1  # TIMER_ABSTIME


def seen_call(pid: int) -> tuple[str, str]:
    """The system call in which the main thread waits, and the file that it is about: a path, "pipe:[7]", "socket:[7]".
    Each is '' if it is unknown."""
    number, arguments = _call(pid)
    name = named_call(number)
    if number < 0 or name in _WITHOUT_FILE:
        return name, ""
    place = _PATH_ARGUMENT.get(name)
    if place is not None:
        return name, _text_at(pid, arguments[place])
    try:
        link = os.fsencode(Path(f"/proc/{pid}/fd/{arguments[0]}").readlink())
        return name, link.decode(errors="replace")  # a report is text, and a name is any bytes
    except OSError:
        return name, ""


_WITHOUT_FILE = frozenset(
    {"futex", "nanosleep", "clock_nanosleep", "pause", "wait4", "waitid", "poll", "ppoll", "select", "pselect6"}
)
_PATH_ARGUMENT = {"open": 0, "stat": 0, "openat": 1, "newfstatat": 1, "statx": 1}
_MAX_PATH = 256


def _text_at(pid: int, address: int) -> str:
    """The text at an address of a process, '' if it cannot be read."""
    try:
        with Path(f"/proc/{pid}/mem").open("rb", buffering=0) as memory:
            memory.seek(address)
            return memory.read(_MAX_PATH).partition(b"\0")[0].decode(errors="replace")
    except (OSError, ValueError, OverflowError):
        return ""


def is_reading_input(pid: int) -> bool:
    """Whether the main thread waits for its standard input: `input()`, or a prompt of pdb."""
    number, arguments = _call(pid)
    name = _NAMES.get(number, "")
    if name == "read":
        return arguments[0] == 0
    # readline waits with the set of descriptors below 1
    return name in ("select", "pselect6") and arguments[0] == 1


def named_call(number: int) -> str:
    """The name of a system call, '' for none."""
    return "" if number < 0 else _NAMES.get(number, f"call {number}")


def _call(pid: int) -> tuple[int, list[int]]:
    """Number and arguments of the current system call; (-1, []) if there is none or it is not readable."""
    try:
        words = Path(f"/proc/{pid}/syscall").read_text().split()
        number = int(words[0])
    except (OSError, ValueError, IndexError):
        return -1, []
    return number, [int(word, 16) for word in words[1:7]]
