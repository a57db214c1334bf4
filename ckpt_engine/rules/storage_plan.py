"""Plans how ranks store a step together: what several of them hold alike is written by one. Pure.

Candidates are tensors of one name, dtype, shape and place in the whole tensor. Their bytes are compared by the digests
in the manifests, which costs nothing, as far as whole chunks at equal offsets decide; else by hashing. Owners are
chosen by bytes, largest first, the same on every host that sees the same shards.

Between hosts a chunk has to be fetched before its bytes can be hashed. So there only a few are, the same on every host.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import msgspec
import xxhash

from ckpt_engine.format import shard_format, stored_layout
from ckpt_engine.format.integrity import DIGEST_BYTES
from ckpt_engine.format.manifest import Manifest
from ckpt_engine.format.shard_format import ShardHeader, TensorHeader
from ckpt_engine.format.stored_layout import (
    HEADER_TENSOR,
    LAYOUT_VERSION,
    MAX_EXTENTS,
    MAX_LAYOUT_BYTES,
    Extent,
    StoredLayout,
    StoredTogether,
)
from ckpt_engine.rules import balance

MIN_SHARED_BYTES: Final = 4096  # of a tensor; to read a smaller one from another file costs more than it takes
WORTH_IT_BYTES: Final = 1 << 20  # saved by the whole plan
WORTH_IT_SHARE: Final = 1 / 20
_FRACTIONS: Final = ("F", "BF")  # dtypes of parameters, and of what optimizers keep
_ALIGNMENT: Final = 4096  # of the tensors in a file, as in a slot

HashRange = Callable[[int, int, int], bytes]  # (rank, begin, end) in its shard -> the digest of these bytes


class HeldShard(NamedTuple):
    """A rank's shard of the step: its header, its manifest, and the digest of that."""

    header: ShardHeader
    manifest: Manifest
    digest: str


@dataclass(frozen=True, slots=True)
class OddReplicas:
    """Ranks should hold the same bytes of these tensors, and do not. `agree` is the majority, () if there is none."""

    tensors: tuple[str, ...]
    agree: tuple[int, ...]
    differ: tuple[int, ...]


class EqualBytes(NamedTuple):
    """What ranks hold alike of a tensor. The digest is of all of its bytes, or of the whole chunks inside it: another
    one at the same place means other bytes."""

    ranks: tuple[int, ...]
    place: tuple[int, int]
    digest: bytes


@dataclass(frozen=True, slots=True)
class StoredPart:
    """What one member writes: `header`, then these ranges (begin, end) of its shard. `checked` are the chunks that have
    to be right for the whole plan to be."""

    header: bytes
    ranges: tuple[tuple[int, int], ...]
    checked: tuple[int, ...]
    layout: StoredLayout

    @property
    def size_bytes(self) -> int:
        return len(self.header) + sum(end - begin for begin, end in self.ranges)


@dataclass(frozen=True, slots=True)
class StoragePlan:
    """The parts of the members, by rank; none if nothing is worth sharing. `saved_bytes` would be written twice."""

    parts: Mapping[int, StoredPart]
    saved_bytes: int
    differing: tuple[OddReplicas, ...]
    equal: Mapping[str, tuple[EqualBytes, ...]] = field(default_factory=dict)
    # numbers with a fraction that all ranks with that tensor hold alike; one of each place in the whole tensor
    undecided: tuple[OddReplicas, ...] = ()  # likewise, without a majority: they may be the ranks' own


class _Alike(NamedTuple):
    """A tensor that several ranks hold alike."""

    name: str
    ranks: tuple[int, ...]
    size_bytes: int


