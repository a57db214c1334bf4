"""Several `flyball run` on one machine as the hosts of a cluster: with a supervisor, and with a rendezvous address."""

from __future__ import annotations

import ast
import hashlib
import json
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.commands.run_folders import environment_of, run_folder
from support.servers.own_servers import free_port

from flyball.cli.reach.client import ApiClient
from flyball.contracts.errors import NotFound

TOKEN = "a-token-for-this-test-only"
SCRIPT = """
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.tensor([float(os.environ["RANK"])])
dist.all_reduce(total)
print("total", total.item(), os.environ["FLYBALL_HOST_ID"], flush=True)
dist.destroy_process_group()
"""


def environment(place: Path, **more: str) -> dict[str, str]:
    return environment_of(place, **{"FLYBALL_TOKEN": TOKEN} | more)


def start(place: Path, *arguments: str, **environ: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "flyball.cli.main", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=place,
        env=environment(place, **environ),
    )


def finish(*processes: subprocess.Popen[str]) -> list[tuple[int, str, str]]:
    ended = []
    try:
        for process in processes:
            out, err = process.communicate(timeout=300)
            ended.append((process.returncode, out, err))
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()
    return ended


@pytest.fixture
def place() -> Iterator[Path]:
    with run_folder() as folder:
        yield folder


@pytest.fixture
def supervisor(place: Path) -> Iterator[str]:
    process = start(place, "up", "--port", "0", "--state-dir", str(place / "sup"), "-o", "json")
    assert process.stdout
    try:
        lines: list[str] = []
        while not lines or lines[-1] != "}\n":
            lines.append(process.stdout.readline())
            assert lines[-1], process.communicate(timeout=10)[1]
        yield json.loads("".join(lines))["url"]
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=300)
    assert process.returncode == 0


def test_two_hosts_join_a_supervisor_and_submit_one_job(place: Path, supervisor: str) -> None:
    (place / "train.py").write_text(SCRIPT)
    line = ["run", "--supervisor", supervisor, "--nnodes", "2", "--nproc-per-node", "1", "--job", "pair"]
    ended = finish(*(start(place, *line, "--host-id", host, "train.py") for host in ("h1", "h2")))
    for code, _out, err in ended:
        assert code == 0, err
    assert sorted(line.split()[-1] for _, out, _ in ended for line in out.splitlines() if "total 1.0" in line) == [
        "h1",
        "h2",
    ]
    assert list((place / "shm").iterdir()) == []


@pytest.fixture
def host(place: Path, supervisor: str) -> Iterator[str]:
    """A host daemon started long before, in another shell."""
    process = start(
        place,
        *("host", "--supervisor", supervisor, "--host-id", "node-7", "--state-dir", str(place / "node-7")),
        OF_HOST="host",
        NCCL_DEBUG="VERSION",
    )
    try:
        with ApiClient(supervisor, TOKEN) as client:
            deadline = time.monotonic() + 300
            while not client.items("/v1/hosts"):
                assert time.monotonic() < deadline
                time.sleep(0.1)
        yield "node-7"
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=300)


SHOWS_ENVIRONMENT = """
import hashlib, os, pathlib, sys
names = ["OF_HOST", "NCCL_DEBUG", "PYTHONPATH", "OTHER", "MINE", "HF_TOKEN", "WANDB_API_KEY", "HTTPS_PROXY"]
seen = {n: os.environ[n] for n in names if n in os.environ}
for name in ("HF_TOKEN", "HTTPS_PROXY"):
    seen[name] = hashlib.sha256(seen[name].encode()).hexdigest()
count = os.environ["TORCHELASTIC_RESTART_COUNT"]
pathlib.Path("seen" + count).write_text(repr(seen))
sys.exit(3 if count == "0" else 0)
"""
HF_SECRET, PROXY_SECRET, KEPT_SECRET = "hf_5sQmVxTq91", "pw9Zk2LmRt", "wandb7fGh3Kd"


