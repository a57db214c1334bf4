"""Commands to host daemons, over the connections that they open themselves.

A daemon asks for its commands and is answered when there are some, or after `wait_s` with none. No state of a host is
kept beyond its connection: any actuator can answer any daemon, and what was handed out and not answered is handed out
again. Daemons obey each command_id once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import msgspec
import structlog

from flyball.contracts.clock import Clock
from flyball.contracts.decisions import Command, CommandBatch, CommandUpdate
from flyball.contracts.errors import TooBusy
from flyball.contracts.fault_points import reach
from services.actuator.notify import AsyncWakeup
from services.actuator.ports import ActionStore
from services.controller.ports import Wakeup
from services.runtime.telemetry import Metrics

log = structlog.get_logger()

MAX_WAIT_S = 60.0
HAND_OUT_AGAIN_S = 1.0  # a command that was handed out and not answered; the first answer may have been lost
LOOK_FOR_GONE_S = 1.0  # how often a waiting connection is checked for having been left

IsGone = Callable[[], Awaitable[bool]]


class _Poll(msgspec.Struct, eq=False):
    """One waiting connection; `replaced` when the same host opened a newer one."""

    replaced: bool = False


class HostDaemons:
    """Lives in one event loop; its database calls run in threads."""

    def __init__(
        self,
        *,
        store: ActionStore,
        wakeup: Wakeup,
        clock: Clock,
        metrics: Metrics,
        max_waiting: int,
        poll_interval_s: float,
    ) -> None:
        """`poll_interval_s`: how often a waiting connection looks at the store unwoken."""
        self._store = store
        self._wakeup = wakeup
        self._clock = clock
        self._metrics = metrics
        self._max_waiting = max_waiting
        self._poll_interval_s = poll_interval_s
        self._polls: dict[str, _Poll] = {}
        self._handed_out: dict[str, tuple[str, dict[str, float]]] = {}  # host -> (incarnation, command_id -> when)
        self._stopping = False

    async def next_commands(
        self, host_id: str, incarnation: str, *, wait_s: float, bell: AsyncWakeup, is_gone: IsGone
    ) -> CommandBatch:
        """The host's commands as soon as there are some. A newer poll of the same host ends this one, with none.
        Raises TooBusy when too many hosts wait already."""
        poll = self._enter(host_id)
        try:
            deadline_s = self._clock.monotonic_s() + min(max(wait_s, 0.0), MAX_WAIT_S)
            look_for_gone_at_s = self._clock.monotonic_s() + LOOK_FOR_GONE_S
            while not (poll.replaced or self._stopping):
                seen = bell.count
                commands = await self._look(host_id, incarnation)
                now_s = self._clock.monotonic_s()
                if commands or now_s >= look_for_gone_at_s:
                    # Commands for a daemon that left would wait for its next poll to be handed out again.
                    if await is_gone():
                        break
                    look_for_gone_at_s = now_s + LOOK_FOR_GONE_S
                if commands and not poll.replaced:
                    return self._hand_out(host_id, incarnation, commands, now_s)
                if now_s >= deadline_s:
                    break
                await bell.wait(seen, min(self._poll_interval_s, deadline_s - now_s))
            return CommandBatch()
        finally:
            if self._polls.get(host_id) is poll:
                del self._polls[host_id]
            self._metrics.waiting_polls.set(len(self._polls))

    async def take_update(self, update: CommandUpdate) -> None:
        """Store a host's answer, then let the executor go on."""
        reach("actuator.before_ack")
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

    def stop(self) -> None:
        """Answer those who wait with no commands, at their next wake-up."""
        self._stopping = True

    def _enter(self, host_id: str) -> _Poll:
        older = self._polls.get(host_id)
        if older:
            older.replaced = True
        elif len(self._polls) >= self._max_waiting:
            raise TooBusy("Too many hosts wait for commands here.", retry_after_s=2.0, hint="try another actuator")
        poll = self._polls[host_id] = _Poll()
        self._metrics.waiting_polls.set(len(self._polls))
        return poll

    async def _look(self, host_id: str, incarnation: str) -> list[Command]:
        """The host's open commands, without those that this very incarnation was given a moment ago."""
        open_commands = await asyncio.to_thread(self._store.commands_for, host_id, self._clock.wall_s())
        recent = self._recent(host_id, incarnation, self._clock.monotonic_s())
        return [command for command in open_commands if command.command_id not in recent]

    def _recent(self, host_id: str, incarnation: str, now_s: float) -> dict[str, float]:
        holder, times = self._handed_out.get(host_id, ("", {}))
        if holder != incarnation:
            return {}
        return {command_id: at_s for command_id, at_s in times.items() if now_s - at_s < HAND_OUT_AGAIN_S}

    def _hand_out(self, host_id: str, incarnation: str, commands: list[Command], now_s: float) -> CommandBatch:
        given = dict.fromkeys((command.command_id for command in commands), now_s)
        self._handed_out[host_id] = (incarnation, self._recent(host_id, incarnation, now_s) | given)
        self._metrics.commands_handed_out.inc(len(commands))
        for command in commands:
            log.info("command handed out", command_id=command.command_id, host_id=host_id, action_id=command.action_id)
        reach("actuator.after_dispatch")
        return CommandBatch(tuple(commands))
