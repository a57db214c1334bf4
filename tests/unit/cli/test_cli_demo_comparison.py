from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from flyball.cli.demo.reference import compare, newest_step, read_losses


def test_all_executions_of_a_step_are_read(tmp_path: Path) -> None:
    (tmp_path / "rank0.txt").write_text("0 0x1.8p+1 0\n1 0x1.0p+0 0\n1 0x1.0p+0 1\n")
    (tmp_path / "rank1.txt").write_text("0 nan 0\n")
    losses = read_losses(tmp_path)
    assert losses[(0, 1)] == ["0x1.0p+0", "0x1.0p+0"]
    assert losses[(1, 0)] == ["nan"]
    assert newest_step(losses) == 1
    assert newest_step({}) == -1


def test_equal_runs_match_and_repeats_are_counted() -> None:
    reference = {(r, s): [f"0x1.{s}p+0"] for r in range(2) for s in range(5)}
    losses = {key: list(value) for key, value in reference.items()}
    losses[(1, 3)] *= 2
    found = compare(losses, reference)
    assert (found.matches, found.compared, found.recomputed) == (True, 11, 1)


def test_one_differing_bit_in_a_repeat_is_found() -> None:
    reference = {(0, 0): ["0x1.0p+0"], (0, 1): ["0x1.8p+0"]}
    found = compare({(0, 0): ["0x1.0p+0"], (0, 1): ["0x1.8p+0", "0x1.8000000000001p+0"]}, reference)
    assert not found.matches
    assert "rank 0 step 1" in found.problems[0]


def test_an_empty_comparison_does_not_match() -> None:
    assert not compare({}, {}).matches


def test_a_torn_line_is_a_mismatch(tmp_path: Path) -> None:
    (tmp_path / "rank0.txt").write_text("0 0x1.0p+0 0\n1 0x1.0")
    assert not compare(read_losses(tmp_path), {(0, 0): ["0x1.0p+0"], (0, 1): ["0x1.0p+0"]}).matches


@given(st.sets(st.integers(0, 20), min_size=1), st.integers(1, 3))
def test_a_missing_step_is_found(steps: set[int], ranks: int) -> None:
    reference = {(r, s): ["0x1.0p+0"] for r in range(ranks) for s in range(21)}
    losses = {(r, s): ["0x1.0p+0"] for r in range(ranks) for s in steps}
    assert compare(losses, reference).matches == (steps == set(range(max(steps) + 1)))
