"""The daemon's side of a spawner: start it, order processes, learn how they end."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import signal
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import structlog

from flyball.contracts.errors import FlyballError
from flyball.contracts.wire import MALFORMED
from flyball.worker_user import WorkerUser
from host_daemon.kernel.processes import ExitStatus, launch, read_stat, send_signal
from host_daemon.kernel.reaper import Reaper
from host_daemon.spawning.spawn_wire import (
    HEADER,
    MAX_FRAME_BYTES,
    PERMIT,
    Exited,
    Order,
    Permit,
    Ready,
    Spawn,
    Spawned,
    SpawnerNotice,
    WorkerOrder,
    frame,
    interpreter_of,
    parsed,
)
from host_daemon.spawning.spawner_start import StartedSpawner, start_spawner

READY_TIMEOUT_S = 120.0  # importing torch from a cold network file system takes that long
SPAWN_TIMEOUT_S = 10.0

_log = structlog.get_logger(__name__)


class SpawnError(FlyballError):
    """A process could not be started."""

    code = "spawn_failed"


@dataclass(frozen=True, slots=True)
class SpawnedProcess:
    """A process that waits for permission to run. `exit_status` resolves when it ends: its spawner reports how. After
    the spawner's death, or a cold start, the daemon itself is the parent."""

    pid: int
    exit_status: asyncio.Future[ExitStatus]
    origin: SpawnerProcess | socket.socket

    def permit(self, granted: bool = True) -> None:
        """Let it run, or make it end without having done anything."""
        if isinstance(self.origin, SpawnerProcess):
            self.origin.permit(self.pid, granted)
            return
        with self.origin, contextlib.suppress(OSError):  # it died while it waited, which its watcher will notice
            if granted:
                self.origin.sendall(PERMIT)


