"""What ranks of several hosts hold alike is stored once in the store that they share. Whatever a kill of any of them
leaves, at any write, the step restores byte for byte on every rank, or does not count."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import xxhash
from support.clocks.waits import until
from support.stores.alike_shards import Tensors, as_payload, ddp_state, hsdp_state
from support.stores.places import Place
from support.stores.shards import make_manifest, put_in_slot

from ckpt_engine.contracts.generation import HostGeneration
from ckpt_engine.contracts.peer_wire import StorageDecision, StorageStage, StorageVote, TierNaming
from ckpt_engine.counters import Counters
from ckpt_engine.rules.storage_plan import HeldShard, OddReplicas
from ckpt_engine.rules.storage_votes import StorageVotes
from ckpt_engine.tiers.memory import MemoryTier
from ckpt_engine.tiers.shard_store import ShardStore
from ckpt_engine.tiers.storage import Storage
from ckpt_engine.tiers.writing import storing_across_hosts
from ckpt_engine.tiers.writing.slot_shards import SlotShards
from ckpt_engine.tiers.writing.storing_across_hosts import StoringAcrossHosts
from ckpt_engine.tiers.writing.storing_together import StoringTogether
from flyball.contracts.checkpoints import CheckpointSpec, LineageEntry, Tier
from flyball.contracts.cluster import HostRanks, Placement
from flyball.contracts.errors import Conflict, CorruptShard, StorageFull, Unreachable
from flyball.contracts.identity import Fence
from flyball.contracts.on_host.engine_wire import Configure

HOSTS = {"a": (0, 1), "b": (2, 3), "c": (4,)}
WORLD = 5
LINEAGE = (LineageEntry(1),)
DEADLINE_S = 90.0
SIZES = (200_000, 150_000, 150_000, 75_000, 25_000)


def state(step: int, rank: int) -> Tensors:
    return ddp_state(step, rank, sizes=SIZES)


class Killed(BaseException):
    """The engine's process is no more."""


class Machine:
    """One host: its slots, and the writers' side of the shared store in an engine that can be killed."""

    def __init__(self, job: Job, host_id: str, root: Path) -> None:
        self.job, self.host_id, self.ranks = job, host_id, HOSTS[host_id]
        self.memory = MemoryTier(str(root / f"flyball-{host_id}"), "job", host_id)
        self.counters = Counters()
        self.odd: list[OddReplicas] = []  # of several machines
        self.odd_here: list[OddReplicas] = []
        self.dead = False
        self.coordinator_down_s = 0.0
        self.engine = 0  # a number: a killed one does nothing more
        self.start()

    def start(self, storage: Storage | None = None) -> None:
        """The slots are still there, and nothing else."""
        hosts = tuple(HostRanks(name, "127.0.0.1", "", ranks) for name, ranks in HOSTS.items())
        placement = Placement("job", 1, WORLD, hosts, "127.0.0.1", 1, {}, LINEAGE, None)
        generation = HostGeneration(Configure(Fence(1, 1), self.host_id, placement, CheckpointSpec()), self.host_id)
        self.generation = generation
        self.dead = False
        self.engine += 1
        engine = self.engine
        self.store = ShardStore(
            storage or self.job.place.storage(), tier=Tier.PERSISTENT, job="job", host_id="", ranks=self.ranks
        )
        self.store.scan()
        self.cohort = Cohort(self)
        across = StoringAcrossHosts(
            generation,
            self.cohort,
            memory=self.memory,
            disk=self.store,
            counters=self.counters,
            coordinator_down_s=lambda: self.coordinator_down_s,
            on_compared=lambda step, found: self.odd_here.extend(found.differing),
            on_compared_across=lambda step, found: self.odd.extend(found.differing),
            on_vote=lambda rank: self.job.take_vote(self, rank) if engine == self.engine else None,
        )
        self.together = StoringTogether(
            generation,
            memory=self.memory,
            disk=self.store,
            counters=self.counters,
            on_compared=lambda step, found: self.odd_here.extend(found.differing),
            across=across,
        )
        self.together.learn(self.job.naming)

    def write(self, step: int, rank: int) -> int:
        """As `DiskWriter` does."""
        together, store = self.together, self.store
        try:
            if store.holds(1, step, rank):
                return 0
            with self.memory.using(rank) as entry:
                found = self.memory.find(entry, 1, step) if entry is not None else None
                if entry is None or found is None:
                    raise CorruptShard("The step was overwritten.")
                view, manifest, data = found
                payload = entry.segments.payload(view.index)
                written = together.write(step, payload, manifest, data)
                return store.write(manifest, data, payload) if written is None else written
        finally:
            together.withdraw(step, rank)


