"""`flyball host` as the command of a batch step, its supervisor elsewhere: hosts are taken away, and come back."""

from __future__ import annotations

import signal
from pathlib import Path

from support.commands.flyball import FlyballProcess
from support.commands.own_processes import processes_of
from support.jobs.allocations import SECRET, SLURM, TRAIN, signal_step, steps_of

from flyball.cli.reach.client import ApiClient
from flyball.contracts.cluster import JobSpec

SAVED_EVERY = 50


def test_every_process_gets_sigterm_twice_and_the_job_goes_on_in_the_next_step(place: Path) -> None:
    node = place / "node"
    for folder in (node, place / "up"):
        (folder / "shm").mkdir(parents=True)
    (node / "train.py").write_text(TRAIN)
    up = FlyballProcess(place / "up", "up", "--port", "0", "-o", "json", FLYBALL_TOKEN=SECRET)
    line = ("host", "--supervisor", up.facts()["url"], "--host-id")
    saves = {"FLYBALL_CKPT_EVERY_STEPS": str(SAVED_EVERY)}

    def start() -> list[FlyballProcess]:
        return [FlyballProcess(node, *line, name, FLYBALL_TOKEN=SECRET, **SLURM, **saves) for name in ("n1", "n2")]

    def train_on(hosts: list[FlyballProcess], steps: int) -> None:
        goal = [len(steps_of(node, "far", rank)) + steps for rank in (0, 1)]
        hosts[0].wait_for(
            lambda: all(len(steps_of(node, "far", rank)) >= goal[rank] for rank in (0, 1)), f"{steps} steps"
        )

    with up, ApiClient(up.facts()["url"], SECRET) as api:
        hosts = start()
        api.post("/v1/jobs", JobSpec("far", ("train.py", "far"), str(node), nnodes=2))
        train_on(hosts, SAVED_EVERY + 20)
        for _ in range(2):
            signal_step(node)
        assert [host.end() for host in hosts] == [0, 0]
        assert not processes_of(node), "".join(host.text for host in hosts)
        stood = [max(steps_of(node, "far", rank)) for rank in (0, 1)]

        hosts = start()
        train_on(hosts, 20)
        for rank, at in enumerate(stood):
            began = steps_of(node, "far", rank)[at + 1]
            assert began in (at + 1, at + 2), "the last one was saved, and stood before it was written down"
        api.post("/v1/jobs/far/stop")
        for host in hosts:
            assert host.send(signal.SIGTERM) == 0
