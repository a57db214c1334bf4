"""The ranks' output on the terminal of `flyball run`, as under torchrun: live, on terminals, streams separate."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import psutil
import pytest
from support.commands.flyball import FLYBALL
from support.commands.run_folders import environment_of, run_folder
from support.commands.terminal import UserTerminal

TIMEOUT_S = 300.0

# Waits for a file, which the test makes when it has seen what was written before.
WAIT = """
import os, sys, time
def await_file(name):
    deadline = time.monotonic() + 300
    while not os.path.exists(name):
        assert time.monotonic() < deadline, name
        time.sleep(0.01)
"""


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder with a path short enough for sockets; afterwards no process and no shared memory of it may be left."""
    with run_folder() as folder:
        yield folder
        assert list((folder / "shm").iterdir()) == []


def environment(place: Path) -> dict[str, str]:
    return environment_of(place, TERM="xterm-256color", COLORTERM="truecolor")


Opened = Callable[..., UserTerminal]


@pytest.fixture
def terminal(place: Path) -> Iterator[Opened]:
    opened: list[UserTerminal] = []

    def open_one(script: str, *flags: str) -> UserTerminal:
        (place / "t.py").write_text(WAIT + script)
        opened.append(
            UserTerminal([*FLYBALL, "run", "--job", "t", *flags, "t.py"], cwd=place, environ=environment(place))
        )
        return opened[-1]

    yield open_one
    for one in opened:
        one.close()


def find(place: Path, word: str) -> psutil.Process | None:
    """The process with `word` and the test's folder on its command line."""
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or ()
        if any(word in w for w in words) and any(str(place) in w for w in words):
            return process
    return None


ONE_RANK = """
size = os.get_terminal_size()
print("terminal", os.isatty(0), os.isatty(1), os.isatty(2), size.columns, size.lines, os.environ["TERM"])
from rich.console import Console
Console().print("coloured", style="bold green")
print("to stderr", file=sys.stderr)
sys.stdout.write("\\r 10%"); sys.stdout.flush()
await_file("seen-10")
sys.stdout.write("\\r 20%"); sys.stdout.flush()
await_file("seen-20")
while os.get_terminal_size().columns != 77:
    time.sleep(0.01)
print("\\nresized")
name = input("name? ")
print("hello", name)
try:
    input()
except EOFError:
    print("end of input")
"""


def test_one_rank_gets_a_terminal_like_the_users(place: Path, terminal: Opened) -> None:
    user = terminal(ONE_RANK)
    user.until(b"terminal True True True 111 33 xterm-256color\r\n")
    user.until(b"\x1b[1;32mcoloured\x1b[0m")
    user.until(b"to stderr\r\n")
    user.until(b"\r 10%")
    (place / "seen-10").touch()
    user.until(b"\r 20%")
    (place / "seen-20").touch()
    user.resize(40, 77)
    user.until(b"resized")
    user.until(b"name? ")
    user.type(b"bob\r")
    user.until(b"bob\r\nhello bob\r\n")
    user.type(b"\x04")
    user.until(b"end of input")
    assert user.end() == 0
    assert user.shown.count(b"bob") == 2, "typed text is shown once"
    assert b"succeeded; logs: flyball logs t" in user.shown
    assert user.is_echoing(), "the terminal is restored"
    [log] = (place / "s" / "jobs").glob("*/host/logs/t/g*/rank0.log")
    kept = log.read_bytes()
    assert b"\r 10%\r 20%\nresized\n" in kept, "no \\r before \\n in the log"
    assert b"to stderr\n" in kept
    logs = subprocess.run(
        [*FLYBALL, "logs", "t"],
        check=True,
        capture_output=True,
        env=environment(place),
        timeout=TIMEOUT_S,
    )
    assert logs.stdout == kept


