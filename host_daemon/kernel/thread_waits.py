"""Proves from /proc that nothing can end a process's wait: no thread of it can run again by itself.

A wait in a private futex without a timeout ends only by a thread of the same process. If the main thread waits so for a
lock of Python's, and every other thread waits so too, or is known to run no Python code, then nobody is left who could
release the lock. What cannot be read or is not known proves nothing.
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from flyball.sdk.stack_file import DUMP_SIGNAL
from host_daemon.kernel.system_calls import named_call

_PRIVATE, _REALTIME = 0x80, 0x100  # flags of futex(2)
_FUTEX_WAITS = frozenset({0, 6, 9, 11, 13})  # WAIT, LOCK_PI, WAIT_BITSET, WAIT_REQUEUE_PI, LOCK_PI2
_STACK_BYTES = 4096  # of the innermost frames: those of libc, and of whoever called it
_C_LIBRARY = re.compile(r"^(?:libc|libpthread|ld|ld-linux|ld-musl)[-.]")
_PYTHON = re.compile(r"^(?:lib)?python\d")
# Threads of torch, NCCL and CUDA that poll for ever. They run no Python code of the script while no collective is under
# way, and one that is has a thread that waits with a timeout.
_POLLING = re.compile(r"^(?:gloo_tcp_loop|pt_nccl_(?:watchdg|heartbt)|pt_tcpstore\w*|NCCL \w+|cuda-EvtHandlr)$")
# Whose code goes on waiting after a signal: Python's since PEP 475, and torch's.
_WAITS_ON = re.compile(r"^(?:(?:lib)?python\d|libtorch|libc10)")
_ENDED_BY_SIGNALS = frozenset({"pause", "rt_sigsuspend"})
# Signals whose handlers end no wait of a training script: Ctrl-C and the end, faults, glibc's own, and ours for stacks.
_HARMLESS_SIGNALS = frozenset({2, 4, 6, 7, 8, 11, 15, 32, 33, int(DUMP_SIGNAL)})


class ThreadWait(NamedTuple):
    """What the kernel shows of one thread."""

    tid: int
    name: str
    state: str  # of /proc/<pid>/stat: R, S, D, ...
    call: str  # the system call that it is in
    endless: bool  # a private futex without a timeout
    has_timeout: bool  # of a futex
    switches: int  # how often it has gone to sleep so far
    origin: str  # the file whose code called the C library


def threads_of(pid: int) -> tuple[ThreadWait, ...]:
    """The threads of a process, the main thread first. Raises OSError, or ValueError, if any of them cannot be read."""
    code, found = _code_of(pid), []
    with Path(f"/proc/{pid}/mem").open("rb", buffering=0) as memory:
        for task in sorted(Path(f"/proc/{pid}/task").iterdir(), key=lambda entry: (int(entry.name) != pid, entry.name)):
            text = (task / "stat").read_text(errors="replace")
            name, state = text[text.index("(") + 1 : text.rindex(")")], text[text.rindex(")") + 2]
            words = (task / "syscall").read_text().split()
            if len(words) < 9:  # it runs
                found.append(ThreadWait(int(task.name), name, state, "", False, False, _switches(task), ""))
                continue
            call, arguments = named_call(int(words[0])), [int(word, 16) for word in words[1:]]
            is_endless = call == "futex" and _is_endless(arguments)
            of_main = call == "futex" and int(task.name) == pid
            origin = _origin(memory.fileno(), arguments[6], code) if of_main else ""
            is_timed = call == "futex" and arguments[3] != 0
            found.append(ThreadWait(int(task.name), name, state, call, is_endless, is_timed, _switches(task), origin))
    return tuple(found)


def _switches(task: Path) -> int:
    lines = (task / "status").read_text(errors="replace").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("voluntary_ctxt"))


def _is_endless(arguments: Sequence[int]) -> bool:
    operation, timeout = arguments[1], arguments[3]
    is_wait = operation & ~(_PRIVATE | _REALTIME) in _FUTEX_WAITS
    return is_wait and bool(operation & _PRIVATE) and timeout == 0


def _code_of(pid: int) -> list[tuple[int, int, str]]:
    """First address, end and file of each mapping that can be executed."""
    found = []
    for line in Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines():
        fields = line.split(maxsplit=5)
        if "x" in fields[1]:
            first, end = fields[0].split("-")
            found.append((int(first, 16), int(end, 16), fields[5].rpartition("/")[2] if len(fields) > 5 else ""))
    return found


def _origin(memory: int, stack: int, code: Sequence[tuple[int, int, str]]) -> str:
    """The file of the innermost return address on the stack that is not the C library's."""
    data = os.pread(memory, _STACK_BYTES, stack)
    for (address,) in struct.iter_unpack("N", data[: len(data) // 8 * 8]):
        name = next((name for first, end, name in code if first <= address < end), None)
        if name is not None and not _C_LIBRARY.match(name) and name != "[vdso]":
            return name
    return ""


def stands_a_signal(pid: int) -> bool:
    """Whether the main thread goes on as it does after a signal that a handler takes. A wait of foreign C code may end
    early. Raises OSError, or ValueError."""
    words = Path(f"/proc/{pid}/syscall").read_text().split()
    if len(words) < 9:
        return True  # it runs
    call = named_call(int(words[0]))
    if call == "futex" and int(words[4], 16) == 0:  # without a timeout, in which the kernel waits on
        return True
    with Path(f"/proc/{pid}/mem").open("rb", buffering=0) as memory:
        origin = _origin(memory.fileno(), int(words[7], 16), _code_of(pid))
    return call not in _ENDED_BY_SIGNALS and bool(_WAITS_ON.match(origin))


def may_get_a_signal(pid: int) -> bool:
    """Whether a handler of the script may run at any time: of a child's end, an alarm (which no page of /proc shows), a
    signal from outside, a POSIX timer. Raises OSError."""
    status = Path(f"/proc/{pid}/status").read_text(errors="replace")
    caught = next(int(line.split()[1], 16) for line in status.splitlines() if line.startswith("SigCgt:"))
    if any(caught >> (number - 1) & 1 for number in range(1, 65) if number not in _HARMLESS_SIGNALS):
        return True
    return bool(Path(f"/proc/{pid}/timers").read_text())


def awaits(threads: Sequence[ThreadWait]) -> str:
    """What may end the main thread's wait for a lock from outside: its own timeout, or the system call in which another
    thread is; '' for nothing that is seen. Pure."""
    main, others = threads[0], threads[1:]
    if main.call != "futex":
        return ""
    if main.has_timeout:
        return "a timeout"
    calls = (thread.call or "running" for thread in others if not _POLLING.match(thread.name))
    return next((call for call in calls if call != "futex"), "")


def proof(threads: Sequence[ThreadWait], before: Sequence[ThreadWait]) -> str:
    """Why nothing can end the wait of the main thread, in words; '' if that is not proved. `before`: the threads some
    time ago: only if none ran in between did all wait at once. Pure."""
    main, others = threads[0], threads[1:]
    if not main.endless or not _PYTHON.match(main.origin) or main.state != "S":
        return ""
    if _by_thread(threads) != _by_thread(before):
        return ""
    if not all((thread.endless and thread.state == "S") or _POLLING.match(thread.name) for thread in others):
        return ""
    if not others:
        return "its main thread waits for a lock without a timeout, and it has no other thread that could release it"
    count = f"{len(others)} other thread{'' if len(others) == 1 else 's'}"
    return f"its main thread waits for a lock without a timeout, and none of its {count} can release it"


def _by_thread(threads: Sequence[ThreadWait]) -> dict[int, int | None]:
    return {thread.tid: None if _POLLING.match(thread.name) else thread.switches for thread in threads}
