"""Reads Python stacks, as faulthandler and py-spy print them, and finds what a rank's main thread does. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from flyball.contracts.reports.rank_stands import MAX_STACK_CHARS, RankStand, Stand

MAX_FRAMES = 100
_FAULTHANDLER_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+|\?+) in (?P<function>.*)$')
_PY_SPY_FRAME = re.compile(r"^    (?P<function>.+) \((?P<file>[^()]+?)(?::(?P<line>\d+))?\)$")
_PY_SPY_MAIN = re.compile(r'^Thread \S+ .*"MainThread"')
_INSTALLED = re.compile(r"^.*/(?:site|dist)-packages/")
_STANDARD = re.compile(r"^.*/lib/python3\.\d+/(?!site-packages|dist-packages)|^<frozen ")
_OURS = re.compile(r"/(?:ckpt_engine/(?:trainer|slots|dcp|path_saves|frameworks)|flyball/sdk|host_daemon/spawning)/")

# Code that runs below others and says nothing about what for.
_NEUTRAL = re.compile(
    r"/torch/(?:_tensor|_ops|_compile|_dynamo/|_functorch/|utils/_|autograd/|nn/modules/module|cuda/)"
)
_LOADS_DATA = re.compile(r"/torch/utils/data/")
_SAVES = re.compile(
    r"/ckpt_engine/(?:trainer|dcp|path_saves)/|/torch/distributed/checkpoint/|/torch/serialization\.py$"
)
_COMMUNICATES = re.compile(r"/torch/distributed/(?!elastic/|launcher/|run\.py|checkpoint/|pipelining/)")
_LOGS_CALLS = re.compile(r"/c10d_logger\.py$")
_SYNCS_GRADIENTS = re.compile(r"^(?:_engine_run_backward|run_backward)$")
_EVALUATES = re.compile(
    r"^(?:run_)?_?(?:eval|evaluate|evaluation|validate|validation|validation_step|test_step)(?:_|$)"
)
_LOCKS = re.compile(r"^(?:acquire|wait|join|_wait_for_tstate_lock|__enter__|get|result)$")

_LOCK_CALLS = frozenset({"futex"})
_FILE_CALLS = frozenset(
    {"read", "write", "pread64", "pwrite64", "open", "openat", "stat", "fstat", "newfstatat", "statx"}
    | {"fsync", "fdatasync", "flock", "fcntl"}
)
_NETWORK_CALLS = frozenset(
    {"poll", "ppoll", "epoll_wait", "epoll_pwait", "select", "pselect6", "connect", "accept", "accept4"}
    | {"recvfrom", "recvmsg", "sendto", "sendmsg"}
)
_PROCESS_CALLS = frozenset({"wait4", "waitid"})
_SLEEP_CALLS = frozenset({"nanosleep", "clock_nanosleep", "pause"})


class Frame(NamedTuple):
    """One call: its function, file and line; -1: unknown."""

    function: str
    file: str
    line: int

    def __str__(self) -> str:
        file = _STANDARD.sub("", _INSTALLED.sub("", self.file))
        return f"{self.function} ({file}:{self.line})"[:400]


class SeenProcess(NamedTuple):
    """What the kernel shows of a rank's main thread."""

    state: str  # of /proc/<pid>/stat: R, S, D, T, t, ...
    call: str = ""  # the system call it is in
    target: str = ""  # what that call's first descriptor refers to: a path, "pipe:[7]", "socket:[7]"

    def __str__(self) -> str:
        match self.state:
            case "R":
                return "running"
            case "T" | "t":
                return "stopped by a signal" if self.state == "T" else "held by a debugger"
            case "D":
                return f"blocked in the kernel{f', in {self.call}' if self.call else ''}"
        of = f" of {self.target}" if self.target else ""
        return f"in {self.call}{of}"[:400] if self.call else "asleep"


def main_thread(dump: str) -> tuple[Frame, ...]:
    """The frames of the main thread, innermost first; () if the dump does not have it.

    faulthandler writes this thread only; in a worker of an earlier version it lists all, without names, from the newest
    to the oldest, which is the main thread. py-spy names them.
    """
    lines = dump.splitlines()
    named = next((number for number, line in enumerate(lines) if _PY_SPY_MAIN.match(line)), None)
    if named is not None:
        return _frames(lines[named + 1 :], _PY_SPY_FRAME)
    starts = [number for number, line in enumerate(lines) if line.endswith("(most recent call first):")]
    if not starts or "..." in lines[starts[-1] :][-1:]:  # too many threads: the oldest is left out
        return ()
    return _frames(lines[starts[-1] + 1 :], _FAULTHANDLER_FRAME)


