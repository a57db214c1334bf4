"""Chunks, as runs, come back as the same chunks and bytes; what no shard has is refused before it takes memory."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_engine.contracts.wanted_chunks import decode_wanted, encode_wanted
from ckpt_engine.format.chunk_runs import MAX_RUNS, byte_ranges, chunk_range, chunks_of, in_requests, runs_of
from ckpt_engine.format.manifest import MANIFEST_VERSION, Manifest
from flyball.contracts.errors import InvalidMessage


def shard(payload_bytes: int, chunk_bytes: int = 10) -> Manifest:
    return Manifest(MANIFEST_VERSION, "t", "job", 1, 2, 0, 1, payload_bytes, chunk_bytes, b"")


some_chunks = st.sets(st.integers(0, 4999), max_size=3000).map(sorted)


@given(some_chunks, st.integers(49_991, 50_000))
def test_chunks_come_back_with_their_bytes(chunks: list[int], payload_bytes: int) -> None:
    manifest = shard(payload_bytes)
    runs = runs_of(chunks)
    assert chunks_of(runs, manifest) == chunks
    assert all(first + count < later for (first, count), (later, _) in pairwise(runs)), "merged"
    covered = [byte for offset, size in byte_ranges(runs, manifest) for byte in range(offset, offset + size, 10)]
    assert covered == [chunk * 10 for chunk in chunks]
    sizes = sum(size for _, size in byte_ranges(runs, manifest))
    assert sizes == sum(chunk_range(chunk, manifest)[1] for chunk in chunks)
    requests = list(in_requests(chunks))
    assert [run for request in requests for run in request] == runs
    assert all(0 < len(request) <= MAX_RUNS for request in requests)


@given(st.dictionaries(st.integers(0, 99), some_chunks, max_size=4))
def test_what_a_trainer_wants_comes_back(wanted: dict[int, list[int]]) -> None:
    found = decode_wanted(encode_wanted(wanted))
    assert {one.rank: chunks_of(one.runs, shard(50_000)) for one in found.shards} == wanted


@pytest.mark.parametrize("runs", [[(5, 1)], [(0, 6)], [(0, 1 << 31)], [(1, 1), (0, 1)], [(0, 2), (1, 1)], [(0, 0)]])
def test_what_no_shard_has_is_refused(runs: list[tuple[int, int]]) -> None:
    with pytest.raises(ValueError, match=r"[Cc]hunk"):
        chunks_of(runs, shard(50))
    with pytest.raises(ValueError, match=r"[Cc]hunk"):
        byte_ranges(runs, shard(50))


@pytest.mark.parametrize(
    "data", [b"", b"[]", b"{}", b'{"shards":[{"rank":-1,"runs":[]}]}', b'{"shards":[{"rank":0,"runs":[[0]]}]}']
)
def test_what_is_no_wish_is_refused(data: bytes) -> None:
    with pytest.raises(InvalidMessage):
        decode_wanted(data)
