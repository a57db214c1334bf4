"""Completion times of one generation's steps, logged rank by rank or summarised by a sensor. Pure.

Every value is a maximum over events, so their order and repetition do not matter.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from statistics import median
from typing import NamedTuple

from flyball.contracts.events import Event
from goodput.history.epochs import Epochs, StepReport, epochs_in
from goodput.history.rank_clocks import RankClock, corrected_clocks
from goodput.history.values import MOST_STEPS, earliest, is_moment, text, whole

_QUIET_S = 15.0  # far longer than sensors delay a summary
# If a rank logs nothing while another logs many more steps over a long time, only its log is lost: ranks that train
# together stop together, and a lost host misses far fewer reports.
_LOST_LOG_S = 4.0 * _QUIET_S
_LOST_LOG_STEPS = 20
_FAR_APART_S = 2.0  # summaries of a step further apart may belong to two epochs; closer ones are of slower ranks


class CompletedStep(NamedTuple):
    """A step that every reporting rank of a generation completed; `at` is the time of the last rank."""

    step: int
    at: float


class LastRank(NamedTuple):
    """The host whose rank completed a step last, and when the median rank had completed it."""

    step: int
    median_at: float
    host_id: str  # '' if the log does not say


class WorldSteps(NamedTuple):
    """The steps of one generation, over all its ranks."""

    steps: tuple[CompletedStep, ...] = ()  # ascending, times never decreasing
    last_ranks: tuple[LastRank, ...] = ()  # for steps reported by several ranks, ascending
    clocks: tuple[RankClock, ...] = ()  # that were corrected
    lost_logs: tuple[int, ...] = ()  # ranks whose logs end long before the others'
    epochs: int = 1  # number of epochs in the steps


class WorldStepLog:
    """Collects STEPS events, and computes the steps of the world."""

    __slots__ = ("_again", "_by_rank", "_host_of", "_newest_summary", "_slowest", "_summed", "_summed_again")

    def __init__(self) -> None:
        self._by_rank: dict[int, dict[int, float]] = {}  # rank -> step -> when it completed the step
        self._again: dict[int, dict[int, set[float]]] = {}  # rank -> step -> all times, if it was logged at several
        self._host_of: dict[int, str] = {}  # rank -> host
        self._summed: dict[int, float] = {}  # step -> when the last rank completed it, by sensors' summaries
        self._summed_again: dict[int, dict[int, float]] = {}  # step -> slot -> last time, if distant
        self._slowest: dict[str, int] = {}  # sensor -> newest step completed by all of its ranks
        self._newest_summary: dict[str, float] = {}  # sensor -> its newest summary

    def add(self, event: Event) -> None:
        """Add a STEPS event."""
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
        self._newest_summary[sensor] = max(event.at, self._newest_summary.get(sensor, -math.inf))
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
        """The first step that any rank logged, by its original number."""
        if epochs := self.epochs():
            return epochs.first
        firsts = (min(steps) for steps in self._by_rank.values() if steps)
        return min((*firsts, *self._summed), default=None)

    def epochs(self) -> Epochs | None:
        """The epochs in the step numbers of the rank that logged most steps, else of the sensors. None: numbers
        never start over. Within a generation nothing is recomputed."""
        if self._again:
            rank = max(sorted(self._by_rank), key=lambda rank: sum(1 for _ in self._reports_of(rank)))
            return epochs_in(self._reports_of(rank))
        if self._summed_again and not self._by_rank:
            return epochs_in(self._summary_reports())
        return None

    def _reports_of(self, rank: int) -> Iterator[StepReport]:
        again = self._again.get(rank, {})
        for step, at in self._by_rank[rank].items():
            yield from (StepReport(time, step) for time in again.get(step, (at,)))

    def _summary_reports(self) -> Iterator[StepReport]:
        for step, at in self._summed.items():
            yield from (StepReport(time, step) for time in self._summed_again.get(step, {0: at}).values())

    @property
    def ranks(self) -> int:
        """The number of ranks that logged their own steps."""
        return len(self._by_rank)

    def last_number(self, epochs: Epochs | None) -> int | None:
        """The newest logged step's number, within its epoch."""
        if epochs is not None:
            return epochs.last
        return max((*(max(steps) for steps in self._by_rank.values() if steps), *self._summed), default=None)

    def world_steps(self, resumed_from: int | None, added: int = 0) -> WorldSteps:
        """The steps that all reporting ranks completed, and who was last.

        A lost host's last reports may be missing, but a step from which a later generation resumed was complete. Ranks
        that only lost their logs do not hold back the others. Steps are numbered through the epochs; `added` is the
        offset of earlier generations.
        """
        # Ranks that train together stop together: a sensor that went quiet while others went on receives none of them.
        since = max(self._newest_summary.values(), default=0.0) - _QUIET_S
        epochs = self.epochs()
        by_rank, summed = self._numbered_through(epochs)
        lost = _lost_logs(by_rank)
        newest_of = [max(steps) for rank, steps in by_rank.items() if steps and rank not in lost]
        if summed is self._summed:
            newest_of += [step for sensor, step in self._slowest.items() if self._newest_summary[sensor] >= since]
        else:  # in an epoch after the first, nobody logs what all ranks completed
            newest_of += [max(summed)]
        if not newest_of:
            return WorldSteps()
        newest = max(min(newest_of), -1 if resumed_from is None else resumed_from - added)
        medians, n_ranks = _medians(by_rank, newest)
        clocks = corrected_clocks(by_rank, medians, n_ranks)
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
        corrected = (
            RankClock(rank, self._host_of.get(rank, ""), clock.least_s, clock.most_s)
            for rank, clock in sorted(clocks.items())
        )
        n_epochs = 1 if epochs is None else epochs.count
        return WorldSteps(tuple(steps), tuple(last_ranks), tuple(corrected), lost, n_epochs)

    def _numbered_through(self, epochs: Epochs | None) -> tuple[Mapping[int, Mapping[int, float]], Mapping[int, float]]:
        """When each rank, and by the summaries the last rank, completed each step; numbered through the epochs."""
        if epochs is None:
            return self._by_rank, self._summed
        if not self._by_rank:
            return {}, _latest_of(self._summary_reports(), epochs)
        return {rank: _latest_of(self._reports_of(rank), epochs) for rank in self._by_rank}, self._summed


