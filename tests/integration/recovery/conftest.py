"""Real stacks on this machine: supervisor, host daemons, engines and training as processes."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from flyball.cli.reach.client import ApiClient
from flyball.contracts.cluster import JobSpec
from flyball.contracts.on_host.segments import SHM_DIR_VARIABLE

sys.path.append(str(Path(__file__).parent))  # tests are no packages: the modules beside this one are found by path
pytest.register_assert_rewrite("recovery_jobs", "recovery_namespaces", "recovery_processes")

from recovery_jobs import QUIET, SMALL, Job, Reference  # noqa: E402 - found by the path above
from recovery_namespaces import Network  # noqa: E402 - found by the path above
from recovery_processes import (  # noqa: E402 - found by the path above
    DEADLINE_S,
    Forwarder,
    Host,
    Part,
    clean_environment,
    kill_all_with,
    until,
)

ARMED_EXAMPLE = Path(__file__).parent / "armed_gpt.py"
PACE_S = 0.25  # every step is computed once more, by an uninterrupted run
# A lost connection is told by its own host, and the kill behind it by another one, which may be held up for seconds:
# nothing is decided before, and incidents have the cause that the tests gave them.
ROOT_CAUSE = {"FLYBALL_POLICY__ROOT_CAUSE_WINDOW_S": "30.0"}


class Stack:
    """A supervisor and its hosts. Everything started here carries one variable, by which it is found and ended."""

    until = staticmethod(until)

    def __init__(self, **settings: str) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="flyball-r-"))  # short: a Unix socket's path is limited
        self.shm_dir = Path(tempfile.mkdtemp(prefix="flyball-r-", dir="/dev/shm"))
        self.environment = clean_environment() | {SHM_DIR_VARIABLE: str(self.shm_dir)} | ROOT_CAUSE | settings
        self.hosts: dict[str, Host] = {}
        self.lost: set[str] = set()
        self.parts: dict[str, Part] = {}
        self.forwarders: list[Forwarder] = []
        self.daemons_url = ""
        self._api: ApiClient | None = None

    def start_supervisor(self, address: str = "127.0.0.1") -> None:
        self.parts["all"] = supervisor = Part(self.root, "all", self.environment, address=address)
        self.daemons_url = supervisor.url
        supervisor.start()

    @property
    def supervisor(self) -> Part:
        return self.parts["all"]

    @property
    def api(self) -> ApiClient:
        if self._api is None:
            part = self.parts.get("all") or self.parts["api"]
            self._api = ApiClient(part.url, part.token)
        return self._api

    def add_hosts(
        self,
        *host_ids: str,
        behind: Forwarder | None = None,
        network: Network | None = None,
        probed: Path | None = None,
    ) -> None:
        """`behind`: what stands between their daemons and the supervisor. `network`: in which they are. `probed`: where
        each has a folder of recorded readings."""
        for host_id in host_ids:
            token_file = self.root / "supervisor" / "token"
            url = behind.url if behind is not None else self.daemons_url
            place: dict[str, Any] = {}
            if network is not None:
                place = {"address": network.address[host_id], "inside": network.inside(host_id)}
            readings = {} if probed is None else {"FLYBALL_PROBE_ROOT": str(probed / host_id)}
            self.hosts[host_id] = Host(self.root, host_id, url, token_file, self.environment | readings, **place)
            self.hosts[host_id].start()
        until(f"reports of {', '.join(host_ids)}", lambda: set(host_ids) <= set(self.host_states()))

    def forwarder(self) -> Forwarder:
        """A way to the supervisor that can be cut."""
        self.forwarders.append(Forwarder(self.daemons_url))
        return self.forwarders[-1]

    def host_states(self) -> dict[str, str]:
        self.check()
        return {h["host_id"]: h["state"] for h in self.api.items("/v1/hosts") if h["engine_alive"]}

    def counters(self, host_id: str) -> Mapping[str, int]:
        """Of the host's engine, as last reported."""
        return next(dict(h["counters"]) for h in self.api.items("/v1/hosts") if h["host_id"] == host_id)

    def job(self, name: str, world_size: int) -> Job:
        return Job(self, name, world_size)

    def submit(self, job: Job, spec: Mapping[str, Any]) -> None:
        self.api.post("/v1/jobs", JobSpec(job=job.name, workdir=str(job.folder), stop_grace_s=0.0, **spec))

    def train(self, name: str, *, nnodes: int, nproc_per_node: int, **spec: Any) -> Job:  # noqa: ANN401 - of JobSpec
        """Start the example, and wait for its first steps."""
        job = self.job(name, nnodes * nproc_per_node)
        argv = (str(ARMED_EXAMPLE), "--steps", "100000", *SMALL, *QUIET, "--losses-dir", str(job.losses_dir))
        env = {"ARMED_DIR": str(job.folder), "ARMED_PACE_S": str(PACE_S)}
        shape = {"nnodes": nnodes, "nproc_per_node": nproc_per_node, "max_restarts": 100}
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
        kill_all_with(f"{SHM_DIR_VARIABLE}={self.shm_dir}")
        for started in (*self.hosts.values(), *self.parts.values()):
            if started.process is not None:
                started.process.wait(DEADLINE_S)
        shutil.rmtree(self.shm_dir)
        shutil.rmtree(self.root)


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reference]:
    own = tmp_path_factory.getbasetemp()
    root = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "reference"
    root.mkdir(exist_ok=True)
    reference = Reference(root)
    yield reference
    reference.end()


@pytest.fixture(scope="session")
def make_part() -> Callable[..., Part]:
    def make(stack: Stack, name: str, *, folder: str = "supervisor") -> Part:
        return Part(stack.root, name, stack.environment, folder=folder)

    return make


@pytest.fixture(scope="module")
def make_stack() -> Iterator[Callable[..., Stack]]:
    made: list[Stack] = []

    def make(**settings: str) -> Stack:
        made.append(Stack(**settings))
        return made[-1]

    yield make
    for stack in made:
        stack.end()
