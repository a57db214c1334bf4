"""docker-compose.yml, started as plain processes: the same commands, environment and health checks; only addresses,
folders and the database are this machine's. What is left out: the images, the containers, networks between them."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from own_servers import free_port

from flyball.cli.reach.client import ApiClient
from flyball.contracts.cluster import Phase
from flyball.contracts.on_host.segments import SHM_DIR_VARIABLE

ROOT = Path(__file__).parents[2]
DEADLINE_S = 300.0
STEPS = {"unknown_s": 600.0, "floor_s": 60.0, "factor": 8.0}
PATIENT = {"silence": {"min_deadline_s": 20.0}, "stalls": {"phases": {Phase.STEP.value: STEPS}}}
LISTENING = ("redis", "sensor", "controller", "actuator", "api")
HOSTS = ("host-a", "host-b", "spare")
SCRIPT = ("--layers", "1", "--width", "32", "--heads", "2", "--context", "16", "--batch-size", "1", "--steps", "60")


def interpolate(text: str, values: dict[str, str]) -> str:
    """`${NAME}` and `${NAME:?message}`, as docker compose does it."""

    def value(match: re.Match[str]) -> str:
        if not values.get(match[1]):
            raise KeyError(f"{match[1]} {match[2] or 'is not set'}")
        return values[match[1]]

    return re.sub(r"\$\{(\w+)(?::\?([^}]*))?\}", value, text)


def compose(values: dict[str, str]) -> dict[str, Any]:
    document: dict[str, Any] = yaml.safe_load(interpolate((ROOT / "docker-compose.yml").read_text(), values))
    return document


def make_secrets() -> dict[str, str]:
    made = subprocess.run([ROOT / "deploy" / "make-secrets"], capture_output=True, text=True, check=True)
    return dict(line.split("=", 1) for line in made.stdout.splitlines())


def until(what: str, look: Callable[[], Any]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not look():
        assert time.monotonic() < deadline, f"not within {DEADLINE_S} s: {what}"
        threading.Event().wait(0.5)  # a health check is a process


class Machine:
    """Runs what the file says, in the order of its `depends_on`, on one machine."""

    def __init__(self, file: dict[str, Any], database_url: str) -> None:
        self.services: dict[str, dict[str, Any]] = file["services"]
        self.root = Path(tempfile.mkdtemp(prefix="flyball-c-"))  # short: a Unix socket's path is limited
        self.shm_dir = Path(tempfile.mkdtemp(prefix="flyball-c-", dir="/dev/shm"))
        self.ports = {name: free_port() for name in LISTENING}
        self._database_url = database_url
        self._started: dict[str, subprocess.Popen[bytes]] = {}

    def here(self, text: str, service: str) -> str:
        """A text of the file, with this machine's addresses and folders in place of the containers'."""
        text = re.sub(r"mysql://flyball:\w+@database:3306/flyball", self._database_url, text)
        for name, port in self.ports.items():
            text = re.sub(rf"(?<=[@/]){name}:(6379|7370)", f"127.0.0.1:{port}", text)
        if service in self.ports:
            text = text.replace("127.0.0.1:7370", f"127.0.0.1:{self.ports[service]}")
        return text.replace("/var/lib/flyball", str(self.root / service))

    def environment(self, service: str) -> dict[str, str]:
        base = {k: v for k, v in os.environ.items() if not k.startswith(("FLYBALL_", "PET_", "TORCHELASTIC_"))}
        said = {k: self.here(v, service) for k, v in self.services[service].get("environment", {}).items()}
        if "FLYBALL_PORT" in said:
            said |= {"FLYBALL_PORT": str(self.ports[service]), "FLYBALL_HOST": "127.0.0.1"}
        name = self.services[service].get("hostname", service)
        # Training stands still for seconds on a busy machine too: that is to be no incident.
        said["FLYBALL_DETECTOR"] = json.dumps(PATIENT)
        return base | said | {SHM_DIR_VARIABLE: str(self.shm_dir), "HOSTNAME": name, "OMP_NUM_THREADS": "1"}

    def command(self, service: str, words: list[str]) -> list[str]:
        program, *arguments = (self.here(word, service) for word in words)
        match program:
            case "python":
                return [sys.executable, *arguments]
            case "flyball":
                return [sys.executable, "-P", "-m", "flyball.cli.main", *arguments]
            case "redis-server":
                return [program, *arguments, "--bind", "127.0.0.1", "--port", str(self.ports["redis"])]
        raise AssertionError(f"{service} runs {program}, which the image does not have")

    def start(self, service: str) -> None:
        (self.root / service).mkdir()
        with (self.root / f"{service}.log").open("wb") as log:
            self._started[service] = subprocess.Popen(
                self.command(service, self.services[service]["command"]),
                env=self.environment(service),
                cwd=self.root / service if service == "redis" else ROOT,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def is_healthy(self, service: str) -> bool:
        """As its own health check says."""
        assert self._started[service].poll() is None, f"{service}: {(self.root / f'{service}.log').read_text()[-2000:]}"
        kind, *check = self.services[service]["healthcheck"]["test"]
        assert kind == "CMD"
        return not subprocess.run(
            self.command(service, check),
            env=self.environment(service),
            capture_output=True,
            timeout=DEADLINE_S,
            check=False,
        ).returncode

    def up(self) -> None:
        """docker compose up --wait"""
        self.start("redis")
        parts = [name for name in LISTENING if name != "redis"]
        assert set(self.services) == {"database", *LISTENING, *HOSTS}, "nothing of the file is left out"
        for group in (parts, HOSTS):
            for service in group:
                self.start(service)
            for service in group:
                until(f"{service} is healthy", lambda one=service: self.is_healthy(one))

    def exec(self, service: str, *words: str) -> subprocess.CompletedProcess[str]:
        """docker compose exec"""
        try:
            return subprocess.run(
                self.command(service, list(words)),
                env=self.environment(service),
                cwd=self.root,
                capture_output=True,
                text=True,
                timeout=DEADLINE_S,
                check=False,
            )
        except subprocess.TimeoutExpired as late:
            raise AssertionError(f"not within {DEADLINE_S} s: {words}\n{late.stderr!r}\n{self.told()}") from None

    def told(self) -> str:
        """What the supervisor knows of the jobs and hosts, and the end of every log."""
        with self.api() as api:
            known = [json.dumps(api.get(path), indent=1) for path in ("/v1/jobs", "/v1/hosts", "/v1/decisions")]
        logs = [f"{log}:\n{log.read_text(errors='replace')[-3000:]}" for log in sorted(self.root.rglob("*.log"))]
        return "\n".join([*known, *logs])

    def api(self) -> ApiClient:
        return ApiClient(f"http://127.0.0.1:{self.ports['api']}", self.environment("api")["FLYBALL_TOKEN"])

    def down(self) -> None:
        for service in reversed(self._started):
            self._started[service].send_signal(signal.SIGTERM)
        for process in self._started.values():
            process.wait(DEADLINE_S)
        mine = (SHM_DIR_VARIABLE, str(self.shm_dir))
        left = [p for p in psutil.process_iter(["environ"]) if mine in (p.info["environ"] or {}).items()]
        for process in left:  # an engine outlives its daemon; a container would have ended it
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(left, DEADLINE_S)
        shutil.rmtree(self.shm_dir)
        shutil.rmtree(self.root)


@pytest.fixture
def machine(mariadb_url: str) -> Iterator[Machine]:
    if shutil.which("redis-server") is None:
        pytest.skip("no redis-server is installed")
    machine = Machine(compose(make_secrets()), mariadb_url)
    yield machine
    machine.down()


@pytest.mark.parametrize("missing", ["FLYBALL_TOKEN", "DATABASE_PASSWORD", "REDIS_PASSWORD"])
def test_nothing_starts_without_a_secret(missing: str) -> None:
    with pytest.raises(KeyError, match=f"{missing} is missing, run deploy/make-secrets"):
        compose({name: value for name, value in make_secrets().items() if name != missing})
    assert make_secrets()[missing] != make_secrets()[missing]


def test_what_the_file_says_trains_a_job_on_two_hosts(machine: Machine) -> None:
    machine.up()
    example = str(ROOT / "examples" / "train_gpt.py")
    run = ("flyball", "run", "--use-supervisor", "--host-id", "host-a", "--job", "first", "--nnodes", "2")
    done = machine.exec("host-a", *run, "--nproc-per-node", "1", example, *SCRIPT)
    assert done.returncode == 0, done.stderr
    assert "job first succeeded" in done.stderr and "host host-a has already joined" in done.stderr
    with machine.api() as api:
        assert {host["host_id"] for host in api.items("/v1/hosts")} == set(HOSTS)
        job = api.get("/v1/jobs/first")
        assert (job["state"], job["generation"], len({rank["host_id"] for rank in job["ranks"]})) == ("succeeded", 1, 2)
        assert [decision["kind"] for decision in api.items("/v1/decisions", job="first")] == [
            "start_job",
            "complete_job",
        ]
