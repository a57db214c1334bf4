"""A job that some ranks saved is restored by another number of ranks, by real engines and the trainers' own restore:
from every tier, and only the bytes that are needed."""

from __future__ import annotations

import pytest
from support.hosts.engine_cluster import EngineCluster
from support.jobs.resharded import Make, Ranks, needed_bytes

from flyball.contracts.checkpoints import Tier

FOUR: Ranks = {"a": (0, 1), "b": (2, 3)}
TWO: Ranks = {"a": (0,), "b": (1,)}
MIB = 1 << 20


def test_fewer_ranks_restore_from_memory_without_a_copy(job_of: Make) -> None:
    job = job_of(FOUR)
    reports = job.restore_all(TWO)
    for report in reports.values():  # a replica of every shard is on each host
        assert report.socket_bytes == 0
        assert set(report.tier_bytes) <= {Tier.MEMORY, Tier.PEER}
        assert report.size_bytes >= needed_bytes(2, report.rank)


def test_more_ranks_on_more_hosts_get_only_the_chunks_that_they_need(job_of: Make, cluster: EngineCluster) -> None:
    job = job_of(TWO, replicas=0)
    cluster.host("c")
    reports = job.restore_all({"a": (0,), "b": (1,), "c": (2,)})
    assert reports[0].socket_bytes <= 2 * MIB and reports[0].source_tier is Tier.MEMORY  # b's header
    for rank in (1, 2):
        lower = needed_bytes(3, rank) if rank == 2 else needed_bytes(3, 1) // 2
        assert lower <= reports[rank].socket_bytes <= lower + 5 * MIB
    received = cluster.hosts["c"].status.counters["peer_bytes_received"]
    assert received <= needed_bytes(3, 2) + 5 * MIB < needed_bytes(2, 0)
    assert reports[2].source_tier is Tier.PEER and reports[2].transport == "tcp"


def test_from_the_disks_of_this_host_and_the_other(job_of: Make) -> None:
    job = job_of(FOUR, disk=True, replicas=0)
    job.lose_memory()
    reports = job.restore_all(TWO, tiers=(Tier.DISK,))
    for report in reports.values():  # its block is on its own host, and is read there
        assert set(report.tier_bytes) == {Tier.DISK}
        assert report.socket_bytes <= 5 * MIB  # two headers, each with its first chunk
    assert reports[0].source_host == "a"
    job.lose_memory()
    reports = job.restore_all({"b": (0, 1), "a": (2,)}, tiers=(Tier.DISK,))
    assert set(reports[0].tier_bytes) == {Tier.DISK}
    assert needed_bytes(3, 0) <= reports[0].socket_bytes <= needed_bytes(3, 0) + 6 * MIB


def test_from_a_shared_folder_and_from_an_object_store(
    job_of: Make, cluster: EngineCluster, s3: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLYBALL_CKPT_BROADCAST", "off")  # its ranks restore one after the other here
    job = job_of(FOUR, store=s3, replicas=0)
    job.lose_memory()
    reports = job.restore_all({"a": (0, 1, 2)}, tiers=(Tier.PERSISTENT,))
    for report in reports.values():
        assert set(report.tier_bytes) == {Tier.PERSISTENT} and report.source_host == "" and report.socket_bytes == 0


def test_tiers_are_mixed_as_they_are_there(job_of: Make, cluster: EngineCluster) -> None:
    """Host b's memory is gone: its shards come from the replicas on a, or from its disk."""
    job = job_of(FOUR, disk=True)
    host = cluster.hosts["b"]
    host.kill()
    for path in host.segments():
        path.unlink()
    host.start(FLYBALL_CKPT_REFILL="0")
    reports = job.restore_all({"a": (0,), "b": (1,)})
    assert set(reports[0].tier_bytes) == {Tier.MEMORY}
    assert reports[1].tier_bytes.keys() <= {Tier.DISK, Tier.PEER}
