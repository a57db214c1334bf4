"""Adopts jobs from hosts that are ahead of the database.

That happens after a backup was restored, a replica lost its last seconds, or another database took over. Epochs and
decision numbers continue above those that the hosts have seen. Their jobs are supervised as they run
(docs/decisions/0015).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from flyball.contracts.checkpoints import RestorePlan, ShardSource
from flyball.contracts.cluster import HostRanks, HostState, JobState, Placement
from flyball.contracts.decisions import DecisionKind, GenerationPlan, Incident
from flyball.contracts.reports.standings import HeldJob, decision_number
from services.controller.round.round import Round
from services.controller.round.view import AdoptedJob, Adoption, GenerationView, JobView, ReportedStanding
from services.controller.round.wording import listed
from services.rules.incident_states import IncidentEvent

DATABASE_OLDER = "database_older"  # hosts obeyed newer commands: a backup, or a replica that lost its last seconds
DATABASE_NEW = "database_new"  # hosts obeyed commands of another database
NOT_ADOPTED = "job_not_adopted"

GATHER_S = 2.0  # from the first standing: others follow within moments
OTHER_CLUSTER_S = 15.0  # another supervisor counts as gone if hosts had no contact with it for this long
WHOLE_WITHIN_S = 20.0  # how long to wait for the other hosts of an incomplete job


def take_in(round_: Round) -> None:
    """Adopt jobs of which hosts know more than the database. Until the round after its adoption, the other rules leave
    such a job alone, and its actions end: the view still shows its earlier state. A round that adopts decides nothing
    after this."""
    reported = round_.view.standings
    open_now = {i.cause: i for i in round_.incidents.values() if i.cause in (DATABASE_OLDER, DATABASE_NEW)}
    _close_adopted(round_)
    if not reported:
        for incident in open_now.values():
            round_.advance(incident, IncidentEvent.CLEARED)
        return
    incidents = [
        open_now.get(cause) or _open(round_, cause, mine) for cause, mine in _by_cause(round_, reported).items() if mine
    ]
    began = min(one.first_told_at for one in reported)
    held, ended = _newest_held(reported), _ended(reported)
    lost = {job: part for job, part in held.items() if ended.get(job, -1) < part[0] and _is_news(round_, job, part)}
    round_.unadopted |= lost.keys()
    others = {one.standing.host_id for one in reported if _is_of_others(round_, one)}
    for job, (_, parts) in sorted(lost.items()):
        if any(host_id not in others for host_id, _ in parts):
            round_.supersede_all(job)  # it runs elsewhere, and its newest steps are unknown here
    waits_for = _waits_for(round_, reported, lost, began)
    if waits_for:
        until, what = waits_for
        round_.wake(min(until, round_.now + 1.0))
        for incident in incidents:
            if incident.holding_for != what:
                reason = f"{incident.message} {what}."
                round_.decide_incident(incident, DecisionKind.HOLD, "wait_for_hosts_to_tell", reason)
                round_.advance(incident, None, holding_for=what, hold_until=until)
        return
    stuck = {job for job, part in lost.items() if _missing(*part) and any(_runs(round_, *one) for one in part[1])}
    for job in sorted(stuck):
        _cannot_adopt(round_, job, *lost[job])
    settled = tuple(one for one in reported if not any(job.spec.job in stuck for job in one.standing.jobs))
    if not settled:
        return
    adopted = [_adopt(round_, job, *part, incidents[0]) for job, part in sorted(lost.items()) if not _missing(*part)]
    _end_what_ended(round_, ended, {job: part[0] for job, part in held.items()})
    round_.adoption = Adoption(
        settled=settled,
        epoch_floor=max(one.standing.obeyed.epoch for one in reported),
        decision_floor=max(decision_number(one.standing.obeyed.command_id) for one in reported),
        jobs=tuple(adopted),
    )
    _settle(round_, incidents, round_.adoption, is_all=len(settled) == len(reported))


def _settle(round_: Round, incidents: Iterable[Incident], adoption: Adoption, *, is_all: bool) -> None:
    """Record where epochs and decision numbers continue. Jobs that cannot be adopted keep the incidents open."""
    evidence = {
        "epoch": adoption.epoch_floor,
        "number": adoption.decision_floor,
        "hosts": len(adoption.settled),
        "jobs": len(adoption.jobs),
    }
    for incident in incidents:
        reason = (
            f"{incident.message} The hosts' state counts: commands continue under an epoch above "
            f"{adoption.epoch_floor}, decisions after number {adoption.decision_floor}."
        )
        round_.decide_incident(incident, DecisionKind.ADOPT, "count_on_above_what_hosts_obeyed", reason, evidence)
        if is_all:
            round_.advance(round_.incidents[incident.incident_id], IncidentEvent.CLEARED)


def _by_cause(round_: Round, reported: Iterable[ReportedStanding]) -> dict[str, list[ReportedStanding]]:
    found: dict[str, list[ReportedStanding]] = {DATABASE_NEW: [], DATABASE_OLDER: []}
    for one in reported:
        found[DATABASE_NEW if _is_of_others(round_, one) else DATABASE_OLDER].append(one)
    return found


def _is_of_others(round_: Round, one: ReportedStanding) -> bool:
    """Whether the host obeyed another cluster, whose supervisor may still run."""
    return one.standing.obeyed.cluster not in ("", round_.view.cluster)


def _runs(round_: Round, host_id: str, held: HeldJob) -> bool:
    """Whether the host may still run ranks of the job: what a lost host reported before is no reason to wait for it."""
    host = round_.hosts.get(host_id)
    return bool(held.ranks) and (host is None or host.state is not HostState.SILENT)


def _open(round_: Round, cause: str, reported: list[ReportedStanding]) -> Incident:
    hosts = [one.standing.host_id for one in reported]
    newest = max((one.standing.obeyed for one in reported), key=lambda obeyed: obeyed.epoch)
    obeyed = f"{listed(hosts)} obeyed {newest.command_id or 'a supervisor'} of epoch {newest.epoch}"
    if cause == DATABASE_NEW:
        message = f"{obeyed} of cluster {newest.cluster}, and this database is cluster {round_.view.cluster}."
    else:
        message = f"{obeyed}, which this database does not know: the database is older than its hosts' state."
    return round_.open_incident(
        job="", host_id="", cause=cause, message=message, generation=-1, observed_at=reported[0].first_told_at
    )


def _newest_held(reported: Iterable[ReportedStanding]) -> dict[str, tuple[int, list[tuple[str, HeldJob]]]]:
    """Return job -> the newest generation that hosts got a command to start, and what each host holds of it."""
    found: dict[str, tuple[int, list[tuple[str, HeldJob]]]] = {}
    for one in reported:
        for held in one.standing.jobs:
            job, generation = held.spec.job, held.placement.generation
            newest = found.get(job, (-1, []))
            if generation > newest[0]:
                newest = found[job] = (generation, [])
            if generation == newest[0]:
                newest[1].append((one.standing.host_id, held))
    return found


def _ended(reported: Iterable[ReportedStanding]) -> dict[str, int]:
    """Return job -> the newest generation in which a host got a command to end the job."""
    ended: dict[str, int] = {}
    for one in reported:
        for job, generation in one.standing.ended.items():
            ended[job] = max(generation, ended.get(job, -1))
    return ended


def _is_news(round_: Round, job: str, part: tuple[int, list[tuple[str, HeldJob]]]) -> bool:
    """Whether hosts know a newer generation than the database, or a different one with the same number."""
    view = round_.jobs.get(job)
    present = None if view is None else view.generation or view.before
    generation, parts = part
    if view is None or present is None or present.generation != generation:
        return present is None or present.generation < generation
    if view.state is not JobState.RUNNING:
        return False  # it ended here, or was submitted again: its workers are strays
    mine = {host.host_id: host.ranks for host in present.hosts}
    return present.started_at == 0.0 or any(mine.get(host) != _ranks_of(host, held) for host, held in parts)


def _ranks_of(host_id: str, held: HeldJob) -> tuple[int, ...]:
    part = held.placement.host(host_id)
    return part.ranks if part is not None else ()


def _waits_for(
    round_: Round,
    reported: Iterable[ReportedStanding],
    lost: Mapping[str, tuple[int, list[tuple[str, HeldJob]]]],
    began: float,
) -> tuple[float, str] | None:
    """Return until when the adoption must wait, and for what; None if it need not."""
    if round_.now < began + GATHER_S:
        return began + GATHER_S, "Other hosts may be about to report"
    for one in reported:
        obeyed = one.standing.obeyed
        gone_at = one.told_at + OTHER_CLUSTER_S - one.standing.unanswered_s
        if _is_of_others(round_, one) and round_.now < gone_at:
            return gone_at, (
                f"The supervisor of cluster {obeyed.cluster} may still run: its hosts are taken over once it has "
                f"answered none of them for {OTHER_CLUSTER_S:.0f} s. To keep it, point the daemons at it alone"
            )
    if round_.now < began + WHOLE_WITHIN_S:
        for job in sorted(lost):
            if missing := _missing(*lost[job]):
                return began + WHOLE_WITHIN_S, f"The hosts of {missing} of job {job} have not reported yet"
    return None


def _placed(parts: list[tuple[str, HeldJob]]) -> dict[str, HostRanks]:
    """Return all hosts of a generation that the standings name; rank 0's host knows all of them."""
    return {host.host_id: host for _, held in parts for host in held.placement.hosts}


