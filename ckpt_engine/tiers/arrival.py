"""Compares what arrived in a storage with what was handed to it, before anything counts there.

Networks, proxies, memory on the way and disks change bytes now and then, and report success. So each write is followed
by a proof: the store's own checksum of what it holds if it has one that can be compared, else the bytes are read back.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Generator, Iterable
from typing import Final

import xxhash

from flyball.contracts.errors import CorruptShard, NotAsWritten

WINDOW_BYTES: Final = 8 << 20


class Sent:
    """The checksum of everything that was handed over, in order."""

    def __init__(self) -> None:
        self.size_bytes = 0
        self._hasher = xxhash.xxh3_128()

    def passing(self, parts: Iterable[bytes | memoryview]) -> Generator[bytes | memoryview, None, None]:
        """The parts, each taken into account when the next one is requested: its writer has it in the cache."""
        for part in parts:
            yield part
            self._hasher.update(part)
            self.size_bytes += len(part)

    def check(self, what: str, size_bytes: int, read_into: Callable[[memoryview, int], None]) -> None:
        """Read everything back. Raises NotAsWritten unless it is what was handed over; what `read_into` raises."""
        hasher = xxhash.xxh3_128()
        window = memoryview(bytearray(min(WINDOW_BYTES, size_bytes)))
        try:
            for begin in range(0, size_bytes, WINDOW_BYTES):
                piece = window[: min(WINDOW_BYTES, size_bytes - begin)]
                read_into(piece, begin)
                hasher.update(piece)
        except CorruptShard as error:  # it ends early
            raise not_as_written(what, error.message) from error
        if (size_bytes, hasher.digest()) != (self.size_bytes, self._hasher.digest()):
            raise not_as_written(what, f"{size_bytes} bytes were read back, {self.size_bytes} were written")


class PartSums:
    """The MD5 sums of an upload's parts. S3 makes the entity tag of an object from those of what it received, unless it
    encrypts with a key of the user's; so a tag that is equal proves what is there, and another one says nothing."""

    def __init__(self, part_bytes: int, *, is_multipart: bool) -> None:
        self._part_bytes = part_bytes
        self._is_multipart = is_multipart
        self._sums: list[bytes] = []
        self._hasher = hashlib.md5(usedforsecurity=False)
        self._hashed_bytes = 0  # of the part that is not yet whole

    def passing(self, parts: Iterable[bytes]) -> Generator[bytes, None, None]:
        for part in parts:
            rest = memoryview(part)
            while rest:
                piece = rest[: self._part_bytes - self._hashed_bytes]
                self._hasher.update(piece)
                self._hashed_bytes += len(piece)
                rest = rest[len(piece) :]
                if self._hashed_bytes == self._part_bytes:
                    self._end_part()
            yield part

    def match(self, e_tag: str | None) -> bool:
        """Whether the entity tag says that exactly these parts arrived. Call it once, at the end."""
        if self._hashed_bytes or not self._sums:
            self._end_part()
        whole = self._sums[0].hex() if not self._is_multipart else _tag_of_parts(self._sums)
        return (e_tag or "").strip('"') == whole

    def _end_part(self) -> None:
        self._sums.append(self._hasher.digest())
        self._hasher = hashlib.md5(usedforsecurity=False)
        self._hashed_bytes = 0


def _tag_of_parts(sums: list[bytes]) -> str:
    return f"{hashlib.md5(b''.join(sums), usedforsecurity=False).hexdigest()}-{len(sums)}"


def not_as_written(what: str, why: str) -> NotAsWritten:
    return NotAsWritten(
        f"{what} does not hold what was written: {why}.",
        hint="the step does not count there, and older steps stay; check the disk, or what is between host and store",
    )
