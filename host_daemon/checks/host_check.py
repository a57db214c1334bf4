"""Carries out the check of this host: starts its processes, waits for them, ends them, and reads what they measured."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import structlog

from flyball.contracts.decisions import CheckHost, CommandResult
from flyball.contracts.errors import FlyballError
from flyball.contracts.reports.host_checks import CheckMeasure, CheckStage
from flyball.state_folder import clear_errors
from flyball.worker_files import read_worker_file_from
from host_daemon.checks.check_files import MAX_MESSAGE, CheckOrder, read_result, result_path, write
from host_daemon.kernel.free_ports import FreePorts
from host_daemon.kernel.processes import launch, signal_group
from host_daemon.kernel.reaper import Reaper

_KILLED_S = 5.0  # for killed processes to be gone
_TAIL_BYTES = 2000

_log = structlog.get_logger(__name__)


class HostChecker:
    """Runs one check at a time, in processes of its own: torch is never imported in the daemon."""

    def __init__(self, host_id: str, state_dir: Path, reaper: Reaper, ports: FreePorts) -> None:
        self._host_id = host_id
        self._folder = state_dir / "check"
        self._reaper = reaper
        self._ports = ports
        self._turn = asyncio.Lock()

    async def check(self, body: CheckHost, *, resumed: bool) -> CommandResult:
        """Measure this host in its group. What fails is part of the result. Raises StorageFull, or another FlyballError
        if no process can be started."""
        if resumed:  # its processes ended with the daemon before this one, and the group waited for them
            return self._result(body, failed=CheckStage.VOID, message="its daemon was restarted during the check")
        async with self._turn:
            return await self._run(body)

    async def _run(self, body: CheckHost) -> CommandResult:
        order_path, log_path = self._folder / "order.json", self._folder / "check.log"
        with clear_errors(self._folder):
            self._folder.mkdir(mode=0o700, exist_ok=True)
            for old in self._folder.glob("order.device*"):
                old.unlink(missing_ok=True)
            log_path.unlink(missing_ok=True)
            write(order_path, self._order(body))
            argv = [sys.executable, "-P", "-m", "host_daemon.checks.check_process", str(order_path)]
            pid = launch(argv, environment={**os.environ, **body.env}, log_path=log_path)
        ended = self._reaper.watch(pid)
        _log.info("host_check", check=body.check_id, group=list(body.group), pid=pid)
        try:
            in_time = bool((await asyncio.wait([ended], timeout=body.timeout_s))[0])
        except asyncio.CancelledError:  # the daemon ends, or a newer command replaces this one: that is an answer, too
            return self._result(body, failed=CheckStage.VOID, message="it was broken off")
        finally:
            signal_group(pid, signal.SIGKILL)  # also what a GPU's process left behind
            await asyncio.wait([ended], timeout=_KILLED_S)
            self._reaper.forget(pid)
        return self._measured(body, order_path, log_path, in_time=in_time)

    def _order(self, body: CheckHost) -> CheckOrder:
        return CheckOrder(
            check_id=body.check_id,
            index=body.group.index(self._host_id),
            group=body.group,
            master_address=body.master_address,
            master_port=body.master_port,
            timeout_s=body.timeout_s,
        )

    def _measured(self, body: CheckHost, order_path: Path, log_path: Path, *, in_time: bool) -> CommandResult:
        found = read_result(result_path(order_path, 0))
        failed, message = (None, "") if found is None else (found.failed, found.message)
        if found is None or not found.is_done:
            failed = CheckStage.GROUP if found is not None and found.matmul_s else CheckStage.DEVICE
            what = "the all-reduce" if failed is CheckStage.GROUP else "the matrix product"
            message = f"{what} did not end within {body.timeout_s:g} s" if not in_time else f"{what} ended its process"
            if in_time and (tail := _tail(log_path)):
                message = f"{message}: {tail}"
        return self._result(
            body,
            failed=failed,
            message=message,
            devices=found.devices if found else 0,
            matmul_s=found.matmul_s if found else 0.0,
            all_reduce_s=found.all_reduce_s if found else 0.0,
        )

    def _result(
        self,
        body: CheckHost,
        *,
        failed: CheckStage | None,
        message: str,
        devices: int = 0,
        matmul_s: float = 0.0,
        all_reduce_s: float = 0.0,
    ) -> CommandResult:
        measure = CheckMeasure(
            host_id=self._host_id,
            round=body.round,
            group=body.group,
            devices=devices,
            matmul_s=matmul_s,
            all_reduce_s=all_reduce_s,
            failed=failed,
            message=message[:MAX_MESSAGE],
        )
        return CommandResult(check=measure, free_port=self._free_port())

    def _free_port(self) -> int:
        """A port for the next round, in case this host is the first of its group."""
        try:
            return self._ports.find()
        except FlyballError:
            return 0


def _tail(path: Path) -> str:
    """The last line of a log."""
    try:
        lines = read_worker_file_from(path, -_TAIL_BYTES, _TAIL_BYTES)[0].decode(errors="replace").strip().splitlines()
    except OSError:
        return ""
    return lines[-1] if lines else ""
