"""When the controller looks, and at what."""

from __future__ import annotations

from math import inf

import pytest

from services.controller.round.focus import Focus
from services.controller.turns import AGAIN_S, DECIDE_AT_LEAST_EVERY_S, TURN_RANKS, Turns

FEW = [("a", 10), ("b", 10)]
MANY = [(name, TURN_RANKS) for name in "abc"]
A, B, C = (frozenset(name) for name in "abc")


class Rounds:
    """Turns, and a clock that moves with the rounds."""

    def __init__(self, sizes: list[tuple[str, int]]) -> None:
        self.turns, self.sizes = Turns(), sizes
        self.now_s = 100.0

    def look(
        self,
        revision: int = 1,
        *,
        is_news: bool = False,
        took_s: float = 0.0,
        wake_in_s: float = inf,
        goes_on: bool = False,
    ) -> Focus | None:
        focus = self.turns.focus(self.sizes, (), revision, self.now_s, is_news=is_news)
        self.now_s += took_s
        wake_s = self.now_s + wake_in_s
        self.turns.looked(focus, took_s=took_s, now_s=self.now_s, wake_s=wake_s, goes_on=goes_on)
        return focus

    def turn(self, revision: int = 1, **how: float) -> frozenset[str]:
        """A round of those whose turn it is."""
        focus = self.look(revision, **how)
        assert focus is not None
        return focus.jobs

    def is_due(self, revision: int = 1) -> bool:
        return self.turns.is_due(revision, self.now_s)


@pytest.fixture
def few() -> Rounds:
    return Rounds(FEW)


@pytest.fixture
def many() -> Rounds:
    """All have had a turn."""
    rounds = Rounds(MANY)
    assert [rounds.turn() for _ in MANY] == [A, B, C]
    return rounds


def test_of_few_jobs_each_round_looks_at_everything_when_something_changed_and_now_and_then(few) -> None:
    assert few.is_due()
    assert few.look(is_news=True) is None
    assert not few.is_due()
    assert few.is_due(revision=2)
    few.now_s += DECIDE_AT_LEAST_EVERY_S
    assert few.is_due()


def test_of_few_jobs_a_long_round_has_a_rest_that_a_call_ends(few) -> None:
    few.look(took_s=0.1, wake_in_s=0.2)
    few.now_s += 0.3
    assert not few.is_due(revision=2), "also if a rule waits no longer"
    assert few.turns.wait_s(10.0, few.now_s) == pytest.approx(0.6)
    few.turns.call()
    assert few.is_due()
    assert few.turns.wait_s(10.0, few.now_s) == AGAIN_S
    few.look(took_s=0.1, goes_on=True)
    assert few.is_due(revision=2), "what followed from it is looked at next"


def test_the_wait_is_until_a_rule_waits_no_longer(few) -> None:
    few.look(wake_in_s=0.5)
    assert few.turns.wait_s(10.0, few.now_s) == 0.5
    assert few.turns.wait_s(0.1, few.now_s) == 0.1
    few.now_s += 0.5
    assert few.is_due()
    few.look()
    assert few.turns.wait_s(10.0, few.now_s) == 10.0


def test_of_many_jobs_what_is_open_is_looked_at_at_once_when_a_rule_waits_no_longer(many) -> None:
    assert many.turn(took_s=0.1, wake_in_s=0.2) == A
    many.now_s += 0.2
    assert many.is_due(), "it does not wait for the rest to end"
    assert many.look() == Focus()
    assert not many.is_due(revision=2), "it rests"


def test_rounds_of_what_is_open_do_not_put_off_a_rule_of_another_job(many) -> None:
    assert [many.turn(), many.turn(wake_in_s=5.0), many.turn()] == [A, B, C]
    many.turns.call()
    assert many.look(is_news=True) == Focus()
    many.now_s += 5.0
    assert many.is_due()
    assert [many.turn(revision=2), many.turn(revision=2), many.turn(revision=2)] == [B, A, C]
    assert [many.turn(revision=3), many.turn(revision=3), many.turn(revision=3)] == [A, B, C]


def test_a_rule_is_not_forgotten_when_jobs_move_to_other_turns() -> None:
    halves = [(name, TURN_RANKS // 2) for name in "abcdef"]
    many = Rounds(halves)
    assert [many.turn(), many.turn(), many.turn(wake_in_s=5.0)] == [frozenset("ab"), frozenset("cd"), frozenset("ef")]
    many.sizes = halves[1:]  # a job has ended: all turns begin one job later
    many.now_s += 5.0
    assert many.turn(revision=2) == frozenset("de")


def test_a_job_that_always_has_something_to_wait_for_keeps_no_other_from_its_turn(many) -> None:
    seen = []
    for _ in range(9):
        many.now_s += 1.0
        seen.append(many.turn(wake_in_s=0.1))
    assert all(seen.count(turn) == 3 for turn in (A, B, C))


def test_of_many_jobs_all_have_been_seen_as_of_when_their_turns_began(many) -> None:
    assert not many.is_due(revision=1)
    assert [many.turn(revision=2), many.turn(revision=3), many.turn(revision=4)] == [A, B, C]
    assert not many.is_due(revision=2)
    assert many.is_due(revision=4), "the first of them may have changed since"


def test_jobs_that_have_become_few_are_looked_at_together(many) -> None:
    assert many.turn() == A
    many.sizes = FEW
    assert many.look() is None
    many.sizes = MANY
    assert many.turn() == A


def test_a_round_for_no_signal_may_be_broken_off_for_a_second() -> None:
    for sizes in (FEW, MANY):
        rounds = Rounds(sizes)
        rounds.look()
        focus = rounds.turns.focus(sizes, (), 2, rounds.now_s, is_news=False)
        assert rounds.turns.may_yield(focus, rounds.now_s)
        assert not rounds.turns.may_yield(focus, rounds.now_s + 2 * DECIDE_AT_LEAST_EVERY_S)
    assert not rounds.turns.may_yield(Focus(), rounds.now_s), "an urgent one"
