"""A shard in one file: its manifest is the file's last tensor, the seal. Pure.

    the shard      as `shard_format` describes it; its header also names the tensor `flyball.manifest`
    the seal       that tensor's bytes: the manifest of everything before, as a manifest file, padded with spaces
                   8 bytes    size of the seal, little-endian
                   8 bytes    SEAL_MAGIC

So the whole file is a valid safetensors file, and whoever writes it writes its manifest last. A file without a seal is
not whole, or not ours.

Until the first save of a path is on disk, the path has a placeholder, a safetensors file without tensors, which names
the save that is in memory.
"""

from __future__ import annotations

from typing import Final

import msgspec

from ckpt_engine.format import integrity, shard_format
from ckpt_engine.format import manifest as manifests
from ckpt_engine.format.manifest import Manifest
from ckpt_engine.format.versions import refuse_newer
from flyball.contracts.errors import CorruptShard
from flyball.contracts.wire import MALFORMED, decoder_of

SEAL_TENSOR: Final = "flyball.manifest"
SEAL_VERSION: Final = 1
_SEAL_HEAD: Final = b"FLYBSEA"
SEAL_MAGIC: Final = _SEAL_HEAD + str(SEAL_VERSION).encode()
FOOTER_BYTES: Final = 16
MAX_SEAL_BYTES: Final = manifests.MAX_MANIFEST_FILE_BYTES + (8 << 10)
PLACEHOLDER_KEY: Final = "flyball.unfinished"
MAX_PLACEHOLDER_BYTES: Final = 4096
_NAMES_BYTES = 2048  # of a manifest without the digests
_STEP_BYTES = 4096


class PlaceholderContent(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which save a placeholder stands for: the memory of which path, and the number of the save."""

    memory: str
    step: int


def seal_bytes(sealed_bytes: int) -> int:
    """The size of the seal of a shard of this size."""
    digests_bytes = integrity.chunk_count(sealed_bytes, integrity.DEFAULT_CHUNK_BYTES) * integrity.DIGEST_BYTES
    needed = -(-digests_bytes // 3) * 4 + _NAMES_BYTES
    return -(-needed // _STEP_BYTES) * _STEP_BYTES


def encode_seal(manifest: Manifest) -> bytes:
    """The seal of the shard that the manifest describes. Raises CorruptShard if the manifest does not fit."""
    size_bytes = seal_bytes(manifest.payload_bytes)
    lines = manifests.as_file(manifests.encode(manifest))
    if len(lines) + FOOTER_BYTES > size_bytes:
        raise CorruptShard(f"A manifest of {len(lines)} bytes does not fit a seal of {size_bytes} bytes.")
    return lines.ljust(size_bytes - FOOTER_BYTES) + size_bytes.to_bytes(8, "little") + SEAL_MAGIC


def seal_size(footer: bytes, file_bytes: int) -> int | None:
    """The size of the seal at the end of a file, from the file's last FOOTER_BYTES; None if the file has no seal.
    Raises CorruptShard if it cannot have such a seal, NewerFormat for one of a newer release."""
    if len(footer) != FOOTER_BYTES or footer[8:-1] != _SEAL_HEAD or not footer[-1:].isdigit():
        return None
    refuse_newer("A sealed file", int(footer[-1:]), SEAL_VERSION)
    size_bytes = int.from_bytes(footer[:8], "little")
    if not FOOTER_BYTES < size_bytes <= min(file_bytes, MAX_SEAL_BYTES):
        raise CorruptShard(f"A file of {file_bytes} bytes claims a seal of {size_bytes} bytes.")
    return size_bytes


def read_seal(seal: bytes, name: str, file_bytes: int) -> Manifest:
    """The manifest in a seal. Raises CorruptShard if it does not match its checksum, or is of another file."""
    manifest = manifests.decode(manifests.content_of_file(seal[:-FOOTER_BYTES].rstrip(b" "), name))
    if manifest.payload_bytes + len(seal) != file_bytes:
        raise CorruptShard(
            f"{name} has {file_bytes} bytes, its manifest describes {manifest.payload_bytes + len(seal)}.",
            hint="load another file",
        )
    return manifest


def encode_placeholder(content: PlaceholderContent) -> bytes:
    """A file that stands at a path until the save is on disk."""
    metadata = {PLACEHOLDER_KEY: msgspec.json.encode(content).decode()}
    header = shard_format.join_header(metadata, b"{}")
    return len(header).to_bytes(shard_format.LENGTH_BYTES, "little") + header


def read_placeholder(data: bytes) -> PlaceholderContent | None:
    """What a placeholder stands for; None if these bytes, a whole file, are none."""
    try:
        header = shard_format.read_header(memoryview(data))
        return decoder_of(PlaceholderContent).decode(header.metadata[PLACEHOLDER_KEY])
    except (CorruptShard, KeyError, *MALFORMED):
        return None
