"""Real engines restore what only an object store has: replicas on several hosts, which read its bytes once between
them. The store, a process of its own, counts what it gives out."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest
from support.clocks.waits import until
from support.hosts.engine_cluster import EngineCluster
from support.stores.stored_replicas import ALIKE_BYTES, CountedStore, Job

from flyball.contracts.checkpoints import Tier
from flyball.contracts.fault_points import VARIABLE


@pytest.fixture
def job(cluster: EngineCluster, store: CountedStore) -> Job:
    return Job(cluster, store)


def once(job: Job) -> int:
    """The bytes that all ranks need, each once; and as much again as chunks are cut."""
    return ALIKE_BYTES + len(job.saved) * (2_000_000 + (3 << 20))


def test_replicas_on_several_hosts_read_the_store_once_and_pass_it_on(job: Job) -> None:
    job.save({"a": (0, 1), "b": (2,), "c": (3,)})
    for host_id in job.ranks:
        job.start(host_id, FLYBALL_CKPT_BROADCAST="on")
    before = job.store.given()
    job.begin()
    reports = job.await_restored()
    assert job.store.given() - before <= once(job) < sum(map(len, job.saved.values()))
    assert all(report.source_tier is Tier.PERSISTENT for report in reports.values())
    tiers = {rank: report.tier_bytes for rank, report in reports.items()}
    assert all(sum(tiers[rank].values()) == len(job.saved[rank]) for rank in tiers), tiers
    assert all(tiers[rank][Tier.PEER] > ALIKE_BYTES // 2 for rank in (2, 3)), "from two others"
    assert sum(tiers[rank].get(Tier.MEMORY, 0) for rank in (0, 1)) > ALIKE_BYTES // 2, "from the rank beside it"
    assert tiers[2][Tier.PEER] == reports[2].socket_bytes and reports[2].transport == "tcp"
    for host in job.cluster.hosts.values():
        assert [line["reason"] for line in host.logged("broadcast_load")] == ["broadcast = on"]
        assert not host.logged("broadcast_source_skipped")
        assert b'"store"' in (host.state_dir / "engine-bandwidths.json").read_bytes(), "for the next restore"


def test_auto_measures_both_ways_and_says_why_it_chose(job: Job) -> None:
    job.save({"a": (0,), "b": (1,)})
    for host_id in job.ranks:
        job.start(host_id)
    job.begin()
    job.await_restored()
    for host in job.cluster.hosts.values():
        (line,) = [*host.logged("broadcast_load"), *host.logged("broadcast_load_not_used")]
        assert "MB/s from the store (a probe of its shard)" in str(line["reason"])
        assert "MB/s from another host (a probe from" in str(line["reason"])


def test_without_broadcast_each_rank_reads_for_itself(job: Job) -> None:
    job.save({"a": (0,), "b": (1,)})
    for host_id in job.ranks:
        job.start(host_id, FLYBALL_CKPT_BROADCAST="off")
    before = job.store.given()
    job.begin()
    reports = job.await_restored()
    assert job.store.given() - before >= sum(map(len, job.saved.values()))
    assert all(report.tier_bytes == {} and report.socket_bytes == 0 for report in reports.values())


def test_a_host_that_dies_while_it_passes_bytes_on_is_done_without(job: Job) -> None:
    job.save({"a": (0,), "b": (1,), "c": (2,)})
    job.start("a", FLYBALL_CKPT_BROADCAST="on", **{VARIABLE: "engine.chunks_announced"})
    for host_id in "bc":
        job.start(host_id, FLYBALL_CKPT_BROADCAST="on")
    job.begin()
    job.await_restored("b", "c")
    dead = job.cluster.hosts["a"].process
    assert dead is not None and dead.wait(90) != 0
    assert job.cluster.hosts["b"].logged("broadcast_source_skipped") or job.cluster.hosts["c"].logged(
        "broadcast_source_skipped"
    )


def test_a_host_that_never_begins_is_waited_for_no_longer_than_its_time(job: Job) -> None:
    job.save({"a": (0,), "b": (1,)})
    for host_id in job.ranks:
        job.start(host_id, FLYBALL_CKPT_BROADCAST="on", FLYBALL_CKPT_IO_TIMEOUT_S="1")
    job.begin("b")
    job.await_restored("b")
    (skipped,) = job.cluster.hosts["b"].logged("broadcast_source_skipped")
    assert skipped["source"] == "a" and "did not have the chunks in time" in str(skipped["reason"])


def test_a_host_that_does_not_share_is_not_waited_for(job: Job) -> None:
    job.save({"a": (0,), "b": (1,)})
    job.start("a", FLYBALL_CKPT_BROADCAST="off")
    job.start("b", FLYBALL_CKPT_BROADCAST="on")
    job.begin()
    job.await_restored()


def _bytes_at(path: Path, offset: int, count: int) -> bytes:
    with suppress(FileNotFoundError), path.open("rb") as file:  # which gets its name when it is whole
        file.seek(offset)
        return file.read(count)
    return b""


def test_bytes_that_are_damaged_before_they_are_passed_on_are_read_from_the_store(job: Job) -> None:
    job.save({"a": (0,), "b": (1,)})
    for host_id in job.ranks:
        job.start(host_id, FLYBALL_CKPT_BROADCAST="on")
    a, b = job.cluster.hosts["a"], job.cluster.hosts["b"]
    job.begin("a")
    at, right = ALIKE_BYTES // 4, job.saved[0][ALIKE_BYTES // 4 :][:100]
    until(lambda: any(_bytes_at(path, at, len(right)) == right for path in a.segments()))
    (slot,) = [path for path in a.segments() if path.suffix in (".s0", ".s1")]
    with slot.open("r+b") as file:  # in what it has read, and is about to pass on
        file.seek(at)
        file.write(bytes(len(right)))
    job.begin("b")
    job.await_restored("b")
    (skipped,) = b.logged("broadcast_source_skipped")
    assert "does not match its checksum" in str(skipped["reason"])
    assert b.status.counters["corrupt_copies"] == 1
