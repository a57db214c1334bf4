"""A job whose supervisor runs in a node's command is seen, followed and stopped from another terminal: on that node
without its secret, and on another machine that shares its home."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from support.commands.flyball import FLYBALL, FlyballProcess, run_flyball
from support.commands.run_folders import environment_of
from support.servers.own_servers import free_port

TRAIN = """
import time, flyball
job = flyball.attach()
begin = job.restore({"x": [0]})
print("begins", flush=True)
for step in range(begin, 100_000):
    job.step(step)
    time.sleep(0.02)
"""
SECRET = "0123456789abcdef0123456789abcdef"


@pytest.fixture
def place(place: Path) -> Path:
    (place / "train.py").write_text(TRAIN)
    return place


def address() -> str:
    """Of this machine, for others."""
    found = [one for many in psutil.net_if_addrs().values() for one in many if one.family is socket.AF_INET]
    named = [one.address for one in found if not one.address.startswith("127.")]
    return named[0] if named else pytest.skip("this machine has no address for others")


def on_another_machine(place: Path, *words: str) -> str:
    """What a command prints on a machine of another name, which has the same files."""
    named = ["unshare", "--uts", "sh", "-c", 'hostname login-node && exec "$@"', "sh"]
    command, environ = [*named, *FLYBALL, *words], environment_of(place)
    done = subprocess.run(command, capture_output=True, text=True, cwd=place, env=environ, timeout=120, check=False)
    return done.stdout + done.stderr


@pytest.mark.skipif(not shutil.which("unshare") or sys.platform != "linux", reason="needs namespaces")
def test_a_job_of_two_nodes_is_seen_and_stopped_from_other_terminals(place: Path) -> None:
    if subprocess.run(["unshare", "--uts", "true"], capture_output=True, check=False).returncode:
        pytest.skip("namespaces cannot be made here")
    where = ("--rdzv-backend", "c10d", "--rdzv-endpoint", f"{address()}:{free_port()}", "--rdzv-id", "far")
    line = ("run", "--nnodes", "2", "--nproc-per-node", "1", *where, "train.py")
    nodes = [FlyballProcess(place, *line, FLYBALL_TOKEN=SECRET) for _ in range(2)]
    try:
        nodes[0].wait_for(lambda: "begins" in nodes[0].out + nodes[1].out, "training")
        shown = run_flyball(place, "status", "--job", "far")
        assert " training " in shown.stdout, shown.stderr
        assert "begins" in run_flyball(place, "logs", "far", "--rank", "1").stdout
        elsewhere = on_another_machine(place, "status", "--job", "far")
        assert " training " in elsewhere and "2 healthy" in elsewhere, elsewhere
        assert "interrupted" not in on_another_machine(place, "ls")
        (file,) = (place / "s" / "jobs").glob("*/supervisor/token.given")
        assert file.stat().st_mode & 0o077 == 0
        stopped = on_another_machine(place, "stop", "far")
        assert "stopped" in stopped, stopped
        for node in nodes:
            node.end()
        assert not file.exists()
    finally:
        for node in nodes:
            node.close()
