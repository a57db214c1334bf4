"""A host that ends in order is removed from the lists, and can come back: real supervisor, real daemons."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.commands.flyball import FlyballProcess
from support.commands.run_folders import run_folder

from flyball.cli.main import run_cli
from flyball.cli.reach.client import ApiClient

TOKEN = "a-token-of-the-environment"


@pytest.fixture
def place() -> Iterator[Path]:
    with run_folder() as folder:
        yield folder


def test_a_host_leaves_and_comes_back(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with FlyballProcess(place, "up", "--port", "0", "-o", "json", FLYBALL_TOKEN=TOKEN) as up:
        facts = up.facts()
        assert facts["token_file"] is None, "a token from the environment is in no file"
        assert not (place / "s" / "token").exists()
        monkeypatch.setenv("FLYBALL_SUPERVISOR", facts["url"])
        monkeypatch.setenv("FLYBALL_TOKEN", TOKEN)
        with ApiClient(facts["url"], TOKEN) as client:

            def hosts(**params: str) -> list[dict[str, Any]]:
                return client.items("/v1/hosts", **params)

            for _ in range(2):
                words = ("--host-id", "node-7", "--supervisor", facts["url"])
                with FlyballProcess(place, "host", *words, FLYBALL_TOKEN=TOKEN) as host:
                    host.wait_for(hosts, "the host's first report")
                    assert hosts()[0]["left_at"] is None
                    assert host.send(signal.SIGTERM) == 0
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
