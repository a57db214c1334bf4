"""Sums up the steps that ranks report: one summary per job and interval, however many ranks there are. Pure.

A summary has the time at which the last rank that reports to this sensor completed each step, and the step that all of
them have completed. A step that slower ranks complete later is summed up again, with the later time.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import msgspec

from flyball.contracts.reports.rank_columns import CompletedSteps
from flyball.contracts.reports.signals import RankMarks
from flyball.contracts.reports.training_health import LossValue, RankLoss

INTERVAL_S = 1.0  # from a step to its summary, at most; without delay once all ranks have completed it
MAX_STEPS = 10_000  # waiting per generation; the oldest are dropped
MAX_GENERATIONS = 2_000  # the one with the oldest report makes room


class StepSummary(msgspec.Struct, frozen=True):
    """Steps of one generation: completed_at[i] is when the last rank so far completed first_step + i. Without steps,
    the summary is about waits only."""

    job: str
    generation: int
    at: float  # wall clock, of its newest event
    first_step: int
    completed_at: tuple[float, ...]
    slowest_step: int  # completed by all ranks that report steps to this sensor
    ranks: int  # how many of those there are
    sensor: str
    save_blocked_s: float = 0.0  # total of the rank that waited longest in save
    data_wait_s: float = 0.0  # likewise, for data
    loss: LossValue | None = None  # the newest, if it is new
    loss_step: int = -1
    loss_rank: int = -1


class _HostSteps:
    """The newest step of each rank of a generation on one host; one number while it is the same for all."""

    __slots__ = ("last", "newest", "ranks")

    def __init__(self, ranks: tuple[int, ...], last: int) -> None:
        self.ranks = ranks  # all known ranks, while `newest` is None
        self.last = last
        self.newest: dict[int, int] | None = None  # rank -> newest step, while they differ

    def apart(self) -> dict[int, int]:
        """rank -> newest step."""
        if self.newest is None:
            self.newest = dict.fromkeys(self.ranks, self.last)
        return self.newest

    def join(self, ranks: tuple[int, ...], last: int) -> None:
        """These ranks completed `last`. Keep one number again if these are all ranks, and none is further."""
        newest = self.apart()
        if len(newest) == len(ranks) and all(step == last for step in newest.values()):
            self.ranks, self.last, self.newest = ranks, last, None

    def slowest(self) -> int:
        """The step that all of them have completed."""
        return self.last if self.newest is None else min(self.newest.values())

    def count(self, step: int | None = None) -> int:
        """How many ranks there are, or how many have this as their newest step."""
        if self.newest is None:
            return len(self.ranks) if step in (None, self.last) else 0
        return len(self.newest) if step is None else sum(newest == step for newest in self.newest.values())


class _GenerationSteps:
    __slots__ = (
        "at",
        "at_front",
        "blocked_s",
        "data_wait_s",
        "front",
        "hosts",
        "key",
        "loss",
        "loss_is_new",
        "moments",
        "ranks",
        "times",
        "waiting_since_s",
    )

    def __init__(self, key: tuple[str, int]) -> None:
        self.key = key
        self.hosts: dict[str, _HostSteps] = {}
        self.ranks = 0  # on these hosts
        self.front = -1  # the newest step of any rank
        self.at_front = 0  # ranks that completed it
        self.times: dict[int, float] = {}  # step -> when the last rank completed it, since the last summary
        self.moments: dict[int, int] = {}  # rank -> how many moments in its marks are known
        self.blocked_s = 0.0
        self.data_wait_s = 0.0
        self.loss: RankLoss | None = None  # of the lowest rank that reports one
        self.loss_is_new = False
        self.at = 0.0
        self.waiting_since_s: float | None = None

    def advance(self, step: int, ranks: int) -> None:
        """This many more ranks have `step` as their newest now."""
        if step > self.front:
            self.front, self.at_front = step, ranks
        elif step == self.front:
            self.at_front += ranks


class StepEventLog:
    """`now_s` is a monotonic clock. Not thread-safe."""

    def __init__(self, sensor: str, interval_s: float = INTERVAL_S) -> None:
        self._sensor = sensor
        self._interval_s = interval_s
        self._generations: OrderedDict[tuple[str, int], _GenerationSteps] = OrderedDict()
        self._waiting: set[tuple[str, int]] = set()
        self._on_host: dict[str, tuple[tuple[str, int], ...]] = {}  # generations with steps that came from a host

    def observe(self, host_id: str, completed: Sequence[CompletedSteps], now_s: float) -> None:
        """Take in steps that ranks of a host completed."""
        for steps in completed:
            generation = self._generation((steps.job, steps.generation))
            self._add(generation, host_id, steps)
            if generation.waiting_since_s is None:
                self._wait(generation, now_s)

    def observe_losses(self, losses: Sequence[RankLoss], reported_at: float, now_s: float) -> None:
        """Take in losses. The lowest rank's counts for its generation. `reported_at`: wall clock of the report."""
        for loss in losses:
            generation = self._generation((loss.job, loss.generation))
            known = generation.loss
            if known is None or loss.rank < known.rank or (loss.rank == known.rank and loss != known):
                generation.loss, generation.loss_is_new = loss, True
                generation.at = max(generation.at, reported_at)
                self._wait(generation, now_s)

    def knows(self, host_id: str, job: str, generation: int) -> bool:
        """Whether ranks of this generation on this host have reported steps."""
        return (job, generation) in self._on_host.get(host_id, ())

    def knows_ranks(self, host_id: str, steps: CompletedSteps) -> bool:
        """Whether all of these ranks, on this host, have reported steps before."""
        if not self.knows(host_id, steps.job, steps.generation):
            return False
        known = self._generations[steps.job, steps.generation].hosts[host_id]
        return set(steps.ranks).issubset(known.ranks if known.newest is None else known.newest)

    def new_marks(self, marks: Sequence[RankMarks], reported_at: float, now_s: float) -> tuple[RankMarks, ...]:
        """The marks that tell of a moment that is new. Of the others only the time counts that saves blocked, and that
        is summed up. `reported_at`: the wall clock of the report that has them."""
        new = []
        for mark in marks:
            generation = self._generation((mark.job, mark.generation))
            moments = sum(
                at > 0.0
                for at in (
                    mark.spawned_at,
                    mark.attached_at,
                    mark.restore_began_at,
                    mark.restored_at,
                    mark.first_step_at,
                )
            )
            if moments > generation.moments.get(mark.rank, -1):
                generation.moments[mark.rank] = moments
                new.append(mark)
            if mark.save_blocked_s > generation.blocked_s or mark.data_wait_s > generation.data_wait_s:
                generation.blocked_s = max(generation.blocked_s, mark.save_blocked_s)
                generation.data_wait_s = max(generation.data_wait_s, mark.data_wait_s)
                generation.at = max(generation.at, reported_at)
                self._wait(generation, now_s)
        return tuple(new)

    def forget_marks(self, marks: Sequence[RankMarks]) -> None:
        """These could not be queued, and will come again."""
        for mark in marks:
            if (generation := self._generations.get((mark.job, mark.generation))) is not None:
                generation.moments.pop(mark.rank, None)

    def take(self, now_s: float, *, everything: bool = False) -> list[StepSummary]:
        """Take out the summaries that are due to be stored."""
        summaries: list[StepSummary] = []
        for key in sorted(self._waiting):
            generation = self._generations[key]
            complete = bool(generation.times) and generation.at_front == generation.ranks
            since_s = generation.waiting_since_s
            if complete or everything or since_s is None or now_s - since_s >= self._interval_s:
                summaries += self._summaries(generation)
                self._waiting.discard(key)
        return summaries

    def forget(self, host_id: str) -> None:
        """This host reports to another sensor from now on."""
        for key in self._on_host.pop(host_id, ()):
            generation = self._generations[key]
            gone = generation.hosts.pop(host_id)
            generation.ranks -= gone.count()
            generation.at_front -= gone.count(generation.front)

    def _wait(self, generation: _GenerationSteps, now_s: float) -> None:
        if generation.waiting_since_s is None:
            generation.waiting_since_s = now_s
            self._waiting.add(generation.key)

    def _generation(self, key: tuple[str, int]) -> _GenerationSteps:
        found = self._generations.get(key)
        if found is None:
            found = self._generations[key] = _GenerationSteps(key)
            if len(self._generations) > MAX_GENERATIONS:
                key, oldest = self._generations.popitem(last=False)
                self._waiting.discard(key)
                for host_id in oldest.hosts:
                    others = tuple(other for other in self._on_host.pop(host_id) if other != key)
                    if others:
                        self._on_host[host_id] = others
        else:
            self._generations.move_to_end(key)
        return found

    def _add(self, generation: _GenerationSteps, host_id: str, steps: CompletedSteps) -> None:
        times, step, at = generation.times, steps.first_step, 0.0
        for row in steps.completed_at:
            at = max(row)
            if at > times.get(step, 0.0):
                times[step] = at
            step += 1
        last = step - 1
        generation.at = max(generation.at, at)
        if len(times) > MAX_STEPS:
            for oldest in sorted(times)[:-MAX_STEPS]:
                del times[oldest]
        host, ranks = generation.hosts.get(host_id), steps.ranks
        if host is None:
            generation.hosts[host_id] = _HostSteps(ranks, last)
            generation.ranks += len(ranks)
            generation.advance(last, len(ranks))
            self._on_host[host_id] = (*self._on_host.get(host_id, ()), generation.key)
        elif host.newest is None and host.ranks == ranks:
            if last > host.last:  # otherwise a repeated or late report
                host.last = last
                generation.advance(last, len(ranks))
        else:
            newest = host.apart()
            for rank in ranks:
                before = newest.get(rank)
                if before is None or last > before:
                    newest[rank] = last
                    generation.advance(last, 1)
                    generation.ranks += before is None
            host.join(ranks, last)

    def _summaries(self, generation: _GenerationSteps) -> list[StepSummary]:
        runs: list[tuple[int, list[float]]] = []
        for step in sorted(generation.times):
            if runs and step == runs[-1][0] + len(runs[-1][1]):
                runs[-1][1].append(generation.times[step])
            else:
                runs.append((step, [generation.times[step]]))
        generation.times = {}
        generation.waiting_since_s = None
        slowest = min((host.slowest() for host in generation.hosts.values()), default=-1)
        summaries = [
            StepSummary(
                job=generation.key[0],
                generation=generation.key[1],
                at=generation.at,
                first_step=first,
                completed_at=tuple(times),
                slowest_step=slowest,
                ranks=generation.ranks,
                sensor=self._sensor,
                save_blocked_s=generation.blocked_s,
                data_wait_s=generation.data_wait_s,
            )
            for first, times in runs or [(-1, [])]
        ]
        loss = generation.loss
        if loss is not None and generation.loss_is_new:
            generation.loss_is_new = False
            news = {"loss": loss.value, "loss_step": loss.step, "loss_rank": loss.rank}
            summaries[-1] = msgspec.structs.replace(summaries[-1], **news)
        return summaries
