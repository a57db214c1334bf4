"""Compares what hosts obeyed with what this database knows, and adopts jobs from hosts that are ahead of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sqlalchemy import Connection, Row, insert, select, tuple_, update

from flyball.contracts.clock import Clock
from flyball.contracts.cluster import JobState
from flyball.contracts.events import Event, EventKind
from flyball.contracts.reports.standings import HostStanding, LastObeyed, database_knows
from services.actuator.ports import Judgement
from services.controller.round.view import AdoptedJob, Adoption, ReportedStanding
from services.record.codec import dump, load, number_of
from services.record.step_events import restore_step_of
from services.store.decisions.signal_writer import raise_watermarks
from services.store.sql import events
from services.store.sql.database import Database
from services.store.sql.lease import CONTROLLER, raise_epoch
from services.store.sql.rows import upsert
from services.store.sql.tables import cluster, commands, generations, jobs, lease, standings, watermarks


class SqlStandings:
    """The `Standings` of the actuator. Thread-safe."""

    def __init__(self, db: Database, clock: Clock) -> None:
        self._db = db
        self._clock = clock

    def judge(self, obeyed: Mapping[str, LastObeyed]) -> Judgement:
        """Return this database's identity, and which of these hosts know more than it does."""
        last = {host: one for host, one in obeyed.items() if one != LastObeyed()}
        with self._db.read() as connection:
            here = connection.execute(_HERE).one()
            ids = sorted({one.command_id for one in last.values() if one.command_id})
            known = set(connection.scalars(select(commands.c.command_id).where(commands.c.command_id.in_(ids))))
            ahead = {
                host
                for host, one in last.items()
                if not database_knows(
                    one, cluster=here.cluster_id, epoch=here.epoch, is_command_known=one.command_id in known
                )
            }
            if ahead:
                settled = select(standings).where(standings.c.host_id.in_(sorted(ahead)))
                ahead -= {
                    row.host_id
                    for row in connection.execute(settled)
                    if _is_settled(row, last[row.host_id], here.epoch)
                }
        return Judgement(here.cluster_id, here.incarnation, frozenset(ahead))

    def record(self, standing: HostStanding) -> None:
        """Store a host's standing for the controller, if the host is ahead. Raises watermarks over the signals that it
        cannot send again."""
        now = self._clock.wall_s()
        row = {
            "told_at": now,
            "is_settled": False,
            "cluster": standing.obeyed.cluster,
            "command_id": standing.obeyed.command_id,
            "document": dump(standing),
        }

        marks = [
            {"incarnation": incarnation, "source": standing.host_id, "seq": seq}
            for incarnation, seq in sorted(standing.committed.items())
        ]

        def work(connection: Connection) -> None:
            upsert(connection, watermarks, marks, maximum=("seq",))
            raise_watermarks(connection, [(standing.host_id, incarnation) for incarnation in standing.committed])
            here = connection.execute(_HERE).one()
            if _knows(connection, here.cluster_id, here.epoch, standing.obeyed):
                return
            mine = standings.c.host_id == standing.host_id
            before = connection.execute(select(standings).where(mine).with_for_update()).first()
            if before is None:
                connection.execute(insert(standings).values(host_id=standing.host_id, first_told_at=now, **row))
            elif not _is_settled(before, standing.obeyed, here.epoch):
                first = {"first_told_at": now} if before.is_settled else {}
                connection.execute(update(standings).where(mine).values(**row, **first))
            events.append(connection, [])

        self._db.transact(work)


def cluster_id(connection: Connection) -> str:
    return str(connection.scalar(select(cluster.c.cluster_id)))


def decision_floor(connection: Connection) -> int:
    """Return the number up to which decisions were numbered, perhaps by another copy of the database."""
    return int(connection.scalar(select(cluster.c.decision_floor)) or 0)


def unsettled(connection: Connection) -> tuple[ReportedStanding, ...]:
    """Return the standings of hosts that are ahead, by host. Usually empty."""
    query = select(standings).where(~standings.c.is_settled).order_by(standings.c.host_id)
    return tuple(
        ReportedStanding(load(row.document, HostStanding), row.told_at, row.first_told_at)
        for row in connection.execute(query)
    )


def adopt(connection: Connection, adoption: Adoption, now: float) -> list[Event]:
    """Adopt the jobs that hosts run, and raise counters above everything that the hosts have seen."""
    news: list[Event] = []
    for job in adoption.jobs:
        news += _adopt_job(connection, job, now)
    settled = [
        (one.standing.host_id, one.standing.obeyed.cluster, one.standing.obeyed.command_id) for one in adoption.settled
    ]
    same = tuple_(standings.c.host_id, standings.c.cluster, standings.c.command_id).in_(settled)
    connection.execute(update(standings).where(same).values(is_settled=True))
    connection.execute(
        update(cluster)
        .where(cluster.c.decision_floor < adoption.decision_floor)
        .values(decision_floor=adoption.decision_floor)
    )
    raise_epoch(connection, adoption.epoch_floor)
    return news


_HERE = (  # one row each
    select(cluster.c.cluster_id, lease.c.epoch, lease.c.incarnation).select_from(
        cluster.join(lease, lease.c.name == CONTROLLER)
    )
)


def _knows(connection: Connection, cluster_id: str, epoch: int, obeyed: LastObeyed) -> bool:
    known = connection.scalar(select(commands.c.command_id).where(commands.c.command_id == obeyed.command_id))
    return database_knows(obeyed, cluster=cluster_id, epoch=epoch, is_command_known=known is not None)


def _is_settled(row: Row[Any], obeyed: LastObeyed, epoch: int) -> bool:
    """Return whether the host's last command was adopted already; a standing sent before that is no news."""
    is_same = (row.cluster, row.command_id) == (obeyed.cluster, obeyed.command_id)
    return bool(row.is_settled) and is_same and obeyed.epoch <= epoch


def _adopt_job(connection: Connection, adopted: AdoptedJob, now: float) -> list[Event]:
    spec, plan, placement = adopted.spec, adopted.plan, adopted.placement
    mine = jobs.c.job == spec.job
    step = restore_step_of(placement)
    values = {
        "spec": dump(spec),
        "state": JobState.RUNNING.value,
        "message": f"running on {', '.join(host.host_id for host in placement.hosts[:8])}, adopted from there",
        "ended_at": 0.0,
        "stop_requested": False,
        "generation": plan.generation,
        "run": plan.run,
        "adopted": None,
    }
    if connection.scalar(select(jobs.c.job).where(mine).with_for_update()) is None:
        first = {"job": spec.job, "submitted_at": now, "loss": "", "loss_step": -1}
        connection.execute(insert(jobs).values(**first, newest_step=-1 if step is None else step, **values))
    else:
        connection.execute(update(jobs).where(mine).values(values))
    generation = {
        "decision": number_of(adopted.decision_id),
        "plan": dump(plan),
        "granted_at": now,
        "started_at": now,
        "restore_step": step,
        "lineage": dump(placement.lineage),
        "placement": dump(placement),
    }
    this = (generations.c.job == spec.job, generations.c.generation == plan.generation)
    if connection.scalar(select(generations.c.job).where(*this)) is None:
        connection.execute(insert(generations).values(job=spec.job, generation=plan.generation, **generation))
    else:
        connection.execute(update(generations).where(*this).values(generation))
    data = {"restore_step": step, "world_size": spec.world_size}
    return [Event(at=now, kind=EventKind.GENERATION_STARTED, job=spec.job, generation=plan.generation, data=data)]