class Cohort:
    """Looks into the other machines' slots."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine

    @property
    def ranks(self) -> tuple[int, ...]:
        cohorts = self._machine.job.cohorts
        return next(ranks for ranks in cohorts if set(self._machine.ranks) <= set(ranks))

    def ask(self, step: int, deadline_s: float) -> Described:
        assert deadline_s > time.monotonic()
        return Described(self._machine, step)


class Described:
    def __init__(self, asking: Machine, step: int) -> None:
        self.held: Mapping[int, HeldShard] = {}
        self._payloads: dict[int, bytes] = {}
        for machine in asking.job.machines.values():
            if machine is asking or not set(machine.ranks) <= set(asking.cohort.ranks):
                continue
            with ExitStack() as using:
                shards = SlotShards(using, machine.memory, machine.generation, step)
                if machine.dead or shards.held.keys() != set(machine.ranks):
                    raise Unreachable(f"{machine.host_id} does not answer.")
                self.held = {**self.held, **shards.held}
                self._payloads |= {rank: os.pread(p.descriptor, len(p), 0) for rank, p in shards.payloads.items()}

    def hash_range(self, rank: int, begin: int, end: int) -> bytes:
        return xxhash.xxh3_128_digest(self._payloads[rank][begin:end])


class Dying:
    """A storage; the engine that uses it is killed before or after a write, counted from 1."""

    def __init__(self, machine: Machine, number: int, *, before: bool) -> None:
        self._machine, self._storage = machine, machine.job.place.storage()
        self._left, self._before = number, before
        self._is_gone = False
        self._lock = threading.Lock()

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - any method
        if self._is_gone:
            raise Killed
        return getattr(self._storage, name)

    def write(self, name: str, parts: Any, size_bytes: int) -> None:  # noqa: ANN401 - the protocol's
        with self._lock:
            self._left -= 1
            if self._left == 0:
                self._machine.job.wait_for_others(self._machine)
            if self._left == 0 and self._before:
                self._die()
            if self._is_gone:
                raise Killed
            self._storage.write(name, parts, size_bytes)
            if self._left == 0:
                self._die()

    def _die(self) -> None:
        self._is_gone = self._machine.dead = True
        raise Killed


class Job:
    """Three machines with five ranks, and the coordinator's part."""

    def __init__(self, root: Path, place: Place, cohorts: Sequence[Sequence[int]] = (tuple(range(WORLD)),)) -> None:
        self.place = place
        self.cohorts = [tuple(ranks) for ranks in cohorts]
        self.naming = TierNaming(Tier.PERSISTENT, -1)
        self.votes = StorageVotes(WORLD)
        self.payloads: dict[tuple[int, int], bytes] = {}
        self._lock = threading.Lock()
        self.machines: dict[str, Machine] = {}
        self.machines |= {name: Machine(self, name, root) for name in HOSTS}

    def machine_of(self, rank: int) -> Machine:
        return next(machine for machine in self.machines.values() if rank in machine.ranks)

    def capture(self, step: int, state: Callable[[int, int], Tensors] = state) -> None:
        for rank in range(WORLD):
            self.put(step, rank, as_payload(state(step, rank), f"rank {rank}"))

    def put(self, step: int, rank: int, payload: bytes) -> None:
        described = make_manifest(payload, step, rank, world_size=WORLD, chunk_bytes=1 << 16)
        self.payloads[step, rank] = payload
        with self.machine_of(rank).memory.using(rank, create=True) as entry:
            assert entry is not None
            put_in_slot(entry.segments, step % 2, described, payload)

    def take_vote(self, machine: Machine, rank: int) -> None:
        """A report reaches the coordinator, and its decision all engines that live."""
        if machine.dead:
            return
        with self._lock:
            self.votes.take(rank, machine.together.vote(rank))
            self.decide(self.naming.step)

    def restart_coordinator(self) -> None:
        """It has forgotten everything, and gets all reports again."""
        with self._lock:
            self.votes = StorageVotes(WORLD)
            for machine in self.machines.values():
                for rank in machine.ranks:
                    self.votes.take(rank, machine.together.vote(rank))
            self.decide(self.naming.step)

    def decide(self, step: int) -> None:
        decided = TierNaming(Tier.PERSISTENT, step, together=self.votes.decision(step))
        if decided != self.naming:
            self.naming = decided
            for machine in self.machines.values():
                if not machine.dead:
                    machine.together.learn(decided)

    def wait_for_others(self, machine: Machine) -> None:
        """Until all ranks of other machines have planned the step, and stored their part if they could."""
        others = [rank for rank in range(WORLD) if rank not in machine.ranks]
        until(lambda: self.naming.together is StorageDecision.AGREED or all(is_waiting(self, rank) for rank in others))

    def begin(self, step: int, ranks: Sequence[int] = tuple(range(WORLD))) -> Writes:
        """The step is named: these ranks write it, all at once."""
        with self._lock:
            self.decide(step)
        return Writes(self, step, ranks)

    def write_all(self, step: int, ranks: Sequence[int] = tuple(range(WORLD))) -> dict[int, int | BaseException]:
        return self.begin(step, ranks).results()

    def seal(self, step: int) -> bool:
        """As rank 0's host does."""
        store = ShardStore(self.place.storage(), tier=Tier.PERSISTENT, job="job", host_id="", ranks=HOSTS["a"])
        store.scan_step(1, step)
        try:
            store.seal(1, step, WORLD)
        except CorruptShard:
            return False
        return True

    def check(self, step: int) -> None:
        """A process that has seen nothing before reads every rank's shard."""
        store = self.place.store()
        assert {copy.rank for copy in store.scan() if copy.step == step} == set(range(WORLD))
        for rank in range(WORLD):
            assert self.read(store, step, rank) == self.payloads[step, rank]

    @staticmethod
    def read(store: ShardStore, step: int, rank: int) -> bytes:
        with store.reading(1, step, rank) as (_, _, stored):
            target = bytearray(stored.size_bytes)
            stored.read_into(memoryview(target), 0)
            return bytes(target)

    def stored_bytes(self, step: int) -> int:
        names = [name for name in self.place.names() if name.startswith(f"g1/step{step}/")]
        return sum(len(self.place.get(name)) for name in names)

    def close(self) -> None:
        for machine in self.machines.values():
            machine.memory.close()


