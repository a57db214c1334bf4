"""`flyball doctor` on a real RDMA device: all is well, or a link, a limit, a right or the device itself is gone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.commands.here import run_here
from support.hosts.rdma import with_low_memlock

from ckpt_engine.peers.transport.rdma.verbs import RdmaPort, RdmaUnavailable, hw_counters, read_ports

ROOT = Path(__file__).resolve().parents[2]
DEBIAN = Path("/usr/lib/python3/dist-packages/pyverbs")
WAIT_S = 60.0
WRITTEN_BYTES = 1 << 20
in_a_machine_of_its_own = pytest.mark.skipif(
    "FLYBALL_VM" not in os.environ, reason="it takes this machine's network away: only in a virtual machine"
)


def doctor(**environ: str) -> tuple[int, dict[str, dict[str, Any]]]:
    """In this process: the exit code, and the last finding of each subject."""
    return reported(run_here("doctor", "-o", "json", environment=environment(**environ)))


def doctor_process(python: list[str], *flags: str, **environ: str) -> Any:  # noqa: ANN401
    """The same in a process of its own."""
    done = subprocess.run(
        [*python, "-m", "flyball.cli.main", "doctor", "-o", "json", *flags],
        cwd=ROOT, env=environment(**environ), capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    return reported(done)


def environment(**environ: str) -> dict[str, str]:
    base = {name: value for name, value in os.environ.items() if not name.startswith("FLYBALL_")}
    return base | {"PYTHONPATH": str(ROOT)} | environ


def reported(done: subprocess.CompletedProcess[str]) -> tuple[int, dict[str, dict[str, Any]]]:
    assert "Traceback" not in done.stderr
    assert done.stdout, done.stderr
    return done.returncode, {finding["subject"]: finding for finding in json.loads(done.stdout)["findings"]}


def wait_for(condition: Callable[[], bool]) -> None:
    due_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < due_s
        time.sleep(0.05)


def has_usable_port() -> bool:
    try:
        return any(port.is_active and port.gid is not None and port.gid.is_ipv4 for port in read_ports())
    except RdmaUnavailable:
        return False


@pytest.fixture
def port() -> Iterator[RdmaPort]:
    """The first port, as it was and as it is again for the next test."""
    wait_for(has_usable_port)
    yield read_ports()[0]
    wait_for(has_usable_port)


@pytest.fixture
def link_down(port: RdmaPort) -> Iterator[RdmaPort]:
    subprocess.run(["ip", "link", "set", port.interface, "down"], check=True)
    yield port
    subprocess.run(["ip", "link", "set", port.interface, "up"], check=True)


@pytest.fixture
def no_device_file(port: RdmaPort) -> Iterator[RdmaPort]:
    """As in a container that was not given the device."""
    files, away = Path("/dev/infiniband"), Path("/dev/infiniband.away")
    files.rename(away)
    yield port
    away.rename(files)


@pytest.fixture
def device_gone(port: RdmaPort) -> Iterator[RdmaPort]:
    subprocess.run(["rdma", "link", "delete", port.device], check=True)
    yield port
    subprocess.run(["rdma", "link", "add", port.device, "type", "rxe", "netdev", port.interface], check=True)


def test_on_a_host_with_rdma_everything_is_ok_and_a_write_went_through_the_device(port: RdmaPort) -> None:
    before = hw_counters(port)

    code, found = doctor(FLYBALL_CKPT_TRANSPORT="rdma")

    assert code == 0
    of_rdma = {name: one for name, one in found.items() if name.startswith("rdma") or name in {"pyverbs", "memlock"}}
    assert {finding["level"] for finding in of_rdma.values()} == {"ok"}, of_rdma
    assert found["rdma write"]["detail"].startswith(f"{port.name}: 1.0 MiB written"), found["rdma write"]
    if "sent_pkts" in before:  # Soft-RoCE
        assert hw_counters(port)["sent_pkts"] - before["sent_pkts"] >= WRITTEN_BYTES / 4096


def test_with_a_low_memlock_limit_the_limit_and_the_registration_are_named(port: RdmaPort) -> None:
    del port

    code, found = doctor_process(with_low_memlock(64 << 10), FLYBALL_CKPT_TRANSPORT="rdma")

    assert code == 3
    for subject in ("memlock", "rdma memory"):
        assert found[subject]["level"] == "error", found
        assert "may lock 64 KiB of memory" in found[subject]["detail"]
        assert "ulimit -l unlimited" in found[subject]["mend"]
    assert "rdma write" not in found


@in_a_machine_of_its_own
def test_a_device_that_may_not_be_opened_is_told_apart_from_none(no_device_file: RdmaPort) -> None:
    code, found = doctor()

    assert code == 0
    assert found["rdma ports"]["level"] == "ok"
    assert found["rdma memory"]["level"] == "warning", found
    assert no_device_file.device in found["rdma memory"]["detail"]
    assert "--device /dev/infiniband" in found["rdma memory"]["mend"]


@in_a_machine_of_its_own
def test_a_port_that_is_down_is_named_with_the_command_that_sets_it_up(link_down: RdmaPort) -> None:
    wait_for(lambda: not read_ports()[0].is_active)

    code, found = doctor(FLYBALL_CKPT_TRANSPORT="rdma")

    assert (code, found["rdma ports"]["level"]) == (3, "error")
    assert f"No RDMA port is active: {link_down.name} is DOWN" in found["rdma ports"]["detail"]
    assert f"ip link set {link_down.interface} up" in found["rdma ports"]["mend"]
    assert not found.keys() & {"rdma gid", "rdma memory", "rdma write"}


@in_a_machine_of_its_own
@pytest.mark.usefixtures("device_gone")
def test_a_stack_whose_device_was_removed_has_none() -> None:
    code, found = doctor()

    assert (code, found["rdma devices"]["level"]) == (0, "warning")
    assert "no RDMA device" in found["rdma devices"]["detail"]
    assert "rdma link add" in found["rdma devices"]["mend"]


def test_the_distributions_pyverbs_is_linked_into_an_environment_and_found_there(
    port: RdmaPort, tmp_path: Path
) -> None:
    if not DEBIAN.is_dir():
        pytest.skip("the distribution's pyverbs is not installed")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", "env"], cwd=tmp_path, check=True)
    python, packages = [str(tmp_path / "env" / "bin" / "python")], tmp_path / "packages"
    packages.mkdir()
    for entry in Path(pytest.__file__).parents[1].iterdir():  # all that this environment has, but pyverbs
        if entry.name != "pyverbs":
            (packages / entry.name).symlink_to(entry)

    code, found = doctor_process(python, "--fix", "rdma", PYTHONPATH=f"{ROOT}:{packages}")

    assert code == 0
    (link,) = (tmp_path / "env").glob("lib/python3*/site-packages/pyverbs")
    assert link.readlink() == DEBIAN
    assert found["pyverbs"]["detail"] == f"imported from {link}"
    assert found["rdma write"]["level"] == "ok", port.name
