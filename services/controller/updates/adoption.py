"""Adopts jobs from hosts that are ahead of the database.

That happens after a backup was restored, a replica lost its last seconds, or another database took over. Epochs and
decision numbers continue above those that the hosts have seen. Their jobs are supervised as they run
(docs/decisions/0015), if this cluster's seals prove that it started them (0044); others wait for an operator.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set

from flyball.contracts.cluster import Placement
from flyball.contracts.decisions import DecisionKind, GenerationPlan, Incident
from flyball.contracts.reports.standings import decision_number
from services.controller.round.round import Round
from services.controller.round.view import AdoptedJob, Adoption, ReportedStanding, WordChange
from services.controller.updates import ended_jobs, held_jobs
from services.controller.updates.standing_words import (
    GATHER_S,
    JobClaim,
    Placing,
    Standing,
    claims_of,
    is_implausible,
    is_ordered,
    judge,
    merged_of,
    newest_of,
    own_running,
)
from services.rules.incident_states import IncidentEvent
from services.rules.wording import listed

DATABASE_OLDER = "database_older"  # hosts obeyed newer commands: a backup, or a replica that lost its last seconds
DATABASE_NEW = "database_new"  # hosts obeyed commands of another database

OTHER_CLUSTER_S = 15.0  # another supervisor counts as gone if hosts had no contact with it for this long


def take_in(round_: Round) -> None:
    """Adopt jobs of which hosts know more than the database. Until the round after its adoption, the other rules leave
    such a job alone, and its actions end: the view still shows its earlier state. A round that adopts decides nothing
    after this."""
    held_jobs.take_in_implausible(round_)
    reported = [one for one in round_.view.standings if not is_implausible(round_, one)]
    news = [one for one in reported if not one.is_settled]
    open_now = {i.cause: i for i in round_.incidents.values() if i.cause in (DATABASE_OLDER, DATABASE_NEW)}
    incidents = [
        open_now.get(cause) or _open(round_, cause, mine) for cause, mine in _by_cause(round_, news).items() if mine
    ]
    causes = {_cause_of(round_, one) for one in news}
    for cause, incident in open_now.items():
        if cause not in causes:
            round_.advance(incident, IncidentEvent.CLEARED)
    claims = claims_of(round_, reported)
    ends = ended_jobs.ends_of(reported)
    told = {one.standing.host_id for one in reported}
    elsewhere = [one for one in reported if _is_of_others(round_, one)]
    for claim in claims.values():
        judge(round_, claim, told, ends.get(claim.job, {}))
        _wait_for_other_cluster(round_, claim, elsewhere)
    _leave_alone(round_, claims.values(), {one.standing.host_id for one in elsewhere})
    ended = ended_jobs.take_in(round_, claims, reported)
    held_jobs.tell(round_, claims, reported, ended.disputed)
    settled = [one for one in news if _is_settled(round_, one, claims)]
    _keep_words(round_, reported, settled, ended.needed | _needed(claims.values(), ends))
    adopted = [
        _adopt(round_, claim, incidents, reported) for claim in claims.values() if claim.standing is Standing.ADOPTED
    ]
    held_jobs.end_orders(round_, claims)
    if settled or adopted:
        holders = {host for claim in claims.values() if claim.standing is Standing.ADOPTED for host in claim.holders}
        mine = [
            one.standing.obeyed
            for one in reported
            if one.is_settled or one in settled or one.standing.host_id in holders
        ]
        round_.adoption = Adoption(
            settled=tuple(settled),
            epoch_floor=max(obeyed.epoch for obeyed in mine),
            decision_floor=max(decision_number(obeyed.command_id) for obeyed in mine),
            jobs=tuple(adopted),
        )
        _settle(round_, incidents, round_.adoption, news)
    elif incidents:
        _say_what_is_awaited(round_, incidents, news, claims.values())


def _settle(round_: Round, incidents: Iterable[Incident], adoption: Adoption, news: Iterable[ReportedStanding]) -> None:
    """Record where epochs and decision numbers continue. Jobs that cannot be adopted keep the incidents open."""
    evidence = {
        "epoch": adoption.epoch_floor,
        "number": adoption.decision_floor,
        "hosts": len(adoption.settled),
        "jobs": len(adoption.jobs),
    }
    waiting = {_cause_of(round_, one) for one in news if one not in adoption.settled}
    concerned = {_cause_of(round_, one) for one in adoption.settled}
    for incident in (incident for incident in incidents if incident.cause in concerned):
        reason = (
            f"{incident.message} The hosts' state counts: commands continue under an epoch above "
            f"{adoption.epoch_floor}, decisions after number {adoption.decision_floor}."
        )
        round_.decide_incident(incident, DecisionKind.ADOPT, "count_on_above_what_hosts_obeyed", reason, evidence)
        if incident.cause not in waiting:
            round_.advance(round_.incidents[incident.incident_id], IncidentEvent.CLEARED)


def _by_cause(round_: Round, reported: Iterable[ReportedStanding]) -> dict[str, list[ReportedStanding]]:
    found: dict[str, list[ReportedStanding]] = {DATABASE_NEW: [], DATABASE_OLDER: []}
    for one in reported:
        found[_cause_of(round_, one)].append(one)
    return found


def _cause_of(round_: Round, one: ReportedStanding) -> str:
    return DATABASE_NEW if _is_of_others(round_, one) else DATABASE_OLDER


def _is_of_others(round_: Round, one: ReportedStanding) -> bool:
    """Whether the host obeyed another cluster, whose supervisor may still run."""
    return one.standing.obeyed.cluster not in ("", round_.view.cluster)


def _gone_at(round_: Round, one: ReportedStanding) -> float:
    """When the other supervisor that a host obeyed counts as gone; 0.0: it obeyed none."""
    return one.told_at + OTHER_CLUSTER_S - one.standing.unanswered_s if _is_of_others(round_, one) else 0.0


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


def _wait_for_other_cluster(round_: Round, claim: JobClaim, elsewhere: Iterable[ReportedStanding]) -> None:
    """A job is taken over from another cluster only when that one answers none of the job's hosts."""
    is_meant = claim.is_open or claim.standing is Standing.ADOPTED
    for one in elsewhere if is_meant else ():
        gone_at = _gone_at(round_, one)
        if one.standing.host_id in claim.holders and round_.now < gone_at:
            claim.standing, claim.until = Standing.WAITS, gone_at
            claim.why = _other_may_run(one)


