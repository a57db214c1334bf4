"""Starts, kills and reads processes on the other host of a test.

`python tests/rdma/other_host.py` serves that on the other virtual machines, and nowhere else: whoever reaches it may
run anything. Where there is one host only, the processes run beside the test, by the same code. Each has the
environment that the server has, changed as the test says.
"""

from __future__ import annotations

import http.client
import os
import signal
import subprocess
import sys
import tempfile
import time
import xmlrpc.client
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from xmlrpc.server import SimpleXMLRPCServer

PORT = 7077
CONNECT_DEADLINE_S = 60.0
CALL_DEADLINE_S = 20.0
LOOK_S = 0.05
PATIENCE_S = 120.0  # emulated processors are slow
LOOPBACK = "127.0.0.1"


class Processes:
    """What the server does. Each process writes stdout and stderr into one file."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="other-host-"))
        self._started: dict[int, subprocess.Popen[bytes]] = {}

    def start(self, argv: list[str], changes: dict[str, str]) -> int:
        """The pid."""
        path = self._folder / f"output-{len(self._started)}"
        with path.open("wb") as output:
            process = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=os.environ | changes
            )
        path.rename(self._folder / str(process.pid))
        self._started[process.pid] = process
        return process.pid

    def output(self, pid: int) -> str:
        return (self._folder / str(pid)).read_text(errors="replace")

    def exit_code(self, pid: int) -> int:
        """-1000 while it runs; minus the number of the signal that ended it."""
        code = self._started[pid].poll()
        return -1000 if code is None else code

    def signal(self, pid: int, number: int) -> bool:
        if self._started[pid].poll() is None:
            self._started[pid].send_signal(number)
        return True

    def lose_power(self) -> bool:
        """The whole machine is gone at once, without a last packet."""
        Path("/proc/sysrq-trigger").write_text("o")
        return True


Calls = Processes | xmlrpc.client.ServerProxy


class Process:
    """One process of the other host."""

    def __init__(self, host: Calls, pid: int, argv: Sequence[str]) -> None:
        self._host, self.pid, self._argv = host, pid, argv

    def output(self) -> str:
        return str(self._host.output(self.pid))

    def line(self, start: str, *, deadline_s: float = PATIENCE_S) -> str:
        """The first line that begins with `start`, as soon as it is written, without `start`."""
        deadline = time.monotonic() + deadline_s
        while True:
            code, output = self._host.exit_code(self.pid), self.output()
            for line in output.splitlines(keepends=True):
                if line.startswith(start) and line.endswith("\n"):
                    return line.removeprefix(start).strip()
            assert code == -1000, f"{self._argv} ended with {code} before a line {start!r}:\n{output}"
            assert time.monotonic() < deadline, f"{self._argv}: no line {start!r} in {deadline_s:.0f} s:\n{output}"
            time.sleep(LOOK_S)

    def wait(self, *, deadline_s: float = PATIENCE_S) -> int:
        """The exit code; minus the number of the signal that ended it."""
        deadline = time.monotonic() + deadline_s
        while (code := self._host.exit_code(self.pid)) == -1000:
            assert time.monotonic() < deadline, f"{self._argv} runs after {deadline_s:.0f} s:\n{self.output()}"
            time.sleep(LOOK_S)
        return int(code)

    def send_signal(self, number: signal.Signals) -> None:
        self._host.signal(self.pid, int(number))

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)
        self.wait()


class _Transport(xmlrpc.client.Transport):
    def __init__(self, timeout_s: float) -> None:
        super().__init__()
        self._timeout_s = timeout_s

    def make_connection(self, host: object) -> http.client.HTTPConnection:
        connection = super().make_connection(host)  # type: ignore[arg-type]
        connection.timeout = self._timeout_s
        return connection


def calls(address: str, *, timeout_s: float = CALL_DEADLINE_S) -> xmlrpc.client.ServerProxy:
    """What serves XML-RPC at "ip:port". A call that takes longer raises TimeoutError."""
    return xmlrpc.client.ServerProxy(f"http://{address}", transport=_Transport(timeout_s))


class OtherMachine:
    """`address` is where its processes are reached, `own_address` where this host is."""

    def __init__(self, address: str, own_address: str, processes: Calls) -> None:
        self.address, self.own_address = address, own_address
        self._processes = processes
        self._started: list[Process] = []

    @classmethod
    def of_one_host(cls) -> OtherMachine:
        own = own_address()
        return cls(own, own, Processes())

    @classmethod
    def all_of_this_run(cls) -> list[OtherMachine]:
        """One for each of the other virtual machines; empty where there is none."""
        own = own_address()
        return [cls(other, own, _server_on(other)) for other in addresses() if other != own]

    @classmethod
    def of_this_run(cls) -> OtherMachine:
        others = cls.all_of_this_run()
        return others[0] if others else cls.of_one_host()

    @property
    def is_another_machine(self) -> bool:
        return self.address != self.own_address

    def start(self, *argv: str, env: Mapping[str, str] | None = None) -> Process:
        pid = int(self._processes.start([str(argument) for argument in argv], dict(env or {})))
        self._started.append(Process(self._processes, pid, argv))
        return self._started[-1]

    def run(self, *argv: str, deadline_s: float = PATIENCE_S) -> str:
        """A command that must succeed. Returns its output."""
        process = self.start(*argv)
        code = process.wait(deadline_s=deadline_s)
        output = process.output()
        assert code == 0, f"{argv} ended with {code}:\n{output}"
        return output

    def lose_power(self) -> None:
        assert self.is_another_machine
        self._started.clear()
        with suppress(OSError, http.client.HTTPException):  # the answer may be lost, too
            self._processes.lose_power()

    def __enter__(self) -> OtherMachine:
        return self

    def __exit__(self, *_error: object) -> None:
        for process in self._started:
            process.kill()


def addresses() -> list[str]:
    """Of the virtual machines of this run, or of this host where it is none."""
    return os.environ.get("FLYBALL_VM_ADDRESSES", LOOPBACK).split(",")


def own_address() -> str:
    """Where tests of this run reach this machine; outside a virtual machine nobody else can."""
    return addresses()[int(os.environ["FLYBALL_VM"])] if "FLYBALL_VM" in os.environ else LOOPBACK


def _server_on(address: str) -> xmlrpc.client.ServerProxy:
    server = calls(f"{address}:{PORT}")
    deadline = time.monotonic() + CONNECT_DEADLINE_S
    while True:
        try:
            server.system.listMethods()
            return server
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(LOOK_S)


def serve() -> None:
    if "FLYBALL_VM" not in os.environ:
        sys.exit("this serves commands without a password: it runs only in a virtual machine of deploy/rdma_vm.py")
    with SimpleXMLRPCServer((own_address(), PORT), logRequests=False) as server:
        server.register_introspection_functions()
        server.register_instance(Processes())
        server.serve_forever()


if __name__ == "__main__":
    serve()
