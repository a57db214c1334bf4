"""How a shard lies in a tier's files when it shares bytes with other ranks. Pure.

A manifest describes the logical shard, which is the same in every tier. In a disk or persistent tier, what several
ranks hold alike may be stored once, in the file of one of them, the owner: ranks of one host, or of several that share
the tier. Then each of these ranks' manifest
files has a second pair of lines, the layout: which bytes of the logical shard are where in which rank's file.

The file of such a rank is a valid safetensors file with the tensors that the rank owns, and one more, HEADER_TENSOR:
the beginning of the logical shard, byte for byte. A tensor that another rank owns is not in it at all. The checksums of
the manifest cover all of it but the file's own header, which the layout has a checksum of.

The ranks that share bytes are the members of one plan. It counts as a whole: with the manifests of all of its members.
"""

from __future__ import annotations

import bisect
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Final, NamedTuple

import msgspec
import xxhash

from ckpt_engine.format import manifest as manifests
from ckpt_engine.format.manifest import MAX_MANIFEST_FILE_BYTES, Manifest
from ckpt_engine.format.versions import refuse_newer
from flyball.contracts.errors import CorruptShard
from flyball.contracts.identity import Rank
from flyball.contracts.wire import MALFORMED, decoder_of

LAYOUT_VERSION: Final = 2  # version 1, which has no checksum of the file's header, is read too
HEADER_TENSOR: Final = "flyball.header"
MAX_EXTENTS: Final = 1 << 18
MAX_LAYOUT_BYTES: Final = 16 << 20
MAX_DESCRIPTION_BYTES: Final = MAX_MANIFEST_FILE_BYTES + MAX_LAYOUT_BYTES + 64  # of a manifest file with a layout
_DIGEST = re.compile("[0-9a-f]{32}")  # also of a plan

_Size = Annotated[int, msgspec.Meta(ge=0)]
_SomeBytes = Annotated[int, msgspec.Meta(ge=1)]


