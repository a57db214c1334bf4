"""Hosts that need the same bytes divide them: each is read from the store once, by the same host in the eyes of all."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_engine.format.integrity import DIGEST_BYTES
from ckpt_engine.format.manifest import MANIFEST_VERSION, Manifest
from ckpt_engine.rules.broadcast import (
    BLOCK_CHUNKS,
    MAX_COHORT_RANKS,
    Bandwidth,
    ChunkPlace,
    PartReads,
    Split,
    choose,
    cohort,
    split,
    split_parts,
)

CHUNK_BYTES = 10


def shard(rank: int, content: list[int], last_bytes: int = CHUNK_BYTES) -> Manifest:
    """A shard of chunks with these contents."""
    size_bytes = max(len(content) - 1, 0) * CHUNK_BYTES + (last_bytes if content else 0)
    digests = b"".join(value.to_bytes(DIGEST_BYTES, "little") for value in content)
    return Manifest(MANIFEST_VERSION, "t", "job", 1, 2, rank, 9, size_bytes, CHUNK_BYTES, digests)


worlds = st.lists(
    st.tuples(st.sampled_from("abcd"), st.lists(st.integers(0, 12), min_size=1, max_size=20), st.integers(1, 10)),
    min_size=1,
    max_size=8,
)
World = list[tuple[str, list[int], int]]


def splits_of(world: World) -> tuple[dict[int, Manifest], dict[int, str], dict[str, Split]]:
    manifests = {rank: shard(rank, content, last) for rank, (_, content, last) in enumerate(world)}
    host_of = {rank: host for rank, (host, _, _) in enumerate(world)}
    return manifests, host_of, {host: split(manifests, host_of, host) for host in set(host_of.values())}


def key(manifest: Manifest, chunk: int) -> tuple[bytes, int]:
    digest = manifest.chunk_digests[chunk * DIGEST_BYTES : (chunk + 1) * DIGEST_BYTES]
    return digest, min(CHUNK_BYTES, manifest.payload_bytes - chunk * CHUNK_BYTES)


@given(worlds)
def test_all_bytes_come_from_somewhere_and_are_read_once(world: World) -> None:
    manifests, host_of, splits = splits_of(world)
    readers: Counter[tuple[bytes, int]] = Counter()
    for found in splits.values():
        for rank, reads in found.reads.items():
            of_hosts = [pair for pairs in reads.of_hosts.values() for pair in pairs]
            chunks = sorted([*reads.own, *(chunk for chunk, _ in (*of_hosts, *reads.here))])
            assert chunks == list(range(len(world[rank][1]))), "each chunk from one place"
            for chunk, place in (*of_hosts, *reads.here):
                assert key(manifests[rank], chunk) == key(manifests[place.rank], place.chunk)
            for host, pairs in reads.of_hosts.items():
                assert host != host_of[rank] and host in found.hosts
                for _, place in pairs:  # that host agrees that this rank reads it
                    assert host_of[place.rank] == host
                    assert place.chunk in splits[host].reads[place.rank].own
            for _, place in reads.here:
                assert host_of[place.rank] == host_of[rank]
                there = found.reads[place.rank]
                got = {*there.own, *(chunk for pairs in there.of_hosts.values() for chunk, _ in pairs)}
                assert place.chunk in got, "it does not wait for another one that copies"
            readers.update(key(manifests[rank], chunk) for chunk in reads.own)
    needed = {key(manifests[rank], chunk) for rank in manifests for chunk in range(len(world[rank][1]))}
    assert set(readers) == needed and set(readers.values()) <= {1}
    for found in splits.values():
        mine = Counter(
            key(manifests[rank], chunk)
            for rank, reads in found.reads.items()
            for pairs in reads.of_hosts.values()
            for chunk, _ in pairs
        )
        assert set(mine.values()) <= {1}, "nothing crosses the network to a host twice"


@given(worlds)
def test_the_order_of_the_manifests_does_not_matter(world: World) -> None:
    manifests, host_of, splits = splits_of(world)
    backwards = dict(reversed(manifests.items()))
    assert all(split(backwards, host_of, host) == found for host, found in splits.items())


@given(hosts=st.integers(1, 8), per_host=st.integers(1, 4), chunks=st.integers(1, 200))
def test_replicas_divide_the_bytes_evenly_and_read_long_ranges(hosts: int, per_host: int, chunks: int) -> None:
    world = [(f"h{rank // per_host}", list(range(100, 100 + chunks)), CHUNK_BYTES) for rank in range(hosts * per_host)]
    _, _, splits = splits_of(world)
    loads = [sum(len(reads.own) for reads in found.reads.values()) for found in splits.values()]
    assert sum(loads) == chunks and max(loads) - min(loads) <= 1
    for found in splits.values():
        for reads in found.reads.values():
            assert list(reads.own) == list(range(reads.own[0], reads.own[-1] + 1)) if reads.own else True


@given(worlds)
def test_it_knows_who_else_needs_the_same_bytes(world: World) -> None:
    manifests, host_of, splits = splits_of(world)
    keys = {
        rank: {key(manifest, chunk) for chunk in range(len(world[rank][1]))} for rank, manifest in manifests.items()
    }
    for host, found in splits.items():
        mine = [rank for rank in manifests if host_of[rank] == host]
        others = {host_of[other] for rank in mine for other in manifests if other != rank and keys[rank] & keys[other]}
        assert set(found.hosts) == others - {host}
        chunks = [(rank, key(manifests[rank], chunk)) for rank in mine for chunk in range(len(world[rank][1]))]
        alike = [one for rank, one in chunks if any(one in keys[other] for other in manifests if other != rank)]
        assert found.shares == (0 < len(alike) >= len(chunks) / 20)


@given(st.lists(st.integers(0, 100), min_size=1, max_size=30))
def test_every_host_with_ranks_is_in_one_cohort_which_all_its_members_see(counts: list[int]) -> None:
    ranks_of, rank = {}, 0
    for number, count in enumerate(counts):
        ranks_of[f"h{number}"] = tuple(range(rank, rank + count))
        rank += count
    for host, ranks in ranks_of.items():
        found = cohort(ranks_of, host)
        assert (host in found) == bool(ranks)
        assert len(found) <= 1 or sum(map(len, found.values())) <= MAX_COHORT_RANKS
        assert all(cohort(ranks_of, other) == found for other in found)


def test_all_ranks_of_a_small_job_are_one_cohort() -> None:
    ranks_of = {f"h{number}": tuple(range(number * 8, number * 8 + 8)) for number in range(8)}
    assert cohort(ranks_of, "h3") == ranks_of


FAST, SLOW = Bandwidth(1.2e9, "a probe"), Bandwidth(2e8, "measured")


@pytest.mark.parametrize(
    ("setting", "store", "network", "shares", "reason"),
    [
        ("auto", SLOW, FAST, True, "gets 200 MB/s from the store (measured) and 1200 MB/s from another host (a probe)"),
        ("auto", FAST, SLOW, False, "1200 MB/s from the store (a probe) and 200 MB/s from another host (measured)"),
        ("auto", SLOW, SLOW, False, "each host reads for itself"),
        ("auto", None, FAST, False, "bandwidth of the store could not be measured"),
        ("auto", SLOW, None, False, "bandwidth of the network could not be measured"),
        ("on", FAST, SLOW, True, "broadcast = on"),
        ("on", None, None, True, "broadcast = on"),
        ("off", SLOW, FAST, False, "broadcast = off"),
    ],
)
def test_the_faster_way_is_chosen_and_the_reason_has_both_numbers(
    setting: str, store: Bandwidth | None, network: Bandwidth | None, shares: bool, reason: str
) -> None:
    choice = choose(setting, hosts=4, store=store, network=network)  # type: ignore[arg-type]
    assert choice.shares is shares and reason in choice.reason


# --- parts of a step that is restored in another layout ---


@st.composite
def part_worlds(draw: st.DrawFn) -> tuple[dict[int, Manifest], dict[str, list[ChunkPlace]]]:
    """Shards, and which of their chunks each host wants."""
    contents = draw(st.lists(st.lists(st.integers(0, 12), min_size=1, max_size=30), min_size=1, max_size=4))
    manifests = {rank: shard(rank, content) for rank, content in enumerate(contents)}
    places = [ChunkPlace(rank, chunk) for rank, content in enumerate(contents) for chunk in range(len(content))]
    hosts = draw(st.sets(st.sampled_from("abcde"), min_size=1))
    return manifests, {host: draw(st.lists(st.sampled_from(places), unique=True)) for host in sorted(hosts)}


def parts_of(manifests: dict[int, Manifest], wanted: dict[str, list[ChunkPlace]]) -> dict[str, PartReads]:
    return {host: split_parts(wanted, manifests, host) for host in wanted}


@given(part_worlds())
def test_wanted_bytes_are_read_once_by_a_host_that_wants_them(
    world: tuple[dict[int, Manifest], dict[str, list[ChunkPlace]]],
) -> None:
    manifests, wanted = world
    splits = parts_of(manifests, wanted)
    readers: Counter[tuple[bytes, int]] = Counter()
    takes: Counter[tuple[str, str]] = Counter()  # (from, to)
    for host, reads in splits.items():
        own = [ChunkPlace(rank, chunk) for rank, chunks in reads.own.items() for chunk in chunks]
        passed = [pair for pairs in reads.of_hosts.values() for pair in pairs]
        got = [*own, *(place for place, _ in passed)]
        assert sorted([*got, *(place for place, _ in reads.here)]) == sorted(wanted[host]), "each from one place"
        assert all(list(chunks) == sorted(chunks) for chunks in reads.own.values())
        for place, other in (*passed, *reads.here):
            assert key(manifests[place.rank], place.chunk) == key(manifests[other.rank], other.chunk)
        assert all(other in got for _, other in reads.here), "of what comes from elsewhere"
        for owner, pairs in reads.of_hosts.items():
            takes[owner, host] += len(pairs)
            for _, other in pairs:  # that host agrees that it reads it
                assert owner != host and other.chunk in splits[owner].own[other.rank]
        readers.update(key(manifests[place.rank], place.chunk) for place in own)
    asked = {key(manifests[place.rank], place.chunk) for places in wanted.values() for place in places}
    assert readers.keys() == asked and set(readers.values()) <= {1}
    for host, reads in splits.items():
        assert dict(reads.given) == {to: count for (owner, to), count in takes.items() if owner == host}


@given(st.integers(1, 5), st.integers(1, 200))
def test_hosts_that_want_all_alike_read_as_much_up_to_a_block(hosts: int, chunks: int) -> None:
    """Whichever ranks' shards they take it from."""
    manifests = {rank: shard(rank, list(range(chunks))) for rank in range(hosts)}
    wanted = {f"host{rank}": [ChunkPlace(rank, chunk) for chunk in range(chunks)] for rank in range(hosts)}
    read = [sum(map(len, reads.own.values())) for reads in parts_of(manifests, wanted).values()]
    assert sum(read) == chunks and max(read) - min(read) <= BLOCK_CHUNKS
    assert all(reads.shares == (hosts > 1) for reads in parts_of(manifests, wanted).values())


def test_hosts_that_want_different_bytes_do_not_share() -> None:
    manifests = {0: shard(0, list(range(40)))}
    wanted = {
        host: [ChunkPlace(0, chunk) for chunk in range(first, first + 20)] for host, first in (("a", 0), ("b", 20))
    }
    for host, reads in parts_of(manifests, wanted).items():
        assert not reads.shares and reads.own == {0: tuple(place.chunk for place in wanted[host])}
