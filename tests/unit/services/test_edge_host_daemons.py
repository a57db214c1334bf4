"""Long polls: commands are sent as soon as there are any, to the open connection, and not twice in quick succession."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence

import pytest
from support.clocks.loops import LoopClock, run_skipping

from flyball.contracts.decisions import Command, CommandBatch, CommandUpdate, StopWorkers, UpdateState
from flyball.contracts.errors import DaemonSuperseded, TooBusy, Unreachable
from flyball.contracts.identity import Fence
from flyball.contracts.reports.rank_logs import LogPiece, LogRequest
from flyball.contracts.reports.standings import HostStanding, LastObeyed
from services.actuator.backends import log_requests
from services.actuator.backends.host_daemons import HAND_OUT_AGAIN_S, HostDaemons
from services.actuator.ports import Judgement
from services.rules.engine_keys import EngineKeyring
from services.runtime.telemetry import Metrics
from services.runtime.wakeup import AsyncWakeup, LocalWakeup


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
        self.looked_at_all = 0
        self.looked_for: list[str] = []
        self.away = False
        self.present: dict[str, str] = {}  # host -> incarnation that reports

    def unanswered(self) -> dict[str, tuple[int, int]]:
        self.looked_at_all += 1
        if self.away:
            raise Unreachable("The database does not answer.")
        ids = {c.host_id: [int(o.action_id[4:]) for o in self.open if o.host_id == c.host_id] for c in self.open}
        return {host_id: (max(numbers), len(numbers)) for host_id, numbers in ids.items()}

    def daemons_of(self, host_ids: Sequence[str]) -> dict[str, str]:
        if self.away:
            raise Unreachable("The database does not answer.")
        return {h: self.present[h] for h in host_ids if h in self.present}

    def commands_for_hosts(self, host_ids: Sequence[str], now: float) -> dict[str, list[Command]]:
        self.looked += 1
        self.looked_for.extend(host_ids)
        if self.away:
            raise Unreachable("The database does not answer.")
        return {h: found for h in host_ids if (found := [c for c in self.open if c.host_id == h])}

    def record(self, update: CommandUpdate) -> None:
        self.updates.append(update)
        self.open = [c for c in self.open if c.command_id != update.command_id]


class Standings:
    """A database that knows what hosts obeyed, except for those marked as ahead."""

    def __init__(self) -> None:
        self.ahead: set[str] = set()
        self.incarnation = "i1"
        self.recorded: list[HostStanding] = []
        self.judged = 0

    def judge(self, obeyed: Mapping[str, LastObeyed]) -> Judgement:
        judgement = Judgement("c1", self.incarnation, frozenset(self.ahead & obeyed.keys()))
        self.judged += bool(obeyed)
        return judgement

    def record(self, standing: HostStanding) -> None:
        self.recorded.append(standing)


class Rig:
    def __init__(self, max_waiting: int = 10, poll_interval_s: float = 30.0) -> None:
        self.outbox = Outbox()
        self.standings = Standings()
        self.wakeup = LocalWakeup()
        self.keyring = EngineKeyring("the secret of a test")
        self.runs: asyncio.Task[None] | None = None
        self.daemons = HostDaemons(
            store=self.outbox,
            standings=self.standings,
            keyring=self.keyring,
            wakeup=self.wakeup,
            clock=LoopClock(),
            metrics=Metrics(),
            max_waiting=max_waiting,
            poll_interval_s=poll_interval_s,
        )

    async def ids(
        self, host_id: str = "host-a", incarnation: str = "i1", *, wait_s: float = 30.0, is_gone: bool = False
    ) -> list[str]:
        batch = await self.batch(host_id, incarnation, wait_s=wait_s, is_gone=is_gone)
        return [c.action_id for c in batch.commands]

    async def batch(
        self, host_id: str = "host-a", incarnation: str = "i1", *, wait_s: float = 30.0, is_gone: bool = False
    ) -> CommandBatch:
        async def gone() -> bool:
            return is_gone

        if not self.runs:
            self.runs = asyncio.create_task(self.daemons.run())
        return await self.daemons.next_commands(host_id, incarnation, wait_s=wait_s, is_gone=gone)

    async def until_looked(self, times: int) -> None:
        while self.outbox.looked < times:
            await asyncio.sleep(0)


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    """Time goes on only where nothing else does: no read takes long, and no command is due again because of one."""

    async def bounded() -> None:
        async with asyncio.timeout(3600.0):
            await scenario()

    run_skipping(bounded())


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


def test_a_command_is_not_given_twice_in_a_moment_but_again_later() -> None:
    async def scenario() -> None:
        rig = Rig(poll_interval_s=0.01)
        rig.outbox.open.append(command(1))
        assert await rig.ids() == ["act-1"]
        assert await rig.ids(wait_s=0.0) == []
        rig.outbox.open.append(command(2))
        assert await rig.ids() == ["act-2"]
        await asyncio.sleep(HAND_OUT_AGAIN_S)
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
        assert await woken.wait(0, 60.0) == 1
        assert await rig.ids(wait_s=0.0) == []

    run(scenario)


def test_a_wake_up_looks_for_the_hosts_that_it_names_and_for_no_other() -> None:
    async def scenario() -> None:
        rig = Rig()
        names = [f"host-{number}" for number in range(8)]
        waiting = {name: asyncio.create_task(rig.ids(name)) for name in names}
        while len(rig.outbox.looked_for) < len(names):
            await asyncio.sleep(0)
        rig.outbox.looked_for.clear()
        rig.outbox.open.append(command(1, "host-3"))
        rig.wakeup.notify("commands", ["host-3", "host-elsewhere"])
        assert await waiting["host-3"] == ["act-1"]
        assert rig.outbox.looked_for == ["host-3"]
        rig.daemons.stop()
        rig.wakeup.notify("commands")
        assert await waiting["host-4"] == []

    run(scenario)


def test_all_waiting_hosts_cost_one_unwoken_look() -> None:
    async def scenario() -> None:
        rig = Rig(max_waiting=500, poll_interval_s=0.01)
        waiting = [asyncio.create_task(rig.ids(f"host-{number}")) for number in range(300)]
        while len(rig.outbox.looked_for) < 300:
            await asyncio.sleep(0)
        at_all, for_some = rig.outbox.looked_at_all, rig.outbox.looked
        while rig.outbox.looked_at_all < at_all + 5:
            await asyncio.sleep(0.001)
        assert rig.outbox.looked == for_some
        rig.outbox.open.append(command(1, "host-299"))
        assert await waiting[299] == ["act-1"]
        assert rig.outbox.looked == for_some + 1
        for task in waiting:
            task.cancel()

    run(scenario)


def test_an_unanswered_command_is_handed_out_again_to_the_next_poll_that_waits() -> None:
    async def scenario() -> None:
        rig = Rig(poll_interval_s=0.01)
        rig.outbox.open.append(command(1))
        assert await rig.ids() == ["act-1"]
        looked = rig.outbox.looked
        assert await rig.ids() == ["act-1"]
        assert rig.outbox.looked <= looked + 2  # when it arrived, and when it was due

    run(scenario)


def test_a_waiting_poll_fails_when_the_store_is_away() -> None:
    async def scenario() -> None:
        rig = Rig(poll_interval_s=0.01)
        waiting = [asyncio.create_task(rig.ids(f"host-{number}")) for number in range(3)]
        await rig.until_looked(1)
        rig.outbox.away = True
        for one in waiting:
            with pytest.raises(Unreachable):
                await one
        with pytest.raises(Unreachable):
            await rig.ids()
        rig.outbox.away = False
        rig.outbox.open.append(command(1))
        while True:
            try:
                assert await rig.ids() == ["act-1"]
                break
            except Unreachable:
                continue

    run(scenario)


def test_a_poll_that_nobody_looks_for_is_given_up() -> None:
    async def scenario() -> None:
        rig = Rig()
        rig.runs = asyncio.create_task(asyncio.sleep(0))
        with pytest.raises(Unreachable):
            await rig.ids(wait_s=0.0)

    run(scenario)


def test_a_log_is_asked_for_in_the_poll_that_waits_and_in_the_next() -> None:
    async def scenario() -> None:
        rig = Rig()
        waiting = asyncio.create_task(rig.batch())
        await rig.until_looked(1)
        for _ in range(2):  # the second request finds no poll
            asked = asyncio.create_task(rig.daemons.read_log("host-a", LogRequest("", "j", 3)))
            [request] = (await waiting).log_requests
            assert (request.job, request.rank) == ("j", 3)
            rig.daemons.take_log(LogPiece(request.request_id, "host-b", data=b"from elsewhere"))
            rig.daemons.take_log(LogPiece("never asked for", "host-a"))
            rig.daemons.take_log(LogPiece(request.request_id, "host-a", data=b"line\n"))
            assert (await asked).data == b"line\n"
            waiting = asyncio.create_task(rig.batch())
        rig.outbox.open.append(command(1))
        rig.wakeup.notify("commands")
        assert [c.action_id for c in (await waiting).commands] == ["act-1"]

    run(scenario)


def test_a_log_of_a_host_that_does_not_ask_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        rig = Rig()
        with pytest.raises(Unreachable, match="host-a did not answer"):
            await rig.daemons.read_log("host-a", LogRequest("", "j", 3))
        assert await rig.ids(wait_s=0.0) == [], "and it is not asked later"
        monkeypatch.setattr(log_requests, "MAX_OPEN_PER_HOST", 1)
        first = asyncio.create_task(rig.daemons.read_log("host-a", LogRequest("", "j", 3)))
        await asyncio.sleep(0)
        with pytest.raises(TooBusy):
            await rig.daemons.read_log("host-a", LogRequest("", "j", 4))
        first.cancel()

    run(scenario)


def answer(incarnation: str) -> CommandUpdate:
    return CommandUpdate(
        command_id="act-1.stop.host-a.1", host_id="host-a", incarnation=incarnation, state=UpdateState.SUCCEEDED, at=1.0
    )


def test_of_two_daemons_with_one_id_only_the_one_that_reports_is_given_commands() -> None:
    async def scenario() -> None:
        rig = Rig()
        rig.outbox.open.append(command(1))
        rig.outbox.present["host-a"] = "i1"
        with pytest.raises(DaemonSuperseded, match="Another daemon acts for host 'host-a'") as refused:
            await rig.ids(incarnation="i2")
        assert refused.value.hint
        assert await rig.ids(incarnation="i1") == ["act-1"]
        with pytest.raises(DaemonSuperseded):
            await rig.daemons.take_update(answer("i2"))
        assert rig.outbox.updates == []
        await rig.daemons.take_update(answer("i1"))
        assert rig.outbox.updates == [answer("i1")]

    run(scenario)


def test_who_waits_for_commands_while_another_daemon_takes_over_is_given_none() -> None:
    async def scenario() -> None:
        rig = Rig()
        rig.outbox.present["host-a"] = "i1"
        waiting = asyncio.create_task(rig.ids(incarnation="i1"))
        await rig.until_looked(1)
        rig.outbox.present["host-a"] = "i2"
        rig.outbox.open.append(command(1))
        rig.wakeup.notify("commands")
        with pytest.raises(DaemonSuperseded):
            await waiting

    run(scenario)


def test_a_restarted_daemon_is_given_commands_before_it_has_reported() -> None:
    async def scenario() -> None:
        rig = Rig()
        rig.outbox.present["host-a"] = "i1"
        rig.outbox.open.append(command(1))
        rig.runs = asyncio.create_task(rig.daemons.run())

        async def gone() -> bool:
            return False

        batch = await rig.daemons.next_commands("host-a", "i2", wait_s=30.0, is_gone=gone, succeeds=("i1",))
        assert [c.action_id for c in batch.commands] == ["act-1"]
        await rig.daemons.take_update(answer("i2"), succeeds=("i1",))
        assert rig.outbox.updates == [answer("i2")]

    run(scenario)


def test_a_host_that_is_ahead_of_the_database_is_asked_to_tell_and_given_nothing() -> None:
    async def scenario() -> None:
        rig = Rig()
        rig.outbox.open.append(command(1))
        rig.standings.ahead.add("host-a")
        batch = await rig.batch()
        assert (batch.commands, batch.report_standing, batch.cluster) == ((), True, "c1")
        assert batch.keys == rig.keyring.answering("host-a") != rig.keyring.answering("host-b")
        rig.standings.ahead.clear()
        batch = await rig.batch()
        assert [c.action_id for c in batch.commands] == ["act-1"]
        assert not batch.report_standing

    run(scenario)


def test_a_waiting_host_learns_at_once_of_a_database_under_another_incarnation() -> None:
    async def scenario() -> None:
        rig = Rig(poll_interval_s=0.01)
        waiting = asyncio.create_task(rig.batch(wait_s=60.0))
        while not rig.standings.judged:
            await asyncio.sleep(0)
        rig.standings.incarnation = "i2"
        async with asyncio.timeout(20.0):  # not when its wait is over
            assert (await waiting).incarnation == "i2"

    run(scenario)
