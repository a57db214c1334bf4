"""The names of several nodes of one machine stay the same from one run to the next."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest

from flyball.cli.reach import this_host
from flyball.cli.run.rendezvous import claim_host_id
from flyball.launch.launcher import RunRequest
from host_daemon.store.state_dir import HostStateDir


@pytest.fixture
def name(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(this_host, "host_id", lambda: "vm")
    return "vm"


def test_a_node_keeps_the_name_of_its_state_folder(tmp_path: Path, name: str) -> None:
    environ = {"FLYBALL_STATE_DIR": str(tmp_path / "s")}

    def claimed(stack: ExitStack, state_dir: str = "", host_id: str = "") -> str:
        request = RunRequest(argv=("train.py",), state_dir=state_dir, host_id=host_id)
        return claim_host_id(request, environ, stack)

    second = HostStateDir(tmp_path / "second")
    second.open(f"{name}-2")
    second.close()
    with ExitStack() as stack:
        assert claimed(stack, str(tmp_path / "second")) == "vm-2", "though it starts first this time"
        assert [claimed(stack) for _ in range(2)] == ["vm", "vm-3"]
        assert claimed(stack, host_id="mine") == "mine"
    other = HostStateDir(tmp_path / "other")
    other.open("another-machine")
    other.close()
    with ExitStack() as stack:
        assert claimed(stack, str(tmp_path / "other")) == "vm", "the daemon refuses it, and says what to do"
