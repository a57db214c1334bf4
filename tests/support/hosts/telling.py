"""Hosts played by a test that keep what they were given, and tell it to any supervisor, truly or not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from support.hosts.played import CLOCK, PlayedHost

from flyball.contracts.cluster import HostRanks, JobSpec, Placement
from flyball.contracts.decisions import Command, CommandBatch, EndJob, StartWorkers
from flyball.contracts.identity import Fence
from flyball.contracts.reports.grant_seals import GrantSeal
from flyball.contracts.reports.standings import HeldJob, HostStanding, LastObeyed


class TellingHost(PlayedHost):
    """Keeps the newest start of each job, as a daemon does."""

    def __init__(self, host_id: str, token: str, url: str) -> None:
        super().__init__(host_id, token, [url])
        self.held: dict[str, HeldJob] = {}
        self.ended: dict[str, int] = {}
        self.end_seals: dict[str, GrantSeal] = {}
        self.obeyed = LastObeyed()
        self.got: list[Command] = []

    def carry_out(self, command: Command) -> None:
        self.got.append(command)
        self.obeyed = self.obeyed.after(command, "")
        body = command.body
        if isinstance(body, StartWorkers):
            own = body.placement.host(self.host_id)
            ranks = own.ranks if own is not None else ()
            self.held[body.spec.job] = HeldJob(body.spec, body.placement, command.fence, ranks, seal=body.seal)
        elif isinstance(body, EndJob):
            self.ended[body.job] = body.generation
            if body.job in self.held:
                self.end_seals[body.job] = self.held.pop(body.job).seal

    def standing(self, **changed: Any) -> HostStanding:  # noqa: ANN401 - fields of HostStanding
        """What it would tell; `changed`: what it tells instead."""
        fields: dict[str, Any] = {
            "host_id": self.host_id,
            "incarnation": "i1",
            "at": CLOCK.wall_s(),
            "obeyed": self.obeyed,
            "unanswered_s": 100.0,
            "jobs": tuple(self.held.values()),
            "ended": self.ended,
            "end_seals": self.end_seals,
        }
        return HostStanding(**fields | changed)

    def poll(self) -> CommandBatch:
        """One poll, whose commands are not carried out."""
        return self._runner.run(self._client.commands(self.host_id, "i1", wait_s=1.0, obeyed=self.obeyed))

    def tell(self, standing: HostStanding | None = None) -> None:
        self._runner.run(self._client.report_standing(standing or self.standing()))


def made_up(host_ids: Mapping[str, tuple[int, ...]], job: str = "pwn", **changed: Any) -> HeldJob:  # noqa: ANN401
    """A job that nobody granted, on these hosts. `changed`: fields of its specification or placement."""
    world_size = sum(map(len, host_ids.values()))
    hosts = tuple(HostRanks(name, "127.0.0.1", "", ranks) for name, ranks in host_ids.items())
    spec = JobSpec(job, ("/bin/sh", "-c", "id"), "/tmp", nnodes=len(hosts), program=True, max_restarts=5)
    placement = Placement(job, 7, world_size, hosts, "127.0.0.1", 29_555, {}, (), None)
    of_spec = {name: value for name, value in changed.items() if name in JobSpec.__struct_fields__}
    of_placement = {name: value for name, value in changed.items() if name not in of_spec}
    return HeldJob(
        msgspec.structs.replace(spec, **of_spec), msgspec.structs.replace(placement, **of_placement), Fence(5, 7), ()
    )
