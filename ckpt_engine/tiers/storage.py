"""What a tier asks of the place where its shards lie: a folder, or an object store."""

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
    """The content of one name, opened. May be read by several threads at once."""

    @property
    def size_bytes(self) -> int: ...

    @property
    def local_path(self) -> str:
        """A file with these very bytes, for processes of this host and user; '' if there is none."""
        ...

    def read_into(self, target: memoryview, offset: int) -> None:
        """Fill `target` with the bytes from `offset` on. Raises CorruptShard if they end before, or OSError."""
        ...


class Storage(Protocol):
    """Bytes by name, below one place. Names are relative, with `/` between their parts, at most three. A name has its
    whole content or does not exist, and what was written is durable when `write` returns.

    Everything raises OSError or FlyballError when the place is away, denies access, or does not answer in time.
    """

    @property
    def place(self) -> str:
        """For people; without secrets."""
        ...

    def write(self, name: str, parts: Iterable[bytes | memoryview], size_bytes: int) -> None:
        """Store the parts, one after the other: `size_bytes` in all. A part is taken from memory before the next one is
        asked for; what `parts` raises ends the write, and nothing of it is left to be seen. Raises StorageFull."""
        ...

    def read(self, name: str, limit_bytes: int) -> bytes:
        """The whole content. Raises CorruptShard, and reads nothing, if it is larger than the limit; and
        FileNotFoundError."""
        ...

    def open(self, name: str) -> AbstractContextManager[StoredBytes]:
        """Raises FileNotFoundError."""
        ...

    def stat(self, name: str) -> Entry | None:
        """The entry of one name, as a listing has it; None if it is not there."""
        ...

    def folders(self, folder: str = "") -> list[str]:
        """The names of the folders right inside `folder`, in no order. What is in them is not looked at: it costs as
        much as it has folders, and not as they have content."""
        ...

    def entries(self, folder: str = "") -> Iterator[Entry]:
        """Everything in `folder` ('' for everything), except for what is being written; in no order."""
        ...

    def remove(self, names: Sequence[str]) -> None:
        """Durably, all before this returns; who is not there is no error."""
        ...

    def remove_unfinished(self, wanted: Callable[[str], bool], folders: Iterable[str] = ("",)) -> list[str]:
        """Remove what killed writers left, in these folders and below, of the names that are `wanted`; returns the
        names."""
        ...
