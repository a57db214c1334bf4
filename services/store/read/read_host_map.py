"""All hosts in short, by failure domain: for a look at ten thousand of them at once."""

from __future__ import annotations

from collections import Counter
from itertools import groupby
from operator import itemgetter
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
_STATES = frozenset(state.value for state in HostState)  # a host in another one cannot be read, as in the list of hosts
_COLUMNS = tables.hosts.c
# In the order of the index that has these columns: no row is read.
_IN_SHORT = select(_COLUMNS.failure_domain, _COLUMNS.host_id, _COLUMNS.state).order_by(
    _COLUMNS.failure_domain, _COLUMNS.host_id
)


def host_map(connection: Connection, given: GivenPlans) -> Json:
    """Return the hosts by failure domain, both by name, with a column per fact. Omits hosts that left in an orderly way
    and have no ranks."""
    open_jobs = connection.execute(select(tables.jobs.c.job, tables.jobs.c.generation).where(~HAS_ENDED)).all()
    placed: dict[str, str] = {}
    for row in open_jobs:
        placed |= dict.fromkeys(given.read(connection, row.job, row.generation), row.job)
    # Few hosts have left or a notice: columns of ten thousand rows take long.
    left = set(connection.scalars(select(_COLUMNS.host_id).where(_COLUMNS.left_at > 0.0))) - placed.keys()
    noticed = connection.scalars(select(_COLUMNS.host_id).where(_COLUMNS.preempt_deadline_at > 0.0))
    critical = Severity.CRITICAL.value
    marks = _marks(connection)
    marks |= {host_id: "notice" for host_id in noticed if marks.get(host_id) != critical}
    states: Counter[str] = Counter()
    items = []
    for domain, rows in groupby(connection.execute(_IN_SHORT).all(), itemgetter(0)):
        shown = [row for row in rows if row[1] not in left and row[2] in _STATES]
        if not shown:
            continue
        _, host_ids, of_hosts = zip(*shown, strict=True)
        states.update(of_hosts)
        items.append(
            {
                "failure_domain": domain,
                "host_ids": host_ids,
                "states": of_hosts,
                "jobs": [placed.get(host_id, "") for host_id in host_ids],
                "marks": [marks.get(host_id, "") for host_id in host_ids],
            }
        )
    return {"states": {state.value: states[state.value] for state in HostState}, "items": items}


def _marks(connection: Connection) -> dict[str, str]:
    """Return host -> why its ranks should leave: the worst condition that stands, or a drain."""
    drains = load_drains(connection).items()
    marks = {host_id: "drain" for host_id, drain in drains if drain.state is DrainState.REQUESTED}
    for host_id, standing in load_conditions(connection).items():
        pressing = [one.condition.severity for one in standing if one.is_pressing]
        if pressing:
            marks[host_id] = max(pressing, key=lambda severity: severity.rank).value
    return marks
