"""Completion times of one generation's steps, logged rank by rank or summarised by a sensor. Pure.

Every value is a maximum over events, so their order and repetition do not matter.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import median
from typing import NamedTuple

import msgspec

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


class LostSeconds(NamedTuple):
    """Time of a stretch of steps that was not useful: a category of the account, and the host that was waited for."""

    category: str
    host_id: str
    seconds: float


class SettledStep(NamedTuple):
    """A step of a long generation, and those before it back to the previous one: accounted for, and forgotten."""

    step: int
    at: float
    step_s: float | None = None  # the median of these steps
    lost: tuple[LostSeconds, ...] | None = None  # the rest of their time are steps; None: a single step, kept in full


class WorldSteps(NamedTuple):
    """The steps of one generation, over all its ranks."""

    steps: tuple[CompletedStep, ...] = ()  # ascending, times never decreasing
    last_ranks: tuple[LastRank, ...] = ()  # for steps reported by several ranks, ascending
    clocks: tuple[RankClock, ...] = ()  # that were corrected
    lost_logs: tuple[int, ...] = ()  # ranks whose logs end long before the others'
    epochs: int = 1  # number of epochs in the steps


class WorldStepLog(msgspec.Struct):
    """Collects STEPS events, and computes the steps of the world."""

    settled: list[SettledStep] = []  # by number through the epochs
    _by_rank: dict[int, dict[int, float]] = {}  # rank -> step -> when it completed the step
    _again: dict[int, dict[int, set[float]]] = {}  # rank -> step -> all times, if it was logged at several
    _host_of: dict[int, str] = {}  # rank -> host
    _summed: dict[int, float] = {}  # step -> when the last rank completed it, by sensors' summaries
    _summed_again: dict[int, dict[int, float]] = {}  # step -> slot -> last time, if distant
    _slowest: dict[str, int] = {}  # sensor -> newest step completed by all of its ranks
    _newest_summary: dict[str, float] = {}  # sensor -> its newest summary
    _newest_at: float = -math.inf  # of any step that a sensor summed up
    _settled_first: int | None = None  # the first step, by its original number
    _starts: tuple[int, ...] = (0,)  # offsets of the epochs before the first step that is not settled, and of its own
    _settled_epochs: int = 0
    _starts_over: bool = False  # numbers that are settled came again

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
            if is_moment(at, least) and step >= 0 and not (self.settled and self._is_settled(step, at)):
                self._add_time(step, at)

    def _add_time(self, step: int, at: float) -> None:
        known = self._summed.get(step, at)
        if at // _FAR_APART_S != known // _FAR_APART_S or step in self._summed_again:
            again = self._summed_again.setdefault(step, {int(known // _FAR_APART_S): known})
            moment = int(at // _FAR_APART_S)
            again[moment] = max(at, again.get(moment, at))
        self._summed[step] = max(at, known)
        self._newest_at = max(self._newest_at, at)

    def _is_settled(self, step: int, at: float) -> bool:
        """Whether a report repeats a step that is settled. One that is later than all others begins an epoch."""
        last = self.settled[-1]
        if not self._starts_over and step + self._starts[-1] <= last.step:
            self._starts_over = at > self._newest_at
            return not self._starts_over
        return self._starts_over and at <= last.at

    def __len__(self) -> int:
        """How many steps are kept one by one."""
        return len(self._summed) + sum(map(len, (*self._by_rank.values(), *self._summed_again.values())))

    @property
    def can_settle(self) -> bool:
        """Whether only sensors logged the steps: those of single ranks are compared with each other to the end."""
        return not self._by_rank

    def settle(self, steps: Sequence[SettledStep]) -> None:
        """Keep these instead of all steps up to the last of them."""
        epochs, last = self.epochs(), steps[-1]
        self._settled_first = self.first_step
        if epochs is None:
            base = self._starts[-1]
            self._summed = {step: at for step, at in self._summed.items() if step + base > last.step}
            self._summed_again = {step: at for step, at in self._summed_again.items() if step + base > last.step}
        else:
            starts, count = self.epoch_starts(epochs), self._n_epochs(epochs)
            rest = sorted(report for report in self._summary_reports() if report.at > last.at)
            base = self._starts[-1] + epochs.number(rest[0]) - rest[0].number if rest else starts[-1]
            self._summed, self._summed_again, self._starts_over = {}, {}, True
            for report in rest:
                self._add_time(report.number, report.at)
            self._starts = (*[start for start in starts if start < base][-1:], base)
            self._settled_epochs = count - (1 if (left := self.epochs()) is None else left.count)
        self.settled = list(steps)

    @property
    def first_step(self) -> int | None:
        """The first step that any rank logged, by its original number."""
        if self.settled:
            return self._settled_first
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
        if (self._summed_again or (self._starts_over and self._summed)) and not self._by_rank:
            return epochs_in(self._summary_reports())
        return None

    def epoch_starts(self, epochs: Epochs | None) -> tuple[int, ...]:
        """The offsets of the epochs up to the newest, without those long before it."""
        *before, base = self._starts
        return (*before, *(base + start for start in (epochs.starts if epochs else (0,))))

    def _n_epochs(self, epochs: Epochs | None) -> int:
        return self._settled_epochs + (1 if epochs is None else epochs.count)

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
        settled = [self.settled[-1].step - self._starts[-1]] if self.settled else []
        return max((*(max(steps) for steps in self._by_rank.values() if steps), *self._summed, *settled), default=None)

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
        steps = [CompletedStep(step.step + added, step.at) for step in self.settled]
        if summed is self._summed:
            newest_of += [step for sensor, step in self._slowest.items() if self._newest_summary[sensor] >= since]
        elif summed:  # in an epoch after the first, nobody logs what all ranks completed
            newest_of += [max(summed)]
        if not newest_of:
            return WorldSteps(tuple(steps), epochs=self._n_epochs(epochs))
        newest = max(min(newest_of), -1 if resumed_from is None else resumed_from - added)
        medians, n_ranks = _medians(by_rank, newest)
        clocks = corrected_clocks(by_rank, medians, n_ranks)
        if clocks:
            by_rank = {rank: clocks[rank].steps if rank in clocks else steps for rank, steps in by_rank.items()}
            medians, _ = _medians(by_rank, newest)
        latest = _latest(by_rank, newest)
        last_ranks = []
        settled, at = (self.settled[-1].step, self.settled[-1].at) if steps else (-1, -math.inf)
        for step in sorted({*latest, *(s for s in summed if settled < s <= newest)}):
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
        return WorldSteps(tuple(steps), tuple(last_ranks), tuple(corrected), lost, self._n_epochs(epochs))

    def _numbered_through(self, epochs: Epochs | None) -> tuple[Mapping[int, Mapping[int, float]], Mapping[int, float]]:
        """When each rank, and by the summaries the last rank, completed each step; numbered through the epochs."""
        base = self._starts[-1]
        if not self._by_rank and (epochs or base):
            return {}, _latest_of(self._summary_reports(), epochs, base)
        if epochs is None:
            return self._by_rank, self._summed
        return {rank: _latest_of(self._reports_of(rank), epochs) for rank in self._by_rank}, self._summed


def _latest_of(reports: Iterable[StepReport], epochs: Epochs | None, base: int = 0) -> dict[int, float]:
    latest: dict[int, float] = {}
    for step in reports:
        number = base + (step.number if epochs is None else epochs.number(step))
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
