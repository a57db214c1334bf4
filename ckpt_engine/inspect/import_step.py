"""Import another library's checkpoint: a subprocess reads it, which may be hostile, and writes shards; here they are
verified, and put in place when all are whole."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

import msgspec

from ckpt_engine.contracts.import_wire import (
    ForeignFormat,
    ImportDone,
    ImportFailed,
    ImportNews,
    ImportProgress,
    ImportRequest,
)
from ckpt_engine.format import manifest as manifests
from ckpt_engine.format import world_manifest
from ckpt_engine.format.shard_names import MANIFEST_SUFFIX, SHARD_SUFFIX, step_folder
from ckpt_engine.format.world_manifest import WORLD_MANIFEST
from ckpt_engine.inspect.foreign_sources import Sources
from ckpt_engine.inspect.shard_reading import ShardReading
from ckpt_engine.tiers.durable_files import UNFINISHED, WRITER, remove_left_folders
from ckpt_engine.tiers.folder import FolderStorage
from flyball.contracts import wire
from flyball.contracts.errors import (
    CheckpointError,
    ConfigurationError,
    Conflict,
    CorruptShard,
    FlyballError,
    StorageFull,
    UnsupportedState,
)
from flyball.state_folder import clear_errors, make_folder, sync_folder

_MODULE = "ckpt_engine.trainer.convert.import_child"
_UNFINISHED_HEAD = ".import"
_SPARE_BYTES = 8 << 30  # of address space: threads and allocators reserve far more than they use
_END_TIMEOUT_S = 30.0
_MAX_LINE_BYTES = 8 << 20


class ImportedStep(msgspec.Struct, frozen=True):
    """The step in its folder. `entries` of the state of rank 0."""

    folder: str
    format: ForeignFormat
    ranks: int
    tensors: int
    entries: tuple[str, ...]
    size_bytes: int


def import_step(
    sources: Sources, to: Path, *, job: str, step: int, entry: str, on_bytes: Callable[[int], None]
) -> ImportedStep:
    """Make `to`/g0/step<step>. `on_bytes` is called with the bytes that were written, and again as they are verified.

    Raises Conflict if the step is there, UnsupportedState, CorruptShard, StorageFull; then
    nothing is left in `to`.
    """
    folder = to / step_folder(0, step)
    if folder.exists():
        raise Conflict(f"{folder} is there already.", hint="choose another folder, or another --step")
    unfinished = to / f"{_UNFINISHED_HEAD}{UNFINISHED}{WRITER}"
    with clear_errors(to, hint="choose a folder that you may write to"):
        remove_left_folders(to, _UNFINISHED_HEAD)
        make_folder(unfinished)
    try:
        request = ImportRequest(
            sources.format, sources.files, str(unfinished), job, step, entry, 3 * sources.size_bytes + _SPARE_BYTES
        )
        done = _run_child(request, on_bytes)
        ranks, written_bytes = _verify(unfinished, job, step, on_bytes)
        with clear_errors(to):
            make_folder(folder.parent)
            unfinished.rename(folder)
            sync_folder(folder.parent)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return ImportedStep(str(folder), sources.format, ranks, done.tensors, done.entries, written_bytes)


def _run_child(request: ImportRequest, on_bytes: Callable[[int], None]) -> ImportDone:
    kept = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "HOME", "LANG")
    environment = {name: os.environ[name] for name in kept if name in os.environ} | {"OMP_NUM_THREADS": "1"}
    child = subprocess.Popen(
        [sys.executable, "-P", "-m", _MODULE],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=environment,
    )
    try:
        assert child.stdin is not None and child.stdout is not None
        with child.stdin as stdin:
            stdin.write(wire.encode(request))
        for news in _read_news(child.stdout):
            if isinstance(news, ImportProgress):
                on_bytes(news.written_bytes)
            elif isinstance(news, ImportDone):
                return news
            else:
                raise _error_of(news)
    finally:
        child.kill()
        child.wait(_END_TIMEOUT_S)
    raise CorruptShard(
        f"The process that read the checkpoint ended with exit status {child.returncode}.",
        hint="the checkpoint may be damaged or hostile, or the machine has too little memory",
    )


def _read_news(lines: IO[bytes]) -> Iterator[ImportNews]:
    decoder = wire.decoder_of(ImportNews)
    while line := lines.readline(_MAX_LINE_BYTES):
        try:
            yield decoder.decode(line)
        except wire.MALFORMED:
            return


def _error_of(failed: ImportFailed) -> FlyballError:
    kinds: dict[str, type[FlyballError]] = {
        kind.code: kind for kind in (CorruptShard, UnsupportedState, StorageFull, ConfigurationError)
    }
    return kinds.get(failed.code, CheckpointError)(failed.message, hint=failed.hint)


def _verify(folder: Path, job: str, step: int, on_bytes: Callable[[int], None]) -> tuple[int, int]:
    """Check every byte of what the subprocess wrote, without trusting it. Returns ranks and bytes."""
    files = FolderStorage(folder)
    lines = files.read(WORLD_MANIFEST, manifests.MAX_MANIFEST_FILE_BYTES)
    content = manifests.content_of_file(lines, WORLD_MANIFEST)
    world = world_manifest.decode(content, job=job, generation=0, step=step)
    expected = {WORLD_MANIFEST}
    for rank in range(len(world.digests)):
        shard, manifest_name = f"rank{rank}{SHARD_SUFFIX}", f"rank{rank}{MANIFEST_SUFFIX}"
        expected |= {shard, manifest_name}
        content = files.read(manifest_name, manifests.MAX_MANIFEST_FILE_BYTES)
        data = manifests.content_of_file(content, manifest_name)
        manifest = manifests.decode(data)
        with files.open(shard) as opened:
            if not world.names(rank, manifests.digest(data)) or opened.size_bytes != manifest.payload_bytes:
                raise CorruptShard(f"The imported shard of rank {rank} is not whole.", hint="try again")
            for chunk in ShardReading(manifest, data, read_into=opened.read_into).verified_chunks():
                on_bytes(len(chunk))
    if {path.name for path in folder.iterdir()} != expected:
        raise CorruptShard("The import left other files than shards.", hint="the checkpoint may be hostile")
    return len(world.digests), sum(world.sizes)
