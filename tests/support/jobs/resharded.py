"""A job on engines of this machine that is saved by one number of ranks, and restored by another."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from support.clocks.waits import until
from support.hosts.engine_cluster import EngineCluster
from support.hosts.engines import JOB, EngineHost
from support.jobs.attached import attached
from support.jobs.fake_ranks import Placements, as_rank, local, spread
from torch.distributed.tensor import Shard

from flyball.contracts import wire
from flyball.contracts.checkpoints import CheckpointSpec, LineageEntry, RestoreReport, Tier
from flyball.contracts.cluster import HostRanks, Placement
from flyball.contracts.on_host import worker_env
from flyball.contracts.on_host.segments import beacon_path
from flyball.sdk.beacon import create_beacon
from flyball.sdk.trainer import Job
from services.rules.recovery_point import plan_restore

STEP = 3
Ranks = Mapping[str, tuple[int, ...]]  # by host
ROWS, COLUMNS = 12, 700_000  # 33.6 MB of float32
PLACEMENTS: Mapping[str, Placements | None] = {"rows": (Shard(0),), "whole": None}


def truth() -> dict[str, torch.Tensor]:
    values = torch.arange(ROWS * COLUMNS, dtype=torch.int32).reshape(ROWS, COLUMNS)
    return {"rows": values.to(torch.float32), "whole": torch.arange(1000.0)}


def state_of(mesh: Any, values: Mapping[str, torch.Tensor]) -> dict[str, Any]:  # noqa: ANN401 - a mesh
    return {name: spread(value, mesh, PLACEMENTS[name]) for name, value in values.items()}


class ReshardedJob:
    def __init__(self, cluster: EngineCluster, spec: CheckpointSpec) -> None:
        self.cluster = cluster
        self.spec = spec
        self.saved_by: Ranks = {}
        self.generation = 1

    def begin_to_save(self, ranks: Ranks) -> Placement:
        """Begin the generation of the ranks that save the step."""
        self.saved_by = ranks
        lineage = (LineageEntry(1, world_size=sum(map(len, ranks.values()))),)
        placement = self.cluster.placement(ranks, lineage=lineage)
        self._configure(placement)
        return placement

    def save(self, ranks: Ranks) -> None:
        """Save the step by these ranks, into every tier that is on."""
        placement = self.begin_to_save(ranks)
        with ExitStack() as stack:
            handles = []
            for rank in range(placement.world_size):
                job = stack.enter_context(self.attach(placement, rank))
                with as_rank(rank, (placement.world_size,)) as mesh:
                    handles.append(job.save(STEP, {**state_of(mesh, truth()), "rank": rank}))
                    assert job.wait_captured(90.0)
            for handle in handles:
                done = handle.durable if self.spec.is_durable else handle.replicated
                assert done.wait(90.0), handle
        until(self.is_everywhere)

    def is_everywhere(self) -> bool:
        """Whether every tier that is on has the step."""
        copies = [copy for host in self.cluster.hosts.values() for copy in host.status.copies]
        there = {(copy.tier, copy.rank) for copy in copies if copy.step == STEP}
        tiers = [Tier.MEMORY, *(tier for tier in (Tier.DISK, Tier.PERSISTENT) if self.spec.policy(tier).is_on)]
        tiers += [Tier.PEER] if len(self.saved_by) > 1 and self.spec.replicas else []
        return all((tier, rank) in there for tier in tiers for ranks in self.saved_by.values() for rank in ranks)

    def begin(self, ranks: Ranks, *, tiers: Collection[Tier] = tuple(Tier)) -> Placement:
        """Begin a generation that restores the step from copies in these tiers, as the supervisor plans it."""
        self.generation += 1
        old, new = (sum(map(len, placed.values())) for placed in (self.saved_by, ranks))
        hosts = self.cluster.hosts
        replies = {host_id: host.status for host_id, host in hosts.items() if host.process and not host.process.poll()}
        copies = {copy for reply in replies.values() for copy in reply.copies if copy.tier in tiers}
        addresses = {host_id: reply.address for host_id, reply in replies.items()}
        parent = (LineageEntry(1, STEP, world_size=old),)
        parts = [HostRanks(host_id, "127.0.0.1", addresses[host_id], ranks[host_id]) for host_id in ranks]
        plan = plan_restore(copies, parent, new, addresses, parts)
        assert plan is not None and plan.step == STEP and len(plan.sources) == old
        lineage = (*parent, LineageEntry(self.generation, world_size=new))
        placement = self.cluster.placement(ranks, generation=self.generation, lineage=lineage, restore=plan)
        self._configure(placement)
        return placement

    def _configure(self, placement: Placement) -> None:
        assert all(reply.ok for reply in self.cluster.configure(placement, self.spec).values())

    @contextmanager
    def attach(self, placement: Placement, rank: int) -> Iterator[Job]:
        """One rank, in this process."""
        host, step = self._host_of(placement, rank), STEP if placement.restore else None
        with attached(host, rank, placement.lineage, step, self.spec, world_size=placement.world_size) as job:
            yield job

    def environment(self, placement: Placement, rank: int) -> dict[str, str]:
        """What a rank's process gets from the daemon of its host."""
        host = self._host_of(placement, rank)
        beacon = beacon_path(host.prefix, JOB, placement.generation, rank)
        create_beacon(beacon)
        return {
            "LOCAL_WORLD_SIZE": "1",
            worker_env.JOB: JOB,
            worker_env.GENERATION: str(placement.generation),
            worker_env.HOST_ID: host.host_id,
            worker_env.BEACON: beacon,
            worker_env.SHM_PREFIX: host.prefix,
            worker_env.ENGINE_NOTIFY: str(host.state_dir / "notify.sock"),
            worker_env.RESTORE_STEP: str(STEP) if placement.restore else "",
            worker_env.CHECKPOINT: wire.encode(self.spec).decode(),
            worker_env.LINEAGE: wire.encode(placement.lineage).decode(),
        }

    def _host_of(self, placement: Placement, rank: int) -> EngineHost:
        return self.cluster.hosts[next(host.host_id for host in placement.hosts if rank in host.ranks)]

    def restore(self, placement: Placement, rank: int, *, job: Job | None = None) -> dict[str, Any]:
        """Restore one rank; its state."""
        with ExitStack() as stack:
            job = job or stack.enter_context(self.attach(placement, rank))
            with as_rank(rank, (placement.world_size,)) as mesh:
                empty = {name: torch.zeros_like(value) for name, value in truth().items()}
                state = {**state_of(mesh, empty), "rank": -1}
                assert job.restore(state) == STEP + 1
                self.check(state, rank, mesh)
        return state

    def check(self, state: Mapping[str, Any], rank: int, mesh: Any) -> None:  # noqa: ANN401 - a mesh
        """Compare with the unsharded truth, bit for bit."""
        for name, expected in state_of(mesh, truth()).items():
            assert torch.equal(local(state[name]), local(expected)), name
        assert state["rank"] == rank % sum(map(len, self.saved_by.values()))

    def restore_all(self, ranks: Ranks, *, tiers: Collection[Tier] = tuple(Tier)) -> dict[int, RestoreReport]:
        """Restore every rank. What its engine reports, by rank."""
        placement = self.begin(ranks, tiers=tiers)
        for local_ranks in ranks.values():
            for rank in local_ranks:
                self.restore(placement, rank)
        self.await_tidy()
        return self.reports()

    def reports(self) -> dict[int, RestoreReport]:
        """The newest of each rank in this generation."""
        found = [report for host in self.cluster.hosts.values() for report in self._reports_of(host)]
        return {report.rank: report for report in found if report.generation == self.generation}

    @staticmethod
    def _reports_of(host: EngineHost) -> tuple[RestoreReport, ...]:
        return host.status.restores if host.process and host.process.poll() is None else ()

    def await_tidy(self) -> None:
        """No folder of the newest generation stays."""
        until(lambda: not self.folders())

    def folders(self) -> list[Path]:
        """In which the newest generation restores."""
        return sorted((self.cluster.root / "shm").glob(f"*.g{self.generation}.*.restore"))

    def lose_memory(self) -> None:
        """All hosts are started again with nothing in memory."""
        for host in self.cluster.hosts.values():
            host.kill()
        for host in self.cluster.hosts.values():
            for path in host.segments():
                path.unlink()
        for host in self.cluster.hosts.values():
            host.start()


def needed_bytes(world: int, rank: int) -> int:
    """The bytes of the block of one rank."""
    rows = math.ceil(ROWS / world)
    return max(0, min(rows, ROWS - rank * rows)) * COLUMNS * 4


class Make(Protocol):
    """What the fixture `job_of` gives."""

    def __call__(self, ranks: Ranks, *, disk: bool = False, store: str = "", replicas: int = 1) -> ReshardedJob: ...
