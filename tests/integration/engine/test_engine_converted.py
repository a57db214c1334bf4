"""A step that the ranks of a host stored once is exported, imported again, and restored by a job: bit for bit."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from support.commands.here import run_here
from support.hosts.engine_cluster import EngineCluster
from support.hosts.engines import JOB
from support.jobs.attached import attached

from ckpt_engine.format.stored_layout import read_file
from flyball.contracts.checkpoints import CheckpointSpec, LineageEntry, RestorePlan, Tier
from tests.integration.engine.test_engine_stored_once import STEP, blank, ddp_state, save_all, tensors_of

ROOT = Path(__file__).parents[3]


def command(*words: object) -> None:
    done = run_here("ckpt", *map(str, words), environment={**os.environ, "PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("kind", ["torch", "dcp"])
def test_what_was_stored_once_is_exported_imported_and_restored(cluster: EngineCluster, kind: str) -> None:
    host, root = cluster.host("a"), cluster.root
    disk = CheckpointSpec(disk_dir=str(root / "disk"), disk_every_steps=1, replicas=0)
    save_all(cluster, disk, (0, 1))
    saved = root / "disk" / "a" / JOB / "g1" / f"step{STEP}"
    manifests = [saved / f"rank{rank}.manifest" for rank in (0, 1)]
    assert all(read_file(path.read_bytes(), str(path)).layout is not None for path in manifests), "stored once"
    command("export", saved, "--format", kind, "--to", root / "out")
    expected: dict[str, Any] = ddp_state(0, 2)
    if kind == "torch":
        found = torch.load(root / "out/state.pt", weights_only=True)
        for name, value in expected["model"].state_dict().items():
            assert torch.equal(found["model"][name], value)
    source = root / "out/state.pt" if kind == "torch" else root / "out"
    command("import", source, "--to", root / "store" / JOB, "--step", STEP, "--job", JOB)

    host.lose()
    host.start()
    spec = CheckpointSpec(persistent_dir=str(root / "store"), persistent_every_steps=100, replicas=0)
    lineage = (LineageEntry(0, STEP, world_size=1), LineageEntry(1, world_size=2))
    plan = RestorePlan(STEP, {"0": (cluster.source(0, Tier.PERSISTENT, "", generation=0),)})
    assert cluster.configure(cluster.placement({"a": (0, 1)}, lineage=lineage, restore=plan), spec)["a"].ok
    for rank in (0, 1):
        state = blank(ddp_state(1, 2))
        with attached(host, rank, lineage, STEP, spec) as job:
            assert job.restore(state) == STEP + 1
        assert state["rank"] == 0, "what was not sharded is rank 0's"
        for name, value in tensors_of(expected).items():
            assert torch.equal(tensors_of(state)[name], value), name