def test_ctrl_c_stops_the_job(terminal: Opened) -> None:
    user = terminal("print('begun'); time.sleep(1000)")
    user.until(b"begun")
    user.type(b"\x03")
    assert user.end() == 130
    assert b"job t was stopped" in user.shown
    assert user.is_echoing()


TWO_RANKS = """
from tqdm import tqdm
rank = os.environ["RANK"]
print("terminal", os.isatty(0), os.isatty(1), os.isatty(2), os.get_terminal_size().columns)
for i in tqdm(range(3), desc=f"bar {rank}", mininterval=0, miniters=1):
    await_file(f"go-{i}")
for i in range(300):
    sys.stdout.write(f"<{rank} {i} "); sys.stdout.flush()
    sys.stdout.write(f"{i} {rank}>\\n"); sys.stdout.flush()
"""


def test_several_ranks_get_terminals_and_cut_no_line(place: Path, terminal: Opened) -> None:
    pytest.importorskip("tqdm")
    user = terminal(TWO_RANKS, "--nproc-per-node", "2")
    for i in range(3):
        for rank in (0, 1):
            user.while_waiting_for(lambda i=i, rank=rank: f"| {i}/3 [" in drawn(user.shown, rank), f"bar {rank} at {i}")
        (place / f"go-{i}").touch()
    assert user.end() == 0
    assert user.shown.count(b"terminal False True True 111\r\n") == 2
    lines = user.shown.decode().splitlines()
    for rank in (0, 1):
        assert [line for line in lines if line.startswith(f"<{rank} ")] == [
            f"<{rank} {i} {i} {rank}>" for i in range(300)
        ]
    bars = re.findall(r"bar \d: .*?\]", user.shown.decode())
    assert {len(bar) for bar in bars} <= {110, 111}, "as wide as the terminal"


def drawn(shown: bytes, rank: int) -> str:
    """Everything that a rank's progress bar has shown."""
    return "".join(part for part in shown.decode(errors="replace").split("\r") if part.startswith(f"bar {rank}"))


KILLS = """
print("one"); await_file("go-1")
print("two"); await_file("go-2")
print("three"); print("three to stderr", file=sys.stderr); await_file("go-3")
os.system("echo from a child"); print("four")
"""


def test_training_survives_killed_pumps_and_daemons(place: Path, terminal: Opened) -> None:
    user = terminal(KILLS)
    user.until(b"one\r\n")
    first = find(place, "pump.py")
    assert first
    first.kill()
    user.while_waiting_for(lambda: (p := find(place, "pump.py")) and p.pid != first.pid, "another pump")
    (place / "go-1").touch()
    user.until(b"two\r\n")
    daemon, pump = find(place, "--host-id"), find(place, "pump.py")
    assert daemon
    assert pump
    daemon.send_signal(signal.SIGSTOP)  # so that it does not start another pump
    pump.kill()
    daemon.kill()
    for process in (daemon, pump):  # output is lost while one of them still holds the other end
        user.while_waiting_for(lambda process=process: is_gone(process), f"the end of {process}")
    (place / "go-2").touch()
    user.until(b"three\r\n")
    user.until(b"three to stderr\r\n")
    (place / "go-3").touch()
    user.until(b"from a child\r\n")
    user.until(b"four\r\n")
    assert user.shown.partition(b"four")[0].count(b"one\r\n") == 1, "the first process did all of it"
    assert user.end() == 0  # how a worker ended while its daemon was away is unknown, so it may run again


def is_gone(process: psutil.Process) -> bool:
    """Whether it has closed everything. A zombie whose other threads are still ending has not."""
    try:
        return process.status() == psutil.STATUS_ZOMBIE and len([*Path(f"/proc/{process.pid}/task").iterdir()]) == 1
    except (psutil.NoSuchProcess, FileNotFoundError):
        return True


