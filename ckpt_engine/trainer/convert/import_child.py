"""The subprocess of `flyball ckpt import`: reads what others wrote, and writes shards.

    python -P -m ckpt_engine.trainer.convert.import_child <request.json >news

It has limits, and nothing else runs in it: what it reads may be hostile.
"""

from __future__ import annotations

import mmap
import os
import resource
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from ckpt_engine.contracts.import_wire import (
    MEGATRON_MODEL,
    MEGATRON_OPTIMIZER,
    ForeignFormat,
    ImportDone,
    ImportFailed,
    ImportNews,
    ImportProgress,
    ImportRequest,
)
from ckpt_engine.format import manifest as manifests
from ckpt_engine.format import shard_format, world_manifest
from ckpt_engine.format.integrity import DEFAULT_CHUNK_BYTES, ChunkHasher
from ckpt_engine.format.manifest import Manifest
from ckpt_engine.format.shard_format import ShardHeader
from ckpt_engine.format.shard_names import MANIFEST_SUFFIX, SHARD_SUFFIX
from ckpt_engine.format.world_manifest import WORLD_MANIFEST
from ckpt_engine.tiers.durable_files import write_durably
from ckpt_engine.trainer.capture.capture_plan import FORMAT_KEY, READ_FORMATS, STATE_KEY
from ckpt_engine.trainer.capture.capturer import Capture, Capturer
from ckpt_engine.trainer.convert.dcp_folder import load_plain, read_folder
from ckpt_engine.trainer.convert.scratch import Scratch
from ckpt_engine.trainer.path_saves.direct_write import shard_parts
from ckpt_engine.trainer.path_saves.plain_state import disclose
from ckpt_engine.trainer.state import tree_building
from ckpt_engine.trainer.state.exact_loading import build_exactly
from flyball import __version__
from flyball.contracts import wire
from flyball.contracts.clock import SystemClock
from flyball.contracts.errors import CorruptShard, FlyballError
from flyball.process_start import end_with_parent

_FOR_EACH_RANK = (ForeignFormat.TORCH, ForeignFormat.MEGATRON)
_ZIP = b"PK\x03\x04"


def main() -> int:
    end_with_parent()  # a killed `flyball ckpt import` leaves nobody who still writes
    request = wire.decode(sys.stdin.buffer.read(), ImportRequest)
    news = os.fdopen(os.dup(1), "wb")  # ours alone: what libraries print goes to stderr
    os.dup2(2, 1)

    def tell(item: ImportNews) -> None:
        news.write(wire.encode(item) + b"\n")
        news.flush()

    try:
        _limit(request.limit_bytes)
        tell(run_request(request, lambda size_bytes: tell(ImportProgress(size_bytes))))
    except FlyballError as error:
        tell(ImportFailed(error.message, error.hint, error.code))
        return 1
    except MemoryError:
        tell(ImportFailed("The checkpoint takes more memory than it may.", "it may be hostile", CorruptShard.code))
        return 1
    except Exception as error:  # noqa: BLE001 - hostile input raises anything
        message = f"The checkpoint cannot be read: {type(error).__name__}: {str(error)[:300]}"
        tell(ImportFailed(message, "it may be damaged", CorruptShard.code))
        return 1
    return 0


def _limit(limit_bytes: int) -> None:
    """Bound what a hostile checkpoint can take."""
    with Path("/proc/self/statm").open() as file:
        mapped_bytes = int(file.read().split()[0]) * mmap.PAGESIZE
    resource.setrlimit(resource.RLIMIT_AS, (mapped_bytes + limit_bytes, mapped_bytes + limit_bytes))
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, limit_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def run_request(request: ImportRequest, on_bytes: Callable[[int], None]) -> ImportDone:
    """Write the shards. Raises FlyballError, OSError, or, for hostile input, anything."""
    folder = Path(request.folder)
    scratch = Scratch(folder)
    ranks = len(request.sources) if request.format in _FOR_EACH_RANK else 1
    shards = []
    done: ImportDone | None = None
    for rank in range(ranks):
        state = _as_state(_read(request, rank, scratch), request.entry)
        capturer = Capturer()
        capture = capturer.take(state)
        manifest = _write_shard(request, capture, rank, ranks, on_bytes)
        capturer.close()
        shards.append((manifests.digest(manifests.encode(manifest)), manifest.payload_bytes))
        done = done or ImportDone(len(capture.flat.tensors), tuple(state))
        del state, capture
    scratch.close()
    world = world_manifest.describe(request.job, 0, request.step, shards)
    write_durably(folder / WORLD_MANIFEST, [manifests.as_file(world)])
    assert done is not None
    return done


