"""`flyball run` on a machine that has a `flyball host`: output, logs, and a command that is killed."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.commands.flyball import FLYBALL, FlyballProcess
from support.commands.here import run_here
from support.commands.run_folders import environment_of, run_folder
from support.commands.terminal import UserTerminal

from flyball.cli.reach.client import ApiClient

TIMEOUT_S = 300.0
TOKEN = "a-token-for-this-test-only"

SCRIPT = """
import os, sys, time
def await_file(name):
    deadline = time.monotonic() + 300
    while not os.path.exists(name):
        assert time.monotonic() < deadline, name
        time.sleep(0.01)
print("terminal", os.isatty(1), os.get_terminal_size().columns if os.isatty(1) else 0, os.environ.get("TERM"))
print("on stderr", file=sys.stderr)
await_file("go-1")
print("command is gone", flush=True)
await_file("go-2")
print("end")
"""


def environment(place: Path) -> dict[str, str]:
    return environment_of(place, FLYBALL_TOKEN=TOKEN, TERM="dumb")


def start(place: Path, *words: str) -> FlyballProcess:
    return FlyballProcess(place, *words, FLYBALL_TOKEN=TOKEN, TERM="dumb")


def logs(place: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return run_here("logs", *words, environment=environment(place))


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    with run_folder() as folder:
        yield folder


@pytest.fixture(scope="module")
def url(place: Path) -> Iterator[str]:
    """A supervisor and host h1's daemon, whose state folder can be found only through the daemon."""
    with start(place, "up", "--port", "0", "--state-dir", str(place / "sup"), "-o", "json") as up:
        url = str(up.facts()["url"])
        words = ("--host-id", "h1", "--supervisor", url, "--state-dir", str(place / "h"))
        with start(place, "host", *words) as host, ApiClient(url, TOKEN) as client:
            host.wait_for(lambda: client.items("/v1/hosts"), "the host's first report")
            yield url


def test_a_job_on_a_joined_host(place: Path, url: str) -> None:
    (place / "t.py").write_text(SCRIPT)
    words = ["run", "--supervisor", url, "--host-id", "h1", "--job", "t", "t.py"]
    user = UserTerminal([*FLYBALL, *words], cwd=place, environ=environment(place) | {"TERM": "xterm-256color"})
    try:
        user.until(b"terminal True 111 xterm-256color\r\n")
        user.until(b"on stderr\r\n")
        assert f"logs in {(place / 'h').resolve()}/logs/t".encode() in user.shown
        user.process.kill()
        user.process.wait(TIMEOUT_S)
    finally:
        user.close()
    (place / "go-1").touch()
    follower = start(place, "logs", "t", "-f", "--state-dir", str(place / "h"))
    follower.wait_for(lambda: follower.out.endswith("command is gone\n"), "the log's end")
    assert follower.out.count("\n") == 3
    far = logs(place, "t", "--supervisor", url)
    assert far.stdout == "terminal True 111 xterm-256color\non stderr\ncommand is gone\n", far.stderr
    tail = json.loads(logs(place, "t", "--supervisor", url, "--tail", "1", "-o", "json").stdout)
    assert [(log["host_id"], log["rank"], log["text"]) for log in tail["logs"]] == [("h1", 0, "command is gone\n")]
    far_follower = start(place, "logs", "t", "-f", "--supervisor", url)
    (place / "go-2").touch()
    for process in (follower, far_follower):
        assert process.end() == 0, process.err
        assert process.out.endswith("end\n"), process.err
    ended = logs(place, "t", "--supervisor", url, "--rank", "0")
    assert ended.stdout.endswith("command is gone\nend\n"), ended.stderr
    none = logs(place, "t", "--supervisor", url, "--generation", "77")
    assert none.returncode != 0
    assert "Next step: " in none.stderr


def test_rank_0_of_a_job_elsewhere_is_shown(place: Path, url: str) -> None:
    """The command's own host h2 joins and remains a spare without ranks."""
    (place / "t.py").write_text("import time\nprint('from afar', flush=True)\ntime.sleep(1.0)\nprint('last words')")
    words = ("--supervisor", url, "--host-id", "h2", "--state-dir", str(place / "h2"), "--job", "far", "t.py")
    run = start(place, "run", *words)
    assert run.end() == 0, run.err
    assert run.out == "from afar\nlast words\n", run.err
