"""A job as it truly trains: steps in lock step, saves with their replicas, in closed form. No event per step. Pure."""

from __future__ import annotations

import msgspec


class SavedStep(msgspec.Struct, frozen=True):
    """A step that was saved, and the generation that completed it; step -1: none."""

    step: int = -1
    generation: int = 0


class Spent(msgspec.Struct):
    """What became of the time. `useful_s` of steps that count so far; what a restart undoes becomes recomputed."""

    useful_s: float = 0.0
    recomputed_s: float = 0.0
    saving_s: float = 0.0
    down_s: float = 0.0

    @property
    def total_s(self) -> float:
        return self.useful_s + self.recomputed_s + self.saving_s + self.down_s


class JobTraining:
    """Times are the simulation's. After every `every_steps` steps a save holds up training for `save_s`."""

    def __init__(
        self,
        *,
        step_s: float,
        every_steps: int,
        save_s: float,
        replicate_s: float,
        persistent_every: int,
        persistent_s: float,
        at: float,
    ) -> None:
        self.step_s, self.every_steps, self.save_s = step_s, every_steps, save_s
        self._replicate_s, self._persistent_every, self._persistent_s = replicate_s, persistent_every, persistent_s
        self.generation = 0
        self.is_stepping = False
        self.first_step = -1  # that the generation restored
        self.since = at  # when it began to step, or stopped
        self.newest = -1  # the newest completed step, while it does not step
        self.committed = self.replicated = self.persistent = SavedStep()  # as of the last stop
        self.spent = Spent()

    @property
    def cycle_s(self) -> float:
        """From one save to the next."""
        return self.every_steps * self.step_s + self.save_s

    def step_at(self, at: float) -> int:
        """The newest completed step."""
        if not self.is_stepping:
            return self.newest
        cycles, rest_s = divmod(max(0.0, at - self._cycle_began_at), self.cycle_s)
        return self._last_due + int(cycles) * self.every_steps + min(self.every_steps, int(rest_s / self.step_s))

    @property
    def _last_due(self) -> int:
        """The newest step up to the restored one after which a save is due: saves go by the number of a step, not by
        when its generation began."""
        return (self.first_step + 1) // self.every_steps * self.every_steps - 1

    @property
    def _cycle_began_at(self) -> float:
        """When the generation would have begun, had it begun after that step."""
        return self.since - (self.first_step - self._last_due) * self.step_s

    def completed_at(self, step: int) -> float:
        """When the running generation completes a step."""
        cycles, rest = divmod(step - self._last_due, self.every_steps)
        if cycles and not rest:  # the save after it has not begun
            cycles, rest = cycles - 1, self.every_steps
        return self._cycle_began_at + cycles * self.cycle_s + rest * self.step_s

    def committed_at(self, at: float) -> SavedStep:
        """The newest step that every rank has in its host's memory."""
        return self._saved(at, self.committed, 0.0, 1)

    def replicated_at(self, at: float) -> SavedStep:
        """The newest step of which every rank has a replica, too."""
        return self._saved(at, self.replicated, self._replicate_s, 1)

    def persistent_at(self, at: float) -> SavedStep:
        """The newest step that is complete in the persistent tier."""
        if not self._persistent_every:
            return SavedStep()
        return self._saved(at, self.persistent, self._persistent_s, self._persistent_every)

    def _saved(self, at: float, before: SavedStep, after_s: float, every: int) -> SavedStep:
        if not self.is_stepping:
            return before
        before_it = (self._last_due + 1) // self.every_steps
        saves = (before_it + int((at - self._cycle_began_at - after_s) / self.cycle_s)) // every * every
        return SavedStep(saves * self.every_steps - 1, self.generation) if saves > before_it else before

    # --- changes -----------------------------------------------------------------------------------------------------

    def begin(self, at: float, generation: int, restored: SavedStep) -> None:
        """A generation has loaded a step (-1: it starts from scratch), and begins to step."""
        assert not self.is_stepping
        self.spent.down_s += at - self.since
        undone_s = max(0, self.newest - restored.step) * self.step_s
        self.spent.useful_s -= undone_s
        self.spent.recomputed_s += undone_s
        self.generation, self.first_step, self.since = generation, restored.step, at
        self.newest = restored.step
        self.committed = self.replicated = restored
        self.is_stepping = True

    def stop(self, at: float, *, saved: bool = False) -> None:
        """The ranks stop. `saved`: all parked at their newest step, which is saved everywhere."""
        if not self.is_stepping:
            return
        committed, replicated, persistent = self.committed_at(at), self.replicated_at(at), self.persistent_at(at)
        newest = self.step_at(at)
        useful_s = (newest - self.first_step) * self.step_s
        saves, rest_s = divmod(at - self._cycle_began_at, self.cycle_s)
        saving_s = saves * self.save_s + max(0.0, rest_s - self.every_steps * self.step_s)
        self.spent.useful_s += useful_s
        self.spent.saving_s += saving_s
        self.spent.recomputed_s += at - self.since - useful_s - saving_s  # a step that was cut off
        if saved:
            committed = replicated = SavedStep(newest, self.generation)
        self.committed, self.replicated, self.persistent = committed, replicated, persistent
        self.newest, self.since, self.is_stepping = newest, at, False

    def lose_memory(self) -> None:
        """Nothing in memory is complete any more."""
        self.committed = self.replicated = SavedStep()

    def end(self, at: float, *, restoring: int | None = None) -> None:
        """The run is over: account for the time since the last change. `restoring`: the step from which a generation
        was about to go on. What was trained after it is lost."""
        if self.is_stepping:
            self.stop(at)
        elif restoring is not None:
            undone_s = max(0, self.newest - restoring) * self.step_s
            self.spent.useful_s -= undone_s
            self.spent.recomputed_s += undone_s
        self.spent.down_s += at - self.since
        self.since = at
