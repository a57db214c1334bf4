"""A simulated process: runs in rounds, can be stopped for a while, or killed and restarted."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from typing import TypeVar

import msgspec

from services.runtime.telemetry import Metrics
from simulator.ports.bus import MemoryBus
from simulator.ports.memory import Memory
from simulator.world.events import Happening, MachineClock
from simulator.world.world import World

LEAST_PAUSE_S = 0.1  # least time between two rounds of a loop
IDLE_PAUSE_S = 0.5  # after a round without work, of a loop that polls: a wake-up comes before
TICK_S = 0.25  # of the detector
WRITE_EVERY_S = 0.1


def _nothing() -> None:
    pass


class SimulatedWakeup:
    """A `Wakeup` that makes sleeping loops due. Only a hint: it may get lost."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.is_away = False
        self.listeners: dict[str, list[Happening]] = {}

    def notify(self, topic: str, hosts: Collection[str] = ()) -> None:
        if not self.is_away:
            for listener in self.listeners.get(topic, ()):
                self._world.after(0.002, listener)

    def wait(self, topic: str, timeout_s: float) -> bool:
        raise AssertionError("simulated processes never block")


class SimulatedProcess(ABC):
    """Base of the simulated control-plane processes."""

    def __init__(self, world: World, name: str, clock: MachineClock) -> None:
        self.world, self.name, self.clock = world, name, clock
        self.is_running = False
        self.starts = 0
        self._stopped_until = 0.0
        self.woken: Happening = _nothing

    def wake(self) -> None:
        """Signal that there may be work."""
        self.woken()

    def start(self) -> None:
        """Start with empty memory."""
        self.is_running = True
        self.starts += 1
        self.begin()

    def kill(self) -> None:
        """Simulates kill -9."""
        self.is_running = False

    def stop_for(self, seconds: float) -> None:
        """Simulates SIGSTOP, and SIGCONT after `seconds`."""
        self._stopped_until = self.world.now + seconds

    @property
    def answers(self) -> bool:
        """Whether a request would get a reply now."""
        return self.is_running and self.world.now >= self._stopped_until

    @abstractmethod
    def begin(self) -> None:
        """Set up a new process."""

    def every(self, work: Callable[[], float]) -> Happening:
        """Run `work` repeatedly, each time after the pause it returned; returns the function that wakes it."""
        mine = self.starts
        due_at = [0.0]

        def run() -> None:
            if self.starts != mine or not self.is_running or self.world.now < due_at[0] - 1e-9:
                return
            if self.world.now < self._stopped_until:
                plan(self._stopped_until - self.world.now)
                return
            due_at[0] = float("inf")  # running now: must not be re-entered
            pause_s = work()
            polls = pause_s < TICK_S
            plan(LEAST_PAUSE_S if pause_s < LEAST_PAUSE_S / 2 else IDLE_PAUSE_S if polls else pause_s)

        def plan(pause_s: float) -> None:
            due_at[0] = self.world.now + pause_s
            earliest_at[0] = self.world.now + LEAST_PAUSE_S
            self.world.after(pause_s, run)

        earliest_at = [0.0]

        def wake() -> None:
            if due_at[0] < float("inf"):
                due_at[0] = min(due_at[0], max(self.world.now, earliest_at[0]))
                self.world.after(due_at[0] - self.world.now, run)

        self.world.after(self.world.rng.uniform(0.0, LEAST_PAUSE_S), run)
        return wake


P = TypeVar("P", bound=SimulatedProcess)


class Shared(msgspec.Struct, frozen=True, eq=False):
    """Shared by all processes: database, bus, wake-ups and metrics."""

    memory: Memory
    bus: MemoryBus
    wakeup: SimulatedWakeup
    metrics: Metrics