def plan(
    shards: Mapping[int, HeldShard], hash_range: HashRange, *, most_hashed_chunks: int | None = None
) -> StoragePlan:
    """Plan the step of these ranks' shards. `most_hashed_chunks`: only tensors that lie at the same offset are
    compared, and so many chunks of each shard are hashed at most; tensors that would take more are left as they are."""
    alike: list[_Alike] = []
    undecided: dict[tuple[int, ...], list[str]] = defaultdict(list)
    equal: dict[str, list[EqualBytes]] = defaultdict(list)
    differing: dict[tuple[tuple[int, ...], tuple[int, ...]], list[str]] = defaultdict(list)
    hashed: dict[int, set[int]] = defaultdict(set)  # chunks whose bytes were compared, not their digests
    is_limited = most_hashed_chunks is not None
    candidates = tuple(_candidates(shards, at_one_offset=is_limited))
    left_open = _left_open(candidates, shards, most_hashed_chunks) if most_hashed_chunks is not None else set()
    for name, ranks in candidates:
        tensor = shards[ranks[0]].header.tensors[name]
        is_open = (name, ranks) in left_open
        if is_open:  # they may be equal all the same
            groups = [tuple(group) for group in _by_digests(name, ranks, shards)]
        else:
            groups = _equal(name, ranks, shards, hash_range, hashed)
        odd = None if is_open or len(groups) == 1 else _differ(name, groups, shards[ranks[0]].header)
        if odd is not None:
            differing[odd].append(name)
        elif not is_open and tensor.dtype.startswith(_FRACTIONS):  # others may be states of random generators, which
            # part at some step
            if len(groups) > 1:
                undecided[ranks].append(name)
            elif not is_limited or _inside(shards[ranks[0]], name):
                equal[name].append(_equal_bytes(name, ranks, shards[ranks[0]], hash_range))
        size_bytes = _size(tensor)
        if size_bytes >= MIN_SHARED_BYTES:
            alike += (_Alike(name, group, size_bytes) for group in groups if len(group) > 1)
    saved_bytes = sum(found.size_bytes * (len(found.ranks) - 1) for found in alike)
    parts: dict[int, StoredPart] = {}
    whole_bytes = sum(shard.manifest.payload_bytes for shard in shards.values())
    if saved_bytes >= max(WORTH_IT_BYTES, whole_bytes * WORTH_IT_SHARE):
        members = sorted({rank for found in alike for rank in found.ranks})
        parts = _parts({rank: shards[rank] for rank in members}, alike, hashed)
    odd_ones = tuple(OddReplicas(tuple(names), *ranks) for ranks, names in sorted(differing.items()))
    apart = tuple(OddReplicas(tuple(names), (), ranks) for ranks, names in sorted(undecided.items()))
    names_apart = {name for odd in (*odd_ones, *apart) for name in odd.tensors}
    whole = {name: tuple(held) for name, held in equal.items() if name not in names_apart}
    return StoragePlan(parts, saved_bytes if parts else 0, odd_ones, whole, apart)


# --- what is alike ---


def _size(tensor: TensorHeader) -> int:
    return tensor.data_offsets[1] - tensor.data_offsets[0]


_Candidate = tuple[str, tuple[int, ...]]  # a tensor, and the ranks that may hold it alike


def _candidates(shards: Mapping[int, HeldShard], *, at_one_offset: bool) -> Iterator[_Candidate]:
    """The tensors that two ranks or more may hold alike, in order."""
    ranks_of: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for rank, shard in sorted(shards.items()):
        header = shard.header
        for name, tensor in header.tensors.items():
            if _size(tensor):
                place = _place(shard, name) if at_one_offset else None
                ranks_of[name, tensor.dtype, tensor.shape, header.blocks.get(name), place].append(rank)
    for (fqn, *_), ranks in ranks_of.items():
        if len(ranks) > 1:
            yield str(fqn), tuple(ranks)


