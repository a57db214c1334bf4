"""Workers that do not end by themselves get their grace once, not once for them and once for their sessions."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import cast

import pytest
from support.clocks.loops import LoopClock, run_skipping

from host_daemon.kernel.reaper import Reaper
from host_daemon.kernel.step_end import StepEnd
from host_daemon.store.worker_records import WorkerRecord, WorkerRecords
from host_daemon.workers import workers
from host_daemon.workers.workers import Worker, WorkerTable

NOBODY = 2**22 - 1  # no process has this id


def test_a_stubborn_worker_is_killed_when_its_grace_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    async def stop() -> dict[signal.Signals, float]:
        clock, sent_at = LoopClock(), {}
        record = WorkerRecord("job", 1, 0, NOBODY, 1, 0.0, "log")
        worker = Worker(record, Path("error"), None)

        def send(_group: int, number: signal.Signals) -> None:
            sent_at[number] = clock.monotonic_s()
            if number == signal.SIGKILL:
                worker.gone.set()
                worker.handled.set()

        monkeypatch.setattr(workers, "signal_group", send)
        monkeypatch.setattr(workers, "kin_of", lambda _workers, _known: {} if worker.gone.is_set() else {NOBODY: 1})
        table = WorkerTable(
            records=cast("WorkerRecords", None), reaper=Reaper(), clock=clock, on_exit=lambda *_: asyncio.sleep(0)
        )
        table._workers.append(worker)
        await table.stop([worker], 10.0)
        assert not table.of("job")
        return sent_at

    sent_at = run_skipping(stop())
    assert 10.0 <= sent_at[signal.SIGKILL] - sent_at[signal.SIGTERM] < 10.5


def test_a_worker_that_ends_when_its_step_does_is_no_success_and_no_fault() -> None:
    """The batch system signals one process after the other: a script's own handler may be through with it first."""

    async def ends() -> list[bool]:
        clock = LoopClock()
        step, elsewhere = StepEnd(7, clock), StepEnd(0, clock)
        found = [await step.has_come()]
        asyncio.get_running_loop().call_later(0.05, step.note)
        found += [await step.has_come(), await step.has_come()]
        await asyncio.sleep(40.0)
        elsewhere.note()
        return [*found, await step.has_come(), await elsewhere.has_come()]

    assert run_skipping(ends()) == [False, True, True, False, False]
