"""docker-compose.yml on a real container engine, as a user types it: it trains, heals, and leaves nothing behind.

Stand-ins, since no image can be pulled here: the base images are made of Debian's packages, and pip's wheels come from
this machine. The file, the Dockerfile and all that is in the image are the real ones. Not run: Grafana, Prometheus."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from container_engine import (
    ROOT,
    WHEELS_PORT,
    CannotRun,
    ContainerEngine,
    base_names,
    check_machine,
    fetch_compose,
    fetch_wheels,
    import_base,
    make_base,
    until,
)

pytestmark = pytest.mark.compose

GATEWAY = "172.17.0.1"  # of the engine's default network, where `docker build` runs
UP_DEADLINE_S = 300.0
HEAL_DEADLINE_S = 120.0
CHAOS_EVERY_S = 8
JOB = "example"
OURS = "flyball:local"
GET = """
import sys, urllib.request
request = urllib.request.Request(sys.argv[1], headers={"Authorization": f"Bearer {sys.argv[2]}"})
sys.stdout.write(urllib.request.urlopen(request, timeout=10).read().decode())
"""


class Stack:
    """The file's containers, by the commands that a user has."""

    def __init__(self, engine: ContainerEngine, program: Path) -> None:
        self.engine = engine
        self.program = program
        self.env = engine.env | {"COMPOSE_PROJECT_NAME": "flyball", "CHAOS_EVERY_S": str(CHAOS_EVERY_S)}
        self._token = ""

    def compose(self, *words: str, deadline_s: float = 120.0, check: bool = True) -> str:
        done = subprocess.run(
            [str(self.program), *words],
            cwd=ROOT,
            env=self.env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=deadline_s,
            check=False,
        )
        if check:
            assert done.returncode == 0, f"compose {words}: {done.stderr[-4000:]}\n{self.logs()}"
        return done.stdout

    def logs(self) -> str:
        """The state and the last lines of every container, for a failure."""
        return self.compose("ps", "--all", check=False) + self.compose(
            "logs", "--no-color", "--tail", "15", check=False
        )

    def get(self, path: str) -> Any:  # noqa: ANN401 - JSON
        """Ask the API as somebody on that machine does, at the port that the file publishes."""
        self._token = self._token or self.compose("exec", "-T", "api", "cat", "/secrets/cluster/token")
        return json.loads(self.engine.inside(sys.executable, "-c", GET, f"http://127.0.0.1:7370{path}", self._token))

    def job(self) -> Any:  # noqa: ANN401 - JSON
        return self.get(f"/v1/jobs/{JOB}")

    def incidents(self) -> list[Any]:
        return list(self.get(f"/v1/incidents?job={JOB}")["items"])

    def host_of(self, rank: int) -> str:
        return next(str(one["host_id"]) for one in self.job()["ranks"] if one["rank"] == rank)

    def heals(self, what: str, known: int) -> Any:  # noqa: ANN401 - JSON
        """Wait until an incident after the `known` first ones was resolved, and training went on; returns it."""

        def resolved() -> Any:  # noqa: ANN401 - JSON
            return next((one for one in self.incidents()[known:] if one["state"] == "resolved"), None)

        found = until(f"{what} heals", resolved, HEAL_DEADLINE_S, self.logs)
        step = self.job()["newest_step"]
        until("training goes on", lambda: self.job()["newest_step"] > step, HEAL_DEADLINE_S, self.logs)
        return found


def prepare(folder: Path, engine: ContainerEngine) -> Path:
    """Fetch wheels, base images and compose at once, since each waits for others most of the time."""
    with ThreadPoolExecutor(3) as pool:
        base = pool.submit(make_base, folder / "base.tar")
        program = pool.submit(fetch_compose, folder / "compose")
        wheels = pool.submit(fetch_wheels, engine.wheels)
        base.result(), wheels.result()
    import_base(engine, folder / "base.tar", base_names())
    (folder / "base.tar").unlink()
    return program.result()


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    engine = None
    try:
        check_machine()
        engine = ContainerEngine()
        engine.start()
        began = time.monotonic()
        program = prepare(tmp_path_factory.mktemp("compose"), engine)
        print(f"prepared in {time.monotonic() - began:.0f} s")
        yield Stack(engine, program)
    except CannotRun as why:
        pytest.skip(f"no container engine: {why}")
    finally:
        if engine is not None:
            began = time.monotonic()
            engine.close()
            print(f"engine removed in {time.monotonic() - began:.0f} s")


