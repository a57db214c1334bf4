"""Completion times of one generation's steps over its ranks, told rank by rank or summed up by a sensor. Pure.

Every value is a maximum over events, so that neither their order nor their repetition changes anything.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from statistics import median
from typing import NamedTuple

from flyball.contracts.events import Event
from goodput.history.epochs import Epochs, Telling, epochs_in
from goodput.history.rank_clocks import RankClock, set_right
from goodput.history.values import MOST_STEPS, earliest, is_moment, text, whole

_QUIET_S = 15.0  # far more than sensors wait with a summary
# A rank that tells nothing while another tells of so many more steps, for so long, only lost its log: ranks that train
# together stop together, and a lost host's last reports are far fewer.
_LOST_LOG_S = 4.0 * _QUIET_S
_LOST_LOG_STEPS = 20
_FAR_APART_S = 2.0  # sums of a step that come so far apart may be of two epochs; within it slower ranks completed it


class CompletedStep(NamedTuple):
    """A step that every reporting rank of a generation completed; `at` is when the last of them did."""

    step: int
    at: float


class LastRank(NamedTuple):
    """Who completed a step last, and when the median of the ranks had completed it."""

    step: int
    median_at: float
    host_id: str  # '' where the log does not say


class WorldSteps(NamedTuple):
    """Of one generation."""

    steps: tuple[CompletedStep, ...] = ()  # ascending, their times never falling
    last_ranks: tuple[LastRank, ...] = ()  # of steps that several ranks told of, ascending
    clocks: tuple[RankClock, ...] = ()  # that had to be set right
    lost_logs: tuple[int, ...] = ()  # ranks that told of no more steps long before the others did
    epochs: int = 1  # that the steps are of


class WorldStepLog:
    """Events go in by `add`, the steps of the world come out."""

    __slots__ = ("_again", "_by_rank", "_heard", "_host_of", "_slowest", "_summed", "_summed_again")

    def __init__(self) -> None:
        self._by_rank: dict[int, dict[int, float]] = {}  # rank -> step -> when it completed it
        self._again: dict[int, dict[int, set[float]]] = {}  # of steps that a rank told of at several times: all of them
        self._host_of: dict[int, str] = {}  # rank -> host
        self._summed: dict[int, float] = {}  # step -> when the last rank completed it, as sensors say
        self._summed_again: dict[int, dict[int, float]] = {}  # of steps told at times far apart: the last of each
        self._slowest: dict[str, int] = {}  # sensor -> newest step of all ranks that it hears
        self._heard: dict[str, float] = {}  # sensor -> its newest summary

    def add(self, event: Event) -> None:
        """Take in one STEPS event."""
        data = event.data
        times = data.get("completed_at")
        first = data.get("first_step")
        if not isinstance(times, list):
            return
        if type(first) is not int or not -1 <= first <= MOST_STEPS:
            first = whole(data, "first_step", least=-1)
            if first is None:
                return
        if "slowest_step" in data and (slowest := whole(data, "slowest_step", least=-1)) is not None:
            self._add_summary(event, first, times, slowest)
            return
        rank = event.rank
        of_rank = self._by_rank.get(rank)
        if of_rank is None:
            of_rank = self._by_rank[rank] = {}
        least = earliest(event)
        for step, at in enumerate(times, first):
            if is_moment(at, least) and step >= 0:
                known = of_rank.get(step)
                if known is None:
                    of_rank[step] = at
                elif at != known:
                    self._again.setdefault(rank, {}).setdefault(step, {known}).add(at)
                    of_rank[step] = max(at, known)
        if event.host_id and event.host_id > self._host_of.get(rank, ""):
            self._host_of[rank] = event.host_id

    def _add_summary(self, event: Event, first: int, times: list[int | float | str], slowest: int) -> None:
        sensor = text(event.data, "sensor")
        self._slowest[sensor] = max(slowest, self._slowest.get(sensor, -1))
        self._heard[sensor] = max(event.at, self._heard.get(sensor, -math.inf))
        least = earliest(event)
        for step, at in enumerate(times, first):
            if is_moment(at, least) and step >= 0:
                known = self._summed.get(step, at)
                if at // _FAR_APART_S != known // _FAR_APART_S or step in self._summed_again:
                    again = self._summed_again.setdefault(step, {int(known // _FAR_APART_S): known})
                    moment = int(at // _FAR_APART_S)
                    again[moment] = max(at, again.get(moment, at))
                self._summed[step] = max(at, known)

    @property
    def first_step(self) -> int | None:
        """The first step that any rank told of, as it was numbered."""
        if epochs := self.epochs():
            return epochs.first
        firsts = (min(steps) for steps in self._by_rank.values() if steps)
        return min((*firsts, *self._summed), default=None)

    def epochs(self) -> Epochs | None:
        """Where the numbers of the rank that told of most steps, else of the sensors, begin anew: nothing of a
        generation is done again within it. None: nowhere."""
        if self._again:
            rank = max(sorted(self._by_rank), key=lambda rank: sum(1 for _ in self._told_by(rank)))
            return epochs_in(self._told_by(rank))
        if self._summed_again and not self._by_rank:
            return epochs_in(self._told_by_sensors())
        return None

    def _told_by(self, rank: int) -> Iterator[Telling]:
        again = self._again.get(rank, {})
        for step, at in self._by_rank[rank].items():
            yield from (Telling(time, step) for time in again.get(step, (at,)))

    def _told_by_sensors(self) -> Iterator[Telling]:
        for step, at in self._summed.items():
            yield from (Telling(time, step) for time in self._summed_again.get(step, {0: at}).values())

    @property
    def ranks(self) -> int:
        """How many ranks told of their steps by themselves."""
        return len(self._by_rank)

    def last_number(self, epochs: Epochs | None) -> int | None:
        """The number of the newest step that any rank told of, within its epoch."""
        if epochs is not None:
            return epochs.last
        return max((*(max(steps) for steps in self._by_rank.values() if steps), *self._summed), default=None)

    def world_steps(self, resumed_from: int | None, added: int = 0) -> WorldSteps:
        """Steps that all reporting ranks completed, and who was last. A lost host's last reports may be missing: a step
        from which a later generation resumed was complete all the same. Ranks that only lost their logs hold nobody
        up. Steps are numbered through the epochs; `added` are the numbers of those before this generation."""
        # Ranks that train together stop together: a sensor that fell quiet while others went on hears none of them.
        since = max(self._heard.values(), default=0.0) - _QUIET_S
        epochs = self.epochs()
        by_rank, summed = self._numbered_through(epochs)
        lost = _lost_logs(by_rank)
        newest_of = [max(steps) for rank, steps in by_rank.items() if steps and rank not in lost]
        if summed is self._summed:
            newest_of += [step for sensor, step in self._slowest.items() if self._heard[sensor] >= since]
        else:  # what all completed of a newer epoch than their first, nobody says
            newest_of += [max(summed)]
        if not newest_of:
            return WorldSteps()
        newest = max(min(newest_of), -1 if resumed_from is None else resumed_from - added)
        medians, told_by = _medians(by_rank, newest)
        clocks = set_right(by_rank, medians, told_by)
        if clocks:
            by_rank = {rank: clocks[rank].steps if rank in clocks else steps for rank, steps in by_rank.items()}
            medians, _ = _medians(by_rank, newest)
        latest = _latest(by_rank, newest)
        steps, last_ranks, at = [], [], -math.inf
        for step in sorted({*latest, *(s for s in summed if s <= newest)}):
            of_ranks, rank = latest.get(step, (-math.inf, -1))
            at = max(at, of_ranks, summed.get(step, -math.inf))
            number = step + added if added else step
            steps.append(CompletedStep(number, at))
            if step in medians and step not in summed:
                last_ranks.append(LastRank(number, medians[step], self._host_of.get(rank, "")))
        moved = (
            RankClock(rank, self._host_of.get(rank, ""), clock.least_s, clock.most_s)
            for rank, clock in sorted(clocks.items())
        )
        n_epochs = 1 if epochs is None else epochs.count
        return WorldSteps(tuple(steps), tuple(last_ranks), tuple(moved), lost, n_epochs)

    def _numbered_through(self, epochs: Epochs | None) -> tuple[Mapping[int, Mapping[int, float]], Mapping[int, float]]:
        """When each rank, and the last one as sensors say, completed each step, by its number through the epochs."""
        if epochs is None:
            return self._by_rank, self._summed
        if not self._by_rank:
            return {}, _latest_of(self._told_by_sensors(), epochs)
        return {rank: _latest_of(self._told_by(rank), epochs) for rank in self._by_rank}, self._summed


def _latest_of(told: Iterable[Telling], epochs: Epochs) -> dict[int, float]:
    latest: dict[int, float] = {}
    for telling in told:
        number = epochs.number(telling)
        latest[number] = max(telling.at, latest.get(number, telling.at))
    return latest


def _lost_logs(by_rank: Mapping[int, Mapping[int, float]]) -> tuple[int, ...]:
    """Ranks that told of no more steps while another went on for long: nothing is known of them from there on."""
    newest_of = {rank: max(steps) for rank, steps in by_rank.items() if steps}
    least = min(newest_of.values(), default=0)
    if max(newest_of.values(), default=0) - least < _LOST_LOG_STEPS:
        return ()
    # The rank that told of most steps from there on: a single absurd number is no rank that went on.
    leader = max(newest_of, key=lambda rank: (sum(step > least for step in by_rank[rank]), -rank))
    told = sorted(by_rank[leader])
    until = by_rank[leader][told[-1]]
    return tuple(
        rank
        for rank, newest in sorted(newest_of.items())
        if len(told) - bisect_right(told, newest) >= _LOST_LOG_STEPS and until - by_rank[rank][newest] > _LOST_LOG_S
    )


def _medians(by_rank: Mapping[int, Mapping[int, float]], newest: int) -> tuple[dict[int, float], dict[int, int]]:
    """When the median of the ranks completed each step, and how many told of it, of those that several did."""
    if len(by_rank) < 2:
        return {}, {}
    times: defaultdict[int, list[float]] = defaultdict(list)
    for of_rank in by_rank.values():
        for step, at in of_rank.items():
            if step <= newest:
                times[step].append(at)
    several = {step: of_step for step, of_step in times.items() if len(of_step) > 1}
    return {step: median(told) for step, told in several.items()}, {step: len(told) for step, told in several.items()}


def _latest(by_rank: Mapping[int, Mapping[int, float]], newest: int) -> dict[int, tuple[float, int]]:
    """When the last rank completed each step, and which it was."""
    latest: dict[int, tuple[float, int]] = {}
    for rank in sorted(by_rank):
        for step, at in by_rank[rank].items():
            if step <= newest and (step not in latest or at > latest[step][0]):
                latest[step] = (at, rank)
    return latest
