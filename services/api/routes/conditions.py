"""The door for others that watch hosts: node-problem-detector, NVSentinel, scripts around DCGM, operators."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from flyball.contracts.clock import Clock
from flyball.contracts.errors import Forbidden
from flyball.contracts.identity import NAME_PATTERN
from flyball.contracts.reports.conditions import BY_API, MAX_REQUEST_BYTES, OPERATOR, ConditionRequest
from services.api.acts import Acts, ApiStores, DryRun
from services.api.auth import principal_in
from services.api.description.openapi import act_replies, body_of
from services.api.exchange import HostIdPath, read_message
from services.api.ports import Json
from services.api.replies.hosts import HostReply
from services.api.strict_route import user_routes
from services.runtime.http.auth import Role

KindQuery = Annotated[str, Query(pattern=NAME_PATTERN, description="Kind of the condition, such as xid.")]
ReporterQuery = Annotated[str, Query(pattern=NAME_PATTERN, description="Who began it.")]
SubjectQuery = Annotated[str, Query(max_length=100, description="The part of the host; empty: the host.")]


def router(acts: Acts, clock: Clock) -> APIRouter:
    routes = user_routes("hosts")

    @routes.post(
        "/v1/hosts/{host_id}/conditions",
        status_code=202,
        responses=act_replies(HostReply),
        openapi_extra=body_of(ConditionRequest),
    )
    async def begin_condition(request: Request, host_id: HostIdPath, dry_run: DryRun = False) -> Response:
        """Report a condition of a host.

        `info` is recorded. For a `warning`, the host's ranks save a step and move to a spare; for `critical`, they move
        at once. Either way the host gets no work while the condition stands. Without a spare, the job trains on.
        Idempotent: a repetition by the same reporter about the same kind and subject replaces the condition, and starts
        its `ttl_s` anew. 404 for an unknown host."""
        asked = await read_message(request, ConditionRequest, max_bytes=MAX_REQUEST_BYTES)
        _check_reporter(request, asked.reporter)
        condition = asked.condition(_source(asked.reporter), clock.wall_s())

        def begin(on: ApiStores) -> tuple[int, Json]:
            on.conditions.begin(host_id, condition)
            return 0, on.reads.host(host_id)

        return await acts.carry_out(begin, dry_run=dry_run)

    @routes.delete("/v1/hosts/{host_id}/conditions", status_code=202, responses=act_replies(HostReply))
    async def end_condition(
        request: Request,
        *,
        host_id: HostIdPath,
        kind: KindQuery,
        reporter: ReporterQuery = OPERATOR,
        subject: SubjectQuery = "",
        dry_run: DryRun = False,
    ) -> Response:
        """End a condition that this reporter began. Idempotent; 404 for an unknown host. A host that was cordoned for
        it may have work again. What an operator began, only an operator's token ends."""
        _check_reporter(request, reporter)
        key = (_source(reporter), kind, subject)
        now = clock.wall_s()

        def end(on: ApiStores) -> tuple[int, Json]:
            on.conditions.end(host_id, key, now)
            return 0, on.reads.host(host_id)

        return await acts.carry_out(end, dry_run=dry_run)

    return routes


def _source(reporter: str) -> str:
    return f"{BY_API}{reporter}"


def _check_reporter(request: Request, reporter: str) -> None:
    """Raise Forbidden if a host speaks as an operator."""
    if reporter == OPERATOR and principal_in(request.scope).role is Role.DAEMON:
        raise Forbidden(
            "A host's token does not speak for an operator.", hint="name the program that reports: reporter=NAME"
        )
