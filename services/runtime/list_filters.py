"""What users ask of a list, besides the page. A default asks for everything. Conditions of one filter all apply."""

from __future__ import annotations

import msgspec

from flyball.contracts.cluster import HostState, JobState
from flyball.contracts.decisions import ActionState, DecisionKind, IncidentState
from flyball.contracts.orders import OrderKind, OrderState

OPEN_INCIDENTS = tuple(state for state in IncidentState if not state.closed)


class JobFilter(msgspec.Struct, frozen=True):
    states: tuple[JobState, ...] = ()
    since: float = 0.0  # submitted then or later, wall clock


class HostFilter(msgspec.Struct, frozen=True):
    states: tuple[HostState, ...] = ()
    failure_domain: str = ""
    job: str = ""  # has ranks on it
    host_ids: tuple[str, ...] = ()


class IncidentFilter(msgspec.Struct, frozen=True):
    states: tuple[IncidentState, ...] = ()
    host_id: str = ""
    cause: str = ""
    since: float = 0.0  # opened then or later


class DecisionFilter(msgspec.Struct, frozen=True):
    kinds: tuple[DecisionKind, ...] = ()
    incident_id: str = ""
    since: float = 0.0


class ActionFilter(msgspec.Struct, frozen=True):
    job: str = ""
    states: tuple[ActionState, ...] = ()
    incident_id: str = ""
    since: float = 0.0  # started then or later


class SignalFilter(msgspec.Struct, frozen=True):
    job: str = ""
    host_id: str = ""
    kind: str = ""
    since: float = 0.0  # stored then or later


class OrderFilter(msgspec.Struct, frozen=True):
    kinds: tuple[OrderKind, ...] = ()
    states: tuple[OrderState, ...] = ()
    targets: tuple[str, ...] = ()


class AuditFilter(msgspec.Struct, frozen=True):
    operation: str = ""  # an operation id
    target: str = ""  # a host or a job
    since: float = 0.0
