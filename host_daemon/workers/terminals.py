"""Terminals and pipes for a generation's workers, where the command that launched the job asked for them: makes them,
and keeps a pump at work that copies what comes out of them to the logs.

Nothing of it may end training. The daemon holds the far sides too, and starts a pump that died again; when both are
dead the workers' streams go on in the log (see spawning/child.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
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
from flyball.contracts.wire import MALFORMED, decoder_of
from host_daemon.kernel.processes import launch, read_stat
from host_daemon.kernel.reaper import Reaper
from host_daemon.spawning.spawn_wire import WorkerStreamPaths
from host_daemon.store.state_dir import HostStateDir
from host_daemon.workers import pump
from host_daemon.workers.workers import Worker

MAX_PUMPS = 5  # that are started for one generation
DRAIN_TIMEOUT_S = 0.5  # until all that a worker wrote before it ended is read
DRAIN_LOOK_S = 0.005
WRITTEN_AFTER_S = 0.02  # from then on, it is in the log

_log = structlog.get_logger(__name__)


class Terminals:
    """Those of all jobs of this host."""

    def __init__(self, state_dir: HostStateDir, reaper: Reaper) -> None:
        self._state_dir = state_dir
        self._reaper = reaper
        self._open: dict[tuple[str, int], _Generation] = {}
        self._minders: set[asyncio.Task[None]] = set()

    def wish(self, job: str) -> ConsoleRequest | None:
        """What the launching command asks for; None if it asks for nothing, runs elsewhere or is gone."""
        try:
            wish = decoder_of(ConsoleRequest).decode(request_path(self._state_dir.root, job).read_bytes())
        except (OSError, *MALFORMED):
            return None
        return wish if read_stat(wish.pid) else None

    def open(self, wish: ConsoleRequest, job: str, generation: int, logs: Sequence[Path]) -> list[WorkerStreamPaths]:
        """What each worker is to have as its streams, by local rank. Without terminals (a container that has none, no
        descriptors left) that is its log alone."""
        made = _Generation(self._state_dir.root, job, generation, wish, self._reaper)
        try:
            streams = [made.add(local_rank, log) for local_rank, log in enumerate(logs)]
            if made.channels:
                made.start_pump()
        except OSError as error:
            _log.warning("no_terminals", job=job, generation=generation, error=str(error))
            made.close()
            return [WorkerStreamPaths(wish.piped) for _ in logs]
        if made.channels:
            self._open[job, generation] = made
        return streams

    def mind(self, job: str, generation: int, workers: Sequence[Worker]) -> None:
        """Keep a pump at work until these workers have ended; without workers, until now."""
        made = self._open.get((job, generation))
        if made is not None:
            task = asyncio.create_task(self._mind(made, workers))
            self._minders.add(task)
            task.add_done_callback(self._minders.discard)

    async def drained(self, job: str, generation: int) -> None:
        """Wait until what workers wrote before they ended is in their logs, for a moment at most."""
        made = self._open.get((job, generation))
        if made is None:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DRAIN_TIMEOUT_S):
                while made.has_unread():
                    await asyncio.sleep(DRAIN_LOOK_S)
                await asyncio.sleep(WRITTEN_AFTER_S)

    async def _mind(self, made: _Generation, workers: Sequence[Worker]) -> None:
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


class _Generation:
    """The terminals and pipes of one generation. Workers open the near side by its path; it is held open here as well,
    so that it has no end before they do."""

    def __init__(self, root: Path, job: str, generation: int, wish: ConsoleRequest, reaper: Reaper) -> None:
        self.job = job
        self.generation = generation
        self.channels: list[dict[str, object]] = []  # as pump.Channel takes them
        self._root = root
        self._wish = wish
        self._reaper = reaper
        self._far: list[int] = []
        self._near: list[int] = []
        self._folder = console_folder(root, job) / f"g{generation}"
        self._log = Path(os.devnull)
        self.pump_ended: asyncio.Future[object] = asyncio.get_running_loop().create_future()

    def add(self, local_rank: int, log: Path) -> WorkerStreamPaths:
        """Make what one worker needs."""
        wish = self._wish
        terminal = wish.terminal[local_rank] if local_rank < len(wish.terminal) else 0
        if not terminal and not wish.apart:
            return WorkerStreamPaths(wish.piped)
        if not self.channels:
            self._log = log
        if terminal == BOTH:
            path = self._add_terminal(log, BOTH)
            return WorkerStreamPaths(path if wish.keyboard and local_rank == 0 else wish.piped, path, path)
        out, err = (
            self._add_terminal(log, stream) if terminal & stream else self._add_pipe(local_rank, log, stream)
            for stream in (OUT, ERR)
        )
        return WorkerStreamPaths(wish.piped, out, err)

    def start_pump(self) -> None:
        """Raises OSError."""
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        control = control_path(self._root, self.job, self.generation)
        control.unlink(missing_ok=True)
        os.mkfifo(control, 0o600)
        order = {"channels": self.channels, "control": str(control), "keyboard": self._wish.keyboard}
        pid = launch(
            [sys.executable, "-I", "-S", pump.__file__, str(self._root), msgspec.json.encode(order).decode()],
            environment={"LC_ALL": "C.UTF-8"},
            log_path=self._log,
            kept=self._far,
        )
        self.pump_ended = asyncio.ensure_future(self._reaper.watch(pid))

    def has_unread(self) -> bool:
        return any(_unread_bytes(descriptor) for descriptor in self._far)

    def close(self) -> None:
        """The pump ends when the workers have let go of their side too, with what they started."""
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
        if self._wish.rows and self._wish.columns:
            fcntl.ioctl(far, termios.TIOCSWINSZ, struct.pack("HHHH", self._wish.rows, self._wish.columns, 0, 0))
        self._add_channel(far, log, stream, is_terminal=True)
        return os.ttyname(near)

    def _add_pipe(self, local_rank: int, log: Path, stream: int) -> str:
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        path = self._folder / f"local{local_rank}.{stream}"
        path.unlink(missing_ok=True)
        os.mkfifo(path, 0o600)
        self._far.append(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC))
        self._near.append(os.open(path, os.O_WRONLY | os.O_CLOEXEC))
        self._add_channel(self._far[-1], log, stream, is_terminal=False)
        return str(path)

    def _add_channel(self, descriptor: int, log: Path, stream: int, *, is_terminal: bool) -> None:
        self.channels.append({"descriptor": descriptor, "log": str(log), "stream": stream, "is_terminal": is_terminal})


def _unread_bytes(descriptor: int) -> int:
    found = fcntl.ioctl(descriptor, termios.FIONREAD, b"\0" * 4)
    return int(struct.unpack("i", found)[0])


def terminal_environment(wish: ConsoleRequest, local_rank: int, environment: Mapping[str, str]) -> Mapping[str, str]:
    """The environment of a worker that gets a terminal: the variables that describe it are those of the command."""
    has_terminal = local_rank < len(wish.terminal) and wish.terminal[local_rank]
    return {**environment, **wish.environment} if has_terminal else environment
