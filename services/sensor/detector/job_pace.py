"""Learns what is normal for a job: the length of its steps and other phases, and pauses it recovered from. Pure.

Until a job is known, patience is long: a false alarm costs a restart. An alarm that comes again at the same step after
a restart may be false (a long evaluation that the script does not announce), so each repetition makes patience there
ten times longer. If the job then goes on from such a pause, the alarm was false, and patience doubles for good.
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
from services.sensor.detector.patience import PhasePatience, StallSettings, limit_s, quantile_of
from services.sensor.detector.stances import Stance

WINDOW = 512  # step durations remembered per job
SAMPLED_RANKS = 8  # whose steps are timed: all ranks of a job take as long
# A stopped process needs little proof while others run: two usual steps, within these limits.
FROZEN = PhasePatience(unknown_s=10.0, floor_s=2.0, factor=2.0)
FROZEN_MAX_S = 10.0
UNATTACHED_IDLE_S = 1800.0  # how long all ranks of a script that reports no steps may be idle
_SETTLED_STEPS, _SETTLED_AFTER_S = 100, 60.0  # a job is new until it completed so many steps, in at least this time
_SURVIVED_FACTOR = 4.0  # times the longest pause of a kind that the job recovered from
_QUANTILE = 0.9  # of the step durations: one slow step in ten changes nothing
_ENOUGH_SAMPLES = 5  # fewer in a generation: its first step counts as a sample of those that follow
_REPEAT_FACTOR = 10.0  # of the deadlines, except those of frozen ranks, for each earlier alarm at this step
_COMPARABLE = 0.5  # a pause at an alarm's step for this part of what the alarm waited shows that it was false
_MAX_DOUBLINGS = 6  # of a job's patience
_STAYS = 16  # remembered per phase
_STEPS_LEARNED = 64  # durations stored for the next sensor: enough to know the usual one
_PARTS_OF_A_STEP = (Phase.CHECKPOINT, Phase.DATA)  # the time between two steps bounds them
# A pause of one counts for the later ones.
_ORDER = (Stance.STANDS, Stance.STUCK, Stance.TOGETHER, Stance.WORLD, Stance.BLOCKED, Stance.WORKING)
_PROVED = (Stance.FROZEN, Stance.DEAD)  # no alarm about these is false
# From the last step until ranks are acted on that nothing can wake: until they are looked at, and then some.
_DEAD = PhasePatience(unknown_s=14.0, floor_s=5.0, factor=20.0)
_MAX_PLACES = 256  # of alarms
_MOST_AT_A_PLACE = 2  # alarms that count


class Alarm(NamedTuple):
    """A stall that was reported."""

    generation: int
    ranks: tuple[int, ...]
    step: int
    silent_s: float
    stance: Stance
    place: str = ""  # where in the script; '': not known


class FalseAlarmPause(NamedTuple):
    """A pause that showed an alarm to be false."""

    alarm: Alarm
    paused_s: float


class LearnedPace(msgspec.Struct, frozen=True, gc=False):
    """The content of a `JobPace`, for the next sensor. Durations in seconds."""

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
    places: Mapping[str, int] = {}  # where in the script ranks stood at alarms, and how often

    @property
    def lasting(self) -> LearnedPace:
        """The part that does not change with every step."""
        return msgspec.structs.replace(self, steps=(), steps_seen=0, stepping_s=0.0)


class JobPace:
    """Learned over all generations of a job."""

    def __init__(self, settings: StallSettings) -> None:
        self._settings = settings
        self.has_attached = False  # a script that never does has no beacon
        self.never_overdue_s = FROZEN.floor_s  # whoever moved this recently is not overdue, whatever it does
        self.hang_timeout_s = 0.0  # set by the job; 0.0: adaptive
        self.advanced_s = -inf  # when a rank first completed the newest step
        self.pauses = 0  # grows whenever the time until the next step says nothing about how long steps take
        self.repeats = 0  # of alarms at the step of `_alarm`, over generations
        self.false_alarms = 0
        self.disproved: FalseAlarmPause | None = None  # until it is reported
        self._sampled: dict[int, tuple[int, float, int]] = {}  # rank -> its newest step, when, and `pauses` then
        self._steps: deque[float] = deque(maxlen=WINDOW)
        self._usual_step_s: float | None = None  # of `_steps`; None: to be computed
        self._timed = 0  # durations in `_steps` that are of this generation
        self._steps_seen, self._stepping_s = 0, 0.0  # in all generations
        self._stays: dict[Phase, deque[float]] = {}
        self._survived: dict[Stance, float] = {}  # the longest pause of a kind that the job recovered from
        self._first_step_s = 0.0  # the longest of any generation
        self._started_s = 0.0  # the slowest rank's first step in this generation
        self._alarm: Alarm | None = None  # in an earlier generation, until the job is past its step
        self._places: dict[str, int] = {}  # where ranks stood at alarms, and how often
        self._deadlines: dict[tuple[Stance, Phase, bool, str], float] = {}  # until more is learned

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
            dict(self._places),
        )

    def recall(self, learned: LearnedPace) -> bool:
        """Continue with what an earlier sensor learned; False if this one has timed steps itself."""
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
        self._places = dict(learned.places)
        self._usual_step_s = None
        self._deadlines.clear()
        return True

    # --- learning -----------------------------------------------------------------------------------------------------

    def begin(self, alarm: Alarm | None) -> None:
        """Start a new generation. `alarm`: how the previous one had stalled, if it had."""
        if alarm is not None:
            before = self._alarm
            self.repeats = self.repeats + 1 if before is not None and alarm.step <= before.step + 1 else 1
            self._alarm = alarm
            if alarm.place and alarm.stance not in _PROVED:
                self._places = dict(
                    [*self._places.items(), (alarm.place, self._places.get(alarm.place, 0) + 1)][-_MAX_PLACES:]
                )
            self._deadlines.clear()
        self._timed, self._started_s = 0, 0.0
        self._usual_step_s = None
        self._sampled.clear()

    def limit_by(self, hang_timeout_s: float) -> None:
        """Set the job's own `--hang-timeout`."""
        if hang_timeout_s != self.hang_timeout_s:
            self.hang_timeout_s = hang_timeout_s
            self.never_overdue_s = min(FROZEN.floor_s, hang_timeout_s or inf)
            self._deadlines.clear()

    def attach(self) -> None:
        """A rank got beyond its start, so the script reports its phases."""
        if not self.has_attached:
            self.has_attached = True
            self._deadlines.clear()

    def advance(self, before: int, step: int, moved_s: float) -> None:
        """A rank was the first to complete `step`, after step `before` of this generation (-1: none)."""
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
        """The job went on after its ranks had been in this stance for `lasted_s`."""
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
        sampled, has_room = self._sampled, len(self._sampled) < SAMPLED_RANKS
        if not has_room and sampled.keys().isdisjoint(steps.ranks):
            return  # as nearly always
        first_step, last_step = steps.first_step, steps.last_step
        for place, number in enumerate(steps.ranks):
            if number not in sampled and (len(sampled) >= SAMPLED_RANKS or number not in known):
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
        """See whether a pause at the step of an alarm shows that the alarm was false. One about stopped processes
        never is."""
        if alarm.stance in _PROVED or paused_s < _COMPARABLE * alarm.silent_s:
            return
        self.false_alarms += 1
        self.disproved = FalseAlarmPause(alarm, paused_s)
        self._alarm, self.repeats = None, 0
        self.survive(alarm.stance, paused_s)
        self._deadlines.clear()

    # --- what is normal -----------------------------------------------------------------------------------------------

    @property
    def patience(self) -> float:
        """The factor of all deadlines, for the job's false alarms."""
        return 2.0 ** min(self.false_alarms, _MAX_DOUBLINGS)

    def usual_step_s(self) -> float:
        """How long steps usually take; 0.0: not known."""
        if self._usual_step_s is None or not self._steps:
            usual_s = quantile_of(self._steps, _QUANTILE)
            if self._timed < _ENOUGH_SAMPLES:  # a restarted job warms up again: its second step rebuilds buckets
                usual_s = max(usual_s, self._started_s)
            self._usual_step_s = usual_s
        return self._usual_step_s

    def advances(self, now_s: float) -> bool:
        """Whether the job completed a step within the time that it usually takes."""
        factor, floor_s = self._settings.phases[Phase.STEP].factor, FROZEN.floor_s
        return now_s - self.advanced_s <= max(floor_s, factor * self.usual_step_s())

    def deadline_s(self, stance: Stance, phase: Phase, *, has_stepped: bool, place: str = "") -> float:
        """How long a rank may stay as it is, at this place of the script; inf: forever."""
        key = (stance, phase, has_stepped, place if place in self._places else "")
        try:
            return self._deadlines[key]
        except KeyError:
            found = self._deadlines[key] = max(self.bounds(stance, phase, has_stepped=has_stepped, place=place))[0]
            return found

    def bounds(self, stance: Stance, phase: Phase, *, has_stepped: bool, place: str = "") -> list[tuple[float, str]]:
        """Lower bounds of the deadline, each with its reason: the longest counts."""
        settings, timeout_s = self._settings, self.hang_timeout_s
        if phase not in settings.phases or stance is Stance.ATTENDED:
            return [(inf, "")]
        usual_s = self.usual_step_s() if has_stepped else 0.0
        if stance is Stance.DEAD:
            return [(min(limit_s(_DEAD, usual_s), timeout_s or inf), "the deadline of a rank that nothing can wake")]
        if phase is Phase.STARTING and not self.has_attached:
            return [self._unattached(stance)]
        if stance is Stance.FROZEN:
            return [self._frozen(usual_s)]
        return [(timeout_s, "--hang-timeout")] if timeout_s else self._adaptive(stance, phase, has_stepped, place)

    def _adaptive(self, stance: Stance, phase: Phase, has_stepped: bool, place: str) -> list[tuple[float, str]]:
        settings = self._settings
        longest_s = max((self._survived.get(kind, 0.0) for kind in _upto(stance)), default=0.0)
        found = [
            (settings.stances.get(stance, inf), "the shortest deadline for ranks that do this"),
            (
                _SURVIVED_FACTOR * longest_s,
                f"{_SURVIVED_FACTOR:g} x the longest such pause so far, {longest_s:.1f} s",
            ),
            (self._phase_s(phase, has_stepped), self._phase_why(phase, has_stepped)),
        ]
        is_new = self._steps_seen < _SETTLED_STEPS or self._stepping_s < _SETTLED_AFTER_S
        if is_new and stance is not Stance.STUCK:  # of which all is known
            found.append((settings.unsettled_s, "the shortest deadline of a job that is new"))
        stood_here = min(self._places.get(place, 0), _MOST_AT_A_PLACE)
        factor = self.patience * _REPEAT_FACTOR ** max(self.repeats, stood_here)
        if factor == 1.0:
            return found
        again = "after false alarms" if factor == self.patience else "after an alarm at this step"
        if stood_here > self.repeats:
            again = "after an alarm at this place"
        return [(factor * bound_s, f"{factor:g} x ({why}) {again}") for bound_s, why in found]

    def _frozen(self, usual_s: float) -> tuple[float, str]:
        least_s, most_s = limit_s(FROZEN, usual_s), min(FROZEN_MAX_S, self.hang_timeout_s or inf)
        if FROZEN.floor_s < least_s < most_s:
            return least_s, f"{FROZEN.factor:g} x the usual step of {usual_s:.2f} s"
        return min(least_s, most_s), "the deadline of a stopped process while others run"

    def _unattached(self, stance: Stance) -> tuple[float, str]:
        """Of a script that reports no steps, only idle or stopped processes show a hang."""
        if stance is Stance.FROZEN:
            return FROZEN_MAX_S, "the deadline of a stopped process in a script that does not attach"
        if stance not in (Stance.STANDS, Stance.STUCK, Stance.TOGETHER, Stance.WORLD, Stance.BLOCKED):
            return inf, ""
        if self.hang_timeout_s:
            return self.hang_timeout_s, "--hang-timeout"
        return UNATTACHED_IDLE_S, "the deadline of idle ranks in a script that does not attach"

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
        return "the deadline of a first step" if phase is Phase.STEP else f"the deadline of phase {phase.name.lower()}"


def _upto(stance: Stance) -> tuple[Stance, ...]:
    return _ORDER[: _ORDER.index(stance) + 1] if stance in _ORDER else _ORDER