class Writes:
    """The writers of one step, each in a thread."""

    def __init__(self, job: Job, step: int, ranks: Sequence[int]) -> None:
        self._results: dict[int, int | BaseException] = {}

        def run(rank: int) -> None:
            try:
                self._results[rank] = job.machine_of(rank).write(step, rank)
            except BaseException as error:  # noqa: BLE001 - looked at by the test
                self._results[rank] = error

        self._threads = [threading.Thread(target=run, args=(rank,)) for rank in ranks]
        for thread in self._threads:
            thread.start()

    def results(self) -> dict[int, int | BaseException]:
        """The bytes that each wrote, or its error."""
        for thread in self._threads:
            thread.join(DEADLINE_S)
            assert not thread.is_alive()
        return self._results


@pytest.fixture
def folder_job(tmp_path: Path, persistent_folder: Place) -> Iterator[Job]:
    (tmp_path / "shm").mkdir()
    made = Job(tmp_path / "shm", persistent_folder)
    yield made
    made.close()


@pytest.fixture
def job(tmp_path: Path, shared_place: Place) -> Iterator[Job]:
    (tmp_path / "shm").mkdir()
    made = Job(tmp_path / "shm", shared_place)
    yield made
    made.close()


def is_waiting(job: Job, rank: int) -> bool:
    vote = job.machine_of(rank).together.vote(rank)
    return vote is not None and vote.stage is StorageStage.FILE


def test_replicas_on_all_hosts_take_the_room_of_one(job: Job) -> None:
    for step in (4, 5):
        job.capture(step)
        written = job.write_all(step)
        assert all(isinstance(count, int) for count in written.values()), written
        assert job.seal(step)
        job.check(step)
        assert job.stored_bytes(step) <= 1.05 * len(job.payloads[step, 0])
    assert job.naming.together is StorageDecision.AGREED
    assert all(machine.odd == [] for machine in job.machines.values())


