"""Reads one copy of a shard in order, from any place, and checks every byte; a bad copy can be read to its end."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ckpt_engine.format import integrity
from ckpt_engine.format.manifest import Manifest, TensorEntry, entries_of
from ckpt_engine.format.verified_read import read_header
from flyball.contracts.errors import CheckpointError, CorruptShard


class CopyGone(CheckpointError):
    """The copy was overwritten or removed since it was listed. That is normal while its job runs."""

    code = "copy_gone"


class ShardReading:
    """One open copy."""

    def __init__(
        self,
        manifest: Manifest,
        manifest_bytes: bytes,
        *,
        read_into: Callable[[memoryview, int], None],
        check_still_there: Callable[[], None] = lambda: None,
    ) -> None:
        """`read_into(target, offset)` fills `target`. `check_still_there` raises CopyGone if the bytes may have been
        overwritten."""
        self.manifest = manifest
        self.manifest_bytes = manifest_bytes
        self.read_into = read_into
        self._check_still_there = check_still_there

    def tensors(self) -> tuple[TensorEntry, ...]:
        """The shard's tensors. Raises as `verified_chunks`."""
        if self.manifest.tensors:
            return self.manifest.tensors
        try:
            header, _ = read_header(self, self.manifest)
        except CorruptShard:
            self._check_still_there()
            raise
        return entries_of(header)

    def chunks(self) -> Iterator[tuple[memoryview, CorruptShard | None]]:
        """Every chunk with its problem, None if it is good. Its bytes are valid until the next one is requested. Raises
        CopyGone, CorruptShard if the copy ends early, OSError."""
        size_bytes, chunk_bytes = self.manifest.payload_bytes, self.manifest.chunk_bytes
        buffer = memoryview(bytearray(min(chunk_bytes, size_bytes)))
        for index, start in enumerate(range(0, size_bytes, chunk_bytes)):
            chunk = buffer[: min(chunk_bytes, size_bytes - start)]
            problem: CorruptShard | None = None
            try:
                self.read_into(chunk, start)
            except CorruptShard:
                self._check_still_there()
                raise
            try:
                integrity.check_chunk(chunk, index, self.manifest.chunk_digests)
            except CorruptShard as error:
                self._check_still_there()
                problem = error
            yield chunk, problem

    def verified_chunks(self) -> Iterator[memoryview]:
        """The chunks, all good. Raises CorruptShard instead of yielding a bad one, and as `chunks`."""
        for chunk, problem in self.chunks():
            if problem is not None:
                raise problem
            yield chunk
