"""The pure parts of RDMA: messages, windows, time limits, and what failed work completions mean."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_engine.peers.transport.rdma import completion_errors
from ckpt_engine.peers.transport.rdma.completion_errors import (
    AccessRefused,
    Flushed,
    QueuePairError,
    RetryExceeded,
    completion_error,
)
from ckpt_engine.peers.transport.rdma.messages import (
    MAX_COUNT,
    MAX_SEGMENTS,
    Kind,
    Patience,
    Segment,
    WriteWindows,
    pack_immediate,
    pack_segments,
    split_segments,
    unpack_immediate,
    unpack_segments,
)
from flyball.contracts.errors import InvalidMessage, Unreachable

SIZES = st.integers(1, 1000)


# --- messages ---


@given(st.sampled_from(Kind), st.integers(0, MAX_COUNT))
def test_kind_and_count_travel_in_32_bits(kind: Kind, count: int) -> None:
    bits = pack_immediate(kind, count)
    assert bits < 1 << 32
    assert unpack_immediate(bits) == (kind, count)


@pytest.mark.parametrize("count", [-1, MAX_COUNT + 1])
def test_a_count_that_does_not_fit_is_not_sent(count: int) -> None:
    with pytest.raises(ValueError, match="fit"):
        pack_immediate(Kind.PLACED, count)


@pytest.mark.parametrize("bits", [0, 15 << 28, 7 << 28])
def test_an_unknown_kind_is_invalid(bits: int) -> None:
    with pytest.raises(InvalidMessage, match="unknown kind"):
        unpack_immediate(bits)


@given(st.lists(st.builds(Segment, st.integers(0, 1 << 62), SIZES, st.integers(0, (1 << 32) - 1)), min_size=1))
def test_segments_arrive_in_order_however_many_messages_they_need(segments: list[Segment]) -> None:
    payloads = list(split_segments(segments, 100))
    assert all(len(payload) <= 100 for payload in payloads)
    assert [segment for payload in payloads for segment in unpack_segments(payload)] == segments


@pytest.mark.parametrize(
    "payload",
    [b"", b"x" * 19, b"x" * 21, pack_segments([Segment(1, 0, 1)]), pack_segments([Segment((1 << 64) - 1, 2, 1)])],
)
def test_segments_that_cannot_be_are_invalid(payload: bytes) -> None:
    with pytest.raises(InvalidMessage):
        unpack_segments(payload)


# --- windows ---


@given(st.lists(SIZES, max_size=10), st.lists(st.integers(0, 2000), max_size=20), st.integers(1, 300))
def test_each_announced_byte_is_used_once_and_in_order(sizes: list[int], takes: list[int], most_bytes: int) -> None:
    windows, segments = WriteWindows(), []
    for index, size_bytes in enumerate(sizes):
        segments.append(Segment(index * 10_000, size_bytes, index))
    windows.announce(segments)
    announced = [(s.key, s.address + at) for s in segments for at in range(s.size_bytes)]
    taken: list[tuple[int, int]] = []
    for size_bytes in takes:
        pieces = windows.take(size_bytes, most_bytes=most_bytes)
        assert sum(piece.size_bytes for piece in pieces) == min(size_bytes, len(announced) - len(taken))
        assert all(0 < piece.size_bytes <= most_bytes for piece in pieces)
        taken += [(piece.key, piece.address + at) for piece in pieces for at in range(piece.size_bytes)]
    assert taken == announced[: len(taken)]


def test_windows_without_end_are_refused() -> None:
    windows = WriteWindows()
    windows.announce([Segment(1, 1, 1)] * MAX_SEGMENTS)
    with pytest.raises(InvalidMessage, match="more than"):
        windows.announce([Segment(1, 1, 1)])


# --- time limits ---


def test_a_deadline_stays_whatever_moves() -> None:
    patience = Patience(100.0, 5.0)
    patience.moved(1 << 30, 104.0)
    assert patience.due_s == 105.0


def test_bytes_that_advance_enough_extend_the_time_and_a_trickle_does_not() -> None:
    patience = Patience(100.0, 5.0, progress_bytes=100)
    patience.moved(99, 104.0)
    assert patience.due_s == 105.0
    patience.moved(1, 104.5)
    assert patience.due_s == 109.5
    patience.moved(99, 109.0)
    assert patience.due_s == 109.5


# --- work completions ---


@pytest.mark.parametrize(
    ("status", "kind", "said"),
    [(12, RetryExceeded, "timed out"), (10, AccessRefused, "revoked"), (5, Flushed, "ended")],
)
def test_a_failed_work_completion_is_a_named_error_with_a_next_step(
    status: int, kind: type[QueuePairError], said: str
) -> None:
    error = completion_error(status, 0x12)
    assert type(error) is kind
    assert isinstance(error, Unreachable)
    assert said in error.message and f"status {status}" in error.message and "0x12" in error.message
    assert error.hint


def test_a_status_that_nobody_knows_is_an_error_of_the_queue_pair() -> None:
    assert type(completion_error(99)) is QueuePairError


def test_each_error_of_a_queue_pair_has_its_own_code() -> None:
    kinds = [
        kind for kind in vars(completion_errors).values() if isinstance(kind, type) and issubclass(kind, QueuePairError)
    ]
    assert len({kind.code for kind in kinds}) == len(kinds) > 5
