"""Training scripts in processes that are forked from one with torch imported, as a host's workers are: the import costs
more than most of what these scripts do."""

from __future__ import annotations

import io
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Self

# Each script has a keeper, which tells its process id and then its exit code.
_SERVER = """
import atexit, json, os, signal, socket, sys, threading
import torch, torch._dynamo, torch.distributed.fsdp
import flyball, flyball.sdk.trainer
from flyball.contracts import fault_points

control = socket.socket(fileno=int(sys.argv[1]))
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
control.send(b"ready")
while True:
    received, descriptors, _, _ = socket.recv_fds(control, 1 << 20, 3)
    if not received:
        os._exit(0)
    if os.fork() == 0:
        break
    for descriptor in descriptors:
        os.close(descriptor)
control.close()
signal.signal(signal.SIGCHLD, signal.SIG_DFL)
request, (out, err, news) = json.loads(received), descriptors
pid = os.fork()
if pid:
    os.close(out)
    os.close(err)
    os.write(news, f"{pid}\\n".encode())
    os.write(news, str(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])).encode())
    os._exit(0)
os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
for descriptor, place in ((out, 1), (err, 2)):
    os.dup2(descriptor, place)
    os.close(descriptor)
os.close(news)
os.environ.clear()
os.environ.update(request["environment"])
os.chdir(request["cwd"])
fault_points.rearm()
sys.argv = ["-c", *request["arguments"]]
exec(compile(request["script"], "<string>", "exec"), {"__name__": "__main__"})
# To take the modules apart would copy every page of them that this process shares with the others, for longer than most
# scripts run. All else of an orderly end is done; after an exception, that too.
threading._shutdown()
atexit._run_exitfuncs()
sys.stdout.flush()
sys.stderr.flush()
os._exit(0)
"""
START_TIMEOUT_S = END_TIMEOUT_S = 300.0


class WarmScript:
    """A running script. Its streams are pipes of text, as with `subprocess.Popen`."""

    def __init__(self, out: int, err: int, news: int) -> None:
        self.stdout = io.TextIOWrapper(io.FileIO(out))
        self.stderr = io.TextIOWrapper(io.FileIO(err))
        self._news = io.BufferedReader(io.FileIO(news))
        self.pid = int(self._news.readline())
        self.returncode: int | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.wait()
        self.close()

    def wait(self, timeout_s: float = END_TIMEOUT_S) -> int:
        """Wait for its end. It is killed when the time is up."""
        if self.returncode is None:
            killer = threading.Timer(timeout_s, self.send_signal, [signal.SIGKILL])
            killer.start()
            try:
                self.returncode = int(self._news.read())
            finally:
                killer.cancel()
        return self.returncode

    def send_signal(self, number: signal.Signals) -> None:
        if self.returncode is None:
            with suppress(ProcessLookupError):  # it has ended, and its keeper has seen that
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def communicate(self, timeout_s: float) -> tuple[str, str]:
        """What it wrote, once it has ended. It is killed when the time is up."""
        killer = threading.Timer(timeout_s, self.send_signal, [signal.SIGKILL])
        errors: list[str] = []
        reader = threading.Thread(target=lambda: errors.append(self.stderr.read()))
        killer.start()
        reader.start()
        try:
            output = self.stdout.read()
            reader.join()
            self.wait()
        finally:
            killer.cancel()
        return output, errors[0]

    def close(self) -> None:
        for stream in (self.stdout, self.stderr, self._news):
            stream.close()


class WarmPython:
    """The process that scripts are forked from. It has one thread, and imports torch with one."""

    def __init__(self) -> None:
        self._control, theirs = socket.socketpair()
        with theirs:
            self._server = subprocess.Popen(
                [sys.executable, "-P", "-c", _SERVER, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                pass_fds=[theirs.fileno()],
            )
        self._control.settimeout(START_TIMEOUT_S)
        assert self._control.recv(16) == b"ready"

    def start(
        self, script: str, *arguments: str, environment: Mapping[str, str], cwd: Path | None = None
    ) -> WarmScript:
        ours, theirs = zip(*(os.pipe() for _ in range(3)), strict=True)
        request = {
            "script": script,
            "arguments": arguments,
            "environment": dict(environment),
            "cwd": str(cwd or Path.cwd()),
        }
        socket.send_fds(self._control, [json.dumps(request).encode()], theirs)
        for descriptor in theirs:
            os.close(descriptor)
        return WarmScript(*ours)

    def run(
        self,
        script: str,
        *arguments: str,
        environment: Mapping[str, str],
        cwd: Path | None = None,
        timeout_s: float = END_TIMEOUT_S,
    ) -> subprocess.CompletedProcess[str]:
        """Run a script to its end."""
        started = self.start(script, *arguments, environment=environment, cwd=cwd)
        output, errors = started.communicate(timeout_s)
        started.close()
        return subprocess.CompletedProcess([script, *arguments], started.wait(), output, errors)

    def close(self) -> None:
        self._control.close()
        self._server.wait(END_TIMEOUT_S)