def _missing(generation: int, parts: list[tuple[str, HeldJob]]) -> str:
    """Describe the ranks whose hosts are unknown; '' if there are none."""
    world_size = parts[0][1].placement.world_size
    known = {rank for host in _placed(parts).values() for rank in host.ranks}
    missing = sorted(set(range(world_size)) - known)
    return f"{len(missing)} of {world_size} ranks of generation {generation}" if missing else ""


def _adopt(
    round_: Round, job: str, generation: int, parts: list[tuple[str, HeldJob]], incident: Incident
) -> AdoptedJob:
    spec = parts[0][1].spec
    placement = merged([held.placement for _, held in parts])
    plan = plan_of(
        placement,
        known_step=placement.restore.step if placement.restore else -1,
        ran_s=max(held.ran_s for _, held in parts),
    )
    live = sum(len(held.ranks) for _, held in parts)
    known = round_.jobs.get(job)
    before = "did not know the job" if known is None else f"knew generation {_newest(known)}"
    decision_id = round_.decide_incident(
        incident,
        DecisionKind.ADOPT,
        "adopt_what_hosts_run",
        f"Job {job} is adopted as its hosts run it: generation {generation} on "
        f"{listed([host.host_id for host in placement.hosts])}, {live} of {placement.world_size} ranks alive. The "
        f"database {before}.",
        {"job": job, "generation": generation, "ranks": placement.world_size, "alive": live},
    )
    _forget_what_is_past(round_, job, known)
    return AdoptedJob(spec, plan, placement, decision_id)


