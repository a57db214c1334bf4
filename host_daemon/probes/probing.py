"""Runs the probes: each in a thread of its own, with a deadline, so that a driver that hangs blocks nothing else.

A probe that fails, is late, or has nothing to read here says so in the log, and changes no condition.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Callable, Collection
from typing import TypeVar

import structlog

from flyball.contracts.clock import Clock
from flyball.contracts.errors import FlyballError
from host_daemon.probes.findings import NotAvailableError, Probe, Reading, ended_by_reboot, news, over
from host_daemon.store.condition_book import ConditionBook
from host_daemon.store.facts import Facts

MARKS_FACT = "probe_marks"  # JSON: by probe
RETRY_S = 30.0  # a probe that has nothing to read: a driver may be loaded later

T = TypeVar("T")
_log = structlog.get_logger(__name__)


async def in_thread(work: Callable[[], T], *, deadline_s: float, name: str) -> T:
    """Run blocking work in a thread that nobody has to wait for at the end. While it takes longer than its deadline,
    this says so once, and waits: a second thread would hang as well."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def settle(call: Callable[[], None]) -> None:
        def in_loop() -> None:
            if not done.done():
                call()

        with contextlib.suppress(RuntimeError):  # the loop is closed: the daemon has ended
            loop.call_soon_threadsafe(in_loop)

    def run() -> None:
        try:
            result = work()
        except BaseException as error:  # noqa: BLE001 - it is raised where the result is awaited
            settle(lambda caught=error: done.set_exception(caught))  # type: ignore[misc]
        else:
            settle(lambda: done.set_result(result))

    threading.Thread(target=run, name=name, daemon=True).start()
    # Python 3.11's wait_for may swallow a cancellation if the result comes at the same moment.
    in_time, _ = await asyncio.wait((done,), timeout=deadline_s)
    if not in_time:
        _log.warning("probe_overdue", probe=name, deadline_s=deadline_s, note="it says nothing until it returns")
        await asyncio.wait((done,))
        _log.info("probe_returned", probe=name)
    return done.result()


def availability(probe: Probe) -> str:
    """'' if the probe can read here, else why not. Blocks, at most for the probe's deadline."""
    said: list[str] = []

    def run() -> None:
        try:
            probe.read()
        except (NotAvailableError, OSError) as error:
            said.append(str(error))
        else:
            said.append("")

    thread = threading.Thread(target=run, name=probe.source, daemon=True)
    thread.start()
    thread.join(probe.deadline_s)
    return said[0] if said else f"it did not answer within {probe.deadline_s:g} s"


class Probing:
    """Turns readings into conditions."""

    def __init__(self, book: ConditionBook, facts: Facts, clock: Clock, wake: Callable[[], None]) -> None:
        """`wake` triggers a report."""
        self._book = book
        self._facts = facts
        self._clock = clock
        self._wake = wake
        self._troubles: dict[str, str] = {}  # probe -> what was logged last
        self._marks: dict[str, str] = {}
        self._changing = asyncio.Lock()
        self._tried: dict[str, asyncio.Event] = {}  # probe -> whether its first reading is over, well or not
        self._read: set[str] = set()  # the probes that have read something
        self._all_tried = False

    async def marks(self, *, keep: bool) -> dict[str, str]:
        """How far the probes of earlier daemons had read, by source. `keep`: this is still the same boot."""
        self._marks = json.loads(await self._facts.get(MARKS_FACT) or "{}") if keep else {}
        return dict(self._marks)

    async def run(self, probes: Collection[Probe], *, rebooted: bool) -> None:
        """Run until cancelled. `rebooted`: since an earlier daemon of this folder reported."""
        for condition in ended_by_reboot(self._book.standing.values()) if rebooted else ():
            await self._book.end(condition)
        self._tried = {probe.source: asyncio.Event() for probe in probes}
        async with asyncio.TaskGroup() as group:
            for probe in probes:
                group.create_task(self._watch(probe))
            group.create_task(self._say_who_reads(max((probe.deadline_s for probe in probes), default=0.0)))

    async def _say_who_reads(self, longest_s: float) -> None:
        """Say together what the first readings showed; a probe that hangs, or cannot read yet, follows later."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(longest_s):
                for tried in self._tried.values():
                    await tried.wait()
        self._all_tried = True
        await self._book.looked(sorted(self._read))

    async def _watch(self, probe: Probe) -> None:
        while True:
            pause_s = probe.interval_s
            try:
                reading = await in_thread(probe.read, deadline_s=probe.deadline_s, name=probe.source)
            except (NotAvailableError, OSError) as error:
                self._note(probe, str(error))
                pause_s = max(pause_s, RETRY_S)
            except Exception as error:  # noqa: BLE001 - a fault of one probe must not end the daemon
                self._note(probe, repr(error), is_fault=True)
                pause_s = max(pause_s, RETRY_S)
            else:
                self._note(probe, "")
                await self._take(probe.source, reading)
                self._read.add(probe.source)
                if self._all_tried:
                    await self._book.looked((probe.source,))
            self._tried[probe.source].set()
            await asyncio.sleep(pause_s)

    async def _take(self, source: str, reading: Reading) -> None:
        async with self._changing:
            now = self._clock.wall_s()
            found = news(self._book.standing, source, reading, now, self._book.boot)
            try:
                if gone := over(self._book.standing, now):
                    await self._book.forget(gone)
                for condition in found.ended:
                    await self._book.end(condition)
                for condition in found.began:
                    await self._book.begin(condition)
                if reading.mark != self._marks.get(source, ""):
                    self._marks[source] = reading.mark
                    await self._facts.set(MARKS_FACT, json.dumps(self._marks))
            except FlyballError as error:
                _log.error("conditions_not_stored", error=str(error))
        if found.began or found.ended:
            self._wake()

    def _note(self, probe: Probe, trouble: str, *, is_fault: bool = False) -> None:
        """Log a change, not every repetition, nor what this host never had: `flyball doctor` says that."""
        before = self._troubles.get(probe.source, None if trouble and not is_fault else "")
        self._troubles[probe.source] = trouble
        if before in (trouble, None):
            return
        if not trouble:
            _log.info("probe_works", probe=probe.source)
        elif is_fault:
            _log.error("probe_failed", probe=probe.source, error=trouble)
        else:
            _log.info("probe_not_available", probe=probe.source, why=trouble)
