"""SIGTERM to `flyball run` on one of several hosts makes that host leave; on the last one it stops the job."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.servers.own_servers import free_port

from flyball.cli.reach.client import ApiClient
from flyball.contracts.errors import NotFound, Unreachable

TOKEN = "a-token-for-this-test-only"
DEADLINE_S = 180.0
ENDED_BY_SIGNAL = (129, 130, 143)
SCRIPT = """
import os, time, torch, torch.distributed as dist
import flyball
dist.init_process_group("gloo")
job = flyball.attach()
state = {"step": -1}
start = job.restore(state)
print("starts", start, os.environ["RANK"], os.environ["FLYBALL_HOST_ID"], flush=True)
for step in range(start, 100_000):
    enough = torch.tensor([float(os.path.exists("enough"))])  # each rank checks, all decide together
    dist.all_reduce(enough)
    time.sleep(0.02)
    state["step"] = step
    job.step(step)
    job.save(step, state)
    if enough:
        break
dist.barrier()
dist.destroy_process_group()
"""


class Cluster:
    """`flyball run` on several hosts of one machine, that meet at an address; each with its output in a file."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.address = f"127.0.0.1:{free_port()}"
        self.runs: dict[str, subprocess.Popen[bytes]] = {}
        self.api = ApiClient(f"http://{self.address}", TOKEN)
        (place / "train.py").write_text(SCRIPT)
        (place / "shm").mkdir()

    def start(self, host: str, *, spares: int = 0, rank: int = 1) -> None:
        base = {k: v for k, v in os.environ.items() if not k.startswith(("FLYBALL_", "PET_", "TORCHELASTIC_"))}
        line = [
            "run",
            *("--nnodes", "2", "--spares", str(spares)),
            "--rdzv-endpoint",
            self.address,
            "--rdzv-id",
            "pair",
            "--node-rank",
            str(rank),
        ]
        named = ("--state-dir", str(self.place / host), "train.py")
        with (self.place / f"{host}.out").open("ab") as out:
            self.runs[host] = subprocess.Popen(
                [sys.executable, "-m", "flyball.cli.main", *line, "--host-id", host, *named],
                stdout=out,
                stderr=out,
                cwd=self.place,
                env=base | {"FLYBALL_SHM_DIR": str(self.place / "shm"), "FLYBALL_TOKEN": TOKEN},
            )

    def output(self, host: str) -> str:
        return (self.place / f"{host}.out").read_text()

    def until(self, what: str, condition: Callable[[], Any]) -> Any:  # noqa: ANN401 - whatever it found
        deadline = time.monotonic() + DEADLINE_S
        while True:
            try:
                found = condition()
            except (NotFound, Unreachable):
                found = None
            if found:
                return found
            failed = [h for h, run in self.runs.items() if run.poll() not in (None, 0, *ENDED_BY_SIGNAL)]
            assert time.monotonic() < deadline and not failed, "\n".join(
                [what, *(f"--- {h}\n{self.output(h)}" for h in self.runs)]
            )
            time.sleep(0.1)

    def job(self) -> dict[str, Any]:
        return dict(self.api.get("/v1/jobs/pair"))

    def hosts(self) -> set[str]:
        return {rank["host_id"] for rank in self.job()["ranks"]}

    def steps(self, count: int = 10) -> int:
        """Wait until every rank of the newest generation is a few steps further than the job is now."""
        past = int(self.job()["newest_step"]) + count
        self.until(f"step {past}", lambda: min((rank["step"] for rank in self.job()["ranks"]), default=-1) >= past)
        return past

    def trains(self) -> None:
        self.until("a supervisor with a job that trains", lambda: self.job()["newest_step"] >= 0)
        self.steps()

    def left_incident(self) -> dict[str, Any] | None:
        """The incident of the host that left, once it is closed."""
        incidents = self.api.items("/v1/incidents")
        return next((i for i in incidents if (i["cause"], i["state"]) == ("preemption_notice", "resolved")), None)

    def was_saved(self) -> bool:
        """Whether the ranks saved the step that was named for them; on a busy machine that may be too late."""
        decided = self.api.items("/v1/decisions")
        return any(d["kind"] == "emergency_checkpoint" and d.get("action_state") == "succeeded" for d in decided)

    def terminate(self, *hosts: str, number: signal.Signals = signal.SIGTERM) -> None:
        for host in hosts:
            self.runs[host].send_signal(number)

    def end(self, host: str) -> int:
        try:
            return self.runs[host].wait(DEADLINE_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{host} does not end:\n{self.output(host)}") from None

    def expect_ends(self, **exit_codes: int) -> None:
        found = {host: self.end(host) for host in exit_codes}
        assert found == exit_codes, "\n".join(f"--- {host}\n{self.output(host)}" for host in exit_codes)

    def finish(self, *hosts: str) -> None:
        """Let the script finish, and wait until the job succeeds on these hosts."""
        self.steps()
        (self.place / "enough").touch()
        self.expect_ends(**dict.fromkeys(hosts, 0))

    def start_spare(self, host: str) -> None:
        self.start(host, spares=1)
        self.until("a spare", lambda: {host} & {h["host_id"] for h in self.api.items("/v1/hosts") if h["engine_alive"]})

    def close(self) -> None:
        for process in self.runs.values():
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
        for process in self.runs.values():
            try:
                process.wait(60.0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self.api.close()


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with tempfile.TemporaryDirectory(prefix="fb-") as name:
        cluster = Cluster(Path(name))
        try:
            yield cluster
        finally:
            cluster.close()


def test_a_host_leaves_for_a_spare_and_the_job_goes_on(cluster: Cluster) -> None:
    cluster.start("h0", spares=1, rank=0)
    cluster.start("h1", spares=1)
    cluster.trains()
    cluster.start_spare("h2")
    assert cluster.hosts() == {"h0", "h1"}
    cluster.terminate("h1")
    cluster.expect_ends(h1=143)
    assert cluster.hosts() == {"h0", "h2"}
    output = cluster.output("h1")
    assert (
        "SIGTERM: host h1 leaves job pair" in output and "host h1 left job pair. Its ranks are now on h0, h2" in output
    )
    incident = cluster.until("the end of the incident", cluster.left_incident)
    lost = incident["lost_steps"]
    assert lost == 0 or (lost == 1 and not cluster.was_saved()), (incident, cluster.output("h0"))
    assert cluster.job()["restarts_used"] == 0
    cluster.finish("h0", "h2")


def test_the_host_of_the_supervisor_leaves_and_says_how_to_start_that_again(cluster: Cluster) -> None:
    cluster.start("h0", spares=1, rank=0)
    cluster.start("h2", spares=1)
    cluster.trains()
    cluster.start_spare("h3")
    cluster.terminate("h0")
    cluster.expect_ends(h0=143)
    output = cluster.output("h0")
    assert "host h0 left job pair. Its ranks are now on h2, h3" in output
    again = re.search(r"start it again: (flyball up [^(]*) \(with the same FLYBALL_TOKEN\)", output)
    assert again, output
    assert cluster.runs["h2"].poll() is None
    environment = dict(os.environ) | {"FLYBALL_TOKEN": TOKEN}
    with (cluster.place / "up.out").open("wb") as out:
        cluster.runs["up"] = subprocess.Popen(
            [sys.executable, "-m", "flyball.cli.main", *again[1].split()[1:]], stdout=out, stderr=out, env=environment
        )
    cluster.until("the supervisor again", lambda: cluster.job()["state"] == "running")
    cluster.finish("h2", "h3")


def test_without_a_spare_the_job_holds_after_a_host_has_left_and_a_persons_wish_ends_it_for_all(
    cluster: Cluster,
) -> None:
    cluster.start("h0", rank=0)
    cluster.start("h1")
    cluster.trains()
    cluster.terminate("h1", number=signal.SIGHUP)
    cluster.expect_ends(h1=129)
    assert "No host was free to take its ranks: the job holds after step" in cluster.output("h1")
    assert cluster.job()["state"] == "running" and cluster.runs["h0"].poll() is None
    saved = int(cluster.job()["newest_step"])
    cluster.until("the hold", lambda: any("spare" in i["holding_for"] for i in cluster.api.items("/v1/incidents")))
    cluster.start("h2")
    cluster.until("the return", lambda: cluster.hosts() == {"h0", "h2"})
    cluster.steps()
    starts = [int(n) for n in re.findall(r"starts (\d+) \d h2", cluster.output("h2"))]
    lost = saved + 1 - starts[-1] if starts else None
    assert lost == 0 or (lost == 1 and not cluster.was_saved()), (lost, cluster.api.items("/v1/decisions"))
    cluster.terminate("h2", number=signal.SIGINT)
    cluster.expect_ends(h2=130, h0=1)
    assert "was stopped by an operator" in cluster.output("h0")


def test_a_notice_to_all_hosts_stops_the_job(cluster: Cluster) -> None:
    cluster.start("h0", spares=1, rank=0)
    cluster.start("h1", spares=1)
    cluster.start("h2", spares=1)
    cluster.trains()
    cluster.terminate("h0", "h1", "h2")
    cluster.expect_ends(h0=143, h1=143, h2=143)
    assert "stopping the job" in cluster.output("h0") + cluster.output("h1") + cluster.output("h2")
    assert "job pair was stopped" in cluster.output("h0")
    assert list((cluster.place / "shm").iterdir()) == []
