"""Refills an engine that restarts with empty memory, for example after a reboot: its ranks' shards come back from the
peers that hold them, before anyone asks."""

from __future__ import annotations

from collections.abc import Callable

import structlog

from ckpt_engine.contracts.control_views import RestoreAnswer
from ckpt_engine.contracts.generation import HostGeneration
from ckpt_engine.contracts.peer_plan import engine_addresses
from ckpt_engine.contracts.peer_wire import ListShards, ShardList
from ckpt_engine.counters import Counters
from ckpt_engine.peers.fetch import Fetcher
from ckpt_engine.peers.transport.port import Connection
from ckpt_engine.rules.slot_rules import MIN_SLOTS, SlotState
from ckpt_engine.settings import EngineSettings
from ckpt_engine.tiers.memory import OpenSegments
from flyball.contracts.checkpoints import RestorePlan, ShardSource, Tier, is_alive
from flyball.contracts.clock import Clock
from flyball.contracts.errors import FlyballError
from flyball.contracts.fault_points import reach

log = structlog.get_logger()


class Refill:
    """For the ranks of one generation on this host. `run` may be called for several ranks at once."""

    def __init__(
        self,
        generation: HostGeneration,
        *,
        make_fetcher: Callable[[RestorePlan], Fetcher],
        dial: Callable[[str], Connection],
        settings: EngineSettings,
        clock: Clock,
        counters: Counters,
    ) -> None:
        self._generation = generation
        self._make_fetcher = make_fetcher
        self._dial = dial
        self._settings = settings
        self._clock = clock
        self._counters = counters
        self._until_s = clock.monotonic_s() + settings.replicate_timeout_s

    def run(self, entry: OpenSegments) -> bool:
        """Bring the rank's newest shards into its slots, unless a trainer is at work, which writes to them, or they are
        not empty. Call again until it returns True: peers may have restarted too, and get as long as for a replica."""
        control, number = entry.segments.control, self._generation.number
        has_trainer = control.position(number) >= 0 or control.restore_answer(number) is not RestoreAnswer.NONE
        if has_trainer or any(view.state is not SlotState.EMPTY for view in entry.segments.slots()):
            return True
        unreachable: list[str] = []
        sources: dict[tuple[int, int], tuple[ShardSource, ...]] = {}  # by generation and step
        for peer in self._generation.replica_hosts:
            try:
                found = self._ask(peer, entry.rank)
            except FlyballError as error:
                unreachable.append(f"{peer}: {error.message}")
                continue
            sources |= {key: (*sources.get(key, ()), source) for key, source in found.items()}
        for (_, step), holders in sorted(sources.items(), reverse=True)[:MIN_SLOTS]:
            self._bring(entry, step, holders)
        if sources or not unreachable or self._clock.monotonic_s() >= self._until_s:
            return True
        log.info("refill_waits", job=self._generation.job, rank=entry.rank, reason="; ".join(unreachable))
        return False

    def _ask(self, peer: str, rank: int) -> dict[tuple[int, int], ShardSource]:
        wanted = ListShards(self._generation.job, rank)
        with self._dial(peer) as connection:
            reply = connection.request(wanted, ShardList, timeout_s=self._settings.io_timeout_s)
        address = engine_addresses(self._generation.placement).get(peer, "")
        return {
            (copy.generation, copy.step): ShardSource(rank, copy.generation, Tier.PEER, peer, address)
            for copy in reply.copies
            if copy.rank == rank and is_alive(copy.generation, copy.step, self._generation.lineage)
        }

    def _bring(self, entry: OpenSegments, step: int, holders: tuple[ShardSource, ...]) -> None:
        fetcher = self._make_fetcher(RestorePlan(step, {str(entry.rank): holders}))
        reach("engine.refill")
        try:
            fetched = fetcher.fetch(entry, [])
        except (FlyballError, OSError) as error:  # another step may do, and a restore has more sources
            log.warning("refill_failed", job=self._generation.job, rank=entry.rank, step=step, reason=str(error))
            return
        self._counters.add("shards_refilled")
        log.info(
            "shard_refilled",
            job=self._generation.job,
            rank=entry.rank,
            step=step,
            peer=fetched.host_id,
            size_bytes=fetched.size_bytes,
        )
