"""What a request would do: it runs in a transaction that is undone, and the policy decides about the result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from flyball.contracts.clock import Clock
from flyball.contracts.decisions import Decision
from services.api.acts import ApiStores
from services.controller.policy import decide
from services.controller.round.view import PolicySettings
from services.record.codec import plain
from services.rules.grant_seals import GrantSeals
from services.store.decisions.condition_store import SqlConditionStore
from services.store.decisions.decision_store import SqlDecisionStore
from services.store.decisions.drain_store import SqlDrainStore
from services.store.decisions.job_store import SqlJobStore
from services.store.decisions.order_store import SqlOrderStore
from services.store.read.read_models import SqlReadModels
from services.store.retention.host_removal import SqlHostRemoval
from services.store.sql.database import Database
from services.store.sql.rehearsal import rehearsal

Json = dict[str, Any]
T = TypeVar("T")


def stores_of(db: Database) -> ApiStores:
    """Return what requests work on."""
    return ApiStores(
        jobs=SqlJobStore(db),
        drains=SqlDrainStore(db),
        conditions=SqlConditionStore(db),
        orders=SqlOrderStore(db),
        removal=SqlHostRemoval(db),
        reads=SqlReadModels(db),
    )


class Rehearsals:
    """Thread-safe."""

    def __init__(self, db: Database, settings: PolicySettings, clock: Clock, seals: GrantSeals) -> None:
        self._db = db
        self._seals = seals
        self._settings = settings
        self._clock = clock

    def run(self, work: Callable[[ApiStores], T]) -> tuple[T, list[Json]]:
        """Return what `work` returns, and what the controller would decide next. Changes nothing."""
        with rehearsal(self._db) as db:
            result = work(stores_of(db))
            view = SqlDecisionStore(db, self._clock, self._seals).load_view()
        outcome = decide(view, (), self._settings, self._clock.wall_s())
        return result, [_planned(decision) for decision in outcome.decisions]


def _planned(decision: Decision) -> Json:
    following = decision.action.next if decision.action is not None else None
    return {
        "kind": decision.kind.value,
        "job": decision.job,
        "reason": decision.reason,
        "rule": decision.rule,
        "evidence": dict(decision.evidence),
        "alternatives": plain(decision.alternatives),
        "hosts": [host.host_id for host in following.hosts] if following is not None else [],
    }
