"""Builds the policy's view of hosts, from their rows and the newest generation of every job. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import count
from types import MappingProxyType
from typing import Any, TypeAlias

import msgspec

from flyball.contracts.checkpoints import ShardCopy
from flyball.contracts.cluster import HostState
from flyball.contracts.reports.host_checks import HostCheck
from services.controller.round.view import DrainView, HostView, JobView, RankView, StandingCondition
from services.record.positions import AS_STORED, SteadyPositions


class CachedHost(msgspec.Struct, gc=False):
    """The stored facts about a host. `sent_at`, `last_report_at`: of its newest stored report, which may come late.
    `ranks` lack the positions in `newer`, until `settled`: most hosts are in few views."""

    host_id: str
    version: int = -1
    report_version: int = -1
    state: HostState = HostState.HEALTHY
    since: float = 0.0
    reason: str = ""
    preempt_deadline_at: float = 0.0
    address: str = ""
    failure_domain: str = ""
    engine_address: str = ""
    free_port: int = 0
    left_at: float = 0.0
    copies: tuple[ShardCopy, ...] = ()
    copies_of: frozenset[str] = frozenset()  # jobs
    last_report_at: float = 0.0
    sent_at: float = 0.0
    workers: Mapping[str, int] = {}
    fabric: str = ""
    memory_bytes: int = 0
    ranks: Mapping[tuple[str, int], tuple[RankView, ...]] = {}  # (job, generation) -> as last reported by the host
    newer: SteadyPositions | None = None

    def take_newer(self, newer: SteadyPositions) -> None:
        """Take in newer positions that go with this version of the row."""
        self.newer, self.sent_at, self.last_report_at = newer, newer.sent_at, newer.received_at

    def settled(self) -> Mapping[tuple[str, int], tuple[RankView, ...]]:
        """Return the ranks with their newest positions."""
        newer, self.newer = self.newer, None
        if newer is not None:
            places = count()
            self.ranks = {
                key: tuple(_moved(of, newer, next(places)) for of in ranks) for key, ranks in self.ranks.items()
            }
        return self.ranks


def _moved(rank: RankView, newer: SteadyPositions, place: int) -> RankView:
    step = newer.step(place)
    if step == AS_STORED:
        return rank
    return RankView(rank.rank, rank.host_id, step, rank.phase, newer.received_at, is_gone=rank.is_gone)


def newest_ranks(
    cached: Mapping[str, CachedHost], job: str, generation: int, given: Mapping[str, Collection[int]]
) -> dict[int, RankView]:
    """rank -> as its host last reported it. `given`: host -> the ranks that it was given in this generation; its
    reports about others do not count."""
    found: dict[int, RankView] = {}
    key = (job, generation)
    for host_id, mine in given.items():
        host = cached.get(host_id)
        if host is not None and key in host.ranks:
            found.update((rank.rank, rank) for rank in host.settled()[key] if rank.rank in mine)
    return found


Newest: TypeAlias = Mapping[str, tuple[int, bool]]  # job -> its newest generation (-1: none), and whether it has ended


def placement_of(job_views: Sequence[JobView]) -> tuple[Mapping[str, str], Newest]:
    """host -> the job with ranks on it; and job -> its newest generation (-1: none), and whether it has ended."""
    placed = {
        host.host_id: view.spec.job
        for view in job_views
        if view.generation is not None and not view.state.ended
        for host in view.generation.hosts
    }
    newest = {
        view.spec.job: (view.generation.generation if view.generation else -1, view.state.ended) for view in job_views
    }
    return placed, newest


def host_views(
    rows: Iterable[Any],
    placed: Mapping[str, str],
    newest: Newest,
    drains: Mapping[str, DrainView] = MappingProxyType({}),
    received_at: Callable[[str], float] = lambda _: 0.0,
    *,
    losses: Mapping[str, int] = MappingProxyType({}),
    failed_at: Mapping[str, tuple[float, ...]] = MappingProxyType({}),
    conditions: Mapping[str, tuple[StandingCondition, ...]] = MappingProxyType({}),
    checks: Mapping[str, HostCheck] = MappingProxyType({}),
) -> tuple[HostView, ...]:
    """The views of hosts, from rows with the columns of `hosts` and `workers` (job -> generation of its live workers),
    the result of `placement_of` for all jobs, drains, when each host was lost, what stands against it,
    and its newest check. Pure."""
    return tuple(
        HostView(
            host_id=row.host_id,
            state=row.state,
            since=row.since,
            address=row.address,
            failure_domain=row.failure_domain,
            engine_address=row.engine_address,
            free_port=row.free_port,
            last_report_at=max(row.last_report_at, received_at(row.host_id)),
            preempt_deadline_at=row.preempt_deadline_at,
            job=placed.get(row.host_id, ""),
            reason=row.reason,
            stale_jobs=_stale_jobs(row.workers, newest, placed.get(row.host_id)),
            drain=drains.get(row.host_id),
            stored_report_at=min(row.sent_at, row.last_report_at),
            left_at=row.left_at,
            recent_losses=losses.get(row.host_id, 0),
            conditions=conditions.get(row.host_id, ()),
            failed_at=failed_at.get(row.host_id, ()),
            check=checks.get(row.host_id),
            fabric=row.fabric,
            memory_bytes=row.memory_bytes,
        )
        for row in rows
    )


def _stale_jobs(workers: Mapping[str, int], newest: Newest, placed: str | None) -> Mapping[str, int]:
    """The jobs with superseded workers on a host. `placed`: the job with ranks there. A database that was set back may
    grant a generation number again. So workers of the newest generation are superseded, too, where it has no rank."""
    if all(job == placed and newest.get(job) == (generation, False) for job, generation in workers.items()):
        return {}  # as nearly always
    return {
        job: generation
        for job, generation in workers.items()
        if job in newest and _is_stale(generation, *newest[job], is_placed=job == placed)
    }


def _is_stale(generation: int, newest: int, has_ended: bool, *, is_placed: bool) -> bool:
    return has_ended or generation < newest or (generation == newest and not is_placed)


class OtherHosts:
    """An index of hosts that a job without ranks on them may need."""

    def __init__(self) -> None:
        self._cached: Mapping[str, CachedHost] = {}
        self._placed: Mapping[str, str] = {}
        self._newest: Newest = {}
        self._found: set[str] = set()

    def note(
        self, cached: Mapping[str, CachedHost], changed: Iterable[str], placed: Mapping[str, str], newest: Newest
    ) -> None:
        """Take in the current hosts. Only changed hosts are looked at, unless jobs have changed."""
        if (placed, newest) != (self._placed, self._newest):
            self._found = set()
            changed = cached
        self._cached, self._placed, self._newest = cached, placed, newest
        self._found.difference_update(changed)
        self._found.update(name for name in changed if name in cached and self._is_other(cached[name]))
        self._found.intersection_update(cached)

    def of(self, jobs: Collection[str]) -> Iterator[str]:
        """The hosts that one of these jobs may need, as `focused` chooses them."""
        for name in self._found:
            host = self._cached[name]
            if (
                name not in self._placed
                or not host.copies_of.isdisjoint(jobs)
                or _stale_jobs(host.workers, self._newest, self._placed.get(name))
            ):
                yield name

    def _is_other(self, host: CachedHost) -> bool:
        job = self._placed.get(host.host_id)
        return job is None or not host.copies_of <= {job} or bool(_stale_jobs(host.workers, self._newest, job))
