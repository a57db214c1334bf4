"""`flyball run` as a user meets it: real scripts, real processes, nothing left behind."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from support.clocks.waits import until
from support.commands.flyball import FlyballProcess, run_flyball
from support.commands.here import run_here
from support.commands.own_processes import processes_of
from support.commands.run_folders import environment_of, run_folder

TIMEOUT_S = 300.0


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder for scripts and state, with a path short enough for sockets; afterwards no process and no shared memory
    of it may be left."""
    with run_folder() as folder:
        yield folder
        assert list((folder / "shm").iterdir()) == []


def run(place: Path, *words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return run_flyball(place, "run", *words, **environ)


def script(place: Path, text: str, name: str = "train.py") -> str:
    (place / name).write_text(text)
    return name


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


def test_a_plain_script_gets_torchruns_environment(place: Path) -> None:
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
        env=environment_of(place, OUT=str(place / "theirs")),
    )
    assert theirs.returncode == 0, theirs.stderr
    for rank in (0, 1):
        a, b = (json.loads((place / f"{who}.{rank}").read_text()) for who in ("ours", "theirs"))
        for free in ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE"):
            assert a.pop(free)
            assert b.pop(free)
        assert a == b
    assert not list(place.rglob("commands.reserve")), "a run that ended gives its room back"


def test_json_keeps_stdout_for_the_result_and_a_module_has_packages_of_our_names_beside_it(place: Path) -> None:
    for package in ("services", "goodput", "simulator"):
        (place / package).mkdir()
        (place / package / "__init__.py").write_text(f"name = 'mine: {package}'\n")
    (place / "pkg").mkdir()
    (place / "pkg" / "__init__.py").write_text("")
    (place / "pkg" / "train.py").write_text("import services, goodput\nprint(services.name, goodput.name)\n")
    done = run(place, "-o", "json", "-m", "pkg.train", PYTHONPATH=str(place))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["state"] == "succeeded"
    assert "mine: services mine: goodput\n" in done.stderr


FAILS = """
import os
open("tries", "a").write(os.environ["TORCHELASTIC_RESTART_COUNT"])
raise ValueError("no such layer")
"""


def test_a_failing_script_is_restarted_up_to_the_limit_and_fails_the_job_with_its_message(place: Path) -> None:
    done = run(place, "--max-restarts", "1", script(place, FAILS))
    assert done.returncode == 1
    assert (place / "tries").read_text() == "01"
    assert "no such layer" in done.stderr
    assert "Next step: " in done.stderr
    ours = done.stderr.partition("error: ")[2]
    assert "no such layer" in ours
    assert "Traceback" not in ours, "only the script itself prints a traceback"


def test_ps_shows_job_and_rank_of_every_process(place: Path) -> None:
    name = script(
        place,
        """
import os, subprocess, torch.distributed as dist
dist.init_process_group("gloo")
if dist.get_rank() == 0:
    listed = subprocess.run(["ps", "-eww", "-o", "pid=,comm=,args="], capture_output=True, text=True).stdout
    print("\\n".join(l for l in listed.splitlines() if "flyball: " in l))
    found = subprocess.run(["pgrep", "-f", f"rank 0 gen 1: python {__file__.rpartition('/')[2]} --steps 7"],
                           capture_output=True, text=True).stdout.split()
    print("pgrep finds it:", str(os.getpid()) in found)
dist.barrier()
""",
    )
    done = run(place, "--nproc-per-node", "2", "--job", "gpt", "--host-id", "node-7", name, "--steps", "7")
    assert done.returncode == 0, done.stderr
    python = Path(sys.executable).name
    for title in (
        f"{python} *flyball: gpt rank 0 gen 1: python train.py --steps 7$",
        f"{python} *flyball: gpt rank 1 gen 1: python train.py --steps 7$",
        r"flyball: gpt rendezvous store: \S+:\d+$",
        r"flyball: spawner: host_daemon.spawning.spawner --state-dir ",
        r"flyball: host daemon node-7: host_daemon --state-dir ",
        r"flyball: checkpoint engine node-7: ckpt_engine.host.server --state-dir ",
    ):
        assert re.search(title, done.stdout, re.MULTILINE), (title, done.stdout)
    assert "pgrep finds it: True" in done.stdout


PROGRAM = r"""#!/bin/sh
TRY="try $TORCHELASTIC_RESTART_COUNT"
echo "rank $RANK of $WORLD_SIZE says [$1] [$2] on $LOCAL_RANK, device $CUDA_VISIBLE_DEVICES, $TRY"
echo "ps: $(ps -ww -o args= $$)"
grep -q '^SigIgn:.*0000$' /proc/self/status && echo nothing is ignored
case "$1-$TORCHELASTIC_RESTART_COUNT" in
  fails-0) exit 7 ;;
  fails-1) kill -USR1 $$ ;;
esac
"""


def program(place: Path, text: str) -> str:
    (place / "train.sh").write_text(text)
    (place / "train.sh").chmod(0o755)
    return "./train.sh"


def test_a_program_is_a_rank_like_any_other_and_its_exit_code_and_signal_are_reported(place: Path) -> None:
    flags = ["--job", "j", "--nproc-per-node", "2", "--max-restarts", "2", "--virtual-local-rank", "--no-python"]
    done = run(place, *flags, program(place, PROGRAM), "fails", "a b", CUDA_VISIBLE_DEVICES="5,3")
    assert done.returncode == 0, done.stderr
    assert "rank 0 of 2 says [fails] [a b] on 0, device 5, try 2" in done.stdout
    assert "rank 1 of 2 says [fails] [a b] on 0, device 3, try 2" in done.stdout
    assert "ps: /bin/sh ./train.sh fails a b" in done.stdout
    assert done.stdout.count("nothing is ignored") >= 2  # the first of a try to fail may end the other
    assert re.search(r"exit code 7.*SIGUSR1.*job j succeeded after 2 restarts", done.stderr, re.DOTALL), done.stderr


