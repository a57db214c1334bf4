"""Real stacks on this machine: supervisor, host daemons, engines and training as processes."""

from __future__ import annotations

import json
import shutil
import signal
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
from support.clocks.waits import DEADLINE_S, until
from support.commands.own_processes import kill_all, processes_with
from support.commands.run_folders import clean_environment
from support.hosts.daemons import HostDaemon
from support.hosts.namespaces import Network
from support.jobs.recovered import ALIKE, QUIET, SMALL, RecordedJob
from support.servers.forwarder import Forwarder
from support.servers.parts import ServicePart

from flyball.cli.reach.client import ApiClient
from flyball.contracts.cluster import JobSpec, Phase
from flyball.contracts.on_host.segments import SHM_DIR_VARIABLE
from services.sensor.detector.stances import Stance

LOOPBACK = "127.0.0.1"
DEPOSED = "not_leading_any_more"  # what a controller logs
ARMED_EXAMPLE = Path(__file__).parents[1] / "jobs" / "armed_gpt.py"
PACE_S = 0.25  # every step is computed once more, by an uninterrupted run
# A lost connection is told by its own host, and the kill behind it by another one, which may be held up for seconds:
# nothing is decided before, and incidents have the cause that the tests gave them.
ROOT_CAUSE = {"FLYBALL_POLICY__ROOT_CAUSE_WINDOW_S": "30.0"}


def detector(*, stalled_s: float, silent_s: float = 0.6) -> dict[str, str]:
    """A setting for stacks: at least so long ranks may stay in a step, and hosts say nothing when nobody vouches for
    them. Both happens on a busy machine without a fault, and would be further incidents, and right."""
    steps = {"unknown_s": 600.0, "floor_s": stalled_s, "factor": 8.0}
    stalls = {
        "phases": {Phase.STEP.value: steps},
        "stances": dict.fromkeys((Stance.STANDS, Stance.TOGETHER, Stance.BLOCKED, Stance.WORKING), stalled_s),
        "unsettled_s": stalled_s,
    }
    settings = {"silence": {"min_deadline_s": silent_s}, "stalls": stalls}
    return {"FLYBALL_DETECTOR": json.dumps(settings)}


PATIENT = detector(stalled_s=120.0, silent_s=20.0)  # of a stack with which neither is tried