def test_the_image_has_no_compiler_and_no_root(stack: Stack) -> None:
    began = time.monotonic()
    wheels = (f"PIP_FIND_LINKS=http://{GATEWAY}:{WHEELS_PORT}/", f"PIP_TRUSTED_HOST={GATEWAY}", "PIP_NO_INDEX=1")
    stack.compose("build", *(word for wheel in wheels for word in ("--build-arg", wheel)), deadline_s=600.0)
    print(f"built in {time.monotonic() - began:.0f} s")
    look = "id -u; for name in cc gcc c++ ld make; do command -v $name; done; true"
    assert stack.engine.docker("run", "--rm", "--network=none", OURS, "sh", "-c", look) == "10001\n"


def test_up_trains_heals_and_leaves_nothing(stack: Stack) -> None:
    began = time.monotonic()
    stack.compose("up", "--detach", "--wait", deadline_s=UP_DEADLINE_S)
    until("the example trains", lambda: (stack.job()["newest_step"] or 0) >= 5, HEAL_DEADLINE_S, stack.logs)
    print(f"up and training in {time.monotonic() - began:.0f} s")
    assert {host["host_id"] for host in stack.get("/v1/hosts")["items"]} == {"host-a", "host-b", "spare"}
    check_confinement(stack)

    # A fault by hand.
    host = stack.host_of(1)
    stack.compose("exec", "-T", host, "flyball", "inject", "kill", "--job", JOB, "--rank", "1")
    assert stack.heals("a killed rank", 0)["cause"] == "worker_killed"

    # The follower is lost and started again: the job does not notice.
    before = stack.job()
    stack.compose("kill", "example")
    stack.compose("up", "--detach", "--wait", deadline_s=UP_DEADLINE_S)
    after = stack.job()
    assert [after[name] for name in ("submitted_at", "generation")] == [
        before[name] for name in ("submitted_at", "generation")
    ]

    # Faults by the profile.
    known = len(stack.incidents())
    stack.compose("--profile", "chaos", "up", "--detach", deadline_s=UP_DEADLINE_S)
    assert stack.heals("chaos", known)["cause"] in ("worker_killed", "rank_stalled", "rank_hung")
    stack.compose("--profile", "chaos", "stop", "chaos-host-a", "chaos-host-b", "chaos-spare")
    until(
        "all is healed", lambda: all(i["state"] == "resolved" for i in stack.incidents()), HEAL_DEADLINE_S, stack.logs
    )

    # A host is lost: the spare takes its rank.
    known, lost = len(stack.incidents()), stack.host_of(1)
    stack.compose("kill", lost)
    stack.heals("a lost host", known)
    assert stack.host_of(1) != lost

    print(f"all faults healed after {time.monotonic() - began:.0f} s")
    stack.compose("--profile", "chaos", "down", "--volumes", "--remove-orphans", deadline_s=UP_DEADLINE_S)
    print(f"down after {time.monotonic() - began:.0f} s")
    for kind in ("container", "volume"):
        assert stack.engine.docker(kind, "ls", "--quiet", *(["--all"] if kind == "container" else [])) == "", kind
    networks = stack.engine.docker("network", "ls", "--format", "{{.Name}}").split()
    assert sorted(networks) == ["bridge", "host", "none"]


def check_confinement(stack: Stack) -> None:
    """Every container runs without root's rights, on a root file system that it cannot write."""
    names = stack.engine.docker("ps", "--all", "--quiet").split()
    for found in json.loads(stack.engine.docker("inspect", *names)):
        name, host, config = found["Name"], found["HostConfig"], found["Config"]
        assert host["ReadonlyRootfs"] and host["CapDrop"] == ["ALL"], name
        assert config["User"].split(":")[0] not in ("", "0", "root"), name
        assert host["Memory"] > 0 and host["PidsLimit"] > 0, name
        words = " ".join([*config["Cmd"], *config["Env"]])
        assert not any(secret in words for secret in secrets(stack)), f"{name} has a secret in plain sight"


def secrets(stack: Stack) -> list[str]:
    kept = {
        "api": ["/secrets/cluster/token"],
        "database": ["/secrets/database/password"],
        "redis": ["/secrets/redis/password"],
    }
    return [stack.compose("exec", "-T", service, "cat", *files) for service, files in kept.items()]


@pytest.mark.skipif(not os.access("/usr/bin/docker-compose", os.X_OK), reason="docker-compose is not installed")
def test_both_versions_of_compose_accept_the_file() -> None:
    for profiles in ([], ["chaos", "observability"]):
        words = [word for profile in profiles for word in ("--profile", profile)]
        done = subprocess.run(
            ["/usr/bin/docker-compose", *words, "config", "--quiet"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
