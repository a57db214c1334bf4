"""A job of two hosts: rank 0 on host a, which is here, and rank 1 on host b, which is on the other machine. Each holds
the other's replicas."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
from engine_site import EngineSite, SiteSettings, status_of
from other_host import OtherMachine, calls

from flyball.contracts import wire
from flyball.contracts.checkpoints import CheckpointSpec, Lineage, LineageEntry, RestorePlan, ShardSource, Tier
from flyball.contracts.cluster import HostRanks, Placement
from flyball.contracts.identity import Fence
from flyball.contracts.on_host.engine_wire import Configure

SITE = Path(__file__).with_name("engine_site.py")
START_DEADLINE_S = 300.0
CALL_DEADLINE_S = 320.0  # longer than a site waits for anything
RANKS = {"a": 0, "b": 1}
PEERS = {"a": "b", "b": "a"}


class Sites:
    """The processes of both sites, for all tests: they import for seconds where processors are emulated."""

    def __init__(self, here: OtherMachine, there: OtherMachine) -> None:
        self.ips = {"a": here.own_address, "b": there.address}
        started = {
            name: host.start(sys.executable, str(SITE), name, self.ips[name])
            for name, host in (("a", here), ("b", there))
        }
        self.by_name: dict[str, EngineSite] = {}
        for name, process in started.items():
            port = process.line("port ", deadline_s=START_DEADLINE_S)
            served = calls(f"{self.ips[name]}:{port}", timeout_s=CALL_DEADLINE_S)
            self.by_name[name] = served  # type: ignore[assignment]  # it has the same methods


class TwoEngines:
    """Close it."""

    def __init__(self, sites: Sites, settings: dict[str, SiteSettings]) -> None:
        self._ips = sites.ips
        self.sites = sites.by_name
        self.a, self.b = self.sites["a"], self.sites["b"]
        for name, site in self.sites.items():
            site.open(msgspec.json.encode(settings[name]).decode())
        self.addresses = {name: site.start() for name, site in self.sites.items()}

    def begin(self, generation: int, lineage: Lineage, restore: RestorePlan | None = None) -> None:
        placement = Placement(
            job="job",
            generation=generation,
            world_size=2,
            hosts=tuple(HostRanks(n, self._ips[n], self.addresses[n], (RANKS[n],)) for n in RANKS),
            master_address=self._ips["a"],
            master_port=1,
            peers={"a": ("b",), "b": ("a",)},
            lineage=lineage,
            restore=restore,
        )
        for name, rank in RANKS.items():
            configure = Configure(Fence(1, generation), name, placement, CheckpointSpec())
            assert self.sites[name].configure(wire.encode(configure).decode())
            assert self.sites[name].train(rank, generation, wire.encode(lineage).decode())

    def save(self, step: int) -> None:
        for site in self.sites.values():
            assert site.save(step)

    def save_everywhere(self, step: int) -> None:
        """Until both ranks have it, and both replicas."""
        self.save(step)
        for site in self.sites.values():
            assert site.await_world_step(step)

    def replace_a(self, step: int) -> None:
        """Host a is lost with its memory and its disk. Another one takes its name, and the job goes on from `step`."""
        assert self.a.lose()
        self.addresses["a"] = self.a.start()
        sources = {
            "0": (ShardSource(0, 1, Tier.PEER, "b", self.addresses["b"]),),
            "1": (ShardSource(1, 1, Tier.MEMORY, "b", self.addresses["b"]),),
        }
        self.begin(2, (LineageEntry(1, step), LineageEntry(2)), RestorePlan(step, sources))
        assert self.a.await_restore(2) == self.b.await_restore(2) == "READY"

    def transport(self, name: str) -> tuple[str, str]:
        """What carries the shards from this host to the other one, and why."""
        (shown,) = status_of(self.sites[name]).transports
        assert shown.peer == PEERS[name]
        return shown.transport, shown.reason

    def count(self, name: str, counter: str) -> int:
        return status_of(self.sites[name]).counters.get(counter, 0)

    def close(self) -> None:
        for site in self.sites.values():
            print(site.close())  # shown if the test fails


Begin = Callable[..., TwoEngines]  # SiteSettings of both, or of a and of b
