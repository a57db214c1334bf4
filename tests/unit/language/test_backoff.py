"""The pauses between failed attempts."""

from __future__ import annotations

from random import Random

import pytest

from flyball.backoff import Backoff, pause_s


def test_pauses_double_up_to_the_longest() -> None:
    backoff = Backoff(0.25, 2.0)
    assert [backoff.failed() for _ in range(5)] == [0.25, 0.5, 1.0, 2.0, 2.0]


def test_a_success_begins_anew() -> None:
    backoff = Backoff(0.1, 5.0)
    backoff.failed()
    backoff.failed()
    backoff.succeeded()
    assert backoff.failed() == 0.1


def test_the_factor_can_be_smaller() -> None:
    backoff = Backoff(1.0, 100.0, factor=1.5)
    assert [backoff.failed() for _ in range(3)] == [1.0, 1.5, 2.25]


def test_many_failures_do_not_overflow() -> None:
    backoff = Backoff(1.0, 2.0)
    for _ in range(5_000):
        assert backoff.failed() <= 2.0


def test_jitter_keeps_the_mean_and_the_seed_repeats_it() -> None:
    one, again, other = (Backoff(1.0, 4.0, jitter=Random(seed)) for seed in (1, 1, 2))
    pauses = [one.failed() for _ in range(2_000)]
    assert pauses == [again.failed() for _ in range(2_000)]
    assert pauses != [other.failed() for _ in range(2_000)]
    for number, pause in enumerate(pauses, 1):
        whole = pause_s(number, first_s=1.0, longest_s=4.0)
        assert 0.75 * whole <= pause <= 1.25 * whole
    assert sum(pauses[2:]) / len(pauses[2:]) == pytest.approx(4.0, rel=0.02)
    assert min(pauses[2:]) < 3.1 and max(pauses[2:]) > 4.9


@pytest.mark.parametrize(("failures", "expected_s"), [(1, 0.5), (2, 1.0), (4, 4.0), (5, 5.0), (10_000, 5.0)])
def test_a_pause_of_a_count(failures: int, expected_s: float) -> None:
    assert pause_s(failures, first_s=0.5, longest_s=5.0) == expected_s
