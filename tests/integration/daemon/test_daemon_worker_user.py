"""`--worker-user`: workers of another user train, save and restore as always, and cannot reach what is not theirs."""

from __future__ import annotations

import json
import os
import pwd
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from support.clocks.waits import until
from support.hosts.daemons import LoneDaemon
from support.jobs.commanded import CommandedJob
from support.servers.played_supervisor import PlayedSupervisor

from flyball.contracts.checkpoints import RestorePlan, ShardSource, Tier, branch
from flyball.contracts.decisions import StartWorkers, UpdateState
from flyball.contracts.reports.rank_logs import LogRequest
from host_daemon.link.log_reading import read_piece

USER = "nobody"
# In a mount namespace of the daemon's own, the interpreter can be reached even if it lies below /root.
REACHABLE = """
mount --bind "$1" "$2" && mount -t tmpfs -o mode=755 none "$3" && mkdir -p "$1" && mount --bind "$2" "$1" || exit 9
shift 3
exec "$@"
"""
TRAINER = """
import os, time
import torch
import flyball
job = flyball.attach()
x = torch.zeros(1000)
start = job.restore({"x": x})
print("uid", os.getuid(), os.getgid(), os.environ["HOME"], "start", start, int(x[0]), flush=True)
for step in range(start, 1_000_000):
    x += 1
    job.step(step)
    job.save(step, {"x": x})
    time.sleep(0.05)
"""
INTRUDER = """
import json, os, signal, socket
from pathlib import Path
state = Path(os.environ["FLYBALL_ENGINE_NOTIFY"]).parent
shm = Path(os.environ["FLYBALL_SHM_PREFIX"]).parent
daemon, engine, other = PIDS
def connect():
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(str(state / "engine.sock"))
acts = {
    "list the state folder": lambda: os.listdir(state),
    "read the token": lambda: Path("TOKEN").read_bytes(),
    "read the engine's key": lambda: (state / "engine.token").read_bytes(),
    "read the daemon's database": lambda: (state / "daemon.sqlite").read_bytes(),
    "write the daemon's pid": lambda: (state / "daemon.pid").write_text("1"),
    "make a condition": lambda: (state / "conditions").mkdir(),
    "speak to the engine": connect,
    "end the daemon": lambda: os.kill(daemon, signal.SIGKILL),
    "end the engine": lambda: os.kill(engine, signal.SIGKILL),
    "read the daemon's memory": lambda: open(f"/proc/{daemon}/mem", "rb"),
    "read the daemon's environment": lambda: Path(f"/proc/{daemon}/environ").read_bytes(),
    "replace its logs' folder": lambda: (state / "logs").rename(state / "gone"),
    "replace its generation's folder": lambda: next((state / "logs").glob("*")).rename(state / "logs" / "gone"),
    "become root": lambda: os.setuid(0),
    "shorten a replica": lambda: os.truncate(next(shm.glob("*.p7.ctl")), 0),
}
said = {}
for name, act in acts.items():
    try:
        act()
        said[name] = "done"
    except (OSError, StopIteration) as error:
        said[name] = type(error).__name__
print("said", json.dumps(said), flush=True)
raise ValueError("enough")
"""


def in_reach(root: Path) -> tuple[str, ...]:
    """Words before the daemon's command. Skips if that needs more than this machine allows."""
    prefix = Path(sys.base_prefix).resolve()
    blocked = [parent for parent in reversed(prefix.parents) if not parent.stat().st_mode & stat.S_IXOTH]
    if not blocked:
        return ()
    keep = str(root / "interpreter")
    Path(keep).mkdir()
    words = ("unshare", "--mount", "sh", "-c", REACHABLE, "sh", str(prefix), keep, str(blocked[0]))
    tried = subprocess.run([*words, "true"], check=False, capture_output=True, text=True, timeout=60)
    if tried.returncode:
        pytest.skip(f"{USER} cannot reach {prefix}, and there are no mount namespaces here: {tried.stderr}")
    return words


@pytest.fixture(scope="module")
def daemon() -> Iterator[LoneDaemon]:
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    root = Path(tempfile.mkdtemp(prefix="flyball-u-"))
    root.chmod(0o755)
    server = PlayedSupervisor()
    made = LoneDaemon(root, server)
    made._command[:0] = in_reach(root)
    made.shm_dir.chmod(0o1777)
    made.token_file.chmod(0o600)
    made.start("--worker-user", USER)
    try:
        yield made
    finally:
        made.clean_up()
        server.close()
        shutil.rmtree(root)


def copies(daemon: LoneDaemon, job: str) -> int:
    newest = daemon.supervisor.newest
    found = newest.copies if newest is not None else ()
    return max((copy.step for copy in found if copy.job == job and copy.tier is Tier.MEMORY), default=-1)


