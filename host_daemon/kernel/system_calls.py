"""Which system call a process waits in, as the kernel shows it to those who may trace it."""

from __future__ import annotations

import platform
from pathlib import Path

# Those in which processes wait for long. Others are told by their number.
_NUMBERS = {
    "x86_64": {
        0: "read",
        1: "write",
        7: "poll",
        16: "ioctl",
        23: "select",
        34: "pause",
        35: "nanosleep",
        42: "connect",
        43: "accept",
        45: "recvfrom",
        47: "recvmsg",
        61: "wait4",
        72: "fcntl",
        73: "flock",
        74: "fsync",
        128: "rt_sigtimedwait",
        202: "futex",
        230: "clock_nanosleep",
        232: "epoll_wait",
        247: "waitid",
        270: "pselect6",
        271: "ppoll",
        281: "epoll_pwait",
        288: "accept4",
    },
    "aarch64": {
        22: "epoll_pwait",
        25: "fcntl",
        29: "ioctl",
        32: "flock",
        63: "read",
        64: "write",
        72: "pselect6",
        73: "ppoll",
        82: "fsync",
        95: "waitid",
        98: "futex",
        101: "nanosleep",
        115: "clock_nanosleep",
        137: "rt_sigtimedwait",
        202: "accept",
        203: "connect",
        207: "recvfrom",
        212: "recvmsg",
        242: "accept4",
        260: "wait4",
    },
}
_NAMES = _NUMBERS.get(platform.machine(), {})


def in_call(pid: int) -> str:
    """The call that the main thread of a process waits in, '' if that cannot be told."""
    number, _ = _call(pid)
    return "" if number < 0 else _NAMES.get(number, f"call {number}")


def is_reading_input(pid: int) -> bool:
    """Whether the main thread waits for its standard input: `input()`, or a prompt of pdb."""
    number, arguments = _call(pid)
    name = _NAMES.get(number, "")
    if name == "read":
        return arguments[0] == 0
    # readline waits with the set of descriptors below 1
    return name in ("select", "pselect6") and arguments[0] == 1


def _call(pid: int) -> tuple[int, list[int]]:
    """(-1, []) if it waits in none, or may not be looked at."""
    try:
        words = Path(f"/proc/{pid}/syscall").read_text().split()
        number = int(words[0])
    except (OSError, ValueError, IndexError):
        return -1, []
    return number, [int(word, 16) for word in words[1:7]]
