"""Disks that are full or fail at every system call of every write: nothing committed is lost, nothing half-written
counts, and the next write succeeds as soon as possible."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.stores.places import Place

from ckpt_engine.contracts.peer_wire import TierNaming
from ckpt_engine.format import integrity
from ckpt_engine.format.manifest import Manifest
from ckpt_engine.tiers import durable_files
from ckpt_engine.tiers.shard_store import ShardStore
from flyball.contracts.checkpoints import LineageEntry, Tier
from flyball.contracts.errors import FlyballError, StorageFull

MakeShard = Callable[..., tuple[Manifest, bytes, memoryview]]
LINEAGE = (LineageEntry(1),)
ROOT = Path(__file__).parents[3]

ON_A_SMALL_DISK = """
import os
import sys
from pathlib import Path
import numpy as np
from safetensors.numpy import save
from ckpt_engine.format import integrity
from ckpt_engine.format import manifest as manifests
from ckpt_engine.contracts.peer_wire import TierNaming
from ckpt_engine.tiers.folder import FolderStorage
from ckpt_engine.tiers.shard_store import ShardStore
from flyball.contracts.checkpoints import LineageEntry, Tier
from flyball.contracts.errors import StorageFull

root = Path(sys.argv[1])
store = ShardStore(FolderStorage(root), tier=Tier.DISK, job="job", host_id="host")
shards = {}

def write(step):
    payload = memoryview(save({"w": np.full(10 << 20, step, np.uint8)}))
    manifest = manifests.describe(payload, job="job", generation=1, step=step, rank=0, world_size=1, code_version="t")
    store.write(manifest, manifests.encode(manifest), payload)
    shards[step] = bytes(payload)

def check(*steps):
    fresh = ShardStore(FolderStorage(root), tier=Tier.DISK, job="job", host_id="host")
    assert [copy.step for copy in fresh.scan()] == list(steps), fresh.copies()
    for step in steps:
        with fresh.reading(1, step, 0) as (manifest, _, stored):
            target = memoryview(bytearray(stored.size_bytes))
            stored.read_into(target, 0)
            assert target == shards[step]
    assert not [name for _, _, names in os.walk(root) for name in names if ".new." in name]

def refused(step):
    try:
        write(step)
    except StorageFull as error:
        assert "free space" in error.hint
        return
    raise SystemExit(f"step {step} was written")

write(1)
write(2)
refused(3)  # two shards fit
check(1, 2)
free = os.statvfs(root).f_bavail * os.statvfs(root).f_bsize
filler = root / "somebody-elses"
with filler.open("wb") as file:
    os.posix_fallocate(file.fileno(), 0, free - (64 << 10))
store.prune(naming=TierNaming(Tier.DISK, 2, (2,)), lineage=(LineageEntry(1),), ranks=None)
check(2)
write(4)
check(2, 4)
while True:  # to the last block: nothing, however small, is left half
    try:
        with (root / "rest").open("ab", buffering=0) as file:
            file.write(bytes(4096))
    except OSError:
        break