def _other_may_run(one: ReportedStanding) -> str:
    return (
        f"The supervisor of cluster {one.standing.obeyed.cluster} may still run: its hosts are taken over once it has "
        f"answered none of them for {OTHER_CLUSTER_S:.0f} s. To keep it, point the daemons at it alone"
    )


def _leave_alone(round_: Round, claims: Iterable[JobClaim], elsewhere: Set[str]) -> None:
    """Keep the other rules from jobs of which hosts know more, and work from the hosts that run such jobs. A claim
    without a seal does that only to a job in which its host has ranks. `elsewhere`: hosts of another cluster."""
    for claim in claims:
        if not claim.is_open and claim.standing is not Standing.ADOPTED:
            continue
        view = round_.jobs.get(claim.job)
        present = None if view is None else view.generation or view.before
        own = set() if present is None else {host.host_id for host in present.hosts}
        if claim.is_sealed or is_ordered(round_, claim.job) or claim.holders & own:
            round_.unadopted.add(claim.job)
            if not claim.holders <= elsewhere:
                round_.supersede_all(claim.job)  # it runs elsewhere, and its newest steps are unknown here
        round_.unsupervised.update(claim.running(round_))


def _is_settled(round_: Round, one: ReportedStanding, claims: Mapping[str, JobClaim]) -> bool:
    """Whether nothing is awaited before the host gets commands. One whose jobs lack a proof gets them at once."""
    if round_.now < max(one.first_told_at + GATHER_S, _gone_at(round_, one)):
        return False
    mine = (claims[held.spec.job] for held in one.standing.jobs if held.spec.job in claims)
    return not any(
        claim.standing in (Standing.WAITS, *held_jobs.HELD) for claim in mine if one.standing.host_id in claim.holders
    )


