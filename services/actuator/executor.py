"""Carries out actions: asks the playbook for the next move of each, and stores it."""

from __future__ import annotations

import threading

import msgspec
import structlog

from flyball import backoff
from flyball.contracts.clock import Clock
from services.actuator.ports import ActionProgress, ActionStore, PlaybookStep
from services.actuator.rules.moves import end
from services.actuator.rules.playbook import advance
from services.rules.incident_states import ActionEvent
from services.rules.stream import Wakeup
from services.runtime.outages import FIRST_PAUSE_S, LONGEST_PAUSE_S, OUTAGES, Outage

POLL_S = 0.05  # how often to look for writes of other processes; in this process a wake-up comes first
AGAIN_S = 0.005  # after a move: the next one may need no answer
AWAY_AFTER_S = 5.0  # without a look at the actions: answers could not arrive meanwhile
LONG_LOOK_S = 0.1  # after a longer look (very many hosts), rest twice as long for the other threads
LONGEST_REST_S = 1.0  # the look may only have waited for a lock
MAX_FAULTS = 5  # of one action; then it fails

log = structlog.get_logger(__name__)


class _Faulty(msgspec.Struct):
    """An action whose next move raised an exception."""

    times: int = 0
    try_at: float = 0.0


class Executor:
    """Any number may run: a move is stored by compare-and-set, and its commands are the same whoever writes them."""

    def __init__(self, *, store: ActionStore, wakeup: Wakeup, clock: Clock) -> None:
        self._store = store
        self._wakeup = wakeup
        self._clock = clock
        self._watched_since = 0.0
        self._looked_at = 0.0
        self._faulty: dict[str, _Faulty] = {}

    def run(self, stop: threading.Event) -> None:
        """Run until stopped. Outages of the database are waited out."""
        outage = Outage("executor", self._clock)
        while not stop.is_set():
            began_s = self._clock.monotonic_s()
            try:
                wait_s = self.run_once()
                outage.ended()
            except OUTAGES as error:
                wait_s = outage.pause_s(error)
            else:
                took_s = self._clock.monotonic_s() - began_s
                if took_s > LONG_LOOK_S:  # every answer of a host wakes it up
                    stop.wait(min(2.0 * took_s, LONGEST_REST_S))
            self._wakeup.wait("actions", wait_s)

    def run_once(self) -> float:
        """Make one move of every open action; returns how many seconds to wait for the next look, unless woken."""
        began = self._clock.wall_s()
        found = self._store.open_actions()
        if began - self._looked_at > AWAY_AFTER_S:
            self._watched_since = began
        self._faulty = {p.action_id: self._faulty[p.action_id] for p in found if p.action_id in self._faulty}
        waits_s = [self._move(msgspec.structs.replace(p, watched_since=self._watched_since)) for p in found]
        self._looked_at = self._clock.wall_s()
        return min(waits_s, default=POLL_S)

    def _move(self, progress: ActionProgress) -> float:
        """Make one move. An action whose move raises must not hold up the others: it is retried a few times, then
        fails, and the policy decides again."""
        now = self._clock.wall_s()
        faulty = self._faulty.get(progress.action_id, _Faulty())
        if now < faulty.try_at:
            return min(POLL_S, faulty.try_at - now)
        try:
            wait_s = self._advance(progress, now) if faulty.times < MAX_FAULTS else self._give_up(progress, now)
        except OUTAGES:
            raise
        except Exception as error:
            times = faulty.times + 1
            pause_s = backoff.pause_s(times, first_s=FIRST_PAUSE_S, longest_s=LONGEST_PAUSE_S)
            self._faulty[progress.action_id] = _Faulty(min(times, MAX_FAULTS), now + pause_s)
            log.exception(
                "action_cannot_be_moved",
                action_id=progress.action_id,
                decision_id=progress.decision_id,
                incident_id=progress.incident_id,
                job=progress.plan.job,
                phase=progress.phase,
                error=str(error),
            )
            return POLL_S
        self._faulty.pop(progress.action_id, None)
        return wait_s

    def _advance(self, progress: ActionProgress, now: float) -> float:
        step = advance(progress, now)
        if _waits(progress, step):
            return min(POLL_S, max(AGAIN_S, step.wake_at - now)) if step.wake_at > 0.0 else POLL_S
        if self._store.apply(progress, step, now):
            self._announce(progress, step)
        return AGAIN_S

    def _give_up(self, progress: ActionProgress, now: float) -> float:
        step = end(
            progress,
            ActionEvent.FAILED,
            f"Its next move failed {MAX_FAULTS} times; see the supervisor's log.",
        )
        if self._store.apply(progress, step, now):
            self._announce(progress, step)
        return AGAIN_S

    def _announce(self, progress: ActionProgress, step: PlaybookStep) -> None:
        log.info(
            "action_moved",
            action_id=progress.action_id,
            incident_id=progress.incident_id,
            job=progress.plan.job,
            phase=step.phase,
            state=step.state.value,
            commands=len(step.commands),
            message=step.message,
        )
        if step.commands:
            self._wakeup.notify("commands", {draft.host_id for draft in step.commands})
        if step.state.ended:
            self._wakeup.notify("signals")  # the controller's turn
        self._wakeup.notify("events")


def _waits(progress: ActionProgress, step: PlaybookStep) -> bool:
    """Whether the step changes nothing, because answers are missing."""
    return (
        not step.commands
        and not step.events
        and step.placement is None
        and (step.phase, step.state, step.attempt) == (progress.phase, progress.state, progress.attempt)
    )
