"""Compares what simulated hosts obeyed with what the simulated database knows, and adopts jobs from hosts."""

from __future__ import annotations

from collections.abc import Mapping

from flyball.contracts.cluster import JobState
from flyball.contracts.events import Event, EventKind
from flyball.contracts.reports.standings import HostStanding, LastObeyed, database_knows
from services.actuator.ports import AHEAD_AGAIN_S, ASK_AGAIN_S, Judgement
from services.controller.round.view import AdoptedJob, Adoption, Outcome, ReportedStanding
from services.record.codec import number_of
from services.record.lease_terms import Held
from services.record.step_events import restore_step_of
from simulator.ports.memory import GenerationRow, JobRow, Memory, StandingRow
from simulator.ports.steps import SEALS


def judge(memory: Memory, obeyed: Mapping[str, LastObeyed]) -> Judgement:
    """The database's identity, and which of these hosts are ahead of it."""
    with memory.transaction():
        ahead = {host for host, one in obeyed.items() if not _is_settled(memory, host, one) and not _knows(memory, one)}
        rows = ((host, memory.standings.get(host)) for host in obeyed)
        before = memory.clock.wall_s() - ASK_AGAIN_S
        asked = {host for host, row in rows if row is not None and row.is_needed and row.received_at < before}
        return Judgement(memory.cluster_id, memory.incarnation, frozenset(ahead), frozenset(asked))


def record(memory: Memory, standing: HostStanding, now: float) -> None:
    """Store a host's standing for the controller, if the host is ahead."""
    with memory.transaction():
        for incarnation, seq in standing.committed.items():
            sender = (standing.host_id, incarnation)
            memory.raise_watermark(sender, seq)
        row = memory.standings.get(standing.host_id)
        is_known = _knows(memory, standing.obeyed) or _is_settled(memory, standing.host_id, standing.obeyed)
        if row is None:
            if not is_known:
                memory.standings[standing.host_id] = StandingRow(standing, now, now)
                memory.changed()
            return
        if is_known and not row.is_needed:
            return  # settled while the message was on its way, perhaps
        if not is_known and row.is_settled:
            again = row.received_at + AHEAD_AGAIN_S if row.received_at else 0.0
            row.is_settled, row.first_received_at = False, max(now, again)
        row.standing, row.received_at = standing, now
        memory.changed()


def told(memory: Memory) -> tuple[ReportedStanding, ...]:
    """The standings that are not settled, or needed."""
    found = []
    for _, row in sorted(memory.standings.items()):
        if row.standing is not None and (row.is_needed or not row.is_settled):
            sealed, ended = SEALS.word_of(row.standing)
            moments = (row.received_at, row.first_received_at)
            found.append(ReportedStanding(row.standing, *moments, sealed, ended, row.is_settled, row.is_needed))
    return tuple(found)


def need(memory: Memory, outcome: Outcome, now: float) -> None:
    """Store whose word is needed from now on."""
    fresh = {one.standing.host_id for one in outcome.adoption.settled} if outcome.adoption is not None else set()
    for change in outcome.words:
        row = memory.standings.get(change.host_id)
        if row is None and change.is_needed:
            memory.standings[change.host_id] = StandingRow(None, 0.0, now, is_settled=True, is_needed=True)
        elif row is not None and row.standing is None and not change.is_needed:
            del memory.standings[change.host_id]
        elif row is not None:
            row.is_needed = change.is_needed
            is_stale = row.is_settled and row.received_at < now - ASK_AGAIN_S and change.host_id not in fresh
            if change.is_needed and is_stale:
                row.standing, row.received_at = None, 0.0


def adopt(memory: Memory, adoption: Adoption, now: float) -> list[Event]:
    """Take over the jobs that hosts reported."""
    news = [_adopt_job(memory, job, now) for job in adoption.jobs]
    for one in adoption.settled:
        host_id = one.standing.host_id
        row = memory.standings[host_id]
        row.is_settled = row.standing is not None and _same(row.standing.obeyed, one.standing.obeyed)
    memory.decision_floor = max(memory.decision_floor, adoption.decision_floor)
    if memory.held.epoch <= adoption.epoch_floor:
        memory.begin_epoch(Held(memory.held.holder, adoption.epoch_floor + 1, memory.held.expires_at))
    return news


def _knows(memory: Memory, obeyed: LastObeyed) -> bool:
    is_known = obeyed.command_id in memory.commands
    return database_knows(obeyed, cluster=memory.cluster_id, epoch=memory.held.epoch, is_command_known=is_known)


def _is_settled(memory: Memory, host_id: str, obeyed: LastObeyed) -> bool:
    row = memory.standings.get(host_id)
    return (
        row is not None
        and row.standing is not None
        and row.is_settled
        and _same(row.standing.obeyed, obeyed)
        and obeyed.epoch <= memory.held.epoch
    )


def _same(one: LastObeyed, other: LastObeyed) -> bool:
    return (one.cluster, one.command_id) == (other.cluster, other.command_id)


def _adopt_job(memory: Memory, adopted: AdoptedJob, now: float) -> Event:
    spec, plan = adopted.spec, adopted.plan
    step = restore_step_of(adopted.placement)
    job = memory.jobs.setdefault(spec.job, JobRow(spec, now, newest_step=-1 if step is None else step))
    job.spec, job.state, job.generation, job.ended_at = spec, JobState.RUNNING, plan.generation, 0.0
    job.message, job.stop_requested = "adopted from its hosts", False
    memory.generations[spec.job, plan.generation] = GenerationRow(
        plan, number_of(adopted.decision_id), now, step, adopted.placement.lineage
    )
    data = {"restore_step": step, "world_size": spec.world_size}
    return Event(at=now, kind=EventKind.GENERATION_STARTED, job=spec.job, generation=plan.generation, data=data)
