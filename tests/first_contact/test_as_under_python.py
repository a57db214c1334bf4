"""What an ordinary script sees and does is what it would be under python: its settings, its command line, its end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest
from support.commands.flyball import FLYBALL, FlyballProcess
from support.commands.own_processes import processes_of
from support.commands.run_folders import environment_of


def run(place: Path, *words: str, code: int = 0, **environ: str) -> FlyballProcess:
    with FlyballProcess(place, "run", "--max-restarts", "0", *words, **environ) as command:
        assert command.end() == code, command.text
    return command


SETTINGS = """
import os
print("begins")
{line}
import torch
print("threads", torch.get_num_threads(), "jit", torch.jit._state._enabled.enabled)
"""


def test_settings_before_the_import_of_torch_work(place: Path) -> None:
    line = "os.environ['OMP_NUM_THREADS'] = '2'; os.environ['PYTORCH_JIT'] = '0'"
    (place / "train.py").write_text(SETTINGS.format(line=line))
    command = run(place, "--nproc-per-node", "2", "train.py")
    assert sorted(command.out.splitlines()) == ["begins"] * 2 + ["threads 2 jit False"] * 2
    assert command.err.count("train.py sets OMP_NUM_THREADS before it imports torch") == 1


def test_settings_that_come_too_late_are_named(place: Path) -> None:
    (place / "train.py").write_text(SETTINGS.format(line="exec(\"os.environ['PYTORCH_JIT'] = '0'\")"))
    command = run(place, "--nproc-per-node", "2", "train.py")
    assert command.err.count("PYTORCH_JIT: set too late") == 1


SEES = "import json, sys; print(json.dumps([sys.orig_argv[1:], sys.argv, sys.flags.safe_path, sys.path[0]]))"


def test_a_script_sees_the_command_line_of_python(place: Path) -> None:
    (place / "train.py").write_text(SEES)
    assert json.loads(run(place, "train.py", "x").out) == [
        ["-u", "train.py", "x"],
        ["train.py", "x"],
        False,
        str(place),
    ]
    safe = json.loads(run(place, "train.py", PYTHONSAFEPATH="1").out)
    assert safe[2] and safe[3] != str(place)
    found = json.loads(run(place, "-m", "train", "x").out)
    assert found == [["-u", "-m", "train", "x"], [str(place / "train.py"), "x"], False, str(place)]


def test_a_folder_with_a_main_is_a_script(place: Path) -> None:
    folder = place / "program"
    folder.mkdir()
    (folder / "part.py").write_text("WORD = 'found'")
    (folder / "__main__.py").write_text("import sys, part; print(part.WORD, __name__, sys.argv)")
    assert run(place, "program", "x").out == "found __main__ ['program', 'x']\n"
    (place / "empty").mkdir()
    assert "is a folder without __main__.py" in run(place, "empty", code=2).err


ENDS = """
import atexit, sys, threading, time
from concurrent.futures import ThreadPoolExecutor
def late(name):
    time.sleep(1.0)
    sys.stdout.write(name + "\\n")  # one write: print makes two, between which another thread may write
threading.Thread(target=late, args=("thread",)).start()
ThreadPoolExecutor(1).submit(late, "pool")
atexit.register(print, "at exit", flush=True)
{end}
"""


@pytest.mark.parametrize("end", ["sys.exit(3)", "raise RuntimeError('x')", "sys.exit(0)"])
def test_threads_and_executors_finish_whatever_the_exit_code(place: Path, end: str) -> None:
    (place / "train.py").write_text(ENDS.format(end=end))
    command = run(place, "train.py", code=0 if end == "sys.exit(0)" else 1)
    lines = command.out.splitlines()
    assert sorted(lines[:2]) == ["pool", "thread"] and lines[2:] == ["at exit"]


NAMED = """
import os, sys, flyball
job = flyball.attach()
state = {"x": 0}
start = job.restore(state)
print(start, *[os.fsencode(text) for text in (*sys.argv[1:], os.environ["BYTES"], os.getcwd())], flush=True)
for step in range(start, start + 5):
    job.step(step)
    job.save(step, state)
sys.exit(3 if start == 0 else 0)
"""


def test_bytes_that_are_not_utf8_are_passed_on_and_resumed(place: Path) -> None:
    latin = place / "d\udce4ten"
    latin.mkdir()
    (latin / "tr\udce4in.py").write_text(NAMED)
    folders = ("--log-dir", str(latin / "log\udce4"), "--local-ckpt-dir", str(latin / "ck\udce4"))
    words = ("--job", "latin", "--max-restarts", "0", *folders, "--local-ckpt-interval", "2", "tr\udce4in.py", "\udce9")
    seen = [b"\xe9", b"\xff", os.fsencode(latin)]
    with FlyballProcess(place, "run", *words, cwd=latin, BYTES="\udcff") as first:
        assert first.end() == 1 and first.out == f"0 {seen[0]} {seen[1]} {seen[2]}\n", first.text
    with FlyballProcess(place, "run", "--resume", "latin", BYTES="\udcff") as second:
        assert second.end() == 0 and second.out == f"5 {seen[0]} {seen[1]} {seen[2]}\n", second.text


def test_a_state_folder_that_is_not_utf8_is_refused_by_name(place: Path) -> None:
    (place / "train.py").write_text("")
    assert "is not valid UTF-8" in run(place, "--state-dir", str(place / "\udce4"), "train.py", code=3).err


@pytest.mark.parametrize("closed", [(0,), (1,), (2,), (0, 1, 2)])
def test_a_closed_stream_is_dev_null(place: Path, closed: tuple[int, ...]) -> None:
    (place / "train.py").write_text("import sys; print('out'); print('err', file=sys.stderr); open('ran', 'w').close()")

    def close() -> None:
        for number in closed:
            os.close(number)

    command = [*FLYBALL, "run", "--max-restarts", "0", "train.py"]
    done = subprocess.run(
        command, cwd=place, env=environment_of(place), preexec_fn=close, capture_output=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert (place / "ran").exists()
    assert (b"out" in done.stdout, b"err" in done.stderr) == (1 not in closed, 2 not in closed)


def test_a_signal_that_was_ignored_at_the_start_stays_ignored(place: Path) -> None:
    (place / "train.py").write_text(
        "import os, time\nprint('begins')\nwhile not os.path.exists('go'): time.sleep(0.05)\nprint('ends')"
    )
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        command = FlyballProcess(place, "run", "train.py")
    finally:
        signal.signal(signal.SIGHUP, before)
    with command:
        command.wait_for(lambda: "begins" in command.out, "the script")
        for process in (command.process, *processes_of(place)):  # as the kernel at the end of a terminal
            if process.pid == command.process.pid or "rank 0" in " ".join(process.cmdline()):
                process.send_signal(signal.SIGHUP)
        (place / "go").touch()
        assert command.end() == 0 and "ends" in command.out, command.text
