"""What the ranks of a host hold alike is stored once, and every rank's shard is read back from it, or is an error."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load
from support.clocks.waits import until
from support.stores.alike_shards import Tensors, as_payload, ddp_state, hsdp_state
from support.stores.places import Place
from support.stores.shards import make_manifest, put_in_slot

from ckpt_engine.contracts.generation import HostGeneration
from ckpt_engine.contracts.peer_wire import TierNaming
from ckpt_engine.counters import Counters
from ckpt_engine.format.manifest import Manifest
from ckpt_engine.format.shard_names import ShardKey
from ckpt_engine.format.stored_layout import HEADER_TENSOR
from ckpt_engine.inspect.copy_places import StoragePlace
from ckpt_engine.inspect.extract_step import extract_step
from ckpt_engine.inspect.inventory import CopyInventory
from ckpt_engine.inspect.remove_steps import find_targets
from ckpt_engine.inspect.verify_copies import CopyVerdict, verify_copies
from ckpt_engine.rules.storage_plan import OddReplicas
from ckpt_engine.tiers.memory import MemoryTier
from ckpt_engine.tiers.shard_store import ShardStore
from ckpt_engine.tiers.storage import Storage
from ckpt_engine.tiers.writing import storing_together
from ckpt_engine.tiers.writing.storing_together import StoringTogether
from flyball.contracts.checkpoints import CheckpointSpec, LineageEntry, Tier
from flyball.contracts.cluster import HostRanks, Placement
from flyball.contracts.errors import CorruptShard, StorageFull
from flyball.contracts.identity import Fence
from flyball.contracts.on_host.engine_wire import Configure

DEADLINE_S = 90.0
RANKS = (0, 1, 2, 3)
LINEAGE = (LineageEntry(1),)


class StoringRanks:
    """Four ranks with their slots, and the writers' side of one tier."""

    def __init__(self, root: Path, place: Place) -> None:
        self.place = place
        self.counters = Counters()
        self.odd: list[OddReplicas] = []
        self.payloads: dict[tuple[int, int], bytes] = {}
        self.memory = MemoryTier(str(root / "flyball-test"), "job", "host")
        self.restart()

    def restart(self, storage: Storage | None = None) -> None:
        """The slots are still there, and nothing else."""
        host = HostRanks("host", "127.0.0.1", "", RANKS)
        placement = Placement("job", 1, len(RANKS), (host,), "127.0.0.1", 1, {}, LINEAGE, None)
        configure = Configure(Fence(1, 1), "host", placement, CheckpointSpec())
        self.store: ShardStore = self.place.store(storage)
        self.store.scan()
        self.together = self._coordinate(HostGeneration(configure, "host"))

    def _coordinate(self, generation: HostGeneration) -> StoringTogether:
        return StoringTogether(
            generation,
            memory=self.memory,
            disk=self.store,
            counters=self.counters,
            on_compared=lambda step, found: self.odd.extend(found.differing),
        )

    def capture(self, step: int, state: Callable[[int, int], Tensors] = ddp_state) -> None:
        for rank in RANKS:
            self.put(step, rank, as_payload(state(step, rank), f"rank {rank}"))

    def put(self, step: int, rank: int, payload: bytes) -> None:
        described = make_manifest(payload, step, rank, world_size=len(RANKS), chunk_bytes=1 << 16)
        self.payloads[step, rank] = payload
        with self.memory.using(rank, create=True) as entry:
            assert entry is not None
            put_in_slot(entry.segments, step % 2, described, payload)

    def write(self, step: int, rank: int) -> int:
        """As `DiskWriter` does."""
        try:
            if self.store.holds(1, step, rank):
                return 0
            with self.memory.using(rank) as entry:
                found = self.memory.find(entry, 1, step) if entry is not None else None
                assert entry is not None and found is not None
                view, manifest, data = found
                payload = entry.segments.payload(view.index)
                written = self.together.write(step, payload, manifest, data)
                return self.store.write(manifest, data, payload) if written is None else written
        finally:
            self.together.withdraw(step, rank)

    def write_all(self, step: int, ranks: tuple[int, ...] = RANKS) -> dict[int, int | BaseException]:
        """All ranks at once: the bytes that each wrote, or its error."""
        results: dict[int, int | BaseException] = {}

        def run(rank: int) -> None:
            try:
                results[rank] = self.write(step, rank)
            except BaseException as error:  # noqa: BLE001 - looked at by the test
                results[rank] = error

        threads = [threading.Thread(target=run, args=(rank,)) for rank in ranks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60.0)
            assert not thread.is_alive()
        return results

    def read(self, step: int, rank: int, store: ShardStore | None = None) -> bytes:
        with (store or self.place.store()).reading(1, step, rank) as (manifest, _, stored):
            target = bytearray(stored.size_bytes)
            for begin in range(0, len(target), manifest.chunk_bytes):
                chunk = memoryview(target)[begin : begin + manifest.chunk_bytes]
                stored.read_into(chunk, begin)
                again = bytearray(len(chunk))
                stored.read_exactly(memoryview(again), begin)
                assert again == chunk
            return bytes(target)

    def listed(self, step: int) -> set[int]:
        """By a process that has seen nothing before. In a shared store, of the steps that are sealed or not."""
        store = self.place.store()
        store.scan()
        return {rank for rank in RANKS if store.holds(1, step, rank)}

    def file_bytes(self, step: int) -> int:
        names = [name for name in self.place.names() if name.startswith(f"g1/step{step}/")]
        return sum(len(self.place.get(name)) for name in names)


