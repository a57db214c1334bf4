"""The controller's loop: lead, read signals, let the policy decide, store all of it at once, wake the others.

Nothing is kept here that a restart would miss. What is cached is dropped whenever the lease was lost.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence

import structlog

from flyball.contracts.checkpoints import Tier
from flyball.contracts.clock import Clock
from flyball.contracts.decisions import ActionState
from flyball.contracts.errors import StaleEpoch
from flyball.contracts.fault_points import reach
from services.actuator.playbook import advance
from services.actuator.ports import ActionProgress, PlaybookStep
from services.controller.policy import decide
from services.controller.ports import Cursor, DecisionStore, Delivered, LeaseGrant, SignalBus, Wakeup
from services.controller.view import Outcome, PolicySettings, View
from services.runtime.outages import OUTAGES, Outage

BATCH = 256  # signals per round
POLL_S = 0.05  # how often to look for what other processes wrote; within the process a wake-up comes first
AGAIN_S = 0.01  # after a round that changed something: the next one sees what followed from it
DECIDE_AT_LEAST_EVERY_S = 1.0  # also when nothing changed, should a rule wait for a time that it did not name
RENEWALS_PER_TTL = 3

log = structlog.get_logger(__name__)


class ControllerLoop:
    """Runs in any number of processes; the one that holds the lease decides.

    `holder` is "name#incarnation": who starts again under its old name leads at once.
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
        self._holder = holder
        self._lease_ttl_s = lease_ttl_s
        self._grant: LeaseGrant | None = None
        self._renew_at_s = 0.0
        self._cursor: Cursor | None = None
        self._revision = -1  # that the last view showed
        self._decide_by_s = 0.0
        self._wake_at = 0.0
        self._poll_s = POLL_S

    def run(self, stop: threading.Event) -> None:
        """Until stopped; then the lease is given back. An outage of the database or the bus is waited out."""
        outage = Outage("controller", self._clock)
        while not stop.is_set():
            try:
                wait_s = self.run_once()
                outage.ended()
            except OUTAGES as error:
                wait_s = outage.pause_s(error)
            self._wakeup.wait("signals", wait_s)
        if self._grant is not None:
            self._step_down("stopped")
            try:
                self._store.release_lease(self._holder)
            except OUTAGES as error:
                log.warning("lease_not_released", error=str(error), until=f"it ends by itself in {self._lease_ttl_s} s")

    def run_once(self) -> float:
        """One round; how long to wait for the next, in seconds, unless woken."""
        grant = self._lead()
        if grant is None:
            return self._lease_ttl_s / RENEWALS_PER_TTL
        try:
            return self._round(grant)
        except StaleEpoch as error:
            self._step_down(str(error))
            return POLL_S

    def _lead(self) -> LeaseGrant | None:
        now_s = self._clock.monotonic_s()
        if self._grant is None or now_s >= self._renew_at_s:
            grant = self._store.acquire_lease(self._holder, self._lease_ttl_s)
            if grant is None:
                self._step_down("another controller holds the lease")
                return None
            self._renew_at_s = now_s + self._lease_ttl_s / RENEWALS_PER_TTL
            if self._grant is None or self._grant.epoch != grant.epoch:
                log.info("leading", epoch=grant.epoch, holder=self._holder)
                self._cursor = self._store.cursor()
                self._revision = -1
            self._grant = grant
        if self._clock.monotonic_s() >= self._grant.valid_until_monotonic_s:
            self._step_down("the lease ran out before it was renewed")
        return self._grant

    def _step_down(self, why: str) -> None:
        if self._grant is not None:
            log.warning("not_leading_any_more", epoch=self._grant.epoch, why=why)
        self._grant = None

    def _round(self, grant: LeaseGrant) -> float:
        revision = self._store.revision()  # before the view: what changes in between is looked at again
        delivered = self._bus.read(self._cursor, limit=BATCH)
        if not delivered and not self._is_due(revision):
            return self._wait_s(self._poll_s)
        if delivered:
            reach("controller.after_consume")
        signals = self._store.unseen([d.signal for d in delivered]) if delivered else []
        view = self._store.load_view()
        now = self._clock.wall_s()
        outcome = decide(view, signals, self._settings, now)
        if delivered or not outcome.empty:
            steps = _first_steps(view, outcome, now)
            if self._clock.monotonic_s() >= grant.valid_until_monotonic_s:
                self._step_down("the lease ran out during a round; nothing of it was stored")
                return POLL_S
            cursor = delivered[-1].cursor if delivered else None
            reach("controller.before_commit")
            self._store.commit(
                epoch=grant.epoch, now=now, signals=signals, cursor=cursor, outcome=outcome, first_steps=steps
            )
            reach("controller.after_commit")
            self._announce(outcome, steps)
            self._forget(delivered)
        self._revision = revision
        self._wake_at = outcome.wake_at
        self._decide_by_s = self._clock.monotonic_s() + DECIDE_AT_LEAST_EVERY_S
        return self._wait_s(AGAIN_S if not outcome.empty or len(delivered) == BATCH else self._poll_s)

    def _is_due(self, revision: int) -> bool:
        return (
            revision != self._revision
            or 0.0 < self._wake_at <= self._clock.wall_s()
            or self._clock.monotonic_s() >= self._decide_by_s
        )

    def _wait_s(self, at_most_s: float) -> float:
        if self._wake_at <= 0.0:
            return at_most_s
        return min(at_most_s, max(AGAIN_S, self._wake_at - self._clock.wall_s()))

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
        if any(step.commands for step in steps.values()):
            self._wakeup.notify("commands")
        if outcome.decisions or outcome.superseded_actions:
            self._wakeup.notify("actions")
        self._wakeup.notify("events")

    def _forget(self, delivered: Sequence[Delivered]) -> None:
        if delivered:
            self._cursor = delivered[-1].cursor
            self._bus.trim(self._cursor)


def _first_steps(view: View, outcome: Outcome, now: float) -> dict[str, PlaybookStep]:
    """The first move of every new action, so that its commands are stored together with its decision."""
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
        except Exception:  # the decision stands; the executor tries again, and ends what cannot begin
            log.exception("action_cannot_begin", action_id=action_id, incident_id=decision.incident_id, job=plan.job)
    return steps
