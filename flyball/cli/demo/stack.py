"""The demo's cluster on one machine: an embedded supervisor, host daemons with state folders of their own, one job."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flyball.cli.demo.events import EventFeed
from flyball.cli.demo.timeline import DemoTimeline
from flyball.cli.reach.client import ApiClient
from flyball.cli.run.embedded import start_supervisor
from flyball.cli.run.host_process import HostProcess
from flyball.cli.run.job_watch import submit
from flyball.cli.signals import EndSignals
from flyball.contracts.checkpoints import CheckpointSpec
from flyball.contracts.cluster import HostState, JobSpec, JobState
from flyball.contracts.errors import JobFailed, Unreachable

JOB = "demo"
NNODES = 2
NPROC_PER_NODE = 2
WORLD_SIZE = NNODES * NPROC_PER_NODE
REPORT_INTERVAL_S = 0.2
LOOK_INTERVAL_S = 0.1
STOP_DEADLINE_S = 30.0


class DemoStack:
    """Starts everything that the demo needs, and ends it."""

    def __init__(self, folder: Path, timeline: DemoTimeline, signals: EndSignals) -> None:
        self.folder = folder
        self.losses_dir = folder / "losses"
        self.hosts: dict[str, HostProcess] = {}
        self._lost: set[str] = set()
        self._timeline = timeline
        self._signals = signals
        self._submitted = False

    def start(self, port: int) -> None:
        """Start the supervisor. Raises PortInUse."""
        self.supervisor = start_supervisor(self.folder / "supervisor", port=port)
        self.client = ApiClient(self.supervisor.url, self.supervisor.token)
        self.feed = EventFeed(self.client)

    def add_host(self, host_id: str) -> None:
        """Start a daemon with its own state folder. Every host is its own failure domain."""
        host = HostProcess(
            host_id=host_id,
            state_dir=self.folder / host_id,
            supervisor_url=self.supervisor.url,
            token_file=self.folder / "supervisor" / "token",
            failure_domain=f"rack-{host_id[-1]}",
            report_interval_s=REPORT_INTERVAL_S,
            warm_nproc=NPROC_PER_NODE,
        )
        self.hosts[host_id] = host
        host.start()

    def expect_loss(self, host_id: str) -> None:
        """From now on, accept that this host's daemon is gone."""
        self._lost.add(host_id)

    def submit(self, script: Path, arguments: tuple[str, ...]) -> None:
        """Submit the training job."""
        spec = JobSpec(
            job=JOB,
            argv=(str(script), *arguments),
            workdir=str(self.folder),
            nnodes=NNODES,
            nproc_per_node=NPROC_PER_NODE,
            checkpoint=CheckpointSpec(every_steps=1, replicas=1),
            stop_grace_s=1.0,
            injectable=True,
        )
        submit(self.client, spec)
        self._submitted = True

    def job(self) -> dict[str, Any]:
        return dict(self.client.get(f"/v1/jobs/{JOB}"))

    def ready_hosts(self) -> set[str]:
        """Hosts that can take ranks at once: healthy, with an engine and a warm standby."""
        healthy = {HostState.HEALTHY.value, HostState.SPARE.value}
        hosts = self.client.items("/v1/hosts")
        ready = {str(h["host_id"]) for h in hosts if h["state"] in healthy and h["engine_address"]}
        return {host_id for host_id in ready if host_id in self.hosts and self.hosts[host_id].is_warm}

    def wait(self, condition: Callable[[], bool], what: str, deadline_s: float) -> None:
        """Wait until the condition holds. Raises Unreachable if that takes too long, and what `poll` raises."""
        deadline = time.monotonic() + deadline_s
        while True:
            self.poll()
            if condition():
                return
            if time.monotonic() > deadline:
                raise Unreachable(
                    f"Timed out after {deadline_s:.0f} s waiting for {what}.", hint=f"see the logs in {self.folder}"
                )
            time.sleep(LOOK_INTERVAL_S)

    def poll(self) -> None:
        """Show new events. Raises if waiting is pointless: after Ctrl-C, for a dead daemon or an ended job."""
        self._signals.check()
        self._timeline.show(self.feed.pull(), self.feed.newest_world_step(WORLD_SIZE))
        for host_id, host in self.hosts.items():
            if host_id not in self._lost:
                host.check()
        job = self.job() if self._submitted else None
        if job and JobState(job["state"]).ended:
            raise JobFailed(
                f"The job ended too early: {job['state']}: {job['message']}", hint=f"see the logs in {self.folder}"
            )

    def stop_job(self) -> None:
        """Stop the job as an operator would. Ranks may then differ by one step."""
        self.client.post(f"/v1/jobs/{JOB}/stop")
        deadline = time.monotonic() + STOP_DEADLINE_S
        while not JobState(self.job()["state"]).ended:
            if time.monotonic() > deadline:
                raise Unreachable(
                    f"The job did not stop within {STOP_DEADLINE_S:.0f} s.", hint=f"see the logs in {self.folder}"
                )
            time.sleep(LOOK_INTERVAL_S)
        self._timeline.show(self.feed.pull(), self.feed.newest_world_step(WORLD_SIZE))

    def stop(self) -> None:
        """End every process by its id and remove every segment. Safe at any time, even halfway through the start."""
        for host in self.hosts.values():
            host.stop()
        if hasattr(self, "client"):
            self.client.close()
        if hasattr(self, "supervisor"):
            self.supervisor.stop()
