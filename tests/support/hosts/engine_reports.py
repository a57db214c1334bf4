"""What a daemon signals of its engine's answers."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from flyball.contracts import wire
from flyball.contracts.clock import SystemClock
from flyball.contracts.on_host.engine_wire import EngineReply
from flyball.contracts.reports.signals import SignalBody
from host_daemon.link.cluster_clock import ClusterClock
from host_daemon.link.reporting import Reporter
from host_daemon.settings import DaemonSettings


def signals_of(*replies: EngineReply) -> list[SignalBody]:
    """The signals of a daemon whose engine answers this, one reply after the other."""
    put: list[SignalBody] = []

    class Outbox:
        async def put(self, body: SignalBody) -> None:
            put.append(body)

    part: Any = None
    nowhere = Path("/nonexistent")
    settings = DaemonSettings(nowhere, "host", (), (), nowhere, part)
    outbox: Any = Outbox()

    async def scenario() -> None:
        reporter = Reporter(
            settings,
            ClusterClock(SystemClock()),
            incarnation="one",
            client=part,
            outbox=outbox,
            beacons=part,
            engine=part,
            ports=part,
            facts=part,
            refusals=part,
        )
        for reply in replies:
            await reporter.note_engine(wire.decode(wire.encode(reply), EngineReply))

    asyncio.run(scenario())
    return put
