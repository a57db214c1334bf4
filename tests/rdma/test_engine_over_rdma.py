"""Two engines on two hosts: replicas go by RDMA WRITE, and come back by RDMA READ."""

from __future__ import annotations

from pathlib import Path

from engine_site import SiteSettings, digest, shard, status_of
from two_engines import Begin

from flyball.contracts.checkpoints import LineageEntry

COUNTERS = Path("/sys/class/infiniband/rxe0/ports/1/hw_counters")
LARGEST_PACKET_BYTES = 4096
MIB = 1 << 20
RDMA = {"FLYBALL_CKPT_TRANSPORT": "rdma"}


def packets(name: str) -> int:
    return int((COUNTERS / name).read_text())


def test_a_lost_hosts_shard_comes_back_from_its_peer_bit_for_bit_and_all_of_it_went_by_rdma(begin: Begin) -> None:
    job = begin(SiteSettings(RDMA))
    job.begin(1, (LineageEntry(1),))
    sent_before, received_before = packets("sent_pkts"), packets("rcvd_pkts")
    job.save_everywhere(0)
    payload = shard(0, 0, 4)
    size_bytes = len(payload)
    assert job.a.digest(1, 0) == digest(payload)
    for name in "ab":
        assert job.transport(name)[0] == "rdma"
        assert job.count(name, "peer_bytes_sent_rdma") >= size_bytes
        assert job.count(name, "peer_bytes_sent") == job.count(name, "peer_bytes_sent_rdma")
    assert packets("sent_pkts") - sent_before >= size_bytes / LARGEST_PACKET_BYTES
    assert packets("rcvd_pkts") - received_before >= size_bytes / LARGEST_PACKET_BYTES

    sent_before = job.count("b", "peer_bytes_sent_rdma")
    received_before = packets("rcvd_pkts")
    job.replace_a(0)
    assert job.a.digest(1, 0) == digest(payload)
    assert [report.transport for report in status_of(job.a).restores] == ["rdma"]
    assert job.count("a", "peer_bytes_received_rdma") >= size_bytes
    assert job.count("b", "peer_bytes_sent_rdma") - sent_before >= size_bytes
    assert packets("rcvd_pkts") - received_before >= size_bytes / LARGEST_PACKET_BYTES


def test_chunks_that_did_not_change_do_not_travel_again_and_the_changed_ones_land_where_they_belong(
    begin: Begin,
) -> None:
    """Every fourth MiB changes, so that the ranges that are written lie far from each other."""
    mib, changes = 16, 4
    job = begin(SiteSettings(RDMA, mib=mib, changes=changes))
    job.begin(1, (LineageEntry(1),))
    sent = {}
    for step in range(4):
        before = job.count("a", "peer_bytes_sent_rdma"), job.count("a", "peer_bytes_sent")
        job.save_everywhere(step)
        after = job.count("a", "peer_bytes_sent_rdma"), job.count("a", "peer_bytes_sent")
        sent[step] = after[0] - before[0]
        assert sent[step] == after[1] - before[1]  # nothing by TCP
        for rank, holder in ((0, job.b), (1, job.a)):
            held = dict(map(tuple, holder.replicas(rank)))
            assert held[step] == digest(shard(rank, step, mib, changes))
    assert sent[0] > mib * MIB
    for step in range(1, 4):  # a MiB of values lies in two chunks, behind the header
        assert mib // changes * MIB <= sent[step] <= (2 * mib // changes + 1) * MIB, sent
    assert job.count("a", "replica_bytes_unchanged") >= 3 * (mib - 2 * mib // changes - 1) * MIB
