"""What the user sees: on a terminal, and in files."""

from __future__ import annotations

import os
import pty
import re

from support.commands.users_machine import User

SHOWS = """
import os, sys, time
print("out of rank", os.environ["RANK"], sys.stdout.isatty(), flush=True)
print("err of rank", os.environ["RANK"], file=sys.stderr, flush=True)
for percent in (0, 50, 100):
    sys.stderr.write(f"\\r{percent:3d}%")
    sys.stderr.flush()
    time.sleep(0.2)
sys.stderr.write("\\n")
"""


def test_redirected_output_is_only_the_scripts(user: User) -> None:
    user.script("train.py", SHOWS)
    user.run("flyball run train.py > out.txt 2> messages.txt")
    out, messages = ((user.work / name).read_bytes().decode() for name in ("out.txt", "messages.txt"))
    assert "out of rank 0 False\n" in out
    assert "\x1b" not in out + messages
    assert "flyball: " not in out
    assert "succeeded" in messages
    assert "\r  0%\r 50%\r100%\n" in out + messages


def test_one_rank_gets_a_terminal(user: User) -> None:
    """As under torchrun: the script finds a terminal, and its progress bar is shown unchanged."""
    user.script("train.py", SHOWS)
    leader, follower = pty.openpty()
    try:
        command = user.start("flyball run train.py", stdout=follower, stderr=follower)
        os.close(follower)
        shown = b""
        while True:
            try:
                part = os.read(leader, 65536)
            except OSError:  # the other end was closed
                break
            if not part:
                break
            shown += part
    finally:
        os.close(leader)
    assert command.wait() == 0, shown
    text = shown.decode()
    assert "out of rank 0 True" in text
    assert re.search(r"\r  0%\r 50%\r100%\r?\n", text)
    assert "succeeded" in text


def test_tee_shows_which_rank_wrote_a_line(user: User) -> None:
    user.script("train.py", SHOWS)
    output = user.run("flyball run --nproc-per-node 2 --tee 3 train.py")
    for rank in (0, 1):
        assert f"[default{rank}]:out of rank {rank}" in output


def test_help_and_error_messages(user: User) -> None:
    assert "examples:" in user.run("flyball run --help").lower()
    output = user.run("flyball run --nproc-per-node 2 trian.py", code=None)
    assert "trian.py" in output
    assert "Next step: " in output
    assert "Traceback" not in output
