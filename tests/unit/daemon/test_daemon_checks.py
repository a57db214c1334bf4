"""The daemon's part of a check, with real processes: what they measure, and how each way to fail is told apart."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import pytest

from flyball.contracts.decisions import CheckHost, CommandResult
from flyball.contracts.reports.host_checks import CheckMeasure, CheckStage
from host_daemon.checks.check_files import DeviceResult, read_result, result_path
from host_daemon.checks.host_check import HostChecker
from host_daemon.kernel.free_ports import FreePorts
from host_daemon.kernel.reaper import Reaper

pytestmark = pytest.mark.processes

DEADLINE_S = 120.0


def run(scenario: Callable[[Callable[[str], HostChecker], int], Awaitable[None]], root: Path) -> None:
    async def main() -> None:
        reaper, ports = Reaper(), FreePorts()
        reaper.start()

        def make(host_id: str) -> HostChecker:
            (root / host_id).mkdir()
            return HostChecker(host_id, root / host_id, reaper, ports)

        try:
            await scenario(make, ports.find())
        finally:
            reaper.stop()

    asyncio.run(main())


def order(*group: str, port: int, timeout_s: float = DEADLINE_S) -> CheckHost:
    return CheckHost("", "act-1.1.0", 1, group, "127.0.0.1", port, timeout_s)


def measure(result: CommandResult) -> CheckMeasure:
    assert result.check is not None and result.free_port
    return result.check


async def process_of(folder: Path) -> int:
    """The pid of the running check with this state folder."""
    path = os.fsencode(folder / "check" / "order.json")
    async with asyncio.timeout(DEADLINE_S):
        while True:
            for entry in Path("/proc").iterdir():
                with contextlib.suppress(OSError):  # it has ended meanwhile
                    if entry.name.isdecimal() and path in (entry / "cmdline").read_bytes().split(b"\0"):
                        return int(entry.name)
            await asyncio.sleep(0.01)


def test_two_hosts_measure_together_and_one_alone(tmp_path: Path) -> None:
    async def scenario(make: Callable[[str], HostChecker], port: int) -> None:
        body = order("a", "b", port=port)
        one, two = await asyncio.gather(*(make(name).check(body, resumed=False) for name in "ab"))
        for result, name in ((one, "a"), (two, "b")):
            found = measure(result)
            assert (found.host_id, found.group, found.failed, found.devices) == (name, ("a", "b"), None, 1)
            assert found.matmul_s > 0.0 and found.all_reduce_s > 0.0

    run(scenario, tmp_path)


def test_the_variables_of_the_job_say_which_network_is_checked(tmp_path: Path) -> None:
    async def scenario(make: Callable[[str], HostChecker], port: int) -> None:
        body = msgspec.structs.replace(order("a", port=port), env={"GLOO_SOCKET_IFNAME": "no-such-network"})
        found = measure(await make("a").check(body, resumed=False))
        assert found.failed is CheckStage.GROUP and "no-such-network" in found.message

    run(scenario, tmp_path)


def test_each_way_to_fail_is_told_apart(tmp_path: Path) -> None:
    async def scenario(make: Callable[[str], HostChecker], port: int) -> None:
        killed = asyncio.create_task(make("killed").check(order("killed", port=port), resumed=False))
        os.kill(await process_of(tmp_path / "killed"), signal.SIGKILL)
        found = measure(await killed)
        assert (found.failed, found.message) == (CheckStage.DEVICE, "the matrix product ended its process")

        stopped = asyncio.create_task(make("stopped").check(order("stopped", port=port, timeout_s=0.5), resumed=False))
        os.kill(await process_of(tmp_path / "stopped"), signal.SIGSTOP)
        found = measure(await stopped)
        assert (found.failed, found.message) == (CheckStage.DEVICE, "the matrix product did not end within 0.5 s")

        left = asyncio.create_task(make("left").check(order("left", port=port), resumed=False))
        pid = await process_of(tmp_path / "left")
        left.cancel()
        found = measure(await left)
        assert (found.failed, found.message) == (CheckStage.VOID, "it was broken off")
        assert not Path(f"/proc/{pid}").exists()

        found = measure(await make("again").check(order("again", port=port), resumed=True))
        assert found.failed is CheckStage.VOID and "restarted during the check" in found.message

    run(scenario, tmp_path)


def test_a_host_that_does_not_join_is_named(tmp_path: Path) -> None:
    async def scenario(make: Callable[[str], HostChecker], port: int) -> None:
        checker = make("a")
        task = asyncio.create_task(checker.check(order("a", "b", port=port, timeout_s=DEADLINE_S), resumed=False))
        path = result_path(tmp_path / "a" / "check" / "order.json", 0)
        async with asyncio.timeout(DEADLINE_S):
            while (known := read_result(path)) is None or not known.matmul_s:
                await asyncio.sleep(0.05)
        assert isinstance(known, DeviceResult) and not known.is_done
        os.kill(await process_of(tmp_path / "a"), signal.SIGKILL)  # while it waits for b
        found = measure(await task)
        assert (found.failed, found.message) == (CheckStage.GROUP, "the all-reduce ended its process")
        assert msgspec.structs.replace(found, matmul_s=0.0).all_reduce_s == 0.0 and found.matmul_s > 0.0

    run(scenario, tmp_path)
