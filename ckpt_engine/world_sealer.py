"""Writing the world manifests of a shared folder, on rank 0's host: last, when every rank has said that its shard is
there, and after having looked."""

from __future__ import annotations

import threading
from collections.abc import Callable

import structlog

from ckpt_engine.counters import Counters
from ckpt_engine.generation import Generation
from ckpt_engine.peer_wire import TierReport
from ckpt_engine.retention import reported_steps
from ckpt_engine.settings import EngineSettings
from ckpt_engine.tiers.shard_store import ShardStore
from flyball.contracts.checkpoints import Tier
from flyball.contracts.clock import Clock
from flyball.contracts.errors import FlyballError

log = structlog.get_logger()


class WorldSealer:
    """The thread that does it, for one tier during one generation."""

    def __init__(
        self,
        generation: Generation,
        disk: ShardStore,
        *,
        counters: Counters,
        settings: EngineSettings,
        clock: Clock,
        on_report: Callable[[TierReport], None],
        on_failure: Callable[[int, int, str], None],
    ) -> None:
        self._generation = generation
        self._disk = disk
        self._counters = counters
        self._settings = settings
        self._clock = clock
        self._on_report = on_report
        self._on_failure = on_failure
        self._asked = self._settled = max(generation.restore_step - 1, -1)  # as the writers
        self._reported_steps = reported_steps(generation.configure.spec.policy(disk.tier))
        self._stopped = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name=f"seal-{disk.tier}", daemon=True)

    @property
    def tier(self) -> Tier:
        return self._disk.tier

    def start(self) -> None:
        self._thread.start()

    def seal(self, step: int) -> None:
        """Every rank has written this step."""
        with self._changed:
            self._asked = max(self._asked, step)
            self._changed.notify_all()

    def drain(self, timeout_s: float) -> bool:
        """Wait until nothing is waiting or being written; False if that took too long."""
        with self._changed:
            return self._changed.wait_for(lambda: self._settled == self._asked, timeout_s)

    def stop(self) -> None:
        """End after what is being written."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def _run(self) -> None:
        while not self._look():
            if self._is_stopped_within(self._settings.scan_interval_s):
                return
        while True:
            self._report()
            with self._changed:
                self._changed.wait_for(lambda: self._stopped or self._asked > self._settled)
                if self._stopped:
                    return
                step = self._asked
            self._seal(step)
            with self._changed:
                self._settled = step
                self._changed.notify_all()

    def _look(self) -> bool:
        try:
            self._disk.scan()
        except (FlyballError, OSError) as error:
            log.warning("disk_not_scanned", tier=str(self._disk.tier), reason=str(error))
            return False
        return True

    def _report(self) -> None:
        sealed = self._disk.sealed_steps(self._generation.lineage)[-self._reported_steps :]
        self._on_report(TierReport(self._disk.tier, self._asked, self._settled, sealed))

    def _seal(self, step: int) -> None:
        """Shared file systems may show another host's files late: looked for again, as long as the time allows."""
        generation = self._generation
        written_by = generation.generation_of(step)
        deadline_s = self._clock.monotonic_s() + self._settings.seal_timeout_s
        while True:
            try:
                self._disk.scan_step(written_by, step)
                self._disk.seal(written_by, step, generation.placement.world_size)
            except (FlyballError, OSError) as error:
                late = self._clock.monotonic_s() >= deadline_s
                if late or self._is_stopped_within(self._settings.scan_interval_s):
                    self._counters.add(f"{self._disk.tier}_seal_failures")
                    self._on_failure(0, step, f"The world manifest of the {self._disk.tier} tier: {error}")
                    return
            else:
                log.info("world_step_sealed", tier=str(self._disk.tier), step=step)
                return

    def _is_stopped_within(self, seconds: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: self._stopped, seconds)
