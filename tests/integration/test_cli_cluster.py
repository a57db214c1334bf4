"""Several `flyball run` on one machine as the hosts of a cluster: with a supervisor, and with a rendezvous address."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from own_servers import free_port

TOKEN = "a-token-for-this-test-only"
SCRIPT = """
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.tensor([float(os.environ["RANK"])])
dist.all_reduce(total)
print("total", total.item(), os.environ["FLYBALL_HOST_ID"], flush=True)
dist.destroy_process_group()
"""


def environment(place: Path) -> dict[str, str]:
    base = {k: v for k, v in os.environ.items() if not k.startswith(("FLYBALL_", "PET_", "TORCHELASTIC_"))}
    (place / "shm").mkdir(exist_ok=True)
    return base | {
        "FLYBALL_STATE_DIR": str(place / "s"),
        "FLYBALL_SHM_DIR": str(place / "shm"),
        "FLYBALL_TOKEN": TOKEN,
    }


def start(place: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "flyball.cli.main", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=place,
        env=environment(place),
    )


def finish(*processes: subprocess.Popen[str]) -> list[tuple[int, str, str]]:
    ended = []
    try:
        for process in processes:
            out, err = process.communicate(timeout=300)
            ended.append((process.returncode, out, err))
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()
    return ended


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder with a path short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="fb-") as name:
        yield Path(name)


@pytest.fixture
def supervisor(place: Path) -> Iterator[str]:
    process = start(place, "up", "--port", "0", "--state-dir", str(place / "sup"), "-o", "json")
    assert process.stdout
    try:
        lines: list[str] = []
        while not lines or lines[-1] != "}\n":
            lines.append(process.stdout.readline())
            assert lines[-1], process.communicate(timeout=10)[1]
        yield json.loads("".join(lines))["url"]
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=300)
    assert process.returncode == 0


def test_two_hosts_join_a_supervisor_and_submit_one_job(place: Path, supervisor: str) -> None:
    (place / "train.py").write_text(SCRIPT)
    line = ["run", "--supervisor", supervisor, "--nnodes", "2", "--nproc-per-node", "1", "--job", "pair"]
    ended = finish(*(start(place, *line, "--host-id", host, "train.py") for host in ("h1", "h2")))
    for code, _out, err in ended:
        assert code == 0, err
    assert sorted(line.split()[-1] for _, out, _ in ended for line in out.splitlines() if "total 1.0" in line) == [
        "h1",
        "h2",
    ]
    assert list((place / "shm").iterdir()) == []


def test_two_hosts_meet_at_an_address(place: Path) -> None:
    (place / "train.py").write_text(SCRIPT)
    address = f"127.0.0.1:{free_port()}"
    line = ["run", "--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", address, "--rdzv-id", "pair"]
    ended = finish(*(start(place, *line, "--host-id", host, "train.py") for host in ("h1", "h2")))
    for code, _out, err in ended:
        assert code == 0, err
    assert sum(out.count("total 1.0") for _, out, _ in ended) == 2
    assert list((place / "shm").iterdir()) == []
