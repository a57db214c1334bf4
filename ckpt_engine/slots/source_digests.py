"""Checksums that the trainer makes of the source bytes while it copies them.

The bytes are in the processor's cache then, and the engine need not read the whole slot again during the next step.

Only chunks that lie within one tensor, and that the background thread copies, because nobody waits for it. The engine
hashes the rest, or everything if the trainer died before it handed the checksums over. They are checksums of the
source, so whoever reads a bad copy finds that it does not match.
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
    """The digests of one slot's chunks; zeros for unknown ones."""

    def __init__(self, address: int, payload_bytes: int) -> None:
        """`address` is the slot's first byte in this process."""
        self._address = address
        self.digests = bytearray(chunk_count(payload_bytes, CHUNK_BYTES) * DIGEST_BYTES)

    def end_of_piece(self, target: int, begin: int, end: int) -> int:
        """Where the last whole chunk ends in these bytes of a tensor that lies at `target` in the slot; `end` if
        none."""
        whole = end - (target + end - self._address) % CHUNK_BYTES
        return whole if whole > begin else end

    def copy(self, target: int, source: int, begin: int, end: int, copy_piece: Callable[[int, int], object]) -> None:
        """Have `copy_piece` copy these bytes of a tensor from `source` to `target`, then hash every whole chunk in
        them. Not alternately: the GIL would change hands twice per chunk, which cost a concurrent step twice as
        much."""
        offset = target - self._address
        copy_piece(begin, end)
        for chunk in range(chunk_count(offset + begin, CHUNK_BYTES), (offset + end) // CHUNK_BYTES):
            bytes_there = _Chunk.from_address(source + chunk * CHUNK_BYTES - offset)
            self.digests[chunk * DIGEST_BYTES : (chunk + 1) * DIGEST_BYTES] = xxhash.xxh3_128_digest(bytes_there)


def hand_over(control_descriptor: int, index: int, sequence: int, digests: bytes) -> None:
    """Store the digests of slot `index`, written as `sequence`; call it before the slot is marked captured. Digests of
    another sequence, which a killed trainer may leave, are ignored. Raises MemoryTooSmall."""
    if len(digests) + _HEAD_BYTES > MAX_DIGESTS_BYTES:
        return  # for half a TiB: the engine hashes it
    record = sequence.to_bytes(8, "little") + len(digests).to_bytes(8, "little") + digests
    segment_files.write_at(
        control_descriptor, xxhash.xxh3_128_digest(record) + record, DIGESTS_OFFSET + index * MAX_DIGESTS_BYTES
    )


def handed_over(control_descriptor: int, index: int, sequence: int, payload_bytes: int) -> bytes:
    """The digests handed over for exactly these bytes; b"" if there are none."""
    size_bytes = chunk_count(payload_bytes, CHUNK_BYTES) * DIGEST_BYTES
    stored = os.pread(control_descriptor, _HEAD_BYTES + size_bytes, DIGESTS_OFFSET + index * MAX_DIGESTS_BYTES)
    record = stored[DIGEST_BYTES:]
    expected = sequence.to_bytes(8, "little") + size_bytes.to_bytes(8, "little")
    if not record.startswith(expected) or stored[:DIGEST_BYTES] != xxhash.xxh3_128_digest(record):
        return b""
    return record[len(expected) :]
