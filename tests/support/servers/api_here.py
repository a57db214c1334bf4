"""The API and the pages over the stores of a test, in this process and without a socket."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
from support.servers.described_replies import DescribedReplies
from support.stores.job_stores import SEALS, Stores

from services.api.app import ApiPart, Dependencies, create_app
from services.api.cluster_metrics import ClusterMetrics
from services.api.goodput import GoodputReports
from services.api.stream import EventStreams
from services.controller.round.view import PolicySettings
from services.rehearsing import Rehearsals, stores_of
from services.runtime.health import Health
from services.runtime.http.auth import Authenticator
from services.runtime.telemetry import Metrics
from services.runtime.wakeup import LocalWakeup
from services.store.decisions.audit_store import SqlAuditLog
from services.store.read.read_models import SqlReadModels
from services.store.reports.goodput_accounts import SqlGoodputAccounts
from services.store.sql.database import Database
from services.store.sql.events import SqlEventLog

STALE_S = 600.0  # what was calculated before is calculated again
TOKEN = "the secret of a test's cluster, long enough"


class _Fresh:
    """The read models of a process that was just started, whenever they are asked: they keep what they decoded."""

    def __init__(self, db: Database) -> None:
        self._db = db

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - one of their methods
        return getattr(SqlReadModels(self._db), name)


class ApiHere:
    """The API and the pages over the stores of a test, in this process and without a socket. It has decoded nothing yet
    each time that it is asked."""

    def __init__(self, stores: Stores, folder: Path) -> None:
        db, clock, metrics = stores.db, stores.clock, Metrics()
        made, events = replace(stores_of(db), reads=_Fresh(db)), SqlEventLog(db)
        self._clock = clock
        accounts = SqlGoodputAccounts(db)
        goodput = GoodputReports(events=events, reads=made.reads, accounts=accounts, clock=clock)
        cluster = ClusterMetrics(reads=made.reads, goodput=accounts, clock=clock, registry=metrics.registry)
        part = ApiPart(
            stores=made,
            rehearsals=Rehearsals(db, PolicySettings(), clock, SEALS),
            audit=SqlAuditLog(db, clock),
            events=events,
            streams=EventStreams(log=events, metrics=metrics, clock=clock, max_streams=4, poll_interval_s=1.0),
            goodput=goodput,
            simulations=folder,
        )
        self._app = create_app(
            Dependencies(
                authenticator=Authenticator(TOKEN, clock=clock),
                tls=False,
                health=Health(loops=(), checks={}, clock=clock),
                metrics=metrics,
                clock=clock,
                wakeup=LocalWakeup(),
                api=part,
                refresh_metrics=cluster.refresh,
            )
        )
        self._described = DescribedReplies()

    def get(self, addresses: Sequence[str]) -> Mapping[str, httpx.Response]:
        """Get them as an operator."""
        return dict(zip(addresses, self.ask([("GET", address, None) for address in addresses]), strict=True))

    def ask(self, acts: Sequence[tuple[str, str, object]]) -> list[httpx.Response]:
        """Do this as an operator, and hold each reply against its description."""
        self._clock.sleep(STALE_S)
        replies = asyncio.run(self._ask(acts))
        for reply in replies:
            self._described(reply)
        return replies

    async def _ask(self, acts: Sequence[tuple[str, str, object]]) -> list[httpx.Response]:
        transport = httpx.ASGITransport(self._app, raise_app_exceptions=False)
        headers = {"Authorization": f"Bearer {TOKEN}"}
        async with httpx.AsyncClient(transport=transport, base_url="http://here", headers=headers) as client:
            return [await client.request(method, address, json=body) for method, address, body in acts]
