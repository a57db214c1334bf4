"""How hosts share the reading of a step that only the store has: which chunks each rank reads, which it gets from
another host or rank, and whether that pays. Pure.

Chunks with the same checksum are the same bytes. Of several ranks that need the same bytes, one reads them from the
store. It passes them on to one rank of each other host, and that one to the ranks beside it. Every engine that sees the
same manifests makes the same split, so nobody has to hand it out.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple, TypeVar

from ckpt_engine.format.integrity import DIGEST_BYTES
from ckpt_engine.format.manifest import Manifest

MAX_COHORT_RANKS: Final = 64  # that share: each host reads the manifests of all of them
WORTH_IT_SHARE: Final = 1 / 20  # of a host's chunks that other ranks need too
BLOCK_CHUNKS: Final = 8  # that one host reads: the store is read in long ranges

Setting = Literal["auto", "on", "off"]
T = TypeVar("T")


class ChunkPlace(NamedTuple):
    """A chunk of the shard of a rank."""

    rank: int
    chunk: int


Pairs = tuple[tuple[int, ChunkPlace], ...]  # (a chunk of one's own shard, a chunk with the same bytes)


@dataclass(frozen=True, slots=True)
class RankReads:
    """Where one rank gets the chunks of its shard, each from one of these."""

    own: tuple[int, ...]  # from the store, in order
    of_hosts: Mapping[str, Pairs]  # by another host: from a rank there, which reads them from the store
    here: Pairs  # from a rank of this host; its own shard has the same bytes twice if it is the rank itself


@dataclass(frozen=True, slots=True)
class Split:
    """What the ranks of one host read, and with whom they share it."""

    reads: Mapping[int, RankReads]  # by rank
    shares: bool  # whether other ranks need enough of the same bytes
    hosts: tuple[str, ...]  # others that need some of the same bytes


@dataclass(frozen=True, slots=True)
class PartReads:
    """Where one host gets the chunks that its ranks want of the shards of all ranks, each from one of these."""

    own: Mapping[int, tuple[int, ...]]  # from the store, by the rank that saved them, in order
    of_hosts: Mapping[str, tuple[tuple[ChunkPlace, ChunkPlace], ...]]  # by another host: (here, the same bytes there)
    here: tuple[tuple[ChunkPlace, ChunkPlace], ...]  # (here, the same bytes in another place that this host gets)
    given: Mapping[str, int]  # to each other host: how many of the own chunks it gets from this one
    shares: bool  # whether other hosts or places need enough of the same bytes


@dataclass(frozen=True, slots=True)
class Bandwidth:
    """What one host gets."""

    bytes_per_s: float
    source: str  # how it was measured


@dataclass(frozen=True, slots=True)
class Choice:
    """Whether the hosts share, and why."""

    shares: bool
    reason: str


def cohort(ranks_of: Mapping[str, Sequence[int]], host_id: str) -> dict[str, tuple[int, ...]]:
    """The hosts that share with this one, itself included, and their ranks. `ranks_of` is in the placement's order, in
    which neighbours are together: as many as have 64 ranks."""
    found: dict[str, tuple[int, ...]] = {}
    count = 0
    for host, ranks in ranks_of.items():
        if count + len(ranks) > MAX_COHORT_RANKS and found:
            if host_id in found:
                break
            found, count = {}, 0
        if ranks:
            found[host] = tuple(ranks)
            count += len(ranks)
    return found if host_id in found else {}


def split(manifests: Mapping[int, Manifest], host_of: Mapping[int, str], host_id: str) -> Split:
    """What each rank of `host_id` reads, and from where. `manifests` of all ranks of the cohort, by rank."""
    here = sorted(rank for rank in manifests if host_of[rank] == host_id)
    first: dict[bytes, dict[int, int]] = {
        key: {} for rank in here for key in _keys(manifests[rank])
    }  # for each of these bytes: the ranks that need them -> the first chunk with them
    for rank in sorted(manifests):
        for chunk, key in enumerate(_keys(manifests[rank])):
            if (places := first.get(key)) is not None:
                places.setdefault(rank, chunk)
    reader = _readers(first, host_of)
    together = {ranks for places in first.values() if len(ranks := tuple(places)) > 1}
    chunks = [key for rank in here for key in _keys(manifests[rank])]
    alike = sum(len(first[key]) > 1 for key in chunks)
    return Split(
        {rank: _reads(rank, manifests[rank], first, reader, host_of) for rank in here},
        shares=0 < alike >= len(chunks) * WORTH_IT_SHARE,
        hosts=tuple(sorted({host_of[rank] for ranks in together for rank in ranks} - {host_id})),
    )


def split_parts(
    wanted: Mapping[str, Iterable[ChunkPlace]], manifests: Mapping[int, Manifest], host_id: str
) -> PartReads:
    """What `host_id` reads of a step that is restored in another layout. `wanted` by host, itself included: the chunks
    that its ranks need. `manifests` of all ranks that saved the step.

    Blocks of neighbouring chunks go in turn to the hosts that need them.
    """
    keys = {rank: list(_keys(manifest)) for rank, manifest in manifests.items()}
    first: dict[bytes, dict[str, ChunkPlace]] = {}  # for each of the bytes: where the hosts that need them want them
    for host in sorted(wanted):
        for place in sorted(wanted[host]):
            first.setdefault(keys[place.rank][place.chunk], {}).setdefault(host, place)
    own: dict[int, list[int]] = defaultdict(list)
    of_hosts: dict[str, list[tuple[ChunkPlace, ChunkPlace]]] = defaultdict(list)
    here: list[tuple[ChunkPlace, ChunkPlace]] = []
    given: dict[str, int] = defaultdict(int)
    mine = sorted(wanted[host_id])
    for place in mine:
        places = first[keys[place.rank][place.chunk]]
        owner = _owner(places)
        if place != places[host_id]:
            here.append((place, places[host_id]))
        elif owner == host_id:
            own[place.rank].append(place.chunk)
            for host in places.keys() - {host_id}:
                given[host] += 1
        else:
            of_hosts[owner].append((place, places[owner]))
    alike = sum(map(len, of_hosts.values())) + sum(given.values()) + len(here)
    return PartReads(
        {rank: tuple(chunks) for rank, chunks in own.items()},
        {host: tuple(pairs) for host, pairs in of_hosts.items()},
        tuple(here),
        dict(given),
        shares=0 < alike >= len(mine) * WORTH_IT_SHARE,
    )


def _owner(places: Mapping[str, ChunkPlace]) -> str:
    """The host that reads these bytes, of those that need them, which are in order."""
    hosts = list(places)
    rank, chunk = places[hosts[0]]
    return hosts[(rank + chunk // BLOCK_CHUNKS) % len(hosts)]


def _keys(manifest: Manifest) -> Iterator[bytes]:
    """What stands for the bytes of each chunk: the checksum, and the size, which the last chunk has for itself."""
    digests, size, whole = manifest.chunk_digests, manifest.chunk_bytes, manifest.payload_bytes
    for chunk in range(len(digests) // DIGEST_BYTES):
        count = min(size, whole - chunk * size)
        yield digests[chunk * DIGEST_BYTES : (chunk + 1) * DIGEST_BYTES] + count.to_bytes(8, "little")


def _readers(first: Mapping[bytes, Mapping[int, int]], host_of: Mapping[int, str]) -> dict[bytes, dict[str, int]]:
    """For all bytes: the host that reads them from the store, and then each other host that needs them, with the rank
    that gets them there for all."""
    alike: dict[tuple[int, ...], list[bytes]] = defaultdict(list)  # by the ranks that need them
    for key, places in first.items():
        alike[tuple(places)].append(key)
    found: dict[bytes, dict[str, int]] = {}
    for ranks, keys in alike.items():
        keys.sort(key=lambda key: first[key][ranks[0]])
        hosts = sorted({host_of[rank] for rank in ranks})
        at = {host: [rank for rank in ranks if host_of[rank] == host] for host in hosts}
        for owner, owned in _cut(keys, hosts):
            order = [owner, *(host for host in hosts if host != owner)]
            for host in order:
                for rank, some in _cut(owned, at[host]):
                    for key in some:
                        found.setdefault(key, {})[host] = rank
    return found


def _cut(keys: Sequence[bytes], among: Sequence[T]) -> Iterator[tuple[T, Sequence[bytes]]]:
    """Neighbouring keys in parts, equal up to one: the store is read in long ranges."""
    for number, one in enumerate(among):
        yield one, keys[number * len(keys) // len(among) : (number + 1) * len(keys) // len(among)]


def _reads(
    rank: int,
    manifest: Manifest,
    first: Mapping[bytes, Mapping[int, int]],
    readers: Mapping[bytes, Mapping[str, int]],
    host_of: Mapping[int, str],
) -> RankReads:
    own: list[int] = []
    of_hosts: dict[str, list[tuple[int, ChunkPlace]]] = defaultdict(list)
    here: list[tuple[int, ChunkPlace]] = []
    for chunk, key in enumerate(_keys(manifest)):
        owner = next(iter(readers[key]))
        head = readers[key][host_of[rank]]
        if head != rank or first[key][rank] != chunk:
            here.append((chunk, ChunkPlace(head, first[key][head])))
        elif owner == host_of[rank]:
            own.append(chunk)
        else:
            there = readers[key][owner]
            of_hosts[owner].append((chunk, ChunkPlace(there, first[key][there])))
    return RankReads(tuple(own), {host: tuple(pairs) for host, pairs in of_hosts.items()}, tuple(here))


def choose(setting: Setting, *, hosts: int, store: Bandwidth | None, network: Bandwidth | None) -> Choice:
    """Whether these hosts share what they need alike. The numbers, which only `auto` needs, are those of one host.

    N bytes take N/s alone. Shared by H hosts they take N/(H·s) and then, at worst, N·(H-1)/(H·n): less if n > s.
    """
    if setting != "auto":
        return Choice(setting == "on", f"broadcast = {setting}")
    if store is None or network is None:
        lacking = "store" if store is None else "network"
        return Choice(False, f"the bandwidth of the {lacking} could not be measured, so each host reads for itself")
    numbers = (
        f"this host gets {store.bytes_per_s / 1e6:.0f} MB/s from the store ({store.source}) and "
        f"{network.bytes_per_s / 1e6:.0f} MB/s from another host ({network.source})"
    )
    if network.bytes_per_s > store.bytes_per_s:
        return Choice(True, f"{numbers}: the store is read once for {hosts} hosts, which pass the bytes on")
    return Choice(False, f"{numbers}: each host reads for itself")
