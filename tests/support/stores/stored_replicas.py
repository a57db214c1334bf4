"""Replicas whose step is in an object store and nowhere else. The store, a process of its own, counts what it gives
out."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import httpx
import numpy as np
from safetensors.numpy import save
from support.clocks.waits import until
from support.hosts.engine_cluster import EngineCluster
from support.hosts.engines import EngineHost, Trainer

from ckpt_engine.contracts.control_views import RestoreState
from flyball.contracts.checkpoints import CheckpointSpec, Lineage, LineageEntry, RestorePlan, RestoreReport, Tier
from flyball.contracts.identity import Fence
from flyball.contracts.on_host.engine_wire import Configure

STEP = 3
RUN = "20251119-080000-000"
LINEAGE: Lineage = (LineageEntry(1, STEP), LineageEntry(2))
SERVER = Path(__file__).parents[3] / "benchmarks" / "broadcast_bench" / "limited_store.py"
ALIKE_BYTES = 24_000_000


class Replica(Trainer):
    """Holds what all other ranks hold, and a little of its own."""

    def payload(self, step: int, count: int = ALIKE_BYTES // 4) -> bytes:
        values = np.random.default_rng([step, self.seed]).random(count, dtype=np.float32)
        return save({"weight": values, "own": np.full(500_000, self.rank, np.int32)}, {"step": str(step)})


class CountedStore:
    """The server, and its clients' environment."""

    def __init__(self, *options: str) -> None:
        self.process = subprocess.Popen([sys.executable, str(SERVER), *options], stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().strip()
        self.environment = {
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ACCESS_KEY_ID": "anybody",
            "AWS_SECRET_ACCESS_KEY": "may",
            "AWS_REGION": "us-east-1",
        }

    def given(self) -> int:
        """The bytes of shards that were given out so far."""
        found: dict[str, int] = httpx.get(f"{self.url}/-/given", timeout=60).json()
        return sum(size_bytes for name, size_bytes in found.items() if name.endswith(".safetensors"))

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


class Job:
    """Replicas whose step 3 is in the store and nowhere else."""

    def __init__(self, cluster: EngineCluster, store: CountedStore) -> None:
        self.cluster = cluster
        self.store = store
        self.spec = CheckpointSpec(persistent_dir="s3://bucket/jobs", persistent_every_steps=1, replicas=0)
        self.ranks: Mapping[str, tuple[int, ...]] = {}
        self.saved: dict[int, bytes] = {}
        self.trainers: dict[int, Replica] = {}

    def save(self, ranks: Mapping[str, tuple[int, ...]], **settings: str) -> None:
        self.ranks = ranks
        for host_id in ranks:
            self.cluster.host(host_id, **settings)
        self.cluster.configure(self.cluster.placement(ranks, run=RUN), self.spec)
        workers = [Replica(self.cluster.hosts[host], rank) for host, held in ranks.items() for rank in held]
        for worker in workers:
            worker.save(STEP)
            self.saved[worker.rank] = worker.payload(STEP)
        for host_id, held in ranks.items():
            for rank in held:
                until(lambda host_id=host_id, rank=rank: self.holds(host_id, rank))
        for host in self.cluster.hosts.values():
            host.lose()

    def holds(self, host_id: str, rank: int) -> bool:
        return self.cluster.hosts[host_id].holds(Tier.PERSISTENT, STEP, rank)

    def start(self, host_id: str, **environment: str) -> EngineHost:
        return self.cluster.hosts[host_id].start(**environment)

    def begin(self, *hosts: str) -> None:
        """Begin a generation on these hosts (none named: all), with their trainers. All are started."""
        members = [rank for held in self.ranks.values() for rank in held]
        plan = RestorePlan(STEP, {str(rank): (self.cluster.source(rank, Tier.PERSISTENT, ""),) for rank in members})
        placement = self.cluster.placement(self.ranks, generation=2, lineage=LINEAGE, restore=plan, run=RUN)
        for host_id in hosts or tuple(self.ranks):
            host = self.cluster.hosts[host_id]
            assert host.ask(Configure(Fence(1, 2), host_id, placement, self.spec)).ok
            for rank in self.ranks[host_id]:
                self.trainers[rank] = Replica(host, rank, 2, LINEAGE)

    def await_restored(self, *hosts: str) -> dict[int, RestoreReport]:
        """The ranks of these hosts (none named: all) have every byte. Returns their reports."""
        reports: dict[int, RestoreReport] = {}
        for host_id in hosts or tuple(self.ranks):
            for rank in self.ranks[host_id]:
                assert self.trainers[rank].await_restore(2) is RestoreState.READY
                assert self.trainers[rank].stored(1, STEP) == self.saved[rank]
            host = self.cluster.hosts[host_id]
            until(lambda host=host, host_id=host_id: len(host.status.restores) >= len(self.ranks[host_id]))
            reports |= {report.rank: report for report in host.status.restores}
        return reports