def _write_shard(
    request: ImportRequest, capture: Capture, rank: int, ranks: int, on_bytes: Callable[[int], None]
) -> Manifest:
    hasher = ChunkHasher()

    def parts() -> Iterator[bytes | memoryview]:
        for part in shard_parts(capture):
            hasher.update(part)
            on_bytes(len(part))
            yield part

    shard = Path(request.folder) / f"rank{rank}{SHARD_SUFFIX}"
    write_durably(shard, parts(), size_bytes=capture.payload_bytes)
    manifest = Manifest(
        version=manifests.MANIFEST_VERSION,
        code_version=__version__,
        job=request.job,
        generation=0,
        step=request.step,
        rank=rank,
        world_size=ranks,
        payload_bytes=capture.payload_bytes,
        chunk_bytes=DEFAULT_CHUNK_BYTES,
        chunk_digests=hasher.digests(),
        committed_at=SystemClock().wall_s(),
        tensor_count=len(capture.flat.tensors),
    )
    write_durably(shard.with_suffix(MANIFEST_SUFFIX), [manifests.as_file(manifests.encode(manifest))])
    return manifest


# --- reading ---


def _read(request: ImportRequest, rank: int, scratch: Scratch) -> Any:  # noqa: ANN401 - any state
    if request.format is ForeignFormat.DCP:
        return read_folder(Path(request.sources[0]), scratch.empty)
    if request.format is ForeignFormat.TORCH:
        return _read_torch(Path(request.sources[rank]))
    if request.format is ForeignFormat.MEGATRON:
        return _read_megatron(Path(request.sources[rank]))
    return _read_safetensors([Path(source) for source in request.sources])


def _read_torch(path: Path) -> Any:  # noqa: ANN401 - any state
    """Tensors stay in the file until they are used; in an old file, without zip, they are read at once."""
    with path.open("rb") as file:
        is_zip = file.read(len(_ZIP)) == _ZIP
    return load_plain(path, path.name, mmap=is_zip)


def _read_megatron(folder: Path) -> dict[str, Any]:
    """The entries of the model's file; the distributed optimizer's, which some ranks have, is one more."""
    state = _read_torch(folder / MEGATRON_MODEL)
    if not isinstance(state, dict):
        raise CorruptShard(f"{folder / MEGATRON_MODEL} has no entries.", hint="it may be damaged")
    optimizer = folder / MEGATRON_OPTIMIZER
    return {**state, optimizer.stem: _read_torch(optimizer)} if optimizer.exists() else state


def _read_safetensors(paths: list[Path]) -> Any:  # noqa: ANN401 - any state
    """The state that Flyball described in a file's metadata, or else the tensors of all files, by name."""
    tensors: dict[str, torch.Tensor] = {}
    for path in paths:
        header, found = _map_file(path)
        if header.metadata.get(FORMAT_KEY) in READ_FORMATS and STATE_KEY in header.metadata and len(paths) == 1:
            return _described(header, found)
        if twice := tensors.keys() & found.keys():
            raise CorruptShard(f"Several files have the tensor {min(twice)!r}.", hint="name the files of one model")
        tensors |= found
    return tensors


def _described(header: ShardHeader, tensors: Mapping[str, torch.Tensor]) -> Any:  # noqa: ANN401 - any state
    if header.blocks:
        raise CorruptShard("The file is one rank's shard of several.", hint="load the step's folder with load_step")
    return disclose(build_exactly(tree_building.parse(header.metadata[STATE_KEY]), tensors))


def _map_file(path: Path) -> tuple[ShardHeader, dict[str, torch.Tensor]]:
    from ckpt_engine.trainer.restore.restore_targets import DTYPES

    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    header = shard_format.read_header(memoryview(mapped))
    tensors = {}
    for name, entry in header.tensors.items():
        dtype, (begin, end) = DTYPES[entry.dtype], entry.data_offsets
        if begin == end:
            tensors[name] = torch.empty(entry.shape, dtype=dtype)
            continue
        raw = torch.frombuffer(mapped, dtype=torch.uint8, count=end - begin, offset=header.data_start + begin)
        tensors[name] = _aligned(raw, dtype).view(entry.shape)
    return header, tensors


def _aligned(raw: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Other writers do not align: such a tensor is copied."""
    return (raw if raw.data_ptr() % dtype.itemsize == 0 else raw.clone()).view(dtype)


def _as_state(found: Any, entry: str) -> dict[str, Any]:  # noqa: ANN401 - any state
    """The entries of a state. A bare state_dict, or anything but a dict, becomes one entry."""
    is_dict = isinstance(found, dict) and all(type(key) is str for key in found)
    if is_dict and not (found and all(isinstance(value, torch.Tensor) for value in found.values())):
        return dict(found)
    return {entry: found}


if __name__ == "__main__":
    sys.exit(main())
