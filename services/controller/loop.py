"""The controller's loop: take the lease, read signals, let the policy decide, commit everything at once, wake the
others.

Keeps nothing that a restart would miss. Caches are dropped whenever the lease was lost.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from math import inf

import structlog

from flyball.contracts.checkpoints import Tier
from flyball.contracts.clock import Clock
from flyball.contracts.decisions import ActionState
from flyball.contracts.errors import StaleEpoch
from flyball.contracts.fault_points import reach
from services.actuator.ports import ActionProgress, PlaybookStep
from services.actuator.rules.playbook import advance
from services.controller.lease_hold import LeaseHold
from services.controller.policy import decide
from services.controller.ports import BrokenOff, DecisionStore
from services.controller.replay import RoundInputs
from services.controller.round.view import Outcome, PolicySettings, View
from services.controller.round_keeper import LONGEST_END_S, RoundKeeper
from services.controller.turns import AGAIN_S, Turns
from services.rules.stream import Cursor, Delivered, LeaseGrant, SignalBus, Wakeup
from services.runtime.loops import LoopThread
from services.runtime.outages import OUTAGES, Outage

BATCH = 256  # signals per round
POLL_S = 0.05  # how often to look for writes of other processes; in this process a wake-up comes first
ANEW_EVERY_S = 5.0  # even if signals never cease: somebody may have changed rows by hand
HOSTS_REPORT_S = 3.0  # after the database was set back: a grant before hosts report may reuse a generation number

log = structlog.get_logger(__name__)


class ControllerLoop:
    """Runs in any number of processes; the one that holds the lease decides.

    `holder` is "name#incarnation": a process that restarts under its name takes its lease back at once.
    """

    def __init__(
        self,
        *,
        store: DecisionStore,
        bus: SignalBus,
        wakeup: Wakeup,
        clock: Clock,
        settings: PolicySettings,
        holder: str,
        lease_ttl_s: float = 3.0,
    ) -> None:
        self._store = store
        self._bus = bus
        self._wakeup = wakeup
        self._clock = clock
        self._settings = settings
        self._lease = LeaseHold(store=store, clock=clock, holder=holder, ttl_s=lease_ttl_s)
        self._rounds = RoundKeeper(store, clock)
        self._epoch: int | None = None  # to which the caches belong
        self._cursor: Cursor | None = None
        self._untrimmed: Cursor | None = None  # up to where the bus may still be trimmed
        self._bus_outage = Outage("controller-bus", clock)
        self._read_bus_at_s = 0.0
        self._revision = 0  # of the database, as last read
        self._resume_at_s = 0.0
        self._anew_at_s = 0.0
        self._turns = Turns()
        self._poll_s = POLL_S

    def run(self, stop: threading.Event) -> None:
        """Run until stopped, then release the lease. Outages of the database or the bus are waited out."""
        outage = Outage("controller", self._clock)
        lease_keeper = LoopThread("lease-keeper", self._lease.keep, self._clock)
        round_keeper = LoopThread("round-keeper", self._rounds.run, self._clock)
        lease_keeper.start()
        round_keeper.start()
        try:
            while not stop.is_set():
                try:
                    wait_s = self.run_once()
                    outage.ended()
                except OUTAGES as error:
                    wait_s = outage.pause_s(error)
                self._is_called(wait_s)
        finally:
            round_keeper.request_stop()
            self._rounds.wake()
            if not round_keeper.join(LONGEST_END_S):
                log.warning("rounds_not_kept", why="the database is slow or away")
            lease_keeper.request_stop()
        self._lease.release()

    def run_once(self) -> float:
        """Run one round; returns how many seconds to wait for the next one, unless woken."""
        grant = self._lease.take()
        if grant is None:
            self._epoch = None
            self._look_at_revision()  # this process may lead next, and must know that the database was set back
            return self._lease.renewal_s
        if grant.epoch != self._epoch:
            self._cursor = self._untrimmed = self._store.cursor()
            self._turns = Turns()
            self._epoch = grant.epoch
        try:
            return self._round(grant)
        except StaleEpoch as error:
            return self._step_down(str(error))

    def _step_down(self, why: str) -> float:
        self._lease.drop(why)
        self._epoch = None
        return POLL_S

    def _round(self, grant: LeaseGrant) -> float:
        if self._look_at_revision():
            self._epoch = None
            self._lease.begin_anew()
            return 0.0
        revision = self._revision  # read before the view: what changes in between triggers another round
        pause_s = self._resume_at_s - self._clock.monotonic_s()
        if pause_s > 0.0:
            return min(pause_s, self._poll_s)
        delivered = self._read_bus()
        began_s = self._clock.monotonic_s()
        if not delivered and not self._turns.is_due(revision, began_s):
            return self._turns.wait_s(self._poll_s, began_s)
        if delivered:
            reach("controller.after_consume")
        signals = self._store.unseen([d.signal for d in delivered]) if delivered else []
        focus = self._turns.focus(self._store.running_jobs(), signals, revision, began_s, is_news=bool(delivered))
        anew = not delivered or began_s >= self._anew_at_s
        if anew:
            self._anew_at_s = began_s + ANEW_EVERY_S
        yields = self._is_called if not delivered and self._turns.may_yield(focus, began_s) else None
        try:
            view = self._store.load_view(focus, anew=anew, yields=yields)
        except BrokenOff:
            return 0.0
        now = self._clock.wall_s()
        outcome = decide(view, signals, self._settings, now)
        if delivered or not outcome.empty:
            steps = _first_steps(view, outcome, now)
            confirmed = self._lease.confirm(grant)
            if confirmed is None:
                return self._step_down("the lease was lost during a round, which was not stored")
            cursor = delivered[-1].cursor if delivered else None
            reach("controller.before_commit")
            inputs = RoundInputs(view, self._settings) if signals or not outcome.empty else None
            kept_later = inputs if inputs is not None and self._rounds.takes(inputs) else None
            self._store.commit(
                epoch=confirmed.epoch,
                now=now,
                signals=signals,
                cursor=cursor,
                outcome=outcome,
                first_steps=steps,
                inputs=inputs if kept_later is None else None,
            )
            reach("controller.after_commit")
            self._announce(outcome, steps)
            if kept_later is not None:
                self._rounds.keep(kept_later, signals, epoch=confirmed.epoch, now=now)
            self._forget(delivered)
        goes_on = not outcome.empty or len(delivered) == BATCH
        ended_s = self._clock.monotonic_s()
        wake_s = ended_s + (outcome.wake_at - self._clock.wall_s()) if outcome.wake_at else inf
        self._turns.looked(focus, took_s=ended_s - began_s, now_s=ended_s, wake_s=wake_s, goes_on=goes_on)
        return self._turns.wait_s(AGAIN_S if goes_on else self._poll_s, ended_s)

    def _is_called(self, within_s: float = 0.0) -> bool:
        """Whether signals come, or an actuator's action ends."""
        if is_called := self._wakeup.wait("signals", within_s):
            self._turns.call()
        return is_called

    def _look_at_revision(self) -> bool:
        """Whether an older database took the place of this one. Hosts know what it forgot, and report it."""
        before, self._revision = self._revision, self._store.revision()
        if self._revision >= before:
            return False
        self._resume_at_s = self._clock.monotonic_s() + HOSTS_REPORT_S
        return True

    def _read_bus(self) -> list[Delivered]:
        """The next signals; none during an outage of the bus, so that rounds without signals continue. Senders keep
        their signals meanwhile."""
        now_s = self._clock.monotonic_s()
        if now_s < self._read_bus_at_s:
            return []
        try:
            if self._untrimmed is not None:  # otherwise a full bus that is read to its end would stay full
                self._bus.trim(self._untrimmed)
                self._untrimmed = None
            delivered = self._bus.read(self._cursor, limit=BATCH)
        except OUTAGES as error:
            self._read_bus_at_s = self._clock.monotonic_s() + self._bus_outage.pause_s(error)
            return []
        self._bus_outage.ended()
        return delivered

    def _announce(self, outcome: Outcome, steps: Mapping[str, PlaybookStep]) -> None:
        for decision in outcome.decisions:
            log.info(
                "decided",
                decision_id=decision.decision_id,
                incident_id=decision.incident_id,
                job=decision.job,
                kind=decision.kind.value,
                rule=decision.rule,
                reason=decision.reason,
            )
        asked = (change.host_id for change in outcome.words if change.is_needed)  # with their next poll
        if hosts := {*asked, *(draft.host_id for step in steps.values() for draft in step.commands)}:
            self._wakeup.notify("commands", hosts)
        if outcome.decisions or outcome.superseded_actions:
            self._wakeup.notify("actions")
        self._wakeup.notify("events")

    def _forget(self, delivered: Sequence[Delivered]) -> None:
        if delivered:
            self._cursor = self._untrimmed = delivered[-1].cursor
            try:
                self._bus.trim(self._cursor)
                self._untrimmed = None
            except OUTAGES as error:  # the round is stored; the next read trims the bus
                log.warning("stream_not_trimmed", error=str(error))


def _first_steps(view: View, outcome: Outcome, now: float) -> dict[str, PlaybookStep]:
    """The first move of every new action, so that its commands are committed together with its decision."""
    addresses = {host.host_id: host.engine_address for host in view.hosts if host.engine_address}
    steps = {}
    for decision in outcome.decisions:
        plan = decision.action
        if plan is None:
            continue
        action_id = f"act-{decision.decision_id.removeprefix('dec-')}"
        progress = ActionProgress(
            action_id=action_id,
            decision_id=decision.decision_id,
            incident_id=decision.incident_id,
            plan=plan,
            state=ActionState.QUEUED,
            phase="",
            version=0,
            started_at=decision.at,
            commands=(),
            persistent_copies=tuple(c for c in view.copies if c.tier is Tier.PERSISTENT and c.job == plan.job),
            engine_addresses=addresses,
        )
        try:
            steps[action_id] = advance(progress, now)
        except Exception:  # the decision stands; the executor retries, and fails the action in the end
            log.exception("action_cannot_begin", action_id=action_id, incident_id=decision.incident_id, job=plan.job)
    return steps
