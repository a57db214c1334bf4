"""Several hosts' engines as processes of this machine, and their placements."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from support.hosts.engines import EngineHost
from support.jobs.placements import make_placement

from flyball.contracts.checkpoints import CheckpointSpec, Lineage, LineageEntry, RestorePlan, ShardSource, Tier
from flyball.contracts.cluster import HostRanks, Placement
from flyball.contracts.identity import Fence
from flyball.contracts.on_host.engine_wire import Configure, EngineReply
from services.rules.engine_keys import EngineKeyring

KEYRING = EngineKeyring("the secret of a test's cluster")


class EngineCluster:
    """The hosts of one test, and their placements."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.hosts: dict[str, EngineHost] = {}

    def host(self, host_id: str, *, token: str = "a token of the test", start: bool = True, **env: str) -> EngineHost:
        host = EngineHost(self.root, host_id, token, {f"FLYBALL_CKPT_{name}": value for name, value in env.items()})
        self.hosts[host_id] = host
        return host.start() if start else host

    def placement(
        self,
        ranks: Mapping[str, tuple[int, ...]],
        *,
        generation: int = 1,
        peers: Mapping[str, tuple[str, ...]] | None = None,
        lineage: Lineage | None = None,
        restore: RestorePlan | None = None,
        run: str = "",
    ) -> Placement:
        """`ranks` by host. Without `peers` each host's replicas are on the next one."""
        names = list(ranks)
        ring = {name: (names[(i + 1) % len(names)],) for i, name in enumerate(names)} if len(names) > 1 else {}
        return make_placement(
            ranks,
            generation=generation,
            hosts=tuple(HostRanks(n, "127.0.0.1", self.hosts[n].address, r) for n, r in ranks.items()),
            peers=ring if peers is None else peers,
            lineage=lineage or (LineageEntry(generation),),
            restore=restore,
            run=run,
        )

    def configure(
        self, placement: Placement, spec: CheckpointSpec | None = None, *, epoch: int = 1
    ) -> dict[str, EngineReply]:
        """Configure every host of the placement, with the keys that the supervisor gives it."""
        fence = Fence(epoch, placement.generation)
        return {
            part.host_id: self.hosts[part.host_id].ask(
                Configure(
                    fence,
                    part.host_id,
                    placement,
                    spec or CheckpointSpec(),
                    KEYRING.keys_of(part.host_id, placement),
                )
            )
            for part in placement.hosts
        }

    def source(self, rank: int, tier: Tier, host_id: str, generation: int = 1) -> ShardSource:
        if tier is Tier.PERSISTENT:
            return ShardSource(rank, generation, tier, "", "")
        return ShardSource(rank, generation, tier, host_id, self.hosts[host_id].address)

    def end(self) -> None:
        for host in self.hosts.values():
            if host.process is not None and host.process.poll() is None:
                host.kill()
