"""Schedules rounds. Small clusters: every round covers all jobs. Large ones: open incidents and actions first, healthy
jobs round-robin. Pure; all times are monotonic."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import inf

from flyball.contracts.reports.signals import Signal
from services.controller.round.focus import Focus

AGAIN_S = 0.01  # after a round that changed something: the next one sees the effects
DECIDE_AT_LEAST_EVERY_S = 1.0  # even if nothing changed, in case a rule waits for a time that it did not name
LONG_ROUND_S = 0.05  # after longer rounds there are rests, unless signals come
REST = 9.0  # times a long round, since a signal has to wait for the end of a round
TURN_RANKS = 10_000  # per turn; with fewer ranks in all, every round covers everything
TURNS_WITHIN_S = 3.0  # the time for all turns, if the rounds are quick enough


class Turns:
    """The schedule of a controller in one epoch."""

    def __init__(self) -> None:
        self._count = 0  # of turns; 0: every round covers everything
        self._to_come: list[frozenset[str]] = []
        self._began_at = -1  # revision; when no turn is left, all jobs have been seen as of then
        self._seen = -1  # revision
        self._is_called = False  # open incidents or actions may have changed
        self._decide_by_s = 0.0
        self._rest_until_s = 0.0  # without signals
        self._wake_s = inf  # when a rule of the last round stops waiting
        # job -> likewise, for its last turn. This orders the turns; news or DECIDE_AT_LEAST_EVERY_S start one.
        self._wakes: dict[str, float] = {}

    def call(self) -> None:
        """Open incidents or actions may have changed: do not rest before the next round."""
        self._is_called = True

    def is_due(self, revision: int, now_s: float) -> bool:
        """Whether a round is due without signals."""
        is_late = self._wake_s <= now_s
        if is_late and self._count:
            return True
        is_rested = self._is_called or now_s >= self._rest_until_s
        return is_rested and (is_late or revision != self._seen or now_s >= self._decide_by_s)

    def focus(
        self, sizes: Sequence[tuple[str, int]], signals: Sequence[Signal], revision: int, now_s: float, *, is_news: bool
    ) -> Focus | None:
        """The jobs that a round covers if it starts now; None: all. `sizes`: jobs with their numbers of ranks."""
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

    def may_yield(self, focus: Focus | None, now_s: float) -> bool:
        """Whether the round that starts now may be broken off for something urgent: it comes again. Endless urgent
        rounds delay it by DECIDE_AT_LEAST_EVERY_S, not for ever. `focus` None: it covers everything, for no signal."""
        is_urgent = focus is not None and (not focus.jobs or bool(focus.signals))
        return not is_urgent and now_s < self._rest_until_s + DECIDE_AT_LEAST_EVERY_S

    def looked(self, focus: Focus | None, *, took_s: float, now_s: float, wake_s: float, goes_on: bool) -> None:
        """A round is over and stored (otherwise its turn comes again). `goes_on`: start the next one at once."""
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
        """How long to wait for the next round, at most `at_most_s`."""
        rest_s = 0.0 if self._count or self._is_called else self._rest_until_s - now_s
        return min(at_most_s, max(AGAIN_S, rest_s, self._wake_s - now_s))


def slices(sizes: Iterable[tuple[str, int]], limit: int) -> list[frozenset[str]]:
    """Divides jobs into turns of up to `limit` ranks, and at least one job. `sizes`: jobs with their numbers of
    ranks."""
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
