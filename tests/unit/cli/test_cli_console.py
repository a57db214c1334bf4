from __future__ import annotations

import io
import os
import threading
import time
from pathlib import Path

import pytest

from flyball.cli.logs.console import LogFollower, StderrRanges
from flyball.cli.logs.interleave import Piece
from flyball.cli.show.messages import announce, announce_within
from flyball.contracts.on_host.console_request import ERR, OUT
from flyball.launch.output_flags import Console

TIMEOUT_S = 60.0


def log(folder: Path, generation: int, rank: int, text: str | bytes) -> Path:
    file = folder / f"g{generation}" / f"rank{rank}.log"
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("ab") as out:
        out.write(text.encode() if isinstance(text, str) else text)
    return file


def log_stderr(folder: Path, text: bytes) -> None:
    """Writes like the daemon's pump: first the range, then the bytes."""
    file = log(folder, 0, 0, b"")
    with file.with_suffix(".stderr-ranges").open("ab") as ranges:
        ranges.write(b"%d %d\n" % (file.stat().st_size, len(text)))
    log(folder, 0, 0, text)


class Shown:
    """A follower and its output."""

    def __init__(self, folder: Path, console: Console | None = None, nproc: int = 1) -> None:
        self.out, self.err = io.BytesIO(), io.BytesIO()
        self.follower = LogFollower(folder, console or Console(), nproc=nproc, out=self.out, err=self.err)

    def until(self, text: bytes) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while not self.out.getvalue().endswith(text):
            assert time.monotonic() < deadline, self.out.getvalue()
            self.follower.pump()


def test_one_rank_is_shown_byte_by_byte(tmp_path: Path) -> None:
    shown = Shown(tmp_path)
    assert not shown.follower.pump()
    for piece in (b"one\ntw", b"o\r 10%\x1b[32m", b"\r 20%", b"\xff\n" + b"x" * 700_000):
        log(tmp_path, 0, 0, piece)
        shown.until(piece)
    shown.follower.close()
    assert shown.out.getvalue() == (tmp_path / "g0" / "rank0.log").read_bytes()
    assert shown.err.getvalue() == b""


def test_ranks_do_not_cut_each_others_lines(tmp_path: Path) -> None:
    shown = Shown(tmp_path, nproc=2)
    log(tmp_path, 0, 2, "a: be")
    log(tmp_path, 0, 3, "b: whole\n")
    shown.follower.pump()
    assert shown.out.getvalue() == b"b: whole\n"
    log(tmp_path, 0, 2, "gin\n")
    shown.until(b"a: begin\n")
    log(tmp_path, 1, 2, "new generation\n")
    log(tmp_path, 1, 3, "(Pdb) ")
    shown.until(b"(Pdb) ")  # shown after a short pause
    shown.follower.close()
    assert shown.out.getvalue() == b"b: whole\na: begin\nnew generation\n(Pdb) "


def test_tee_works_as_in_torchrun(tmp_path: Path) -> None:
    console = Console(only=(0, 1), redirects={1: 3}, tee={0: 3})
    shown = Shown(tmp_path, console, nproc=3)
    for rank in (3, 4, 5):
        log(tmp_path, 0, rank, f"{rank}\n 1%\r 2%\r\nend")
    shown.follower.pump()
    shown.follower.close()
    assert shown.out.getvalue() == b"[default0]:3\n[default0]: 1%\n[default0]: 2%\n[default0]:end\n"


def test_stderr_goes_to_stderr(tmp_path: Path) -> None:
    shown = Shown(tmp_path)
    log(tmp_path, 0, 0, "out 1\n")
    log_stderr(tmp_path, b"err 1\n")
    log_stderr(tmp_path, b"err 2\n")
    log(tmp_path, 0, 0, "out 2\n")
    shown.follower.pump()
    log_stderr(tmp_path, b"err 3\n")
    shown.follower.close()
    assert shown.out.getvalue() == b"out 1\nout 2\n"
    assert shown.err.getvalue() == b"err 1\nerr 2\nerr 3\n"


def test_a_redirected_stream_is_only_in_the_log(tmp_path: Path) -> None:
    shown = Shown(tmp_path, Console(redirects={-1: 1}))
    log(tmp_path, 0, 0, "out\n")
    log_stderr(tmp_path, b"err\n")
    shown.follower.close()
    assert (shown.out.getvalue(), shown.err.getvalue()) == (b"", b"err\n")


def test_a_reader_that_goes_away_is_announced_once_and_not_an_error(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    printed = threading.Event()
    with os.fdopen(writer, "wb") as out:
        follower = LogFollower(tmp_path, Console(), out=out, err=io.BytesIO(), on_broken_pipe=printed.set)
        log(tmp_path, 0, 0, "one\n")
        follower.pump()
        assert printed.is_set()
        printed.clear()
        log(tmp_path, 0, 0, "two\n")
        follower.close()
        assert not printed.is_set()


def test_messages_begin_on_a_new_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    del capfd  # keeps messages off the terminal
    main, terminal = os.openpty()
    with os.fdopen(terminal, "wb", buffering=0) as out:
        follower = LogFollower(tmp_path, Console(), out=out, err=out)
        log(tmp_path, 0, 0, "\r 10%")
        follower.pump()
        with announce_within(follower.own_line):
            announce("a decision")
        follower.close()
    shown = b""
    while not shown.endswith(b"\n"):  # a terminal may deliver output in pieces
        shown += os.read(main, 100)  # OSError at the end: every writer has closed
    os.close(main)
    assert shown == b"\r 10%\r\n"


def test_ranges_are_read_to_their_end_and_what_is_no_range_has_one(tmp_path: Path) -> None:
    file = log(tmp_path, 0, 0, "x")
    ranges = file.with_suffix(".stderr-ranges")
    # As many single bytes as a piece of the log can have: more than one read of the log's size would take in.
    ranges.write_bytes(b"".join(b"%d 1\n" % (10**12 + 2 * number) for number in range(100_000)))
    split = StderrRanges(file)
    assert split.split(10**12 + 199_998, b"e") == [Piece(ERR, b"e")]
    with ranges.open("ab") as more:
        more.write(b"9" * 10_000 + b" 1\n" + b"7" * 200)
    assert split.split(10**13, b"o") == [Piece(OUT, b"o")]
    assert len(split._held) < 200
    split.close()
