"""Compares what hosts obeyed with what this database knows, and adopts jobs from hosts that are ahead of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from sqlalchemy import Connection, Row, delete, insert, select, tuple_, update

from flyball.contracts.clock import Clock
from flyball.contracts.cluster import JobState
from flyball.contracts.events import Event, EventKind
from flyball.contracts.reports.standings import HostStanding, LastObeyed, database_knows
from services.actuator.ports import AHEAD_AGAIN_S, ASK_AGAIN_S, Judgement
from services.controller.round.view import AdoptedJob, Adoption, Outcome, ReportedStanding
from services.record.audit_records import Noted
from services.record.codec import MAX_NUMBER, dump, load, number_of
from services.record.step_events import restore_step_of
from services.rules.grant_seals import GrantSeals
from services.store.decisions import audit_store
from services.store.decisions.signal_writer import raise_watermarks
from services.store.sql import events
from services.store.sql.database import Database
from services.store.sql.lease import CONTROLLER, raise_epoch
from services.store.sql.rows import upsert
from services.store.sql.set_aside import readable
from services.store.sql.tables import cluster, commands, generations, jobs, lease, standings, watermarks

SHOWN = 100  # names in a record of the audit


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
            wanted = standings.c.host_id.in_(sorted(obeyed)) & standings.c.is_needed
            asked = set(
                connection.scalars(
                    select(standings.c.host_id).where(wanted, standings.c.told_at < self._clock.wall_s() - ASK_AGAIN_S)
                )
            )
            if ahead:
                settled = select(standings).where(standings.c.host_id.in_(sorted(ahead)))
                ahead -= {
                    row.host_id
                    for row in connection.execute(settled)
                    if _is_settled(row, last[row.host_id], here.epoch)
                }
        return Judgement(here.cluster_id, here.incarnation, frozenset(ahead), frozenset(asked))

    def record(self, standing: HostStanding) -> None:
        """Store a host's standing for the controller, if the host is ahead or its word is needed. Raises watermarks
        over the signals that it cannot send again."""
        now = self._clock.wall_s()
        row = {
            "told_at": now,
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
            mine = standings.c.host_id == standing.host_id
            before = connection.execute(select(standings).where(mine).with_for_update()).first()
            is_known = _knows(connection, here.cluster_id, here.epoch, standing.obeyed) or (
                before is not None and _is_settled(before, standing.obeyed, here.epoch)
            )
            if is_known and (before is None or not before.is_needed):
                return
            if before is None:
                first = {"is_settled": False, "is_needed": False, "first_told_at": now}
                connection.execute(insert(standings).values(host_id=standing.host_id, **first, **row))
            else:
                again = (
                    before.told_at + AHEAD_AGAIN_S if before.told_at else 0.0
                )  # one host alone must not end epochs at will
                first = {"is_settled": False, "first_told_at": max(now, again)} if before.is_settled else {}
                connection.execute(update(standings).where(mine).values(**row, **({} if is_known else first)))
            detail = _detail(standing)
            if before is None or detail != _detail_before(standing.host_id, before.document):
                audit_store.note(connection, Noted(now, "report_standing", standing.host_id, detail))
            events.append(connection, [])

        self._db.transact(work)


def cluster_id(connection: Connection) -> str:
    return str(connection.scalar(select(cluster.c.cluster_id)))


def decision_floor(connection: Connection) -> int:
    """Return the number up to which decisions were numbered, perhaps by another copy of the database."""
    floor = int(connection.scalar(select(cluster.c.decision_floor)) or 0)
    return floor if floor < MAX_NUMBER else 0  # no supervisor numbered that many


class StandingCache:
    """Reads the standings of hosts that are ahead, or whose word is needed, and verifies each once. Belongs to one
    thread."""

    def __init__(self, seals: GrantSeals) -> None:
        self._seals = seals
        self._known: dict[str, tuple[str, ReportedStanding]] = {}  # host -> document, what it amounts to

    def read(self, connection: Connection) -> tuple[tuple[ReportedStanding, ...], tuple[str, ...]]:
        """Return the standings by host, and the hosts whose word is awaited. Usually both are empty."""
        query = select(standings).where(~standings.c.is_settled | standings.c.is_needed).order_by(standings.c.host_id)
        rows = connection.execute(query).all()
        known, self._known = self._known, {}
        found = []
        for row in rows:
            document, one = known.get(row.host_id, ("", None))
            if row.document and document != row.document:
                one = readable("standings", row.host_id, self._verified, row.document)
            if one is None or not row.document:
                continue
            self._known[row.host_id] = row.document, one
            marks = {"is_settled": bool(row.is_settled), "is_needed": bool(row.is_needed)}
            moments = {"told_at": row.told_at, "first_told_at": row.first_told_at}
            found.append(msgspec.structs.replace(one, **moments, **marks))
        return tuple(found), tuple(row.host_id for row in rows if not row.document)

    def _verified(self, document: str) -> ReportedStanding:
        standing: HostStanding = load(document, HostStanding)
        sealed, ended = self._seals.word_of(standing)
        return ReportedStanding(standing, 0.0, 0.0, sealed, ended)


def need(connection: Connection, outcome: Outcome, now: float) -> None:
    """Store whose word is needed from now on. A host that has not given it, or long ago, is asked with its next
    poll."""
    fresh = {one.standing.host_id for one in outcome.adoption.settled} if outcome.adoption is not None else set()
    for change in outcome.words:
        mine = standings.c.host_id == change.host_id
        if not change.is_needed:
            connection.execute(delete(standings).where(mine, standings.c.document == ""))
            connection.execute(update(standings).where(mine).values(is_needed=False))
            continue
        if change.host_id not in fresh:
            stale = (mine, standings.c.is_settled, standings.c.told_at < now - ASK_AGAIN_S)
            connection.execute(update(standings).where(*stale).values(document="", told_at=0.0))
        if connection.execute(update(standings).where(mine).values(is_needed=True)).rowcount == 0:
            row = {"told_at": 0.0, "first_told_at": now, "is_settled": True, "is_needed": True}
            text = {"cluster": "", "command_id": "", "document": ""}
            connection.execute(insert(standings).values(host_id=change.host_id, **row, **text))


def adopt(connection: Connection, adoption: Adoption, now: float) -> list[Event]:
    """Adopt the jobs that hosts run, and raise counters above everything that the hosts have seen."""
    news: list[Event] = []
    for job in adoption.jobs:
        news += _adopt_job(connection, job, now)
        told_by = sorted(host.host_id for host in job.placement.hosts)
        detail = {"generation": job.plan.generation, "hosts": told_by[:SHOWN], "decision": job.decision_id}
        audit_store.note(connection, Noted(now, "adopt_job", job.spec.job, detail))
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


def _detail(standing: HostStanding) -> dict[str, Any]:
    """What the audit says of a standing."""
    return {
        "command_id": standing.obeyed.command_id,
        "epoch": standing.obeyed.epoch,
        "jobs": [f"{held.spec.job} {held.placement.generation}" for held in standing.jobs[:SHOWN]],
        "ended": [*standing.ended][:SHOWN],
    }


def _detail_before(host_id: str, document: str) -> dict[str, Any] | None:
    before: HostStanding | None = readable("standings", host_id, load, document, HostStanding) if document else None
    return _detail(before) if before is not None else None


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
