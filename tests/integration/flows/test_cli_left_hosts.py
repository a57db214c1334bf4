"""A host that ends in order is removed from the lists, and can come back: real supervisor, real daemons."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.clocks.waits import until
from support.commands.run_folders import environment_of, run_folder

from flyball.cli.main import run_cli
from flyball.cli.reach.client import ApiClient

TIMEOUT_S = 240.0
TOKEN = "a-token-of-the-environment"


@pytest.fixture
def place() -> Iterator[Path]:
    with run_folder() as folder:
        yield folder


def environment(place: Path) -> dict[str, str]:
    return environment_of(place, FLYBALL_TOKEN=TOKEN)


def start(place: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "flyball.cli.main", *arguments],
        stdout=subprocess.PIPE,
        stderr=(place / "err").open("a"),
        text=True,
        cwd=place,
        env=environment(place),
    )


def test_a_host_leaves_and_comes_back(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    up = start(place, "up", "--port", "0", "-o", "json")
    host: subprocess.Popen[str] | None = None
    try:
        assert up.stdout is not None
        lines = iter(up.stdout.readline, "")
        text = ""
        for line in lines:
            text += line
            if line.startswith("}"):
                break
        facts = json.loads(text)
        assert facts["token_file"] is None, "a token from the environment is in no file"
        assert not (place / "s" / "token").exists()
        monkeypatch.setenv("FLYBALL_SUPERVISOR", facts["url"])
        monkeypatch.setenv("FLYBALL_TOKEN", TOKEN)
        with ApiClient(facts["url"], TOKEN) as client:

            def hosts(**params: str) -> list[dict[str, Any]]:
                return client.items("/v1/hosts", **params)

            for _ in range(2):
                host = start(place, "host", "--host-id", "node-7", "--supervisor", facts["url"])
                until(hosts, "the host's first report")
                assert hosts()[0]["left_at"] is None
                host.send_signal(signal.SIGTERM)
                assert host.wait(TIMEOUT_S) == 0
                assert hosts() == [], "its last report said that it leaves"
                (left,) = hosts(all="true")
                assert left["host_id"] == "node-7" and left["left_at"] >= left["joined_at"]
            time.sleep(2.5)  # over three report intervals, enough to detect a silent host
            assert client.items("/v1/incidents") == []
            assert client.get("/v1/hosts/node-7")["state"] == "healthy"
            capsys.readouterr()
            assert run_cli(["status"]) == 0
            assert "node-7" not in capsys.readouterr().out
            assert run_cli(["status", "--all"]) == 0
            assert "left" in capsys.readouterr().out
            assert run_cli(["drain", "node-7"]) == 16
            assert run_cli(["host", "rm", "node-7"]) == 0
            assert "removed host node-7" in capsys.readouterr().err
            assert hosts(all="true") == []
            assert run_cli(["host", "rm", "node-7"]) == 8
    finally:
        for process in (host, up):
            if process is not None and process.poll() is None:
                process.send_signal(signal.SIGINT)
                process.wait(TIMEOUT_S)
