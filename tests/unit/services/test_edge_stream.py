"""The event stream: a heartbeat after a silent interval, and no end in an outage."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection
from typing import cast

import pytest
from starlette.responses import StreamingResponse
from support.clocks.manual import ManualClock

from flyball.contracts.errors import TooBusy, Unreachable
from flyball.contracts.events import Event, EventKind
from services.api.stream import HEARTBEAT_S, EventStreams
from services.runtime.telemetry import Metrics
from services.runtime.wakeup import AsyncWakeup, LocalWakeup


class Log:
    """Events in memory. Every read takes `look_s` of the clock; the first `outages` reads fail."""

    def __init__(self, clock: ManualClock) -> None:
        self.clock = clock
        self.events: list[tuple[int, Event]] = []
        self.look_s = 0.0
        self.looks = 0
        self.outages = 0

    def last(self) -> int:
        self.looks += 1
        self.clock.now_s += self.look_s
        if self.outages:
            self.outages -= 1
            raise Unreachable("The database does not answer.")
        return len(self.events)

    def read(
        self, job: str | None, after: int, limit: int, kinds: Collection[EventKind] = ()
    ) -> list[tuple[int, Event]]:
        return self.events[after:][:limit]


class Rig:
    def __init__(self, max_streams: int = 1) -> None:
        self.clock = ManualClock(0.0)
        self.log = Log(self.clock)
        self.new_events = AsyncWakeup(LocalWakeup(), "events")
        self.streams = EventStreams(
            log=self.log, metrics=Metrics(), clock=self.clock, max_streams=max_streams, poll_interval_s=0.001
        )

    def open(self, *users: str) -> AsyncIterator[bytes]:
        given = users or ("reader", "browser")
        response = self.streams.open(users=given, job=None, after=0, kinds=(), new_events=self.new_events)
        return cast("AsyncIterator[bytes]", cast("StreamingResponse", response).body_iterator)


def test_a_heartbeat_is_sent_after_its_interval_however_often_the_log_is_read() -> None:
    async def scenario() -> None:
        rig = Rig()
        rig.log.look_s = HEARTBEAT_S / 100.0
        body = rig.open()
        assert (await anext(body)).startswith(b"retry")
        for _ in range(2):
            before = rig.log.looks
            assert await anext(body) == b": alive\n\n"
            assert 99 <= rig.log.looks - before <= 102

    asyncio.run(scenario())


def test_an_outage_of_the_database_does_not_end_a_stream() -> None:
    async def scenario() -> None:
        rig = Rig()
        rig.log.outages = 3
        rig.log.events.append((1, Event(at=0.0, kind=EventKind.DECISION)))
        body = rig.open()
        await anext(body)
        assert (await anext(body)).startswith(b"id: 1\n")
        assert rig.log.looks == 4

    asyncio.run(scenario())


def test_one_user_cannot_take_all_streams() -> None:
    async def scenario() -> None:
        rig = Rig(max_streams=16)
        kept = [rig.open("reader", "first") for _ in range(4)]
        with pytest.raises(TooBusy, match="of this token or browser"):
            rig.open("reader", "first")
        kept += [rig.open("reader", "second") for _ in range(4)]
        with pytest.raises(TooBusy, match="of this token or browser"):
            rig.open("reader", "third")
        kept += [rig.open("operator", str(n)) for n in range(8)]
        with pytest.raises(TooBusy, match=r"^16 event streams are open"):
            rig.open("operator alice", "browser")
        assert len(kept) == 16

    asyncio.run(scenario())
