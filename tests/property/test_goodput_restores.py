"""Generations that fail at some moment of their start, written from a known truth.

The time until then was restart, restore or warm-up, depending on the last rank, whatever the others had logged by then.
"""

from __future__ import annotations

import random
from collections import defaultdict
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flyball.contracts.events import Event, EventKind
from goodput.calculator import GoodputReport, calculate

BASE = 1_000_000.0

seconds = st.integers(1, 40).map(lambda tenths: tenths / 10)
ranks = st.lists(st.tuples(seconds, seconds, seconds), min_size=1, max_size=4)  # attaches, restores, is restored
starts = st.lists(st.tuples(ranks, st.floats(0.05, 14.0)), max_size=4)  # each fails after this long


def marks(at: float, generation: int, rank: int, data: dict[str, float]) -> Event:
    return Event(at, EventKind.RANK_MARKS, "job", generation, rank, data=data)


class Log:
    def __init__(self) -> None:
        self.now = BASE
        self.events = [Event(BASE, EventKind.JOB_SUBMITTED, "job")]
        self.truth: defaultdict[str, float] = defaultdict(float)

    def start(
        self, generation: int, of_ranks: list[tuple[float, float, float]], until_s: float, *, phases: bool
    ) -> None:
        """The marks of every rank up to the failure, in one event or in several."""
        began = self.now
        incident = f"inc-{generation - 1}" if generation > 1 else ""
        self.events.append(
            Event(
                began,
                EventKind.GENERATION_STARTED,
                "job",
                generation,
                incident_id=incident,
                data={"restore_step": 7},
            )
        )
        last_restores = last_restored = 0.0  # of the ranks that logged anything
        for rank, (attach_s, load_s, restore_s) in enumerate(of_ranks):
            moments = (attach_s, attach_s + load_s, attach_s + load_s + restore_s)
            if attach_s <= until_s:
                last_restores, last_restored = max(last_restores, moments[1]), max(last_restored, moments[2])
            reached: dict[str, float] = {}
            for name, phase, moment in zip(
                ("attached_at", "restore_began_at", "restored_at"), ("init", "restore", "step"), moments, strict=True
            ):
                if moment <= until_s:
                    reached = reached | {name: began + moment}
                    if phases:
                        data = {"phase": phase}
                        self.events.append(Event(began + moment, EventKind.PHASE, "job", generation, rank, data=data))
                    else:
                        self.events.append(marks(began + moment, generation, rank, reached))
        if not last_restored:
            last_restores = last_restored = until_s
        cuts = [0.0, min(last_restores, until_s), min(last_restored, until_s), until_s]
        for category, (one, two) in zip(("restart", "restore", "warm_up"), pairwise(cuts), strict=True):
            self.truth[category] += two - one
        self.now = began + until_s

    def fail(self, generation: int) -> None:
        """The incident opens at once, is decided on, and the workers are gone."""
        for kind, data in (
            (EventKind.INCIDENT_OPENED, {"cause": "restore_failed"}),
            (EventKind.DECISION, {"kind": "restart_in_place"}),
            (EventKind.WORKERS_STOPPED, {}),
        ):
            self.events.append(Event(self.now, kind, "job", generation, incident_id=f"inc-{generation}", data=data))

    def train(self, generation: int) -> None:
        times: list[int | float | str] = [self.now + step for step in range(1, 11)]
        data = {"first_step": 8, "completed_at": times}
        self.events.append(Event(self.now + 10.0, EventKind.STEPS, "job", generation, 0, data=data))
        self.truth["useful"] += 10.0
        self.now += 10.0
        self.events.append(Event(self.now, EventKind.JOB_ENDED, "job", data={"outcome": "succeeded"}))


def spent(report: GoodputReport) -> dict[str, float]:
    return {category: s for category, s in report.seconds_by_category.items() if s > 1e-6}


@given(starts, ranks, st.booleans(), st.randoms(use_true_random=False))
@settings(max_examples=150, deadline=None)
def test_a_failed_start_counts_by_its_last_rank(
    failing: list[tuple[list[tuple[float, float, float]], float]],
    last: list[tuple[float, float, float]],
    phases: bool,
    chance: random.Random,
) -> None:
    log = Log()
    for generation, (of_ranks, until_s) in enumerate(failing, 1):
        log.start(generation, of_ranks, until_s, phases=phases)
        log.fail(generation)
    generation = len(failing) + 1
    log.start(generation, last, max(map(sum, last)), phases=phases)
    log.train(generation)
    chance.shuffle(log.events)

    report = calculate(log.events)

    assert spent(report) == pytest.approx({category: s for category, s in log.truth.items() if s > 1e-6}, abs=1e-6)


def test_a_restore_that_fails_after_ten_minutes_is_a_restore() -> None:
    log = Log()
    log.start(1, [(2.0, 1.0, 900.0), (2.0, 1.0, 5.0)], 603.0, phases=False)
    log.fail(1)
    log.start(2, [(2.0, 1.0, 5.0)], 8.0, phases=False)
    log.train(2)
    assert spent(calculate(log.events)) == pytest.approx({"restart": 6.0, "restore": 605.0, "useful": 10.0})
