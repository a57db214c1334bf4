"""Real gloo processes on two hosts train with FSDP2, tensor parallelism or both, and save a step. Other numbers of them
restore it in other layouts, from each tier: bit for bit the unsharded truth."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from support.clocks.waits import until
from support.commands.warm_python import WarmPython
from support.hosts.engine_cluster import EngineCluster
from support.jobs.resharded import Ranks, ReshardedJob
from support.jobs.sharded_models import MODELS, run_ranks

from flyball.contracts.checkpoints import Tier
from flyball.contracts.cluster import Placement

SCRIPT = """
import flyball

phase, layout, truth = sys.argv[1:]
model, optimizer = build(layout)
state = {"model": model, "optimizer": optimizer, "epoch": 5}
job = flyball.attach()
if phase == "save":
    train(model, optimizer)
    found = everything(model, optimizer)
    handle = job.save(3, state)
    assert handle.durable.wait(120) and handle.replicated.wait(120), handle
    if rank == 0:
        torch.save(found, truth)
else:
    state["epoch"] = 0
    assert job.restore(state) == 4
    assert state["epoch"] == 5
    compare(everything(model, optimizer), torch.load(truth, weights_only=True), "")
    train(model, optimizer)  # and it trains on
dist.barrier()
job.close()
dist.destroy_process_group()
"""


def placed(hosts: str, world: int) -> Ranks:
    """Ranks spread over hosts with names of one letter."""
    each = -(-world // len(hosts))
    spread = {host: tuple(range(world))[number * each : (number + 1) * each] for number, host in enumerate(hosts)}
    return {host: ranks for host, ranks in spread.items() if ranks}


Restored = dict[Tier, list[tuple[str, int]]]  # layouts and numbers of ranks
# Tiers carry bytes, whatever the layouts; one loader takes layouts apart and puts them together, whichever the tier. So
# every tier is met, every layout on either side, more ranks than before and fewer, but not each with each.
PROOFS: list[tuple[str, int, Restored]] = [
    (
        "fsdp",
        4,
        {
            Tier.MEMORY: [("fsdp", 3)],
            Tier.PEER: [("plain", 1)],
            Tier.DISK: [("tp", 2)],
            Tier.PERSISTENT: [("fsdp2x2", 4), ("fsdp", 2)],
        },
    ),
    ("tp", 2, {Tier.MEMORY: [("fsdp", 3)], Tier.PEER: [("fsdp2x2", 4)], Tier.DISK: [("fsdp", 4)]}),
    ("fsdp2x2", 4, {Tier.MEMORY: [("tp", 2)], Tier.PERSISTENT: [("fsdp", 3)]}),
    ("plain", 1, {Tier.DISK: [("fsdp2x2", 4)], Tier.PERSISTENT: [("tp", 2)]}),
]


@pytest.mark.parametrize(
    ("layout", "ranks", "restored"),
    [
        pytest.param("fsdp", 4, {Tier.MEMORY: [("tp", 2)], Tier.PEER: [("fsdp", 3)]}, id="usual"),
        *(pytest.param(*proof, marks=pytest.mark.proof, id=f"{proof[0]}-{proof[1]}") for proof in PROOFS),
    ],
)
def test_what_some_ranks_saved_others_restore(
    made_job: Callable[..., ReshardedJob],
    cluster: EngineCluster,
    warm_python: WarmPython,
    tmp_path: Path,
    layout: str,
    ranks: int,
    restored: Restored,
) -> None:
    job = made_job("ab", disk=True, store=str(cluster.root / "store"))
    truth = str(tmp_path / "truth.pt")

    def run(placement: Placement, phase: str, layout: str) -> None:
        run_ranks(
            warm_python,
            MODELS + SCRIPT,
            *(phase, layout, truth),
            world=placement.world_size,
            rendezvous=tmp_path / f"{phase}-{placement.generation}",
            of_rank=lambda rank: job.environment(placement, rank),
        )

    run(job.begin_to_save(placed("ab", ranks)), "save", layout)
    until(job.is_everywhere)
    seen: set[int] = set()  # numbers of ranks that restored it
    for tier, worlds in restored.items():
        for other, world in worlds:
            tiers, hosts = (Tier.MEMORY, Tier.PEER), "ab"
            if tier in (Tier.DISK, Tier.PERSISTENT):
                tiers = (tier,)
                job.lose_memory()
            elif tier is Tier.PEER:
                hosts = "cd"  # which have nothing
                for host_id in set(hosts) - cluster.hosts.keys():
                    cluster.host(host_id)
            seen.add(world)
            run(job.begin(placed(hosts, world), tiers=tiers), "load", other)
            job.await_tidy()
            reports = job.reports()
            assert len(reports) == world
            reached = {tier for report in reports.values() for tier in report.tier_bytes}
            if tier is Tier.MEMORY:
                assert reached <= {Tier.MEMORY, Tier.PEER}
            elif ranks not in seen:  # else engines have brought whole shards into slots
                assert reached == {tier}
