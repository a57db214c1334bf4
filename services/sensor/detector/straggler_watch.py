"""Finds the rank that computes longer than the others, which wait for it in every step. Pure.

Steps of a synchronous job take all ranks equally long, so they do not show it. Ranks report how long they compute
before they wait. A window ends when every rank has reported enough steps; the slowest rank of a window is odd if it is
far above the median, and beyond what the others' times vary by. A straggler was the odd one of several windows in a
row. It is named again every few minutes, until it was not the odd one of as many windows.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

import msgspec

from flyball.contracts.reports.signals import SignalBody
from flyball.contracts.reports.training_health import RankCompute, Straggler, StragglerRecovered

MAX_JOBS = 1_000  # the one with the oldest report makes room
_NORMAL = 1.4826  # times the MAD is the standard deviation of a normal distribution


class StragglerSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """When a rank is a straggler."""

    steps: int = 20  # of each rank in a window, at least
    windows: int = 5  # in a row
    ratio: float = 1.25  # to the median
    deviations: float = 4.0  # above the median, of the other ranks' times
    renew_s: float = 300.0  # how often a straggler is named again
    gone_after: int = 10  # times the steps of a window: a rank that has reported none by then is not awaited


class _WatchedCompute:
    def __init__(self, settings: StragglerSettings) -> None:
        self.generation = -1
        self._settings = settings
        self._ranks: dict[int, list[float]] = {}  # rank -> [steps, seconds] in this window
        self._odd, self._windows = -1, 0  # the odd rank of the last windows, and how many
        self._named, self._even = -1, 0  # the straggler, and in how many windows since it was not odd
        self._named_s = 0.0  # when it was last named

    def begin(self, generation: int) -> None:
        self.generation, self._odd, self._windows, self._named = generation, -1, 0, -1
        self._even = 0
        self._ranks.clear()

    def observe(self, compute: RankCompute, now_s: float) -> Sequence[SignalBody]:
        row = self._ranks.setdefault(compute.rank, [0.0, 0.0])
        row[0] += compute.steps
        row[1] += compute.compute_s
        least = self._settings.steps
        if row[0] < least:
            return ()
        if any(steps < least for steps, _ in self._ranks.values()):
            if row[0] < least * self._settings.gone_after:
                return ()
            self._ranks = {rank: known for rank, known in self._ranks.items() if known[0] >= least}
        means = {rank: seconds / steps for rank, (steps, seconds) in self._ranks.items()}
        self._ranks = {rank: [0.0, 0.0] for rank in self._ranks}
        return self._judge(compute.job, means, now_s)

    def _judge(self, job: str, means: dict[int, float], now_s: float) -> Sequence[SignalBody]:
        """A window is complete."""
        settings = self._settings
        slowest = max(means, key=lambda rank: means[rank])
        usual_s = _low_median(means.values())
        others = [mean for rank, mean in means.items() if rank != slowest]
        spread_s = _NORMAL * _low_median(abs(mean - usual_s) for mean in others) if others else 0.0
        is_odd = means[slowest] > max(settings.ratio * usual_s, usual_s + settings.deviations * spread_s)
        if not is_odd or slowest != self._odd:
            self._odd, self._windows = (slowest if is_odd else -1), 0
        self._even = 0 if is_odd and slowest == self._named else self._even + 1
        news: list[SignalBody] = []
        if self._named >= 0 and self._even >= settings.windows:
            news.append(StragglerRecovered(job, self.generation, self._named, self._even))
            self._named = -1
        if not is_odd:
            return news
        self._windows += 1
        is_known = self._named == slowest and now_s < self._named_s + settings.renew_s
        if self._windows < settings.windows or is_known:
            return news
        self._named, self._even, self._named_s = slowest, 0, now_s
        windows, steps = self._windows, settings.steps
        return [*news, Straggler(job, self.generation, slowest, means[slowest], usual_s, len(means), windows, steps)]


class StragglerWatch:
    """The newest generation of each job, of the ranks that report to this sensor."""

    def __init__(self, settings: StragglerSettings | None = None) -> None:
        self._settings = settings or StragglerSettings()
        self._jobs: OrderedDict[str, _WatchedCompute] = OrderedDict()

    def observe(self, computes: Iterable[RankCompute], now_s: float) -> Sequence[SignalBody]:
        """Straggler for a rank that has been the odd one for long enough, StragglerRecovered once it is not any more.
        `now_s`: any monotonic clock."""
        news: list[SignalBody] = []
        for compute in computes:
            job = self._jobs.get(compute.job)
            if job is None:
                if len(self._jobs) >= MAX_JOBS:
                    self._jobs.popitem(last=False)
                job = self._jobs[compute.job] = _WatchedCompute(self._settings)
            self._jobs.move_to_end(compute.job)
            if compute.generation > job.generation:
                job.begin(compute.generation)
            if compute.generation == job.generation:
                news += job.observe(compute, now_s)
        return news

    def keep(self, jobs: Iterable[str]) -> None:
        """Forget all other jobs: they have ended."""
        for name in self._jobs.keys() - set(jobs):
            del self._jobs[name]


def _low_median(values: Iterable[float]) -> float:
    """Of two middle values the lower one: of two ranks, the faster is the usual one."""
    ordered = sorted(values)
    return ordered[(len(ordered) - 1) // 2]
