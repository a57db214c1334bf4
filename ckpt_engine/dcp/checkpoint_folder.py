"""The files of a DCP checkpoint. Each rank writes its shard and its manifest aside; the coordinator gives all of
them their names, then writes the description of the whole. So a save that fails leaves the last checkpoint as it was.

    rank<R>.safetensors rank<R>.manifest     as in every step's folder
    dcp.metadata                             DCP's description of the whole; written last
    dcp.rank<R>.metadata                     in its place, for a save without collectives: what rank R has saved
    .rank<R>.safetensors.spare               in memory only: the replaced shard, whose memory the next save uses
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ckpt_engine.dcp.module_versions import ModuleVersions
from ckpt_engine.dcp.shard_writing import is_in_memory
from ckpt_engine.format.shard_names import manifest_name, rank_of_manifest, shard_name
from ckpt_engine.tiers import durable_files
from flyball.contracts.errors import ConfigurationError, Conflict, CorruptShard, NotFound
from flyball.state_folder import make_folder, sync_folder

FREEING_THREAD = "flyball-free-replaced"
_HELD_OPEN = 64  # of the files that a save replaces, so that descriptors do not run out
_WHOLE = "dcp.metadata"
_NUMBER = "(0|[1-9][0-9]{0,17})"
_OF_RANK = re.compile(f"dcp[.]rank{_NUMBER}[.]metadata")
_ASIDE = re.compile(rf"[.]rank{_NUMBER}[.](?:safetensors|manifest){re.escape(durable_files.UNFINISHED)}.*")


class InFolder:
    """What DCP asks both of a writer and of a reader. Their folder is `_folder`."""

    _folder: Path

    @property
    def checkpoint_id(self) -> str:
        """The folder."""
        return str(self._folder)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return isinstance(checkpoint_id, Path) or "://" not in str(checkpoint_id)


@dataclass(frozen=True, slots=True)
class WrittenShard:
    """A shard and its manifest, written aside under these names. `digest` is the manifest's, `versions` those of the
    modules in the rank's state."""

    rank: int
    world_size: int
    shard: str
    manifest: str
    digest: str
    versions: tuple[ModuleVersions, ...] = ()


def metadata_name(rank: int | None = None) -> str:
    """Of the description of the whole, or of what one rank has saved without collectives."""
    return _WHOLE if rank is None else f"dcp.rank{rank}.metadata"


def spare_of(folder: Path, rank: int) -> Path:
    return folder / f".{shard_name(rank)}.spare"


def ranks_that_saved(folder: Path) -> list[int]:
    """The ranks whose own descriptions, of a save without collectives, are in the folder."""
    with os.scandir(folder) as entries:
        return sorted(int(match[1]) for entry in entries if (match := _OF_RANK.fullmatch(entry.name)))


def prepare(folder: Path, *, rank: int | None, overwrite: bool) -> None:
    """Make the folder for a save of all ranks, or of one without collectives, and remove what broken saves have left.

    Raises Conflict if it holds a checkpoint that may not be replaced.
    """
    make_folder(folder)
    if (folder / metadata_name(rank)).exists():
        if not overwrite:
            raise Conflict(
                f"{folder} holds a checkpoint already.", hint="name another folder, or allow it with overwrite=True"
            )
        warnings.warn(f"The checkpoint in {folder} is replaced once the new one is complete.", stacklevel=2)
    for name in _names(folder):
        match = _ASIDE.fullmatch(name)
        if match and rank in (None, int(match[1])):
            (folder / name).unlink(missing_ok=True)


def publish(folder: Path, shards: Sequence[WrittenShard], metadata: bytes, *, rank: int | None) -> None:
    """Give the written files their names, then write the description. `rank` as in `prepare`."""
    for shard in shards:
        for name in (shard.shard, shard.manifest):
            if not (folder / name).exists():
                raise ConfigurationError(
                    f"Rank {shard.rank} has written {name}, and the coordinator does not see it in {folder}.",
                    hint="save into a folder that all ranks share, as for torch's FileSystemWriter",
                )
    keeps_spares = is_in_memory(folder)
    with contextlib.ExitStack() as held:
        for shard in shards:
            final, spare = folder / shard_name(shard.rank), spare_of(folder, shard.rank)
            if keeps_spares and final.exists():
                spare.unlink(missing_ok=True)
                os.link(final, spare)
            elif shard.rank < _HELD_OPEN:
                with contextlib.suppress(OSError):  # mostly, there is none
                    held.callback(os.close, os.open(final, os.O_RDONLY | os.O_CLOEXEC))
            (folder / shard.shard).rename(final)
            (folder / shard.manifest).rename(folder / manifest_name(shard.rank))
        if rank is not None:  # an older description of the whole would hide this one
            (folder / _WHOLE).unlink(missing_ok=True)
        sync_folder(folder)
        durable_files.write_durably(folder / metadata_name(rank), (metadata,))
        if rank is None:
            _remove_older(folder, len(shards))
        # A replaced file is freed when it is closed, which takes a while on a disk, and nobody needs to wait for it.
        replaced = held.pop_all()
        try:
            threading.Thread(target=replaced.close, name=FREEING_THREAD).start()
        except RuntimeError:  # no thread to be had, or the interpreter ends
            replaced.close()


def _remove_older(folder: Path, world_size: int) -> None:
    """What an older checkpoint of more ranks, or one without collectives, has left."""
    for name in _names(folder):
        of_rank = _OF_RANK.fullmatch(name)
        number = rank_of_manifest(name)
        if of_rank:
            (folder / name).unlink(missing_ok=True)
        elif number is not None and number >= world_size:
            for stale in (folder / name, folder / shard_name(number), spare_of(folder, number)):
                stale.unlink(missing_ok=True)


def _names(folder: Path) -> list[str]:
    with os.scandir(folder) as entries:
        return [entry.name for entry in entries]


def read_description(folder: Path, rank: int | None, limit_bytes: int) -> bytes:
    """The description's file. Raises NotFound, CorruptShard, OSError."""
    path = folder / metadata_name(rank)
    try:
        size_bytes = path.stat().st_size
        if size_bytes > limit_bytes:
            raise CorruptShard(f"{path} has {size_bytes} bytes.", hint="load another checkpoint")
        return path.read_bytes()
    except FileNotFoundError:
        raise NotFound(
            f"{path} does not exist.", hint="the save did not end, or this is not a folder that FlyballWriter wrote"
        ) from None
