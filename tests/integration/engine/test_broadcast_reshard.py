"""Real engines restore what only an object store has, by another number of ranks: hosts that want the same bytes read
them once between them, whichever rank saved them, and do without a host that is dead, slow or wrong."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from pathlib import Path

import pytest
from support.clocks.waits import until
from support.hosts.engine_cluster import EngineCluster
from support.hosts.engines import JOB, EngineHost, Trainer
from support.stores.stored_replicas import ALIKE_BYTES, LINEAGE, RUN, STEP, CountedStore, Job

from ckpt_engine.contracts.control_views import RestoreAnswer, RestoreState
from ckpt_engine.contracts.notices import RestoreMoved
from ckpt_engine.contracts.wanted_chunks import encode_wanted, wanted_name
from ckpt_engine.format.integrity import chunk_count
from ckpt_engine.trainer.restore.load_shard import read_manifest
from flyball.contracts.checkpoints import LineageEntry, RestorePlan, RestoreReport, Tier
from flyball.contracts.fault_points import VARIABLE
from flyball.contracts.identity import Fence
from flyball.contracts.on_host.engine_wire import Configure

ON = {"FLYBALL_CKPT_BROADCAST": "on"}
MIB = 1 << 20
Ranks = Mapping[str, tuple[int, ...]]
Wanted = Mapping[int, tuple[int, ...]]  # by rank: the shards that it wants, whole


class Resharded:
    """Replicas of another number of ranks. Each wants the whole shard of the rank of its number, or of others."""

    def __init__(self, job: Job, saved_by: Ranks, **environment: str) -> None:
        self.job = job
        self.environment = {**ON, **environment}
        job.save(saved_by)
        self.saved_by = sum(map(len, saved_by.values()))
        self.ranks: Ranks = {}
        self.before = 0

    def start(self, host_id: str, **environment: str) -> EngineHost:
        if host_id not in self.job.cluster.hosts:
            host = self.job.cluster.host(host_id)
            host.kill()
        return self.job.start(host_id, **{**self.environment, **environment})

    def begin(self, ranks: Ranks, *hosts: str) -> None:
        """Begin the generation on these hosts (none named: all). All are started."""
        cluster = self.job.cluster
        self.ranks = ranks
        self.before = self.job.store.given()
        count = sum(map(len, ranks.values()))
        sources = {str(rank): (cluster.source(rank, Tier.PERSISTENT, ""),) for rank in range(self.saved_by)}
        lineage = (LineageEntry(1, STEP, world_size=self.saved_by), LineageEntry(2, world_size=count))
        placement = cluster.placement(ranks, generation=2, lineage=lineage, restore=RestorePlan(STEP, sources), run=RUN)
        for host_id in hosts or tuple(ranks):
            assert cluster.hosts[host_id].ask(Configure(Fence(1, 2), host_id, placement, self.job.spec)).ok

    def trainer(self, host_id: str, rank: int, *wanted: int) -> Asking:
        return Asking(self.job, self.job.cluster.hosts[host_id], rank, wanted or (rank % self.saved_by,))

    def ask_all(self, *hosts: str) -> list[Asking]:
        """The trainers of these hosts (none named: all) ask."""
        found = [
            self.trainer(host, rank)
            for host, ranks in self.ranks.items()
            for rank in ranks
            if host in hosts or not hosts
        ]
        for one in found:
            one.ask()
        return found

    def given(self) -> int:
        return self.job.store.given() - self.before

    def once(self) -> int:
        """The bytes of a replica, each once; and the first chunk of every shard, which every host reads."""
        own = len(self.job.saved) * (2_000_000 + 3 * MIB)
        return ALIKE_BYTES + own + len(self.ranks) * self.saved_by * MIB

    def reports(self) -> dict[int, RestoreReport]:
        hosts = [self.job.cluster.hosts[host_id] for host_id in self.ranks]
        return {report.rank: report for host in hosts for report in host.status.restores}

    def await_tidy(self) -> None:
        until(lambda: not list((self.job.cluster.root / "shm").glob("*.restore")))


class Asking:
    """The trainer of a rank: asks for whole shards, and compares what is brought with what was saved."""

    def __init__(self, job: Job, host: EngineHost, rank: int, wanted: tuple[int, ...]) -> None:
        self.job = job
        self.rank = rank
        self.wanted = wanted
        self.trainer = Trainer(host, rank, 2, LINEAGE)
        self.control = self.trainer.segments.control

    def folder(self) -> Path:
        until(lambda: self.control.read_restore().state is not RestoreState.PENDING)
        words = self.control.read_restore()
        assert words.state in (RestoreState.FOLDER, RestoreState.READY), words.error
        return Path(words.path)

    def ask(self) -> None:
        folder = self.folder()
        chunks = {}
        for saved in self.wanted:
            manifest = read_manifest(folder / f"rank{saved}.safetensors")
            chunks[saved] = range(chunk_count(manifest.payload_bytes, manifest.chunk_bytes))
        (folder / f"{self.rank}.new").write_bytes(encode_wanted(chunks))
        (folder / f"{self.rank}.new").rename(folder / wanted_name(self.rank, 0))
        self.trainer.notify(RestoreMoved(JOB, self.rank, 2))

    def await_brought(self) -> None:
        until(lambda: self.control.read_restore().state in (RestoreState.READY, RestoreState.FAILED))
        words = self.control.read_restore()
        assert words.state is RestoreState.READY, words.error
        for saved in self.wanted:
            assert (Path(words.path) / f"rank{saved}.safetensors").read_bytes() == self.job.saved[saved]

    def finish(self) -> None:
        """It has restored."""
        self.control.answer_restore(2, RestoreAnswer.DONE)
        self.trainer.notify(RestoreMoved(JOB, self.rank, 2))


def complete(askings: list[Asking]) -> None:
    for asking in askings:
        asking.await_brought()
        asking.finish()


@pytest.fixture
def job(cluster: EngineCluster, store: CountedStore) -> Job:
    return Job(cluster, store)


def test_fewer_hosts_read_the_store_once_whichever_ranks_saved_the_bytes(job: Job) -> None:
    """As after the loss of a cluster, with one host less. Each rank wants another shard, of the same bytes."""
    resharded = Resharded(job, {"a": (0,), "b": (1,), "c": (2,), "d": (3,)})
    ranks = {"a": (0,), "b": (1,), "c": (2,)}
    for host_id in ranks:
        resharded.start(host_id)
    resharded.begin(ranks)
    complete(resharded.ask_all())
    assert resharded.given() <= resharded.once() < 3 * ALIKE_BYTES
    resharded.await_tidy()  # as soon as every host has its parts
    reports = resharded.reports()
    for rank in range(3):
        assert sum(reports[rank].tier_bytes.values()) == len(job.saved[rank])
        assert reports[rank].tier_bytes[Tier.PEER] > ALIKE_BYTES // 2, "from two others"
        assert reports[rank].socket_bytes >= reports[rank].tier_bytes[Tier.PEER] and reports[rank].transport == "tcp"
    for host_id in ranks:
        assert [line["reason"] for line in job.cluster.hosts[host_id].logged("broadcast_load")] == ["broadcast = on"]
        assert not job.cluster.hosts[host_id].logged("broadcast_source_skipped")


def test_more_ranks_copy_within_their_host_what_is_alike_there(job: Job) -> None:
    resharded = Resharded(job, {"a": (0,), "b": (1,)})
    ranks = {"a": (0, 1), "b": (2,)}
    for host_id in ranks:
        resharded.start(host_id)
    resharded.begin(ranks)
    complete(resharded.ask_all())
    assert resharded.given() <= resharded.once()
    until(lambda: len(resharded.reports()) == 3)
    tiers = [resharded.reports()[rank].tier_bytes for rank in (0, 1)]
    assert sum(found.get(Tier.MEMORY, 0) for found in tiers) > ALIKE_BYTES // 2


def test_hosts_that_want_different_bytes_read_for_themselves(job: Job) -> None:
    resharded = Resharded(job, {"a": (0,), "b": (1,), "c": (2,)})
    for host_id in "ab":
        resharded.start(host_id)
    resharded.begin({"a": (0,), "b": (1,)})
    one, other = resharded.trainer("a", 0), resharded.trainer("b", 1)
    for asking, kept in ((one, range(2, 10)), (other, range(12, 20))):
        folder = asking.folder()
        (folder / "its.new").write_bytes(encode_wanted({0: kept}))
        (folder / "its.new").rename(folder / wanted_name(asking.rank, 0))
    for asking in (one, other):
        until(lambda asking=asking: asking.control.read_restore().state is RestoreState.READY)
        asking.finish()
    assert resharded.given() <= (2 * 3 + 16) * MIB + (64 << 10)  # and headers
    for host_id in "ab":
        (line,) = job.cluster.hosts[host_id].logged("broadcast_load_not_used")
        assert line["reason"] == "other hosts want few of the same bytes, or none"


def test_auto_measures_before_it_chooses(job: Job) -> None:
    resharded = Resharded(job, {"a": (0,), "b": (1,), "c": (2,)}, FLYBALL_CKPT_BROADCAST="auto")
    for host_id in "ab":
        resharded.start(host_id)
    resharded.begin({"a": (0,), "b": (1,)})
    complete(resharded.ask_all())
    for host_id in "ab":
        host = job.cluster.hosts[host_id]
        (line,) = [*host.logged("broadcast_load"), *host.logged("broadcast_load_not_used")]
        assert "MB/s from the store" in str(line["reason"]) and "MB/s from another host" in str(line["reason"])


def test_a_host_that_dies_while_it_passes_bytes_on_is_done_without(job: Job) -> None:
    resharded = Resharded(job, {"a": (0,), "b": (1,), "c": (2,), "d": (3,)})
    resharded.start("a", **{VARIABLE: "engine.chunks_announced"})
    for host_id in "bc":
        resharded.start(host_id)
    resharded.begin({"a": (0,), "b": (1,), "c": (2,)})
    askings = resharded.ask_all()
    complete(askings[1:])
    dead = job.cluster.hosts["a"].process
    assert dead is not None and dead.wait(90) != 0
    assert any(job.cluster.hosts[host_id].logged("broadcast_source_skipped") for host_id in "bc")


def test_a_host_whose_ranks_never_ask_is_waited_for_no_longer_than_its_time(job: Job) -> None:
    resharded = Resharded(job, {"a": (0,), "b": (1,), "c": (2,)}, FLYBALL_CKPT_IO_TIMEOUT_S="1")
    for host_id in "ab":
        resharded.start(host_id)
    resharded.begin({"a": (0,), "b": (1,)})
    complete(resharded.ask_all("b"))
    (skipped,) = job.cluster.hosts["b"].logged("broadcast_source_skipped")
    assert skipped["source"] == "a" and "Not all ranks have asked" in str(skipped["reason"])
    complete(resharded.ask_all("a"))


def test_a_host_that_does_not_share_is_not_waited_for(job: Job) -> None:
    resharded = Resharded(job, {"a": (0,), "b": (1,), "c": (2,)})
    resharded.start("a", FLYBALL_CKPT_BROADCAST="off")
    resharded.start("b")
    resharded.begin({"a": (0,), "b": (1,)})
    complete(resharded.ask_all())
    (skipped,) = job.cluster.hosts["b"].logged("broadcast_source_skipped")
    assert "does not share" in str(skipped["reason"])


def late(job: Job) -> tuple[Resharded, Asking, Asking]:
    """Host a has waited for b in vain and read everything; b's rank asks only now."""
    short = {"FLYBALL_CKPT_IO_TIMEOUT_S": "1", "FLYBALL_CKPT_HANDSHAKE_TIMEOUT_S": "2"}
    resharded = Resharded(job, {"a": (0,), "b": (1,), "c": (2,)}, **short)
    for host_id in "ab":
        resharded.start(host_id)
    resharded.begin({"a": (0,), "b": (1,)})
    (first,) = resharded.ask_all("a")
    first.await_brought()
    return resharded, first, resharded.trainer("b", 1)


def test_bytes_that_are_damaged_before_they_are_passed_on_are_read_from_the_store(job: Job) -> None:
    resharded, first, second = late(job)
    shard = first.folder() / "rank0.safetensors"
    with shard.open("r+b") as file:
        for chunk in range(1, 22):
            file.seek(chunk * MIB + 5)
            file.write(bytes(100))
    second.ask()
    complete([second])
    b = job.cluster.hosts["b"]
    assert "does not match its checksum" in str(b.logged("broadcast_source_skipped")[-1]["reason"])
    assert b.status.counters["corrupt_copies"] == 1
    first.finish()
    resharded.await_tidy()


def test_a_host_that_stands_still_is_waited_for_no_longer_than_its_time(job: Job) -> None:
    _, first, second = late(job)
    engine = job.cluster.hosts["a"].process
    assert engine is not None
    os.kill(engine.pid, signal.SIGSTOP)
    try:
        second.ask()
        complete([second])
    finally:
        os.kill(engine.pid, signal.SIGCONT)
    assert job.cluster.hosts["b"].logged("broadcast_source_skipped")
    first.finish()
