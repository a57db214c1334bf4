"""An engine that is started again and finds its memory empty (the machine was restarted, say) gets the shards of its
ranks back from the peers that hold them, before anyone asks for them."""

from __future__ import annotations

import structlog

from ckpt_engine.contracts.generation import HostGeneration
from ckpt_engine.contracts.peer_plan import engine_addresses
from ckpt_engine.contracts.peer_wire import ListShards, ShardList
from ckpt_engine.host.context import Services
from ckpt_engine.peers.fetch import Fetcher
from ckpt_engine.slots.control_views import RestoreAnswer
from ckpt_engine.slots.slot_rules import MIN_SLOTS, SlotState
from ckpt_engine.tiers.memory import MemoryTier, OpenSegments
from ckpt_engine.tiers.peer import PeerTier
from flyball.contracts.checkpoints import RestorePlan, ShardSource, Tier, is_alive
from flyball.contracts.errors import FlyballError
from flyball.contracts.fault_points import reach

log = structlog.get_logger()


class Refill:
    """For the ranks of one generation on this host. `run` may be called for several ranks at once."""

    def __init__(
        self, generation: HostGeneration, *, memory: MemoryTier, replicas: PeerTier, services: Services
    ) -> None:
        self._generation = generation
        self._memory = memory
        self._replicas = replicas
        self._services = services
        self._until_s = services.clock.monotonic_s() + services.settings.replicate_timeout_s

    def run(self, entry: OpenSegments) -> bool:
        """Bring the rank's newest shards into its slots, if those are empty and no trainer is at work, which writes to
        them. Call again until it returns True: peers may have been restarted as well, and are waited for as long as for
        a replica."""
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
        if sources or not unreachable or self._services.clock.monotonic_s() >= self._until_s:
            return True
        log.info("refill_waits", job=self._generation.job, rank=entry.rank, reason="; ".join(unreachable))
        return False

    def _ask(self, peer: str, rank: int) -> dict[tuple[int, int], ShardSource]:
        wanted = ListShards(self._generation.job, rank)
        with self._services.dial(peer, "") as connection:
            reply = connection.request(wanted, ShardList, timeout_s=self._services.settings.io_timeout_s)
        address = engine_addresses(self._generation.placement).get(peer, "")
        return {
            (copy.generation, copy.step): ShardSource(rank, copy.generation, Tier.PEER, peer, address)
            for copy in reply.copies
            if copy.rank == rank and is_alive(copy.generation, copy.step, self._generation.lineage)
        }

    def _bring(self, entry: OpenSegments, step: int, holders: tuple[ShardSource, ...]) -> None:
        services = self._services
        fetcher = Fetcher(
            self._generation,
            RestorePlan(step, {str(entry.rank): holders}),
            memory=self._memory,
            replicas=self._replicas,
            disks={},
            dial=lambda host_id, address: services.dial(host_id, ""),  # a restarted peer has called from a newer one
            settings=services.settings,
            counters=services.counters,
        )
        reach("engine.refill")
        try:
            fetched = fetcher.fetch(entry, [])
        except (FlyballError, OSError) as error:  # the other step may do; and a restore looks further
            log.warning("refill_failed", job=self._generation.job, rank=entry.rank, step=step, reason=str(error))
            return
        services.counters.add("shards_refilled")
        log.info(
            "shard_refilled",
            job=self._generation.job,
            rank=entry.rank,
            step=step,
            peer=fetched.host_id,
            size_bytes=fetched.size_bytes,
        )