def uid_of(path: Path) -> int:
    return path.lstat().st_uid


def test_workers_of_another_user_train_save_and_restore(daemon: LoneDaemon) -> None:
    user = pwd.getpwnam(USER)
    job = CommandedJob(daemon, TRAINER, name="theirs", nproc=2)
    job.start()
    until(lambda: copies(daemon, "theirs") > 5, "a copy")
    said = job.log().split()
    assert said[:3] == ["uid", str(user.pw_uid), str(user.pw_gid)]
    assert user.pw_dir in said
    stopped = job.stop(1)
    assert stopped.result is not None
    held = [{copy.step for copy in stopped.result.copies if copy.rank == rank} for rank in (0, 1)]
    step = max(set.intersection(*held))
    sources = {str(rank): (ShardSource(rank, 1, Tier.MEMORY, "host-a", ""),) for rank in (0, 1)}
    before = job.placement(1)
    placement = msgspec.structs.replace(
        job.placement(2, port=stopped.result.free_port),
        lineage=branch(before.lineage, restored_step=step, generation=2),
        restore=RestorePlan(step, sources),
    )
    assert job.send(StartWorkers(job.spec, placement), generation=2).state is UpdateState.SUCCEEDED
    until(lambda: "start" in job.log(2), "its start")
    assert job.log(2).split()[-3:-1] == ["start", str(step + 1)]
    until(lambda: copies(daemon, "theirs") > step, "a copy of the next generation")

    # Whose everything is.
    theirs = [*daemon.shm_dir.glob("*.theirs.r*"), *daemon.shm_dir.glob("*.theirs.g2.r*.beacon")]
    assert {path.suffix for path in theirs} >= {".ctl", ".s0", ".s1", ".beacon"}
    assert {uid_of(path) for path in theirs} == {user.pw_uid}
    logs = daemon.state_dir / "logs" / "theirs"
    assert {uid_of(path) for path in logs.glob("g*/rank*.log")} == {user.pw_uid}
    assert uid_of(daemon.state_dir / "errors" / "theirs") == user.pw_uid
    assert {uid_of(path) for path in (logs, logs.parent, daemon.state_dir, daemon.state_dir / "daemon.sqlite")} == {0}
    piece = read_piece(logs, "host-a", LogRequest("r", "theirs", 0))
    assert piece.data.startswith(b"uid ")
    job.end(2)
    assert not list(daemon.shm_dir.glob("*.theirs.*")), "the engine removes what is another user's"


def test_a_script_reaches_nothing_that_is_not_its_own(daemon: LoneDaemon) -> None:
    quiet = CommandedJob(daemon, TRAINER, name="quiet")
    quiet.start()
    until(lambda: copies(daemon, "quiet") > 0, "a copy")
    replica = daemon.shm_dir / f"{next(daemon.shm_dir.glob('*.quiet.r0.ctl')).name.split('.')[0]}.quiet.p7.ctl"
    replica.touch(0o600)
    pids = [daemon.pid, daemon.engine_pid, 1]
    script = INTRUDER.replace("PIDS", repr(pids)).replace("TOKEN", str(daemon.token_file))
    job = CommandedJob(daemon, script, name="intruder")
    job.start()
    exited = job.exit_of(0)
    assert exited.error is not None
    assert (exited.error.kind, exited.error.message) == ("ValueError", "enough"), "its error file was read"
    said = json.loads(next(line for line in job.log().splitlines() if line.startswith("said ")).removeprefix("said "))
    assert {act for act, outcome in said.items() if outcome == "done"} == set()
    assert daemon.process is not None
    assert daemon.process.poll() is None
    before = copies(daemon, "quiet")
    until(lambda: copies(daemon, "quiet") > before, "further copies of the other job")
    assert daemon.engine_pid == pids[1]
    quiet.end(1)
    job.end(1)


def test_a_host_where_workers_could_not_start_is_refused(daemon: LoneDaemon, tmp_path: Path) -> None:
    """What lies below a private folder is out of their reach."""
    private = tmp_path / "private"
    private.mkdir(mode=0o700)
    words = list(daemon._command)
    words[words.index("--state-dir") + 1] = str(private / "state")
    if words[0] == "unshare":  # a folder for the interpreter, of this mount namespace
        (private / "interpreter").mkdir()
        words[words.index("sh", 4) + 2] = str(private / "interpreter")
    done = subprocess.run(
        [*words, "--worker-user", USER],
        env=daemon.environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode != 0
    assert f"Workers of user {USER} could not run here" in done.stderr, done.stderr
    assert "not below /root" in done.stderr