def test_the_users_variables_reach_workers_of_a_running_host_and_secrets_nothing_else(
    place: Path, supervisor: str, host: str
) -> None:
    (place / "train.py").write_text(SHOWS_ENVIRONMENT)
    line = ["run", "--supervisor", supervisor, "--host-id", host, "--job", "env", "--max-restarts", "1"]
    proxy = f"http://me:{PROXY_SECRET}@proxy:3128"
    run = start(
        place,
        *(*line, "--env", "HF_TOKEN", "--env", "MINE=a=b", "train.py"),
        **{"NCCL_DEBUG": "INFO", "PYTHONPATH": "/my/code", "OTHER": "stays", "HF_TOKEN": HF_SECRET},
        **{"WANDB_API_KEY": KEPT_SECRET, "HTTPS_PROXY": proxy},
    )
    ((code, out, err),) = finish(run)
    assert code == 0, err
    assert "secret variables, encrypted for the hosts: HF_TOKEN, HTTPS_PROXY" in err
    expected = {
        "OF_HOST": "host",
        "NCCL_DEBUG": "INFO",
        "PYTHONPATH": "/my/code",
        "MINE": "a=b",
        "HF_TOKEN": hashlib.sha256(HF_SECRET.encode()).hexdigest(),
        "HTTPS_PROXY": hashlib.sha256(proxy.encode()).hexdigest(),
    }
    assert ast.literal_eval((place / "seen0").read_text()) == expected
    assert ast.literal_eval((place / "seen1").read_text()) == expected, "after a restart, too"
    answers = [out, err]
    with ApiClient(supervisor, TOKEN) as client:
        job = client.get("/v1/jobs/env")
        assert set(job["spec"]["sealed_env"]) == {"HF_TOKEN", "HTTPS_PROXY"}
        answers.append(json.dumps(job))
        for route in ("jobs", "hosts", "decisions", "actions", "incidents", "events", "signals"):
            try:
                answers.append(json.dumps(client.get(f"/v1/{route}")))
            except NotFound:
                continue
        for decision in client.items("/v1/decisions"):
            answers.append(json.dumps(client.get(f"/v1/decisions/{decision['decision_id']}")))
    assert len(answers) > 6
    files = [path for path in place.rglob("*") if path.is_file()]
    assert {"daemon.sqlite", "supervisor.log", "spawner.log", "engine.log"} <= {path.name for path in files}
    assert any(b'"MINE":"a=b"' in path.read_bytes() for path in files), "the search does find plain values"
    for secret in (HF_SECRET, PROXY_SECRET, KEPT_SECRET):
        assert [str(path) for path in files if secret.encode() in path.read_bytes()] == []
        assert not any(secret in answer for answer in answers)


def test_two_hosts_meet_at_a_rendezvous_address_with_the_secret_that_one_line_says_to_type(place: Path) -> None:
    (place / "train.py").write_text(SCRIPT)
    address = f"127.0.0.1:{free_port()}"
    line = ["run", "--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", address, "--rdzv-id", "pair"]
    ((code, out, err),) = finish(start(place, *line, "train.py", FLYBALL_TOKEN=""))
    assert (code, out) == (3, "")
    (advice,) = [line for line in err.splitlines() if "export FLYBALL_TOKEN=" in line]
    secret = re.search(r"export FLYBALL_TOKEN=([0-9a-f]{32}) ", advice)
    assert secret
    assert "--trusted-network" in advice
    ended = finish(
        *(start(place, *line, "--host-id", host, "train.py", FLYBALL_TOKEN=secret[1]) for host in ("h1", "h2"))
    )
    for code, _out, err in ended:
        assert code == 0, err
    assert sum(out.count("total 1.0") for _, out, _ in ended) == 2
    assert not any("running already" in err for _, _, err in ended)
    assert [folder.name for folder in (place / "s" / "jobs").iterdir()] == ["pair"], "the second node has none"
    assert list((place / "shm").iterdir()) == []


FAILS_ONCE = """
import os, torch, flyball
job = flyball.attach()
state = {"x": torch.zeros(1000)}
begin = job.restore(state)
print("begins at", begin, flush=True)
for step in range(begin, 12):
    job.step(step)
    job.save(step, state)
    if step == 9 and not os.path.exists("mended"):
        raise ValueError("boom")
job.close()
"""


def test_a_failed_job_of_two_hosts_resumes_from_memory(place: Path) -> None:
    (place / "train.py").write_text(FAILS_ONCE)
    line = [
        "run",
        "--nnodes=2",
        "--max-restarts=0",
        "--no-local-ckpt",
        "--master-addr=127.0.0.1",
        f"--master-port={free_port()}",
    ]
    nodes = [[*line, "--job", "pair", f"--node-rank={n}", "--host-id", f"h{n}", "train.py"] for n in (0, 1)]
    ended = finish(*(start(place, *node) for node in nodes))
    assert [code for code, _, _ in ended] == [1, 1], ended
    assert all("from which the same command can resume" in err for _, _, err in ended), ended
    (place / "mended").touch()
    ended = finish(*(start(place, *node) for node in nodes))
    begun = {int(text.split()[-1]) for _, out, _ in ended for text in out.splitlines() if "begins at" in text}
    assert [code for code, _, _ in ended] == [0, 0], ended
    assert len(begun) == 1 and begun <= {8, 9, 10}, ended
    assert list((place / "shm").iterdir()) == []