def test_a_host_that_is_a_cohort_by_itself_does_not_hold_the_others_up(
    tmp_path: Path, persistent_folder: Place
) -> None:
    """More than 64 ranks are several cohorts, and the last one may be one host. All ranks vote."""
    (tmp_path / "shm").mkdir()
    job = Job(tmp_path / "shm", persistent_folder, cohorts=((0, 1, 2, 3), (4,)))
    job.capture(4)
    written = job.write_all(4)
    assert job.naming.together is StorageDecision.AGREED
    assert written[4] is not None
    assert job.seal(4)
    job.check(4)
    assert job.place.get("g1/step4/rank4.safetensors") == job.payloads[4, 4]
    assert job.stored_bytes(4) <= 1.05 * 2 * len(job.payloads[4, 0])
    job.machines["c"].start()  # it finds the step, and votes again
    job.machines["c"].write(4, 4)
    assert job.machines["c"].together.vote(4) == StorageVote(4, StorageStage.ALONE)
    job.close()


def test_replicas_of_blocks_on_several_hosts_are_stored_once_each(job: Job) -> None:
    job.capture(4, hsdp_state)
    job.write_all(4)
    assert job.seal(4)
    job.check(4)
    assert job.stored_bytes(4) <= 1.05 * 2 * len(job.payloads[4, 0])


def test_shards_that_have_nothing_alike_are_stored_at_once_as_they_are(job: Job) -> None:
    job.capture(4, lambda step, rank: state(step + 100 * rank, rank))
    job.write_all(4)
    assert job.naming.together is StorageDecision.OPEN, "nobody waited for a decision"
    assert job.seal(4)
    job.check(4)
    for rank in range(WORLD):
        assert job.place.get(f"g1/step4/rank{rank}.safetensors") == job.payloads[4, rank]


def test_a_replica_that_differs_is_named_by_one_host_and_keeps_its_own_bytes(folder_job: Job) -> None:
    job = folder_job
    job.capture(4)
    odd = bytearray(job.payloads[4, 3])
    odd[4096 + 500_000] ^= 4  # of model.w0
    job.put(4, 3, bytes(odd))
    job.write_all(4)
    assert job.seal(4)
    job.check(4)
    (found,) = job.machines["a"].odd
    assert (found.tensors, found.agree, found.differ) == (("model.w0",), (0, 1, 2, 4), (3,))
    assert not job.machines["b"].odd and not job.machines["c"].odd


# --- kills ---

KILLS = [
    (host_id, number, before)
    for host_id, ranks in HOSTS.items()
    for number in range(1, 2 * len(ranks) + 1)
    for before in (True, False)
]


@pytest.mark.parametrize(("host_id", "number", "before"), KILLS)
def test_an_engine_killed_at_any_write_and_started_again_completes_the_step(
    folder_job: Job, host_id: str, number: int, before: bool
) -> None:
    job = folder_job
    job.capture(4)
    machine = job.machines[host_id]
    machine.start(Dying(machine, number, before=before))
    writes = job.begin(4)
    until(lambda: machine.dead)
    assert not job.seal(4) or not before, "only a kill after the very last manifest leaves a complete step"
    machine.start()
    job.write_all(4, machine.ranks)
    writes.results()
    assert job.seal(4)
    job.check(4)
    assert job.stored_bytes(4) <= 1.05 * len(job.payloads[4, 0])


