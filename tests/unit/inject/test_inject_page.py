"""The page of all faults has each of them with its options; Google's flags draw the same faults on every node."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from simulator.inject.kinds.catalog import KINDS
from simulator.simulator_entrypoint import draw_turn, main, parser

PAGE = (Path(__file__).parents[3] / "docs/reference/inject.md").read_text()


@pytest.mark.parametrize("name", KINDS)
def test_the_page_has_the_fault_and_its_options(name: str) -> None:
    rows = [row for row in PAGE.splitlines() if row.startswith("|") and f"`{name}`" in row.split("|")[1]]
    assert len(rows) == 1, name
    for option in KINDS[name].options:
        assert re.search(rf"`{option.name}\b", rows[0]), option
    if KINDS[name].lasts_s:
        assert f"{KINDS[name].lasts_s:g} s" in rows[0].split("|")[-2]


def test_googles_flags_have_googles_defaults() -> None:
    given = parser().parse_args([])
    assert (given.nnodes, given.gpus_per_node, given.fault_interval, given.seed) == (1, 8, 10, 42)
    assert (given.enable_gpu_failure, given.gpu_slowdown_duration_s) == (False, 30)


def test_every_node_draws_the_same_and_each_has_its_turn() -> None:
    turns = [draw_turn(42, n, nnodes=2, gpus_per_node=4, faults=("kill", "slow", "xid")) for n in range(300)]
    assert turns == [draw_turn(42, n, nnodes=2, gpus_per_node=4, faults=("kill", "slow", "xid")) for n in range(300)]
    assert {(turn.node, turn.gpu) for turn in turns} == {(node, gpu) for node in range(2) for gpu in range(4)}
    assert {turn.fault for turn in turns} == {"kill", "slow", "xid"}


def test_no_fault_or_a_bad_number_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "No fault is enabled" in capsys.readouterr().err
    assert main(["--enable_gpu_failure", "--nnodes", "0"]) == 2
