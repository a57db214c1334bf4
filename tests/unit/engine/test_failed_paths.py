"""When RDMA is not tried with a peer for a while."""

from __future__ import annotations

from ckpt_engine.rules.failed_paths import FIRST_PAUSE_S, IN_A_ROW, LONGEST_PAUSE_S, FailedPaths


def fail(paths: FailedPaths, now_s: float, incarnation: str = "1", *, nothing_passes: bool = False) -> bool:
    """A connection that was made just now breaks."""
    return paths.failed("b", incarnation, "why", made_s=now_s, now_s=now_s, nothing_passes=nothing_passes)


def met(incarnation: str = "1") -> FailedPaths:
    paths = FailedPaths()
    paths.met("b", incarnation)
    return paths


def test_a_few_failures_in_a_row_begin_a_pause_and_later_ones_a_longer_one_up_to_a_limit() -> None:
    paths, now_s, pauses = met(), 0.0, []
    for _ in range(IN_A_ROW - 1):
        assert not fail(paths, now_s)
        assert paths.pause_left_s("b", now_s) == 0
        now_s += 1
    for _ in range(8):
        assert fail(paths, now_s)
        pauses.append(paths.pause_left_s("b", now_s))
        now_s += pauses[-1]
        assert paths.pause_left_s("b", now_s) == 0
    assert pauses[:3] == [FIRST_PAUSE_S, 2 * FIRST_PAUSE_S, 4 * FIRST_PAUSE_S]
    assert pauses[-1] == LONGEST_PAUSE_S
    assert "in a row: why" in paths.reason("b")


def test_connections_that_break_together_count_as_one_failure() -> None:
    paths = met()
    for moment in range(IN_A_ROW - 1):
        for made_s in (moment, moment - 0.5, moment - 0.1, moment - 7):
            assert not paths.failed("b", "1", "why", made_s=made_s, now_s=moment)
    assert paths.pause_left_s("b", IN_A_ROW) == 0
    assert fail(paths, IN_A_ROW)
    assert not paths.failed("b", "1", "why", made_s=IN_A_ROW - 1, now_s=IN_A_ROW + 1)
    assert paths.pause_left_s("b", IN_A_ROW) == FIRST_PAUSE_S


def test_one_failure_is_enough_if_nothing_passes() -> None:
    paths = met()
    assert fail(paths, 0.0, nothing_passes=True)
    assert (paths.pause_left_s("b", 1.0), paths.reason("b")) == (FIRST_PAUSE_S - 1, "why")


def test_a_shard_that_arrives_and_a_new_incarnation_begin_anew() -> None:
    paths = met()
    fail(paths, 0.0, nothing_passes=True)
    paths.carried("b", "0")  # of another process
    assert paths.pause_left_s("b", 0.0) > 0
    paths.carried("b", "1")
    assert paths.pause_left_s("b", 0.0) == 0
    assert not fail(paths, 1.0)
    fail(paths, 2.0, nothing_passes=True)
    paths.met("b", "1")
    assert paths.pause_left_s("b", 2.0) > 0
    paths.met("b", "2")
    assert paths.pause_left_s("b", 2.0) == 0


def test_failures_of_a_process_that_is_no_more_are_not_counted() -> None:
    paths = met("2")
    assert not fail(paths, 0.0, nothing_passes=True)
    assert not paths.failed("nobody", "1", "why", made_s=0.0, now_s=0.0, nothing_passes=True)
    assert paths.pause_left_s("b", 0.0) == paths.pause_left_s("nobody", 0.0) == 0
