"""The plans of running jobs. They never change, and are long: each is read once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Generic, TypeVar

from sqlalchemy import Connection, select

from flyball.contracts.cluster import JobState
from flyball.contracts.decisions import GenerationPlan
from services.record.codec import load
from services.sensor.reports.placed import GivenRanks, given_in
from services.store.sql.tables import generations, jobs

T = TypeVar("T")

MAX_PLANS = 256  # kept of those that may be old, the ones asked for last


class RunningPlans(Generic[T]):
    """Keeps what `take` makes of the plan of each running job's newest generation. Threads may share it: two that find
    a new plan at once both read it."""

    def __init__(self, take: Callable[[GenerationPlan], T]) -> None:
        self._take = take
        self._known: dict[tuple[str, int], T] = {}

    def read(self, connection: Connection) -> Mapping[tuple[str, int], T]:
        """(job, generation) -> what was taken; the same mapping while nothing changed."""
        running = select(jobs.c.job, jobs.c.generation).where(jobs.c.state == JobState.RUNNING.value)
        present = {(row.job, row.generation) for row in connection.execute(running)}
        known = self._known
        if present == known.keys():
            return known
        found = {key: known[key] for key in sorted(present & known.keys())}
        for job, generation in sorted(present - known.keys()):
            mine = (generations.c.job == job, generations.c.generation == generation)
            document = connection.scalar(select(generations.c.plan).where(*mine))
            if document is not None:
                found[job, generation] = self._take(load(document, GenerationPlan))
        self._known = found
        return found


class GivenPlans:
    """Who was given which ranks, by generation, however old. Threads may share it."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, int], GivenRanks] = {}

    def read(self, connection: Connection, job: str, generation: int) -> GivenRanks:
        """Nothing of a generation that was never granted."""
        found = self._known.get((job, generation))
        if found is None:
            mine = (generations.c.job == job, generations.c.generation == generation)
            document = connection.scalar(select(generations.c.plan).where(*mine))
            if document is None:
                return {}
            found = given_in(load(document, GenerationPlan))
        others = [(key, given) for key, given in self._known.items() if key != (job, generation)]
        self._known = dict([*others, ((job, generation), found)][-MAX_PLANS:])
        return found


def hosts_of(plan: GenerationPlan) -> frozenset[str]:
    """The hosts on which a plan has ranks."""
    return frozenset(host.host_id for host in plan.hosts)