@pytest.fixture
def host(tmp_path: Path, place: Place) -> Iterator[StoringRanks]:
    (tmp_path / "shm").mkdir()
    made = StoringRanks(tmp_path / "shm", place)
    yield made
    made.memory.close()


def check_all(host: StoringRanks, step: int) -> None:
    assert host.listed(step) == set(RANKS)
    for rank in RANKS:
        assert host.read(step, rank) == host.payloads[step, rank]
        assert host.read(step, rank, host.store) == host.payloads[step, rank]


def is_whole(host: StoringRanks, step: int, rank: int) -> bool:
    return bool(host.place.get(f"g1/step{step}/rank{rank}.safetensors") == host.payloads[step, rank])


def test_replicas_take_the_room_of_one_and_read_back_byte_for_byte(host: StoringRanks) -> None:
    host.capture(4)
    written = host.write_all(4)
    check_all(host, 4)
    one = len(host.payloads[4, 0])
    assert host.file_bytes(4) == sum(count for count in written.values() if isinstance(count, int))
    assert host.file_bytes(4) <= 1.05 * one
    for rank in RANKS:  # each file is one that the safetensors library reads, with no bytes that are not the tensor's
        tensors = load(host.place.get(f"g1/step4/rank{rank}.safetensors"))
        assert tensors.pop(HEADER_TENSOR).tobytes() == host.payloads[4, rank][:4096]
        assert all((value == ddp_state(4, rank)[name][0]).all() for name, value in tensors.items())
    assert host.counters.snapshot()[f"{host.store.tier}_bytes_shared"] > 2.9 * one
    assert host.odd == []


def test_replicas_of_blocks_are_stored_once_each(host: StoringRanks) -> None:
    host.capture(4, hsdp_state)
    host.write_all(4)
    check_all(host, 4)
    assert host.file_bytes(4) <= 1.05 * 2 * len(host.payloads[4, 0])


def test_shards_that_have_nothing_alike_are_stored_as_they_are(host: StoringRanks) -> None:
    host.capture(4, lambda step, rank: {"w": (np.random.default_rng(rank).random(300_000, dtype=np.float32), None)})
    host.write_all(4)
    check_all(host, 4)
    assert all(is_whole(host, 4, rank) for rank in RANKS)
    assert host.together.may_write_ahead(0, len(host.payloads[4, 0]))
    host.capture(5)
    assert not host.together.may_write_ahead(0, len(host.payloads[5, 0]))


