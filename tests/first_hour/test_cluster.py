"""A supervisor, a host and a launching command, each in its own terminal; and hosts that meet at an address."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator

import httpx
import pytest
from support.commands.users_machine import Command, User
from support.jobs.users_scripts import TRAIN, Steps
from support.servers.own_servers import free_port

TOKEN = "a-token-for-this-test-only"
SECRET = "hunter2-of-the-user"
SAYS_DATA_DIR = "import os\nprint('DATA_DIR is', os.environ.get('DATA_DIR'), flush=True)\n"


@pytest.fixture
def supervisor(user: User) -> Iterator[str]:
    command = user.start("flyball up --port 0")
    yield command.until_printed(r"http://127\.0\.0\.1:\d+")[0]
    command.interrupt()
    command.wait()


def start_host(user: User, name: str) -> Command:
    host = user.start(f"flyball host --host-id {name}")
    host.until(lambda: name in user.run("flyball status -o json", code=None), f"the arrival of {name}")
    return host


def test_a_supervisor_a_host_and_a_job_with_the_users_environment(user: User, supervisor: str) -> None:
    host = start_host(user, "node-1")
    user.script("train.py", SAYS_DATA_DIR + TRAIN)
    steps = Steps(user.work / "steps.txt")
    token_file = next(user.home.glob(".local/state/flyball/**/token"))
    user.more.update(FLYBALL_SUPERVISOR=supervisor, FLYBALL_TOKEN_FILE=str(token_file))
    user.more.update(DATA_DIR="/data/of/the/user", WANDB_API_KEY=SECRET)
    job = user.start(
        "flyball run --use-supervisor --job tiny --nproc-per-node 2 --env DATA_DIR --env WANDB_API_KEY"
        " train.py --steps 100000"
    )
    job.until(lambda: steps.newest() >= 10, "10 steps")
    job.until_printed("DATA_DIR is /data/of/the/user")
    address, headers = f"{supervisor}/v1/jobs/tiny", {"Authorization": f"Bearer {token_file.read_text().strip()}"}
    shown = lambda: httpx.get(address, headers=headers, timeout=60.0)  # noqa: E731
    job.until(lambda: shown().json().get("loss"), "a loss in the API")
    assert SECRET not in shown().text

    user.run("flyball stop tiny")
    job.wait()
    host.interrupt()
    host.wait()
    files = [path for path in user.home.rglob("*") if path.is_file()]
    assert [path for path in files if SECRET.encode() in path.read_bytes()] == []


def test_a_preempted_host_is_replaced(user: User) -> None:
    """Three hosts meet for a job of two. SIGTERM, as in a preemption, makes one leave in order."""
    user.more["FLYBALL_TOKEN"] = TOKEN
    user.script("train.py", TRAIN)
    steps, port = Steps(user.work / "steps.txt"), free_port()
    line = f"flyball run --nnodes 2 --spares 1 --master-addr 127.0.0.1 --master-port {port} --rdzv-id tiny"

    def start(rank: int) -> Command:
        return user.start(f"{line} --node-rank {rank} --host-id node-{rank} train.py --steps 300")

    hosts = [start(0), start(1)]
    hosts[0].until(lambda: steps.newest() >= 20, "20 steps")
    hosts.append(start(2))
    status = f"flyball status --supervisor http://127.0.0.1:{port} -o json"
    hosts[0].until(lambda: '"node-2"' in user.run(status, code=None), "the spare's arrival")

    hosts[1].process.send_signal(signal.SIGTERM)
    assert hosts[1].wait() == 128 + signal.SIGTERM, hosts[1].text()
    for host in (hosts[0], hosts[2]):
        assert host.wait() == 0, host.text()
    assert steps.newest() == 299
    assert steps.missing() == set()
    [before, after] = steps.starts()
    assert before == 0
    assert after > 20, "it resumed from the step that all had saved"


def test_the_shell_completes_commands_and_flags(user: User) -> None:
    script = user.work / "completion.bash"
    user.run(f"flyball --show-completion bash > {script}")
    ask = f"source {script}; COMP_WORDS=(flyball stat); COMP_CWORD=1; complete -p flyball"
    printed = subprocess.run(
        ["bash", "-c", ask], env=user.environment(), capture_output=True, text=True, timeout=60, check=True
    ).stdout
    function = printed.split("-F ")[1].split()[0]
    done = subprocess.run(
        ["bash", "-c", f"{ask} >/dev/null; {function} flyball stat flyball; printf '%s\\n' \"${{COMPREPLY[@]}}\""],
        env=user.environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert "status" in done.stdout.split()
