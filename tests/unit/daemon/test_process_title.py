"""Titles of processes: their own words can be read back, whatever they contain."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from flyball.process_title import TITLE_ROOM, words_of

SHOW = """
import json, os, subprocess, sys
from pathlib import Path
from flyball.process_title import set_title, words_of
set_title(sys.argv[1], json.loads(sys.argv[2]))
proc = Path("/proc/self")
print(json.dumps({
    "words": words_of((proc / "cmdline").read_bytes()),
    "comm": (proc / "comm").read_text().strip(),
    "environ": (proc / "environ").read_bytes().decode(),
    "ps": subprocess.run(["ps", "-ww", "-o", "args=", str(os.getpid())], capture_output=True, text=True).stdout,
    "getenv": os.environ["MARK"],
    "child": subprocess.run(["printenv", "MARK", "SPT_NOENV"], capture_output=True, text=True).stdout,
}))
"""


def show(label: str, words: list[str], room: str) -> dict[str, object]:
    done = subprocess.run(
        [sys.executable, "-c", SHOW, label, json.dumps(words), room],
        capture_output=True,
        text=True,
        check=True,
        env={"PATH": "/usr/bin:/bin", "MARK": "kept"},
    )
    found: dict[str, object] = json.loads(done.stdout)
    return found


@pytest.mark.processes
def test_a_title_has_the_label_and_the_words_as_they_were() -> None:
    words = ["python", "/a folder/train.py", "--name", "größe", "", "a'b"]
    shown = show("gpt rank 3 gen 2", words, TITLE_ROOM)
    assert shown["words"] == ["flyball:", "gpt", "rank", "3", "gen", "2:", *words]
    assert str(shown["ps"]).startswith("flyball: gpt rank 3 gen 2: python '/a folder/train.py' --name")
    assert shown["comm"] == Path(sys.executable).name, "ps -C python finds a worker, as under torchrun"
    assert shown["getenv"] == "kept"
    assert shown["child"] == "kept\n", "and nothing of how it was done"
    assert "MARK=kept" in str(shown["environ"])


@pytest.mark.processes
def test_a_title_without_room_is_cut_and_leaves_the_environment_alone() -> None:
    shown = show("gpt rank 3 gen 2", ["word"] * 1000, "")
    assert str(shown["ps"]).startswith("flyball: gpt rank 3 gen 2: word word")
    assert "MARK=kept" in str(shown["environ"])


def test_an_ordinary_command_line_and_a_title_that_was_cut() -> None:
    assert words_of(b"python\0-m\0x y\0") == ["python", "-m", "x y"]
    assert words_of(b"flyball: spawner: python 'a b\0\0\0") == ["flyball:", "spawner:", "python", "'a", "b"]
    assert words_of(b"") == [""]
