"""Verified copies for users: by tier, and what a job would lose now."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from sqlalchemy import Connection, Row, func, select

from flyball.contracts.checkpoints import Lineage, ShardCopy, Tier
from flyball.contracts.cluster import HostState, JobSpec
from services.record.codec import load, plain
from services.rules.holdings import CopyFacts, Holding, by_newest_word, complete_points, held
from services.rules.recoverability import worst_cases
from services.store.read import read_state
from services.store.reports import persistent_steps
from services.store.reports.rank_rows import newest_step
from services.store.sql import tables
from services.store.sql.set_aside import readable
from services.store.sql.shared_reads import GivenPlans, newest_lineage

Json = dict[str, Any]
_LOST = {HostState.SILENT.value, HostState.IN_REPAIR.value}
_CHUNK = 1000  # hosts that one query names


@dataclass(frozen=True)
class _Copies:
    """What the hosts and the persistent tier hold of a job."""

    spec: JobSpec
    newest_step: int
    lineage: Lineage
    hosts: _Hosts
    persistent: list[ShardCopy]
    by_tier: Mapping[Tier, list[Holding]]  # within reach

    @cached_property
    def holdings(self) -> list[Holding]:
        return [holding for found in self.by_tier.values() for holding in found]


@dataclass(frozen=True)
class _Hosts:
    """The hosts that may have copies of the job."""

    lost: set[str]  # their copies do not count
    domains: dict[str, str]  # host -> failure domain
    holders: list[str]  # by name


def checkpoints(connection: Connection, job: str, *, with_copies: bool) -> list[Json]:
    """Return the job's copies by tier, and each of them if asked for (an empty list if there is no such job). Copies on
    lost hosts are listed, but do not count."""
    row = connection.execute(select(tables.jobs).where(tables.jobs.c.job == job)).first()
    found = _copies(connection, row) if row is not None else None
    if found is None:
        return []
    return [
        {
            "job": job,
            "world_size": found.spec.world_size,
            "newest_step": found.newest_step,
            "recovery_point": _newest(found, found.holdings),
            "lineage": plain(found.lineage),
            "tiers": {tier.value: _tier(found, tier) for tier in Tier},
            "copies": [
                plain(copy) | {"reachable": copy.host_id not in found.hosts.lost}
                for copy in (sorted(_listed(connection, found, job), key=_place_in_list) if with_copies else ())
            ],
        }
    ]


def _listed(connection: Connection, found: _Copies, job: str) -> list[ShardCopy]:
    copies = list(found.persistent)
    for host_id, document in _documents(connection, job, found.hosts.holders):
        copies += [
            copy for copy in readable("hosts", host_id, load, document, list[ShardCopy]) or () if copy.job == job
        ]
    return copies


def _place_in_list(copy: ShardCopy) -> tuple[int, int, str, str]:
    return -copy.step, copy.rank, copy.tier.value, copy.host_id


def recoverability(connection: Connection, job: str, plans: GivenPlans) -> list[Json]:
    """Return what the job would lose now (an empty list if there is no such job)."""
    row = connection.execute(select(tables.jobs).where(tables.jobs.c.job == job)).first()
    found = _copies(connection, row) if row is not None else None
    shown = next(iter(read_state.jobs(connection, job, with_ranks=False)), None)
    if row is None or found is None or shown is None:
        return []
    given = plans.read(connection, job, row.generation)
    step = newest_step(connection, job, row.generation, given)
    step = found.newest_step if step < 0 else step
    step_s, ranks = shown["step_s"], found.spec.world_size
    homes = {} if shown["ended_at"] else given
    domains = found.hosts.domains | _domains(connection, sorted(homes.keys() - found.hosts.domains.keys()))
    cases = worst_cases(found.holdings, found.lineage, ranks, homes, domains)

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
        {name: shown[name] for name in ("job", "state", "doing", "world_size", "generation", "last_step_at", "step_s")}
        | {"step": step, "tiers": [*map(rung, Tier)], "losses": [case_of(plain(case)) for case in cases]}
    ]


_NOTHING: Json = {"steps": None, "redo_s": None}


def _copies(connection: Connection, row: Row[Any]) -> _Copies | None:
    """Return the copies of a job; None if the job cannot be read."""
    spec = readable("jobs", row.job, load, row.spec, JobSpec, job=row.job)
    if spec is None:
        return None
    hosts = _hosts(connection, row.job)
    persistent = list(persistent_steps.read(connection, [row.job]))
    holdings = held(
        "", row.job, [CopyFacts(c.job, c.generation, c.step, c.rank, c.tier, c.size_bytes) for c in persistent]
    )
    within_reach = [host_id for host_id in hosts.holders if host_id not in hosts.lost]
    for host_id, document in _documents(connection, row.job, within_reach):
        holdings += held(host_id, row.job, readable("hosts", host_id, load, document, list[CopyFacts]) or [])
    lineage = newest_lineage(connection, row.job) or ()
    by_tier = {tier: [one for one in holdings if one.tier is tier] for tier in Tier}
    settled = {
        tier: found if tier is Tier.PERSISTENT else by_newest_word(found, lineage, spec.world_size)
        for tier, found in by_tier.items()
    }
    return _Copies(spec, row.newest_step, lineage, hosts, persistent, settled)


def _hosts(connection: Connection, job: str) -> _Hosts:
    # By the index that has these columns: no row of ten thousand is read, and few are handed over.
    columns = tables.hosts.c
    of_job = (func.instr(columns.copies_of, f'"{job}"') > 0) | (columns.copies_of == tables.UNKNOWN_JOBS)
    query = select(columns.host_id, columns.failure_domain).where(of_job).order_by(columns.failure_domain)
    domains: dict[str, str] = {host_id: domain for host_id, domain in connection.execute(query).all()}
    left = select(columns.host_id).where(of_job, columns.state.in_(sorted(_LOST)) | (columns.left_at > 0.0))
    return _Hosts(set(connection.scalars(left)), domains, sorted(domains))


def _domains(connection: Connection, hosts: Sequence[str]) -> dict[str, str]:
    """Return host -> failure domain of these hosts."""
    query = select(tables.hosts.c.host_id, tables.hosts.c.failure_domain)
    return {
        host_id: domain
        for first in range(0, len(hosts), _CHUNK)
        for host_id, domain in connection.execute(
            query.where(tables.hosts.c.host_id.in_(hosts[first : first + _CHUNK]))
        )
    }


def _documents(connection: Connection, job: str, hosts: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield (host, its copies) of those of these hosts that have copies of the job."""
    columns = tables.hosts.c
    query = select(columns.host_id, columns.copies).where(func.instr(columns.copies, f'"{job}"') > 0)
    for first in range(0, len(hosts), _CHUNK):
        part = query.where(columns.host_id.in_(hosts[first : first + _CHUNK])).order_by(columns.host_id)
        yield from connection.execute(part).all()


def _tier(found: _Copies, tier: Tier) -> Json:
    holdings = found.by_tier[tier]
    return {
        "copies": sum(holding.copies for holding in holdings),
        "size_bytes": sum(holding.size_bytes for holding in holdings),
        "newest_step": max((holding.point[0] for holding in holdings), default=-1),
        "newest_complete_step": _newest(found, holdings),
    }


def _newest(found: _Copies, holdings: Sequence[Holding]) -> int:
    """The newest step of which all ranks have one of these copies, -1 for none."""
    points = complete_points(holdings, found.lineage, found.spec.world_size)
    return next((step for step, _ in points), -1)
