from __future__ import annotations

import os
from collections.abc import Callable
from math import inf
from pathlib import Path

import msgspec
import pytest

from flyball.contracts.reports.rank_logs import NEWEST, LogPiece, LogRequest
from flyball.contracts.wire import decode, encode
from host_daemon.link.log_reading import read_piece
from host_daemon.workers.pump import ERR, Channel


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    for generation, text in ((2, "old"), (10, "0123456789")):
        (tmp_path / f"g{generation}").mkdir()
        (tmp_path / f"g{generation}" / "rank3.log").write_text(text)
    return tmp_path


@pytest.mark.parametrize(
    ("offset", "limit", "expected"),
    [(0, 4, (0, b"0123")), (8, 4, (8, b"89")), (-3, 9, (7, b"789")), (-99, 1, (0, b"0")), (50, 4, (50, b""))],
)
def test_a_piece_of_the_newest_generation(logs: Path, offset: int, limit: int, expected: tuple[int, bytes]) -> None:
    piece = read_piece(logs, "h", LogRequest("id", "j", 3, NEWEST, offset, limit))
    assert (piece.offset, piece.data) == expected
    assert (piece.generation, piece.size_bytes, piece.generations) == (10, 10, (2, 10))
    assert read_piece(logs, "h", LogRequest("id", "j", 3, generation=2)).data == b"old"


def test_missing_logs(logs: Path) -> None:
    assert read_piece(logs, "h", LogRequest("id", "j", 4)).generations == ()
    other = read_piece(logs, "h", LogRequest("id", "j", 3, generation=5))
    assert (other.data, other.generations) == (b"", (2, 10))
    assert read_piece(logs / "none", "h", LogRequest("id", "j", 3)).generations == ()


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero"), Path.mkdir])
def test_what_a_script_put_in_place_of_its_log_keeps_no_reader(logs: Path, make: Callable[[Path], None]) -> None:
    (logs / "g10" / "rank3.log").unlink()
    make(logs / "g10" / "rank3.log")
    piece = read_piece(logs, "h", LogRequest("id", "j", 3))
    assert (piece.generation, piece.data, piece.generations) == (10, b"", (2, 10))


def test_a_sparse_log_is_read_up_to_the_limit(logs: Path) -> None:
    os.truncate(logs / "g10" / "rank3.log", 6 << 30)
    piece = read_piece(logs, "h", LogRequest("id", "j", 3, offset=8, limit=4))
    assert (piece.data, piece.size_bytes) == (b"89\0\0", 6 << 30)


def test_a_request_cannot_name_another_file() -> None:
    request = LogRequest("id", "j", 3)
    assert decode(encode(request), LogRequest, max_bytes=1000) == request
    for wrong in ({"job": "../x"}, {"rank": -1}, {"rank": "../0"}, {"generation": -2}, {"limit": 1 << 30}):
        with pytest.raises(msgspec.ValidationError):
            msgspec.convert(msgspec.to_builtins(request) | wrong, LogRequest)


def test_bytes_that_are_not_text_arrive() -> None:
    piece = LogPiece("id", "h", 1, 0, 3, b"\xff\x00\n", (1,))
    assert decode(encode(piece), LogPiece, max_bytes=1000) == piece


def test_a_line_that_comes_in_pieces_is_not_torn_by_another_stream(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `print` writes it without a buffer. What has no end for a while is there all the same."""
    monkeypatch.setattr("host_daemon.workers.pump.HOLD_S", inf)
    log = tmp_path / "rank0.log"
    (out_end, out), (err_end, err) = os.pipe(), os.pipe()
    outs, errs = Channel(out_end, str(log), 1, False), Channel(err_end, str(log), ERR, False)
    for descriptor, channel, piece in (
        *((out, outs, b"whole\nout"), (err, errs, b"err 1\n"), (out, outs, b" "), (out, outs, b"1\n")),
        *((out, outs, b"[=> "), (err, errs, b"err 2\n")),
    ):
        os.write(descriptor, piece)
        assert channel.copy()
    assert log.read_bytes() == b"whole\nerr 1\nout 1\nerr 2\n" and outs.holds() and not errs.holds()
    monkeypatch.setattr("host_daemon.workers.pump.HOLD_S", 0.0)
    assert not outs.holds() and log.read_bytes().endswith(b"[=> ")
    os.write(err, b"ends here")
    assert errs.copy()
    for descriptor, channel in ((out, outs), (err, errs)):
        os.close(descriptor)
        assert not channel.copy()
        os.close(channel.descriptor)
    assert log.read_bytes().endswith(b"[=> ends here")
    assert log.with_suffix(".stderr-ranges").read_text() == "6 6\n18 6\n28 9\n"
