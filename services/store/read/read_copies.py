"""Verified copies for users: by tier, and what a job would lose now."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from sqlalchemy import Connection, Row, func, select

from flyball.contracts.checkpoints import Lineage, ShardCopy, Tier
from flyball.contracts.cluster import HostState, JobSpec
from services.record.codec import load, plain
from services.rules.recoverability import worst_cases
from services.rules.recovery_point import newest_step
from services.store.read import read_state
from services.store.reports import persistent_steps
from services.store.sql import tables
from services.store.sql.shared_reads import newest_lineage

Json = dict[str, Any]
_LOST = {HostState.SILENT.value, HostState.IN_REPAIR.value}


@dataclass(frozen=True)
class _Copies:
    """The copies of a job."""

    spec: JobSpec
    newest_step: int
    lineage: Lineage
    copies: list[ShardCopy]
    lost: set[str]  # hosts: their copies do not count
    domains: Mapping[str, str]  # host -> failure domain

    @cached_property
    def reachable(self) -> list[ShardCopy]:
        return [copy for copy in self.copies if copy.host_id not in self.lost]

    @cached_property
    def by_tier(self) -> Mapping[Tier, list[ShardCopy]]:
        """The reachable copies."""
        found: dict[Tier, list[ShardCopy]] = {tier: [] for tier in Tier}
        for copy in self.reachable:
            found[copy.tier].append(copy)
        return found


def checkpoints(connection: Connection, job: str, *, with_copies: bool) -> list[Json]:
    """Return the job's copies by tier, and each of them if asked for (an empty list if there is no such job). Copies on
    lost hosts are listed, but do not count."""
    row = connection.execute(select(tables.jobs).where(tables.jobs.c.job == job)).first()
    if row is None:
        return []
    found = _copies(connection, row)
    point = _newest(found, found.reachable)
    return [
        {
            "job": job,
            "world_size": found.spec.world_size,
            "newest_step": found.newest_step,
            "recovery_point": point,
            "lineage": plain(found.lineage),
            "tiers": {tier.value: _tier(found, tier) for tier in Tier},
            "copies": [
                plain(copy) | {"reachable": copy.host_id not in found.lost}
                for copy in (sorted(found.copies, key=_place_in_list) if with_copies else ())
            ],
        }
    ]


def _place_in_list(copy: ShardCopy) -> tuple[int, int, str, str]:
    return -copy.step, copy.rank, copy.tier.value, copy.host_id


def recoverability(connection: Connection, job: str) -> list[Json]:
    """Return what the job would lose now (an empty list if there is no such job)."""
    row = connection.execute(select(tables.jobs).where(tables.jobs.c.job == job)).first()
    if row is None:
        return []
    found, (shown,) = _copies(connection, row), read_state.jobs(connection, job)
    step = max((rank["step"] for rank in shown["ranks"]), default=-1)
    step = found.newest_step if step < 0 else step
    step_s, ranks = shown["step_s"], found.spec.world_size
    homes = {} if shown["ended_at"] else {rank["rank"]: rank["host_id"] for rank in shown["ranks"]}
    cases = worst_cases(found.reachable, found.lineage, ranks, homes, found.domains)

    def behind(recovery_step: int) -> Json:
        steps = max(0, step - recovery_step)
        return {"steps": steps, "redo_s": None if step_s is None else steps * step_s}

    def rung(tier: Tier) -> Json:
        newest = _newest(found, found.by_tier[tier])
        return {"tier": tier.value, "step": newest} | (behind(newest) if newest >= 0 else _NOTHING)

    def case_of(case: Json) -> Json:
        cost = behind(case["recovery_step"])
        return {**case, **cost, "gpu_s": None if cost["redo_s"] is None else cost["redo_s"] * ranks}

    return [
        {name: shown[name] for name in ("job", "state", "world_size", "generation", "last_step_at", "step_s")}
        | {"step": step, "tiers": [*map(rung, Tier)], "losses": [case_of(plain(case)) for case in cases]}
    ]


_NOTHING: Json = {"steps": None, "redo_s": None}


def _copies(connection: Connection, row: Row[Any]) -> _Copies:
    copies: list[ShardCopy] = list(persistent_steps.read(connection, [row.job]))
    columns = tables.hosts.c
    lost: set[str] = set()
    domains: dict[str, str] = {}
    query = select(columns.host_id, columns.state, columns.left_at, columns.failure_domain)
    for host in connection.execute(query):
        domains[host.host_id] = host.failure_domain
        if host.state in _LOST or host.left_at:
            lost.add(host.host_id)
    holding = select(columns.copies).where(func.instr(columns.copies, f'"{row.job}"') > 0).order_by(columns.host_id)
    for document in connection.scalars(holding):
        copies += [copy for copy in load(document, list[ShardCopy]) if copy.job == row.job]
    lineage = newest_lineage(connection, row.job) or ()
    return _Copies(load(row.spec, JobSpec), row.newest_step, lineage, copies, lost, domains)


def _tier(found: _Copies, tier: Tier) -> Json:
    copies = found.by_tier[tier]
    return {
        "copies": len(copies),
        "size_bytes": sum(copy.size_bytes for copy in copies),
        "newest_step": max((copy.step for copy in copies), default=-1),
        "newest_complete_step": _newest(found, copies),
    }


def _newest(found: _Copies, copies: list[ShardCopy]) -> int:
    """The newest step of which all ranks have one of these copies, -1 for none."""
    step = newest_step(copies, found.lineage, found.spec.world_size)
    return -1 if step is None else step
