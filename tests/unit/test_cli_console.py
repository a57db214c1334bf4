from __future__ import annotations

import io
from pathlib import Path

from flyball.cli.console import LogFollower
from flyball.launcher import Console


def log(folder: Path, generation: int, rank: int, text: str) -> None:
    file = folder / f"g{generation}" / f"rank{rank}.log"
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("ab") as out:
        out.write(text.encode())


def test_one_rank_is_shown_as_it_is(tmp_path: Path) -> None:
    out = io.StringIO()
    follower = LogFollower(tmp_path, Console(), nproc=1, world_size=1, out=out)
    assert not follower.pump()
    log(tmp_path, 0, 0, "one\ntw")
    assert follower.pump()
    assert out.getvalue() == "one\n"
    log(tmp_path, 0, 0, "o\nthree")
    follower.pump()
    assert out.getvalue() == "one\ntwo\n"
    follower.close()
    assert out.getvalue() == "one\ntwo\nthree\n"


def test_several_ranks_carry_their_rank_in_every_generation(tmp_path: Path) -> None:
    out = io.StringIO()
    follower = LogFollower(tmp_path, Console(), nproc=2, world_size=4, out=out)
    log(tmp_path, 0, 2, "a\n")
    log(tmp_path, 0, 3, "b\n")
    follower.pump()
    log(tmp_path, 1, 2, "c \u00fc\n")
    follower.close()
    assert out.getvalue().splitlines() == ["[rank2]: a", "[rank3]: b", "[rank2]: c \u00fc"]


def test_hidden_and_filtered_ranks_count_by_local_rank(tmp_path: Path) -> None:
    out = io.StringIO()
    console = Console(only=(0, 1), hidden=(1,), prefix=True)
    follower = LogFollower(tmp_path, console, nproc=3, world_size=6, out=out)
    for rank in (3, 4, 5):
        log(tmp_path, 0, rank, f"{rank}\n")
    follower.close()
    assert out.getvalue() == "[rank3]: 3\n"


def test_bytes_that_are_no_text_and_lines_without_an_end(tmp_path: Path) -> None:
    out = io.StringIO()
    follower = LogFollower(tmp_path, Console(), nproc=1, world_size=1, out=out)
    (tmp_path / "g0").mkdir()
    (tmp_path / "g0" / "rank0.log").write_bytes(b"\xff\n" + b"x" * 700_000)
    follower.pump()
    assert out.getvalue().startswith("\ufffd\n")
    follower.close()
    assert out.getvalue().count("x") == 700_000
