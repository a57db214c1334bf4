"""Detects losses that turned bad and stay so, from the losses that a sensor receives. Pure.

A sample counts as bad if it is no finite number, or far above the recent ones: the median plus a multiple of the
median distance from it (MAD), at least twice the median. So noise, warm-up, steps of the learning rate and drift do not
count, and one bad value does not shift what is usual. A bad sample alone is no harm: a spike heals by itself, and is
only recorded. A harm is a loss whose samples stay bad. A script that reports no loss is not watched.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence

import msgspec

from flyball.contracts.reports.signals import SignalBody
from flyball.contracts.reports.training_health import LossDiverged, LossRecovered, RankLoss, loss_value

MAX_JOBS = 1_000  # the one with the oldest sample makes room
_NORMAL = 1.4826  # times the MAD is the standard deviation of a normal distribution


class LossSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """When a loss counts as diverged. All numbers are samples: reports carry the newest loss, not that of each step."""

    window: int = 64  # usual samples that later ones are compared with
    least: int = 16  # with fewer, only values that are no numbers are bad
    factor: float = 10.0  # of the MAD (scaled to a standard deviation) above the median
    least_rise: float = 1.0  # of the median's size
    least_share: float = 0.01  # of the highest usual loss so far: one that has come to nothing may rise a little
    not_finite: int = 3  # in a row: a gradient scaler skips a step or two by itself
    high: int = 16  # after these, the median of them decides
    healed: int = 3  # usual samples in a row


# A loss is computed before its step's update, so it vouches for the state of the step before; and what went bad in
# another rank alone shows in this one's loss a step later.
_UNVOUCHED_STEPS = 2


class _Usual(msgspec.Struct, frozen=True):
    """What recent samples are like."""

    median: float
    mad: float
    limit: float  # higher ones are bad; inf: too little is known


class _WatchedLoss:
    """The loss of one rank of a job, the lowest that this sensor receives, over generations."""

    def __init__(self, settings: LossSettings) -> None:
        self.generation = self.rank = -1
        self.has_diverged = False  # said so, and it has not recovered
        self._settings = settings
        self._usual: deque[tuple[int, float]] = deque(maxlen=settings.window)  # (step, loss), oldest first
        self._highest = 0.0  # usual loss
        self._step = -1  # newest seen
        self._bad: list[tuple[int, float]] = []  # since the first bad sample that nothing healed; may have usual ones
        self._judged: _Usual | None = None  # what these are compared with
        self._well = 0  # usual samples in a row, after a bad one
        self._unrecorded = settings.window  # samples since a spike was last recorded

    def begin(self, generation: int, rank: int, step: int) -> None:
        """The newest loss of a generation, or of a lower rank, is that of `step`. Later ones belong to another
        history."""
        self._usual = deque((known for known in self._usual if known[0] < step), maxlen=self._settings.window)
        self.generation, self.rank, self._step = generation, rank, -1
        self.has_diverged = False
        self._clear()

    @property
    def clean_step(self) -> int:
        """The newest step whose state the usual losses before the bad ones vouch for, -1 if there is none."""
        return max(-1, self._usual[-1][0] - _UNVOUCHED_STEPS) if self._usual else -1

    @property
    def is_suspect(self) -> bool:
        return bool(self._bad)

    def observe(self, loss: RankLoss) -> SignalBody | None:
        """Take in a sample of this generation and rank."""
        value = float(loss.value)
        if loss.step <= self._step:
            return None  # repeated
        self._step = loss.step
        self._unrecorded += 1
        usual = self._judged or self._usual_now(value)
        is_bad = not math.isfinite(value) or value > usual.limit
        if not self._bad and not is_bad:
            self._usual.append((loss.step, value))
            self._highest = max(self._highest, abs(value))
            return None
        self._judged = usual
        self._bad.append((loss.step, value))
        self._well = 0 if is_bad else self._well + 1
        if self._well >= self._settings.healed:
            return self._heal(loss)
        if self.has_diverged or not self._is_decided():
            del self._bad[1 : -self._settings.high]  # the first one stays: it is the harm's
            return None
        if not self._stays_bad(usual):
            return self._heal(loss)
        self.has_diverged = True
        return self._diverged(loss, usual)

    def _usual_now(self, sample: float) -> _Usual:
        """What `sample` is compared with. The MAD is left out if the median alone shows that the sample is usual."""
        settings, values = self._settings, [value for _, value in self._usual]
        if len(values) < settings.least:
            return _Usual(math.nan, math.nan, math.inf)
        middle = _median(values)
        limit = middle + max(settings.least_rise * abs(middle), settings.least_share * self._highest)
        if sample <= limit:
            return _Usual(middle, math.nan, limit)
        mad = _median(abs(value - middle) for value in values)
        return _Usual(middle, mad, max(limit, middle + settings.factor * _NORMAL * mad))

    def _is_decided(self) -> bool:
        return self._is_no_number() or len(self._bad) >= self._settings.high

    def _is_no_number(self) -> bool:
        newest = [value for _, value in self._bad[-self._settings.not_finite :]]
        return len(newest) >= self._settings.not_finite and not any(map(math.isfinite, newest))

    def _stays_bad(self, usual: _Usual) -> bool:
        values = (value if math.isfinite(value) else math.inf for _, value in self._bad)
        return self._is_no_number() or _median(values) > usual.limit

    def _heal(self, loss: RankLoss) -> SignalBody | None:
        """The loss is as before. Spikes are recorded now and then, not each of many."""
        is_news = self.has_diverged or self._unrecorded >= self._settings.window
        first_step, _ = self._bad[0]
        highest = max((value for _, value in self._bad if math.isfinite(value)), default=math.nan)
        self._usual.extend(self._bad[-self._well :] if self._well else ())
        self.has_diverged = False
        self._clear()
        if not is_news:
            return None
        self._unrecorded = 0
        return LossRecovered(
            loss.job, loss.generation, loss.rank, loss.step, loss.value, first_step, loss_value(highest)
        )

    def _diverged(self, loss: RankLoss, usual: _Usual) -> LossDiverged:
        first_step, _ = self._bad[0]
        return LossDiverged(
            job=loss.job,
            generation=loss.generation,
            rank=loss.rank,
            clean_step=self.clean_step,
            first_step=first_step,
            step=loss.step,
            value=loss.value,
            usual=loss_value(usual.median),
            spread=loss_value(usual.mad),
            limit=loss_value(usual.limit),
            samples=len(self._bad),
        )

    def _clear(self) -> None:
        self._bad, self._judged, self._well = [], None, 0


class LossWatch:
    """The newest generation of each job; losses of older ones do not count."""

    def __init__(self, settings: LossSettings | None = None) -> None:
        self._settings = settings or LossSettings()
        self._jobs: OrderedDict[str, _WatchedLoss] = OrderedDict()

    def observe(self, losses: Iterable[RankLoss]) -> Sequence[SignalBody]:
        """LossDiverged for a loss that turned bad and stays so, once per harm; LossRecovered for one that is usual
        again."""
        news = []
        for loss in losses:
            watched = self._watched(loss)
            if watched is not None and (found := watched.observe(loss)) is not None:
                news.append(found)
        return news

    def clean_steps(self, jobs: Iterable[str]) -> dict[str, int]:
        """Of these jobs, those whose newest losses are bad, with the newest step that is good for sure; -1 for none."""
        watched = ((name, self._jobs.get(name)) for name in jobs)
        return {name: job.clean_step for name, job in watched if job is not None and job.is_suspect}

    def keep(self, jobs: Iterable[str]) -> None:
        """Forget all other jobs: they have ended."""
        for name in self._jobs.keys() - set(jobs):
            del self._jobs[name]

    def _watched(self, loss: RankLoss) -> _WatchedLoss | None:
        """The job, if this loss counts: it is of the newest generation, and of the lowest rank."""
        job = self._jobs.get(loss.job)
        if job is None:
            if len(self._jobs) >= MAX_JOBS:
                self._jobs.popitem(last=False)
            job = self._jobs[loss.job] = _WatchedLoss(self._settings)
        self._jobs.move_to_end(loss.job)
        if loss.generation > job.generation or (loss.generation == job.generation and loss.rank < job.rank):
            job.begin(loss.generation, loss.rank, loss.step)
        return job if (loss.generation, loss.rank) == (job.generation, job.rank) else None


def _median(values: Iterable[float]) -> float:
    ordered = sorted(values)
    return ordered[len(ordered) // 2]
