"""Presents a folder with one step's files, as `flyball ckpt restore` writes it, as the storage of a tier. There the
files have the names that tiers use."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

from ckpt_engine.format import stored_layout
from ckpt_engine.format.manifest import Manifest
from ckpt_engine.format.shard_names import MANIFEST_SUFFIX, step_folder
from ckpt_engine.format.stored_layout import MAX_DESCRIPTION_BYTES
from ckpt_engine.tiers.folder import FolderStorage
from ckpt_engine.tiers.storage import Entry, StoredBytes
from flyball.contracts.errors import CorruptShard


def first_manifest(folder: Path) -> Manifest | None:
    """The first readable manifest directly in `folder`; None if there is none. Raises OSError."""
    names = sorted(path.name for path in folder.iterdir() if path.match(f"rank*{MANIFEST_SUFFIX}"))
    for name in names:
        try:
            return stored_layout.read_file(FolderStorage(folder).read(name, MAX_DESCRIPTION_BYTES), name).manifest
        except (CorruptShard, OSError):
            continue
    return None


class StepFolder:
    """Implements `Storage`."""

    def __init__(self, folder: Path, generation: int, step: int) -> None:
        self._files = FolderStorage(folder)
        self._head = step_folder(generation, step)

    @property
    def place(self) -> str:
        return self._files.place

    def write(self, name: str, parts: Iterable[bytes | memoryview], size_bytes: int) -> None:
        self._files.write(self.inside(name), parts, size_bytes)

    def read(self, name: str, limit_bytes: int) -> bytes:
        return self._files.read(self.inside(name), limit_bytes)

    def open(self, name: str) -> AbstractContextManager[StoredBytes]:
        return self._files.open(self.inside(name))

    def stat(self, name: str) -> Entry | None:
        entry = self._files.stat(self.inside(name))
        return replace(entry, name=name) if entry is not None else None

    def folders(self, folder: str = "") -> list[str]:
        generation = self._head.partition("/")[0]
        return {"": [generation], generation: [self._head]}.get(folder, [])

    def entries(self, folder: str = "") -> Iterator[Entry]:
        if folder in ("", self._head):
            for entry in self._files.entries():
                if "/" not in entry.name:
                    yield replace(entry, name=f"{self._head}/{entry.name}")

    def remove(self, names: Sequence[str]) -> None:
        self._files.remove([self.inside(name) for name in names])

    def remove_unfinished(self, wanted: Callable[[str], bool], folders: Iterable[str] = ("",)) -> list[str]:
        del folders  # there is only one
        return self._files.remove_unfinished(lambda name: wanted(f"{self._head}/{name.lstrip('/')}"))

    def inside(self, name: str) -> str:
        """The name in the folder. Names of other steps stay unchanged: no such file exists."""
        return name.removeprefix(f"{self._head}/")
