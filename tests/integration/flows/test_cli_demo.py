"""`flyball demo`: the whole demo, and Ctrl-C in the middle of it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.commands.run_folders import environment_of, run_folder


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder with a path short enough for sockets; afterwards no process and no shared memory of it may be left."""
    with run_folder() as folder:
        yield folder
        assert list((folder / "shm").iterdir()) == []


def start(place: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "flyball.cli.main", "demo", "--json", "--state-dir", str(place)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment_of(place),
    )


def test_four_faults_are_recovered_and_every_loss_is_the_uninterrupted_runs(place: Path) -> None:
    process = start(place)
    try:
        out, err = process.communicate(timeout=900)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0, err
    result = json.loads(out)
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
    process = start(place)
    late = threading.Timer(900, process.kill)
    late.start()
    try:
        assert process.stderr
        lines = []
        for line in process.stderr:
            lines.append(line)
            if " generation 1," in line:
                break
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=900)
    finally:
        late.cancel()
        process.kill()
        process.wait()
    assert process.returncode == 130, "".join(lines) + err
    assert out == ""
    assert "Traceback" not in err
    assert len(list(place.glob("flyball-demo-*"))) == 1, "logs are kept"
