"""The state machines do what their tables say, and nothing else."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flyball.contracts.cluster import HostState
from flyball.contracts.decisions import ActionState, IncidentState
from flyball.contracts.errors import IllegalTransition
from services.rules.incident_states import ACTION, HOST, INCIDENT, ActionEvent, HostEvent, IncidentEvent, Machine

MACHINES = [(INCIDENT, IncidentState, IncidentEvent), (ACTION, ActionState, ActionEvent), (HOST, HostState, HostEvent)]


@pytest.mark.parametrize(("machine", "states", "events"), MACHINES)
def test_only_what_the_table_has(machine: Machine[Any, Any], states: type[StrEnum], events: type[StrEnum]) -> None:
    assert set(machine.table) == set(states)
    for state in states:
        for event in events:
            if event in machine.table[state]:
                assert machine.advance(state, event) is machine.table[state][event]
            else:
                with pytest.raises(IllegalTransition) as caught:
                    machine.advance(state, event)
                assert state.value in caught.value.message and caught.value.hint


@pytest.mark.parametrize(("machine", "states", "events"), MACHINES)
def test_every_state_and_event_is_used(
    machine: Machine[Any, Any], states: type[StrEnum], events: type[StrEnum]
) -> None:
    reached = {machine.table[state][event] for state in machine.table for event in machine.table[state]}
    used = {event for row in machine.table.values() for event in row}
    assert used == set(events)
    assert set(states) - reached <= {IncidentState.OPEN, ActionState.QUEUED}


@given(st.lists(st.sampled_from(list(IncidentEvent)), max_size=30))
def test_a_closed_incident_stays_closed(events: list[IncidentEvent]) -> None:
    state = IncidentState.OPEN
    for event in events:
        try:
            following = INCIDENT.advance(state, event)
        except IllegalTransition:
            continue
        assert not state.closed
        state = following
    if state.closed:
        assert not INCIDENT.table[state]


@given(st.lists(st.sampled_from(list(ActionEvent)), max_size=30))
def test_an_ended_action_stays_ended(events: list[ActionEvent]) -> None:
    state = ActionState.QUEUED
    for event in events:
        try:
            following = ACTION.advance(state, event)
        except IllegalTransition:
            continue
        assert not state.ended
        state = following
