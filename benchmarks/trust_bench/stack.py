"""A live stack on this machine: MariaDB, Redis, four services, hosts with engines and a spare, and a training job.

All of it is the benchmark's own, in one folder and one shared-memory folder, and carries one variable by which it is
found and ended. Hosts are in network namespaces of their own where that is permitted.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pymysql

from flyball.cli.reach.client import ApiClient
from flyball.contracts.cluster import JobSpec
from flyball.contracts.on_host.segments import SHM_DIR_VARIABLE
from simulator.inject.processes import LiveProcess
from trust_bench.interruption import Interruption
from trust_bench.network import INTERFACE, Network, why_not
from trust_bench.own import clean_environment, end_marked, marked, newest_lines

MARK = "TRUST_STACK"
JOB = "trust"
TRAIN = Path(__file__).with_name("train.py")
SIZES = ("--layers", "2", "--width", "64", "--heads", "2", "--context", "24", "--batch-size", "1", "--seed", "7")
SERVICES = ("api", "sensor", "controller", "actuator")
DEADLINE_S = 300.0
MARIADB_SIZE = ("--innodb-log-file-size=8M", "--innodb-buffer-pool-size=64M")
STEPS = "10000000"  # it trains until it is ended
SERVERS = {  # command -> Debian's package
    "mariadbd": "mariadb-server",
    "mariadb-install-db": "mariadb-server",
    "redis-server": "redis-server",
}
LIMITS = {"FLYBALL_POLICY__MAX_ACTIONS_PER_HOUR": "100000"}  # a campaign needs more than the 60 that are usual
NEEDED_BYTES = 7 << 30  # measured: 5.0 GiB with three hosts and a spare

T = TypeVar("T")


class StackError(Exception):
    """The stack did not come up, or came down."""


class TrustStack:
    """A context manager: the stack runs inside, and no process, namespace or segment of it is left afterwards."""

    def __init__(self, host_ids: Sequence[str], interruption: Interruption) -> None:
        """Raises StackError if a server is not installed."""
        if missing := [command for command in SERVERS if shutil.which(command) is None]:
            packages = " ".join(sorted({SERVERS[command] for command in missing}))
            raise StackError(f"Not installed: {', '.join(missing)}. On Debian: apt-get install {packages}")
        self.host_ids = tuple(host_ids)
        self._interruption = interruption
        self.root = Path(tempfile.mkdtemp(prefix="fbt-"))  # short: a Unix socket's path is limited
        self.shm_dir = Path(tempfile.mkdtemp(prefix="fbt-", dir="/dev/shm"))
        self.losses_dir = self.root / "job" / "losses"
        self.supervisor_dir = self.root / "supervisor"
        self.environment = clean_environment()
        self.environment |= {MARK: str(self.root), SHM_DIR_VARIABLE: str(self.shm_dir), "OMP_NUM_THREADS": "1"}
        self.no_network = why_not()
        self._network: Network | None = None
        self._ports: dict[str, int] = {}
        self._api: ApiClient | None = None

    def __enter__(self) -> TrustStack:
        try:
            self._start()
        except BaseException:
            self.end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    @property
    def api(self) -> ApiClient:
        if self._api is None:
            token = (self.supervisor_dir / "token").read_text().strip()
            self._api = ApiClient(self._url("api"), token)
        return self._api

    def query(self, statement: str) -> list[tuple[Any, ...]]:
        """Rows of the supervisor's database."""
        with (
            contextlib.closing(
                pymysql.connect(host="127.0.0.1", port=self._ports["database"], user="root", database="flyball")
            ) as connection,
            connection.cursor() as cursor,
        ):
            cursor.execute(statement)
            return list(cursor.fetchall())

    def port(self, name: str) -> int:
        """Of a service, of "redis" or of "database"."""
        return self._ports[name]

    def start_host(self, host_id: str) -> None:
        """Start a host's daemon; it has nothing of before if its folder was removed."""
        inside: Sequence[str] = ()
        address = "127.0.0.1"
        if self._network is not None:
            inside, address = self._network.inside(host_id), self._network.address[host_id]
        readings = self.root / "readings" / host_id / "dev"
        readings.mkdir(parents=True, exist_ok=True)
        (readings / "kmsg").touch()
        self._spawn(
            host_id,
            [
                *(*inside, sys.executable, "-P", "-m", "host_daemon", "--state-dir", str(self.state_dir(host_id))),
                *("--host-id", host_id, "--supervisor", self._url("api"), "--sensor-urls", self._url("sensor")),
                *("--actuator-urls", self._url("actuator"), "--token-file", str(self.supervisor_dir / "token")),
                *("--failure-domain", f"rack-of-{host_id}", "--report-interval-s", "0.5", "--address", address),
            ],
            {"FLYBALL_PROBE_ROOT": str(readings.parent)},
        )

    def state_dir(self, host_id: str) -> Path:
        return self.root / host_id

    def has_daemon(self, host_id: str) -> bool:
        folder = str(self.state_dir(host_id))
        return any("host_daemon" in p.argv and folder in p.argv for p in self.processes())

    def submit(self, *, nnodes: int, pace_s: float, **spec: Any) -> None:  # noqa: ANN401 - of JobSpec
        folder = self.root / "job"
        folder.mkdir()
        argv = (str(TRAIN), "--steps", STEPS, *SIZES, "--print-every", STEPS, "--losses-dir", str(self.losses_dir))
        env = {"TRUST_FOLDER": str(folder), "TRUST_PACE_S": str(pace_s)}
        if self._network is not None:
            env["GLOO_SOCKET_IFNAME"] = INTERFACE  # gloo would take the address of the machine's name
        shape = {"nnodes": nnodes, "nproc_per_node": 1, "max_restarts": 1_000_000}
        self.api.post("/v1/jobs", JobSpec(job=JOB, argv=argv, workdir=str(folder), env=env, **shape, **spec))
        self.until("the first steps", lambda: int(self.api.get(f"/v1/jobs/{JOB}")["newest_step"]) >= 5)

    def processes(self) -> list[LiveProcess]:
        """All live processes of the stack."""
        return marked(MARK, str(self.root))

    def until(self, what: str, condition: Callable[[], T], timeout_s: float = DEADLINE_S) -> T:
        """Wait for a condition. Raises StackError at the deadline, with the end of each log."""
        deadline_s = time.monotonic() + timeout_s
        while not (found := condition()):
            if time.monotonic() > deadline_s:
                logs = newest_lines([*self.root.glob("*.log"), *self.root.glob("mariadb/log")])
                raise StackError(f"not within {timeout_s:.0f} s: {what}\n{logs}")
            threading.Event().wait(0.1)
        return found

    def kill(self) -> None:
        """End every process of the stack by its pid; its files stay."""
        if self._api is not None:
            self._api.close()
        end_marked(MARK, str(self.root))

    def end(self) -> None:
        """End all processes, and remove the stack's files, segments and namespaces. A signal does not interrupt it."""
        with self._interruption.shielded():
            self.kill()
            if self._network is not None:
                self._network.end()
            shutil.rmtree(self.shm_dir, ignore_errors=True)
            shutil.rmtree(self.root, ignore_errors=True)

    def _start(self) -> None:
        if not self.no_network:
            self._network = Network(*self.host_ids)
        self._ports = {name: _free_port() for name in ("redis", "database", *SERVICES)}
        self._start_servers()
        self.environment |= {
            "FLYBALL_DATABASE_URL": f"mysql://root@127.0.0.1:{self._ports['database']}/flyball",
            "FLYBALL_REDIS_URL": f"redis://127.0.0.1:{self._ports['redis']}/0",
            "FLYBALL_HOST": self._address,
        }
        for name in SERVICES:
            arguments = ("--state-dir", str(self.supervisor_dir), "--port", str(self._ports[name]))
            self._spawn(name, [sys.executable, "-P", "-m", "services.main", name, *arguments], LIMITS)
        for name in SERVICES:
            self.until(f"{name} serves", lambda name=name: _is_open(self._address, self._ports[name]))  # type: ignore[misc]
        for host_id in self.host_ids:
            self.start_host(host_id)
        known = {*self.host_ids}
        self.until(
            "reports of all hosts",
            lambda: known <= {str(h["host_id"]) for h in self.api.items("/v1/hosts") if h["engine_alive"]},
        )

    def _start_servers(self) -> None:
        redis = self.root / "redis"
        redis.mkdir()
        own = (
            "--dir",
            str(redis),
            "--save",
            "",
            "--set-proc-title",
            "no",
        )  # its title would hide how to start it again
        self._spawn("redis", ["redis-server", "--port", str(self._ports["redis"]), "--bind", "127.0.0.1", *own])
        folder = self.root / "mariadb"
        folder.mkdir()
        data = f"--datadir={folder / 'data'}"
        owner = ("--user=root",) if os.geteuid() == 0 else ()
        install = ("mariadb-install-db", "--no-defaults", data, *owner, *MARIADB_SIZE, "--skip-test-db")
        try:
            subprocess.run(
                [*install, "--auth-root-authentication-method=normal"],
                capture_output=True,
                text=True,
                check=True,
                timeout=DEADLINE_S,
                env=self.environment,
            )
        except subprocess.SubprocessError as error:
            raise StackError(f"{error}\n{getattr(error, 'stderr', '') or ''}") from error
        server = shutil.which("mariadbd") or "mariadbd"
        place = (f"--port={self._ports['database']}", "--bind-address=127.0.0.1", f"--socket={folder / 's'}")
        files = (f"--pid-file={folder / 'pid'}", f"--log-error={folder / 'log'}")
        self._spawn(
            "database",
            [server, "--no-defaults", data, *owner, *MARIADB_SIZE, *place, *files, "--skip-name-resolve"],
        )
        for name in ("redis", "database"):
            self.until(f"{name} serves", lambda name=name: _is_open("127.0.0.1", self._ports[name]))  # type: ignore[misc]
        with (
            contextlib.closing(
                pymysql.connect(host="127.0.0.1", port=self._ports["database"], user="root")
            ) as connection,
            connection.cursor() as cursor,
        ):
            cursor.execute("CREATE DATABASE flyball CHARACTER SET utf8mb4")

    @property
    def _address(self) -> str:
        return self._network.outside if self._network is not None else "127.0.0.1"

    def _url(self, service: str) -> str:
        return f"http://{self._address}:{self._ports[service]}"

    def _spawn(self, name: str, command: Sequence[str], more: Mapping[str, str] | None = None) -> None:
        """Nobody waits for it: the injector may kill it, and start it again."""
        with (self.root / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                command,
                env=self.environment | dict(more or {}),
                cwd=self.root,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        threading.Thread(target=process.wait, daemon=True, name=f"reap-{name}").start()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _is_open(address: str, port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1.0)
        return probe.connect_ex((address, port)) == 0
