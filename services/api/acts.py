"""Requests that change something: carried out, or with `dry_run` only tried."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Protocol, TypeVar

from fastapi import Query
from starlette.responses import Response

from services.api.exchange import json_response, notify_all
from services.api.ports import ConditionStore, DrainStore, HostRemoval, JobStore, Json, OrderStore, ReadModels
from services.rules.stream import Wakeup

T = TypeVar("T")
DryRun = Annotated[
    bool,
    Query(description="Change nothing: reply 200 with what the reply would be, and what the controller would decide."),
]


@dataclass(frozen=True, slots=True)
class ApiStores:
    """What requests work on."""

    jobs: JobStore
    drains: DrainStore
    conditions: ConditionStore
    orders: OrderStore
    removal: HostRemoval
    reads: ReadModels


class Rehearse(Protocol):
    def run(self, work: Callable[[ApiStores], T]) -> tuple[T, list[Json]]:
        """Return what `work` returns, and what the controller would decide next. Changes nothing."""
        ...


class Acts:
    """Carries requests out in threads, and wakes the controller."""

    def __init__(self, stores: ApiStores, rehearsals: Rehearse, wakeup: Wakeup) -> None:
        self._stores = stores
        self._rehearsals = rehearsals
        self._wakeup = wakeup

    async def carry_out(
        self, work: Callable[[ApiStores], tuple[int, Any]], *, dry_run: bool = False, status: int = 202
    ) -> Response:
        """Respond with what `work` returns: a status (0: `status`) and the content, which a dry run shows even if the
        status is 204."""
        if dry_run:
            (given, content), decisions = await asyncio.to_thread(self._rehearsals.run, work)
            preview = {"dry_run": True, "status": given or status, "reply": content, "decisions": decisions}
            return json_response(preview)
        given, content = await asyncio.to_thread(work, self._stores)
        notify_all(self._wakeup)
        if (given or status) == 204:
            return Response(status_code=204)
        return json_response(content, given or status)
