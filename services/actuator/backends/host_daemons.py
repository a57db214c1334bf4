"""Hands out commands to host daemons, over long polls that they open themselves.

A daemon asks for its commands, and gets a reply when there are some, or an empty one after `wait_s`. Nothing about a
host is kept beyond its connection: any actuator can answer any daemon, and unanswered commands are handed out again.
Daemons obey each command_id once.

Of several daemons with one host id, only one gets commands and may answer: the one whose reports are stored, or its
successor, which has its state folder.

However many hosts wait, one task queries the store for all: at once for hosts that just came or that a wake-up named,
and every `poll_interval_s` for hosts whose commands have changed.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Protocol

import msgspec
import structlog

from flyball.contracts.clock import Clock
from flyball.contracts.decisions import Command, CommandBatch, CommandUpdate
from flyball.contracts.errors import DaemonSuperseded, FlyballError, TooBusy, Unreachable
from flyball.contracts.fault_points import reach
from flyball.contracts.reports.rank_logs import LogPiece, LogRequest
from flyball.contracts.reports.standings import HostStanding, LastObeyed
from flyball.contracts.reports.succession import speaks_for_host
from services.actuator.backends.log_requests import LogRequests
from services.actuator.ports import CommandOutbox, Judgement, Standings
from services.rules.engine_keys import EngineKeyring
from services.rules.stream import Wakeup
from services.runtime.outages import OUTAGES, Outage
from services.runtime.telemetry import Metrics
from services.runtime.wakeup import Subscribable

log = structlog.get_logger()

MAX_WAIT_S = 60.0
FIRST_LOOK_S = 5.0  # the longest wait for the first query, even if the poll's own limit is shorter
HAND_OUT_AGAIN_S = 1.0  # an unanswered command: the reply that carried it may have been lost
MAX_HOSTS_AT_ONCE = 500  # in one query
REST = 9.0  # after a query for all hosts, times as long as it took: it is slow with very many open commands
LONGEST_REST_S = 1.0  # the query may only have waited for a lock or a busy machine

IsGone = Callable[[], Awaitable[bool]]


class WakeupSource(Wakeup, Subscribable, Protocol):
    """Wakes up threads, and calls listeners."""


class _Poll(msgspec.Struct, eq=False):
    """One waiting connection. `found` is set to its commands, or to none in order to end it."""

    host_id: str
    incarnation: str
    succeeds: Sequence[str]
    deadline_s: float
    obeyed: LastObeyed
    found: asyncio.Future[list[Command]]
    judgement: Judgement | None = None
    looked: bool = False
    failure: FlyballError | None = None  # why the query failed

    def end(self, commands: Sequence[Command] = ()) -> None:
        if not self.found.done():
            self.found.set_result(list(commands))


class _HandedOut(msgspec.Struct):
    """The commands that a daemon got and has not answered."""

    incarnation: str
    times: dict[str, float]  # command_id -> when


class HostDaemons:
    """Lives in one event loop, in which `run` must run; its database calls run in threads."""

    def __init__(
        self,
        *,
        store: CommandOutbox,
        standings: Standings,
        keyring: EngineKeyring,
        wakeup: WakeupSource,
        clock: Clock,
        metrics: Metrics,
        max_waiting: int,
        poll_interval_s: float,
    ) -> None:
        """`poll_interval_s`: how often to query the store without a wake-up."""
        self._store = store
        self._standings = standings
        self._keyring = keyring
        self._wakeup = wakeup
        self._clock = clock
        self._metrics = metrics
        self._max_waiting = max_waiting
        self._poll_interval_s = poll_interval_s
        self._polls: dict[str, _Poll] = {}
        self._handed_out: dict[str, _HandedOut] = {}
        self._ring = asyncio.Event()
        self._called: set[str] = set()  # hosts to query for at once
        self._look_at_all = False
        self._marks: dict[str, tuple[int, int]] = {}  # result of the last query for all hosts
        self._stopping = False
        self._logs = LogRequests()

    async def read_log(self, host_id: str, request: LogRequest) -> LogPiece:
        """Get a piece of a rank's log from the daemon of its host. Raises TooBusy, Unreachable."""
        name = self._logs.add(host_id, request)
        poll = self._polls.get(host_id)
        if poll:
            poll.end()
        return await self._logs.piece(name)

    def take_log(self, piece: LogPiece) -> None:
        """Take in a host's answer to `read_log`."""
        self._logs.answered(piece)

    async def next_commands(
        self,
        host_id: str,
        incarnation: str,
        *,
        wait_s: float,
        is_gone: IsGone,
        succeeds: Sequence[str] = (),
        obeyed: LastObeyed = LastObeyed(),  # noqa: B008 - frozen
    ) -> CommandBatch:
        """Wait for commands of the host. A newer poll of the same host ends this one without commands. A host that is
        ahead of the database is asked for its standing, and gets no commands until that is settled.

        Raises DaemonSuperseded for a daemon that does not act for the host, TooBusy if too many hosts wait already, and
        Unreachable if the store cannot be read."""
        if self._stopping:
            return CommandBatch()
        poll = self._enter(host_id, incarnation, succeeds, min(max(wait_s, 0.0), MAX_WAIT_S), obeyed)
        if self._logs.has_any(host_id):
            poll.end()
        try:
            commands = await self._found(poll)
            # If the daemon has left, its commands would have to wait to be handed out again.
            if not commands and not self._logs.has_any(host_id):
                return self._signed(CommandBatch(), poll)
            if await is_gone() or self._polls.get(host_id) is not poll:
                return CommandBatch()
            batch = self._hand_out(host_id, incarnation, commands) if commands else CommandBatch()
            return self._signed(msgspec.structs.replace(batch, log_requests=self._logs.take(host_id)), poll)
        finally:
            if self._polls.get(host_id) is poll:
                del self._polls[host_id]
            self._metrics.waiting_polls.set(len(self._polls))

    async def take_update(self, update: CommandUpdate, *, succeeds: Sequence[str] = ()) -> None:
        """Store a host's answer, then wake up the executor. Raises DaemonSuperseded as `next_commands` does."""
        reach("actuator.before_ack")
        present = await asyncio.to_thread(self._store.daemons_of, [update.host_id])
        if not speaks_for_host(update.incarnation, succeeds, present.get(update.host_id, "")):
            raise _superseded(update.host_id)
        await asyncio.to_thread(self._store.record, update)
        self._metrics.command_updates.labels(state=update.state.value).inc()
        log.info(
            "command answered",
            command_id=update.command_id,
            host_id=update.host_id,
            state=update.state.value,
            code=update.code,
            message=update.message,
        )
        self._wakeup.notify("actions")

    async def take_standing(self, standing: HostStanding, *, succeeds: Sequence[str] = ()) -> None:
        """Store the standing of a host that is ahead of the database. Raises DaemonSuperseded as `next_commands`
        does."""
        present = await asyncio.to_thread(self._store.daemons_of, [standing.host_id])
        if not speaks_for_host(standing.incarnation, succeeds, present.get(standing.host_id, "")):
            raise _superseded(standing.host_id)
        await asyncio.to_thread(self._standings.record, standing)
        log.warning(
            "host is ahead of the database",
            host_id=standing.host_id,
            cluster=standing.obeyed.cluster,
            epoch=standing.obeyed.epoch,
            command_id=standing.obeyed.command_id,
        )
        self._wakeup.notify("signals")

    async def run(self) -> None:
        """Query for commands until cancelled. During an outage of the store the polls fail, and daemons may ask another
        actuator."""
        loop = asyncio.get_running_loop()

        def called(hosts: Collection[str]) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(self._call, tuple(hosts))

        leave = self._wakeup.subscribe("commands", called)
        outage = Outage("commands", self._clock)
        look_at_all_s = 0.0
        try:
            while True:
                try:
                    look_at_all_s = await self._look(look_at_all_s)
                    outage.ended()
                except OUTAGES as error:
                    self._fail_all(error)
                    await asyncio.sleep(outage.pause_s(error))
                    continue
                wait_s = look_at_all_s - self._clock.monotonic_s()
                if wait_s > 0.0 and not self._ring.is_set():
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(wait_s):
                            await self._ring.wait()
        finally:
            leave()

    def stop(self) -> None:
        """End the waiting polls without commands, at the next wake-up."""
        self._stopping = True

    def _call(self, hosts: Collection[str]) -> None:
        if hosts:
            self._called.update(host_id for host_id in hosts if host_id in self._polls)
        else:
            self._look_at_all = True
        self._ring.set()

    def _enter(
        self, host_id: str, incarnation: str, succeeds: Sequence[str], wait_s: float, obeyed: LastObeyed
    ) -> _Poll:
        older = self._polls.get(host_id)
        if older:
            older.end()
        elif len(self._polls) >= self._max_waiting:
            raise TooBusy("Too many hosts wait for commands here.", retry_after_s=2.0, hint="try another actuator")
        found = asyncio.get_running_loop().create_future()
        poll = _Poll(host_id, incarnation, tuple(succeeds), self._clock.monotonic_s() + wait_s, obeyed, found)
        self._polls[host_id] = poll
        self._metrics.waiting_polls.set(len(self._polls))
        self._call((host_id,))
        return poll

    async def _found(self, poll: _Poll) -> list[Command]:
        give_up_s = max(poll.deadline_s, self._clock.monotonic_s() + FIRST_LOOK_S)
        while True:
            now_s = self._clock.monotonic_s()
            until_s = poll.deadline_s if now_s < poll.deadline_s else give_up_s
            done, _ = await asyncio.wait({poll.found}, timeout=until_s - now_s)
            if isinstance(poll.failure, DaemonSuperseded):
                raise poll.failure
            if poll.failure is not None:
                raise Unreachable(poll.failure.message, hint="try another actuator") from poll.failure
            if done:
                return poll.found.result()
            now_s = self._clock.monotonic_s()
            if poll.looked and now_s >= poll.deadline_s:
                return []
            if now_s >= give_up_s:
                raise Unreachable("The query for commands took too long.", hint="see the actuator's log")

    async def _look(self, look_at_all_s: float) -> float:
        """Query for the hosts that need it; returns when the next query for all hosts is due."""
        self._ring.clear()
        called, self._called = self._called, set()
        if self._stopping:
            for poll in self._polls.values():
                poll.end()
        if self._look_at_all or self._clock.monotonic_s() >= look_at_all_s:
            self._look_at_all = False
            began_s = self._clock.monotonic_s()
            called |= await self._with_news()
            now_s = self._clock.monotonic_s()
            rest_s = min(REST * (now_s - began_s), LONGEST_REST_S)
            look_at_all_s = now_s + max(self._poll_interval_s, rest_s)
        hosts = [host_id for host_id in called if host_id in self._polls]
        for first in range(0, len(hosts), MAX_HOSTS_AT_ONCE):
            await self._look_for(hosts[first : first + MAX_HOSTS_AT_ONCE])
        return look_at_all_s

    async def _with_news(self) -> set[str]:
        """The waiting hosts whose commands changed since the last query, or must be handed out again."""
        if not self._polls:
            self._marks = {}
            return set()
        marks = await asyncio.to_thread(self._store.unanswered)
        incarnation = (await asyncio.to_thread(self._standings.judge, {})).incarnation
        if any(poll.judgement and poll.judgement.incarnation != incarnation for poll in self._polls.values()):
            return set(self._polls)
        old, self._marks = self._marks, marks
        now_s = self._clock.monotonic_s()
        return {
            host_id
            for host_id, mark in marks.items()
            if host_id in self._polls and (mark != old.get(host_id) or self._is_due_again(host_id, now_s))
        }

    def _is_due_again(self, host_id: str, now_s: float) -> bool:
        handed_out = self._handed_out.get(host_id)
        return handed_out is not None and any(now_s - at_s >= HAND_OUT_AGAIN_S for at_s in handed_out.times.values())

    async def _look_for(self, host_ids: Sequence[str]) -> None:
        polls = {host_id: self._polls[host_id] for host_id in host_ids if host_id in self._polls}
        present = await asyncio.to_thread(self._store.daemons_of, list(polls))
        for host_id, poll in list(polls.items()):
            if not speaks_for_host(poll.incarnation, poll.succeeds, present.get(host_id, "")):
                poll.failure = _superseded(host_id)
                poll.end()
                del polls[host_id]
        if not polls:
            return
        found = await asyncio.to_thread(self._store.commands_for_hosts, list(polls), self._clock.wall_s())
        # Judged after reading the commands: a copy of the database that took over meanwhile must not hand out any.
        judged = await asyncio.to_thread(self._standings.judge, {name: poll.obeyed for name, poll in polls.items()})
        now_s = self._clock.monotonic_s()
        for host_id, poll in polls.items():
            poll.looked = True
            before, poll.judgement = poll.judgement, judged
            if host_id in judged.ahead or (before and before.incarnation != judged.incarnation):
                poll.end()  # its reply says so
                continue
            commands = self._not_recent(host_id, poll.incarnation, found.get(host_id, []), now_s)
            if commands or host_id in judged.asked or now_s >= poll.deadline_s:
                poll.end(commands)

    def _not_recent(
        self, host_id: str, incarnation: str, open_commands: Sequence[Command], now_s: float
    ) -> list[Command]:
        """The host's open commands, without those that this incarnation got a moment ago."""
        handed_out = self._handed_out.get(host_id)
        if handed_out is None or not open_commands or handed_out.incarnation != incarnation:
            self._handed_out.pop(host_id, None)
            return list(open_commands)
        open_ids = {command.command_id for command in open_commands}
        handed_out.times = {one: at_s for one, at_s in handed_out.times.items() if one in open_ids}
        recent = {one for one, at_s in handed_out.times.items() if now_s - at_s < HAND_OUT_AGAIN_S}
        return [command for command in open_commands if command.command_id not in recent]

    def _hand_out(self, host_id: str, incarnation: str, commands: Sequence[Command]) -> CommandBatch:
        now_s = self._clock.monotonic_s()
        handed_out = self._handed_out.get(host_id)
        if handed_out is None or handed_out.incarnation != incarnation:
            handed_out = self._handed_out[host_id] = _HandedOut(incarnation, {})
        commands = [self._keyring.handed_out(host_id, command) for command in commands]
        handed_out.times |= dict.fromkeys((command.command_id for command in commands), now_s)
        self._metrics.commands_handed_out.inc(len(commands))
        for command in commands:
            log.info("command handed out", command_id=command.command_id, host_id=host_id, action_id=command.action_id)
        reach("actuator.after_dispatch")
        return CommandBatch(tuple(commands))

    def _fail_all(self, error: FlyballError) -> None:
        for poll in self._polls.values():
            poll.failure = error
            poll.end()

    def _signed(self, batch: CommandBatch, poll: _Poll) -> CommandBatch:
        """Add the identity of the database, whether the daemon should report its standing, and its engine's key."""
        judged = poll.judgement
        if judged is None:
            return batch
        return msgspec.structs.replace(
            batch,
            cluster=judged.cluster,
            incarnation=judged.incarnation,
            report_standing=poll.host_id in judged.ahead or poll.host_id in judged.asked,
            keys=self._keyring.answering(poll.host_id),
        )


def _superseded(host_id: str) -> DaemonSuperseded:
    return DaemonSuperseded(
        f"Another daemon acts for host {host_id!r}.",
        hint="give each machine its own --host-id; a new one is accepted once the old one is silent",
    )
