"""Links between simulated machines: delay, loss, repetition, and cuts in one direction or both."""

from __future__ import annotations

from random import Random

from simulator.world.events import Happening, Timeline

LONGEST_DELAY_S = 20.0


class Network:
    """Messages may overtake each other. A machine reaches itself always."""

    def __init__(self, timeline: Timeline, rng: Random) -> None:
        self._timeline = timeline
        self._rng = rng
        self._cut: dict[tuple[str, str], float] = {}  # since when
        self.healed_at = timeline.now  # the newest end of a cut
        self.loss = 0.0  # of all messages, as a fraction
        self.repetition = 0.01
        self.delay_s = 0.004  # middle of most
        self.stuck_fraction = 0.003  # in a connection that stands still for a while
        self.slow_fraction = 0.01  # of the messages, held up a hundred times as long

    def cut(self, source: str, target: str) -> None:
        """Lose everything from `source` to `target`."""
        self._cut.setdefault((source, target), self._timeline.now)

    def heal(self, source: str, target: str) -> None:
        """End a cut."""
        if self._cut.pop((source, target), None) is not None:
            self.healed_at = self._timeline.now

    def is_open(self, source: str, target: str) -> bool:
        """Whether a message would arrive, chance apart."""
        return (source, target) not in self._cut

    def are_joined(self, one: str, other: str) -> bool:
        """Whether a connection between the two lives."""
        return self.is_open(one, other) and self.is_open(other, one)

    def cut_for_s(self, one: str, other: str) -> float:
        """For how long a connection between the two has been impossible."""
        began = [at for pair in ((one, other), (other, one)) if (at := self._cut.get(pair)) is not None]
        return self._timeline.now - min(began) if began else 0.0

    def send(self, source: str, target: str, arrival: Happening) -> None:
        """Have `arrival` happen at the target: once, never, or twice."""
        if not self.is_open(source, target) or (self.loss and self._rng.random() < self.loss):
            return
        self._timeline.after(self._delay_s(), arrival)
        if self._rng.random() < self.repetition:
            self._timeline.after(self._delay_s(), arrival)

    def _delay_s(self) -> float:
        if self._rng.random() < self.stuck_fraction:
            return self._rng.uniform(1.0, LONGEST_DELAY_S)
        slow = 100.0 if self._rng.random() < self.slow_fraction else 1.0
        return self.delay_s * slow * (0.5 + self._rng.random())