def _left_open(
    candidates: Sequence[_Candidate], shards: Mapping[int, HeldShard], most_hashed_chunks: int
) -> set[_Candidate]:
    """The candidates at one offset for which more chunks would have to be hashed than that. Of a large tensor these are
    the two that it shares with its neighbours, so large ones come first."""
    edges: dict[_Candidate, set[int]] = {}
    small: dict[_Candidate, set[int]] = {}
    for name, ranks in candidates:
        if len(_by_digests(name, ranks, shards)) > 1:
            begin, end = _range(shards[ranks[0]], name)
            chunk_bytes = shards[ranks[0]].manifest.chunk_bytes
            first, last = _whole_chunks(begin, end, chunk_bytes)
            chunks = {*range(begin // chunk_bytes, -(-end // chunk_bytes))}
            if last > first:
                edges[name, ranks] = chunks.difference(range(first, last))
            else:
                small[name, ranks] = chunks
    found: set[_Candidate] = set()
    taken: set[int] = set()
    for some in (edges, small):
        wanted = taken.union(*some.values())
        if len(wanted) <= most_hashed_chunks:
            taken = wanted
        else:
            found.update(some)
    return found


def _by_digests(name: str, ranks: Sequence[int], shards: Mapping[int, HeldShard]) -> list[list[int]]:
    """The ranks in groups that hold the same bytes for sure."""
    found: dict[object, list[int]] = defaultdict(list)
    for rank in ranks:
        found[_covering(shards[rank], name)].append(rank)
    return list(found.values())


def _equal(
    name: str,
    ranks: Sequence[int],
    shards: Mapping[int, HeldShard],
    hash_range: HashRange,
    hashed: dict[int, set[int]],
) -> list[tuple[int, ...]]:
    """The ranks in groups that hold the same bytes."""
    by_digests = _by_digests(name, ranks, shards)
    if len(by_digests) == 1:
        return [tuple(ranks)]
    # Equal bytes may have other neighbours in their chunks, or lie elsewhere.
    at = {_place(shards[group[0]], name) for group in by_digests}
    by_inside: dict[bytes, list[list[int]]] = defaultdict(list)
    for group in by_digests:
        by_inside[_inside(shards[group[0]], name) if len(at) == 1 else b""].append(group)
    found: list[tuple[int, ...]] = []
    for inside, groups in by_inside.items():
        if len(groups) == 1:  # nobody else has these chunks
            found.append(tuple(groups[0]))
            continue
        by_bytes: dict[object, list[int]] = defaultdict(list)
        for group in groups:
            begin, end = _range(shards[group[0]], name)
            chunk_bytes = shards[group[0]].manifest.chunk_bytes
            first, last = _whole_chunks(begin, end, chunk_bytes)
            parts = ((begin, first * chunk_bytes), (last * chunk_bytes, end)) if inside else ((begin, end),)
            by_bytes[tuple(hash_range(group[0], *part) for part in parts)] += group
            for rank in group:
                hashed[rank].update(range(begin // chunk_bytes, -(-end // chunk_bytes)))
        found += (tuple(sorted(group)) for group in by_bytes.values())
    return sorted(found)


def _whole_chunks(begin: int, end: int, chunk_bytes: int) -> tuple[int, int]:
    """The first chunk that these bytes have all of, and the one after the last."""
    return -(-begin // chunk_bytes), end // chunk_bytes


def _inside(shard: HeldShard, name: str) -> bytes:
    """The digests of the chunks that have nothing but bytes of the tensor; b"" if there are none."""
    first, last = _whole_chunks(*_range(shard, name), shard.manifest.chunk_bytes)
    return shard.manifest.chunk_digests[first * DIGEST_BYTES : max(first, last) * DIGEST_BYTES]


def _equal_bytes(name: str, ranks: tuple[int, ...], shard: HeldShard, hash_range: HashRange) -> EqualBytes:
    """Costs nothing for a large tensor: then the whole chunks inside it stand for it."""
    inside = _inside(shard, name)
    digest = xxhash.xxh3_128_digest(inside) if inside else hash_range(ranks[0], *_range(shard, name))
    return EqualBytes(ranks, _place(shard, name), digest)


def _range(shard: HeldShard, name: str) -> tuple[int, int]:
    begin, end = shard.header.tensors[name].data_offsets
    return shard.header.data_start + begin, shard.header.data_start + end


def _place(shard: HeldShard, name: str) -> tuple[int, int]:
    return _range(shard, name)[0], shard.manifest.chunk_bytes


def _covering(shard: HeldShard, name: str) -> tuple[object, ...]:
    """Equal if all chunks with bytes of the tensor are equal, and at equal places."""
    begin, end = _range(shard, name)
    chunk_bytes = shard.manifest.chunk_bytes
    first, last = begin // chunk_bytes, -(-end // chunk_bytes)
    return begin, chunk_bytes, shard.manifest.chunk_digests[first * DIGEST_BYTES : last * DIGEST_BYTES]


def _differ(
    name: str, groups: Sequence[tuple[int, ...]], header: ShardHeader
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """(ranks that agree, ranks that do not), if these groups should be one: more than half agree, or the tensor is a
    block of a sharded one, which lies at the same place on all of these ranks."""
    ranks = sorted(rank for group in groups for rank in group)
    largest = max(groups, key=len)
    if 2 * len(largest) > len(ranks):
        return largest, tuple(rank for rank in ranks if rank not in largest)
    return ((), tuple(ranks)) if name in header.blocks else None


# --- where it lies ---


def _parts(
    shards: Mapping[int, HeldShard], alike: Sequence[_Alike], hashed: Mapping[int, set[int]]
) -> dict[int, StoredPart]:
    """What each member writes, by rank; none if a layout would be too large."""
    owner_of = _owners(shards, alike)
    headers: dict[int, bytes] = {}
    beginnings: dict[int, int] = {}  # by rank: where in its file the beginning of its shard is
    places: dict[int, dict[str, int]] = {}  # by rank: where the tensors begin that it stores
    sizes: dict[int, int] = {}
    for rank, shard in shards.items():
        kept = [name for name in _in_order(shard.header) if owner_of.get((rank, name), rank) == rank]
        headers[rank], beginnings[rank], places[rank] = _stored_header(shard.header, kept)
        sizes[rank] = len(headers[rank]) + shard.header.data_start
        sizes[rank] += sum(_size(shard.header.tensors[name]) for name in kept)
    extents = {rank: _extents(rank, shard, owner_of, beginnings[rank], places) for rank, shard in shards.items()}
    files = tuple(sorted(sizes.items()))
    described = [(rank, shards[rank].digest, headers[rank], extents[rank]) for rank, _ in files]
    digest = xxhash.xxh3_128_hexdigest(msgspec.json.encode((files, described)))
    parts: dict[int, StoredPart] = {}
    for rank, shard in shards.items():
        header = stored_layout.file_header(headers[rank])
        layout = StoredLayout(LAYOUT_VERSION, StoredTogether(digest, files), extents[rank], header)
        if len(layout.extents) > MAX_EXTENTS or len(stored_layout.encode(layout)) > MAX_LAYOUT_BYTES:
            return {}
        ranges = _ranges(rank, shard, owner_of)
        chunk_bytes = shard.manifest.chunk_bytes
        written = {n for begin, end in ranges for n in range(begin // chunk_bytes, -(-end // chunk_bytes))}
        checked = tuple(sorted(written | hashed.get(rank, set())))
        parts[rank] = StoredPart(headers[rank], ranges, checked, layout)
    return parts


def _owners(shards: Mapping[int, HeldShard], alike: Sequence[_Alike]) -> dict[tuple[int, str], int]:
    """Who writes a tensor for a rank that holds it alike with others: (rank, name) -> rank."""
    members = sorted(shards)
    number = {rank: index for index, rank in enumerate(members)}
    shared = {(rank, found.name): found.size_bytes for found in alike for rank in found.ranks}
    sizes, holders = [], []
    for rank, shard in shards.items():  # what a rank has for itself
        sizes.append(sum(_size(t) for name, t in shard.header.tensors.items() if (rank, name) not in shared))
        holders.append([number[rank]])
    for found in alike:
        sizes.append(found.size_bytes)
        holders.append([number[rank] for rank in found.ranks])
    writers = balance.assign(sizes, holders, len(members))[len(shards) :]
    return {
        (rank, found.name): members[writer]
        for found, writer in zip(alike, writers, strict=True)
        for rank in found.ranks
    }


def _in_order(header: ShardHeader) -> list[str]:
    return sorted(header.tensors, key=lambda name: header.tensors[name].data_offsets)


def _stored_header(header: ShardHeader, kept: Sequence[str]) -> tuple[bytes, int, dict[str, int]]:
    """The header of a stored file with these tensors, padded; where the shard's beginning is in the file, and where
    each tensor begins."""
    beginning = next(n for count in itertools.count() if (n := HEADER_TENSOR + "'" * count) not in header.tensors)
    tensors = {beginning: TensorHeader("U8", (header.data_start,), (0, header.data_start))}
    end = header.data_start
    for name in kept:
        tensor = header.tensors[name]
        tensors[name] = TensorHeader(tensor.dtype, tensor.shape, (end, end + _size(tensor)))
        end += _size(tensor)
    blocks = {name: header.blocks[name] for name in kept if name in header.blocks}
    metadata = {shard_format.SHARDING_KEY: shard_format.encode_blocks(blocks)} if blocks else {}
    content = shard_format.join_header(metadata, shard_format.encode_tensors(tensors))
    length = -(-(shard_format.LENGTH_BYTES + len(content)) // _ALIGNMENT) * _ALIGNMENT
    padded = content.ljust(length - shard_format.LENGTH_BYTES)
    start = {name: length + tensor.data_offsets[0] for name, tensor in tensors.items()}
    return len(padded).to_bytes(shard_format.LENGTH_BYTES, "little") + padded, start.pop(beginning), start


def _extents(
    rank: int,
    shard: HeldShard,
    owner_of: Mapping[tuple[int, str], int],
    beginning: int,
    places: Mapping[int, Mapping[str, int]],
) -> tuple[Extent, ...]:
    extents = [Extent(shard.header.data_start, rank, beginning)]
    for name in _in_order(shard.header):
        if size_bytes := _size(shard.header.tensors[name]):
            owner = owner_of.get((rank, name), rank)
            extent, last = Extent(size_bytes, owner, places[owner][name]), extents[-1]
            if (last.rank, last.offset + last.size_bytes) == (extent.rank, extent.offset):
                extents[-1] = Extent(last.size_bytes + size_bytes, owner, last.offset)
            else:
                extents.append(extent)
    return tuple(extents)


def _ranges(rank: int, shard: HeldShard, owner_of: Mapping[tuple[int, str], int]) -> tuple[tuple[int, int], ...]:
    ranges = [(0, shard.header.data_start)]
    for name in _in_order(shard.header):
        if owner_of.get((rank, name), rank) == rank:
            begin, end = _range(shard, name)
            if begin == ranges[-1][1]:
                ranges[-1] = (ranges[-1][0], end)
            elif begin < end:
                ranges.append((begin, end))
    return tuple(ranges)
