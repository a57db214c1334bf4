"""Where the ranks that a sensor watches are: each by itself, and those of a host together while all is well. Pure."""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import TypeVar

import msgspec

from flyball.contracts.cluster import Activity, RankStatus
from flyball.contracts.reports.rank_columns import RankProgress, Workers
from services.sensor.detector.job_pace import Alarm, JobPace, LearnedPace
from services.sensor.detector.stances import Stance, stance_of

K = TypeVar("K")


class Rank:
    __slots__ = (
        "activity",
        "activity_s",
        "done_at",
        "done_step",
        "entered_s",
        "first_seen_step",
        "forgiven_s",
        "has_stepped",
        "host_id",
        "idle_s",
        "moved_s",
        "number",
        "pauses",
        "phase",
        "place",
        "seen_s",
        "step",
    )

    def __init__(self, host_id: str, status: RankStatus, moved_s: float) -> None:
        self.host_id = host_id
        self.number = status.rank
        self.phase = status.phase
        self.activity = Activity.UNKNOWN
        self.activity_s = 0.0  # for how long it has been that
        self.place = ""
        self.step = self.first_seen_step = status.step
        self.moved_s = self.entered_s = moved_s
        self.idle_s = 0.0
        self.forgiven_s = 0.0
        self.has_stepped = False
        self.seen_s = moved_s + status.beacon_age_s
        self.pauses = 0  # of the job, at this rank's last step
        self.done_step = -1
        self.done_at = 0.0


class LearnedJob(msgspec.Struct, frozen=True, gc=False):
    """What is known of a job, for the sensor that comes after this one."""

    pace: LearnedPace
    generation: int = -1
    stepped_to: int = -1  # the newest step in that generation; -1: none was made
    alarm: Alarm | None = None  # that holds there

    @property
    def lasting(self) -> tuple[object, ...]:
        """What does not change with every step."""
        return self.pace.lasting, self.generation, self.stepped_to >= 0, self.alarm


class WatchedJob:
    """The ranks of a job's newest generation, and its pace."""

    def __init__(self, pace: JobPace) -> None:
        self.pace = pace
        self.generation = -1
        self.ranks: dict[int, Rank] = {}
        self.changes = 0  # ranks that were dropped, or came to another host
        self.waiting: set[int] = set()  # those that can stall at all in their phase
        self.overdue: set[int] = set()
        self.newest_step = -1
        self.stance = Stance.WORKING
        self.standing: Set[int] = frozenset()  # ranks whose standing counts
        self.stalled: frozenset[int] = frozenset()  # ranks that were told to be, until one of them moves
        self.alarm: Alarm | None = None  # the last of this generation, while it holds
        self._doing: dict[Activity, set[int]] = {}  # of the waiting; those of which nothing is known are left out
        self._places: dict[str, set[int]] = {}  # where the idle ones are
        self._stance_since_s = 0.0
        self._stood: dict[Stance, float] = {}  # since the newest step
        self._stepped_before = (-1, -1)  # generation and newest step that an earlier sensor saw

    @property
    def learned(self) -> LearnedJob:
        has_stepped = any(rank.has_stepped for rank in self.ranks.values())
        return LearnedJob(self.pace.learned, self.generation, self.newest_step if has_stepped else -1, self.alarm)

    def recall(self, learned: LearnedJob) -> None:
        """Go on with what an earlier sensor knew."""
        if not self.pace.recall(learned.pace):
            return
        self._stepped_before = learned.generation, learned.stepped_to
        if learned.generation < self.generation:
            self.pace.begin(learned.alarm)
        elif learned.generation == self.generation and learned.alarm is not None:
            self.alarm, self.stalled = learned.alarm, frozenset(learned.alarm.ranks)
        for rank in self.ranks.values():
            self.see(rank)
        self.changes += 1

    def see(self, rank: Rank) -> None:
        """A rank that is new to this sensor may have made steps."""
        generation, step = self._stepped_before
        rank.has_stepped |= generation == self.generation and 0 <= step <= rank.step

    def begin(self, generation: int) -> None:
        """A new generation starts afresh, with what was learnt of the job."""
        self.pace.begin(self.alarm)
        self.generation = generation
        self.changes += 1
        self.ranks.clear()
        for ranks in (self.waiting, self.overdue, self._doing, self._places, self._stood):
            ranks.clear()
        self.newest_step = -1
        self.stance, self.standing = Stance.WORKING, frozenset()
        self.stalled, self.alarm = frozenset(), None

    def advance(self, step: int, moved_s: float) -> None:
        """A rank has completed this step."""
        if step > self.newest_step:
            before, self.newest_step = self.newest_step, step
            for stance, lasted_s in self._stood.items():
                self.pace.survive(stance, lasted_s)
            self._stood.clear()
            self.pace.advance(before, step, moved_s)

    def note(self, rank: Rank, activity: Activity, place: str, *, can_stall: bool) -> None:
        """What a rank does, of which `can_stall` says whether its phase bounds it at all."""
        number = rank.number
        if can_stall:
            self.waiting.add(number)
        else:
            activity = Activity.UNKNOWN
            self.waiting.discard(number)
            self.overdue.discard(number)
        if activity is not rank.activity or place != rank.place:
            self._unlist(rank)
            rank.activity, rank.place = activity, place
            if activity is not Activity.UNKNOWN:
                self._doing.setdefault(activity, set()).add(number)
            if activity is Activity.IDLE:
                self._places.setdefault(place, set()).add(number)

    def look(self, now_s: float) -> None:
        """See what the ranks do together, after some of them were noted."""
        stance, self.standing = stance_of(self.waiting, self._doing, self._places)
        if stance is not self.stance:
            self.stance, self._stance_since_s = stance, now_s
            self.overdue.clear()

    def stood(self, lasted_s: float, now_s: float) -> None:
        """The ranks have been as they are for so long, as far as one of them shows."""
        lasted_s = min(lasted_s, now_s - self.pace.advanced_s)
        if self.stance is not Stance.WORKING:
            lasted_s = min(lasted_s, self.stance_s(now_s))
        if lasted_s > self._stood.get(self.stance, 0.0):
            self._stood[self.stance] = lasted_s

    def stance_s(self, now_s: float) -> float:
        """For how long the ranks have been as they are."""
        return now_s - self._stance_since_s

    def moved(self, number: int) -> None:
        """A rank went on: if it was told to be stalled, it is not any more."""
        if number in self.stalled:
            self.stalled, self.alarm = frozenset(), None

    def doing(self, activity: Activity) -> Set[int]:
        """The ranks that were seen to do this."""
        return self._doing.get(activity, frozenset())

    def places(self) -> dict[str, set[int]]:
        """Where the idle ranks are."""
        return self._places

    def _unlist(self, rank: Rank) -> None:
        _take_out(self._doing, rank.activity, rank.number)
        _take_out(self._places, rank.place, rank.number)

    def drop(self, number: int, host_id: str) -> None:
        """A host does not speak for a rank any more; another may do by now."""
        rank = self.ranks.get(number)
        if rank is None or rank.host_id != host_id:
            return
        self.changes += 1
        self._unlist(rank)
        del self.ranks[number]
        self.waiting.discard(number)
        self.overdue.discard(number)

    def is_on(self, host_id: str, numbers: Sequence[int]) -> bool:
        """Whether one of these ranks is on this host."""
        found = map(self.ranks.get, numbers)
        return any(rank is not None and rank.host_id == host_id for rank in found)