def _latest_of(reports: Iterable[StepReport], epochs: Epochs) -> dict[int, float]:
    latest: dict[int, float] = {}
    for step in reports:
        number = epochs.number(step)
        latest[number] = max(step.at, latest.get(number, step.at))
    return latest


def _lost_logs(by_rank: Mapping[int, Mapping[int, float]]) -> tuple[int, ...]:
    """Ranks that logged no more steps while another went on for long. Their state after that is unknown."""
    newest_of = {rank: max(steps) for rank, steps in by_rank.items() if steps}
    least = min(newest_of.values(), default=0)
    if max(newest_of.values(), default=0) - least < _LOST_LOG_STEPS:
        return ()
    # Take the rank with the most steps after that: a single absurd number does not make a rank that went on.
    leader = max(newest_of, key=lambda rank: (sum(step > least for step in by_rank[rank]), -rank))
    logged = sorted(by_rank[leader])
    until = by_rank[leader][logged[-1]]
    return tuple(
        rank
        for rank, newest in sorted(newest_of.items())
        if len(logged) - bisect_right(logged, newest) >= _LOST_LOG_STEPS and until - by_rank[rank][newest] > _LOST_LOG_S
    )


def _medians(by_rank: Mapping[int, Mapping[int, float]], newest: int) -> tuple[dict[int, float], dict[int, int]]:
    """When the median rank completed each step that several ranks logged, and how many did."""
    if len(by_rank) < 2:
        return {}, {}
    times: defaultdict[int, list[float]] = defaultdict(list)
    for of_rank in by_rank.values():
        for step, at in of_rank.items():
            if step <= newest:
                times[step].append(at)
    several = {step: of_step for step, of_step in times.items() if len(of_step) > 1}
    return {step: median(at) for step, at in several.items()}, {step: len(at) for step, at in several.items()}


def _latest(by_rank: Mapping[int, Mapping[int, float]], newest: int) -> dict[int, tuple[float, int]]:
    """When the last rank completed each step, and which rank it was."""
    latest: dict[int, tuple[float, int]] = {}
    for rank in sorted(by_rank):
        for step, at in by_rank[rank].items():
            if step <= newest and (step not in latest or at > latest[step][0]):
                latest[step] = (at, rank)
    return latest
