from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from flyball.cli.logs.interleave import (
    GOES_ON,
    LONG_LINE_QUIET_S,
    MAX_LINE_BYTES,
    QUIET_S,
    Interleaver,
    Lines,
    Piece,
)
from flyball.contracts.on_host.console_request import OUT


def text(pieces: list[Piece]) -> bytes:
    return b"".join(piece.data for piece in pieces)


def test_a_finished_line_is_shown_at_once_and_an_unfinished_one_after_a_pause() -> None:
    lanes = Interleaver()
    lanes.add(0, Piece(OUT, b"\r 10%"), 0.0)
    lanes.add(1, Piece(OUT, b"line\n"), 0.0)
    assert text(lanes.take(0.0)) == b"line\n"
    assert text(lanes.take(QUIET_S)) == b"\r 10%"
    assert lanes.take(9.0) == []


def test_a_rank_that_never_pauses_is_shown_up_to_its_last_line() -> None:
    lanes = Interleaver()
    shown = b""
    for i in range(100):
        lanes.add(0, Piece(OUT, b"%d\nrest" % i), i * QUIET_S / 2)
        shown += text(lanes.take(i * QUIET_S / 2))
    assert len(shown) > 300
    assert shown.endswith(b"\n")


def test_a_long_line_without_pause_is_not_cut() -> None:
    lanes = Interleaver()
    for i in range(9):
        lanes.add(1, Piece(OUT, b"."), i * QUIET_S / 2)
        assert lanes.take(i * QUIET_S / 2) == []
    assert text(lanes.take(6 * QUIET_S)) == b"." * 9


def test_no_line_of_a_burst_is_cut_by_another_rank() -> None:
    lanes = Interleaver()
    burst = {rank: b"%d" % rank * 300 + b"\n" for rank in (0, 1)}
    cut = 256 * 301 + 100  # a read that ends in the middle of a line
    shown = b""
    for now, part in ((0.0, slice(0, cut)), (QUIET_S / 2, slice(cut, None))):
        for rank, line in burst.items():
            lanes.add(rank, Piece(OUT, (line * 400)[part]), now)
        shown += text(lanes.take(now))
    lines = (shown + text(lanes.take(0.1, rest=True))).splitlines(keepends=True)
    assert sorted(lines) == sorted([*burst.values()] * 400)


def test_a_line_stays_whole_up_to_its_bound_and_a_longer_one_is_marked() -> None:
    lanes = Interleaver()
    shown = b""
    for i in range(100):  # it comes in pieces, with pauses
        lanes.add(0, Piece(OUT, b"0" * 10_000 + b"\n" * (i == 99)), i * LONG_LINE_QUIET_S / 2)
        lanes.add(1, Piece(OUT, b"one\n"), i * LONG_LINE_QUIET_S / 2)
        shown += text(lanes.take(i * LONG_LINE_QUIET_S / 2))
    assert b"0" * 1_000_000 + b"\n" in shown
    lanes.add(0, Piece(OUT, b"0" * (MAX_LINE_BYTES + 5)), 0.0)
    assert text(lanes.take(0.0)) == b"0" * MAX_LINE_BYTES + GOES_ON
    lines = Lines(b"> ")
    assert lines.add(b"0" * MAX_LINE_BYTES) == b""
    assert lines.add(b"0") == b"> " + b"0" * (MAX_LINE_BYTES + 1) + GOES_ON


def test_dots_are_shown_while_they_come() -> None:
    lanes = Interleaver()
    shown = b""
    for i in range(100):
        lanes.add(0, Piece(OUT, b"."), i * QUIET_S / 2)
        shown += text(lanes.take(i * QUIET_S / 2))
    assert len(shown) > 70


def test_a_bar_is_not_cut_from_its_carriage_return() -> None:
    lanes = Interleaver()
    shown = []
    for i in range(100):
        lanes.add(0, Piece(OUT, b"\rbar %d" % i), i * QUIET_S / 2)
        shown.append(text(lanes.take(i * QUIET_S / 2)))
    assert sum(map(bool, shown)) > 10
    assert all(part.startswith(b"\rbar") and not part.endswith(b"\r") for part in shown if part)


def test_stacked_progress_bars_are_not_cut() -> None:
    lanes = Interleaver()
    bar = b"\n\r rank 1: 10%\x1b[A"
    for i in range(5):
        lanes.add(1, Piece(OUT, bar[:1]), i * QUIET_S / 2)
        lanes.add(1, Piece(OUT, bar[1:]), i * QUIET_S / 2)
        shown = text(lanes.take(i * QUIET_S / 2))
        assert shown == bar * (shown.count(b"\n"))


@given(st.lists(st.tuples(st.integers(0, 2), st.binary(max_size=6), st.floats(0.0, 0.2)), max_size=30))
def test_output_is_complete_and_in_order(writes: list[tuple[int, bytes, float]]) -> None:
    lanes = Interleaver()
    shown: list[Piece] = []
    now = 0.0
    for rank, data, pause_s in writes:
        now += pause_s
        marked = bytes((rank << 6) | (byte & 0x3F) for byte in data)  # \n and \r of rank 0 stay what they are
        if marked:
            lanes.add(rank, Piece(OUT, marked), now)
        shown += lanes.take(now)
    shown += lanes.take(now, rest=True)
    for rank in range(3):
        wrote = b"".join(bytes((rank << 6) | (b & 0x3F) for b in data) for r, data, _ in writes if r == rank)
        assert bytes(byte for byte in text(shown) if byte >> 6 == rank) == wrote


@given(st.lists(st.sampled_from([b"a", b"\n", b"\r", b"\r\n", b"bc"]), max_size=12))
def test_lines_split_like_pythons_text_files(parts: list[bytes]) -> None:
    lines = Lines(b"> ")
    shown = b"".join(lines.add(part) for part in parts) + lines.rest()
    plain = b"".join(parts).decode().replace("\r\n", "\n").replace("\r", "\n")
    assert shown.decode() == "".join(f"> {line}\n" for line in plain.removesuffix("\n").split("\n")) if plain else True
