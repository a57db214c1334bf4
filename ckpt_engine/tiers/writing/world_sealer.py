"""Writes the world manifests of a shared store, on rank 0's host, after every rank has reported its shard as
written."""

from __future__ import annotations

import threading
from collections.abc import Callable

import structlog

from ckpt_engine.contracts.generation import HostGeneration
from ckpt_engine.contracts.peer_wire import TierReport
from ckpt_engine.counters import Counters
from ckpt_engine.rules.retention_rules import reported_steps
from ckpt_engine.settings import EngineSettings
from ckpt_engine.tiers.shard_store import ShardStore
from ckpt_engine.worker_thread import WorkerThread, describe_failure
from flyball.contracts.checkpoints import Tier
from flyball.contracts.clock import Clock
from flyball.contracts.errors import FlyballError, StorageFull

log = structlog.get_logger()

_LOOK_AGAIN_S = 60.0  # at world manifests that stay unreadable


class WorldSealer:
    """The thread for one tier during one generation."""

    def __init__(
        self,
        generation: HostGeneration,
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
        self._asked = self._settled = generation.durable_from - 1
        self._policy = generation.configure.spec.policy(disk.tier)
        self._looked = False
        self._unread_until_s = 0.0
        self._changed = threading.Condition()
        self._thread = WorkerThread(
            f"seal-{disk.tier}",
            self._round,
            counters=counters,
            context={"job": generation.job, "tier": str(disk.tier)},
            on_failure=lambda error: self._fail(self._asked, error),
            retry_s=settings.scan_interval_s,
        )

    @property
    def tier(self) -> Tier:
        return self._disk.tier

    def start(self) -> None:
        self._unread_until_s = self._clock.monotonic_s() + self._settings.seal_timeout_s
        self._thread.start()

    def seal(self, step: int) -> None:
        """Every rank has written this step. Does not block."""
        with self._changed:
            self._asked = max(self._asked, step)
            self._changed.notify_all()

    def drain(self, timeout_s: float) -> bool:
        """Wait until nothing is left to seal; False at the timeout."""
        with self._changed:
            return self._changed.wait_for(lambda: self._settled == self._asked, timeout_s)

    def stop(self) -> None:
        """End after the seal in progress."""
        with self._changed:
            self._thread.stop()
            self._changed.notify_all()

    def _round(self) -> float:
        """Scan the folder first, then wait for the next step to seal."""
        if not self._looked:
            if not self._look() or (self._disk.has_unread and self._clock.monotonic_s() < self._unread_until_s):
                return self._settings.scan_interval_s
            self._looked = True
        self._report()
        with self._changed:
            is_asked = self._changed.wait_for(
                lambda: self._thread.stopping or self._asked > self._settled,
                _LOOK_AGAIN_S if self._disk.has_unread else None,
            )
            if self._thread.stopping:
                return 0.0
            step = self._asked
        if not is_asked:
            self._look()
            return 0.0
        try:
            self._seal(step)
        finally:  # in any case: the coordinator waits for it
            with self._changed:
                self._settled = step
                self._changed.notify_all()
        return 0.0

    def _look(self) -> bool:
        try:
            self._disk.scan_once()
            if self._disk.has_unread:
                self._disk.scan_unread()
        except (FlyballError, OSError) as error:
            log.warning("disk_not_scanned", tier=str(self._disk.tier), reason=str(error))
            return False
        return True

    def _report(self) -> None:
        sealed = self._disk.sealed_steps(self._generation.lineage)
        present = self._disk.sealed_steps(self._generation.lineage, or_unread=True)
        unread = tuple(step for step in present if step not in sealed)
        sealed, unread = reported_steps(sealed, self._policy), reported_steps(unread, self._policy)
        self._on_report(TierReport(self._disk.tier, self._asked, self._settled, sealed, unread))

    def _seal(self, step: int) -> None:
        """Retries until the timeout: a shared file system may show another host's files late."""
        generation = self._generation
        written_by = generation.generation_of(step)
        deadline_s = self._clock.monotonic_s() + self._settings.seal_timeout_s
        while True:
            try:
                self._disk.scan_step(written_by, step)
                self._disk.seal(written_by, step, generation.placement.world_size)
            except StorageFull as error:  # retrying makes no room
                self._fail(step, error)
                return
            except Exception as error:  # noqa: BLE001 - reported; there may be no thread or memory left
                if self._clock.monotonic_s() >= deadline_s:
                    self._fail(step, error)
                    return
                if self._is_stopped_within(self._settings.scan_interval_s):  # the next generation decides about it
                    log.info("seal_cut_short", tier=str(self._disk.tier), step=step, reason=describe_failure(error))
                    return
            else:
                log.info("world_step_sealed", tier=str(self._disk.tier), step=step)
                return

    def _fail(self, step: int, error: Exception) -> None:
        self._counters.add(f"{self._disk.tier}_seal_failures")
        self._on_failure(0, step, f"The world manifest of the {self._disk.tier} tier: {describe_failure(error)}")

    def _is_stopped_within(self, seconds: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: self._thread.stopping, seconds)
