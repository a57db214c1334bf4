"""Results of the simulator: read from files that nobody vouches for."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest
from support.jobs.goodput_runs import interrupted_run

from flyball.contracts.errors import InvalidMessage, NotFound
from goodput.account.timeline_bins import binned
from goodput.calculator import analyse
from goodput.read import simulations
from goodput.read.simulations import SCHEMA, SimulatedRun, SimulationFolder, is_result
from simulator.fleet.result import Result

ANALYSIS = analyse(interrupted_run())
LINE = ANALYSIS.timeline
RUN = SimulatedRun(
    schema=SCHEMA,
    version="0",
    scenario="small",
    seed=3,
    days=2.0,
    nodes=8,
    gpus=64,
    outcome="running",
    message="",
    interruptions=1,
    lost_gpu_hours=2.0,
    closed_form_ettr=None,
    violations=(),
    goodput=ANALYSIS.report,
    timeline=binned(LINE.intervals, LINE.start, LINE.end, 10),
)
CONTENT = msgspec.json.encode(RUN)


def test_every_field_is_one_that_the_simulator_writes() -> None:
    written = {field.name: field.type for field in msgspec.structs.fields(Result)}
    assert {field.name for field in msgspec.structs.fields(SimulatedRun)} <= written.keys()


def test_a_result_is_read_and_listed_until_it_is_removed(tmp_path: Path) -> None:
    folder = SimulationFolder(tmp_path / "results")
    assert folder.summaries() == ([], 0), "the folder is missing"
    folder.path.mkdir()
    file = folder.path / "a.b-1.json"
    file.write_bytes(CONTENT)
    (one,), left_out = folder.summaries()
    assert (one.name, one.problem, one.scenario, one.seed, one.gpus, left_out) == ("a.b-1", "", "small", 3, 64, 0)
    assert one.goodput == ANALYSIS.report.goodput and is_result(file)
    assert folder.result("a.b-1") == RUN
    assert folder.summaries()[0][0] is one, "not read again"
    file.write_bytes(CONTENT.replace(b'"seed":3', b'"seed":44'))
    assert folder.summaries()[0][0].seed == 44
    file.unlink()
    assert folder.summaries() == ([], 0)
    with pytest.raises(NotFound, match=r"no result 'a\.b-1'") as missing:
        folder.result("a.b-1")
    assert "flyball simulate run SCENARIO -o json" in missing.value.hint


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "is empty"),
        (CONTENT[:-100], "truncated"),
        (b"[]", "Expected `object`"),
        (b"\xff\xfe", "is not a result of the simulator"),
        (b"[" * 100_000, "is not a result of the simulator"),
        (CONTENT.replace(SCHEMA.encode(), b"flyball.simulation.v9"), "Invalid enum value 'flyball.simulation.v9'"),
        (CONTENT.replace(b'"seed":3', b'"seed":"x"'), "Expected `int`, got `str`"),
        (CONTENT + b" " * (1 << 20), "more than 1 MiB"),
    ],
)
def test_what_is_no_result_says_why_and_hides_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes, why: str
) -> None:
    monkeypatch.setattr(simulations, "MAX_BYTES", 1 << 20)
    folder = SimulationFolder(tmp_path)
    (tmp_path / "bad.json").write_bytes(content)
    (tmp_path / "good.json").write_bytes(CONTENT)
    bad, good = folder.summaries()[0]
    assert why in bad.problem and bad.problem.startswith("bad.json ") and not good.problem
    with pytest.raises(InvalidMessage) as refused:
        folder.result("bad")
    assert refused.value.hint


def test_only_files_of_the_folder_are_read(tmp_path: Path) -> None:
    (tmp_path / "secret.json").write_bytes(CONTENT)
    folder = SimulationFolder(tmp_path / "results")
    folder.path.mkdir()
    os.mkfifo(folder.path / "pipe.json")
    (folder.path / "folder.json").mkdir()
    for name in ("notes.txt", ".hidden.json", "a b.json", "x" * 100 + ".json"):
        (folder.path / name).write_bytes(CONTENT)
    assert [(one.name, bool(one.problem)) for one in folder.summaries()[0]] == [("folder", True), ("pipe", True)]
    for name in ("../secret", "..", "", "a/b", "a\n", "x" * 100):
        with pytest.raises(NotFound):
            folder.result(name)


def test_only_the_newest_files_are_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulations, "MAX_FILES", 2)
    for number, name in enumerate("cab"):
        (tmp_path / f"{name}.json").write_bytes(CONTENT)
        os.utime(tmp_path / f"{name}.json", (1000 + number, 1000 + number))
    listed, left_out = SimulationFolder(tmp_path).summaries()
    assert ([one.name for one in listed], left_out) == (["a", "b"], 1)


def test_a_folder_that_is_asked_for_leaves_no_open_file(tmp_path: Path) -> None:
    (tmp_path / "folder.json").mkdir()
    before = list(Path("/proc/self/fd").iterdir())
    with pytest.raises(InvalidMessage, match=r"folder\.json is no file"):
        SimulationFolder(tmp_path).result("folder")
    assert len(list(Path("/proc/self/fd").iterdir())) == len(before)


def test_a_link_to_nothing_hides_no_result(tmp_path: Path) -> None:
    (tmp_path / "good.json").write_bytes(CONTENT)
    (tmp_path / "gone.json").symlink_to(tmp_path / "removed")
    assert [one.name for one in SimulationFolder(tmp_path).summaries()[0]] == ["good"]


def test_a_problem_that_ended_is_not_told_again(tmp_path: Path) -> None:
    folder, file = SimulationFolder(tmp_path), tmp_path / "one.json"
    file.write_bytes(b" " * len(CONTENT))
    written = file.stat()
    assert folder.summaries()[0][0].problem
    file.write_bytes(CONTENT)
    os.utime(file, ns=(written.st_atime_ns, written.st_mtime_ns))  # as after a chmod: the same time and size
    assert not folder.summaries()[0][0].problem