refused(5)
check(2, 4)
filler.unlink()
(root / "rest").unlink()
store.prune(naming=TierNaming(Tier.DISK, 4, (4,)), lineage=(LineageEntry(1),), ranks=None)
write(5)
check(4, 5)
print("done")
"""


@pytest.mark.processes
@pytest.mark.parametrize("kind", ["tmpfs", "ext4"])
def test_a_small_disk_that_fills_up(tmp_path: Path, kind: str) -> None:
    mounted = tmp_path / "mounted"
    mounted.mkdir()
    image = tmp_path / "image"
    ext4 = f"truncate -s 28M {image} && mkfs.ext4 -q -m 0 -N 64 -O ^has_journal {image}"
    mount = {
        "tmpfs": f"mount -t tmpfs -o size=26m,mode=700 none {mounted}",
        "ext4": f"{ext4} && mount -o loop {image} {mounted}",
    }[kind]
    script = f'{mount} || exit 77; exec {sys.executable} -c "$0" {mounted}'
    done = subprocess.run(
        ["unshare", "-m", "--propagation", "private", "sh", "-c", script, ON_A_SMALL_DISK],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    if done.returncode == 77 or "unshare" in done.stderr:
        pytest.skip(f"a {kind} cannot be mounted here: {done.stderr.strip()}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("done\n")


class FaultyCalls:
    """The system calls behind durable files. The one with this number fails, or writes less than asked."""

    CALLS = ("open", "pwrite", "fsync", "close")

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, fail_at: int, number: int) -> None:
        self.calls = 0
        self._fail_at, self._number = fail_at, number
        faulty = {name: self._counted(getattr(os, name)) for name in self.CALLS}
        real_os = os

        class Os:
            def __getattr__(self, name: str) -> object:
                return faulty.get(name) or getattr(real_os, name)

        monkeypatch.setattr(durable_files, "os", Os())
        monkeypatch.setattr(durable_files, "reserve", self._counted(durable_files.reserve))
        for name in ("rename", "mkdir", "unlink"):
            monkeypatch.setattr(Path, name, self._counted(getattr(Path, name)))

    @property
    def reached(self) -> bool:
        return self.calls >= self._fail_at

    def _counted(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **named: Any) -> Any:  # noqa: ANN401 - handed on
            self.calls += 1
            if self.calls == self._fail_at:
                if call is os.close:
                    os.close(*arguments)  # closed all the same, as by the kernel
                raise OSError(self._number, os.strerror(self._number))
            return call(*arguments, **named)

        return run


def read(store: ShardStore, step: int) -> bytes:
    with store.reading(1, step, 0) as (manifest, _, stored):
        target = memoryview(bytearray(stored.size_bytes))
        stored.read_into(target, 0)
        integrity.verify(target, manifest.chunk_digests, manifest.chunk_bytes)
        return bytes(target)


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC], ids=errno.errorcode.get)
def test_any_system_call_of_a_write_may_fail(
    folder: Place, shard: MakeShard, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    first, second = shard(1, size_bytes=5 << 20), shard(2, size_bytes=5 << 20)
    folder.store().write(*first)
    failures = 0
    for fail_at in range(1, 200):
        store = folder.store()
        with monkeypatch.context() as patch:
            calls = FaultyCalls(patch, fail_at=fail_at, number=number)
            try:
                store.write(*second)
            except (FlyballError, OSError) as error:
                failures += 1
                assert not isinstance(error, StorageFull) or number == errno.ENOSPC
        fresh = folder.store()
        listed = [copy.step for copy in fresh.scan()]
        assert listed in ([1], [1, 2])
        for step, made in ((1, first), (2, second))[: len(listed)]:
            assert read(fresh, step) == bytes(made[2])
        if not calls.reached:
            break
        fresh.remove_unfinished(None)
        fresh.write(*second)  # the fault is over
        assert [copy.step for copy in fresh.scan()] == [1, 2]
        assert read(fresh, 2) == bytes(second[2])
        for name in [name for name in folder.names() if "step2" in name]:
            folder.delete(name)
    assert not calls.reached
    assert failures > 10


@pytest.mark.parametrize(
    "behaviour", ["short", "no direct writes", "odd addresses", "no direct mode", "no reservation"]
)
def test_what_file_systems_do_differently_changes_no_byte(
    folder: Place, shard: MakeShard, monkeypatch: pytest.MonkeyPatch, behaviour: str
) -> None:
    manifest, data, payload = shard(1, size_bytes=(20 << 20) + 777)
    if behaviour == "odd addresses":
        odd = memoryview(bytearray(len(payload) + 1))[1:]
        odd[:] = payload
        payload = odd
    pwrite, fcntl_call, fallocate = os.pwrite, durable_files.fcntl.fcntl, durable_files._libc.fallocate
    directly = 0

    def changed(descriptor: int, part: memoryview, offset: int) -> int:
        nonlocal directly
        direct = bool(fcntl_call(descriptor, durable_files.fcntl.F_GETFL) & os.O_DIRECT)
        directly += direct
        if behaviour == "no direct writes" and direct:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return pwrite(descriptor, part[: max(1, len(part) // 3)] if behaviour == "short" else part, offset)

    def no_direct_mode(descriptor: int, command: int, flags: int = 0) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return fcntl_call(descriptor, command, flags)

    def no_reservation(*_: int) -> int:
        import ctypes

        ctypes.set_errno(errno.EOPNOTSUPP)
        return -1

    monkeypatch.setattr(durable_files.os, "pwrite", changed)
    if behaviour == "no direct mode":
        monkeypatch.setattr(durable_files.fcntl, "fcntl", no_direct_mode)
    if behaviour == "no reservation":
        monkeypatch.setattr(durable_files._libc, "fallocate", no_reservation)
    folder.store().write(manifest, data, payload)
    assert callable(fallocate)
    assert (directly == 0) == (behaviour == "no direct mode")
    assert folder.get("g1/step1/rank0.safetensors") == payload
    assert read(folder.store(), 1) == payload


class FaultyStorage:
    """A storage whose n-th operation fails."""

    def __init__(self, storage: Any, operation: str, fail_at: int, error: BaseException) -> None:  # noqa: ANN401
        self._storage, self._operation, self._left, self._error = storage, operation, fail_at, error

    @property
    def reached(self) -> bool:
        return self._left <= 0

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - a wrapper
        found = getattr(self._storage, name)
        if name != self._operation:
            return found

        def run(*arguments: Any) -> Any:  # noqa: ANN401 - a wrapper
            self._left -= 1
            if self._left == 0:
                raise self._error
            return found(*arguments)

        return run


def life_of_a_writer(
    store: ShardStore, step: int, made: tuple[Manifest, bytes, memoryview]
) -> Iterator[Callable[[], object]]:
    """Clean up, scan, write, seal, prune."""
    yield lambda: store.remove_unfinished(None)
    yield store.scan
    yield lambda: store.write(*made)
    yield lambda: store.scan_step(1, step)
    if store.tier is Tier.PERSISTENT:
        yield lambda: store.seal(1, step, 1)
    yield lambda: store.prune(naming=TierNaming(store.tier, 9, (2, 3)), lineage=LINEAGE, ranks=None)


@pytest.mark.parametrize("operation", ["write", "read", "entries", "remove", "stat", "remove_unfinished"])
def test_any_operation_of_a_storage_may_fail(place: Place, shard: MakeShard, operation: str) -> None:
    """Run each act, whatever happened to the one before."""
    for fail_at in range(1, 40):
        error = OSError(errno.EIO, "I/O error") if fail_at % 2 else StorageFull("It is full.")
        storage = FaultyStorage(place.storage(), operation, fail_at, error)
        store = place.store(storage)
        for step in (1, 2, 3):
            for act in life_of_a_writer(store, step, shard(step, size_bytes=100)):
                try:
                    act()
                except (FlyballError, OSError):
                    continue
        counted = [copy.step for copy in place.store().scan()]
        assert {2, 3} & set(counted)
        for step in counted:
            assert read(place.store(), step) == bytes(shard(step, size_bytes=100)[2])
        if not storage.reached:
            assert counted == [2, 3]
            return
        for name in place.names():
            place.delete(name)
    raise AssertionError("the fault was reached every time")
