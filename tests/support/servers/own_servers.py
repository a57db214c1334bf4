"""Redis and MariaDB servers of a test's own, which it may fill, flush, stop and kill."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path

import pymysql
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

START_TIMEOUT_S = 300.0


def free_port() -> int:
    """A port of the loopback interface that stays free while its owner is away: outgoing connections take theirs, and
    daemons propose theirs, from above; and no other process of tests is given it until this one ends."""
    for port in range(10_000, 20_000):
        if port in _given:
            continue
        try:
            fcntl.lockf(_CLAIMS, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, port)
        except OSError:
            continue
        _given.add(port)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("no port is free")


_CLAIMS = os.open(Path(tempfile.gettempdir()) / f"flyball-test-ports-{os.getuid()}", os.O_RDWR | os.O_CREAT, 0o600)
_given: set[int] = set()


class OwnServer:
    """A process that is started, stopped, continued and killed. Nothing of it survives the test."""

    process: subprocess.Popen[bytes]
    name: str

    def _launch(self, *command: str) -> None:
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + START_TIMEOUT_S
        while not self._answers():
            assert self.process.poll() is None, f"{self.name} ended"
            assert time.monotonic() < deadline, f"{self.name} does not answer"
            threading.Event().wait(0.01)

    def _answers(self) -> bool:
        raise NotImplementedError

    def kill(self) -> None:
        """kill -9; what was only in memory is gone."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def end(self) -> None:
        if self.process.poll() is None:
            self.kill()


class OwnRedis(OwnServer):
    """A redis-server on a free port of the loopback interface. It keeps nothing unless told to."""

    name = "redis-server"

    def __init__(self, folder: Path, *options: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.port = free_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self.client = redis.Redis(port=self.port, socket_timeout=30, retry=Retry(NoBackoff(), 0))
        self._options = ("--bind", "127.0.0.1", "--port", str(self.port), "--dir", str(folder), "--save", "", *options)
        self.start()

    def start(self, *options: str) -> None:
        self._launch(self.name, *self._options, *options)

    def end(self) -> None:
        self.client.close()
        super().end()

    def _answers(self) -> bool:
        try:
            return bool(self.client.ping())
        except redis.AuthenticationError:
            return True
        except (redis.ConnectionError, redis.TimeoutError):
            return False


class OwnMariaDb(OwnServer):
    """A mariadbd on a free port of the loopback interface, with one empty database and no password."""

    name = "mariadbd"

    def __init__(self, folder: Path) -> None:
        self.port = free_port()
        self.url = f"mysql://root@127.0.0.1:{self.port}/flyball"
        data = str(folder / "data")
        size = ("--innodb-log-file-size=8M", "--innodb-buffer-pool-size=32M")
        owner = ("--user=root",) if Path(folder).owner() == "root" else ()
        install = ("mariadb-install-db", "--no-defaults", f"--datadir={data}", *owner, *size, "--skip-test-db")
        made = subprocess.run([*install, "--auth-root-authentication-method=normal"], capture_output=True, check=False)
        assert made.returncode == 0, made.stderr.decode()
        self._command = (
            *(shutil.which(self.name) or self.name, "--no-defaults", f"--datadir={data}", *owner, *size),
            *(f"--port={self.port}", "--bind-address=127.0.0.1", f"--socket={folder / 's'}", "--skip-name-resolve"),
            *(f"--pid-file={folder / 'pid'}", f"--log-error={folder / 'log'}", "--max-connections=300"),
        )
        self.start()
        with pymysql.connect(host="127.0.0.1", port=self.port, user="root") as server, server.cursor() as cursor:
            cursor.execute("CREATE DATABASE flyball CHARACTER SET utf8mb4")

    def start(self) -> None:
        self._launch(*self._command)

    def _answers(self) -> bool:
        try:
            pymysql.connect(host="127.0.0.1", port=self.port, user="root", connect_timeout=2).close()
        except pymysql.err.OperationalError:
            return False
        return True
