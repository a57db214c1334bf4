"""A host's daemon played by a test, at a real supervisor."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Self

from support.hosts.reports import report

from flyball.contracts.clock import SystemClock
from flyball.contracts.credentials import host_credential
from flyball.contracts.decisions import Command, CommandResult, CommandUpdate, RankPosition, UpdateState
from flyball.contracts.reports.signals import ReportReply
from host_daemon.link.http_client import Endpoints, SupervisorClient

CLOCK = SystemClock()


class PlayedHost:
    """A host with one rank, which speaks when the test has it speak. It answers each command as carried out."""

    def __init__(self, host_id: str, token: str, sensors: Sequence[str], actuators: Sequence[str] = ()) -> None:
        """The servers' URLs; without `actuators` the sensors are these as well."""
        credential = host_credential(token, host_id)
        servers = (Endpoints(urls, host_id, CLOCK) for urls in (sensors, actuators or sensors))
        self.host_id = host_id
        self.step = 3
        self._client = SupervisorClient(*servers, lambda: credential.token)
        self._runner = asyncio.Runner()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._runner.run(self._client.close())
        self._runner.close()

    def report(self, **parts: Any) -> ReportReply:  # noqa: ANN401 - fields of Report
        """It is not found silent while a test is held up."""
        sent = report(self.host_id, CLOCK.wall_s(), **{"interval_s": 600.0} | parts)
        return self._runner.run(self._client.report(sent))

    def obey(self, wait_s: float = 10.0) -> Sequence[Command]:
        """The next commands."""
        return self._runner.run(self._obey(wait_s))

    async def _obey(self, wait_s: float) -> Sequence[Command]:
        commands = (await self._client.commands(self.host_id, "i1", wait_s=wait_s)).commands
        for command in commands:
            self.carry_out(command)
            result = CommandResult(positions=(RankPosition(0, self.step),), free_port=29_501)
            done = UpdateState.SUCCEEDED
            await self._client.update(
                CommandUpdate(command.command_id, self.host_id, "i1", done, CLOCK.wall_s(), result=result)
            )
        return commands

    def carry_out(self, command: Command) -> None:
        """For hosts that do more than answer."""