def test_a_replica_that_differs_is_told_and_keeps_its_own_bytes(host: StoringRanks) -> None:
    host.capture(4)
    odd = bytearray(host.payloads[4, 2])
    odd[4096 + 1_000_000] ^= 4  # of model.w0
    host.put(4, 2, bytes(odd))
    host.write_all(4)
    check_all(host, 4)
    (found,) = host.odd
    assert (found.tensors, found.agree, found.differ) == (("model.w0",), (0, 1, 3), (2,))
    assert host.counters.snapshot()["replicas_differ"] == 1


class Failing:
    """A storage in which writes of some names fail."""

    def __init__(self, storage: Storage, name: str, before: Callable[[], None] = lambda: None) -> None:
        self._storage, self._name, self._before = storage, name, before

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - any method
        return getattr(self._storage, name)

    def write(self, name: str, parts: Any, size_bytes: int) -> None:  # noqa: ANN401 - the protocol's
        if name == self._name:
            self._before()
            raise StorageFull(f"There is no room for {name}.")
        self._storage.write(name, parts, size_bytes)


@pytest.mark.parametrize("kind", ["safetensors", "manifest"])
def test_if_one_cannot_write_the_others_store_their_whole_shards(host: StoringRanks, kind: str) -> None:
    host.capture(4)
    failing: Any = Failing(host.place.storage(), f"g1/step4/rank1.{kind}")
    host.restart(failing)
    results = host.write_all(4)
    assert isinstance(results[1], StorageFull)
    assert host.listed(4) == {0, 2, 3}
    for rank in (0, 2, 3):
        assert is_whole(host, 4, rank)
        assert host.read(4, rank) == host.payloads[4, rank]
    host.restart()
    assert not isinstance(host.write_all(4)[1], BaseException)
    check_all(host, 4)


def test_if_one_gives_the_step_up_the_others_store_their_whole_shards(host: StoringRanks) -> None:
    host.capture(4)
    waiting = threading.Thread(target=lambda: host.write_all(4, (0, 1, 2)))
    waiting.start()

    def withdrawn() -> bool:  # withdrawn before the others planned, it is not known yet
        host.together.withdraw(4, 3)
        return not waiting.is_alive()

    until(withdrawn)
    assert host.listed(4) == {0, 1, 2}
    assert all(is_whole(host, 4, rank) for rank in (0, 1, 2))


def test_one_that_does_nothing_is_waited_for_only_so_long(host: StoringRanks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storing_together, "PATIENCE_S", 0.2)
    host.capture(4)
    host.write_all(4, (0, 1, 2))
    assert host.listed(4) == {0, 1, 2}
    assert host.write(4, 3) > 0
    check_all(host, 4)


def test_at_the_end_of_a_generation_nobody_waits(host: StoringRanks) -> None:
    host.capture(4)
    waiting = threading.Thread(target=lambda: host.write_all(4, (0, 1, 2)))
    waiting.start()
    host.together.stop()
    waiting.join(60.0)
    assert not waiting.is_alive()
    assert host.listed(4) == {0, 1, 2}


