"""The route of the audit log."""

from __future__ import annotations

import asyncio
from typing import Annotated

from fastapi import APIRouter, Query
from starlette.responses import Response

from services.api.description.openapi import reply_of
from services.api.exchange import Limit, SinceQuery, page_response
from services.api.ports import AuditLog
from services.api.replies.acts import AuditPage
from services.api.strict_route import user_routes
from services.runtime.list_filters import AuditFilter
from services.runtime.paging import DEFAULT_LIMIT, Page

BeforeEntry = Annotated[
    str, Query(pattern=r"^$|^aud-[0-9]{1,18}$", description="Only items before this one: `next_before` of a page.")
]
OperationQuery = Annotated[str, Query(max_length=64, description="Only of this operation, such as drainHost.")]
TargetQuery = Annotated[str, Query(max_length=200, description="Only about this host or job.")]


def router(audit: AuditLog) -> APIRouter:
    routes = user_routes("audit")

    @routes.get("/v1/audit", responses=reply_of(AuditPage))
    async def list_audit(
        *,
        limit: Limit = DEFAULT_LIMIT,
        before: BeforeEntry = "",
        operation: OperationQuery = "",
        target: TargetQuery = "",
        since: SinceQuery = 0.0,
    ) -> Response:
        """List the newest requests that operators made to change something, oldest first: who, when, what, with which
        result. Pass `next_before` as `before` for older ones. Kept for `audit_days`; dry runs are not recorded."""
        found = await asyncio.to_thread(audit.entries, Page(limit, before), AuditFilter(operation, target, since))
        return page_response(found, "audit_id", limit)

    return routes