@pytest.mark.parametrize(("host_id", "number", "before"), KILLS)
def test_after_a_kill_of_an_engine_that_stays_away_the_step_counts_only_if_it_is_complete(
    folder_job: Job, host_id: str, number: int, before: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And when the next engine of that host has lost its slots, the next step is stored."""
    monkeypatch.setattr(storing_across_hosts, "PATIENCE_S", 0.2)
    job = folder_job
    job.capture(4)
    machine = job.machines[host_id]
    machine.start(Dying(machine, number, before=before))
    job.begin(4).results()
    if not machine.dead:
        pytest.skip("this machine is slow: the others gave up before the kill")
    if job.seal(4):
        job.check(4)
    for rank in machine.ranks:
        machine.memory.remove(rank)
    machine.start()
    results = job.write_all(4, machine.ranks)
    if any(isinstance(result, BaseException) for result in results.values()):
        assert not job.seal(4)
    elif job.seal(4):
        job.check(4)
    monkeypatch.undo()
    job.capture(5)
    job.write_all(5)
    assert job.seal(5)
    job.check(5)


@pytest.mark.parametrize("moment", ["before the votes", "after a vote", "after the decision"])
def test_a_coordinator_that_forgets_everything_decides_again(folder_job: Job, moment: str) -> None:
    job = folder_job
    job.capture(4)
    if moment == "before the votes":
        job.begin(4)
        job.restart_coordinator()
    elif moment == "after a vote":
        first = job.begin(4, (0, 1, 2, 3))
        until(lambda: all(is_waiting(job, rank) for rank in (0, 1, 2, 3)))
        job.restart_coordinator()
        job.write_all(4, (4,))
        first.results()
    else:
        job.write_all(4)
        job.restart_coordinator()
        assert job.naming.together is StorageDecision.AGREED
    until(lambda: job.seal(4))
    job.check(4)
    assert job.stored_bytes(4) <= 1.05 * len(job.payloads[4, 0])


def test_an_engine_that_comes_back_after_the_agreement_and_cannot_plan_gives_only_its_own_rank_up(
    folder_job: Job,
) -> None:
    """The others' slots have newer steps: what they stored is never mixed with a whole shard."""
    job = folder_job
    job.capture(4)
    machine = job.machines["c"]
    machine.start(Dying(machine, 2, before=True))  # the manifest
    job.begin(4).results()
    for rank in (0, 1, 2, 3):
        job.machine_of(rank).memory.remove(rank)
    machine.start()
    assert isinstance(job.write_all(4, (4,))[4], Conflict)
    assert not job.seal(4)
    assert not machine.store.holds(1, 4, 4)


# --- no agreement ---


def whole(job: Job, step: int, rank: int) -> bool:
    return bool(job.place.get(f"g1/step{step}/rank{rank}.safetensors") == job.payloads[step, rank])


def test_if_a_host_is_away_the_others_store_without_it_and_so_does_it_later(folder_job: Job) -> None:
    job = folder_job
    job.capture(4)
    away = job.machines["c"]
    away.dead = True
    job.write_all(4, (0, 1, 2, 3))
    assert job.naming.together is StorageDecision.GIVEN_UP
    assert not job.seal(4)
    away.dead = False
    away.together.learn(job.naming)
    job.write_all(4, (4,))
    assert job.seal(4)
    job.check(4)
    assert whole(job, 4, 4)
    assert job.stored_bytes(4) <= 1.05 * 3 * len(job.payloads[4, 0]), "each host for itself"


@pytest.mark.parametrize("failing", range(WORLD))
def test_if_one_rank_has_no_room_the_others_store_without_it(
    folder_job: Job, failing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = folder_job
    job.capture(4)
    machine = job.machine_of(failing)
    storage = machine.store._storage
    write = storage.write

    def full(name: str, parts: Any, size_bytes: int) -> None:  # noqa: ANN401 - the protocol's
        if name == f"g1/step4/rank{failing}.safetensors":
            raise StorageFull("There is no room.")
        write(name, parts, size_bytes)

    monkeypatch.setattr(storage, "write", full)
    results = job.write_all(4)
    assert isinstance(results[failing], StorageFull)
    assert {rank: r for rank, r in results.items() if not isinstance(r, int)}.keys() == {failing}, results
    assert not job.seal(4)
    monkeypatch.undo()
    job.write_all(4, (failing,))
    assert job.seal(4)
    job.check(4)


def test_a_rank_that_is_late_is_waited_for_only_so_long(folder_job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storing_across_hosts, "PATIENCE_S", 0.2)
    job = folder_job
    job.capture(4)
    job.write_all(4, (0, 1, 2, 3))
    assert not job.seal(4)
    job.write_all(4, (4,))
    assert job.seal(4)
    job.check(4)


def test_a_coordinator_that_knows_no_votes_is_waited_for_once(folder_job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an earlier release."""
    monkeypatch.setattr(storing_across_hosts, "PATIENCE_S", 0.2)
    monkeypatch.setattr(StorageVotes, "decision", lambda *_: StorageDecision.OPEN)
    job = folder_job
    for step in (4, 5):
        job.capture(step)
        job.write_all(step)
        assert job.seal(step)
        job.check(step)
        monkeypatch.setattr(storing_across_hosts, "PATIENCE_S", 1000.0)


def test_at_the_end_of_a_generation_nobody_waits(folder_job: Job) -> None:
    job = folder_job
    job.capture(4)
    writes = job.begin(4, (0, 1, 2, 3))
    until(lambda: all(is_waiting(job, rank) for rank in (0, 1, 2, 3)))
    for machine in job.machines.values():
        machine.together.stop()
    writes.results()
    job.write_all(4, (4,))
    assert job.seal(4), "the next generation finds them whole, or shared within each host"
    job.check(4)


def test_a_host_that_is_cut_off_writes_nothing_that_only_the_others_make_whole(folder_job: Job) -> None:
    """Its ranks may run elsewhere by now, and have stored this step."""
    job = folder_job
    job.capture(4)
    for machine in job.machines.values():
        machine.coordinator_down_s = 60.0
    job.write_all(4)
    assert whole(job, 4, 4)
    assert job.seal(4)
    job.check(4)


def test_engines_that_plan_differently_store_without_each_other(
    folder_job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = folder_job
    job.capture(4)
    votes = StorageVotes.take

    def other(self: StorageVotes, rank: int, vote: StorageVote | None) -> None:
        if vote is not None and rank == 4 and vote.stage is StorageStage.FILE:
            vote = StorageVote(vote.step, vote.stage, "f" * 32, vote.members)
        votes(self, rank, vote)

    monkeypatch.setattr(StorageVotes, "take", other)
    job.write_all(4)
    assert job.naming.together is StorageDecision.GIVEN_UP
    assert job.seal(4)
    job.check(4)


def test_after_several_failures_in_a_row_all_hosts_leave_the_same_steps_out(folder_job: Job) -> None:
    job = folder_job
    decided = []
    for step in range(4, 17):
        job.capture(step)
        job.machines["c"].dead = step < 7
        job.write_all(step, range(WORLD) if step >= 7 else (0, 1, 2, 3))
        decided.append(job.naming.together)
        assert job.seal(step) is (step >= 7)
    assert decided == [StorageDecision.GIVEN_UP] * 11 + [StorageDecision.AGREED] * 2
    job.check(16)
    assert job.stored_bytes(16) <= 1.05 * len(job.payloads[16, 0])


# --- a step that counts is never made worse ---


def test_a_stored_step_is_not_replaced_by_an_engine_that_cannot_read_the_list(
    folder_job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It believes that the step is not there, and the others' slots have newer ones."""
    job = folder_job
    job.capture(4)
    job.write_all(4)
    assert job.seal(4)
    machine = job.machines["c"]
    machine.start()
    monkeypatch.setattr(ShardStore, "holds", lambda *_: False)
    for rank in (0, 1, 2, 3):
        job.machine_of(rank).memory.remove(rank)
    job.naming = TierNaming(Tier.PERSISTENT, 4)
    job.votes = StorageVotes(WORLD)
    machine.start()
    assert isinstance(job.write_all(4, (4,))[4], Conflict)
    monkeypatch.undo()
    job.check(4)


def test_a_whole_shard_is_not_replaced_by_a_part(folder_job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    job = folder_job
    job.capture(4)
    job.machines["b"].dead = True
    job.write_all(4, (4,))
    job.machines["b"].dead = False
    assert whole(job, 4, 4)
    monkeypatch.setattr(ShardStore, "holds", lambda *_: False)
    job.naming, job.votes = TierNaming(Tier.PERSISTENT, -1), StorageVotes(WORLD)
    for machine in job.machines.values():
        machine.start()
    job.write_all(4)
    monkeypatch.undo()
    assert whole(job, 4, 4)
    assert job.seal(4)
    job.check(4)


def test_before_any_file_is_removed_the_step_counts_no_more(job: Job) -> None:
    """Each host removes its own ranks' files when it gets to it."""
    for step in (4, 5):
        job.capture(step)
        job.write_all(step)
        assert job.seal(step)
    machine = job.machines["c"]
    machine.store.scan()
    machine.store.prune(naming=TierNaming(Tier.PERSISTENT, 5, (5,)), lineage=LINEAGE, ranks=machine.ranks)
    late = job.place.store()
    assert {copy.step for copy in late.scan()} == {5}
    assert "g1/step4/world.manifest" not in job.place.names()
    for name, ranks in HOSTS.items():
        store = job.machines[name].store
        store.scan()
        store.prune(naming=TierNaming(Tier.PERSISTENT, 5, (5,)), lineage=LINEAGE, ranks=ranks)
    assert not {name for name in job.place.names() if "/step4/" in name}
    job.check(5)
