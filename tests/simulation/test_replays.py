"""Traces and event logs are replayed; files that are neither get an error that names what is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from flyball.cli.main import run_cli
from flyball.contracts.events import Event, EventKind
from goodput.read.event_files import write_events
from simulator.fleet import log, scenario
from simulator.fleet.world import FleetWorld
from simulator.swarm.incident_log import from_events
from simulator.swarm.traces import read_trace, trace_of
from simulator.swarm.trials import Trial, draw
from simulator.swarm.tries import try_out
from simulator.swarm.verdicts import EXIT_CODES, SeedVerdict

CLUSTER, FLEET = 0, 4  # seeds


def written(tmp_path: Path, content: object) -> Path:
    path = tmp_path / "trace.json"
    path.write_bytes(content if isinstance(content, bytes) else msgspec.json.encode(content))
    return path


@pytest.mark.parametrize("seed", [CLUSTER, FLEET])
def test_a_trace_is_the_trial_again(seed: int, tmp_path: Path) -> None:
    trial: Trial = draw(seed)
    read = read_trace(written(tmp_path, trace_of(trial)))
    assert read is not None
    assert read.trial == trial
    if seed == CLUSTER:
        assert try_out(read.trial).digest == try_out(trial).digest


def test_a_trace_of_a_cluster_and_of_a_fleet_can_be_replayed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(written(tmp_path, trace_of(draw(CLUSTER))))
    assert run_cli(["simulate", "replay", path, "--story"]) == 0
    printed = capsys.readouterr()
    assert printed.err.startswith("flyball: seed 0, written by release ")
    assert "Decision     epoch" in printed.out
    assert run_cli(["simulate", "replay", path, "--set", "cluster.spares=1"]) == 2
    capsys.readouterr()
    path = str(written(tmp_path, trace_of(draw(FLEET))))
    assert run_cli(["simulate", "replay", path, "--set", "days=0.2", "-o", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["days"] == 0.2
    assert run_cli(["simulate", "replay", path, "--story"]) == 2
    assert "--story tells small clusters" in capsys.readouterr().err


def test_a_crash_of_a_fleet_is_told_as_the_swarm_tells_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def crash(*_: object) -> None:
        raise KeyError("host-3")

    path = str(written(tmp_path, trace_of(draw(FLEET))))
    monkeypatch.setattr(FleetWorld, "run", crash)
    assert run_cli(["simulate", "replay", path]) == EXIT_CODES[SeedVerdict.CRASH]
    assert "crash: KeyError in crash" in capsys.readouterr().out


def _wrong(change: str) -> Any:  # noqa: ANN401 - JSON
    content = json.loads(msgspec.json.encode(trace_of(draw(CLUSTER))))
    trial = content["trial"]
    match change:
        case "a kind":
            trial["faults"][0]["kind"] = "meteor"
        case "a moment":
            trial["faults"][1]["after_s"] = -3.0
        case "a pick":
            trial["faults"][0]["pick"] = 1.0
        case "a field":
            trial["scenario"].pop("nodes")
        case "a size":
            trial["scenario"]["nodes"] = 0
        case "a schema":
            content["schema"] = "flyball.goodput.v1"
        case "a swarm":
            content = {"schema": "flyball.swarm.v1", "failures": [{}, {}]}
        case "a count":
            content = {"schema": "flyball.swarm.v1", "failures": 5}
        case "fewer than no spares":
            trial["scenario"]["spares"] = -5
        case "causes that are no objects":
            content["trial"] = {"world": "fleet", "seed": 1, "scenario": {"causes": ["x"]}, "faults": []}
        case "causes that are no list":
            content["trial"] = {"world": "fleet", "seed": 1, "scenario": {"causes": 5}, "faults": []}
        case "a world":
            trial["world"] = "galaxy"
    return content


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ("a kind", "meteor"),
        ("a moment", "faults[1].after_s is -3.0"),
        ("a pick", "faults[0]"),
        ("a field", "nodes"),
        ("a size", "scenario.nodes is 0"),
        ("a schema", "flyball.goodput.v1"),
        ("a swarm", "2 failures"),
        ("a count", "0 failures"),
        ("fewer than no spares", "scenario.spares is -5"),
        ("causes that are no objects", "scenario.causes"),
        ("causes that are no list", "scenario.causes"),
        ("a world", "galaxy"),
    ],
)
def test_a_wrong_trace_is_refused_with_what_is_wrong(
    change: str, named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_cli(["simulate", "replay", str(written(tmp_path, _wrong(change)))]) != 0
    error = capsys.readouterr().err
    assert named in error and "trace.json" in error
    assert "Next step:" in error and "bug in Flyball" not in error


@pytest.mark.parametrize("content", [b"", b"\x00\x01\x02", b"hello\n", b"{}", b"[1, 2]"])
def test_any_other_file_is_refused(content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli(["simulate", "replay", str(written(tmp_path, content))]) != 0
    error = capsys.readouterr().err
    assert "Next step:" in error and "bug in Flyball" not in error
    assert run_cli(["simulate", "replay", str(tmp_path / "none.json")]) != 0
    assert "There is no trace" in capsys.readouterr().err


def test_the_incidents_of_an_event_log_become_faults(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    world = FleetWorld(scenario.load("small", ["days=1"]), 1)
    world.run()
    events = [*log.with_true_size(world.control.events, 64, world.ranks.every_steps), *world.ranks.log]
    path = tmp_path / "events.jsonl"
    write_events(path, events)
    logged = from_events(events, None, 1)
    causes = {fault.cause for fault in logged.trial.faults}
    assert {"host-silent", "worker-exception"} <= causes
    assert logged.trial.scenario["job"]["step_s"] == pytest.approx(2.0, abs=0.1)
    assert run_cli(["simulate", "replay", str(path), "--set", "cluster.spares=9", "-o", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["replayed_incidents"] == len(logged.trial.faults) <= found["logged_incidents"]
    assert abs(found["simulation"]["useful"] - found["logged_goodput"]) < 0.1


def test_a_log_without_incidents_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "events.jsonl"
    write_events(path, [Event(at=1.0, kind=EventKind.JOB_SUBMITTED, job="a", data={"world_size": 2})])
    assert run_cli(["simulate", "replay", str(path)]) == 2
    assert "no incident to replay" in capsys.readouterr().err
