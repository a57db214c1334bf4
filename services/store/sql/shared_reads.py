"""Reads that several stores share: open incidents, and the plans of generations, which are long and never change."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Generic, TypeVar

from sqlalchemy import Column, Connection, func, select

from flyball.contracts.checkpoints import Lineage
from flyball.contracts.cluster import JobState
from flyball.contracts.decisions import GenerationPlan, Incident
from services.record.codec import load, number_of
from services.sensor.rules.placed import GivenRanks, given_in
from services.store.sql.set_aside import readable
from services.store.sql.tables import generations, incidents, jobs

T = TypeVar("T")

_DECODED = 4096  # open incidents that are kept: every round reads them
DISORDER_S = 60.0  # numbers may be in another order than times by this much
MAX_PLANS = 1024  # kept of generations that may be old, the most recently used
ENDS = jobs.c.state.in_([state.value for state in JobState if state.ending])  # decided, and under way
HAS_ENDED = jobs.c.state.in_([state.value for state in JobState if state.ended])  # a condition on `jobs`


def open_incidents(connection: Connection) -> list[Incident]:
    """Return the incidents that are not closed, oldest first."""
    query = select(incidents.c.number, incidents.c.document).where(~incidents.c.closed).order_by(incidents.c.number)
    found = (readable("incidents", f"inc-{n}", incident_of, text) for n, text in connection.execute(query))
    return [incident for incident in found if incident is not None]


@lru_cache(maxsize=_DECODED)
def incident_of(document: str) -> Incident:
    """Decode an incident. Raises NotFound if what it names by number has none."""
    incident: Incident = load(document, Incident)
    for name in (incident.incident_id, incident.action_id, incident.part_of, *incident.parts):
        if name:
            number_of(name)
    return incident


def last_before(connection: Connection, number: Column[int], at: Column[float], before: float) -> int:
    """Return the number of the last row written before a moment, 0 for none. Bisects: times grow with the numbers,
    except for a few seconds around the moment."""
    low, high = 0, connection.scalar(select(func.max(number))) or 0
    while low < high:
        middle = (low + high + 1) // 2
        found, written_at = connection.execute(
            select(number, at).where(number >= middle).order_by(number).limit(1)
        ).one()
        low, high = (found, high) if written_at < before else (low, middle - 1)
    return low


def plan_of(connection: Connection, job: str, generation: int) -> GenerationPlan | None:
    """Return the plan of a generation, None if it was never granted, or cannot be decoded."""
    mine = (generations.c.job == job, generations.c.generation == generation)
    document = connection.scalar(select(generations.c.plan).where(*mine))
    if document is None:
        return None
    return readable("generations", f"{job} {generation}", load, document, GenerationPlan, job=job)


def newest_lineage(connection: Connection, job: str) -> Lineage | None:
    """Return the lineage of the job's newest started generation, None if none started."""
    document = connection.scalar(
        select(generations.c.lineage)
        .where(generations.c.job == job, generations.c.started_at > 0.0)
        .order_by(generations.c.generation.desc())
        .limit(1)
    )
    return readable("generations", job, load, document, Lineage, job=job) if document else None


def hosts_of(plan: GenerationPlan) -> frozenset[str]:
    """Return the hosts that have ranks in a plan."""
    return frozenset(host.host_id for host in plan.hosts)


class RunningPlans(Generic[T]):
    """Keeps what `extract` takes from the plan of each running job's newest generation. Thread-safe: two threads that
    find a new plan at once both read it."""

    def __init__(self, extract: Callable[[GenerationPlan], T]) -> None:
        self._extract = extract
        self._known: dict[tuple[str, int], T] = {}

    def read(self, connection: Connection) -> Mapping[tuple[str, int], T]:
        """Return (job, generation) -> the extract. The same mapping object as before if nothing changed."""
        running = select(jobs.c.job, jobs.c.generation).where(jobs.c.state == JobState.RUNNING.value)
        present = {(row.job, row.generation) for row in connection.execute(running)}
        known = self._known
        if present == known.keys():
            return known
        found = {key: known[key] for key in sorted(present & known.keys())}
        for key in sorted(present - known.keys()):
            if (plan := plan_of(connection, *key)) is not None:
                found[key] = self._extract(plan)
        self._known = found
        return found


class KeptPlans(Generic[T]):
    """Keeps what `extract` takes from the plans of generations, however old. Thread-safe."""

    def __init__(self, extract: Callable[[GenerationPlan], T], otherwise: T) -> None:
        """`otherwise`: of a generation that was never granted."""
        self._extract = extract
        self._otherwise = otherwise
        self._known: dict[tuple[str, int], T] = {}

    def read(self, connection: Connection, job: str, generation: int) -> T:
        found = self._known.get((job, generation))
        if found is not None:
            return found
        plan = plan_of(connection, job, generation) if generation >= 0 else None
        if plan is None:
            return self._otherwise
        found = self._extract(plan)
        self._known = dict([*self._known.items(), ((job, generation), found)][-MAX_PLANS:])
        return found


class GivenPlans(KeptPlans[GivenRanks]):
    """Keeps which host was given which ranks: host -> ranks."""

    def __init__(self) -> None:
        super().__init__(given_in, {})