class Extent(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The next `size_bytes` of the logical shard: in the file of `rank`, from `offset` on."""

    size_bytes: _SomeBytes
    rank: Rank
    offset: _Size


class StoredTogether(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A plan: its digest, and its members' ranks with the sizes of their files, in order."""

    plan: str
    files: tuple[tuple[Rank, _SomeBytes], ...]


class FileHeader(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The beginning of the rank's own file, up to its tensors: its size, and its xxh3-128 in hex."""

    size_bytes: _SomeBytes
    digest: str


class StoredLayout(msgspec.Struct, frozen=True):
    """Where the bytes of one logical shard are. The extents cover it in order, without gap or overlap."""

    version: int
    together: StoredTogether
    extents: tuple[Extent, ...]
    header: FileHeader | None = None  # None: version 1

    @property
    def file_bytes(self) -> dict[int, int]:
        """The sizes of the files that have bytes of this shard, by rank."""
        used = {extent.rank for extent in self.extents}
        return {rank: size_bytes for rank, size_bytes in self.together.files if rank in used}


class StoredShard(NamedTuple):
    """The content of a manifest file: the manifest, its bytes, and the layout if the shard shares bytes."""

    manifest: Manifest
    data: bytes
    layout: StoredLayout | None

    def file_size(self) -> int:
        """The size of the rank's own file."""
        if self.layout is None:
            return self.manifest.payload_bytes
        return dict(self.layout.together.files)[self.manifest.rank]


_encoder = msgspec.json.Encoder()
_decoder = decoder_of(StoredLayout)


def encode(layout: StoredLayout) -> bytes:
    return _encoder.encode(layout)


def decode(data: bytes, manifest: Manifest) -> StoredLayout:
    """Decode the layout of the shard that the manifest describes. Raises CorruptShard unless it is consistent."""
    if len(data) > MAX_LAYOUT_BYTES:
        raise CorruptShard(f"A layout of {len(data)} bytes exceeds the limit of {MAX_LAYOUT_BYTES}.")
    try:
        layout = _decoder.decode(data)
    except MALFORMED as error:
        raise CorruptShard(f"A layout does not parse: {error}.") from error
    refuse_newer("A layout", layout.version, LAYOUT_VERSION, manifest.code_version)
    if layout.version != (1 if layout.header is None else LAYOUT_VERSION):
        raise CorruptShard(
            f"A layout of version {layout.version} has {'no' if layout.header is None else 'a'} header checksum.",
            hint="another copy is tried",
        )
    _check(layout, manifest)
    return layout


def _check(layout: StoredLayout, manifest: Manifest) -> None:
    plan, ranks = layout.together.plan, [rank for rank, _ in layout.together.files]
    if not _DIGEST.fullmatch(plan) or manifest.rank not in ranks or ranks != sorted(set(ranks)):
        raise CorruptShard(f"A layout of rank {manifest.rank} is of a plan {plan[:40]!r} of ranks {ranks[:16]}.")
    if ranks[-1] >= manifest.world_size or len(layout.extents) > MAX_EXTENTS:
        raise CorruptShard(
            f"A layout has {len(layout.extents)} extents in files of ranks up to {ranks[-1]}; the world has "
            f"{manifest.world_size} ranks."
        )
    sizes = dict(layout.together.files)
    header = layout.header
    if header is not None and (header.size_bytes > sizes[manifest.rank] or not _DIGEST.fullmatch(header.digest)):
        raise CorruptShard(f"A layout has a header of {header.size_bytes} bytes and checksum {header.digest[:40]!r}.")
    if header is not None and manifest.rank not in layout.file_bytes:
        raise CorruptShard(f"A layout of rank {manifest.rank} has no bytes in its own file.")
    for extent in layout.extents:
        if extent.offset + extent.size_bytes > sizes.get(extent.rank, 0):
            raise CorruptShard(f"A layout places bytes outside the file of rank {extent.rank}.")
    covered = sum(extent.size_bytes for extent in layout.extents)
    if covered != manifest.payload_bytes:
        raise CorruptShard(f"A layout covers {covered} bytes of a shard of {manifest.payload_bytes}.")


def as_file(data: bytes, layout: bytes) -> bytes:
    """The content of a manifest file: the lines of the manifest, and those of the layout (b"" if there is none)."""
    return manifests.as_file(data) + (manifests.as_file(layout) if layout else b"")


def read_file(lines: bytes, name: str) -> StoredShard:
    """Decode a manifest file. Raises CorruptShard."""
    end = lines.find(b"\n", lines.find(b"\n") + 1) + 1
    data = manifests.content_of_file(lines[:end], name)
    manifest = manifests.decode(data)
    if end == len(lines):
        return StoredShard(manifest, data, None)
    return StoredShard(manifest, data, decode(manifests.content_of_file(lines[end:], name), manifest))


def shared_bytes_gone(rank: int, owner: int) -> CorruptShard:
    """The error of a shard of which the owner's file is not there."""
    return CorruptShard(
        f"The shard of rank {rank} has bytes in the file of rank {owner}, which is not there.",
        hint="keep all files of a step together; another copy is tried",
    )


ReadInto = Callable[[memoryview, int], None]


def file_header(header: bytes) -> FileHeader:
    return FileHeader(len(header), xxhash.xxh3_128_hexdigest(header))


def check_file_header(layout: StoredLayout, read: ReadInto) -> None:
    """Raise CorruptShard if the header of the rank's own file, which `read` reads, does not match its checksum."""
    assert layout.header is not None, "version 1 has none"
    found = bytearray(layout.header.size_bytes)
    read(memoryview(found), 0)
    if file_header(bytes(found)) != layout.header:
        raise CorruptShard(
            f"The header of the file ({len(found)} bytes) does not match its checksum.", hint="another copy is tried"
        )


class Composition:
    """The logical shard, put together from the files that a layout names."""

    def __init__(self, layout: StoredLayout, reads: Mapping[int, ReadInto]) -> None:
        """`reads` fill memory with a rank's file from an offset on, for all of `layout.file_bytes`."""
        self._extents: Sequence[Extent] = layout.extents
        self._ends = list(itertools.accumulate(extent.size_bytes for extent in layout.extents))
        self._reads = reads

    @property
    def size_bytes(self) -> int:
        return self._ends[-1] if self._ends else 0

    def read_into(self, target: memoryview, offset: int) -> None:
        """Fill `target` with the shard's bytes from `offset` on. Thread-safe if the reads are. Raises CorruptShard at
        the shard's end, and what the reads raise."""
        if offset + len(target) > self.size_bytes:
            raise CorruptShard(f"A shard of {self.size_bytes} bytes ends before byte {offset + len(target)}.")
        for begin, size_bytes, rank, at in self._parts(offset, len(target)):
            self._reads[rank](target[begin : begin + size_bytes], at)

    def _parts(self, offset: int, size_bytes: int) -> Iterator[tuple[int, int, int, int]]:
        """(begin in the target, size, rank, offset in its file) of these bytes, in order."""
        done = 0
        index = bisect.bisect_right(self._ends, offset)
        while done < size_bytes:
            extent = self._extents[index]
            skipped = offset + done - (self._ends[index] - extent.size_bytes)
            count = min(extent.size_bytes - skipped, size_bytes - done)
            yield done, count, extent.rank, extent.offset + skipped
            done += count
            index += 1