class SpawnerProcess:
    """One running spawner. Create it with `start`."""

    def __init__(self, pid: int, reaper: Reaper, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        loop = asyncio.get_running_loop()
        self.pid = pid
        self._reaper = reaper
        self.ready: asyncio.Future[Ready] = loop.create_future()
        self._writer = writer
        self._numbers = itertools.count(1)
        self._awaited: dict[int, asyncio.Future[SpawnedProcess]] = {}
        self._listener = asyncio.create_task(self._listen(reader))

    @classmethod
    async def start(
        cls,
        *,
        environment: Mapping[str, str],
        log_path: Path,
        state_dir: Path,
        reaper: Reaper,
        user: WorkerUser | None = None,
    ) -> SpawnerProcess:
        """Launch a spawner; `ready` resolves once torch is imported. Raises SpawnError."""
        try:
            started = start_spawner(environment=environment, log_path=log_path, state_dir=state_dir, user=user)
        except OSError as error:
            raise SpawnError(f"A spawner could not be started: {error}.", hint="see the host's limits") from error
        return await cls.of(started, reaper)

    @classmethod
    async def of(cls, started: StartedSpawner, reaper: Reaper) -> SpawnerProcess:
        """Connect to one that is already launched. Raises SpawnError."""
        try:
            reader, writer = await asyncio.open_connection(sock=started.control)
        except OSError as error:
            started.control.close()
            raise SpawnError(f"A spawner cannot be reached: {error}.", hint="see the host's limits") from error
        return cls(started.pid, reaper, reader, writer)

    @property
    def dead(self) -> bool:
        return self._listener.done()

    async def wait_dead(self) -> None:
        await asyncio.shield(self._listener)

    async def unfit(self) -> str:
        """Wait for the preload. Returns why the spawner must not be forked, '' if it may be.

        Raises SpawnError if it died.
        """
        try:
            async with asyncio.timeout(READY_TIMEOUT_S):
                ready = await asyncio.shield(self.ready)
        except TimeoutError:
            return f"the preload took more than {READY_TIMEOUT_S:.0f} s"
        return ready.unfit

    async def spawn(self, order: Order) -> SpawnedProcess:
        """Fork one process. Raises SpawnError."""
        number = next(self._numbers)
        awaited: asyncio.Future[SpawnedProcess] = asyncio.get_running_loop().create_future()
        self._awaited[number] = awaited
        if self.dead:
            raise SpawnError("The spawner is dead.", hint="the daemon starts another; see spawner.log")
        self._writer.write(frame(Spawn(number, order)))
        try:
            async with asyncio.timeout(SPAWN_TIMEOUT_S):
                return await awaited
        except TimeoutError:
            raise SpawnError(
                f"The spawner did not fork within {SPAWN_TIMEOUT_S:.0f} s.", hint="see spawner.log"
            ) from None
        finally:
            self._awaited.pop(number, None)

    def permit(self, pid: int, granted: bool) -> None:
        if not self.dead:
            self._writer.write(frame(Permit(pid, granted)))

    def close(self) -> None:
        """End it; its children keep running."""
        if not self.dead:
            send_signal(self.pid, signal.SIGKILL)  # it has nothing to lose, and an orderly exit of torch takes long
        self._writer.close()

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        try:
            while True:
                (length,) = HEADER.unpack(await reader.readexactly(HEADER.size))
                if length > MAX_FRAME_BYTES:
                    break
                self._take(parsed(await reader.readexactly(length), SpawnerNotice))
        except (asyncio.IncompleteReadError, OSError, *MALFORMED) as error:
            _log.info("spawner_ended", pid=self.pid, why=type(error).__name__)
        finally:
            if not self.ready.done():
                self.ready.set_exception(SpawnError("The spawner died during its preload.", hint="see spawner.log"))
            for awaited in self._awaited.values():
                if not awaited.done():
                    awaited.set_exception(SpawnError("The spawner died.", hint="see spawner.log"))
            self._writer.close()

    def _take(self, notice: SpawnerNotice) -> None:
        match notice:
            case Ready():
                self.ready.set_result(notice)
            case Spawned(request_id=number, pid=pid, message=message):
                self._take_spawned(number, pid, message)
            case Exited(pid=pid):
                self._reaper.report(pid, ExitStatus(notice.exit_code, notice.signal_number, notice.core_dumped))

    def _take_spawned(self, number: int, pid: int, message: str) -> None:
        awaited = self._awaited.get(number)
        if awaited is None or awaited.done():  # the caller gave up, so it must not run
            if pid:
                self.permit(pid, granted=False)
            return
        if not pid:
            awaited.set_exception(SpawnError(f"The spawner could not fork: {message}.", hint="see the host's limits"))
            return
        stat = read_stat(pid)
        if stat is not None and stat.parent != self.pid:  # a script has taken its spawner over: it may name any process
            awaited.set_exception(SpawnError(f"The spawner names {pid}, which it did not start.", hint="end its jobs"))
            return
        awaited.set_result(SpawnedProcess(pid, self._reaper.watch(pid), self))


def start_cold(
    order: Order, *, environment: Mapping[str, str], log_path: Path, reaper: Reaper, user: WorkerUser | None = None
) -> SpawnedProcess:
    """Start a process in a fresh interpreter, as a child of the daemon. Raises SpawnError."""
    if isinstance(order, WorkerOrder):
        environment = order.environment
    try:
        ours, theirs = socket.socketpair()
        with contextlib.ExitStack() as undo:
            undo.callback(ours.close)  # the process ends when this is closed
            with theirs:
                pid = launch(
                    interpreter_of("host_daemon.spawning.child"),
                    environment=environment,
                    log_path=log_path,
                    descriptor=theirs.fileno(),
                    user=user,
                )
            ours.sendall(frame(order))
            undo.pop_all()
    except OSError as error:
        raise SpawnError(f"A worker could not be started: {error.strerror}.", hint="see the host's limits") from error
    return SpawnedProcess(pid, reaper.watch(pid), ours)
