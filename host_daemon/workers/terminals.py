"""Terminals and pipes for a generation's workers, if the command that launched the job requests them. Creates them, and
keeps a pump running that copies the workers' output to the logs.

None of this may end training. The daemon also holds the far sides, and restarts a pump that died. If both are dead, the
workers' streams continue in the log (see spawning/child.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import struct
import sys
import termios
import tty
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import structlog

from flyball.contracts.on_host.console_request import (
    BOTH,
    ERR,
    OUT,
    ConsoleRequest,
    console_folder,
    control_path,
    request_path,
)
from flyball.contracts.wire import MALFORMED, MAX_MESSAGE_BYTES, decoder_of
from flyball.worker_files import read_worker_file
from host_daemon.kernel.processes import launch, read_stat
from host_daemon.kernel.reaper import Reaper
from host_daemon.spawning.spawn_wire import WorkerStreamPaths
from host_daemon.store.state_dir import HostStateDir
from host_daemon.workers import pump
from host_daemon.workers.workers import Worker

MAX_PUMPS = 5  # started for one generation
DRAIN_TIMEOUT_S = 0.5  # to read everything that a worker wrote before it ended
DRAIN_LOOK_S = 0.005
WRITTEN_AFTER_S = pump.HOLD_S + 0.02  # after it was read, until it is in the log

_log = structlog.get_logger(__name__)


class Terminals:
    """The terminals and pipes of all jobs of this host."""

    def __init__(self, state_dir: HostStateDir, reaper: Reaper) -> None:
        self._state_dir = state_dir
        self._reaper = reaper
        self._open: dict[tuple[str, int], _GenerationTerminals] = {}
        self._keepers: set[asyncio.Task[None]] = set()

    def requested(self, job: str) -> ConsoleRequest | None:
        """The launching command's request; None if it has none, runs elsewhere or is gone, or the workers are another
        user's: its terminals are ours."""
        if self._state_dir.has_worker_user:
            return None
        try:
            path = request_path(self._state_dir.root, job)
            request = decoder_of(ConsoleRequest).decode(read_worker_file(path, MAX_MESSAGE_BYTES))
        except (OSError, *MALFORMED):
            return None
        return request if read_stat(request.pid) else None

    def open(self, request: ConsoleRequest, job: str, generation: int, logs: Sequence[Path]) -> list[WorkerStreamPaths]:
        """Create each worker's streams, by local rank. If that fails (a container without terminals, no descriptors
        left), workers write to their logs only."""
        made = _GenerationTerminals(self._state_dir.root, job, generation, request, self._reaper)
        try:
            streams = [made.add(local_rank, log) for local_rank, log in enumerate(logs)]
            if made.channels:
                made.start_pump()
        except OSError as error:
            _log.warning("no_terminals", job=job, generation=generation, error=str(error))
            made.close()
            return [WorkerStreamPaths(request.piped) for _ in logs]
        if made.channels:
            self._open[job, generation] = made
        return streams

    def keep_pump(self, job: str, generation: int, workers: Sequence[Worker]) -> None:
        """Keep a pump running until these workers have ended. Without workers, close the terminals now."""
        made = self._open.get((job, generation))
        if made is not None:
            task = asyncio.create_task(self._keep_pump(made, workers))
            self._keepers.add(task)
            task.add_done_callback(self._keepers.discard)

    async def drained(self, job: str, generation: int) -> None:
        """Wait, but only briefly, until the output of workers that ended is in their logs."""
        made = self._open.get((job, generation))
        if made is None:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DRAIN_TIMEOUT_S):
                while made.has_unread():
                    await asyncio.sleep(DRAIN_LOOK_S)
                await asyncio.sleep(WRITTEN_AFTER_S)

    async def _keep_pump(self, made: _GenerationTerminals, workers: Sequence[Worker]) -> None:
        ended = asyncio.ensure_future(asyncio.gather(*(worker.handled.wait() for worker in workers)))
        try:
            for _ in range(MAX_PUMPS):
                await asyncio.wait((ended, made.pump_ended), return_when=asyncio.FIRST_COMPLETED)
                if ended.done():
                    break
                _log.warning("pump_restart", job=made.job, generation=made.generation)
                try:
                    made.start_pump()
                except OSError as error:
                    _log.error("no_pump", job=made.job, error=str(error))
                    break
        finally:
            ended.cancel()
            del self._open[made.job, made.generation]
            made.close()


