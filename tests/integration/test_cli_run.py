"""`flyball run` as a user meets it: real scripts, real processes, nothing left behind."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

TIMEOUT_S = 300.0


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder for scripts and state, with a path short enough for sockets; afterwards no process and no shared memory
    of it may be left."""
    with tempfile.TemporaryDirectory(prefix="fb-") as name:
        folder = Path(name)
        (folder / "shm").mkdir()
        yield folder
        assert processes_of(folder) == []
        assert list((folder / "shm").iterdir()) == []


def processes_of(folder: Path) -> list[psutil.Process]:
    return [p for p in psutil.process_iter(["cmdline"]) if any(str(folder) in a for a in p.info["cmdline"] or ())]


def environment(place: Path, **more: str) -> dict[str, str]:
    base = {k: v for k, v in os.environ.items() if not k.startswith(("FLYBALL_", "PET_", "TORCHELASTIC_", "OMP_"))}
    return base | {"FLYBALL_STATE_DIR": str(place / "s"), "FLYBALL_SHM_DIR": str(place / "shm")} | more


def run(place: Path, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "flyball.cli.main", "run", *arguments],
        check=False,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        cwd=place,
        env=environment(place, **environ),
    )


def script(place: Path, text: str, name: str = "train.py") -> str:
    (place / name).write_text(text)
    return name


def wait_for(condition: Callable[[], object], what: str, timeout_s: float = TIMEOUT_S) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen"
        time.sleep(0.02)


VARIABLES = """
import json, os, sys
names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK",
         "ROLE_WORLD_SIZE", "ROLE_NAME", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS", "OMP_NUM_THREADS",
         "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE"]
found = {n: os.environ.get(n) for n in names}
found["argv"], found["main"], found["path0"] = sys.argv[1:], __name__, sys.path[0]
with open(f"{os.environ['OUT']}.{os.environ['RANK']}", "w") as f:
    json.dump(found, f)
"""


def test_a_plain_script_has_torchruns_environment(place: Path) -> None:
    name = script(place, VARIABLES)
    ours = run(place, "--nproc-per-node", "2", "--max-restarts", "1", name, "--lr", "3e-4", OUT=str(place / "ours"))
    assert ours.returncode == 0, ours.stderr
    theirs = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", "2", "--max-restarts", "1", name, "--lr", "3e-4"),
        ],
        check=False,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        cwd=place,
        env=environment(place, OUT=str(place / "theirs")),
    )
    assert theirs.returncode == 0, theirs.stderr
    for rank in (0, 1):
        a, b = (json.loads((place / f"{who}.{rank}").read_text()) for who in ("ours", "theirs"))
        for free in ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE"):
            assert a.pop(free)
            assert b.pop(free)
        assert a == b


def test_output_is_shown_as_it_is_and_kept(place: Path) -> None:
    done = run(place, "--job", "hello", script(place, "import sys\nprint('out')\nprint('err', file=sys.stderr)\n"))
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["err", "out"]
    assert "job hello succeeded" in done.stderr
    logs = list((place / "s" / "jobs").glob("hello-*/host/logs/hello/g*/rank0.log"))
    assert len(logs) == 1
    assert str(logs[0].parents[1]) in done.stderr
    assert sorted(logs[0].read_text().splitlines()) == ["err", "out"]


def test_json_keeps_stdout_for_the_result(place: Path) -> None:
    done = run(place, "-o", "json", script(place, "print('hi')\n"))
    job = json.loads(done.stdout)
    assert (job["state"], done.returncode) == ("succeeded", 0)
    assert "hi" in done.stderr


def test_a_module_and_packages_of_our_names_beside_it(place: Path) -> None:
    for package in ("services", "goodput", "simulator"):
        (place / package).mkdir()
        (place / package / "__init__.py").write_text(f"name = 'mine: {package}'\n")
    (place / "pkg").mkdir()
    (place / "pkg" / "__init__.py").write_text("")
    (place / "pkg" / "train.py").write_text("import services, goodput\nprint(services.name, goodput.name)\n")
    done = run(place, "-m", "pkg.train", PYTHONPATH=str(place))
    assert done.returncode == 0, done.stderr
    assert done.stdout == "mine: services mine: goodput\n"


