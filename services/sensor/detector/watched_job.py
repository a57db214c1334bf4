"""One job as a sensor sees it: where its ranks are, what they do together, and which of them are overdue. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from math import inf
from typing import TypeVar

import msgspec

from flyball.contracts.cluster import Activity, Phase
from flyball.contracts.reports.rank_columns import CompletedSteps, RankProgress, phases_of
from flyball.contracts.reports.rank_stands import RankStand
from flyball.contracts.reports.signals import FalseAlarm, RankStalled, SignalBody
from services.sensor.detector.job_pace import Alarm, JobPace, LearnedPace
from services.sensor.detector.patience import StallSettings
from services.sensor.detector.shared_stands import STANDING, Elsewhere, JobStand, stand_of
from services.sensor.detector.stances import Stance, seen_in, stance_of
from services.sensor.detector.watched_ranks import APART_FROM_STEPS, RankEntries, WatchedRanks

K = TypeVar("K")

_UNSEEN = (Activity.UNKNOWN, "")
MAX_PLACE_CHARS = 400
_BEHIND_STEPS = 2  # a lone rank that far behind the others waits for nobody


class LearnedJob(msgspec.Struct, frozen=True, gc=False):
    """Facts about a job that the next sensor takes over."""

    pace: LearnedPace
    generation: int = -1
    stepped_to: int = -1  # the newest step of that generation; -1: none was completed
    alarm: Alarm | None = None  # raised in that generation, and not over

    @property
    def lasting(self) -> tuple[object, ...]:
        """The part that does not change with every step."""
        return self.pace.lasting, self.generation, self.stepped_to >= 0, self.alarm


class WatchedJob:
    """The ranks of a job's newest generation, by host, and the job's pace."""

    def __init__(self, name: str, settings: StallSettings) -> None:
        self.name = name
        self.pace = JobPace(settings)
        self.generation = -1
        self.hosts: dict[str, WatchedRanks] = {}
        self.homes: dict[int, WatchedRanks] = {}  # rank -> the columns that it is in
        self.newest_step = -1
        self.seen_s = -inf  # when a host last reported it
        self.alarm: Alarm | None = None  # the last of this generation, until one of its ranks moves
        self._settings = settings
        self._alarmed: frozenset[int] = frozenset()  # its ranks
        self._waiting: set[int] = set()  # ranks in phases in which they can stall
        self._overdue: set[int] = set()
        self._doing: dict[Activity, set[int]] = {}  # of the waiting ranks, without those of which nothing is known
        self._places: dict[str, set[int]] = {}  # the idle ranks by system call
        self._stands: dict[int, RankStand] = {}  # of the waiting ranks, as far as it is known
        self._place = ""  # where in the script they stand, all of them; '': not known
        self._stance = Stance.WORKING
        self._standing: Set[int] = frozenset()  # the ranks that can be overdue in this stance
        self._stance_since_s = 0.0
        self._is_stance_old = False
        self._paused: dict[Stance, float] = {}  # the longest pause since the newest step
        self._unseen: set[str] = set()  # hosts with ranks of this generation that do not report to this sensor
        self._told: set[str] = set()  # names in `hosts` that stand for what other sensors tell
        self._covered: Set[str] = frozenset()  # unseen hosts of whose ranks other sensors tell
        self._stepped_before = (-1, -1)  # the generation and its newest step that an earlier sensor saw

    # --- across generations and sensors -------------------------------------------------------------------------------

    @property
    def learned(self) -> LearnedJob:
        has_stepped = any(any(ranks.has_stepped) for ranks in self.hosts.values())
        return LearnedJob(self.pace.learned, self.generation, self.newest_step if has_stepped else -1, self.alarm)

    def recall(self, learned: LearnedJob) -> None:
        """Continue with what an earlier sensor knew, unless this one has seen steps itself."""
        if not self.pace.recall(learned.pace):
            return
        self._stepped_before = learned.generation, learned.stepped_to
        if learned.generation < self.generation:
            self.pace.begin(learned.alarm)
        elif learned.generation == self.generation and learned.alarm is not None:
            self._hold(learned.alarm)
        for ranks in self.hosts.values():
            ranks.note_stepped(map(self._stepped_earlier, ranks.progress.steps))

    def begin(self, generation: int) -> None:
        """Start afresh with a new generation; the pace of the job stays."""
        self.pace.begin(self.alarm)
        self.generation, self.newest_step = generation, -1
        self._told.clear()
        for known in (self.hosts, self.homes, self._waiting, self._overdue, self._doing, self._places, self._paused):
            known.clear()
        self._stands.clear()
        self._stance, self._standing = Stance.WORKING, frozenset()
        self._hold(None)

    # --- reports ------------------------------------------------------------------------------------------------------

    def observe(  # noqa: PLR0917 - called for every report
        self,
        host_id: str,
        numbers: Sequence[int],
        progress: RankProgress,
        completed: Sequence[CompletedSteps],
        now_s: float,
        lagged_s: float,
    ) -> Sequence[SignalBody]:
        """Take in where the ranks `numbers` on a host are, and the steps in its report. `lagged_s`: how long its daemon
        was held up. Returns whether an alarm was false, and whether the job has stalled.

        Columns that are as in the last report are compared as a whole, and cost next to nothing."""
        ranks = self.hosts.get(host_id)
        is_new = ranks is None or (ranks.numbers is not numbers and ranks.numbers != numbers)
        if ranks is None or is_new:
            ranks = self._arrange(host_id, numbers, progress, now_s)
        before, steps, ages_s = ranks.progress, progress.steps, progress.beacon_ages_s
        changes_phases = is_new or progress.phases != before.phases
        if lagged_s or self._alarmed or ranks.are_forgiven:
            self._note_moves(ranks, progress, lagged_s)
        if not ranks.are_all_stepped:
            self._time_first_steps(ranks, progress, completed, now_s)
        if changes_phases:
            self._time_phases(ranks, progress, now_s)
        ranks.progress, self.seen_s = progress, now_s
        if (
            changes_phases
            or progress.activities != before.activities
            or progress.places != before.places
            or progress.stands != before.stands
        ):
            self._count(ranks)
        if lagged_s or ranks.are_apart:
            self.pace.pauses += 1
        if max(steps) > self.newest_step:
            for step, age_s in zip(steps, ages_s, strict=True):
                if step > self.newest_step:
                    self._advance(step, now_s - age_s)
        news = self._take_false_alarm() if self.pace.disproved is not None else ()
        if self._is_stance_old:
            self._look(now_s)
        if max(ages_s) > self.pace.never_overdue_s:
            self._judge(ranks, now_s)
        elif self._overdue:
            self._overdue.difference_update(numbers)
        return news if not self._overdue or self.alarm is not None else (*news, *self._raise_alarm())

    def drop(self, host_id: str) -> None:
        """This host does not report ranks of the job any more."""
        ranks = self.hosts.pop(host_id, None)
        if ranks is not None:
            for number, doing in zip(ranks.numbers, ranks.doing, strict=True):
                self._forget(number, doing)

    # --- what other sensors tell -------------------------------------------------------------------------------------

    def stand(self) -> JobStand | None:
        """What to tell other sensors of this one's ranks: None unless some are elsewhere, and none of these works."""
        standing = sum(len(self._doing.get(activity, ())) for activity in STANDING)
        if not self._unseen or not self._waiting or standing < len(self._waiting):
            return None
        return stand_of(self.name, self.generation, (r for name, r in self.hosts.items() if name not in self._told))

    @property
    def has_unseen(self) -> bool:
        """Whether some of its hosts do not report to this sensor."""
        return bool(self._unseen)

    @property
    def has_told(self) -> bool:
        """Whether other sensors told of its ranks the last time."""
        return bool(self._told)

    def hear(self, told: Mapping[str, Elsewhere], covered: Set[str], now_s: float) -> Sequence[SignalBody]:
        """Take in the ranks of which other sensors tell, by a name for each sensor: all that stand still elsewhere.
        `covered`: the unseen hosts whose ranks are among them."""
        news: list[SignalBody] = []
        for name in self._told - told.keys():
            self._leave(name)
        for name, ranks in told.items():
            known = self.hosts.get(name)
            if known is not None and (known.numbers, known.progress.phases) != (ranks.numbers, ranks.progress.phases):
                self._leave(name)  # begin anew: how long they were in a phase is not known here
            self._told.add(name)
            columns = self.hosts.get(name) or self._arrange(name, ranks.numbers, ranks.progress, now_s)
            columns.note_stepped(ranks.has_stepped)
            self._is_stance_old |= covered != self._covered
            self._covered = covered
            news += self.observe(name, columns.numbers, ranks.progress, (), now_s, 0.0)
        if not told:
            self._is_stance_old |= bool(self._covered)
            self._covered = frozenset()
        return news

    def _leave(self, name: str) -> None:
        """Another sensor tells of these ranks no more: some go on."""
        ranks = self.hosts.get(name)
        if ranks is not None and not self._alarmed.isdisjoint(ranks.numbers):
            self._hold(None)
        self._told.discard(name)
        self.drop(name)

    # --- where its hosts report --------------------------------------------------------------------------------------

    def miss(self, hosts: set[str]) -> None:
        """These hosts of the present generation, and no others, do not report to this sensor."""
        self._unseen, self._is_stance_old = hosts, True

    def miss_too(self, host_id: str) -> None:
        """This host reports to this sensor no more."""
        self._unseen.add(host_id)
        self._is_stance_old = True

    def see(self, host_id: str) -> None:
        """This host reports to this sensor."""
        self._is_stance_old |= host_id in self._unseen
        self._unseen.discard(host_id)

    # --- one report ---------------------------------------------------------------------------------------------------

    def _arrange(self, host_id: str, numbers: Sequence[int], progress: RankProgress, now_s: float) -> WatchedRanks:
        """Make the columns of a host that reports other ranks than before. A rank that another host reported until now
        keeps its history."""
        homes = {home.host_id: home for number in numbers if (home := self.homes.get(number)) is not None}
        if (own := self.hosts.get(host_id)) is not None:
            homes[host_id] = own
        known: dict[int, RankEntries] = {}
        for home in homes.values():
            rows = home.rows()
            known.update(rows)
            left = tuple(number for number in rows if number not in numbers)
            if home is own:
                for number in left:
                    self._forget(number, rows[number].doing)
            elif left:
                self._put(WatchedRanks(home.host_id, left, [rows[number] for number in left], home.seen_s))
            else:
                del self.hosts[home.host_id]
        columns = (numbers, phases_of(progress), progress.steps, progress.beacon_ages_s)
        for number, phase, step, age_s in zip(*columns, strict=True):
            if number not in known:
                moved_s, has_stepped = now_s - age_s, self._stepped_earlier(step)
                known[number] = RankEntries(phase, step, 0.0, moved_s, moved_s, step, has_stepped, 0.0, _UNSEEN)
        ranks = WatchedRanks(host_id, numbers, [known[number] for number in numbers], own.seen_s if own else now_s)
        self._put(ranks)
        return ranks

    def _put(self, ranks: WatchedRanks) -> None:
        self.hosts[ranks.host_id] = ranks
        self.homes.update(dict.fromkeys(ranks.numbers, ranks))

    def _forget(self, number: int, doing: tuple[Activity, str]) -> None:
        self._uncount(number, doing)
        del self.homes[number]
        self._stands.pop(number, None)
        self._waiting.discard(number)
        self._overdue.discard(number)
        self.pace.forget(number)
        self._is_stance_old = True

    def _stepped_earlier(self, step: int) -> bool:
        """Whether a rank at this step is known to have completed one in this generation, from an earlier sensor."""
        generation, stepped_to = self._stepped_before
        return generation == self.generation and 0 <= stepped_to <= step

    def _note_moves(self, ranks: WatchedRanks, progress: RankProgress, lagged_s: float) -> None:
        """See whether the job goes on after an alarm, and which ranks need no forgiveness any more."""
        has_moved = ranks.moved(progress)
        if any(moved and number in self._alarmed for number, moved in zip(ranks.numbers, has_moved, strict=True)):
            self._hold(None)
        ranks.forgive(lagged_s, has_moved)

    def _time_first_steps(
        self, ranks: WatchedRanks, progress: RankProgress, completed: Sequence[CompletedSteps], now_s: float
    ) -> None:
        """Learn how long ranks take until their first step, from those that have completed it since the last report."""
        seen = {
            number
            for steps in completed
            if steps.job == self.name and steps.generation == self.generation
            for number in steps.ranks
        }
        has_moved, rows = ranks.moved(progress), ranks.rows()
        columns = zip(progress.steps, progress.beacon_ages_s, has_moved, strict=True)
        for place, (step, age_s, moved) in enumerate(columns):
            number, moved_s = ranks.numbers[place], now_s - age_s
            row = rows[number]
            if step > row.first_step and not row.has_stepped:
                seen.add(number)
                if row.phase in (Phase.STEP, Phase.STARTING):  # scripts that never restore start until their first step
                    took_s = max(moved_s - row.moved_s, row.age_s)  # `now_s` leaves out how late a sensor was
                else:
                    took_s = moved_s - ranks.seen_s
                self.pace.stepped_first(step, took_s)
            # Of several reports of one move, the one that came with the least delay places it best: at the earliest.
            ranks.moved_s[place] = moved_s if moved else min(moved_s, row.moved_s)
        ranks.note_stepped(number in seen for number in ranks.numbers)
        ranks.seen_s = now_s

    def _time_phases(self, ranks: WatchedRanks, progress: RankProgress, now_s: float) -> None:
        """Learn how long ranks stay in the phases that they have left."""
        phases = zip(phases_of(ranks.progress), phases_of(progress), progress.beacon_ages_s, strict=True)
        for place, (before, phase, age_s) in enumerate(phases):
            if phase is not before:
                moved_s = now_s - age_s
                self.pace.stayed(before, max(0.0, moved_s - ranks.entered_s[place]))
                ranks.entered_s[place] = moved_s
            if phase is not Phase.STARTING:
                self.pace.attach()
        ranks.are_apart = not APART_FROM_STEPS.isdisjoint(progress.phases)

    def _count(self, ranks: WatchedRanks) -> None:
        """Count these ranks among those that wait, by what each does."""
        progress, numbers = ranks.progress, ranks.numbers
        activities = progress.activities or (Activity.UNKNOWN,) * len(numbers)
        places = progress.places or ("",) * len(numbers)
        stands = {stand.rank: stand for stand in progress.stands}
        for at, (number, phase) in enumerate(zip(numbers, phases_of(progress), strict=True)):
            activity, place = activities[at], places[at]
            if phase in self._settings.phases:
                self._waiting.add(number)
            else:
                activity = Activity.UNKNOWN
                self._waiting.discard(number)
                self._overdue.discard(number)
            if number in stands:
                self._stands[number] = stands[number]
            else:
                self._stands.pop(number, None)
            if (activity, place) != ranks.doing[at]:
                self._uncount(number, ranks.doing[at])
                ranks.doing[at] = (activity, place)
                if activity is not Activity.UNKNOWN:
                    self._doing.setdefault(activity, set()).add(number)
                if activity is Activity.IDLE:
                    self._places.setdefault(place, set()).add(number)
        self._is_stance_old = True

    def _uncount(self, number: int, doing: tuple[Activity, str]) -> None:
        activity, place = doing
        _take_out(self._doing, activity, number)
        _take_out(self._places, place, number)

    def _advance(self, step: int, moved_s: float) -> None:
        """A rank has completed this step."""
        if step > self.newest_step:
            before, self.newest_step = self.newest_step, step
            for stance, lasted_s in self._paused.items():
                self.pace.survive(stance, lasted_s)
            self._paused.clear()
            self.pace.advance(before, step, moved_s)

    # --- what they do together ----------------------------------------------------------------------------------------

    def _look(self, now_s: float) -> None:
        self._is_stance_old = False
        sees_all = self._unseen <= self._covered
        stance, self._standing = stance_of(self._waiting, self._doing, self._places, self._stands, sees_all=sees_all)
        places = {stand.caller or stand.place for stand in self._stands.values()}
        self._place = "; ".join(sorted(places))[:MAX_PLACE_CHARS]
        if stance is not self._stance:
            self._stance, self._stance_since_s = stance, now_s
            self._overdue.clear()

    def _judge(self, ranks: WatchedRanks, now_s: float) -> None:
        """See which of these ranks are overdue."""
        for place, (number, reported_s) in enumerate(zip(ranks.numbers, ranks.progress.beacon_ages_s, strict=True)):
            age_s = reported_s - ranks.forgiven_s[place]
            is_judged = age_s > self.pace.never_overdue_s and number in self._waiting and number in self._standing
            if is_judged and self._is_overdue(ranks, place, age_s, now_s):
                self._overdue.add(number)
            else:
                self._overdue.discard(number)

    def _is_overdue(self, ranks: WatchedRanks, place: int, age_s: float, now_s: float) -> bool:
        stance, pace, activities_s = self._stance, self.pace, ranks.progress.activities_s
        activity_s = activities_s[place] if activities_s else 0.0
        stance_s = now_s - self._stance_since_s
        if stance in (Stance.WORKING, Stance.DEAD) or (
            pace.has_attached and pace.hang_timeout_s and stance is not Stance.FROZEN
        ):
            stood_s = age_s  # whatever it did, it completed no step
        elif stance is Stance.FROZEN:
            # Daemons look at what a rank does from a quarter of the time on, and some report it later than others.
            stood_s = min(age_s, 2.0 * activity_s, 2.0 * stance_s)
        else:
            stood_s = min(age_s, activity_s, stance_s if stance is Stance.STUCK else age_s)
        phase, has_stepped = phases_of(ranks.progress)[place], ranks.has_stepped[place]
        if has_stepped:  # a start has deadlines of its own, and says nothing of pauses between steps
            paused_s = min(stood_s, now_s - pace.advanced_s)
            if stance is not Stance.WORKING:
                paused_s = min(paused_s, stance_s)
            if paused_s > self._paused.get(stance, 0.0):
                self._paused[stance] = paused_s
        return stood_s > pace.deadline_s(stance, phase, has_stepped=has_stepped, place=self._place)

    def _take_false_alarm(self) -> Sequence[SignalBody]:
        """Return the false alarm of an earlier generation that this pause revealed. Each is returned once."""
        pause, self.pace.disproved = self.pace.disproved, None
        if pause is None:
            return ()
        found = FalseAlarm(
            job=self.name,
            generation=self.generation,
            stalled_generation=pause.alarm.generation,
            ranks=pause.alarm.ranks,
            step=pause.alarm.step,
            paused_s=pause.paused_s,
            patience=self.pace.patience,
        )
        return (found,)

    def _raise_alarm(self) -> Sequence[SignalBody]:
        numbers = self._stalled_ranks()
        if not numbers or self.homes[numbers[0]].host_id in self._told:  # their own sensor says it
            return ()
        stance, first = self._stance, self.homes[numbers[0]].rows()[numbers[0]]
        bounds = self.pace.bounds(stance, first.phase, has_stepped=first.has_stepped, place=self._place)
        deadline_s, limit = max(bounds)
        self._hold(Alarm(self.generation, numbers, first.step, first.age_s, stance, self._place))
        found = RankStalled(
            job=self.name,
            generation=self.generation,
            ranks=numbers,
            phase=first.phase,
            step=first.step,
            silent_s=first.age_s,
            deadline_s=deadline_s,
            stance=stance.value,
            seen=seen_in(stance, first.doing[1], self._places, self._stands.get(numbers[0])),
            limit=limit,
        )
        return (found,)

    def _hold(self, alarm: Alarm | None) -> None:
        self.alarm, self._alarmed = alarm, frozenset(alarm.ranks if alarm is not None else ())

    def _stalled_ranks(self) -> tuple[int, ...]:
        """The ranks to blame: those that the others wait for, or all where that cannot be known; (): none yet."""
        overdue, standing = self._overdue, self._standing
        if self._stance in (Stance.FROZEN, Stance.DEAD):
            return tuple(sorted(standing))
        if self._stance in (Stance.STANDS, Stance.WORLD):
            return tuple(sorted(standing)) if standing <= overdue else ()
        if len(overdue) == len(self._waiting):
            return self._furthest_behind()
        steps = {number: self.homes[number].step(number) for number in overdue}
        lone = [n for n, step in steps.items() if self.newest_step - step >= _BEHIND_STEPS]
        return (min(lone, key=lambda number: (steps[number], number)),) if lone else ()

    def _furthest_behind(self) -> tuple[int, ...]:
        """The waiting ranks at the lowest step. If all are, and less than half are busy: those, as the idle wait."""
        steps = {
            number: step
            for ranks in self.hosts.values()
            for number, step in zip(ranks.numbers, ranks.progress.steps, strict=True)
            if number in self._waiting
        }
        lowest = min(steps.values())
        last = {number for number, step in steps.items() if step == lowest}
        if last == self._waiting:
            busy = last - self._doing.get(Activity.IDLE, set())
            last = busy if 0 < 2 * len(busy) < len(last) else last
        return tuple(sorted(last))


def _take_out(listed: dict[K, set[int]], key: K, number: int) -> None:
    ranks = listed.get(key)
    if ranks is not None:
        ranks.discard(number)
        if not ranks:
            del listed[key]
