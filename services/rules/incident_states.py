"""The state machines of incident, action and host: one transition table each. Any other transition is illegal."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Generic, TypeVar

from flyball.contracts.cluster import HostState
from flyball.contracts.decisions import ActionState, IncidentState
from flyball.contracts.errors import IllegalTransition

State = TypeVar("State", bound=StrEnum)
Happening = TypeVar("Happening", bound=StrEnum)


class Machine(Generic[State, Happening]):
    """The states, the events that each allows, and the states that follow."""

    def __init__(self, name: str, table: Mapping[State, Mapping[Happening, State]]) -> None:
        self.name = name
        self.table = table

    def advance(self, state: State, event: Happening) -> State:
        """The state after `event`. Raises IllegalTransition if the table has no such row."""
        following = self.table[state].get(event)
        if following is None:
            raise IllegalTransition(
                f"{self.name} is {state.value}: {event.value!r} cannot happen to it.",
                hint=f"possible are: {', '.join(e.value for e in self.table[state]) or 'none, it is final'}",
            )
        return following


class IncidentEvent(StrEnum):
    DIAGNOSED = "diagnosed"
    ACTED = "acted"  # an action was decided
    SAVED = "saved"  # the emergency checkpoint is complete; the next decision follows
    LOOKED = "looked"  # where its ranks stand is known as far as it can be; the next decision follows
    ACTION_SUCCEEDED = "action_succeeded"
    ACTION_FAILED = "action_failed"  # or timed out
    SUPERSEDED = "superseded"  # a more urgent decision superseded the action
    FAILED_AGAIN = "failed_again"  # a newer generation failed before steps advanced
    VERIFY_OVERDUE = "verify_overdue"
    STEPS_ADVANCED = "steps_advanced"  # past the failed step, on every rank
    CLEARED = "cleared"  # nothing is left to handle
    GAVE_UP = "gave_up"


class ActionEvent(StrEnum):
    BEGAN = "began"  # the first commands are in the outbox
    ANSWERED = "answered"  # every host has acknowledged its command
    COMPLETED = "completed"
    FAILED = "failed"
    DEADLINE_PASSED = "deadline_passed"
    SUPERSEDED = "superseded"


class HostEvent(StrEnum):
    SUSPECTED = "suspected"
    TRUSTED = "trusted"
    FELL_SILENT = "fell_silent"
    REJOINED = "rejoined"  # reports again, with ranks that are still current
    RETURNED = "returned"  # reports again, without ranks
    RETURNED_BUSY = "returned_busy"  # reports again, with superseded workers
    CLEANED = "cleaned"  # its superseded workers are gone
    DEGRADED = "degraded"
    CORDONED = "cordoned"
    RELEASED = "released"
    ASSIGNED = "assigned"  # got ranks


_I, _IE = IncidentState, IncidentEvent
_END_OF_INCIDENT = {_IE.CLEARED: _I.RESOLVED, _IE.GAVE_UP: _I.ESCALATED}

INCIDENT = Machine[IncidentState, IncidentEvent](
    "the incident",
    {
        _I.OPEN: {_IE.DIAGNOSED: _I.DECIDING, **_END_OF_INCIDENT},
        _I.DECIDING: {_IE.ACTED: _I.ACTING, _IE.FAILED_AGAIN: _I.DECIDING, **_END_OF_INCIDENT},
        _I.ACTING: {
            _IE.ACTION_SUCCEEDED: _I.VERIFYING,
            _IE.SAVED: _I.DECIDING,
            _IE.LOOKED: _I.DECIDING,
            _IE.ACTION_FAILED: _I.DECIDING,
            _IE.SUPERSEDED: _I.DECIDING,
            _IE.FAILED_AGAIN: _I.DECIDING,
            **_END_OF_INCIDENT,
        },
        _I.VERIFYING: {
            _IE.STEPS_ADVANCED: _I.RESOLVED,
            _IE.FAILED_AGAIN: _I.DECIDING,
            _IE.VERIFY_OVERDUE: _I.DECIDING,
            **_END_OF_INCIDENT,
        },
        _I.RESOLVED: {},
        _I.ESCALATED: {},
    },
)

_A, _AE = ActionState, ActionEvent
_END_OF_ACTION = {
    _AE.COMPLETED: _A.SUCCEEDED,
    _AE.FAILED: _A.FAILED,
    _AE.DEADLINE_PASSED: _A.TIMED_OUT,
    _AE.SUPERSEDED: _A.SUPERSEDED,
}

ACTION = Machine[ActionState, ActionEvent](
    "the action",
    {
        _A.QUEUED: {_AE.BEGAN: _A.DISPATCHED, **_END_OF_ACTION},
        _A.DISPATCHED: {_AE.ANSWERED: _A.ACKNOWLEDGED, **_END_OF_ACTION},
        _A.ACKNOWLEDGED: {_AE.ANSWERED: _A.ACKNOWLEDGED, **_END_OF_ACTION},
        _A.SUCCEEDED: {},
        _A.FAILED: {},
        _A.TIMED_OUT: {},
        _A.SUPERSEDED: {},
    },
)

_H, _HE = HostState, HostEvent
_TROUBLE = {_HE.FELL_SILENT: _H.SILENT, _HE.DEGRADED: _H.DEGRADED, _HE.CORDONED: _H.CORDONED}

HOST = Machine[HostState, HostEvent](
    "the host",
    {
        _H.HEALTHY: {_HE.SUSPECTED: _H.SUSPECT, _HE.ASSIGNED: _H.HEALTHY, **_TROUBLE},
        _H.SUSPECT: {_HE.TRUSTED: _H.HEALTHY, **_TROUBLE},
        _H.SILENT: {
            _HE.REJOINED: _H.HEALTHY,
            _HE.RETURNED: _H.SPARE,
            _HE.RETURNED_BUSY: _H.IN_REPAIR,
            _HE.CORDONED: _H.CORDONED,
        },
        _H.DEGRADED: {_HE.FELL_SILENT: _H.SILENT, _HE.CORDONED: _H.CORDONED, _HE.TRUSTED: _H.HEALTHY},
        _H.CORDONED: {_HE.FELL_SILENT: _H.SILENT, _HE.RELEASED: _H.SPARE},
        _H.IN_REPAIR: {_HE.CLEANED: _H.SPARE, _HE.FELL_SILENT: _H.SILENT, _HE.CORDONED: _H.CORDONED},
        _H.SPARE: {_HE.ASSIGNED: _H.HEALTHY, _HE.SUSPECTED: _H.SUSPECT, **_TROUBLE},
    },
)
