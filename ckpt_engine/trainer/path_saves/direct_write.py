"""Write a state to a sealed file without a slot, tensor by tensor: where shared memory is too small for it."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path

from ckpt_engine.format import manifest as manifests
from ckpt_engine.format import sealed_file, shard_format
from ckpt_engine.format.integrity import DEFAULT_CHUNK_BYTES, ChunkHasher
from ckpt_engine.format.manifest import Manifest
from ckpt_engine.tiers.durable_files import write_durably
from ckpt_engine.trainer.capture.capturer import Capture, Capturer
from ckpt_engine.trainer.tensor_bytes import bytes_in_place
from flyball import __version__
from flyball.contracts.clock import SystemClock

_PIECE_BYTES = 64 << 20


def write_directly(state: Mapping[str, object], path: Path) -> None:
    """Returns when the file is on the disk. Raises UnsupportedState, StorageFull, OSError; an older file stays then."""
    capturer = Capturer(sealed=True)
    try:
        capture = capturer.take(state)
        is_new = _make_if_missing(path)
        try:
            mode = stat.S_IMODE(path.stat().st_mode)
            write_durably(path, _sealed_parts(capture), size_bytes=capture.payload_bytes, mode=mode)
        except BaseException:
            if is_new:
                path.unlink(missing_ok=True)
            raise
    finally:
        capturer.close()


def _make_if_missing(path: Path) -> bool:
    """An empty file, whose mode is what this process gives to new files."""
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666))
    except FileExistsError:
        return False
    return True


def _sealed_parts(capture: Capture) -> Iterator[bytes | memoryview]:
    hasher = ChunkHasher()
    for part in shard_parts(capture):
        hasher.update(part)
        yield part
    manifest = Manifest(
        version=manifests.MANIFEST_VERSION,
        code_version=__version__,
        job="standalone",
        generation=0,
        step=0,
        rank=0,
        world_size=1,
        payload_bytes=capture.payload_bytes - capture.plan.seal_bytes,
        chunk_bytes=DEFAULT_CHUNK_BYTES,
        chunk_digests=hasher.digests(),
        committed_at=SystemClock().wall_s(),
        tensor_count=len(capture.flat.tensors),
    )
    yield sealed_file.encode_seal(manifest)


def shard_parts(capture: Capture) -> Iterator[bytes | memoryview]:
    """The bytes of a shard in order, without its seal. At most one tensor at a time is copied."""
    plan = capture.plan
    yield plan.header_capacity.to_bytes(shard_format.LENGTH_BYTES, "little")
    yield capture.header.ljust(plan.header_capacity)
    for name in sorted(capture.flat.tensors, key=lambda name: plan.tensors[name].data_offsets):
        tensor = capture.flat.tensors[name].detach().resolve_neg().cpu().contiguous()
        content = bytes_in_place(tensor)
        for begin in range(0, len(content), _PIECE_BYTES):
            yield content[begin : begin + _PIECE_BYTES]