def _newest(view: JobView) -> int:
    present: GenerationView | None = view.generation or view.before
    return present.generation if present is not None else -1


def _forget_what_is_past(round_: Round, job: str, known: JobView | None) -> None:
    """End actions and incidents of older generations: current faults will be detected again."""
    if known is None:
        return
    round_.supersede_all(job)
    for incident in round_.open_incidents(job):
        round_.advance(incident, IncidentEvent.CLEARED)


def _cannot_adopt(round_: Round, job: str, generation: int, parts: list[tuple[str, HeldJob]]) -> None:
    """Open an incident, once. It stays open until the job is supervised, or none of its ranks runs."""
    round_.wake(round_.now + GATHER_S)
    if any(i.cause == NOT_ADOPTED and i.job == job for i in round_.incidents.values() if not i.state.closed):
        return
    hosts = [host for host, held in parts if held.ranks]
    incident = round_.open_incident(
        job=job,
        host_id="",
        cause=NOT_ADOPTED,
        message=(
            f"Job {job} runs unsupervised on {listed(hosts)}: no host reports where {_missing(generation, parts)} are. "
            f"Next step: bring its other hosts back; or end its workers on {listed(hosts)} (SIGINT ends a daemon with "
            "them), start the daemons again, and submit the job: it continues from its newest recovery point."
        ),
        generation=generation,
        observed_at=round_.now,
    )
    round_.decide_incident(incident, DecisionKind.HOLD, "say_what_cannot_be_adopted", incident.message)


