"""Opens a stored shard, of which other ranks' files may have a part."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager

from ckpt_engine.format.shard_names import ShardKey
from ckpt_engine.format.stored_layout import (
    Composition,
    StoredLayout,
    StoredShard,
    check_file_header,
    shared_bytes_gone,
)
from ckpt_engine.tiers.storage import Storage, StoredBytes
from flyball.contracts.errors import CorruptShard


class ComposedBytes:
    """Implements `StoredBytes`."""

    def __init__(self, layout: StoredLayout, files: Mapping[int, StoredBytes], rank: int) -> None:
        """`files`: those of `layout.file_bytes`, by rank. `rank`: whose shard it is."""
        self._in_order = Composition(layout, {member: file.read_into for member, file in files.items()})
        self._exactly = Composition(layout, {member: file.read_exactly for member, file in files.items()})
        self.size_bytes = self._in_order.size_bytes
        self.local_path = ""  # no file has exactly these bytes
        self.shard_path = files[rank].shard_path if rank in files else ""

    def read_into(self, target: memoryview, offset: int) -> None:
        self._in_order.read_into(target, offset)

    def read_exactly(self, target: memoryview, offset: int) -> None:
        self._exactly.read_into(target, offset)


@contextmanager
def opened(storage: Storage, key: ShardKey, stored: StoredShard) -> Iterator[StoredBytes]:
    """The shard with this manifest file, not yet verified. Raises CorruptShard, FileNotFoundError if its own file is
    gone."""
    layout = stored.layout
    with ExitStack() as files:
        if layout is None:
            whole = files.enter_context(storage.open(key.shard))
            check_size(storage, key, whole.size_bytes, stored.manifest.payload_bytes)
            yield whole
            return
        found = {}
        for rank, size_bytes in layout.file_bytes.items():
            owner = ShardKey(key.generation, key.step, rank)
            try:
                found[rank] = files.enter_context(storage.open(owner.shard))
            except FileNotFoundError as error:
                if rank == key.rank:
                    raise
                raise shared_bytes_gone(key.rank, rank) from error
            check_size(storage, owner, found[rank].size_bytes, size_bytes)
        if layout.header is not None:
            check_file_header(layout, found[key.rank].read_exactly)
        yield ComposedBytes(layout, found, key.rank)


def check_size(storage: Storage, key: ShardKey, size_bytes: int, expected_bytes: int) -> None:
    """Raise CorruptShard if the file of a shard does not have the size that a manifest says."""
    if size_bytes != expected_bytes:
        raise CorruptShard(
            f"The shard of rank {key.rank}, step {key.step} in {storage.place} has {size_bytes} bytes, the manifest "
            f"says {expected_bytes}.",
            hint="nothing to do: another copy is tried",
        )
