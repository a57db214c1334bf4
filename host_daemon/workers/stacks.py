"""Takes the Python stacks of this host's ranks while no step completes, before anything is stopped.

py-spy does it from outside, if it is installed and may read other processes. Otherwise the worker is asked by a signal
(flyball.sdk.stack_file); it is sent only to a process that has the file for the answer open, and whose main thread
takes the signal.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

import structlog

from flyball.contracts.on_host.segments import STACKS_SUFFIX
from flyball.contracts.reports.rank_stands import RankStand
from flyball.sdk.stack_file import DUMP_SIGNAL
from flyball.worker_files import open_worker_fifo, open_worker_file, read_worker_file_from
from host_daemon.kernel.processes import open_pidfd_of, read_stat, signal_pidfd, user_of
from host_daemon.kernel.system_calls import seen_call
from host_daemon.kernel.thread_waits import stands_a_signal
from host_daemon.kernel.worker_reads import NotReadable, WorkerReads
from host_daemon.workers.stack_reading import SeenProcess, main_thread, stand_of

MAX_DUMP_BYTES = 256 << 10
AT_ONCE = 16  # ranks whose stacks are taken together
READ_WITHIN_S = 2.0  # of what a process shows: what takes longer hangs
_LOOK_S = 0.01
_PY_SPY_SHARE = 0.5  # of the time that is left; the signal needs the rest if py-spy does not answer
_KILLED_S = 1.0  # for a killed py-spy to be gone
_QUIET_S = 0.05  # a dump that has not grown for this long is complete
_LOOKS_AT_STATE = 5  # a thread that computes may be caught asleep once
_PIPE_VARIABLE, _BUFFER_VARIABLES = (
    "TORCH_NCCL_DEBUG_INFO_PIPE_FILE",
    ("TORCH_NCCL_TRACE_BUFFER_SIZE", "TORCH_FR_BUFFER_SIZE"),
)
_DUMP_VARIABLES = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
_DEFAULT_DUMP = "/tmp/nccl_trace_rank_"  # of torch

T = TypeVar("T")
_log = structlog.get_logger(__name__)


class StackSource(NamedTuple):
    """A rank's process, and where its beacon is."""

    rank: int
    pid: int
    start_ticks: int
    beacon: str


class _ReadProcess:
    """A rank's process as it is read: in threads, since it may wait for that process, or for its file system."""

    def __init__(self, source: StackSource, reads: WorkerReads, until_s: float, *, gently: bool) -> None:
        self.gently = gently
        self.source = source
        self.until_s = until_s
        self._reads = reads

    async def read(self, work: Callable[[], T]) -> T:
        """Raises NotReadable."""
        left_s = self.until_s - asyncio.get_running_loop().time()
        return await self._reads.read(self.source.pid, work, timeout_s=max(min(left_s, READ_WITHIN_S), 0.0))


async def take_stands(
    sources: Sequence[StackSource], timeout_s: float, reads: WorkerReads, *, gently: bool = False
) -> tuple[RankStand, ...]:
    """Find where these ranks stand, within `timeout_s`. A rank whose stack cannot be had in time is returned without
    one, and with what the kernel shows. `gently`: no wait of a rank may end by it."""
    until_s = asyncio.get_running_loop().time() + timeout_s
    slots = asyncio.Semaphore(AT_ONCE)

    async def one(source: StackSource) -> RankStand | None:
        async with slots:
            return await _stand(_ReadProcess(source, reads, until_s, gently=gently))

    found = await asyncio.gather(*map(one, sources))
    return tuple(stand for stand in found if stand is not None)


async def _stand(of: _ReadProcess) -> RankStand | None:
    source = of.source
    process = await _seen(of)
    if process is None:
        return None
    try:
        # A dump of the recorder replaces the one before, which may be of a fault.
        recorder = "" if of.gently else await of.read(partial(trigger_flight_recorder, source.pid, source.rank))
        dump, note = await _dump(of, process)
    except NotReadable:
        recorder, dump, note = "", "", "no stack: the process is not readable"
    if not dump and (later := await _seen(of)) is not None:
        process = later  # it may have been stopped just now
    frames = main_thread(dump)
    if dump and not frames:
        note = "the dump does not show its main thread"
    return stand_of(source.rank, frames, process, "; ".join(filter(None, (note, recorder))))


async def _seen(of: _ReadProcess) -> SeenProcess | None:
    """What the kernel shows of the main thread, before it is disturbed."""
    state, pid = "", of.source.pid
    for _ in range(_LOOKS_AT_STATE):
        stat = read_stat(pid)
        if stat is None or stat.state in "ZX":
            return None
        state = stat.state
        if state != "S":
            break
        await asyncio.sleep(_LOOK_S)
    try:
        call, target = await of.read(partial(seen_call, pid)) if state in "SD" else ("", "")
    except NotReadable:
        call, target = "", ""
    return SeenProcess(state, call, target)


