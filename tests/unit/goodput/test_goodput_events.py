from __future__ import annotations

from pathlib import Path

import pytest

from flyball.contracts.errors import ConfigurationError, InvalidMessage, NotFound
from flyball.contracts.events import Event, EventKind
from flyball.contracts.wire import MAX_MESSAGE_BYTES
from goodput.read.event_files import MAX_NAMED_LINES, read_logs, write_events

EVENTS = (
    Event(at=1.5, kind=EventKind.JOB_SUBMITTED, job="j"),
    Event(at=2.5, kind=EventKind.STEPS, job="j", generation=1, rank=0, data={"first_step": 0, "completed_at": [2.5]}),
)
GOOD = b'{"at":3.0,"kind":"job_ended","job":"j","data":{"outcome":"succeeded"}}'


def test_written_events_are_read(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    assert write_events(path, EVENTS[:1]) == 1
    assert write_events(path, EVENTS[1:]) == 1

    log = read_logs([path])

    assert log.events == EVENTS
    assert (log.malformed, log.malformed_count) == ((), 0)


def test_malformed_lines_are_counted_and_named_and_the_rest_is_read(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    lines = [
        GOOD,
        b"not json",
        b"",
        b'{"at":1.0,"kind":"of another release"}',
        b'{"at":"soon","kind":"steps"}',
        b'{"at":1e999,"kind":"steps"}',
        b'{"at":1.0}',
        b"\xff\xfe",
        b'"' + b"x" * (MAX_MESSAGE_BYTES * 2) + b'"',
        GOOD + b"\r",
        GOOD[:20],  # the log was cut off
    ]
    path.write_bytes(b"\n".join(lines))

    log = read_logs([path])

    assert len(log.events) == 2
    assert log.malformed_count == 8
    assert [m.line for m in log.malformed] == [2, 4, 5, 6, 7, 8, 9, 11]
    assert str(log.malformed[0]).startswith(f"{path}:2: ")
    assert "exceeds the limit" in log.malformed[6].reason
    with pytest.raises(InvalidMessage, match=r"events.jsonl:2: .*--strict"):
        read_logs([path], strict=True)


def test_the_names_of_malformed_lines_are_bounded(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text("x\n" * (MAX_NAMED_LINES + 5))
    log = read_logs([path])
    assert (len(log.malformed), log.malformed_count) == (MAX_NAMED_LINES, MAX_NAMED_LINES + 5)


def test_several_files_are_one_log(tmp_path: Path) -> None:
    for index, event in enumerate(EVENTS):
        write_events(tmp_path / f"{index}.jsonl", [event])
    assert read_logs([tmp_path / "0.jsonl", tmp_path / "1.jsonl"]).events == EVENTS


def test_a_file_that_cannot_be_read_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="no event log"):
        read_logs([tmp_path / "absent.jsonl"])
    with pytest.raises(NotFound, match="has no event log"):
        read_logs([tmp_path])
    (tmp_path / "folder.jsonl").mkdir()
    with pytest.raises(ConfigurationError, match="Cannot open"):
        read_logs([tmp_path])
