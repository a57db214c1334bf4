"""Checkpoints as a job leaves them on hosts, written through the tiers, and the command line."""

from __future__ import annotations

import contextlib
import io
import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import structlog
from safetensors.numpy import save
from support.commands.flyball import run_flyball
from support.commands.run_folders import clean_environment
from support.jobs.placements import make_placement
from support.stores.shards import make_manifest, put_in_slot

from ckpt_engine.format import manifest as manifests
from ckpt_engine.format.manifest import Manifest
from ckpt_engine.settings import EngineSettings
from ckpt_engine.slots.rank_segments import RankSegments
from ckpt_engine.tiers.opening import open_disk, open_persistent
from ckpt_engine.tiers.shard_store import ShardStore
from flyball.cli.main import run_cli
from flyball.contracts import wire
from flyball.contracts.checkpoints import CheckpointSpec, Lineage, LineageEntry
from flyball.contracts.identity import Fence
from flyball.contracts.on_host.engine_wire import Configure
from flyball.contracts.on_host.segments import rank_segment, replica_segment, shm_prefix

JOB = "job"
CHUNK_BYTES = 1 << 16
FROM_SCRATCH = (LineageEntry(1),)


def shard(
    step: int, rank: int, *, generation: int = 1, world_size: int = 2, run: str = ""
) -> tuple[Manifest, bytes, bytes]:
    """(manifest, its bytes, the safetensors file)."""
    values = np.random.default_rng([generation, step, rank, *run.encode()]).random((200, 300), dtype=np.float32)
    payload = save({"model.weight": values, "step": np.array([step])}, {"step": str(step)})
    manifest = make_manifest(
        payload, step, rank, generation=generation, world_size=world_size, job=JOB, run=run, chunk_bytes=CHUNK_BYTES
    )
    return manifest, manifests.encode(manifest), payload


class CheckpointSite:
    """The hosts of one job on this machine: state folders, shared memory, disks and a store."""

    def __init__(self, root: Path, hosts: Sequence[str] = ("host-a", "host-b"), store: str = "") -> None:
        self.root = root
        self.hosts = tuple(hosts)
        self.run_id = ""  # of what is written; `configure` records it on the hosts
        self.state = root / "state"
        self.shm = root / "shm"
        self.shm.mkdir(parents=True)
        self.spec = CheckpointSpec(
            disk_dir=str(root / "disk"),
            disk_every_steps=1,
            persistent_dir=store or str(root / "store"),
            persistent_every_steps=1,
        )
        if hosts:
            self.configure()

    def configure(self, lineage: Lineage = FROM_SCRATCH) -> None:
        """Write the Configure that an engine stores for a generation."""
        placement = make_placement(
            {host: (rank,) for rank, host in enumerate(self.hosts)},
            generation=lineage[-1].generation,
            peers={host: (self.hosts[rank - 1],) for rank, host in enumerate(self.hosts)},
            lineage=lineage,
            run=self.run_id,
        )
        for host in self.hosts:
            folder = self.state / host / "engine-jobs"
            folder.mkdir(parents=True, exist_ok=True)
            order = Configure(fence=Fence(1, placement.generation), host_id=host, placement=placement, spec=self.spec)
            (folder / f"{JOB}.json").write_bytes(wire.encode(order))

    def prefix(self, host: str) -> str:
        return shm_prefix(str((self.state / host).resolve()), str(self.shm))

    def put_memory(self, step: int, *, generation: int = 1) -> None:
        """Write every rank's slot on its own host."""
        for rank, host in enumerate(self.hosts):
            self._put_slot(rank_segment(self.prefix(host), JOB, rank), step, rank, generation)

    def put_replicas(self, step: int, *, generation: int = 1) -> None:
        """Write every rank's replica on the host before its own."""
        for rank in range(len(self.hosts)):
            base = replica_segment(self.prefix(self.hosts[rank - 1]), JOB, rank)
            self._put_slot(base, step, rank, generation)

    def put_disk(self, step: int, *, generation: int = 1, ranks: Sequence[int] | None = None) -> None:
        """Write every rank's shard to its own host's disk."""
        for rank in range(len(self.hosts)) if ranks is None else ranks:
            manifest, data, payload = shard(
                step, rank, generation=generation, world_size=len(self.hosts), run=self.run_id
            )
            self.disk(self.hosts[rank]).write(manifest, data, memoryview(payload))

    def put_store(self, step: int, *, generation: int = 1, seal: bool = True) -> None:
        """Write every rank's shard to the store, and the world manifest."""
        store = self.store()
        for rank in range(len(self.hosts)):
            manifest, data, payload = shard(
                step, rank, generation=generation, world_size=len(self.hosts), run=self.run_id
            )
            store.write(manifest, data, memoryview(payload))
        if seal:
            store.seal(generation, step, len(self.hosts))

    def disk(self, host: str) -> ShardStore:
        return open_disk(self.spec.disk_dir, job=JOB, run=self.run_id, host_id=host, settings=EngineSettings())

    def store(self) -> ShardStore:
        return open_persistent(self.spec.persistent_dir, job=JOB, run=self.run_id, settings=EngineSettings())

    def _put_slot(self, base: str, step: int, rank: int, generation: int) -> None:
        manifest, _, payload = shard(step, rank, generation=generation, world_size=len(self.hosts), run=self.run_id)
        segments = RankSegments.open(base, create=True)
        try:
            put_in_slot(segments, step % 2, manifest, payload)
        finally:
            segments.close()

    @property
    def environment(self) -> dict[str, str]:
        """The options with which the command line finds this site and no other."""
        return clean_environment(FLYBALL_STATE_DIR=str(self.state), FLYBALL_SHM_DIR=str(self.shm))

    def run(self, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
        """Run `flyball ckpt` with these arguments."""
        return run_flyball(self.root, "ckpt", *arguments, **self.environment | environ)

    def call(self, *arguments: str) -> tuple[int, str, str]:
        """The same in this process, which is faster: (exit code, stdout, stderr)."""
        out, err = io.StringIO(), io.StringIO()
        with (
            pytest.MonkeyPatch.context() as patch,
            contextlib.chdir(self.root),
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
        ):
            for name, value in self.environment.items():
                patch.setenv(name, value)
            try:
                code = run_cli(["ckpt", *arguments])
            finally:
                structlog.reset_defaults()
        return code, out.getvalue(), err.getvalue()

    def json(self, *arguments: str, code: int = 0) -> Any:  # noqa: ANN401 - JSON
        """The output of a command with `-o json`, through `call`."""
        found, out, err = self.call(*arguments, "-o", "json")
        assert found == code, (out, err)
        return json.loads(out)