def test_a_program_that_cannot_be_run(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    (place / "train.sh").write_text("true\n")
    for name, expected in (
        ("./train.sh", "not executable"),
        ("./none.sh", "does not exist"),
        ("train.sh", "the file in .*, write ./train.sh"),
    ):
        done = run_here("run", "--no-python", name, environment=environment_of(place))
        assert done.returncode == 2
        assert re.search(expected, done.stderr), done.stderr
        assert "job " not in done.stderr, "the error comes before anything starts"
    done = run(place, "--max-restarts", "0", "--no-python", program(place, "true\n"))
    assert done.returncode == 1
    assert "needs a first line such as #!/bin/sh" in done.stdout + done.stderr


SLEEPER = """
import os, pathlib, signal, sys, time
if os.environ.get("ON_TERM"):
    signal.signal(signal.SIGTERM, lambda *_: (print("saved", flush=True), sys.exit(0)))
pathlib.Path(os.environ["OUT"] + "." + os.environ["RANK"]).write_text(str(os.getpid()))
while True:
    time.sleep(0.1)  # signal.pause() would miss a signal that arrives just before it
"""


@pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=pytest.mark.proof), signal.SIGTERM])
def test_a_signal_stops_the_job_in_order(place: Path, number: signal.Signals) -> None:
    """Without a terminal. Ctrl-C on one: tests/integration/test_cli_terminal.py."""
    out = place / "pid"
    # generous, because workers must end by SIGTERM even if slow
    words = ("--nproc-per-node", "2", "--shutdown-timeout", "120", script(place, SLEEPER))
    with FlyballProcess(place, "run", *words, OUT=str(out), ON_TERM="1") as stopped:
        stopped.wait_for(lambda: all((place / f"pid.{r}").exists() for r in (0, 1)), "the start of both ranks")
        assert stopped.send(number) == 128 + number, stopped.err
    assert stopped.out.count("saved") == 2, "the workers got SIGTERM"
    assert "was stopped" in stopped.err


def test_a_killed_run_leaves_nothing_behind_and_the_next_one_shows_and_keeps_its_output(place: Path) -> None:
    killed = FlyballProcess(place, "run", script(place, SLEEPER), OUT=str(place / "pid"))
    pid = killed.wait_for(lambda: (place / "pid.0").exists() and (place / "pid.0").read_text(), "the worker's start")
    worker = psutil.Process(int(pid))
    killed.send(signal.SIGKILL)
    until(lambda: not worker.is_running(), "the end of the worker")
    until(lambda: not processes_of(place), "the end of daemon and engine")
    assert list((place / "shm").iterdir()) != [], "nobody could remove the beacon"
    text = "import sys\nprint('out')\nprint('err', file=sys.stderr)\n"
    done = run(place, "--job", "hello", script(place, text, "next.py"))  # it removes what was left
    assert done.returncode == 0, done.stderr
    assert done.stdout == "out\n"
    assert "err\n" in done.stderr
    assert "job hello succeeded" in done.stderr
    assert "logs: flyball logs hello" in done.stderr
    logs = list((place / "s" / "jobs").glob("hello*/host/logs/hello/g*/rank0.log"))
    assert len(logs) == 1
    assert str(logs[0].parents[1]) in done.stderr
    assert sorted(logs[0].read_text().splitlines()) == ["err", "out"]


def test_a_port_in_use_and_a_folder_of_another_version(place: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        done = run_flyball(place, "up", "--state-dir", str(place / "sup"), "--port", port)
    assert (done.returncode, "Traceback" in done.stderr) == (4, False), done.stderr
    assert port in done.stderr
    (place / "old").mkdir()
    (place / "old" / "supervisor").mkdir()
    (place / "old" / "supervisor" / "VERSION").write_text("0\n")
    done = run(place, "--state-dir", str(place / "old"), script(place, "print(1)"))
    assert (done.returncode, "Traceback" in done.stderr) == (5, False), done.stderr


EVALUATES = """
import os, sys, time
import torch
import torch.distributed as dist
import flyball

dist.init_process_group("gloo")
job = flyball.attach()
weight = torch.ones(1)
start = job.restore({"weight": weight})
for step in range(start, 240):
    dist.all_reduce(weight)
    weight /= dist.get_world_size()
    time.sleep(0.01)
    job.step(step)
    job.save(step, {"weight": weight})
    if step == 119:
        time.sleep(8.0)
    if step == 179 and dist.get_rank() == 0:
        until = time.monotonic() + 8.0
        while time.monotonic() < until:
            pass
dist.destroy_process_group()
"""


@pytest.mark.proof
def test_unannounced_pauses_of_eight_seconds_are_not_stalls(place: Path) -> None:
    """Two kinds of evaluation between short steps: all ranks sleep, then rank 0 computes while the other waits."""
    done = run(place, "--nproc-per-node", "2", "--job", "evaluates", script(place, EVALUATES))
    assert done.returncode == 0, done.stderr
    assert "succeeded;" in done.stderr and "dec-" not in done.stderr and "stall" not in done.stderr


def test_a_hang_timeout_ends_a_long_pause(place: Path) -> None:
    text = EVALUATES.replace("time.sleep(8.0)", "time.sleep(600.0)")
    arguments = ("--nproc-per-node", "2", "--job", "hangs", "--max-restarts", "0", "--hang-timeout", "5")
    done = run(place, *arguments, script(place, text))
    assert done.returncode != 0
    assert "at most 5.0 s were expected (--hang-timeout)" in done.stderr
