"""Several `flyball run` on one machine as the hosts of a cluster: with a supervisor, and with a rendezvous address."""

from __future__ import annotations

import ast
import hashlib
import json
import re
import shlex
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from support.commands.flyball import FlyballProcess, ended
from support.commands.run_folders import run_folder
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


def start(place: Path, *words: str, **environ: str) -> FlyballProcess:
    return FlyballProcess(place, *words, **{"FLYBALL_TOKEN": TOKEN} | environ)


def finish(*processes: FlyballProcess) -> list[tuple[int, str, str]]:
    with ExitStack() as ends:
        for process in processes:
            ends.enter_context(process)
        return ended(processes)


@pytest.fixture
def place() -> Iterator[Path]:
    with run_folder() as folder:
        yield folder


@pytest.fixture
def supervisor(place: Path) -> Iterator[str]:
    with start(place, "up", "--port", "0", "--state-dir", str(place / "sup"), "-o", "json") as up:
        yield up.facts()["url"]
        assert up.send(signal.SIGTERM) == 0, up.text


def test_two_hosts_join_a_supervisor_and_submit_one_job(place: Path, supervisor: str) -> None:
    (place / "train.py").write_text(SCRIPT)
    line = ["run", "--supervisor", supervisor, "--nnodes", "2", "--nproc-per-node", "1", "--job", "pair"]
    ends = finish(*(start(place, *line, "--host-id", host, "train.py") for host in ("h1", "h2")))
    for code, _out, err in ends:
        assert code == 0, err
    assert sorted(line.split()[-1] for _, out, _ in ends for line in out.splitlines() if "total 1.0" in line) == [
        "h1",
        "h2",
    ]
    assert list((place / "shm").iterdir()) == []


@pytest.fixture
def host(place: Path, supervisor: str) -> Iterator[str]:
    """A host daemon started long before, in another shell."""
    with start(
        place,
        *("host", "--supervisor", supervisor, "--host-id", "node-7", "--state-dir", str(place / "node-7")),
        OF_HOST="host",
        NCCL_DEBUG="VERSION",
    ) as daemon:
        with ApiClient(supervisor, TOKEN) as client:
            daemon.wait_for(lambda: client.items("/v1/hosts"), "the host's first report")
        yield "node-7"


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
    ends = finish(
        *(start(place, *line, "--host-id", host, "train.py", FLYBALL_TOKEN=secret[1]) for host in ("h1", "h2"))
    )
    for code, _out, err in ends:
        assert code == 0, err
    assert sum(out.count("total 1.0") for _, out, _ in ends) == 2
    assert not any("running already" in err for _, _, err in ends)
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
    ends = finish(*(start(place, *node) for node in nodes))
    assert [code for code, _, _ in ends] == [1, 1], ends
    assert all("keeps step" in err and "of job pair in memory; free them with: " in err for _, _, err in ends), ends
    (place / "mended").touch()
    ends = finish(*(start(place, *node) for node in nodes))
    begun = {int(text.split()[-1]) for _, out, _ in ends for text in out.splitlines() if "begins at" in text}
    assert [code for code, _, _ in ends] == [0, 0], ends
    assert len(begun) == 1 and begun <= {8, 9, 10}, ends
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
    of_job = ".pair" if over == "rendezvous" else ""
    hosts = [place / "s" / "hosts" / f"h{n}{of_job}" for n in (0, 1)]
    running = [start(place, *node) for node in nodes]
    try:
        running[0].wait_for(lambda: all((place / f"twenty{rank}").exists() for rank in (0, 1)), "step 20")
        running[1].send(signal.SIGINT)
    finally:
        ends = finish(*running)
    assert [code for code, _, _ in ends] == [1, 130], ends
    assert list((place / "shm").iterdir()) == [], "memory is freed once the step is on the disks"
    newest = set()
    for (_, _, err), folder, node in zip(ends, hosts, nodes, strict=True):
        assert f"checkpoints go to {folder / 'checkpoints'}" in err
        output = re.search(r"step (\d+) of job pair is in (\S+); resume, on each host, with: (.*)", err)
        assert output, err
        assert output[2] == str(folder / "checkpoints") and output[3] == shlex.join(["flyball", *node])
        newest.add(int(output[1]))
    (step,) = newest
    assert step >= 18
    (place / "enough").touch()
    ends = finish(*(start(place, *node) for node in nodes))
    assert [code for code, _, _ in ends] == [0, 0], ends
    begun = {int(text.split()[-1]) for _, out, _ in ends for text in out.splitlines() if "begins at" in text}
    assert begun == {step + 1}, ends
    assert not any(list((folder / "checkpoints").rglob("*.manifest")) for folder in hosts), "removed after a success"
    assert list((place / "shm").iterdir()) == []


def test_torchruns_static_rendezvous_in_a_trusted_network(place: Path) -> None:
    """Without names and without a secret: two nodes on one machine, as new users try it."""
    (place / "train.py").write_text(SCRIPT)
    line = ["run", "--nnodes=2", "--nproc_per_node=1", "--master_addr=localhost", f"--master_port={free_port()}"]
    nodes = [
        start(place, *line, f"--node_rank={rank}", "--trusted-network", "train.py", FLYBALL_TOKEN="") for rank in (1, 0)
    ]
    ends = finish(*nodes)
    for code, _out, err in ends:
        assert code == 0, err
    hosts = sorted(line.split()[-1] for _, out, _ in ends for line in out.splitlines() if "total 1.0" in line)
    assert hosts == [hosts[0], f"{hosts[0]}-2"], ends
    assert "supervisor of job train-" in ends[1][2], "where the node rank is 0"
    assert "waiting for the supervisor" in ends[0][2]
    assert list((place / "shm").iterdir()) == []


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_a_node_that_waits_for_node_0(place: Path, number: signal.Signals, code: int) -> None:
    (place / "train.py").write_text(SCRIPT)
    line = ["run", "--nnodes=2", "--master-addr=127.0.0.1", f"--master-port={free_port()}", "--node-rank=1", "train.py"]
    node = start(place, *line)
    node.wait_for(lambda: "waiting for the supervisor" in node.err, "it waits")
    shown = node.err
    assert (node.send(number), node.out, node.err) == (code, "", shown)