def _take_out(listed: dict[K, set[int]], key: K, number: int) -> None:
    ranks = listed.get(key)
    if ranks is not None:
        ranks.discard(number)
        if not ranks:
            del listed[key]


class RanksInSteps:
    """The ranks of a host while all are in their steps. What its reports say of them is kept as the columns that came;
    `settle` tells it to each rank, when somebody is about to look at one of them."""

    __slots__ = ("ages_s", "changes", "is_settled", "job", "moved_s", "now_s", "ranks", "steps", "workers")

    def __init__(self, job: WatchedJob, workers: Workers, ranks: Sequence[Rank]) -> None:
        self.job = job
        self.workers = workers
        self.ranks = ranks  # in the order of `workers`
        self.changes = job.changes
        self.steps = tuple(rank.step for rank in ranks)
        self.ages_s = tuple(rank.idle_s for rank in ranks)
        self.moved_s: list[float] | None = [rank.moved_s for rank in ranks]  # None: `ages_s` before `now_s`
        self.now_s = 0.0
        self.is_settled = True

    def follow(self, progress: RankProgress, now_s: float) -> None:
        """They went on, or rest."""
        steps, ages_s = progress.steps, progress.beacon_ages_s
        if steps == self.steps:
            self.moved_s = [
                before_s if age_s >= age_before_s and now_s - age_s >= before_s else now_s - age_s
                for before_s, age_before_s, age_s in zip(self._moved_s(), self.ages_s, ages_s, strict=True)
            ]
        elif min(steps) > max(self.steps):  # each completed one
            self.moved_s = None
        else:
            columns = (self._moved_s(), self.steps, self.ages_s, steps, ages_s, [now_s - age_s for age_s in ages_s])
            self.moved_s = [
                at_s if at_s < before_s or step != step_before or age_s < age_before_s else before_s
                for before_s, step_before, age_before_s, step, age_s, at_s in zip(*columns, strict=True)
            ]
        self.steps, self.ages_s, self.now_s = steps, ages_s, now_s
        self.is_settled = False

    def settle(self) -> None:
        """Bring each rank up to date."""
        if self.is_settled:
            return
        for rank, step, age_s, at_s in zip(self.ranks, self.steps, self.ages_s, self._moved_s(), strict=True):
            rank.step, rank.idle_s, rank.moved_s, rank.seen_s = step, age_s, at_s, self.now_s
        self.is_settled = True

    def _moved_s(self) -> list[float]:
        """When each last moved."""
        return self.moved_s if self.moved_s is not None else [self.now_s - age_s for age_s in self.ages_s]
