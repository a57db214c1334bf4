"""Watches for notices that the host will be taken away: a file, the metadata service of a cloud, and the taints of the
Kubernetes node."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import structlog

from flyball.contracts.clock import Clock
from flyball.contracts.reports.signals import PreemptionNotice
from host_daemon.probes.findings import NotAvailableError
from host_daemon.probes.notices.cloud_notices import CLOUDS, CloudNotices, Notice
from host_daemon.probes.notices.node_taints import NodeNotices, api_of
from host_daemon.probes.notices.preemption import PreemptionProbe
from host_daemon.probes.probing import in_thread
from host_daemon.settings import DaemonSettings
from host_daemon.store.facts import Facts
from host_daemon.store.outbox import SignalOutbox

FILE_INTERVAL_S = 0.1
CLOUD_INTERVAL_S = 1.0
NODE_INTERVAL_S = 5.0
ANSWER_DEADLINE_S = 10.0
AWAY_INTERVAL_S = 30.0  # no server has answered yet: this may not be that cloud
FILE_FACT = "preemption_notice_told"
CLOUD_FACT = "cloud_notice_told"  # its source; '': none
NODE_FACT = "node_notice_told"

_log = structlog.get_logger(__name__)


class NoticeSource(Protocol):
    """Asks whether the host will be taken away. Blocks; it runs in a thread."""

    def check(self, now: float) -> Notice | None:
        """Raises NotAvailableError if nobody answers."""
        ...


class Notices:
    """Signals each notice once, also across restarts of the daemon."""

    def __init__(
        self,
        settings: DaemonSettings,
        path: Path,
        *,
        facts: Facts,
        outbox: SignalOutbox,
        clock: Clock,
        wake: Callable[[], None],
    ) -> None:
        """`path`: of the file. `wake` triggers a report."""
        cloud = next((cloud for cloud in CLOUDS if cloud == settings.cloud_notices), None)
        self._cloud = CloudNotices(cloud, settings.metadata_url) if cloud is not None else None
        is_in_pod = settings.node_name and settings.kubernetes_url
        self._node = NodeNotices(api_of(settings)) if is_in_pod else None
        self._path = path
        self._facts = facts
        self._outbox = outbox
        self._clock = clock
        self._wake = wake

    async def run(self) -> None:
        """Run until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._watch_file())
            if self._cloud is not None:
                group.create_task(self._watch(self._cloud, CLOUD_FACT, "cloud_notices", CLOUD_INTERVAL_S))
            if self._node is not None:
                group.create_task(self._watch(self._node, NODE_FACT, "node_notices", NODE_INTERVAL_S))

    async def _watch_file(self) -> None:
        probe = PreemptionProbe(self._path, await self._facts.get(FILE_FACT))
        while True:
            notice = probe.check()
            if notice is not None:
                await self._report(notice, FILE_FACT, probe.identity)
            await asyncio.sleep(FILE_INTERVAL_S)

    async def _watch(self, asked: NoticeSource, fact: str, name: str, interval_s: float) -> None:
        reported = await self._facts.get(fact) or ""
        has_answered, logged = bool(reported), ""
        while True:
            try:
                found = await in_thread(
                    lambda: asked.check(self._clock.wall_s()), deadline_s=ANSWER_DEADLINE_S, name=name.replace("_", "-")
                )
            except Exception as error:  # noqa: BLE001 - it says nothing: a notice that was given stands
                is_fault = not isinstance(error, NotAvailableError)
                trouble = f"{name}_failed" if is_fault else f"{name}_not_available"
                if trouble != logged:
                    _log.warning(trouble, why=repr(error) if is_fault else str(error))
                logged = trouble
                await asyncio.sleep(interval_s if has_answered else AWAY_INTERVAL_S)
                continue
            has_answered, logged = True, ""
            if (source := found.source if found is not None else "") != reported:
                notice = found or Notice(0.0, reported)  # 0.0 withdraws it
                await self._report(PreemptionNotice(notice.deadline_at, notice.source), fact, source)
                reported = source
            await asyncio.sleep(interval_s)

    async def _report(self, notice: PreemptionNotice, fact: str, value: str) -> None:
        _log.warning("preemption_notice", deadline_at=notice.deadline_at, source=notice.source)
        await self._outbox.put(notice, also=self._facts.setting(fact, value))
        self._wake()
