"""Whose turn it is to break what: drawn from a seed, the same on every host."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from flyball.contracts.clock import SystemClock
from flyball.contracts.errors import NotFound, Unreachable
from simulator.inject.chaos import FAULTS, Chaos, turn_at, until_next_s

SEED, EVERY_S = 7, 60.0


def test_a_turn_is_the_same_wherever_it_is_drawn() -> None:
    turns = [turn_at(now, every_s=EVERY_S, seed=SEED, world_size=4) for now in (6000.0, 6030.0, 6059.9)]
    assert len(set(turns)) == 1 and turns[0].number == 100
    assert turn_at(6060.0, every_s=EVERY_S, seed=SEED, world_size=4).number == 101


def test_over_time_every_rank_and_every_fault_has_its_turn() -> None:
    drawn = [turn_at(n * EVERY_S, every_s=EVERY_S, seed=SEED, world_size=4) for n in range(400)]
    ranks, faults = Counter(turn.rank for turn in drawn), Counter(turn.fault for turn in drawn)
    assert set(ranks) == {0, 1, 2, 3} and min(ranks.values()) > 60
    assert set(faults) == set(FAULTS) and faults["kill"] > faults["hang"] > 60
    assert drawn != [turn_at(n * EVERY_S, every_s=EVERY_S, seed=8, world_size=4) for n in range(400)]


@pytest.mark.parametrize(("now", "expected"), [(0.0, 60.0), (59.0, 1.0), (60.0, 60.0), (90.5, 29.5)])
def test_the_next_turn_begins_at_a_multiple_of_the_interval(now: float, expected: float) -> None:
    assert until_next_s(now, EVERY_S) == expected


class Api:
    """A supervisor with one job of two ranks."""

    def __init__(
        self, *, state: str = "running", incident: str = "resolved", hosts: tuple[str, str] = ("a", "a")
    ) -> None:
        self.state, self.incident, self.hosts = state, incident, hosts
        self.asked: list[str] = []
        self.is_away = False

    def get(self, path: str, **_: str | int | None) -> Any:  # noqa: ANN401 - JSON
        if self.is_away:
            raise Unreachable("No answer.", hint="wait")
        self.asked.append(path)
        if path == "/v1/jobs/gpt":
            ranks = [{"rank": rank, "host_id": host} for rank, host in enumerate(self.hosts)]
            spec = {"injectable": True}
            return {"job": "gpt", "state": self.state, "world_size": 2, "ranks": ranks, "spec": spec}
        if path == "/v1/incidents":
            return {"items": [{"state": "resolved"}, {"state": self.incident}]}
        raise NotFound(f"There is no {path}.", hint="look")

    def post(self, path: str, body: object = None) -> Any:  # noqa: ANN401 - JSON
        raise AssertionError(f"{path}: nothing was injected, so there is nothing to record: {body}")


def take_turn(api: Api, host_id: str) -> list[str]:
    lines: list[str] = []
    chaos = Chaos(
        api, job="gpt", host_id=host_id, every_s=EVERY_S, seed=SEED, clock=SystemClock(), announce=lines.append
    )
    assert chaos.take_turn() is None
    return lines


@pytest.mark.parametrize(
    ("api", "host_id", "expected"),
    [
        (Api(state="succeeded"), "a", "job gpt is succeeded: nothing to break"),
        (Api(incident="verifying"), "a", "job gpt still heals: nothing is broken this time"),
        (Api(), "a", "There is no /v1/hosts/a."),  # the fault itself looks for the host, and finds none
    ],
)
def test_a_turn_with_nothing_to_break_is_skipped_aloud(api: Api, host_id: str, expected: str) -> None:
    assert take_turn(api, host_id) == [expected]


def test_another_hosts_rank_is_none_of_its_business() -> None:
    api = Api()
    assert take_turn(api, "b") == []
    assert api.asked == ["/v1/jobs/gpt"]


def test_a_supervisor_that_is_away_ends_nothing() -> None:
    api = Api()
    api.is_away = True
    assert take_turn(api, "a") == ["No answer. Trying again at the next turn."]
