"""When the controller looks, and at what: at everything as long as that is little; of many jobs at what is open as
soon as it may have gone on, and at all others in turns. Pure; all times are of the monotonic clock."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import inf

from flyball.contracts.reports.signals import Signal
from services.controller.focus import Focus

AGAIN_S = 0.01  # after a round that changed something: the next one sees what followed from it
DECIDE_AT_LEAST_EVERY_S = 1.0  # also when nothing changed, should a rule wait for a time that it did not name
LONG_ROUND_S = 0.05  # rounds that take longer have rests between them, unless there are signals
REST = 9.0  # times a long round: a signal that comes in the middle of one waits for its end
TURN_RANKS = 10_000  # of jobs that a round looks at because it is their turn; fewer are looked at all together
TURNS_WITHIN_S = 3.0  # of all jobs, where the rounds leave time for it


class Turns:
    """Of one epoch of a controller."""

    def __init__(self) -> None:
        self._count = 0  # of the turns that all jobs take; 0: they are so few that each round looks at everything
        self._to_come: list[frozenset[str]] = []
        self._began_at = -1  # revision: as of then all have been seen when no turn is left
        self._seen = -1  # revision
        self._is_called = False  # what is open may have gone on
        self._decide_by_s = 0.0
        self._rest_until_s = 0.0  # without signals
        self._wake_s = inf  # when a rule of what was looked at last waits no longer
        # Job -> the same of its turn, as rounds between look at others. It orders the turns; what begins one is news,
        # or DECIDE_AT_LEAST_EVERY_S.
        self._wakes: dict[str, float] = {}

    def call(self) -> None:
        """What is open may have gone on: look without a rest."""
        self._is_called = True

    def is_due(self, revision: int, now_s: float) -> bool:
        """Whether there is something to look at without a signal."""
        is_late = self._wake_s <= now_s
        if is_late and self._count:
            return True
        is_rested = self._is_called or now_s >= self._rest_until_s
        return is_rested and (is_late or revision != self._seen or now_s >= self._decide_by_s)

    def focus(
        self, sizes: Sequence[tuple[str, int]], signals: Sequence[Signal], revision: int, now_s: float, *, is_news: bool
    ) -> Focus | None:
        """What a round that begins now is about: None for everything. `sizes`: jobs and their ranks."""
        turns = slices(sizes, TURN_RANKS) if sum(size for _, size in sizes) > TURN_RANKS else []
        self._count = len(turns)
        if not turns:
            self._to_come, self._began_at = [], revision
            return None
        has_news = is_news or self._is_called or self._wake_s <= now_s
        if has_news and now_s < self._rest_until_s + DECIDE_AT_LEAST_EVERY_S:
            return Focus(signals=tuple(signals))
        if not self._to_come:
            self._to_come, self._began_at = turns, revision
            self._wakes = {job: self._wakes[job] for job, _ in sizes if job in self._wakes}
        late_first = min(self._to_come, key=lambda turn: all(self._wakes.get(job, inf) > now_s for job in turn))
        return Focus(jobs=late_first, signals=tuple(signals))

    def looked(self, focus: Focus | None, *, took_s: float, now_s: float, wake_s: float, goes_on: bool) -> None:
        """A round ended and is stored; else its turn has to come again. `goes_on`: more is to be seen at once."""
        self._is_called, self._wake_s = goes_on, wake_s
        if focus is not None:
            if not focus.jobs:
                return
            self._to_come.remove(focus.jobs)
            self._wakes.update(dict.fromkeys(focus.jobs, wake_s))
        if not self._to_come:
            self._seen = self._began_at
            self._decide_by_s = now_s + DECIDE_AT_LEAST_EVERY_S
        if self._count:
            self._rest_until_s = now_s + min(REST * took_s, max(took_s, TURNS_WITHIN_S / self._count))
        else:
            rest_s = REST * took_s if took_s > LONG_ROUND_S else 0.0
            self._rest_until_s = min(now_s + rest_s, self._decide_by_s)

    def wait_s(self, at_most_s: float, now_s: float) -> float:
        """Until a rule waits no longer."""
        rest_s = 0.0 if self._count or self._is_called else self._rest_until_s - now_s
        return min(at_most_s, max(AGAIN_S, rest_s, self._wake_s - now_s))


def slices(sizes: Iterable[tuple[str, int]], limit: int) -> list[frozenset[str]]:
    """Jobs in turns: as many together as have `limit` ranks, at least one. `sizes`: job and its ranks."""
    found: list[frozenset[str]] = []
    turn: list[str] = []
    ranks = 0
    for job, count in sizes:
        if turn and ranks + count > limit:
            found.append(frozenset(turn))
            turn, ranks = [], 0
        turn.append(job)
        ranks += count
    if turn:
        found.append(frozenset(turn))
    return found
