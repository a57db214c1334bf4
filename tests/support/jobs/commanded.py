"""A job of one host, started and stopped by the commands that a supervisor sends to its daemon."""

from __future__ import annotations

import msgspec
from support.clocks.waits import until
from support.hosts.daemons import LoneDaemon
from support.jobs.placements import make_placement

from flyball.contracts.cluster import JobSpec, Placement
from flyball.contracts.decisions import (
    Command,
    CommandBody,
    CommandUpdate,
    EndJob,
    StartWorkers,
    StopWorkers,
    UpdateState,
)
from flyball.contracts.identity import Fence
from flyball.contracts.reports.signals import WorkerExited


class CommandedJob:
    """Creates the commands for a job of one host."""

    def __init__(self, daemon: LoneDaemon, script: str, *, nproc: int = 1, name: str = "job", **spec: object) -> None:
        self.daemon = daemon
        self.workdir = daemon.root / f"{name}-code"
        self.workdir.mkdir()
        (self.workdir / "train.py").write_text(script)
        environment = {"OMP_NUM_THREADS": "1"}  # the same for any number of ranks, which then share a standby
        settings = {"argv": ("train.py",), "workdir": str(self.workdir), "env": environment, **spec}
        self.spec = msgspec.convert(
            {"job": name, "nproc_per_node": nproc, "stop_grace_s": 0.0, **settings}, JobSpec, strict=False
        )
        self._number = 0

    def placement(self, generation: int, *, port: int = 0) -> Placement:
        return make_placement(
            {"host-a": tuple(range(self.spec.nproc_per_node))},
            generation=generation,
            job=self.spec.job,
            master_port=port or self.daemon.port(),
            restart_count=generation - 1,
        )

    def command(
        self, body: CommandBody, *, generation: int, epoch: int = 1, command_id: str = "", deadline_s: float = 110.0
    ) -> Command:
        self._number += 1
        return Command(
            command_id=command_id or f"act-{self.spec.job}-{self._number}.{type(body).__name__.lower()}.host-a.1",
            action_id=f"act-{self._number}",
            host_id="host-a",
            fence=Fence(epoch, generation),
            body=body,
            deadline_s=deadline_s,
        )

    def send(self, body: CommandBody, *, generation: int, epoch: int = 1) -> CommandUpdate:
        command = self.command(body, generation=generation, epoch=epoch)
        self.daemon.supervisor.send(command)
        return self.daemon.supervisor.answer(command)

    def log(self, generation: int = 1, rank: int = 0) -> str:
        return self.daemon.rank_log(generation, rank, self.spec.job)

    def wait_up(self, generation: int = 1, rank: int = 0) -> None:
        """The worker printed "up"."""
        until(lambda: "up" in self.log(generation, rank).split(), f"rank {rank} up")

    def exit_of(self, rank: int) -> WorkerExited:
        return self.daemon.supervisor.exit_of(rank, self.spec.job)

    def start(self, generation: int = 1, *, epoch: int = 1, port: int = 0) -> CommandUpdate:
        body = StartWorkers(self.spec, self.placement(generation, port=port))
        update = self.send(body, generation=generation, epoch=epoch)
        assert update.state is UpdateState.SUCCEEDED, update
        return update

    def stop(self, generation: int = 1, *, grace_s: float = 0.0, epoch: int = 1) -> CommandUpdate:
        return self.send(StopWorkers(self.spec.job, generation, grace_s), generation=generation, epoch=epoch)

    def end(self, generation: int = 1, *, grace_s: float = 0.0) -> CommandUpdate:
        return self.send(EndJob(self.spec.job, generation, grace_s), generation=generation)
