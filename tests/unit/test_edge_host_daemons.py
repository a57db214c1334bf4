"""Long polls: commands as soon as there are some, to the connection that is there, not twice in a moment."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import pytest

from flyball.contracts.clock import SystemClock
from flyball.contracts.decisions import Command, CommandUpdate, StopWorkers, UpdateState
from flyball.contracts.errors import TooBusy
from flyball.contracts.identity import Fence
from services.actuator.backends import host_daemons
from services.actuator.backends.host_daemons import HostDaemons
from services.actuator.notify import AsyncWakeup
from services.actuator.ports import ActionProgress, PlaybookStep
from services.runtime.telemetry import Metrics
from services.runtime.wakeup import LocalWakeup


def command(number: int, host_id: str = "host-a") -> Command:
    return Command(
        command_id=f"act-{number}.stop.{host_id}.1",
        action_id=f"act-{number}",
        host_id=host_id,
        fence=Fence(epoch=1, generation=1),
        body=StopWorkers(job="j", generation=1, grace_s=0.0),
        deadline_s=10.0,
    )


class Outbox:
    """An action store in memory."""

    def __init__(self) -> None:
        self.open: list[Command] = []
        self.updates: list[CommandUpdate] = []
        self.looked = 0

    def commands_for(self, host_id: str, now: float) -> Sequence[Command]:
        self.looked += 1
        return [c for c in self.open if c.host_id == host_id]

    def record(self, update: CommandUpdate) -> None:
        self.updates.append(update)
        self.open = [c for c in self.open if c.command_id != update.command_id]

    def open_actions(self) -> list[ActionProgress]:
        raise AssertionError("for the executor only")

    def apply(self, progress: ActionProgress, step: PlaybookStep, now: float) -> bool:
        raise AssertionError("for the executor only")


class Rig:
    def __init__(self, max_waiting: int = 10, poll_interval_s: float = 30.0) -> None:
        self.outbox = Outbox()
        self.wakeup = LocalWakeup()
        self.bell = AsyncWakeup(self.wakeup, "commands")
        self.daemons = HostDaemons(
            store=self.outbox,
            wakeup=self.wakeup,
            clock=SystemClock(),
            metrics=Metrics(),
            max_waiting=max_waiting,
            poll_interval_s=poll_interval_s,
        )

    async def ids(
        self, host_id: str = "host-a", incarnation: str = "i1", *, wait_s: float = 30.0, is_gone: bool = False
    ) -> list[str]:
        async def gone() -> bool:
            return is_gone

        batch = await self.daemons.next_commands(host_id, incarnation, wait_s=wait_s, bell=self.bell, is_gone=gone)
        return [c.action_id for c in batch.commands]

    async def until_looked(self, times: int) -> None:
        while self.outbox.looked < times:
            await asyncio.sleep(0)


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(20):
            await scenario()

    asyncio.run(bounded())


def test_a_waiting_poll_is_woken_at_once() -> None:
    async def scenario() -> None:
        rig = Rig()
        waiting = asyncio.create_task(rig.ids())
        await rig.until_looked(1)
        rig.outbox.open.append(command(1))
        rig.wakeup.notify("commands")
        assert await waiting == ["act-1"]

    run(scenario)


def test_without_a_wake_up_the_store_is_looked_at_anyway() -> None:
    async def scenario() -> None:
        rig = Rig(poll_interval_s=0.01)
        waiting = asyncio.create_task(rig.ids())
        await rig.until_looked(1)
        rig.outbox.open.append(command(1))
        assert await waiting == ["act-1"]

    run(scenario)


def test_an_empty_answer_after_the_wait() -> None:
    async def scenario() -> None:
        assert await Rig().ids(wait_s=0.01) == []

    run(scenario)


def test_a_command_is_not_given_twice_in_a_moment_but_again_later(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        rig = Rig(poll_interval_s=0.01)
        rig.outbox.open.append(command(1))
        assert await rig.ids() == ["act-1"]
        assert await rig.ids(wait_s=0.0) == []
        rig.outbox.open.append(command(2))
        assert await rig.ids() == ["act-2"]
        monkeypatch.setattr(host_daemons, "HAND_OUT_AGAIN_S", 0.0)
        assert await rig.ids() == ["act-1", "act-2"]

    run(scenario)


def test_a_restarted_daemon_gets_everything_again_at_once() -> None:
    async def scenario() -> None:
        rig = Rig()
        rig.outbox.open.append(command(1))
        assert await rig.ids(incarnation="i1") == ["act-1"]
        assert await rig.ids(incarnation="i2") == ["act-1"]

    run(scenario)


def test_a_newer_poll_of_a_host_replaces_the_older() -> None:
    async def scenario() -> None:
        rig = Rig(poll_interval_s=0.01)
        older = asyncio.create_task(rig.ids())
        await rig.until_looked(1)
        newer = asyncio.create_task(rig.ids())
        assert await older == []
        rig.outbox.open.append(command(1))
        rig.wakeup.notify("commands")
        assert await newer == ["act-1"]

    run(scenario)


def test_commands_are_not_given_to_a_connection_that_was_left() -> None:
    async def scenario() -> None:
        rig = Rig()
        rig.outbox.open.append(command(1))
        assert await rig.ids(is_gone=True) == []
        assert await rig.ids() == ["act-1"]

    run(scenario)


def test_the_number_of_waiting_hosts_is_bounded() -> None:
    async def scenario() -> None:
        rig = Rig(max_waiting=1)
        waiting = asyncio.create_task(rig.ids("host-a"))
        await rig.until_looked(1)
        with pytest.raises(TooBusy):
            await rig.ids("host-b")
        rig.daemons.stop()
        rig.wakeup.notify("commands")
        assert await waiting == []

    run(scenario)


def test_an_answer_is_stored_and_wakes_the_executor() -> None:
    async def scenario() -> None:
        rig = Rig()
        woken = AsyncWakeup(rig.wakeup, "actions")
        update = CommandUpdate(
            command_id="act-1.stop.host-a.1", host_id="host-a", incarnation="i1", state=UpdateState.SUCCEEDED, at=1.0
        )
        rig.outbox.open.append(command(1))
        await rig.daemons.take_update(update)
        assert rig.outbox.updates == [update]
        assert await woken.wait(0, 10) == 1
        assert await rig.ids(wait_s=0.0) == []

    run(scenario)
