"""What is normal for a job: how long its steps take, exactly; which pauses it went on from; how long it stays in other
phases, as far as that was seen. Pure.

Until something is known of a job, patience is long; a false alarm costs a restart. An alarm that comes again at the
same step after a restart may be a false one (a long evaluation that the script does not announce), so each repetition
makes patience there ten times longer; and when the job then goes on from such a pause, the alarm was false, and
patience is doubled for the rest of its life.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Mapping, Sequence
from itertools import pairwise
from math import inf
from typing import NamedTuple

import msgspec

from flyball.contracts.cluster import Phase
from flyball.contracts.reports.rank_columns import CompletedSteps
from services.sensor.detector.patience import StallSettings, limit_s, quantile_of
from services.sensor.detector.stances import Stance

_STAYS = 16  # remembered per phase
_STEPS_LEARNED = 64  # enough of those that a pace remembers for a restarted sensor to say what is usual
_PARTS_OF_A_STEP = (Phase.CHECKPOINT, Phase.DATA)  # the time between two steps bounds them
_ORDER = (Stance.STANDS, Stance.TOGETHER, Stance.BLOCKED, Stance.WORKING)  # a pause of one kind speaks for those after


class Alarm(NamedTuple):
    """A stall that was told."""

    generation: int
    ranks: tuple[int, ...]
    step: int
    silent_s: float
    stance: Stance


class FalseAlarmPause(NamedTuple):
    """A pause that showed an alarm to be false."""

    alarm: Alarm
    paused_s: float


class LearnedPace(msgspec.Struct, frozen=True, gc=False):
    """What a `JobPace` knows, for the sensor that comes after this one. Durations in seconds."""

    has_attached: bool = False
    first_step_s: float = 0.0
    steps: tuple[float, ...] = ()
    steps_seen: int = 0
    stepping_s: float = 0.0
    stays: Mapping[Phase, tuple[float, ...]] = {}
    survived: Mapping[Stance, float] = {}
    alarm: Alarm | None = None
    repeats: int = 0
    false_alarms: int = 0

    @property
    def lasting(self) -> LearnedPace:
        """Without what changes with every step."""
        return msgspec.structs.replace(self, steps=(), steps_seen=0, stepping_s=0.0)


class JobPace:
    """Learnt in all generations of a job."""

    def __init__(self, settings: StallSettings) -> None:
        self._settings = settings
        self.has_attached = False  # a script that never attaches has no beacon to go by
        self.never_overdue_s = settings.frozen.floor_s  # whoever moved this recently is not overdue, whatever it does
        self.hang_timeout_s = 0.0  # of the job's own; 0.0: what is learnt counts
        self.advanced_s = -inf  # when a rank was first seen to have made the newest step
        self.pauses = 0  # grows with what makes the time between two steps say nothing of a step
        self.repeats = 0  # alarms at the step of `_alarm`, in earlier generations
        self.false_alarms = 0
        self.disproved: FalseAlarmPause | None = None  # news, until somebody takes it
        self._sampled: dict[int, tuple[int, float, int]] = {}  # rank -> its newest step, when, and `pauses` then
        self._steps: deque[float] = deque(maxlen=settings.window)
        self._usual_step_s: float | None = None  # of `_steps`; None: to be computed
        self._timed = 0  # steps of this generation that are among `_steps`
        self._steps_seen, self._stepping_s = 0, 0.0  # in all generations
        self._stays: dict[Phase, deque[float]] = {}
        self._survived: dict[Stance, float] = {}  # the longest pause of a kind that the job went on from
        self._first_step_s = 0.0  # the longest of any generation
        self._started_s = 0.0  # the first step of this generation, of the rank that took longest
        self._alarm: Alarm | None = None  # of an earlier generation, until the job is past its step
        self._deadlines: dict[tuple[Stance, Phase, bool], float] = {}  # until more is learnt

    # --- across restarts of the sensor --------------------------------------------------------------------------------

    @property
    def learned(self) -> LearnedPace:
        return LearnedPace(
            self.has_attached,
            self._first_step_s,
            tuple(self._steps)[-_STEPS_LEARNED:],
            self._steps_seen,
            self._stepping_s,
            {phase: tuple(stays) for phase, stays in self._stays.items()},
            dict(self._survived),
            self._alarm,
            self.repeats,
            self.false_alarms,
        )

    def recall(self, learned: LearnedPace) -> bool:
        """Go on with what an earlier sensor learned; False if this one has learned of steps itself."""
        if self._steps_seen:
            return False
        self.has_attached |= learned.has_attached
        self._first_step_s = learned.first_step_s
        self._steps.extend(learned.steps)
        self._timed = len(learned.steps)
        self._steps_seen, self._stepping_s = learned.steps_seen, learned.stepping_s
        self._stays = {phase: deque(stays, maxlen=_STAYS) for phase, stays in learned.stays.items()}
        self._survived = dict(learned.survived)
        self._alarm, self.repeats, self.false_alarms = learned.alarm, learned.repeats, learned.false_alarms
        self._usual_step_s = None
        self._deadlines.clear()
        return True

    # --- learning -----------------------------------------------------------------------------------------------------

    def begin(self, alarm: Alarm | None) -> None:
        """A new generation starts; the one before it had stalled, or not at all (None)."""
        if alarm is not None:
            before = self._alarm
            self.repeats = self.repeats + 1 if before is not None and alarm.step <= before.step + 1 else 1
            self._alarm = alarm
            self._deadlines.clear()
        self._timed, self._started_s = 0, 0.0
        self._usual_step_s = None
        self._sampled.clear()

    def limit_by(self, hang_timeout_s: float) -> None:
        """The job says itself when a rank is hung."""
        if hang_timeout_s != self.hang_timeout_s:
            self.hang_timeout_s = hang_timeout_s
            self.never_overdue_s = min(self._settings.frozen.floor_s, hang_timeout_s or inf)
            self._deadlines.clear()

    def attach(self) -> None:
        """A rank got further than its start."""
        if not self.has_attached:
            self.has_attached = True
            self._deadlines.clear()

    def advance(self, before: int, step: int, moved_s: float) -> None:
        """A rank is the first that completed this step of the generation, behind step `before` (-1: the first)."""
        alarm = self._alarm
        if alarm is not None:
            paused_s = moved_s - self.advanced_s - (step - before) * self.usual_step_s()
            if before >= 0 and abs(before - alarm.step) <= 1:
                self._compare(alarm, paused_s)
            if step > alarm.step + 1:
                self._alarm, self.repeats = None, 0
                self._deadlines.clear()
        self.advanced_s = max(self.advanced_s, moved_s)

    def stayed(self, phase: Phase, lasted_s: float) -> None:
        """A rank left a phase."""
        self._stays.setdefault(phase, deque(maxlen=_STAYS)).append(lasted_s)
        self._deadlines.clear()

    def survive(self, stance: Stance, lasted_s: float) -> None:
        """The job went on after its ranks had been like this for so long."""
        if lasted_s > self._survived.get(stance, 0.0):
            self._survived[stance] = lasted_s
            self._deadlines.clear()

    def stepped_first(self, step: int, took_s: float) -> None:
        """A rank completed its first step of this generation."""
        if self._alarm is not None and self._first_step_s and abs(step - 1 - self._alarm.step) <= 1:
            self._compare(self._alarm, took_s - self._first_step_s)  # it paused before that step
        self._started_s = max(self._started_s, took_s, 1e-3)
        self._first_step_s = max(self._first_step_s, self._started_s)
        self._usual_step_s = None
        self._deadlines.clear()

    def time_steps(self, steps: CompletedSteps, known: Container[int]) -> None:
        """Learn how long steps take, from a few of the ranks that are `known`: all ranks of a job take as long."""
        sampled, has_room = self._sampled, len(self._sampled) < self._settings.sampled_ranks
        if not has_room and sampled.keys().isdisjoint(steps.ranks):
            return  # as nearly always
        first_step, last_step = steps.first_step, steps.last_step
        for place, number in enumerate(steps.ranks):
            if number not in sampled and (len(sampled) >= self._settings.sampled_ranks or number not in known):
                continue
            step, at, pauses = sampled.get(number, (-1, 0.0, -1))
            times = [row[place] for row in steps.completed_at]
            if step == first_step - 1 and pauses == self.pauses:
                times.insert(0, at)
            self.stepped(times)
            sampled[number] = (last_step, times[-1], self.pauses)

    def forget(self, rank: int) -> None:
        """A rank is not reported any more: the time until its next step says nothing."""
        self._sampled.pop(rank, None)

    def stepped(self, times: Sequence[float]) -> None:
        """A rank completed steps at these moments, one after the other."""
        gaps = [max(0.0, later - earlier) for earlier, later in pairwise(times)]
        self._steps.extend(gaps)
        self._timed += len(gaps)
        self._steps_seen += len(gaps)
        self._stepping_s += sum(gaps)
        self._usual_step_s = None
        self._deadlines.clear()

    def _compare(self, alarm: Alarm, paused_s: float) -> None:
        """Whether a pause where an earlier generation was ended shows that this was a mistake. That a process was
        stopped is none."""
        if alarm.stance is Stance.FROZEN or paused_s < self._settings.comparable * alarm.silent_s:
            return
        self.false_alarms += 1
        self.disproved = FalseAlarmPause(alarm, paused_s)
        self._alarm, self.repeats = None, 0
        self.survive(alarm.stance, paused_s)
        self._deadlines.clear()

    # --- what is normal -----------------------------------------------------------------------------------------------

    @property
    def patience(self) -> float:
        """By what the deadlines are multiplied, since alarms were false."""
        return 2.0 ** min(self.false_alarms, self._settings.max_doublings)

    def usual_step_s(self) -> float:
        """How long steps take, 0.0 if that is not known."""
        if self._usual_step_s is None or not self._steps:
            usual_s = quantile_of(self._steps, self._settings.quantile)
            if self._timed < self._settings.enough_samples:  # a restarted job warms up anew: the second step rebuilds
                usual_s = max(usual_s, self._started_s)
            self._usual_step_s = usual_s
        return self._usual_step_s

    def advances(self, now_s: float) -> bool:
        """Whether a step was made within the time in which one usually is."""
        factor, floor_s = self._settings.phases[Phase.STEP].factor, self._settings.frozen.floor_s
        return now_s - self.advanced_s <= max(floor_s, factor * self.usual_step_s())

    def deadline_s(self, stance: Stance, phase: Phase, *, has_stepped: bool) -> float:
        """How long a rank may stay as it is; inf: for ever."""
        key = (stance, phase, has_stepped)
        try:
            return self._deadlines[key]
        except KeyError:
            found = self._deadlines[key] = max(self.bounds(stance, phase, has_stepped=has_stepped))[0]
            return found

    def bounds(self, stance: Stance, phase: Phase, *, has_stepped: bool) -> list[tuple[float, str]]:
        """What bounds the deadline from below, each with its reason in words: the longest counts."""
        settings, timeout_s = self._settings, self.hang_timeout_s
        if phase not in settings.phases or stance is Stance.ATTENDED:
            return [(inf, "")]
        if phase is Phase.STARTING and not self.has_attached:
            return [self._unattached(stance)]
        usual_s = self.usual_step_s()
        if stance is Stance.FROZEN:
            return [self._frozen(usual_s if has_stepped else 0.0)]
        if timeout_s:
            return [(timeout_s, "--hang-timeout")]
        longest_s = max((self._survived.get(kind, 0.0) for kind in _upto(stance)), default=0.0)
        found = [
            (settings.stances.get(stance, inf), "the least for ranks of which this is seen"),
            (
                settings.survived_factor * longest_s,
                f"{settings.survived_factor:g} x the longest such pause so far, of {longest_s:.1f} s",
            ),
            (self._phase_s(phase, has_stepped), self._phase_why(phase, has_stepped)),
        ]
        if self._steps_seen < settings.settled_steps or self._stepping_s < settings.settled_after_s:
            found.append((settings.unsettled_s, "the least while little was seen of the job"))
        factor = self.patience * settings.repeat_factor**self.repeats
        if factor == 1.0:
            return found
        again = "after false alarms" if not self.repeats else "after an alarm at this step"
        return [(factor * bound_s, f"{factor:g} x ({why}) {again}") for bound_s, why in found]

    def _frozen(self, usual_s: float) -> tuple[float, str]:
        settings = self._settings
        least_s, most_s = limit_s(settings.frozen, usual_s), min(settings.frozen_most_s, self.hang_timeout_s or inf)
        if settings.frozen.floor_s < least_s < most_s:
            return least_s, f"{settings.frozen.factor:g} x the usual step of {usual_s:.2f} s"
        return min(least_s, most_s), "what a stopped process is given while others run"

    def _unattached(self, stance: Stance) -> tuple[float, str]:
        """A script that tells no steps can be seen to do nothing, and that only."""
        settings = self._settings
        if stance is Stance.FROZEN:
            return settings.unattached_frozen_s, "what a stopped process is given in a script that does not attach"
        if stance not in (Stance.STANDS, Stance.TOGETHER, Stance.BLOCKED):
            return inf, ""
        if self.hang_timeout_s:
            return self.hang_timeout_s, "--hang-timeout"
        return settings.unattached_idle_s, "what idle ranks are given in a script that does not attach"

    def _phase_s(self, phase: Phase, has_stepped: bool) -> float:
        settings = self._settings
        if phase is Phase.STEP and not has_stepped:
            return limit_s(settings.first_step, self._first_step_s)
        if phase is Phase.STEP:
            return limit_s(settings.phases[phase], self.usual_step_s())
        seen_s = max(self._stays.get(phase, ()), default=0.0)
        if phase in _PARTS_OF_A_STEP:
            seen_s = max(seen_s, self.usual_step_s())
        return limit_s(settings.phases[phase], seen_s)

    def _phase_why(self, phase: Phase, has_stepped: bool) -> str:
        if phase is Phase.STEP and has_stepped:
            return f"{self._settings.phases[phase].factor:g} x the usual step of {self.usual_step_s():.2f} s"
        return "what a first step may take" if phase is Phase.STEP else f"what phase {phase.name.lower()} may take"


def _upto(stance: Stance) -> tuple[Stance, ...]:
    return _ORDER[: _ORDER.index(stance) + 1] if stance in _ORDER else _ORDER
