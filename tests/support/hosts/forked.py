"""Engines and trainers that are forked from two processes which have imported everything, so that a restart is cheap.
They can be stopped exactly at a fault point."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from support.clocks.waits import DEADLINE_S

FORKER = """
import json, os, signal, sys
exec(sys.argv[1])
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
print("ready", flush=True)
for line in sys.stdin:
    request = json.loads(line)
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.environ.update(request["environment"])
        try:
            run(*request["arguments"])
        finally:
            sys.stderr.flush()
            os._exit(1)
    print(pid, flush=True)
"""
ENGINE = """
import socket, threading
from ckpt_engine.tiers import durable_files
from ckpt_engine.host import emergency
from ckpt_engine.host import job
from ckpt_engine.host import server
from flyball.contracts import fault_points

broken = set()  # system calls that fail for files on disks

class Os:
    def __getattr__(self, name):
        if name in broken:
            raise OSError(5, "Input/output error")
        return getattr(os, name)

durable_files.os = Os()

def arm(sock):
    while True:
        received, asker = sock.recvfrom(256)
        what, _, name = received.decode().partition(" ")
        if what == "stop":
            os.environ[fault_points.VARIABLE] = name
            fault_points.rearm()
        elif what == "break":
            broken.add(name)
        else:
            broken.discard(name)
        try:
            sock.sendto(b"done", asker)
        except OSError:
            pass  # this process was stopped before it could answer, and who asked has seen that

def run(arm_path, *arguments):
    fault_points.rearm()
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    sock.bind(arm_path)
    threading.Thread(target=arm, args=(sock,), daemon=True).start()
    server.main(arguments)
"""
TRAINER = """
import torch, flyball
from ckpt_engine.trainer.capture import capturer
from ckpt_engine.trainer.restore import load_shard as restore
torch.set_num_threads(1)

def state_of(step, rank):
    generator = torch.Generator().manual_seed(step * 10 + rank)
    return {"w": torch.randn(60_000, generator=generator), "b": torch.randn(7, generator=generator), "at": (step, rank)}

def same(one, other):
    return one["at"] == other["at"] and all(torch.equal(one[name], other[name]) for name in "wb")

def run(result_file):
    job = flyball.attach()
    state = {"w": torch.zeros(60_000), "b": torch.zeros(7), "at": ()}
    start = job.restore(state)
    right = start == 0 or same(state, state_of(start - 1, job.rank))
    with open(result_file + ".new", "w") as file:
        json.dump({"start": start, "right": right}, file)
    os.rename(result_file + ".new", result_file)
    for step in range(start, 90_000):  # on and on; far below the step that `arm_ranks` names
        state = state_of(step, job.rank)
        job.save(step, state).replicated.wait(0.05)
"""


class Forker:
    """A process that forks others."""

    def __init__(self, prelude: str, disks: Mapping[Path, str]) -> None:
        """`disks`: folders that are separate file systems for these processes, with their sizes."""
        mounts = [f"mount -t tmpfs -o size={size},mode=700 none {folder} || exit 77" for folder, size in disks.items()]
        private = ["unshare", "-m", "--propagation", "private", "sh", "-c", "; ".join([*mounts, 'exec "$@"']), "sh"]
        self._process = subprocess.Popen(
            [*(private if disks else ()), sys.executable, "-P", "-c", FORKER, prelude],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ready(self) -> None:
        assert self._process.stdout is not None
        if self._process.stdout.readline() != "ready\n":
            pytest.skip("a tmpfs cannot be mounted here")

    def seen(self, path: Path) -> Path:
        """The path as these processes see it."""
        return Path(f"/proc/{self._process.pid}/root{path}")

    def fork(self, log: Path, environment: dict[str, str], *arguments: str) -> int:
        assert self._process.stdin is not None and self._process.stdout is not None
        request = {"log": str(log), "environment": environment, "arguments": arguments}
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(DEADLINE_S)
        self._process.stdout.close()


def state_in_kernel(pid: int) -> str:
    """One letter; '' once it is gone with all its threads: until then it may hold locks."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""


def stands_still(pid: int) -> bool:
    """Wait until every thread of a process is stopped: each runs on until it receives the signal itself."""
    try:
        stats = [thread.joinpath("stat").read_text() for thread in Path(f"/proc/{pid}/task").iterdir()]
    except (FileNotFoundError, ProcessLookupError):
        return False  # a thread ended meanwhile
    return all(stat.rpartition(")")[2].split()[0] == "T" for stat in stats)