TRAINS_ON = """
import os, time, torch, flyball
job = flyball.attach()
state = {"x": torch.zeros(1000)}
begin = job.restore(state)
print("begins at", begin, flush=True)
for step in range(begin, 100_000):
    job.step(step)
    job.save(step, state)
    time.sleep(0.01)
    if step == 20:
        open("twenty" + os.environ["RANK"], "w").close()
    if os.path.exists("enough"):
        break
job.close()
"""


@pytest.mark.parametrize("over", ["rendezvous", "supervisor"])
def test_a_stopped_job_of_two_hosts_resumes_from_their_disks(
    place: Path, over: str, request: pytest.FixtureRequest
) -> None:
    (place / "train.py").write_text(TRAINS_ON)
    meets = ["--master-addr=127.0.0.1", f"--master-port={free_port()}"]
    where = meets if over == "rendezvous" else ["--supervisor", str(request.getfixturevalue("supervisor"))]
    line = ["run", "--nnodes=2", *where, "--job", "pair"]
    ranks = [[f"--node-rank={n}"] if over == "rendezvous" else [] for n in (0, 1)]
    nodes = [[*line, *ranks[n], "--host-id", f"h{n}", "train.py"] for n in (0, 1)]
    hosts = [place / "s" / "hosts" / f"h{n}" for n in (0, 1)]
    running = [start(place, *node) for node in nodes]
    try:
        deadline = time.monotonic() + 300
        while not all((place / f"twenty{rank}").exists() for rank in (0, 1)):
            assert time.monotonic() < deadline and all(process.poll() is None for process in running)
            time.sleep(0.05)
        running[1].send_signal(signal.SIGINT)
    finally:
        ended = finish(*running)
    assert [code for code, _, _ in ended] == [1, 130], ended
    assert list((place / "shm").iterdir()) == [], "memory is freed once the step is on the disks"
    newest = set()
    for (_, _, err), folder, node in zip(ended, hosts, nodes, strict=True):
        assert f"checkpoints go to {folder / 'checkpoints'}" in err
        output = re.search(r"step (\d+) of job pair is in (\S+); resume, on each host, with: (.*)", err)
        assert output, err
        assert output[2] == str(folder / "checkpoints") and output[3] == shlex.join(["flyball", *node])
        newest.add(int(output[1]))
    (step,) = newest
    assert step >= 18
    (place / "enough").touch()
    ended = finish(*(start(place, *node) for node in nodes))
    assert [code for code, _, _ in ended] == [0, 0], ended
    begun = {int(text.split()[-1]) for _, out, _ in ended for text in out.splitlines() if "begins at" in text}
    assert begun == {step + 1}, ended
    assert not any(list((folder / "checkpoints").rglob("*.manifest")) for folder in hosts), "removed after a success"
    assert list((place / "shm").iterdir()) == []


def test_torchruns_static_rendezvous_in_a_trusted_network(place: Path) -> None:
    """Without names and without a secret: two nodes on one machine, as new users try it."""
    (place / "train.py").write_text(SCRIPT)
    line = ["run", "--nnodes=2", "--nproc_per_node=1", "--master_addr=localhost", f"--master_port={free_port()}"]
    nodes = [
        start(place, *line, f"--node_rank={rank}", "--trusted-network", "train.py", FLYBALL_TOKEN="") for rank in (1, 0)
    ]
    ended = finish(*nodes)
    for code, _out, err in ended:
        assert code == 0, err
    hosts = sorted(line.split()[-1] for _, out, _ in ended for line in out.splitlines() if "total 1.0" in line)
    assert hosts == [hosts[0], f"{hosts[0]}-2"], ended
    assert "supervisor of job train-" in ended[1][2], "where the node rank is 0"
    assert "waiting for the supervisor" in ended[0][2]
    assert list((place / "shm").iterdir()) == []


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_a_node_that_waits_for_node_0(place: Path, number: signal.Signals, code: int) -> None:
    (place / "train.py").write_text(SCRIPT)
    line = ["run", "--nnodes=2", "--master-addr=127.0.0.1", f"--master-port={free_port()}", "--node-rank=1", "train.py"]
    node = start(place, *line)
    assert node.stderr
    while "waiting for the supervisor" not in (output := node.stderr.readline()):
        assert output, "it ended"
    node.send_signal(number)
    ((ended, out, err),) = finish(node)
    assert (ended, out, err) == (code, "", "")
