"""Keeps a checkpoint engine running beside the daemon. It outlives the daemon, and a restarted daemon adopts it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
import sys
from collections.abc import Awaitable, Callable

import msgspec
import structlog

from flyball.backoff import Backoff
from flyball.contracts.checkpoints import CleanSteps, StoredPoints
from flyball.contracts.clock import Clock
from flyball.contracts.credentials import EngineKeys
from flyball.contracts.errors import FlyballError, InvalidMessage, Unreachable
from flyball.contracts.identity import EngineAddresses
from flyball.contracts.on_host.engine_wire import EngineReply, GetStatus
from flyball.contracts.reports.signals import EngineRestarted, ReportReply
from flyball.contracts.reports.testimony import Testimony
from flyball.process_title import read_words
from host_daemon.engine.engine_client import EngineClient, EngineRefused
from host_daemon.kernel.processes import launch, open_pidfd, open_pidfd_of, send_signal, signal_pidfd
from host_daemon.settings import DaemonSettings, read_token_file
from host_daemon.store.state_dir import HostStateDir

POLL_S = 0.2
START_TIMEOUT_S = 300.0  # of a busy machine, or a slow file system: one that is ended then begins anew
HANG_TIMEOUT_S = 15.0
STOP_TIMEOUT_S = 10.0
MIN_BACKOFF_S = 0.1  # between attempts to start it, doubled up to the maximum
MAX_BACKOFF_S = 5.0

_log = structlog.get_logger(__name__)


class EngineKeeper:
    """Starts or adopts the engine, polls it, and restarts it when it has died or hangs."""

    def __init__(
        self,
        settings: DaemonSettings,
        state_dir: HostStateDir,
        client: EngineClient,
        clock: Clock,
        *,
        on_restart: Callable[[EngineRestarted], Awaitable[None]],
        on_status: Callable[[EngineReply], Awaitable[None]],
        on_trouble: Callable[[str], Awaitable[None]],
    ) -> None:
        """`on_trouble` gets what is wrong with the replies of an engine that lives, and '' once nothing is."""
        self._settings = settings
        self._state_dir = state_dir
        self._client = client
        self._clock = clock
        self._on_restart = on_restart
        self._on_status = on_status
        self._on_trouble = on_trouble
        self._trouble: str | None = None  # as given to `on_trouble`; None: nothing yet
        self._pid = 0
        self._alive = asyncio.Event()
        self._peers_in_question: tuple[str, ...] = ()
        self._ask_now = asyncio.Event()
        self._in_touch_until_s = 0.0
        self._stored_points: StoredPoints = {}
        self._clean_steps: CleanSteps | None = None
        self._addresses: EngineAddresses = {}  # of peers that the engine cannot reach
        self._replied_at_s = 0.0  # when `status` came
        self.restores_since = 0.0  # restores up to this wall time are known; set it before `run` to continue from there
        self.keys = EngineKeys()  # the host's answer key, as the supervisor said last
        self.status = EngineReply(ok=False)  # the newest reply; it stays while the engine is away

    @property
    def alive(self) -> bool:
        return self._alive.is_set()

    def ask_about(self, peers: tuple[str, ...]) -> None:
        """Have the engine report whether these peers, and no others, are alive; at once if they are new."""
        if peers != self._peers_in_question:
            self._peers_in_question = peers
            self._ask_now.set()

    def in_touch(self, until_s: float, reply: ReportReply) -> None:
        """The supervisor replied: until `until_s` (monotonic) it cannot give this host up. A reply without stored
        points leaves the last ones in force."""
        self._in_touch_until_s = until_s
        self._clean_steps = reply.clean_steps
        if reply.stored_points:
            self._stored_points = reply.stored_points
        if reply.engine_addresses != self._addresses:
            self._addresses = reply.engine_addresses
            self._ask_now.set()

    def testimonies(self) -> tuple[Testimony, ...]:
        """Reports on the peers in question that are alive, with their ages as of now."""
        age_s = self._clock.monotonic_s() - self._replied_at_s
        testimonies = self.status.testimonies if self.alive else ()
        return tuple(msgspec.structs.replace(t, engine_s=t.engine_s + age_s) for t in testimonies)

    async def wait_alive(self, timeout_s: float) -> bool:
        """Wait for the engine. Returns whether it is alive."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._alive.wait()
        return self.alive

    async def run(self) -> None:
        """Keep an engine running until cancelled; it is left running then."""
        had_one = self._state_dir.engine_pid.exists()
        adopted = had_one and await self._adopt()
        backoff = Backoff(MIN_BACKOFF_S, MAX_BACKOFF_S)
        while True:
            if not adopted:
                try:
                    await self._start()
                except (FlyballError, OSError) as error:
                    pause_s = backoff.failed()
                    _log.error("engine_not_started", error=str(error), next_try_s=pause_s)
                    await asyncio.sleep(pause_s)
                    continue
                if had_one:
                    await self._on_restart(EngineRestarted("The checkpoint engine was dead; another was started."))
            adopted, had_one = False, True
            backoff.succeeded()
            await self._watch()
            self._alive.clear()
            _log.warning("engine_died", pid=self._pid)

    async def stop(self) -> None:
        """Stop the engine in order: on SIGTERM it finishes its commits."""
        if not self._pid:
            return
        pid, self._pid = self._pid, 0
        pidfd = open_pidfd_of(pid, lambda: self._is_engine(pid))
        if pidfd is None:
            return
        try:
            for number in (signal.SIGTERM, signal.SIGKILL):
                signal_pidfd(pidfd, number)
                if await _ended(pidfd, STOP_TIMEOUT_S):
                    return
        finally:
            os.close(pidfd)

    async def _adopt(self) -> bool:
        """Take over an engine that an earlier daemon started. Kill one that does not reply, or not as this release
        does."""
        try:
            await self._note(await self._client.ask(GetStatus(restores_since=self.restores_since)))
        except FlyballError as error:
            await self._kill_silent(error)
            return False
        _log.info("engine_adopted", pid=self._pid)
        return True

    async def _kill_silent(self, error: FlyballError) -> None:
        pid = _pid_in(self._state_dir)
        pidfd = open_pidfd_of(pid, lambda: self._is_engine(pid)) if pid else None
        if pidfd is None:
            return
        try:
            _log.warning("engine_silent", pid=pid, error=str(error))
            signal_pidfd(pidfd, signal.SIGKILL)
            await _ended(pidfd, STOP_TIMEOUT_S)
        finally:
            os.close(pidfd)

    def _is_engine(self, pid: int) -> bool:
        """Whether this process is this folder's engine."""
        try:
            words = read_words(pid)
        except OSError:
            return False
        return "ckpt_engine.host.server" in words and str(self._state_dir.root) in words

    async def _start(self) -> None:
        settings = self._settings
        argv = [sys.executable, "-P", "-m", "ckpt_engine.host.server"]
        argv += ["--state-dir", str(self._state_dir.root), "--host-id", settings.host_id]
        key_file = self._state_dir.keep_peer_key(read_token_file(settings.token_file, settings.host_id).peer_key)
        argv += ["--address", settings.address, "--token-file", str(key_file)]
        if settings.worker_user is not None:
            argv += ["--worker-user", settings.worker_user.name]
        self._pid = launch(argv, environment=dict(os.environ), log_path=self._state_dir.engine_log)
        pidfd = open_pidfd(self._pid)
        try:
            await self._await_first_reply(pidfd)
        finally:
            if pidfd is not None:
                os.close(pidfd)
        _log.info("engine_started", pid=self._pid, address=self.status.address)

    async def _await_first_reply(self, pidfd: int | None) -> None:
        deadline = self._clock.monotonic_s() + START_TIMEOUT_S
        while self._clock.monotonic_s() < deadline:
            if pidfd is None or _readable(pidfd):
                raise Unreachable("The checkpoint engine ended while it started.", hint="see engine.log")
            try:
                await self._note(await self._client.ask(GetStatus(restores_since=self.restores_since), timeout_s=1.0))
                return
            except (EngineRefused, InvalidMessage) as error:  # it is up
                await self._note_trouble(str(error))
                return
            except Unreachable:
                pass
            await asyncio.sleep(0.01)
        send_signal(self._pid, signal.SIGKILL)
        raise Unreachable(f"The checkpoint engine was not up within {START_TIMEOUT_S:.0f} s.", hint="see engine.log")

    async def _watch(self) -> None:
        """Poll the engine until it ends. Kill it if it is silent for too long. One that answers, but not what is asked
        for, lives: it saves, and would be no better after a restart. That is a trouble with a name."""
        ended = asyncio.Event()

        def end() -> None:
            ended.set()
            self._ask_now.set()

        pid = self._pid
        pidfd = open_pidfd_of(pid, lambda: self._is_engine(pid))
        if pidfd is None:
            return
        loop = asyncio.get_running_loop()
        loop.add_reader(pidfd, end)
        replied_at_s = self._clock.monotonic_s()
        try:
            while not ended.is_set():
                try:
                    self._ask_now.clear()
                    request = GetStatus(
                        self.restores_since,
                        self._peers_in_question,
                        self._in_touch_until_s,
                        self._stored_points,
                        self._clean_steps,
                        self._addresses,
                        self.keys,
                    )
                    reply = await self._client.ask(request)
                    replied_at_s = self._clock.monotonic_s()
                    await self._note(reply)
                except (EngineRefused, InvalidMessage) as error:
                    self._alive.clear()  # what it holds is not known
                    replied_at_s = self._clock.monotonic_s()
                    await self._note_trouble(str(error))
                except Unreachable as error:
                    self._alive.clear()
                    if self._clock.monotonic_s() - replied_at_s > HANG_TIMEOUT_S:
                        _log.error("engine_hangs", pid=pid, error=str(error))
                        signal_pidfd(pidfd, signal.SIGKILL)
                except FlyballError as error:  # no room to store what it said
                    _log.error("engine_status_not_noted", error=str(error))
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(POLL_S):
                        await self._ask_now.wait()
        finally:
            loop.remove_reader(pidfd)
            os.close(pidfd)

    async def _note(self, reply: EngineReply) -> None:
        self._pid = reply.pid or self._pid
        self.status = reply
        self._replied_at_s = self._clock.monotonic_s()
        self.restores_since = max([self.restores_since, *(r.at for r in reply.restores)])
        self._alive.set()
        await self._note_trouble(self._client.unreadable)
        await self._on_status(reply)

    async def _note_trouble(self, trouble: str) -> None:
        if self._trouble is not None and bool(trouble) == bool(self._trouble):
            return
        self._trouble = trouble
        if trouble:
            _log.error("engine_reply_unreadable", pid=self._pid, error=trouble)
        await self._on_trouble(trouble)


def _pid_in(state_dir: HostStateDir) -> int:
    """The pid that this folder's engine last recorded, 0 if there is none."""
    try:
        return int(state_dir.engine_pid.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return 0


def _readable(pidfd: int) -> bool:
    return bool(select.select([pidfd], [], [], 0)[0])


async def _ended(pidfd: int, timeout_s: float) -> bool:
    """Wait for the end of a process that need not be our child. Returns whether it ended in time."""
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    loop.add_reader(pidfd, ended.set)
    try:
        async with asyncio.timeout(timeout_s):
            await ended.wait()
        return True
    except TimeoutError:
        return False
    finally:
        loop.remove_reader(pidfd)