async def _dump(of: _ReadProcess, process: SeenProcess) -> tuple[str, str]:
    """The dump of a process's stacks, or why there is none. Raises NotReadable."""
    source, until_s = of.source, of.until_s
    py_spy = shutil.which("py-spy")
    if py_spy is not None:
        now_s = asyncio.get_running_loop().time()
        if dump := await _by_py_spy(py_spy, source.pid, now_s + (until_s - now_s) * _PY_SPY_SHARE):
            return dump, ""
    if process.state in "TtD":
        return "", "no stack: the process cannot answer"
    if of.gently and not await of.read(partial(_stands_a_signal, source.pid)):
        return "", "no stack: a signal might end its system call"
    path = Path(source.beacon + STACKS_SUFFIX)
    if not await of.read(partial(answers_requests, source.pid, path)):
        return "", "no stack: the process answers no request for it"
    return await _by_signal(source, path, until_s)


async def _by_py_spy(py_spy: str, pid: int, until_s: float) -> str:
    try:
        # Without a pause, which needs ptrace and changes what the kernel shows.
        process = await asyncio.create_subprocess_exec(
            py_spy,
            "dump",
            "--nonblocking",
            "--full-filenames",
            "--pid",
            str(pid),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )
    except OSError:
        return ""
    output = b""
    try:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(until_s):
                output, _ = await process.communicate()
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_KILLED_S):
                    await process.wait()
    # Its exit code may be unknown: the Reaper waits for every child.
    dump = output[:MAX_DUMP_BYTES].decode(errors="replace")
    return dump if main_thread(dump) else ""


async def _by_signal(source: StackSource, path: Path, until_s: float) -> tuple[str, str]:
    clock = asyncio.get_running_loop().time
    descriptor = open_pidfd_of(source.pid, lambda: _is_it(source))
    if descriptor is None:
        return "", "no stack: the process ended"
    try:
        before = size = _emptied(path)
        signal_pidfd(descriptor, DUMP_SIGNAL)
        grew_s = clock()
        while clock() < until_s and (size == before or clock() - grew_s < _QUIET_S):
            await asyncio.sleep(_LOOK_S)
            if size == before and (stat := read_stat(source.pid)) is not None and stat.state in "TtD":
                return "", "no stack: the process cannot answer"
            if (now := path.lstat().st_size) != size:
                size, grew_s = now, clock()
        dump = read_worker_file_from(path, before, MAX_DUMP_BYTES)[0].decode(errors="replace")
    except OSError as error:
        return "", f"no stack: {error.strerror}"
    finally:
        os.close(descriptor)
    return dump, "" if dump else "no stack: the process did not answer in time"


def _emptied(path: Path) -> int:
    """How long the file is, once it was emptied if it had grown. A link of the script's is not followed, to wherever it
    leads."""
    size_bytes = path.lstat().st_size
    if size_bytes <= MAX_DUMP_BYTES:
        return size_bytes
    descriptor = open_worker_file(path, os.O_WRONLY)
    try:
        os.ftruncate(descriptor, 0)  # its writer appends
    finally:
        os.close(descriptor)
    return 0


def _stands_a_signal(pid: int) -> bool:
    try:
        return stands_a_signal(pid)
    except (OSError, ValueError):
        return False


def _is_it(source: StackSource) -> bool:
    stat = read_stat(source.pid)
    return stat is not None and stat.start_ticks == source.start_ticks


def answers_requests(pid: int, path: Path) -> bool:
    """Whether the process handles DUMP_SIGNAL, which would end it otherwise, and has the file for the answer open: a
    program that was executed since then has neither. And whether its main thread lets the signal through: another
    thread would answer otherwise."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(errors="replace")  # of the main thread
        masks = dict(line.split(":", 1) for line in status.splitlines() if line.startswith(("SigCgt:", "SigBlk:")))
        caught, blocked = int(masks["SigCgt"], 16), int(masks["SigBlk"], 16)
        is_open = any(_refers(link, path) for link in Path(f"/proc/{pid}/fd").iterdir())
    except (OSError, KeyError):
        return False
    return bool((caught & ~blocked) >> (DUMP_SIGNAL - 1) & 1) and is_open


def _refers(link: Path, path: Path) -> bool:
    try:
        return link.samefile(path)
    except OSError:
        return False


def trigger_flight_recorder(pid: int, rank: int) -> str:
    """Have PyTorch's NCCL flight recorder write its dump, where the job has switched on both the recorder and its
    trigger (a named pipe, which a thread of torch reads). Returns where the dump goes; '' if it is off.

    Source: torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp, DumpPipe. Not run with NCCL.
    """
    try:
        entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        owner = user_of(pid)
    except (OSError, ValueError):
        return ""
    variables = dict(entry.decode(errors="replace").partition("=")[::2] for entry in entries)
    stem = variables.get(_PIPE_VARIABLE, "")
    if not stem or all(variables.get(name, "0") in ("", "0") for name in _BUFFER_VARIABLES):
        return ""
    try:
        descriptor = open_worker_fifo(f"{stem}{rank}.pipe", owner)
    except (OSError, ValueError):  # no reader: torch has not made its process group yet; or it is something else
        return ""
    try:
        os.write(descriptor, b"1\n")
    except OSError:
        return ""
    finally:
        os.close(descriptor)
    dump = next((variables[name] for name in _DUMP_VARIABLES if variables.get(name)), _DEFAULT_DUMP)
    return f"NCCL flight recorder: {dump}{rank}"