def test_a_failing_script_fails_the_job_with_its_message(place: Path) -> None:
    done = run(place, "--max-restarts", "1", script(place, "raise ValueError('no such layer')\n"))
    assert done.returncode == 1
    assert "no such layer" in done.stderr
    assert "Next step: " in done.stderr
    assert "Traceback" not in done.stderr
    assert "ValueError: no such layer" in done.stdout, "the script's own traceback is its output"


COUNTED = """
import os, sys, pathlib
tries = pathlib.Path(os.environ["OUT"])
tries.open("a").write(os.environ["TORCHELASTIC_RESTART_COUNT"] + "\\n")
count = len(tries.read_text().splitlines())
sys.exit(0 if count > int(os.environ["GOOD_AFTER"]) else 10 + count)
"""


def test_restarts_are_counted_and_limited(place: Path) -> None:
    name = script(place, COUNTED)
    done = run(place, "--max-restarts", "2", name, OUT=str(place / "a"), GOOD_AFTER="2")
    assert done.returncode == 0, done.stderr
    assert (place / "a").read_text().split() == ["0", "1", "2"]
    assert "succeeded after 2 restarts" in done.stderr
    done = run(place, "--max-restarts", "1", name, OUT=str(place / "b"), GOOD_AFTER="9")
    assert done.returncode == 1
    assert (place / "b").read_text().split() == ["0", "1"]


SLEEPER = """
import os, pathlib, signal, sys, time
if os.environ.get("ON_TERM"):
    signal.signal(signal.SIGTERM, lambda *_: (print("saved", flush=True), sys.exit(0)))
pathlib.Path(os.environ["OUT"] + "." + os.environ["RANK"]).write_text(str(os.getpid()))
while True:
    time.sleep(0.1)  # signal.pause() would sleep on if the signal came just before it
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_stops_the_job_in_order(place: Path, number: signal.Signals) -> None:
    out = place / "pid"
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "flyball.cli.main", "run", "--nproc-per-node", "2"),
            *(
                "--shutdown-timeout",
                "120",
                script(place, SLEEPER),
            ),  # workers may be held up: they are to end by SIGTERM
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=place,
        env=environment(place, OUT=str(out), ON_TERM="1"),
    )
    try:
        wait_for(lambda: all((place / f"pid.{r}").exists() for r in (0, 1)), "the start of both ranks")
        process.send_signal(number)
        stdout, stderr = process.communicate(timeout=TIMEOUT_S)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    assert process.returncode == 128 + number, stderr
    assert stdout.count("saved") == 2, "workers were told by SIGTERM"
    assert "was stopped" in stderr


def test_a_killed_run_leaves_nothing_behind(place: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "flyball.cli.main", "run", script(place, SLEEPER)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd=place,
        env=environment(place, OUT=str(place / "pid")),
    )
    try:
        wait_for(lambda: (place / "pid.0").exists() and (place / "pid.0").read_text(), "the start of the worker")
        worker = psutil.Process(int((place / "pid.0").read_text()))
    finally:
        process.kill()
        process.wait()
    wait_for(lambda: not worker.is_running(), "the end of the worker")
    wait_for(lambda: not processes_of(place), "the end of daemon and engine")
    assert list((place / "shm").iterdir()) != [], "nobody was left to remove the beacon"
    assert run(place, script(place, "print('next')\n", "next.py")).returncode == 0  # the next run does


def test_a_port_in_use_and_a_folder_of_another_version(place: Path) -> None:
    up = [sys.executable, "-m", "flyball.cli.main", "up", "--state-dir", str(place / "sup")]
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        done = subprocess.run(
            [*up, "--port", port],
            check=False,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            env=environment(place),
        )
    assert (done.returncode, "Traceback" in done.stderr) == (4, False), done.stderr
    assert port in done.stderr
    (place / "old").mkdir()
    (place / "old" / "supervisor").mkdir()
    (place / "old" / "supervisor" / "VERSION").write_text("0\n")
    done = run(place, "--state-dir", str(place / "old"), script(place, "print(1)"))
    assert (done.returncode, "Traceback" in done.stderr) == (5, False), done.stderr
