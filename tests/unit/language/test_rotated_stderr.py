"""A log that a process writes as its stderr has a bound, whoever makes it say much; and what its lines look like."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

import pytest
import structlog

from flyball.process_start import OLD_LOGS_KEPT, RotatedStderr, log_to_stderr

LINE = "x" * 99 + "\n"


@pytest.fixture
def stderr(tmp_path: Path) -> Iterator[TextIO]:
    with (tmp_path / "engine.log").open("a") as file:
        yield file


@pytest.fixture
def log(stderr: TextIO) -> Path:
    return Path(stderr.name)


def test_a_flood_fills_a_bounded_number_of_files(log: Path, stderr: TextIO) -> None:
    rotated = RotatedStderr(log, stderr, most_bytes=1000, standard=(stderr.fileno(),))
    for number in range(200):
        rotated.write(f"{number:4} {LINE}")
    files = sorted(log.parent.iterdir())
    assert [path.name for path in files] == [
        "engine.log",
        *(f"engine.log.{age}" for age in range(1, OLD_LOGS_KEPT + 1)),
    ]
    assert all(path.stat().st_size < 1200 for path in files)
    assert log.stat().st_mode & 0o077 == 0
    kept = [int(line.split()[0]) for path in (*reversed(files[1:]), log) for line in path.read_text().splitlines()]
    assert kept == list(range(kept[0], 200)), "nothing in between is lost"


def test_what_is_not_the_log_is_left_alone(log: Path, stderr: TextIO) -> None:
    elsewhere = log.with_name("other.log")
    elsewhere.write_text("mine")
    rotated = RotatedStderr(elsewhere, stderr, most_bytes=10, standard=(stderr.fileno(),))
    for _ in range(5):
        rotated.write(LINE)
    assert log.read_text() == 5 * LINE
    assert elsewhere.read_text() == "mine"


def test_a_folder_that_is_gone_loses_no_line(log: Path, stderr: TextIO) -> None:
    rotated = RotatedStderr(log, stderr, most_bytes=10, standard=(stderr.fileno(),))
    log.unlink()
    for _ in range(3):
        rotated.write(LINE)
    assert os.fstat(stderr.fileno()).st_size == 3 * len(LINE)


@pytest.mark.parametrize("for_people", [False, True])
def test_a_log_is_json_for_programs_and_text_for_people(for_people: bool) -> None:
    written = io.StringIO()
    log_to_stderr(written, for_people=for_people)
    log = structlog.get_logger().bind(host_id="node-7")
    log.info("spawner_ready", pid=4711)
    log.warning("peer_refused", reason="a\x1b[2Jb", warm_nproc=2)
    ready, refused = written.getvalue().splitlines()
    if for_people:
        assert ready[8:] == " host node-7: spawner ready (pid 4711)" and ready[2] == ready[5] == ":"
        assert refused[8:] == " host node-7: WARNING: peer refused (reason a?[2Jb, warm nproc 2)"
    else:
        assert json.loads(ready)["event"] == "spawner_ready" and json.loads(refused)["reason"] == "a\x1b[2Jb"
