"""The interface to the place where a tier keeps its shards: a folder, or an object store."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Entry:
    """One name in a listing. The same `version` means the same content."""

    name: str
    size_bytes: int
    version: str


class StoredBytes(Protocol):
    """The content of one name, opened for reading. Thread-safe."""

    @property
    def size_bytes(self) -> int: ...

    @property
    def local_path(self) -> str:
        """A file with exactly these bytes that this host's user can read; '' if there is none."""
        ...

    @property
    def shard_path(self) -> str:
        """A shard's file from which this host's user can read these bytes with what lies beside it: the manifest, and
        files of other ranks that it refers to. '' if there is none."""
        ...

    def read_into(self, target: memoryview, offset: int) -> None:
        """Fill `target` with the bytes from `offset` on. Raises CorruptShard if there are fewer, or OSError."""
        ...

    def read_exactly(self, target: memoryview, offset: int) -> None:
        """`read_into` for a part of the content: nothing beside it is read."""
        ...


class Storage(Protocol):
    """Bytes by name, below one place. Names are relative, with at most three parts separated by `/`. A name has its
    complete content or does not exist. When `write` returns, the content is durable, and was found to be what was
    handed over: nothing that counts by a later write rests on bytes that were changed on their way.

    Every method raises OSError or FlyballError if the place is unreachable, denies access, or does not answer in time.
    """

    @property
    def place(self) -> str:
        """For logs and messages; contains no secrets."""
        ...

    def write(self, name: str, parts: Iterable[bytes | memoryview], size_bytes: int) -> None:
        """Store the parts in order, `size_bytes` in total. A part is copied or written before the next one is
        requested. If `parts` raises, nothing is stored. Raises StorageFull; NotAsWritten if other bytes arrived, which
        are removed again."""
        ...

    def read(self, name: str, limit_bytes: int) -> bytes:
        """The complete content. Raises FileNotFoundError, or CorruptShard, without reading, if it is larger than the
        limit."""
        ...

    def open(self, name: str) -> AbstractContextManager[StoredBytes]:
        """Raises FileNotFoundError."""
        ...

    def stat(self, name: str) -> Entry | None:
        """The entry of one name, as in a listing; None if it does not exist."""
        ...

    def folders(self, folder: str = "") -> list[str]:
        """The names of the folders directly inside `folder`, in no order. The cost grows with their number, not with
        their content."""
        ...

    def entries(self, folder: str = "") -> Iterator[Entry]:
        """Everything below `folder` ('' for everything), without unfinished files, in no order."""
        ...

    def remove(self, names: Sequence[str]) -> None:
        """Remove these names durably. Missing ones are ignored."""
        ...

    def remove_unfinished(self, wanted: Callable[[str], bool], folders: Iterable[str] = ("",)) -> list[str]:
        """Remove what killed writers left in these folders and below, if `wanted` accepts its final name. Returns what
        was removed."""
        ...