class Stack:
    """A control plane, as one process or in parts, and its hosts. Everything started here carries one variable, by
    which it is found and ended."""

    def __init__(self, **settings: str) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="flyball-r-"))  # short: a Unix socket's path is limited
        self.shm_dir = Path(tempfile.mkdtemp(prefix="flyball-r-", dir="/dev/shm"))
        database_url = f"sqlite:///{self.root / 'flyball.sqlite'}"
        own = {SHM_DIR_VARIABLE: str(self.shm_dir), "FLYBALL_DATABASE_URL": database_url}
        self.environment = clean_environment(**ALIKE) | ROOT_CAUSE | own | settings
        self.hosts: dict[str, HostDaemon] = {}
        self.lost: set[str] = set()
        self.parts: dict[str, ServicePart] = {}
        self.forwarders: list[Forwarder] = []
        self.daemons_url = ""
        self._api: ApiClient | None = None

    def start_supervisor(self, address: str = LOOPBACK) -> None:
        self.daemons_url = self.add_part("all", address=address).url
        self.supervisor.start()

    def add_part(
        self, kind: str, name: str = "", *, folder: str = "supervisor", address: str = LOOPBACK
    ) -> ServicePart:
        """Make a process of the control plane, which `start_parts` starts."""
        made = ServicePart(kind, self.root / folder, self.environment, address=address)
        self.parts[name or kind] = made
        return made

    def start_parts(self, *parts: ServicePart) -> None:
        """These, or all."""
        for part in parts or self.parts.values():
            part.launch()
        for part in parts or self.parts.values():
            part.wait_up()

    @property
    def supervisor(self) -> ServicePart:
        return self.parts["all"]

    def of(self, kind: str) -> list[ServicePart]:
        return [part for part in self.parts.values() if part.name == kind]

    def urls(self, kind: str) -> list[str]:
        return [part.url for part in self.of(kind)]

    def leader(self) -> ServicePart:
        """The controller that was elected last."""

        def epoch(controller: ServicePart) -> int:
            return max((line["epoch"] for line in controller.logged("leading")), default=0)

        return max(self.of("controller"), key=epoch)

    def stop_leader(self) -> ServicePart:
        """Stop a controller that believes to lead. It may lose that at any moment before, if it is held up."""
        while True:
            leader = self.leader()
            leader.send(signal.SIGSTOP)
            assert leader.process is not None
            process = psutil.Process(leader.process.pid)
            until(lambda process=process: process.status() == psutil.STATUS_STOPPED, "its stop")
            ended = [line["epoch"] for line in leader.logged(DEPOSED)]
            if leader.logged("leading")[-1]["epoch"] not in ended:
                return leader
            leader.send(signal.SIGCONT)

    @property
    def front(self) -> ServicePart:
        """The part that people ask."""
        return (self.of("all") or self.of("api"))[0]

    @property
    def api(self) -> ApiClient:
        if self._api is None:
            self._api = ApiClient(self.front.url, self.front.token)
        return self._api

    def add_hosts(
        self,
        *host_ids: str,
        behind: Forwarder | None = None,
        network: Network | None = None,
        probed: Path | None = None,
        have_engines: bool = True,
    ) -> None:
        """`behind`: what stands between their daemons and the supervisor. `network`: in which they are. `probed`: where
        each has a folder of recorded readings. `have_engines`: they come with them."""
        token_file = self.root / "token"
        if not token_file.exists():
            token_file.touch(0o600)
            token_file.write_text(self.front.token)
        for host_id in host_ids:
            url = behind.url if behind is not None else self.daemons_url
            place: dict[str, Any] = {}
            if network is not None:
                place = {"address": network.address[host_id], "inside": network.inside(host_id)}
            readings = {} if probed is None else {"FLYBALL_PROBE_ROOT": str(probed / host_id)}
            self.hosts[host_id] = HostDaemon(self.root, host_id, url, token_file, self.environment | readings, **place)
            self.hosts[host_id].launch()
        until(lambda: set(host_ids) <= set(self.host_states(have_engines)), f"reports of {', '.join(host_ids)}")

    def forwarder(self) -> Forwarder:
        """A way to the supervisor that can be cut."""
        self.forwarders.append(Forwarder(self.daemons_url))
        return self.forwarders[-1]

    def host_states(self, have_engines: bool = True) -> dict[str, str]:
        """Of the hosts that report, or only of those whose engines are alive."""
        self.check()
        hosts = self.api.items("/v1/hosts")
        return {h["host_id"]: h["state"] for h in hosts if h["engine_alive"] or not have_engines}

    def counters(self, host_id: str) -> Mapping[str, int]:
        """Of the host's engine, as last reported."""
        return next(dict(h["counters"]) for h in self.api.items("/v1/hosts") if h["host_id"] == host_id)

    def job(self, name: str, world_size: int) -> RecordedJob:
        return RecordedJob(self, name, world_size)

    def submit(self, job: RecordedJob, spec: Mapping[str, Any]) -> None:
        self.api.post("/v1/jobs", JobSpec(job=job.name, workdir=str(job.folder), stop_grace_s=0.0, **spec))

    def train(self, name: str, *, nnodes: int, nproc_per_node: int, **spec: Any) -> RecordedJob:  # noqa: ANN401 - of JobSpec
        """Start the example, and wait for its first steps."""
        job = self.job(name, nnodes * nproc_per_node)
        argv = (str(ARMED_EXAMPLE), "--steps", "100000", *SMALL, *QUIET, "--losses-dir", str(job.losses_dir))
        env = {"ARMED_DIR": str(job.folder), "ARMED_PACE_S": str(PACE_S)}
        shape = {"nnodes": nnodes, "nproc_per_node": nproc_per_node, "max_restarts": 100, "injectable": True}
        # On a busy machine saves would become less frequent, and more steps would be lost than the tests allow.
        saved = {"checkpoint": {"adapt_interval": False}}
        self.submit(job, {"argv": argv, "env": env, **shape, **saved, **spec})
        job.train_on()
        return job

    def check(self) -> None:
        """Fail at once where waiting on would be in vain."""
        for host_id, host in self.hosts.items():
            ended = host.process is not None and host.process.poll() is not None
            assert host_id in self.lost or not ended, f"{host_id} ended: {host.log_path.read_text()[-2000:]}"

    def end(self) -> None:
        """End all processes of this stack by their pids, and remove its files and shared memory."""
        if self._api is not None:
            self._api.close()

        for forwarder in self.forwarders:
            forwarder.cut()
        kill_all(lambda: processes_with(f"{SHM_DIR_VARIABLE}={self.shm_dir}"))
        for started in (*self.hosts.values(), *self.parts.values()):
            if started.process is not None:
                started.process.wait(DEADLINE_S)
        shutil.rmtree(self.shm_dir)
        shutil.rmtree(self.root)
