"""All hosts in short, by failure domain: for a look at ten thousand of them at once."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any

from sqlalchemy import Connection, select

from flyball.contracts.cluster import HostState
from flyball.contracts.reports.conditions import Severity
from flyball.contracts.reports.drains import DrainState
from services.store.decisions.condition_store import load_conditions
from services.store.decisions.drain_store import load_drains
from services.store.sql import tables
from services.store.sql.shared_reads import HAS_ENDED, GivenPlans

Json = dict[str, Any]


def host_map(connection: Connection, given: GivenPlans) -> Json:
    """Return the hosts by failure domain, both by name, with a column per fact. Omits hosts that left in an orderly way
    and have no ranks."""
    open_jobs = connection.execute(select(tables.jobs.c.job, tables.jobs.c.generation).where(~HAS_ENDED)).all()
    placed = {host: row.job for row in open_jobs for host in given.read(connection, row.job, row.generation)}
    marks = _marks(connection)
    columns = tables.hosts.c
    # Few hosts have left or a notice: columns of ten thousand rows take long.
    left = set(connection.scalars(select(columns.host_id).where(columns.left_at > 0.0)))
    noticed = set(connection.scalars(select(columns.host_id).where(columns.preempt_deadline_at > 0.0)))
    query = select(columns.host_id, columns.state, columns.failure_domain).order_by(columns.host_id)
    domains: defaultdict[str, Json] = defaultdict(lambda: {"host_ids": [], "states": [], "jobs": [], "marks": []})
    states: Counter[str] = Counter()
    for host_id, state, domain in connection.execute(query).all():
        job = placed.get(host_id, "")
        if host_id in left and not job:
            continue
        of_domain = domains[domain]
        of_domain["host_ids"].append(host_id)
        of_domain["states"].append(state)
        of_domain["jobs"].append(job)
        mark = marks.get(host_id, "")
        of_domain["marks"].append("notice" if host_id in noticed and mark != Severity.CRITICAL else mark)
        states[state] += 1
    return {
        "states": {state.value: states[state.value] for state in HostState},
        "items": [{"failure_domain": domain, **domains[domain]} for domain in sorted(domains)],
    }


def _marks(connection: Connection) -> dict[str, str]:
    """Return host -> why its ranks should leave: the worst condition that stands, or a drain."""
    drains = load_drains(connection).items()
    marks = {host_id: "drain" for host_id, drain in drains if drain.state is DrainState.REQUESTED}
    for host_id, standing in load_conditions(connection).items():
        pressing = [one.condition.severity for one in standing if one.is_pressing]
        if pressing:
            marks[host_id] = max(pressing, key=lambda severity: severity.rank).value
    return marks
