"""Carries out actions: asks the playbook for the next move of each, and stores it."""

from __future__ import annotations

import threading

import structlog

from flyball.contracts.clock import Clock
from services.actuator.playbook import advance
from services.actuator.ports import ActionProgress, ActionStore, PlaybookStep
from services.controller.ports import Wakeup
from services.runtime.outages import OUTAGES, Outage

POLL_S = 0.05  # how often to look for what other processes wrote; within the process a wake-up comes first
AGAIN_S = 0.005  # after a move: the next one may follow from it without any answer

_log = structlog.get_logger(__name__)


class Executor:
    """Any number of them may run: a move is compare-and-set, and commands are the same whoever writes them."""

    def __init__(self, *, store: ActionStore, wakeup: Wakeup, clock: Clock) -> None:
        self._store = store
        self._wakeup = wakeup
        self._clock = clock

    def run(self, stop: threading.Event) -> None:
        """Until stopped. An outage of the database is waited out."""
        outage = Outage("executor", self._clock)
        while not stop.is_set():
            try:
                wait_s = self.run_once()
                outage.ended()
            except OUTAGES as error:
                wait_s = outage.pause_s(error)
            self._wakeup.wait("actions", wait_s)

    def run_once(self) -> float:
        """Move every open action on by one; how long to wait for the next look, in seconds, unless woken."""
        wait_s = POLL_S
        for progress in self._store.open_actions():
            now = self._clock.wall_s()
            step = advance(progress, now)
            if _waits(progress, step):
                if step.wake_at > 0.0:
                    wait_s = min(wait_s, max(AGAIN_S, step.wake_at - now))
            else:
                wait_s = min(wait_s, AGAIN_S)
                if self._store.apply(progress, step, now):
                    self._announce(progress, step)
        return wait_s

    def _announce(self, progress: ActionProgress, step: PlaybookStep) -> None:
        _log.info(
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
            self._wakeup.notify("commands")
        if step.state.ended:
            self._wakeup.notify("signals")  # the controller's turn
        self._wakeup.notify("events")


def _waits(progress: ActionProgress, step: PlaybookStep) -> bool:
    """Whether the step changes nothing: hosts have to answer first."""
    return (
        not step.commands
        and not step.events
        and step.placement is None
        and (step.phase, step.state, step.attempt) == (progress.phase, progress.state, progress.attempt)
    )