def run(
    place: Path, script: str, *flags: str, stdin: int | IO[bytes] | None = None
) -> subprocess.CompletedProcess[bytes]:
    (place / "t.py").write_text(WAIT + script)
    return subprocess.run(
        [*FLYBALL, "run", "--job", "t", *flags, "t.py"],
        check=False,
        stdin=stdin,
        capture_output=True,
        timeout=TIMEOUT_S,
        cwd=place,
        env=environment(place),
    )


STREAMS = """
print("terminal", os.isatty(0), os.isatty(1), os.isatty(2))
for i in range(100):
    print("out", i, flush=True); print("err", i, file=sys.stderr)
os.system("echo out of a child; echo err of a child >&2")
raise ValueError("ends here")
"""


def test_stdout_and_stderr_stay_separate(place: Path) -> None:
    done = run(place, STREAMS, "--max-restarts", "0")
    assert done.returncode == 1
    out = [f"out {i}" for i in range(100)]
    assert done.stdout.decode().splitlines() == ["terminal False False False", *out, "out of a child"]
    err = done.stderr.decode().splitlines()
    assert [line for line in err if line.startswith("err ")] == [*(f"err {i}" for i in range(100)), "err of a child"]
    assert "ValueError: ends here" in err
    [log] = (place / "s" / "jobs").glob("*/host/logs/t/g*/rank0.log")
    kept = log.read_text().splitlines()
    assert [line for line in kept if line.startswith("out")] == [*out, "out of a child"]
    assert "ValueError: ends here" in kept, "the log has both"


def test_a_stream_can_be_kept_off_the_terminal(place: Path) -> None:
    done = run(place, "print('out'); print('err', file=sys.stderr)", "-r", "1", "-t", "2")
    assert done.returncode == 0, done.stderr
    assert done.stdout == b""
    assert b"[default0]:err\n" in done.stderr


@contextmanager
def piped(text: bytes) -> Iterator[int]:
    """A closed pipe with the text in it."""
    out, into = os.pipe()
    os.write(into, text)
    os.close(into)
    yield out
    os.close(out)


ASKS = """
print(os.environ["RANK"], "was told", sys.stdin.buffer.raw.read(4).decode().strip())
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    sys.exit(3)
print("then comes", sys.stdin.read().split())
"""


def test_piped_input_is_read_on_after_a_restart(place: Path) -> None:
    with piped(b"yes\nand\nthe rest\n") as stdin:
        done = run(place, ASKS, "--max-restarts", "1", stdin=stdin)
    assert done.returncode == 0, done.stderr
    assert done.stdout == b"0 was told yes\n0 was told and\nthen comes ['the', 'rest']\n"


def test_several_ranks_share_a_pipe_and_each_reads_a_whole_file(place: Path) -> None:
    with piped(b"one\n") as stdin:
        shared = run(place, "print(sys.stdin.read().split())", "--nproc-per-node", "2", stdin=stdin)
    assert sorted(shared.stdout.splitlines()) == [b"['one']", b"[]"], shared.stderr
    (place / "answers").write_bytes(b"one\ntwo\n")
    with (place / "answers").open("rb") as stdin:
        each = run(place, "print(sys.stdin.read().split())", "--nproc-per-node", "2", stdin=stdin)
    assert each.stdout.splitlines() == [b"['one', 'two']"] * 2, each.stderr


def test_training_goes_on_when_nobody_reads(place: Path) -> None:
    (place / "t.py").write_text(WAIT + "print('first'); await_file('gone'); print('more'); open('done', 'w')")
    process = subprocess.Popen(
        [*FLYBALL, "run", "--job", "t", "t.py"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=place,
        env=environment(place),
    )
    assert process.stdout
    assert process.stderr
    assert process.stdout.readline() == b"first\n"
    process.stdout.close()
    (place / "gone").touch()
    err = process.stderr.read()
    process.stderr.close()
    assert process.wait(TIMEOUT_S) == 0, err
    assert err.count(b"nobody reads the output any more; training goes on") == 1
    assert b"Traceback" not in err
    assert (place / "done").exists()