def _close_adopted(round_: Round) -> None:
    """Close incidents of jobs that are supervised by now, or that no host runs any more."""
    running = {
        held.spec.job
        for one in round_.view.standings
        for held in one.standing.jobs
        if _runs(round_, one.standing.host_id, held)
    }
    for incident in list(round_.incidents.values()):
        view = round_.jobs.get(incident.job)
        is_known = view is not None and _newest(view) >= incident.generation
        if incident.cause == NOT_ADOPTED and (is_known or incident.job not in running):
            round_.advance(incident, IncidentEvent.CLEARED)


def _end_what_ended(round_: Round, ended: Mapping[str, int], held: Mapping[str, int]) -> None:
    """Stop jobs that run according to the database, but whose hosts got a command to end them."""
    for job, generation in sorted(ended.items()):
        view = round_.jobs.get(job)
        if view is None or view.state.ended or held.get(job, -1) > generation or view.generation is None:
            continue
        if view.generation.generation <= generation:
            reason = (
                "its hosts got the command to end it from a supervisor whose records are lost; how it ended is unknown"
            )
            round_.decide_job(job, DecisionKind.ADOPT, "believe_hosts_that_a_job_ended", f"Job {job}: {reason}.", {})
            _forget_what_is_past(round_, job, view)
            round_.change_job(job, JobState.STOPPED, reason)


def merged(parts: list[Placement]) -> Placement:
    """Merge the parts of a placement that hosts got. Pure."""
    hosts = {host.host_id: host for part in parts for host in part.hosts}
    peers = {owner: holders for part in parts for owner, holders in part.peers.items()}
    whole = max(parts, key=lambda part: len(part.hosts))
    sources: dict[str, tuple[ShardSource, ...]] = {}
    for part in parts:
        sources |= dict(part.restore.sources) if part.restore is not None else {}
    return Placement(
        job=whole.job,
        generation=whole.generation,
        world_size=whole.world_size,
        hosts=tuple(sorted(hosts.values(), key=lambda host: host.ranks)),
        master_address=whole.master_address,
        master_port=whole.master_port,
        peers=peers,
        lineage=whole.lineage,
        restore=RestorePlan(whole.restore.step, sources) if whole.restore is not None else None,
        restart_count=whole.restart_count,
        run=whole.run,
    )


def plan_of(placement: Placement, *, known_step: int, ran_s: float) -> GenerationPlan:
    """Reconstruct the grant of a placement, as far as the placement shows it. Pure."""
    history = placement.lineage[:-1]
    return GenerationPlan(
        job=placement.job,
        generation=placement.generation,
        parent=history[-1].generation if history else None,
        hosts=placement.hosts,
        peers=placement.peers,
        parent_lineage=(),  # lost; the part that still counts is in the placement's lineage
        restart_count=placement.restart_count,
        restarts_used=0,  # the number that the job had used is lost
        known_step=known_step,
        master_port=placement.master_port,
        run=placement.run,
        furthest_step=known_step,
        ran_before_s=ran_s,
    )