def _say_what_is_awaited(
    round_: Round, incidents: Iterable[Incident], news: Iterable[ReportedStanding], claims: Iterable[JobClaim]
) -> None:
    waits = [(claim.until, claim.why) for claim in claims if claim.standing is Standing.WAITS]
    for one in news:
        if round_.now < one.first_told_at + GATHER_S:
            waits.append((one.first_told_at + GATHER_S, "Other hosts may be about to report"))
        elif round_.now < _gone_at(round_, one):
            waits.append((_gone_at(round_, one), _other_may_run(one)))
    if not waits:
        return
    until, what = min(waits)
    round_.wake(min(until, round_.now + 1.0))
    for incident in incidents:
        if incident.holding_for != what:
            reason = f"{incident.message} {what}."
            round_.decide_incident(incident, DecisionKind.HOLD, "wait_for_hosts_to_tell", reason)
            round_.advance(incident, None, holding_for=what, hold_until=until)


def _keep_words(
    round_: Round, reported: Iterable[ReportedStanding], settled: Iterable[ReportedStanding], needed: set[str]
) -> None:
    """Say whose word is needed from now on, and ask those that have not given it."""
    listed_anyway = {one.standing.host_id for one in reported if not one.is_settled}
    listed_anyway -= {one.standing.host_id for one in settled}
    marked = {one.standing.host_id for one in reported if one.is_needed} | set(round_.view.asked)
    changes = [WordChange(host, is_needed=True) for host in sorted(needed - marked - listed_anyway)]
    changes += [WordChange(host, is_needed=False) for host in sorted(marked - needed)]
    round_.words = tuple(changes)


def _needed(claims: Iterable[JobClaim], ends: Mapping[str, Mapping[str, Placing]]) -> set[str]:
    """Return the hosts that hold, end or should hold a job that is open."""
    needed: set[str] = set()
    for claim in claims:
        if claim.is_open:
            needed.update(claim.asked, claim.hosts, claim.holders, claim.rivals, ends.get(claim.job, ()))
    return needed


def _adopt(
    round_: Round, claim: JobClaim, incidents: Iterable[Incident], reported: Iterable[ReportedStanding]
) -> AdoptedJob:
    spec = claim.parts[0][1].spec
    placement = merged_of(round_, claim)
    plan = plan_of(
        placement,
        known_step=placement.restore.step if placement.restore else -1,
        ran_s=max(held.ran_s for _, held in claim.parts),
    )
    live = sum(len(own_running(host, held)) for host, held in claim.parts)
    known = round_.jobs.get(claim.job)
    before = "did not know the job" if known is None else f"knew generation {newest_of(known)}"
    proof = "" if claim.is_sealed else " An operator ordered it: no seal proves that this cluster started it."
    reason = (
        f"Job {claim.job} is adopted as its hosts run it: generation {claim.generation} on "
        f"{listed([host.host_id for host in placement.hosts])}, {live} of {placement.world_size} ranks alive. The "
        f"database {before}.{proof}"
    )
    evidence: dict[str, str | int] = {
        "job": claim.job,
        "generation": claim.generation,
        "ranks": placement.world_size,
        "alive": live,
        "sealed": claim.is_sealed,
        "told_by": listed(sorted(host for host, _ in claim.parts)),
    }
    incident = next(iter(incidents), None)
    if incident is not None:
        decision_id = round_.decide_incident(incident, DecisionKind.ADOPT, "adopt_what_hosts_run", reason, evidence)
    else:
        decision_id = round_.decide_job(claim.job, DecisionKind.ADOPT, "adopt_what_hosts_run", reason, evidence)
    ended_jobs.forget_what_is_past(round_, claim.job, known)
    return AdoptedJob(spec, plan, placement, decision_id)


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
