"""A world of worker processes on one host with a real engine, and the generations of a job that they are."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
from checkpoint_bench.engine_host import EngineHost

from flyball.contracts.checkpoints import CheckpointSpec, LineageEntry, RestorePlan, ShardSource, Tier
from flyball.contracts.cluster import HostRanks, Placement
from flyball.contracts.identity import Fence
from flyball.contracts.on_host import worker_env
from flyball.contracts.on_host.engine_wire import NOTIFY_SOCKET, Configure
from flyball.contracts.on_host.segments import beacon_path
from flyball.sdk.beacon import create_beacon
from reshard_bench.worker import STEP

JOB = "reshard-benchmark"
_END_TIMEOUT_S = 60.0


class World:
    """As many ranks, each in a process."""

    def __init__(self, ranks: int, state_bytes: int, rendezvous: Path) -> None:
        common = {
            **os.environ,
            "WORLD_SIZE": str(ranks),
            "RENDEZVOUS": f"file://{rendezvous}",
            "STATE_BYTES": str(state_bytes),
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
        }
        self.ranks = ranks
        self._processes = [
            subprocess.Popen(
                [sys.executable, "-P", "-m", "reshard_bench.worker"],
                env={**common, "RANK": str(rank)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(ranks)
        ]

    def ask(self, *requests: dict[str, Any]) -> list[dict[str, Any]]:
        """Have each rank do its request; one request is for all."""
        for rank, process in enumerate(self._processes):
            assert process.stdin is not None
            process.stdin.write(json.dumps(requests[rank % len(requests)]) + "\n")
            process.stdin.flush()
        answers = []
        for rank, process in enumerate(self._processes):
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                raise RuntimeError(f"rank {rank} of {self.ranks} ended")
            answers.append(json.loads(line))
        return answers

    def end(self) -> None:
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.close()
        for process in self._processes:
            try:
                process.wait(_END_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@contextmanager
def world(ranks: int, state_bytes: int, rendezvous: Path) -> Iterator[World]:
    made = World(ranks, state_bytes, rendezvous)
    try:
        yield made
    finally:
        made.end()


class Generations:
    """Of one job on one host: the first saves, the others restore what it saved."""

    def __init__(self, host: EngineHost, spec: CheckpointSpec, saved_by: int) -> None:
        self._host = host
        self._spec = spec
        self._saved_by = saved_by
        self._number = 0

    def begin(self, ranks: int, tier: Tier | None = None) -> list[dict[str, str]]:
        """Begin the next generation, which restores from this tier. Returns each rank's environment."""
        self._number += 1
        number = self._number
        lineage: tuple[LineageEntry, ...] = (LineageEntry(number, world_size=ranks),)
        restore = None
        if tier is not None:
            lineage = (LineageEntry(1, STEP, world_size=self._saved_by), *lineage)
            sources = (ShardSource(rank, 1, tier, self._host.host_id, "") for rank in range(self._saved_by))
            restore = RestorePlan(STEP, {str(source.rank): (source,) for source in sources})
        placement = Placement(
            job=JOB,
            generation=number,
            world_size=ranks,
            hosts=(HostRanks(self._host.host_id, "127.0.0.1", "", tuple(range(ranks))),),
            master_address="127.0.0.1",
            master_port=1,
            peers={},
            lineage=lineage,
            restore=restore,
        )
        reply = self._host.ask(Configure(Fence(1, number), self._host.host_id, placement, self._spec))
        if not reply.ok:
            raise RuntimeError(f"the engine refused its configuration: {reply.code} {reply.message}")
        return [self._environment(placement, rank) for rank in range(ranks)]

    def _environment(self, placement: Placement, rank: int) -> dict[str, str]:
        beacon = beacon_path(self._host.prefix, JOB, placement.generation, rank)
        create_beacon(beacon)
        return {
            worker_env.JOB: JOB,
            worker_env.GENERATION: str(placement.generation),
            worker_env.HOST_ID: self._host.host_id,
            worker_env.BEACON: beacon,
            worker_env.SHM_PREFIX: self._host.prefix,
            worker_env.ENGINE_NOTIFY: str(self._host.state_dir / NOTIFY_SOCKET),
            worker_env.RESTORE_STEP: "" if placement.restore is None else str(STEP),
            worker_env.CHECKPOINT: msgspec.json.encode(self._spec).decode(),
            worker_env.LINEAGE: msgspec.json.encode(placement.lineage).decode(),
            "LOCAL_WORLD_SIZE": str(placement.world_size),
        }
