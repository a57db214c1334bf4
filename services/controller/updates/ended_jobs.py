"""What hosts say of jobs that ended, and that the database has running. It counts from hosts placed in them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from flyball.contracts.cluster import JobState
from flyball.contracts.decisions import DecisionKind
from services.controller.round.round import Round
from services.controller.round.view import JobView, ReportedStanding
from services.controller.updates.standing_words import GATHER_S, WORD_WITHIN_S, JobClaim, Placing, is_ordered
from services.rules.incident_states import IncidentEvent
from services.rules.wording import listed


def ends_of(reported: Iterable[ReportedStanding]) -> dict[str, dict[str, Placing]]:
    """Return job -> host -> where it was placed, and what it says has ended."""
    ends: dict[str, dict[str, Placing]] = {}
    for one in reported:
        for job, ended in one.ended.items():
            ends.setdefault(job, {})[one.standing.host_id] = ended
    return ends


def take_in(round_: Round, claims: Mapping[str, JobClaim], reported: Iterable[ReportedStanding]) -> _Ends:
    """Stop jobs that run according to the database, but whose hosts got a command to end them. One that others still
    run is left alone until they agree, or an operator decides."""
    found = _Ends()
    for job, by_host in sorted(ends_of(reported).items()):
        view, claim = round_.jobs.get(job), claims.get(job)
        ended = max(by_host.values())
        if view is None or view.generation is None or is_ordered(round_, job):
            continue
        if view.state.ended or view.state.ending:  # it is known here how it ends
            continue
        known = (view.generation.run, view.generation.generation)
        if known > ended or (claim is not None and claim.placing > ended):
            continue
        running = set(claim.running(round_)) if claim is not None else set()
        if known == ended:
            live = (rank.host_id for rank in view.generation.ranks if rank.exited is None and not rank.is_gone)
            running.update(host for host in live if not round_.is_silent(host))
        others = listed(sorted(running - by_host.keys()))
        told_at = min(one.first_told_at for one in reported if one.standing.host_id in by_host)
        about = listed(sorted(by_host))
        if round_.now >= told_at + GATHER_S and not others:
            reason = (
                "its hosts got the command to end it from a supervisor whose records are lost; how it ended is unknown"
            )
            rule, evidence = "believe_hosts_that_a_job_ended", {"told_by": about}
            round_.decide_job(job, DecisionKind.ADOPT, rule, f"Job {job}: {reason}.", evidence)
            forget_what_is_past(round_, job, view)
            round_.change_job(job, JobState.STOPPED, reason)
            continue
        if not view.stop_requested:
            round_.unadopted.add(job)
        found.needed.update(by_host)
        round_.wake(round_.now + 1.0)
        if round_.now >= told_at + WORD_WITHIN_S:
            found.disputed[job] = (
                f"{about} had ranks of job {job} and got the command to end it, and {others} still run it. It is left "
                f"alone. Next step: `flyball stop {job}`, or `flyball adopt {job}` to supervise it as it runs."
            )
    return found


class _Ends(msgspec.Struct):
    needed: set[str] = set()  # hosts whose word is needed until others agree
    disputed: dict[str, str] = {}  # job -> what its incident says


def forget_what_is_past(round_: Round, job: str, known: JobView | None) -> None:
    """End actions and incidents of older generations: current faults will be detected again."""
    if known is None:
        return
    round_.supersede_all(job)
    for incident in round_.open_incidents(job):
        round_.advance(incident, IncidentEvent.CLEARED)
