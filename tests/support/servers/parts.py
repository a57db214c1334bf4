"""The control plane as processes: the supervisor, or each of its parts alone."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
from support.clocks.waits import DEADLINE_S, until
from support.commands.log_lines import read_log
from support.servers.here import bearer
from support.servers.own_servers import free_port

ROOT = Path(__file__).parents[3]


class ServicePart:
    """The supervisor, or one part of it, as a process that can be killed and started again at the same address."""

    def __init__(
        self,
        name: str,
        state_dir: Path,
        environment: Mapping[str, str],
        *,
        address: str = "127.0.0.1",
        port: int | None = None,
    ) -> None:
        """`name`: of the part, or "all"."""
        self.name = name
        self.state_dir = state_dir
        self.port = free_port() if port is None else port
        self.url = f"http://{address}:{self.port}"
        self.log_path = state_dir.with_name(f"{state_dir.name}-{name}.log")
        self._environment = dict(environment) | {"FLYBALL_HOST": address}
        self.process: subprocess.Popen[bytes] | None = None

    def launch(self, fault_point: str = "") -> None:
        """Start it, without waiting; `fault_point` has it die there."""
        assert self.process is None or self.process.poll() is not None, f"{self.name} still runs"
        options = ("--state-dir", str(self.state_dir), "--port", str(self.port))
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "services.main", self.name, *options],
                cwd=ROOT,
                env=self._environment | {"FLYBALL_FAULT_POINT": fault_point},
                stdin=subprocess.DEVNULL,
                stderr=log,
                start_new_session=True,
            )

    def wait_up(self) -> None:
        record = self.state_dir / f"{'supervisor' if self.name in ('all', 'api') else self.name}.json"

        def is_up() -> bool:
            assert self.process is not None and self.process.poll() is None, self.log()
            try:
                return bool(json.loads(record.read_text())["pid"] == self.process.pid)
            except (OSError, ValueError):
                return False

        until(is_up, f"{self.name} serves")

    def start(self, fault_point: str = "") -> None:
        self.launch(fault_point)
        self.wait_up()

    def send(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def wait(self) -> int:
        """Its exit code."""
        assert self.process is not None
        return self.process.wait(DEADLINE_S)

    def kill(self) -> None:
        self.send(signal.SIGKILL)
        self.wait()

    def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        """End it, unless it has ended; its exit code."""
        self.send(number)
        return self.wait()

    @property
    def token(self) -> str:
        return self._environment.get("FLYBALL_TOKEN") or (self.state_dir / "token").read_text().strip()

    def client(self, host_id: str = "") -> httpx.Client:
        """Wait until it serves; a client of the operator's, or a host's."""
        self.wait_up()
        return httpx.Client(base_url=self.url, headers=bearer(self.token, host_id), timeout=DEADLINE_S)

    def log(self) -> str:
        return self.log_path.read_text()

    def logged(self, event: str) -> list[dict[str, Any]]:
        return read_log(self.log_path, event)

    def misses(self) -> set[str]:
        """What it says that it cannot do without."""
        checks = httpx.get(f"{self.url}/readyz", timeout=60.0, trust_env=False).json()["checks"]
        return {name for name, why in checks.items() if why != "ok"}
