"""One generation's restore on one host: what the trainers read in the control words, and what the daemon reports."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import structlog

from ckpt_engine.context import Services
from ckpt_engine.fetch import Fetched, Fetcher
from ckpt_engine.generation import Generation
from ckpt_engine.slots import RestoreState, RestoreWords
from ckpt_engine.tiers.memory import MemoryTier, OpenSegments
from ckpt_engine.tiers.peer import PeerTier
from ckpt_engine.tiers.shard_store import ShardStore
from flyball.contracts.checkpoints import RestorePlan, RestoreReport, Tier
from flyball.contracts.errors import FlyballError, StaleCommand

log = structlog.get_logger()


class Restoring:
    """`announce` each local rank when the generation begins, then `run` it, in any thread."""

    def __init__(
        self,
        generation: Generation,
        plan: RestorePlan,
        *,
        memory: MemoryTier,
        replicas: PeerTier,
        disks: Mapping[Tier, ShardStore],
        services: Services,
        on_report: Callable[[RestoreReport], None],
    ) -> None:
        self._generation = generation
        self._plan = plan
        self._memory = memory
        self._services = services
        self._on_report = on_report
        self._fetcher = Fetcher(
            generation,
            plan,
            memory=memory,
            replicas=replicas,
            disks=disks,
            dial=services.dial,
            settings=services.settings,
        )

    def announce(self, rank: int) -> None:
        """Say in the control words that the rank's bytes are on their way, unless they were already brought."""
        with self._memory.using(rank, create=True) as entry:
            if entry is not None and entry.segments.control.read_restore().generation != self._generation.number:
                entry.segments.control.write_restore(self._words(RestoreState.PENDING))

    def run(self, entry: OpenSegments) -> None:
        """Bring the rank's bytes into a local slot, or say why they cannot be had."""
        control, clock = entry.segments.control, self._services.clock
        words = control.read_restore()
        if words.generation == self._generation.number and words.state is not RestoreState.PENDING:
            return  # done by this engine's predecessor
        began_s = clock.monotonic_s()
        try:
            fetched = self._fetcher.fetch(entry)
        except StaleCommand as error:
            log.info("restore_superseded", job=self._generation.job, rank=entry.rank, reason=error.message)
            return
        except (FlyballError, OSError) as error:
            self._services.counters.add("restores_failed")
            log.error("restore_failed", job=self._generation.job, rank=entry.rank, reason=str(error))
            control.write_restore(self._words(RestoreState.FAILED, error=str(error)))
            return
        control.write_restore(self._words(RestoreState.READY, fetched=fetched))
        self._services.counters.add("restores")
        report = RestoreReport(
            job=self._generation.job,
            generation=self._generation.number,
            rank=entry.rank,
            step=self._plan.step,
            source_tier=fetched.tier,
            source_host=fetched.host_id,
            size_bytes=fetched.size_bytes,
            socket_bytes=fetched.socket_bytes,
            seconds=clock.monotonic_s() - began_s,
            at=clock.wall_s(),
        )
        self._on_report(report)
        log.info(
            "restore_ready",
            job=report.job,
            rank=report.rank,
            step=report.step,
            tier=str(report.source_tier),
            source_host=report.source_host,
            socket_bytes=report.socket_bytes,
            seconds=round(report.seconds, 6),
        )

    def _words(self, state: RestoreState, *, fetched: Fetched | None = None, error: str = "") -> RestoreWords:
        return RestoreWords(
            generation=self._generation.number,
            state=state,
            step=self._plan.step,
            slot=fetched.slot if fetched else -1,
            tier=fetched.tier if fetched else Tier.MEMORY,
            socket_bytes=fetched.socket_bytes if fetched else 0,
            error=error,
        )
