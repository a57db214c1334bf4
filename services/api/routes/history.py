"""Routes that show what happened: incidents, decisions, actions, signals."""

from __future__ import annotations

import asyncio
from typing import Annotated

from fastapi import APIRouter, Path, Query
from starlette.responses import Response

from flyball.contracts.decisions import ActionState, DecisionKind, IncidentState
from flyball.contracts.identity import NAME_PATTERN
from services.api.description.openapi import reply_of
from services.api.exchange import JobQuery, Limit, SinceQuery, json_response, page_response
from services.api.ports import ReadModels
from services.api.replies.history import (
    ActionPage,
    ActionStory,
    DecisionPage,
    DecisionStory,
    IncidentPage,
    IncidentStory,
    SignalPage,
)
from services.api.strict_route import user_routes
from services.runtime.list_filters import ActionFilter, DecisionFilter, IncidentFilter, SignalFilter
from services.runtime.paging import DEFAULT_LIMIT, Page

_BEFORE = "Only items before this one: `next_before` of a page."
BeforeIncident = Annotated[str, Query(pattern=r"^$|^inc-[0-9]{1,18}$", description=_BEFORE)]
BeforeDecision = Annotated[str, Query(pattern=r"^$|^dec-[0-9]{1,18}$", description=_BEFORE)]
BeforeAction = Annotated[str, Query(pattern=r"^$|^act-[0-9]{1,18}$", description=_BEFORE)]
BeforeSignal = Annotated[str, Query(pattern=r"^$|^sig-[0-9]{1,18}$", description=_BEFORE)]
AfterDecision = Annotated[
    str, Query(pattern=r"^$|^dec-[0-9]{1,18}$", description="Omits this decision and all earlier ones.")
]
IncidentPath = Annotated[
    str, Path(pattern=r"^inc-[0-9]{1,18}$", description="Identifier of the incident.", examples=["inc-4"])
]
DecisionPath = Annotated[
    str, Path(pattern=r"^dec-[0-9]{1,18}$", description="Identifier of the decision.", examples=["dec-17"])
]
ActionPath = Annotated[
    str, Path(pattern=r"^act-[0-9]{1,18}$", description="Identifier of the action.", examples=["act-17"])
]
OfIncident = Annotated[
    str, Query(alias="incident", pattern=r"^$|^inc-[0-9]{1,18}$", description="Only of this incident.")
]
HostQuery = Annotated[str, Query(alias="host", pattern=f"^$|{NAME_PATTERN}", description="Only about this host.")]
CauseQuery = Annotated[str, Query(max_length=64, description="Only with this cause, such as worker_killed.")]
SignalKind = Annotated[str, Query(max_length=32, description="Only of this kind, such as worker_exited.")]
IncidentStates = Annotated[
    list[IncidentState] | None, Query(alias="state", description="Only in these states; may be repeated.")
]
ActionStates = Annotated[
    list[ActionState] | None, Query(alias="state", description="Only in these states; may be repeated.")
]
DecisionKinds = Annotated[
    list[DecisionKind] | None, Query(alias="kind", description="Only of these kinds; may be repeated.")
]


def router(reads: ReadModels) -> APIRouter:
    routes = user_routes("history")

    @routes.get("/v1/incidents", responses=reply_of(IncidentPage))
    async def list_incidents(
        *,
        job: JobQuery = None,
        limit: Limit = DEFAULT_LIMIT,
        before: BeforeIncident = "",
        host: HostQuery = "",
        states: IncidentStates = None,
        cause: CauseQuery = "",
        since: SinceQuery = 0.0,
    ) -> Response:
        """List the newest incidents, oldest first. Pass `next_before` as `before` for older ones. `since`: opened then
        or later."""
        wanted = IncidentFilter(tuple(states or ()), host, cause, since)
        found = await asyncio.to_thread(reads.incidents, job, Page(limit, before), wanted)
        return page_response(found, "incident_id", limit)

    @routes.get("/v1/incidents/{incident_id}", responses=reply_of(IncidentStory))
    async def get_incident(incident_id: IncidentPath) -> Response:
        """Show an incident as a story: the signals, the decisions with reasons and alternatives, the steps of the
        actions, and whether training went on. `story` has all of it in the order of time, a line for each."""
        return json_response(await asyncio.to_thread(reads.incident, incident_id))

    @routes.get("/v1/decisions", responses=reply_of(DecisionPage))
    async def list_decisions(
        *,
        job: JobQuery = None,
        limit: Limit = DEFAULT_LIMIT,
        before: BeforeDecision = "",
        after: AfterDecision = "",
        kinds: DecisionKinds = None,
        incident: OfIncident = "",
        since: SinceQuery = 0.0,
    ) -> Response:
        """List the newest decisions, oldest first. Pass `next_before` as `before` for older ones. `after` omits the
        decision it names and all earlier ones."""
        wanted = DecisionFilter(tuple(kinds or ()), incident, since)
        found = await asyncio.to_thread(reads.decisions, job, Page(limit, before, after), wanted)
        return page_response(found, "decision_id", limit)

    @routes.get("/v1/decisions/{decision_id}", responses=reply_of(DecisionStory))
    async def get_decision(decision_id: DecisionPath) -> Response:
        """Show a decision with its incident, the signals that led to it, its action and the commands."""
        return json_response(await asyncio.to_thread(reads.decision, decision_id))

    @routes.get("/v1/actions", responses=reply_of(ActionPage))
    async def list_actions(
        *,
        job: JobQuery = None,
        limit: Limit = DEFAULT_LIMIT,
        before: BeforeAction = "",
        states: ActionStates = None,
        incident: OfIncident = "",
        since: SinceQuery = 0.0,
    ) -> Response:
        """List the newest actions, oldest first. Pass `next_before` as `before` for older ones. `since`: started then
        or later."""
        wanted = ActionFilter(job or "", tuple(states or ()), incident, since)
        found = await asyncio.to_thread(reads.actions, Page(limit, before), wanted)
        return page_response(found, "action_id", limit)

    @routes.get("/v1/actions/{action_id}", responses=reply_of(ActionStory))
    async def get_action(action_id: ActionPath) -> Response:
        """Show an action with its plan, its phases, and the commands with their answers."""
        return json_response(await asyncio.to_thread(reads.action, action_id))

    @routes.get("/v1/signals", responses=reply_of(SignalPage))
    async def list_signals(
        *,
        job: JobQuery = None,
        limit: Limit = DEFAULT_LIMIT,
        before: BeforeSignal = "",
        host: HostQuery = "",
        kind: SignalKind = "",
        since: SinceQuery = 0.0,
    ) -> Response:
        """List the newest signals, oldest first. Pass `next_before` as `before` for older ones. `since`: stored then or
        later. Signals are kept for `detail_days`."""
        wanted = SignalFilter(job or "", host, kind, since)
        found = await asyncio.to_thread(reads.signals, Page(limit, before), wanted)
        return page_response(found, "signal_id", limit)

    return routes
