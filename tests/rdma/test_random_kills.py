"""Engines of two hosts are killed at random moments of the replication between them, again and again.

`FLYBALL_RDMA_KILLS` is the number of rounds; `make test-rdma-faults` runs a hundred.
"""

from __future__ import annotations

import os
import random
import statistics
import time

from engine_site import SiteSettings, digest, shard
from two_engines import PEERS, RANKS, Begin

from flyball.contracts.checkpoints import LineageEntry

ROUNDS = int(os.environ.get("FLYBALL_RDMA_KILLS", "2"))
SEED = int(os.environ.get("FLYBALL_RDMA_KILLS_SEED", "1"))
MIB = 8
HOLDERS = (("a", 1), ("b", 0))  # which host has the replicas of which rank
DEADLINE_S = 30.0  # from a kill until both ranks, and both replicas, have the step


def test_no_kill_of_either_side_leaves_a_wrong_byte_or_hangs_the_other(begin: Begin) -> None:
    chance = random.Random(SEED)
    job = begin(SiteSettings({"FLYBALL_CKPT_TRANSPORT": "rdma"}, mib=MIB))
    job.begin(1, (LineageEntry(1),))
    saved: dict[tuple[int, int], str] = {}  # by rank and step

    def check_replicas() -> None:
        """What counts is what was saved, and what the engine says it holds is there."""
        for host, rank in HOLDERS:
            for step, found in job.sites[host].replicas(rank):
                assert found == saved[rank, step], f"a wrong byte of rank {rank}, step {step} on host {host}"

    def note(step: int) -> None:
        saved.update({(rank, step): digest(shard(rank, step, MIB)) for rank in RANKS.values()})

    note(0)
    job.save_everywhere(0)
    note(1)
    assert job.a.save(1)
    usual_s = job.b.save_and_time(1)

    took: list[float] = []
    in_flight = torn = 0
    for step in range(2, ROUNDS + 2):
        victim = chance.choice("ab")
        pause_s = chance.uniform(0.0, usual_s)
        note(step)
        assert job.sites[PEERS[victim]].save(step)
        assert job.sites[victim].save_and_kill(step, pause_s)
        began = time.monotonic()
        torn += any(job.sites[host].has_torn_replica(rank) for host, rank in HOLDERS)
        in_flight += any(step not in dict(job.sites[host].replicas(rank)) for host, rank in HOLDERS)
        check_replicas()
        job.addresses[victim] = job.sites[victim].start()
        for name, site in job.sites.items():
            left_s = DEADLINE_S - (time.monotonic() - began)
            assert site.await_world_step(step, left_s), (
                f"round {step - 1}: {victim} was killed {pause_s:.3f} s after the save, and host {name} has no step "
                f"{step} after {DEADLINE_S:.0f} s"
            )
        took.append(time.monotonic() - began)
        check_replicas()
        for host, rank in HOLDERS:
            assert step in job.sites[host].held_steps(rank)
        for name in PEERS:  # an engine that was killed after its copy has sent nothing since
            assert job.count(name, "peer_bytes_sent") == job.count(name, "peer_bytes_sent_rdma")

    last = ROUNDS + 1
    job.replace_a(last)
    assert job.a.digest(1, last) == saved[0, last]
    print(
        f"{ROUNDS} kills (seed {SEED}): {in_flight} before both replicas were there, {torn} in the middle of one. "
        f"Until both were there: median {statistics.median(took):.1f} s, longest {max(took):.1f} s. "
        f"An undisturbed step takes {usual_s:.1f} s."
    )
