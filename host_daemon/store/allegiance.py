"""The supervisor that this daemon obeys, and what it reports when that supervisor's database knows less."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import structlog

from flyball.contracts.clock import Clock
from flyball.contracts.decisions import Command, CommandBatch
from flyball.contracts.identity import HostId
from flyball.contracts.reports.standings import HeldJob, HostStanding, LastObeyed
from host_daemon.store.command_journal import CommandJournal
from host_daemon.store.condition_book import ConditionBook
from host_daemon.store.facts import Facts
from host_daemon.store.outbox import SignalOutbox
from host_daemon.store.worker_records import WorkerRecords

REPORT_AGAIN_S = 0.5
DATABASE_FACT = "database"  # incarnation of the database that replied last

_log = structlog.get_logger(__name__)


class Allegiance:
    """Call `load` first."""

    def __init__(
        self,
        *,
        host_id: HostId,
        incarnation: str,
        clock: Clock,
        facts: Facts,
        journal: CommandJournal,
        records: WorkerRecords,
        outbox: SignalOutbox,
        book: ConditionBook,
        held: Callable[[float], tuple[HeldJob, ...]],
        wake: Callable[[], None],
    ) -> None:
        """`held(now)` returns the jobs of this host; `wake` triggers a report."""
        self._host_id = host_id
        self._incarnation = incarnation
        self._clock = clock
        self._facts = facts
        self._journal = journal
        self._records = records
        self._outbox = outbox
        self._book = book
        self._held = held
        self._wake = wake
        self._database = ""
        self._replied_at_s = clock.monotonic_s()
        self.obeyed = LastObeyed()

    async def load(self) -> None:
        """Continue where an earlier daemon of this folder stopped."""
        self.obeyed = await self._journal.obeyed()
        self._database = await self._facts.get(DATABASE_FACT) or ""

    async def answered(self, batch: CommandBatch) -> None:
        """Record who replied to a poll. Another database incarnation may be an older copy that lost committed signals,
        so they are sent again. The first one may know the host with another state folder. Raises FlyballError when the
        disk is full."""
        if batch.cluster == self.obeyed.cluster or not self.obeyed.cluster:
            self._replied_at_s = self._clock.monotonic_s()
        if batch.incarnation and batch.incarnation != self._database:
            if self._database:
                await self._outbox.send_again()
            await self._book.say_again(is_new_folder=not self._database)
            self._wake()
            await self._facts.set(DATABASE_FACT, batch.incarnation)
            self._database = batch.incarnation

    @property
    def has_gap(self) -> bool:
        """Whether the database lacks signals that it once committed and that this host can no longer send."""
        return self._outbox.has_gap

    def begun(self, command: Command, cluster: str) -> None:
        """Record that a command was written to the journal."""
        self.obeyed = self.obeyed.after(command, cluster)

    async def standing(self) -> HostStanding:
        """All that a supervisor needs to continue from here. Raises FlyballError."""
        ended: Mapping[str, int] = await self._records.ended()
        _log.warning("supervisor_is_behind", cluster=self.obeyed.cluster, epoch=self.obeyed.epoch)
        return HostStanding(
            host_id=self._host_id,
            incarnation=self._incarnation,
            at=self._clock.wall_s(),
            obeyed=self.obeyed,
            unanswered_s=self._clock.monotonic_s() - self._replied_at_s,
            jobs=self._held(self._clock.wall_s()),
            ended=ended,
            end_seals=await self._records.end_seals(),
            committed=self._outbox.forgotten(),
        )
