"""`flyball demo`: the whole demo, and Ctrl-C in the middle of it."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.commands.flyball import FlyballProcess
from support.commands.run_folders import run_folder

TIMEOUT_S = 900.0


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder with a path short enough for sockets; afterwards no process and no shared memory of it may be left."""
    with run_folder() as folder:
        yield folder
        assert list((folder / "shm").iterdir()) == []


def start(place: Path) -> FlyballProcess:
    return FlyballProcess(place, "demo", "--json", "--state-dir", str(place))


def test_four_faults_are_recovered_and_every_loss_is_the_uninterrupted_runs(place: Path) -> None:
    with start(place) as demo:
        assert demo.end(TIMEOUT_S) == 0, demo.err
    result = json.loads(demo.out)
    faults = {f["fault"]: f for f in result["faults"]}
    assert list(faults) == ["kill", "hang", "host-down", "preempt"]
    for fault in faults.values():
        assert 0.0 <= fault["detected_s"] <= fault["decided_s"] <= fault["resumed_s"]
        # The last step is lost, and the one before it too if it was not completely captured or not yet at the peer.
        assert 0 <= fault["lost_steps"] <= 2, "with two slots, a save waits until the step before the last one is safe"
    assert [f["decision"] for f in result["faults"]] == [
        "restart_in_place",
        "restart_in_place",
        "migrate_to_spare",
        "emergency_checkpoint + migrate_to_spare",
    ]
    assert faults["kill"]["restored_from"] == faults["hang"]["restored_from"] == "memory"
    assert faults["preempt"]["lost_steps"] == 0
    moved = [r for r in faults["host-down"]["restored"] if r["tier"] == "peer"]
    assert [r["rank"] for r in moved] == [2, 3]
    assert all(r["socket_bytes"] >= r["size_bytes"] > 0 for r in moved), "the bytes came over the network"
    assert result["loss_matches_uninterrupted"] is True
    # Ranks may be stopped in the newest step. None is further behind, because the others need its gradients.
    complete = result["losses_compared"] - result["losses_of_repeated_steps"]
    assert 4 * (result["steps"] - 1) < complete <= 4 * result["steps"]
    # All ranks repeated the lost steps. Ranks of a lost host may not have recorded the last one.
    assert result["losses_of_repeated_steps"] >= 4 * sum(f["lost_steps"] for f in result["faults"]) - 2
    assert 0.0 < result["goodput"] < 1.0
    assert list(place.glob("flyball-demo-*")) == [], "a successful demo removes its files"


def test_ctrl_c_in_the_middle_leaves_nothing_behind(place: Path) -> None:
    with start(place) as demo:
        demo.wait_for(lambda: " generation 1," in demo.err, "the first generation")
        demo.process.send_signal(signal.SIGINT)
        assert demo.end(TIMEOUT_S) == 130, demo.err
    assert demo.out == ""
    assert "Traceback" not in demo.err
    assert len(list(place.glob("flyball-demo-*"))) == 1, "logs are kept"
