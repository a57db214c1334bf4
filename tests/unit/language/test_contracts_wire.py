from __future__ import annotations

import pytest

from ckpt_engine.contracts.notices import Notice
from flyball.contracts import wire
from flyball.contracts.decisions import GenerationPlan
from flyball.contracts.errors import InvalidMessage, UsageError
from flyball.contracts.identity import Fence, RunId, check_name, run_id


@pytest.mark.parametrize("kind", [Fence, Notice, dict[str, Fence]])
@pytest.mark.parametrize("data", [b"", b"[]", b'{"type": "unheard of"}', b"\xff"])
def test_malformed_data_is_an_invalid_message_for_any_type(kind: type[object], data: bytes) -> None:
    with pytest.raises(InvalidMessage, match="Not a valid "):
        wire.decode(data, kind)


@pytest.mark.parametrize("name", ["", "A", "a b", "-a", "a-", "a/b", "a\n", "a" * 64])
def test_names_that_cannot_be_part_of_a_path_are_refused(name: str) -> None:
    with pytest.raises(UsageError, match="is not a usable name"):
        check_name("The job", name)


def test_runs_are_named_and_sorted_by_their_submission_time() -> None:
    assert run_id(1_763_635_380.1239) == "20251120-104300-123"
    moments = [0.0, 0.9994, 1.0, 59.9999, 1_763_635_380.0, 1_763_635_380.001, 4e9]
    names = [run_id(moment) for moment in moments]
    assert names == sorted(set(names))
    assert [wire.decode(wire.encode(name), RunId) for name in names] == names


@pytest.mark.parametrize(
    "name", ["..", "/etc", "20251120-104300-123/..", "g1", "20251120-104300", "2025112a-104300-123"]
)
def test_invalid_run_names_are_refused(name: str) -> None:
    with pytest.raises(InvalidMessage):
        wire.decode(wire.encode(name), RunId)


def test_a_plan_stored_before_runs_existed_is_read() -> None:
    older = b'{"job":"j","generation":1,"parent":null,"hosts":[],"peers":{},"parent_lineage":[],"restart_count":0}'
    assert wire.decode(older, GenerationPlan).run == ""