class _GenerationTerminals:
    """The terminals and pipes of one generation. Workers open the near side by its path. It is held open here too, so
    that the far side sees no end before they open it."""

    def __init__(self, root: Path, job: str, generation: int, request: ConsoleRequest, reaper: Reaper) -> None:
        self.job = job
        self.generation = generation
        self.channels: list[dict[str, object]] = []  # arguments of pump.Channel
        self._root = root
        self._request = request
        self._reaper = reaper
        self._far: list[int] = []
        self._near: list[int] = []
        self._folder = console_folder(root, job) / f"g{generation}"
        self._log = Path(os.devnull)
        self.pump_ended: asyncio.Future[object] = asyncio.get_running_loop().create_future()

    def add(self, local_rank: int, log: Path) -> WorkerStreamPaths:
        """Create the streams of one worker."""
        request = self._request
        terminal = request.terminal[local_rank] if local_rank < len(request.terminal) else 0
        if not terminal and not request.apart:
            return WorkerStreamPaths(request.piped)
        if not self.channels:
            self._log = log
        if terminal == BOTH:
            path = self._add_terminal(log, BOTH)
            return WorkerStreamPaths(path if request.keyboard and local_rank == 0 else request.piped, path, path)
        out, err = (
            self._add_terminal(log, stream) if terminal & stream else self._add_pipe(local_rank, log, stream)
            for stream in (OUT, ERR)
        )
        return WorkerStreamPaths(request.piped, out, err)

    def start_pump(self) -> None:
        """Raises OSError."""
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        control = control_path(self._root, self.job, self.generation)
        control.unlink(missing_ok=True)
        os.mkfifo(control, 0o600)
        order = {"channels": self.channels, "control": str(control), "keyboard": self._request.keyboard}
        pid = launch(
            [sys.executable, "-I", "-S", pump.__file__, str(self._root), json.dumps(msgspec.to_builtins(order))],
            environment={"LC_ALL": "C.UTF-8"},
            log_path=self._log,
            kept=self._far,
        )
        self.pump_ended = asyncio.ensure_future(self._reaper.watch(pid))

    def has_unread(self) -> bool:
        return any(_unread_bytes(descriptor) for descriptor in self._far)

    def close(self) -> None:
        """Close this side. The pump ends once the workers, and what they started, have closed theirs."""
        for descriptor in (*self._near, *self._far):
            os.close(descriptor)
        self._near, self._far = [], []
        for pipe in self._folder.glob("local*"):
            pipe.unlink(missing_ok=True)

    def _add_terminal(self, log: Path, stream: int) -> str:
        far, near = os.openpty()
        self._far.append(far)
        self._near.append(near)
        attributes = termios.tcgetattr(near)
        attributes[tty.OFLAG] &= ~termios.OPOST  # a line's end in the log is \n; the user's terminal adds \r
        termios.tcsetattr(near, termios.TCSANOW, attributes)
        if self._request.rows and self._request.columns:
            size = struct.pack("HHHH", self._request.rows, self._request.columns, 0, 0)
            fcntl.ioctl(far, termios.TIOCSWINSZ, size)
        self._add_channel(far, log, stream, is_terminal=True)
        return os.ttyname(near)

    def _add_pipe(self, local_rank: int, log: Path, stream: int) -> str:
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        path = self._folder / f"local{local_rank}.{stream}"
        path.unlink(missing_ok=True)
        os.mkfifo(path, 0o600)
        self._far.append(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC))
        self._near.append(os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC))  # whatever has the name by now
        self._add_channel(self._far[-1], log, stream, is_terminal=False)
        return str(path)

    def _add_channel(self, descriptor: int, log: Path, stream: int, *, is_terminal: bool) -> None:
        self.channels.append({"descriptor": descriptor, "log": str(log), "stream": stream, "is_terminal": is_terminal})


def _unread_bytes(descriptor: int) -> int:
    found = fcntl.ioctl(descriptor, termios.FIONREAD, b"\0" * 4)
    return int(struct.unpack("i", found)[0])


def terminal_environment(request: ConsoleRequest, local_rank: int, environment: Mapping[str, str]) -> Mapping[str, str]:
    """The environment of a worker. If it gets a terminal, the launching command's variables describe that terminal."""
    has_terminal = local_rank < len(request.terminal) and request.terminal[local_rank]
    return {**environment, **request.environment} if has_terminal else environment
