"""Nodes that meet, and what is said if nobody comes, if there is no such host, or if a limit forbids it."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import pytest
from support.commands.flyball import FLYBALL, FlyballProcess
from support.commands.run_folders import environment_of
from support.servers.own_servers import free_port

SECRET = "0123456789abcdef0123456789abcdef"


@pytest.fixture
def place(place: Path) -> Path:
    (place / "train.py").write_text("print('trained', flush=True)\n")
    return place


def node(place: Path, rank: int, *where: str) -> FlyballProcess:
    line = ("run", "--nnodes", "2", "--nproc-per-node", "1", "--node-rank", str(rank), "--job", "six", *where)
    return FlyballProcess(place, *line, "train.py", FLYBALL_TOKEN=SECRET)


def test_nodes_meet_at_an_ipv6_address_without_brackets(place: Path) -> None:
    where = ("--master-addr", "::1", "--master-port", str(free_port()))
    nodes = [node(place, rank, *where) for rank in (0, 1)]
    assert [one.end() for one in nodes] == [0, 0], nodes[0].text + nodes[1].text


def test_it_is_said_that_nobody_answers_and_that_a_name_is_unknown(place: Path) -> None:
    waits = node(place, 1, "--master-addr", "127.0.0.1", "--master-port", str(free_port()))
    unknown = node(place, 1, "--master-addr", "no-such-host.invalid")
    waits.wait_for(lambda: "nobody answers at http://127.0.0.1" in waits.err, "news")
    assert waits.send(signal.SIGINT) == 130
    assert unknown.end(30.0) == 3
    assert "no-such-host.invalid" in unknown.err and "cannot be resolved" in unknown.err


def test_too_few_open_files_are_an_error_that_says_so(place: Path) -> None:
    command = ["sh", "-c", 'ulimit -n 64 && exec "$@"', "sh", *FLYBALL, "run", "--nproc-per-node", "2", "train.py"]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=place, env=environment_of(place), timeout=60, check=False
    )
    assert done.returncode == 3, done.stderr
    assert "A process may open 64 files" in done.stderr and "ulimit -n" in done.stderr
