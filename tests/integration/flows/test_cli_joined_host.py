"""`flyball run` on a machine that has a `flyball host`: output, logs, and a command that is killed."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.commands.here import run_here
from support.commands.run_folders import environment_of, run_folder
from support.commands.terminal import FLYBALL, UserTerminal

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


def start(place: Path, *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "flyball.cli.main", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=place,
        env=environment(place),
    )


def logs(place: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return run_here("logs", *words, environment=environment(place))


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    with run_folder() as folder:
        yield folder


@pytest.fixture(scope="module")
def cluster(place: Path) -> Iterator[str]:
    """A supervisor and host h1's daemon, whose state folder can be found only through the daemon."""
    up = start(place, "up", "--port", "0", "--state-dir", str(place / "sup"), "-o", "json")
    assert up.stdout
    lines: list[str] = []
    while not lines or lines[-1] != "}\n":
        lines.append(up.stdout.readline())
        assert lines[-1], up.communicate(timeout=10)[1]
    url = str(json.loads("".join(lines))["url"])
    host = start(place, "host", "--host-id", "h1", "--supervisor", url, "--state-dir", str(place / "h"))
    try:
        with ApiClient(url, TOKEN) as client:
            deadline = time.monotonic() + TIMEOUT_S
            while not client.items("/v1/hosts"):
                assert time.monotonic() < deadline and host.poll() is None
                time.sleep(0.1)
        yield url
    finally:
        for process in (host, up):
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=TIMEOUT_S)


def test_a_job_on_a_joined_host(place: Path, cluster: str) -> None:
    (place / "t.py").write_text(SCRIPT)
    words = ["run", "--supervisor", cluster, "--host-id", "h1", "--job", "t", "t.py"]
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
    assert follower.stdout
    assert [follower.stdout.readline() for _ in range(3)][-1] == "command is gone\n"
    far = logs(place, "t", "--supervisor", cluster)
    assert far.stdout == "terminal True 111 xterm-256color\non stderr\ncommand is gone\n", far.stderr
    tail = json.loads(logs(place, "t", "--supervisor", cluster, "--tail", "1", "-o", "json").stdout)
    assert [(log["host_id"], log["rank"], log["text"]) for log in tail["logs"]] == [("h1", 0, "command is gone\n")]
    far_follower = start(place, "logs", "t", "-f", "--supervisor", cluster)
    (place / "go-2").touch()
    for process in (follower, far_follower):
        out, err = process.communicate(timeout=TIMEOUT_S)
        assert out.endswith("end\n"), err
        assert process.returncode == 0, err
    ended = logs(place, "t", "--supervisor", cluster, "--rank", "0")
    assert ended.stdout.endswith("command is gone\nend\n"), ended.stderr
    none = logs(place, "t", "--supervisor", cluster, "--generation", "77")
    assert none.returncode != 0
    assert "Next step: " in none.stderr


def test_rank_0_of_a_job_elsewhere_is_shown(place: Path, cluster: str) -> None:
    """The command's own host h2 joins and remains a spare without ranks."""
    (place / "t.py").write_text("import time\nprint('from afar', flush=True)\ntime.sleep(1.0)\nprint('last words')")
    run = start(
        place,
        "run",
        "--supervisor",
        cluster,
        "--host-id",
        "h2",
        "--state-dir",
        str(place / "h2"),
        "--job",
        "far",
        "t.py",
    )
    out, err = run.communicate(timeout=TIMEOUT_S)
    assert run.returncode == 0, err
    assert out == "from afar\nlast words\n", err
