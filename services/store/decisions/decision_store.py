"""The controller's side of the database: the lease, the view, and the transaction that stores a round."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence

import structlog
from sqlalchemy import Connection, select

from flyball.contracts.clock import Clock
from flyball.contracts.errors import StaleEpoch
from flyball.contracts.events import Event, EventKind
from flyball.contracts.reports.signals import Signal, SignalUnreadable
from services.actuator.ports import PlaybookStep
from services.controller.replay import RoundInputs
from services.controller.round.focus import Focus
from services.controller.round.view import Outcome, View
from services.record import signal_events
from services.record.signal_events import SignalKey
from services.rules.grant_seals import GrantSeals
from services.rules.stream import Cursor, LeaseGrant
from services.store.decisions import (
    audit_store,
    check_store,
    condition_store,
    order_store,
    outcome_writer,
    rounds,
    signal_writer,
    standing_store,
)
from services.store.decisions.view_loader import ViewLoader
from services.store.sql import events, lease
from services.store.sql.database import Database
from services.store.sql.kept_reads import KeptReads
from services.store.sql.lease import CONTROLLER, ControllerLease
from services.store.sql.rows import upsert
from services.store.sql.shared_reads import GivenPlans
from services.store.sql.tables import cursors

_log = structlog.get_logger(__name__)


class SqlDecisionStore:
    """A `DecisionStore`. One per controller process: it remembers whether this process has held the lease."""

    def __init__(self, db: Database, clock: Clock, seals: GrantSeals) -> None:
        self._db = db
        self._clock = clock
        self._seals = seals
        self._lease = ControllerLease(clock)
        self._views = ViewLoader(clock, seals)
        self._reads, self._plans = KeptReads(), GivenPlans()
        self._revision = 0  # of the newest view
        self._is_elected = threading.Event()  # since the last view; another thread may renew the lease

    def acquire_lease(self, holder: str, ttl_s: float) -> LeaseGrant | None:
        """Take or renew the lease. Return None while another holds it. `holder`: "name#incarnation", see
        `ControllerLease`."""

        def work(connection: Connection) -> LeaseGrant | None:
            acquired = self._lease.acquire(connection, holder, ttl_s)
            if acquired is None:
                return None
            if acquired.is_new:
                self._is_elected.set()
                elected = Event(
                    at=self._clock.wall_s(),
                    kind=EventKind.CONTROLLER_ELECTED,
                    data={"epoch": acquired.grant.epoch, "holder": holder},
                )
                events.append(connection, [elected])
            return acquired.grant

        return self._db.transact(work)

    def release_lease(self, holder: str) -> None:
        """Let another controller take over at once. Does nothing if `holder` no longer has the lease."""
        self._db.transact(lambda connection: lease.release(connection, holder))

    def went_back(self, holder: str) -> None:
        """Drop all caches and release the lease, after an older copy replaced the database: a new epoch must begin."""
        self._views = ViewLoader(self._clock, self._seals)
        self._reads, self._plans = KeptReads(), GivenPlans()
        self._revision = 0
        self.release_lease(holder)

    def cursor(self) -> Cursor | None:
        """Return the cursor up to which signals are stored with their decisions, None before the first."""
        with self._db.read() as connection:
            row = connection.execute(select(cursors).where(cursors.c.name == CONTROLLER)).first()
        return Cursor(row.stream, row.position) if row is not None else None

    def revision(self) -> int:
        """Return a number that changes whenever a view loaded now might differ from an earlier one."""
        with self._db.read() as connection:
            return events.revision(connection)

    def load_view(
        self, focus: Focus | None = None, *, anew: bool = True, yields: Callable[[], bool] | None = None
    ) -> View:
        """Read the policy's input in one snapshot: everything, or what the round is about. For more than a thousand
        hosts, see `HostCache`. Without `anew`, tables that no transaction changed are not read again. Raises
        BrokenOff, see the port."""
        if self._is_elected.is_set():
            self._is_elected.clear()
            self._views.expire_all_hosts()
        with self._db.read() as connection:
            reads = self._reads.begin(connection, anew=anew, yields=yields)
            self._revision = events.revision(reads)
            return self._views.load(reads, focus)

    def running_jobs(self) -> list[tuple[str, int]]:
        """Return the jobs that have ranks, each with its number of ranks, as of the last view."""
        return self._views.running_jobs()

    def unseen(self, signals: Sequence[Signal]) -> list[Signal]:
        """Return the signals that are not stored yet, each once, in order. Replaces those that no column can hold, so
        that one of them cannot block all later signals."""
        first: dict[SignalKey, Signal] = {}
        for signal in signal_events.storable(signals):
            first.setdefault(signal_events.key_of(signal), signal)
        with self._db.read() as connection:
            known = signal_writer.known_keys(connection, list(first.values()))
        fresh = [signal for key, signal in first.items() if key not in known]
        for signal in fresh:
            if isinstance(signal.body, SignalUnreadable):
                of = {"source": signal.source, "incarnation": signal.incarnation, "seq": signal.seq}
                _log.error("signal_unreadable", kind=signal.body.kind, why=signal.body.reason, **of)
        return fresh

    def commit(
        self,
        *,
        epoch: int,
        now: float,
        signals: Sequence[Signal],
        cursor: Cursor | None,
        outcome: Outcome,
        first_steps: Mapping[str, PlaybookStep],
        inputs: RoundInputs | None = None,
    ) -> None:
        """Store a round of the policy in one transaction. Raises StaleEpoch if a newer controller took the lease.

        `signals`: unseen ones. `cursor`: after the last signal read, seen or not. `inputs`: kept for replays.
        """
        packed = rounds.pack(inputs) if inputs is not None else None

        def work(connection: Connection) -> None:
            issuer = lease.check_epoch(connection, epoch)
            if events.revision(connection) < self._revision:
                raise StaleEpoch("The database is older than the view of this round.", hint="nothing to do")
            news: list[Event] = []
            news += outcome_writer.store_hosts(connection, outcome.hosts, now)
            news += condition_store.store(connection, outcome.conditions, now)
            news += signal_writer.store(connection, signals, now)
            signal_writer.store_exits(connection, signals, self._plans)
            audit_store.note_signals(connection, signals, now)
            if cursor is not None:
                row = {"name": CONTROLLER, "stream": cursor.stream, "position": cursor.position}
                upsert(connection, cursors, [row], replace=("stream", "position"))
            news += outcome_writer.store_incidents(connection, outcome.incidents, outcome.decisions)
            news += outcome_writer.supersede(connection, outcome.superseded_actions, now)
            news += outcome_writer.store_decisions(connection, outcome.decisions, epoch)
            check_store.store(connection, outcome.checks)
            check_store.begin(connection, outcome.decisions)
            news += outcome_writer.store_actions(
                connection, outcome.decisions, first_steps, issuer=issuer, seals=self._seals, now=now
            )
            news += outcome_writer.store_jobs(connection, outcome.jobs, now)
            if outcome.adoption is not None:
                news += standing_store.adopt(connection, outcome.adoption, now)
            standing_store.need(connection, outcome, now)
            outcome_writer.forget_standings(connection, outcome.withdrawn)
            order_store.store(connection, outcome.orders, now)
            if packed is not None:
                rounds.store(connection, packed, signals, epoch=epoch, now=now)
            events.append(connection, [*news, *outcome.events])
            if outcome.conditions:
                condition_store.mark_changed(connection)

        self._views.expire_hosts(change.host_id for change in outcome.hosts)
        if outcome.checks or any(decision.action and decision.action.check for decision in outcome.decisions):
            self._views.expire_checks()
        self._db.transact(work)

    def keep_round(self, inputs: RoundInputs, signals: Sequence[Signal], *, epoch: int, now: float) -> None:
        """Keep the inputs of a round that is stored already. Raises StaleEpoch if a newer controller leads, whose
        rounds must get higher numbers."""
        packed = rounds.pack(inputs)

        def work(connection: Connection) -> None:
            lease.check_epoch(connection, epoch)
            rounds.store(connection, packed, signals, epoch=epoch, now=now)

        self._db.transact(work)
