"""Checksums that the trainer makes while it copies, of what it copies from: the bytes are in the processor's cache
then, and the engine need not read the whole slot once more beside the next step.

Only of chunks that one tensor fills whole, and that the thread in the background copies: it has nobody waiting. The
engine hashes the others, and all of them if the trainer died before it handed any over. They are of the source: a copy
that is not what it was copied from does not match, whoever reads it.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable

import xxhash

from ckpt_engine.format.integrity import DEFAULT_CHUNK_BYTES, DIGEST_BYTES, chunk_count
from ckpt_engine.slots import segment_files
from ckpt_engine.slots.control_file import DIGESTS_OFFSET, MAX_DIGESTS_BYTES

CHUNK_BYTES = DEFAULT_CHUNK_BYTES
_Chunk = ctypes.c_char * CHUNK_BYTES
_HEAD_BYTES = DIGEST_BYTES + 16  # checksum of all that follows; sequence, size


class SourceDigests:
    """The digests of one slot's chunks; zeros where there is none."""

    def __init__(self, address: int, payload_bytes: int) -> None:
        """`address` is where the slot's bytes begin in this process."""
        self._address = address
        self.digests = bytearray(chunk_count(payload_bytes, CHUNK_BYTES) * DIGEST_BYTES)

    def end_of_piece(self, target: int, begin: int, end: int) -> int:
        """The last whole chunk's end in these bytes of a tensor that lies at `target` in the slot; `end` if none."""
        whole = end - (target + end - self._address) % CHUNK_BYTES
        return whole if whole > begin else end

    def copy(self, target: int, source: int, begin: int, end: int, copy_piece: Callable[[int, int], object]) -> None:
        """Have `copy_piece` copy these bytes of a tensor from `source` to `target`, then hash every chunk that is whole
        in them. Not by turns: the interpreter lock would change hands twice for each chunk, and a step beside the save
        lost twice as much by that."""
        offset = target - self._address
        copy_piece(begin, end)
        for chunk in range(chunk_count(offset + begin, CHUNK_BYTES), (offset + end) // CHUNK_BYTES):
            bytes_there = _Chunk.from_address(source + chunk * CHUNK_BYTES - offset)
            self.digests[chunk * DIGEST_BYTES : (chunk + 1) * DIGEST_BYTES] = xxhash.xxh3_128_digest(bytes_there)


def hand_over(control_descriptor: int, index: int, sequence: int, digests: bytes) -> None:
    """Store the digests of the bytes that are in slot `index` as `sequence`, before that counts as captured. What was
    there of an older one, or what a killed trainer left, counts for nothing. Raises MemoryTooSmall."""
    if len(digests) + _HEAD_BYTES > MAX_DIGESTS_BYTES:
        return  # of a shard of half a TiB: the engine hashes it
    record = sequence.to_bytes(8, "little") + len(digests).to_bytes(8, "little") + digests
    segment_files.write_at(
        control_descriptor, xxhash.xxh3_128_digest(record) + record, DIGESTS_OFFSET + index * MAX_DIGESTS_BYTES
    )


def handed_over(control_descriptor: int, index: int, sequence: int, payload_bytes: int) -> bytes:
    """What was handed over for these very bytes; b"" if nothing was."""
    size_bytes = chunk_count(payload_bytes, CHUNK_BYTES) * DIGEST_BYTES
    stored = os.pread(control_descriptor, _HEAD_BYTES + size_bytes, DIGESTS_OFFSET + index * MAX_DIGESTS_BYTES)
    record = stored[DIGEST_BYTES:]
    expected = sequence.to_bytes(8, "little") + size_bytes.to_bytes(8, "little")
    if not record.startswith(expected) or stored[:DIGEST_BYTES] != xxhash.xxh3_128_digest(record):
        return b""
    return record[len(expected) :]
