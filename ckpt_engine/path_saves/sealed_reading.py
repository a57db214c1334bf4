"""Open a sealed file: its manifest, and a source of its bytes. Says what a file is that is none."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from ckpt_engine.format import sealed_file
from ckpt_engine.format.manifest import Manifest
from ckpt_engine.format.sealed_file import FOOTER_BYTES, MAX_PLACEHOLDER_BYTES, PlaceholderContent
from ckpt_engine.format.verified_read import ByteSource, FileSource
from flyball.contracts.errors import CorruptShard, FlyballError, UsageError
from flyball.worker_files import open_worker_file

_ZIP, _PICKLE = b"PK\x03\x04", b"\x80"
_HEAD_BYTES = 16


@dataclass(frozen=True, slots=True)
class SealedSource:
    """The bytes of a sealed file, wherever they are."""

    manifest: Manifest
    source: ByteSource
    seal_bytes: int


@contextmanager
def opened_sealed(path: str) -> Iterator[SealedSource | PlaceholderContent]:
    """A sealed file, or what a placeholder stands for. Raises UsageError for another library's file, CorruptShard,
    OSError."""
    descriptor = open_worker_file(path)
    try:
        file_bytes = os.fstat(descriptor).st_size
        source = FileSource(descriptor)
        footer = _read(source, max(0, file_bytes - FOOTER_BYTES), min(FOOTER_BYTES, file_bytes))
        size_bytes = sealed_file.seal_size(footer, file_bytes)
        if size_bytes is not None:
            seal = _read(source, file_bytes - size_bytes, size_bytes)
            yield SealedSource(sealed_file.read_seal(seal, path, file_bytes), source, size_bytes)
            return
        if file_bytes <= MAX_PLACEHOLDER_BYTES:
            placeholder = sealed_file.read_placeholder(_read(source, 0, file_bytes))
            if placeholder is not None:
                yield placeholder
                return
        raise _not_ours(path, _read(source, 0, min(_HEAD_BYTES, file_bytes)), file_bytes)
    finally:
        os.close(descriptor)


def manifest_in(path: str) -> Manifest | None:
    """The manifest of a sealed file; None if it is none, or cannot be read. Its bytes are not verified."""
    try:
        with opened_sealed(path) as opened:
            return opened.manifest if isinstance(opened, SealedSource) else None
    except (FlyballError, OSError):
        return None


def _read(source: FileSource, offset: int, size_bytes: int) -> bytes:
    data = bytearray(size_bytes)
    source.read_into(memoryview(data), offset)
    return bytes(data)


def _not_ours(path: str, head: bytes, file_bytes: int) -> Exception:
    if head.startswith((_ZIP, _PICKLE)):
        return UsageError(
            f"{path} was written by torch.save, and may contain any code: flyball.load never unpickles.",
            hint=f"convert it once: flyball ckpt import {path} --to FOLDER; or use torch.load for this file",
        )
    if len(head) > 8 and head[8:9] == b"{" and int.from_bytes(head[:8], "little") <= file_bytes - 8:
        return CorruptShard(
            f"{path} is a safetensors file without Flyball's checksums, or one that was cut off.",
            hint="if another program wrote it: safetensors.torch.load_file, or flyball ckpt import",
        )
    return CorruptShard(f"{path} was not written by flyball.save, or is damaged.", hint="load another file")
