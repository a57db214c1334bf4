"""One shard of a step that is brought together for another layout, as files in the step's folder: its manifest, and
either a link to a whole copy on this host, or a sparse file with the chunks that were brought."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ckpt_engine.format import integrity, shard_format
from ckpt_engine.format import manifest as manifests
from ckpt_engine.format.chunk_runs import chunk_range
from ckpt_engine.format.manifest import Manifest
from ckpt_engine.format.shard_names import manifest_name, shard_name
from ckpt_engine.format.verified_read import FileSource
from ckpt_engine.slots.segment_owner import give_file
from flyball.contracts.checkpoints import ShardSource, Tier
from flyball.contracts.errors import CorruptShard
from flyball.worker_files import open_worker_file

_NEW = ".new"


class GatheredShard:
    """Different chunks may be written and read by different threads; everything else is for one at a time. Chunks that
    are here were verified, except those of a linked copy beyond the header."""

    def __init__(self, folder: Path, manifest: Manifest, manifest_bytes: bytes, header_bytes: int) -> None:
        """Writes the manifest. `link` or `begin` comes next."""
        self.manifest = manifest
        self.linked: ShardSource | None = None  # whose whole copy is read
        self._tiers: dict[
            int, tuple[Tier, str]
        ] = {}  # of the chunks in the sparse file: the tier and host they are from
        self._path = folder / shard_name(manifest.rank)
        self._header_chunks = range(-(-header_bytes // manifest.chunk_bytes))
        described = folder / manifest_name(manifest.rank)
        descriptor = _create(described)  # the folder may be another user's, who may have put a link there
        try:
            _write_all(descriptor, memoryview(manifests.as_file(manifest_bytes)), 0)
            give_file(descriptor, str(described))
        finally:
            os.close(descriptor)

    def link(self, path: str, source: ShardSource) -> None:
        """Refer to a whole copy, whose header was verified."""
        new = self._new()
        new.symlink_to(path)
        new.rename(self._path)
        self.linked = source

    def begin(self, header: memoryview, source: ShardSource, tier: Tier) -> None:
        """Make a sparse file that begins with these verified chunks."""
        new = self._new()
        descriptor = _create(new)
        try:
            os.ftruncate(descriptor, self.manifest.payload_bytes)
            _write_all(descriptor, header, 0)
            give_file(descriptor, str(new))
        finally:
            os.close(descriptor)
        new.rename(self._path)
        self.linked = None
        self._tiers = dict.fromkeys(self._header_chunks, (tier, source.host_id))

    def _new(self) -> Path:
        """The name of the file until it is complete. A source that failed may have left one."""
        new = self._path.with_suffix(_NEW)
        new.unlink(missing_ok=True)
        return new

    def lacking(self, chunks: Iterable[int]) -> list[int]:
        """Those of these chunks that are not here."""
        return [] if self.linked is not None else [chunk for chunk in chunks if chunk not in self._tiers]

    @contextmanager
    def opened(self) -> Iterator[int]:
        """The sparse file, for `write`, and for the chunks that are here."""
        descriptor = open_worker_file(self._path, os.O_RDWR)
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    def write(self, descriptor: int, chunk: int, data: memoryview, host_id: str, tier: Tier) -> None:
        """Store a verified chunk, which came from that host ('': the store). Raises OSError."""
        _write_all(descriptor, data, chunk_range(chunk, self.manifest)[0])
        self._tiers[chunk] = (tier, host_id)

    def read(self, chunk: int) -> memoryview:
        """A copy of a chunk that is here. Raises CorruptShard, OSError."""
        begin, size_bytes = chunk_range(chunk, self.manifest)
        data = memoryview(bytearray(size_bytes))
        with self.opened() as descriptor:
            FileSource(descriptor).read_into(data, begin)
        return data

    def origins(self, chunks: Iterable[int]) -> Iterator[tuple[Tier, str, int]]:
        """Where each of these chunks, which are here, is from, and its bytes: (tier, host, bytes)."""
        for chunk in chunks:
            tier, host_id = self._tiers[chunk] if self.linked is None else (self.linked.tier, self.linked.host_id)
            yield tier, host_id, chunk_range(chunk, self.manifest)[1]

    def bad(self, chunks: Collection[int]) -> list[int]:
        """Those of these chunks, and of the header's, that are here and do not match the manifest, or cannot be
        read."""
        wanted = sorted({*self._header_chunks, *chunks})
        found = []
        buffer = memoryview(bytearray(min(self.manifest.chunk_bytes, self.manifest.payload_bytes)))
        try:
            descriptor = os.open(self._path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            return wanted
        try:
            for chunk in wanted:
                if self.linked is None and chunk not in self._tiers:
                    continue
                begin, size_bytes = chunk_range(chunk, self.manifest)
                try:
                    FileSource(descriptor).read_into(buffer[:size_bytes], begin)
                    integrity.check_chunk(buffer[:size_bytes], chunk, self.manifest.chunk_digests)
                except (CorruptShard, OSError):
                    found.append(chunk)
        finally:
            os.close(descriptor)
        return found

    def forget(self, chunks: Iterable[int]) -> None:
        """These chunks of the sparse file are bad: they have to be brought again."""
        for chunk in chunks:
            self._tiers.pop(chunk, None)


def _create(path: Path) -> int:
    """Open a new file, in place of an old one. Raises OSError."""
    path.unlink(missing_ok=True)
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)


def header_chunks(first: memoryview, manifest: Manifest) -> range:
    """The chunks with the header, given the first one. Raises CorruptShard."""
    return range(-(-shard_format.header_bytes(first, manifest.payload_bytes) // manifest.chunk_bytes))


def _write_all(descriptor: int, data: memoryview, offset: int) -> None:
    while data:
        written = os.pwrite(descriptor, data, offset)
        data, offset = data[written:], offset + written
