"""One rank's training and saving, step numbers included, for the figures of Flyball."""

from __future__ import annotations

from checkpoint_bench.samples import wait_until
from flyball.sdk.trainer import Job, SaveHandle

_SETTLE_TIMEOUT_S = 120.0


class Saver:
    """Saves of one job, each of the next step. Every failed save ends the benchmark: nothing would be measured."""

    def __init__(self, job: Job, state: dict[str, object], first_step: int = 0) -> None:
        self.job = job
        self.state = state
        self.next_step = first_step

    def save(self) -> SaveHandle:
        handle = self.job.save(self.next_step, self.state)
        self.next_step += 1
        if handle.error or handle.skipped:
            raise RuntimeError(f"step {handle.step} was not saved: {handle.error or handle.skipped}")
        return handle

    def settle(self, handle: SaveHandle, *, durable: bool = False) -> None:
        """Wait until nothing of a save is going on: it is committed, replicated, and the world's step."""
        stage = handle.durable if durable else handle.replicated
        wait_until(lambda: stage.done or handle.error, f"step {handle.step}", _SETTLE_TIMEOUT_S)
        handle.check()
        wait_until(lambda: self.job.recovery_point >= handle.step, f"world step {handle.step}", _SETTLE_TIMEOUT_S)

    def warm_up(self, saves: int, *, durable: bool = False) -> None:
        """Fill every slot once, so that none is made while something is measured."""
        for _ in range(saves):
            self.settle(self.save(), durable=durable)