def _frames(lines: Sequence[str], pattern: re.Pattern[str]) -> tuple[Frame, ...]:
    found: list[Frame] = []
    for line in lines[:MAX_FRAMES]:
        match = pattern.match(line)
        if match is None:
            break
        number = match["line"] or ""
        function = match["function"].rpartition(".")[2]  # py-spy names its class, too
        found.append(Frame(function, match["file"], int(number) if number.isdecimal() else -1))
    return tuple(found)


def stand_of(rank: int, frames: Sequence[Frame], process: SeenProcess, note: str = "") -> RankStand:
    """Find where a rank stands, by the frames of its main thread (innermost first) and what the kernel shows."""
    own = next((frame for frame in frames if _is_the_jobs(frame)), None)
    kind, call, shown = _kind(frames, own, process)
    stack = "\n".join(str(frame) for frame in frames if not _OURS.search(frame.file) or kind is Stand.CHECKPOINT)
    return RankStand(
        rank=rank,
        kind=kind.value,
        call=call[:64],
        place=str(shown) if shown else "",
        caller=str(own) if own and own is not shown else "",
        process=str(process),
        stack=stack[:MAX_STACK_CHARS],
        note=note[:400],
    )


def _kind(frames: Sequence[Frame], own: Frame | None, process: SeenProcess) -> tuple[Stand, str, Frame | None]:
    """The kind of stand, the name of a collective, and the frame that shows it."""
    innermost = own or (frames[0] if frames else None)
    if process.state in "Tt":
        return Stand.STOPPED, "", innermost
    if (saving := _first(frames, _SAVES)) is not None:
        return Stand.CHECKPOINT, "", saving
    if (loading := _first(frames, _LOADS_DATA)) is not None:
        return Stand.DATA_LOADER, "", loading
    if (collective := _collective(frames, process)) is not None:
        return (
            Stand.COLLECTIVE,
            "backward" if _SYNCS_GRADIENTS.match(collective.function) else collective.function,
            collective,
        )
    kind = _by_kernel(frames, process)
    if kind is Stand.CODE and (evaluating := next((f for f in frames if _evaluates(f)), None)) is not None:
        return Stand.EVALUATION, "", evaluating
    return kind, "", innermost


def _first(frames: Sequence[Frame], files: re.Pattern[str]) -> Frame | None:
    """The innermost frame in these files. A frame of the job's own dataset below the data loader does not hide it."""
    return next((frame for frame in frames if files.search(frame.file) and not _imports(frame)), None)


def _imports(frame: Frame) -> bool:
    return frame.function == "<module>"


def _collective(frames: Sequence[Frame], process: SeenProcess) -> Frame | None:
    """The frame of the collective that the thread is in. Only the innermost frame that is no mere wrapper counts: DDP
    and FSDP also stand below the model's own code."""
    backward = None
    for frame in frames:
        if _COMMUNICATES.search(frame.file) and not _imports(frame):
            if not _LOGS_CALLS.search(frame.file):
                return frame
        elif _SYNCS_GRADIENTS.match(frame.function):
            backward = frame
        elif not (_STANDARD.match(frame.file) or _NEUTRAL.search(frame.file)):
            break
    # Gradients are reduced within backward. Without a processor in use, it waits for that.
    return backward if process.state == "S" else None


def _by_kernel(frames: Sequence[Frame], process: SeenProcess) -> Stand:
    if process.state == "D":
        return Stand.BLOCKED
    if process.state == "R":
        return Stand.CODE
    innermost = frames[0] if frames else None
    if (
        innermost
        and _STANDARD.match(innermost.file)
        and "threading" in innermost.file
        and _LOCKS.match(innermost.function)
    ):
        return Stand.LOCK
    call = process.call
    if call in _FILE_CALLS:
        return Stand.NETWORK if process.target.startswith("socket:") else Stand.FILE
    for calls, stand in (
        (_LOCK_CALLS, Stand.LOCK),
        (_NETWORK_CALLS, Stand.NETWORK),
        (_PROCESS_CALLS, Stand.PROCESS),
        (_SLEEP_CALLS, Stand.SLEEP),
    ):
        if call in calls:
            return stand
    return Stand.UNKNOWN


def _is_the_jobs(frame: Frame) -> bool:
    return not (
        _INSTALLED.match(frame.file)
        or _STANDARD.match(frame.file)
        or _OURS.search(frame.file)
        or frame.file.startswith("<")
        or "/torch/" in frame.file
    )


def _evaluates(frame: Frame) -> bool:
    return _is_the_jobs(frame) and bool(_EVALUATES.match(frame.function))