def test_a_slot_that_changes_meanwhile_never_counts_and_harms_no_other(
    host: StoringRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bytes of one rank's slot are overwritten after the plan; the tensor that it stores is in all shards."""
    host.capture(4)
    write_part = ShardStore.write_part

    def overwritten(store: ShardStore, manifest: Manifest, payload: memoryview, *rest: Any) -> int:  # noqa: ANN401
        if manifest.rank == 1:
            payload[4096:4_500_000] = bytes(4_500_000 - 4096)
        return write_part(store, manifest, payload, *rest)

    monkeypatch.setattr(ShardStore, "write_part", overwritten)
    results = host.write_all(4)
    assert isinstance(results[1], CorruptShard)
    assert host.listed(4) == {0, 2, 3}, results
    assert all(host.read(4, rank) == host.payloads[4, rank] for rank in (0, 2, 3))


@pytest.mark.parametrize("lost", [(0,), (3,), (0, 1, 2), RANKS])
def test_after_a_kill_between_the_manifests_none_counts_until_all_are_written(
    host: StoringRanks, lost: tuple[int, ...]
) -> None:
    """Whichever manifests a killed engine had not written, with all files there."""
    host.capture(4)
    host.write_all(4)
    before = {name: host.place.get(name) for name in host.place.names()}
    for rank in lost:
        host.place.delete(f"g1/step4/rank{rank}.manifest")
    assert host.listed(4) == set()
    host.restart()
    assert all(not isinstance(result, BaseException) for result in host.write_all(4).values())
    check_all(host, 4)
    assert {name: host.place.get(name) for name in host.place.names()} == before, "the same plan, the same bytes"


def test_after_a_kill_between_the_manifests_a_rank_without_its_slot_makes_no_other_wrong(host: StoringRanks) -> None:
    """The next engine finds other slots, and so makes another plan, over files of the plan before."""
    host.capture(4)
    host.write_all(4)
    host.place.delete("g1/step4/rank0.manifest")
    host.memory.remove(3)
    host.restart()
    host.write_all(4, (0, 1, 2))
    assert host.listed(4) == {0, 1, 2}
    assert all(host.read(4, rank) == host.payloads[4, rank] for rank in (0, 1, 2))


@pytest.mark.parametrize("damage", ["missing", "short", "flipped"])
def test_a_damaged_file_of_an_owner_is_an_error_for_those_that_need_it(host: StoringRanks, damage: str) -> None:
    host.capture(4)
    host.write_all(4)
    name = "g1/step4/rank2.safetensors"
    content = bytearray(host.place.get(name))
    host.place.delete(name)
    if damage != "missing":
        content[-1] ^= 1  # of a tensor or of the generator's state
        content[-1_000_000] ^= 1  # of a tensor that all need
        host.place.put(name, bytes(content[: -1 if damage == "short" else None]))
    if damage == "flipped":  # found where the bytes are used
        with host.place.store().reading(1, 4, 0) as (manifest, _, stored):
            target = bytearray(stored.size_bytes)
            stored.read_into(memoryview(target), 0)
            digests = make_manifest(target, 4, world_size=4, chunk_bytes=1 << 16).chunk_digests
        assert digests != manifest.chunk_digests
        return
    for rank in RANKS:
        with pytest.raises((CorruptShard, FileNotFoundError)), host.place.store().reading(1, 4, rank):
            pass
    assert host.listed(4) == set()


def test_a_copy_that_was_bad_takes_no_other_with_it(host: StoringRanks) -> None:
    host.capture(4)
    host.write_all(4)
    host.store.distrust(1, 4, 2)
    host.store.scan()
    assert {rank for rank in RANKS if host.store.holds(1, 4, rank)} == {0, 1, 3}


def test_steps_are_pruned_and_removed_as_ever(host: StoringRanks) -> None:
    for step in (4, 5):
        host.capture(step)
        host.write_all(step)
    for rank in RANKS:  # as each rank's writer does
        host.store.prune(naming=TierNaming(host.store.tier, 5, (5,)), lineage=LINEAGE, ranks=(rank,))
    assert {name for name in host.place.names() if "/step4/" in name} == set()
    check_all(host, 5)
    copy = host.store.nameless(ShardKey(1, 5, 0))
    host.place.store().remove(copy)  # by somebody else; a kill follows
    assert host.listed(5) == set()
    host.store.scan()
    host.capture(6)
    host.write_all(6)
    host.store.prune(naming=TierNaming(host.store.tier, 6, (6,)), lineage=LINEAGE, ranks=RANKS)
    assert {name for name in host.place.names() if "/step5/" in name} == set(), "the rest is of no use"
    check_all(host, 6)


def test_a_manifest_that_cannot_be_read_at_the_moment_loses_no_rank(
    host: StoringRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    host.capture(4)
    host.write_all(4)
    storage = host.place.storage()
    store, read = host.place.store(storage), storage.read

    def unreadable(name: str, limit_bytes: int) -> bytes:
        if name == "g1/step4/rank1.manifest":
            raise OSError(5, "Input/output error")
        return bytes(read(name, limit_bytes))

    with monkeypatch.context() as patched:
        patched.setattr(storage, "read", unreadable)
        store.scan()
        assert {key.rank for key in store.unread()} == set(RANKS)
        assert not any(store.holds(1, 4, rank) for rank in RANKS)
    store.scan_unread()
    assert all(store.holds(1, 4, rank) for rank in RANKS)


def test_what_the_command_line_does_with_a_step_sees_whole_shards(host: StoringRanks, tmp_path: Path) -> None:
    """ls, verify, restore and rm; a step that is half there is shown with its reason, and removed."""
    for step in (4, 5):
        host.capture(step)
        host.write_all(step)
        if host.store.tier is Tier.PERSISTENT:
            host.store.scan_step(1, step)
            host.store.seal(1, step, len(RANKS))
    storage, tier = host.place.storage(), host.store.tier
    inventory = CopyInventory("job", [StoragePlace(storage, tier=tier, job="job", host_id=host.store.host_id)])
    assert [(step.step, step.complete) for step in inventory.steps] == [(5, True), (4, True)]
    verified = [found.verdict for found, _ in verify_copies(inventory.held, lambda count: None)]
    assert verified == [CopyVerdict.GOOD] * 8
    extract_step(inventory, inventory.find(4), tmp_path / "out", overwrite=False, on_bytes=lambda count: None)
    for rank in RANKS:
        assert (tmp_path / "out" / f"rank{rank}.safetensors").read_bytes() == host.payloads[4, rank]
    for target in find_targets(inventory, {(1, 4)}, (tier,))[:1]:
        target.remove()
    half = CopyInventory("job", [StoragePlace(storage, tier=tier, job="job", host_id=host.store.host_id)])
    assert [step.step for step in half.steps] == [5]
    assert {found.key.rank for found in half.ignored if found.key is not None} == {1, 2, 3}
    assert all("rank 0, which is not there" in found.reason for found in half.ignored)
    for target in find_targets(half, {(1, 4)}, (tier,)):
        target.remove()
    assert {name for name in host.place.names() if "/step4/" in name} == set()


def test_a_sealed_step_counts_for_every_rank_of_another_placement(shared_place: Place, tmp_path: Path) -> None:
    """Each host looks at its own ranks' shards, and trusts the world manifest for the others."""
    host = StoringRanks(tmp_path, shared_place)
    host.capture(4)
    host.write_all(4)
    host.store.scan_step(1, 4)
    host.store.seal(1, 4, len(RANKS))
    for ranks in ((0,), (1, 3), ()):
        view = ShardStore(shared_place.storage(), tier=Tier.PERSISTENT, job="job", host_id="", ranks=ranks)
        assert {copy.rank for copy in view.scan()} == set(RANKS)
        assert all(host.read(4, rank, view) == host.payloads[4, rank] for rank in RANKS)
    host.memory.close()


def test_half_a_plan_is_not_sealed(shared_place: Place, tmp_path: Path) -> None:
    host = StoringRanks(tmp_path, shared_place)
    host.capture(4)
    host.write_all(4)
    shared_place.delete("g1/step4/rank2.manifest")
    host.store.scan_step(1, 4)
    with pytest.raises(CorruptShard, match=r"no shards of ranks \[0, 1, 2, 3\]"):
        host.store.seal(1, 4, len(RANKS))
    host.memory.close()
