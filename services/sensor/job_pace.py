"""What is normal for a job: how long its steps take, exactly; how long it stays in other phases, as far as that was
seen. Pure.

Until something is known of a phase, patience is long; a false alarm costs a restart. An alarm that comes again at the
same step after a restart may be a false one (a long evaluation that the script does not announce), so each repetition
makes patience there ten times longer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import pairwise
from math import inf

from flyball.contracts.cluster import Phase
from services.sensor.patience import StallSettings, limit_s, quantile_of

_STAYS = 16  # remembered per phase
_PARTS_OF_A_STEP = (Phase.CHECKPOINT, Phase.DATA)  # the time between two steps bounds them


class JobPace:
    """Learnt in all generations of a job."""

    def __init__(self, settings: StallSettings) -> None:
        self._settings = settings
        self.has_attached = False  # a script that never attaches has no beacon to go by
        self.advanced_s = -inf  # when a rank was first seen to have made the newest step
        self.pauses = 0  # grows with what makes the time between two steps say nothing of a step
        self.sampled: set[int] = set()  # ranks whose steps are timed
        self._steps: deque[float] = deque(maxlen=settings.window)
        self._usual_step_s: float | None = None  # of `_steps`; None: to be computed
        self._timed = 0  # steps of this generation that are among `_steps`
        self._stays: dict[Phase, deque[float]] = {}
        self._first_step_s = 0.0  # the longest of any generation
        self._started_s = 0.0  # the first step of this generation, of the rank that took longest
        self.repeats = 0  # alarms at `_alarm_step`, in earlier generations
        self._alarm_step = -1
        self._deadlines: dict[tuple[Phase, bool], float | None] = {}  # of (phase, has stepped), until more is learnt

    def begin(self, stalled_at: int | None) -> None:
        """A new generation starts; the one before it had stalled after this step, or not at all (None)."""
        if stalled_at is not None:
            self.repeats = self.repeats + 1 if stalled_at <= self._alarm_step + 1 else 1
            self._alarm_step = stalled_at
            self._deadlines.clear()
        self._timed, self._started_s = 0, 0.0
        self._usual_step_s = None

    def attach(self) -> None:
        """A rank got further than its start."""
        if not self.has_attached:
            self.has_attached = True
            self._deadlines.clear()

    def advance(self, step: int, moved_s: float) -> None:
        """A rank is the first that completed this step of the generation."""
        self.advanced_s = max(self.advanced_s, moved_s)
        if self.repeats and step > self._alarm_step + 1:
            self.repeats = 0
            self._deadlines.clear()

    def stayed(self, phase: Phase, lasted_s: float) -> None:
        """A rank left a phase."""
        self._stays.setdefault(phase, deque(maxlen=_STAYS)).append(lasted_s)
        self._deadlines.clear()

    def stepped_first(self, took_s: float) -> None:
        """A rank completed its first step of this generation."""
        self._started_s = max(self._started_s, took_s, 1e-3)
        self._first_step_s = max(self._first_step_s, self._started_s)
        self._usual_step_s = None
        self._deadlines.clear()

    def stepped(self, times: Sequence[float]) -> None:
        """A rank completed steps at these moments, one after the other."""
        self._steps.extend(max(0.0, later - earlier) for earlier, later in pairwise(times))
        self._timed += len(times) - 1
        self._usual_step_s = None
        self._deadlines.clear()

    def deadline_s(self, phase: Phase, *, has_stepped: bool) -> float | None:
        """How long a rank may stay in a phase without moving; None: for ever."""
        key = (phase, has_stepped)
        try:
            return self._deadlines[key]
        except KeyError:
            usual_s = self._first_deadline_s(phase, has_stepped)
            deadline_s = None if usual_s is None else usual_s * self._settings.repeat_factor**self.repeats
            self._deadlines[key] = deadline_s
            return deadline_s

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
        patience = self._settings.phases[Phase.STEP]
        return now_s - self.advanced_s <= max(patience.floor_s, patience.factor * self.usual_step_s())

    def _first_deadline_s(self, phase: Phase, has_stepped: bool) -> float | None:
        patience = self._settings.phases.get(phase)
        if patience is None or (phase is Phase.STARTING and not self.has_attached):
            return None
        if phase is Phase.STEP and not has_stepped:
            return limit_s(self._settings.first_step, self._first_step_s)
        if phase is Phase.STEP:
            return limit_s(patience, self.usual_step_s())
        seen_s = max(self._stays.get(phase, ()), default=0.0)
        if phase in _PARTS_OF_A_STEP:
            seen_s = max(seen_s, self.usual_step_s())
        return limit_s(patience, seen_s)
