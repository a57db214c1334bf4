"""Jobs that hosts run and that are not adopted: each is shown to an operator, with the next step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from flyball.contracts.cluster import HostState
from flyball.contracts.decisions import DecisionKind, Incident
from flyball.contracts.orders import OrderKind, OrderState
from flyball.contracts.reports.standings import HeldJob
from services.controller.round.round import Round
from services.controller.round.view import ReportedStanding
from services.controller.updates.standing_words import GATHER_S, JobClaim, Standing, is_implausible, own_running
from services.rules.incident_states import IncidentEvent
from services.rules.wording import listed, shortened

NOT_ADOPTED = "job_not_adopted"
IMPLAUSIBLE = "standing_implausible"  # a host says that it obeyed what no supervisor of this cluster can have said

WITHDRAWN_AFTER_S = 30.0  # a daemon that is asked says it each second
MAX_SHOWN = 8  # unproved jobs of a host in its incident
HELD = (Standing.INCOMPLETE, Standing.DISPUTED, Standing.UNHEARD, Standing.CONTRADICTED)


def take_in_implausible(round_: Round) -> None:
    """Hold hosts that say they obeyed what cannot be: they get no commands, and nothing is taken over from them. A host
    is asked with each poll while it says so. One that is heard and says so no longer has begun anew: what it said is
    forgotten."""
    implausible = [(one, why) for one in round_.view.standings if (why := is_implausible(round_, one))]
    round_.withdrawn = tuple(one for one, _ in implausible if _says_so_no_longer(round_, one))
    found = {one.standing.host_id: why for one, why in implausible if one not in round_.withdrawn}
    for incident in _open_of(round_, IMPLAUSIBLE):
        if incident.host_id not in found:
            round_.advance(incident, IncidentEvent.CLEARED)
    known = {incident.host_id for incident in _open_of(round_, IMPLAUSIBLE)}
    for host in sorted(found.keys() - known):
        message = (
            f"{host} says that it obeyed {found[host]}. It gets no commands. Next step: if another supervisor gave it "
            "commands, start its daemon with a state folder of its own for each; otherwise its token is in other "
            f"hands: revoke it (docs/reference/security.md), and start the daemon of {host} with a new state folder. "
            f"This closes {WITHDRAWN_AFTER_S:.0f} s after the host last said so, once it reports."
        )
        facts = {"job": "", "host_id": host, "cause": IMPLAUSIBLE, "generation": -1}
        _hold(round_, message, "refuse_what_cannot_be", **facts)


def _says_so_no_longer(round_: Round, one: ReportedStanding) -> bool:
    """Whether a host reports, and has not said for a while what it said. Sets the round's alarm for that."""
    host = round_.hosts.get(one.standing.host_id)
    is_heard = round_.view.is_whole if host is None else host.state is not HostState.SILENT
    until = one.told_at + WITHDRAWN_AFTER_S
    if is_heard and round_.now < until:
        round_.wake(until)
    return is_heard and round_.now >= until


def tell(
    round_: Round,
    claims: Mapping[str, JobClaim],
    reported: Iterable[ReportedStanding],
    disputed: Mapping[str, str],
) -> None:
    """Open the incidents of jobs that cannot be adopted, keep their messages up to date, and close those that are over.
    Those of unproved jobs are one for each host, however many jobs it tells of."""
    told: dict[tuple[str, str], tuple[str, int]]  # job or '', host or '' -> message, generation
    told = {(job, ""): (message, -1) for job, message in disputed.items()}
    for claim in claims.values():
        if claim.standing in (*HELD, Standing.FOREIGN) and (message := _why_held(round_, claim)):
            told[claim.job, ""] = message, claim.generation
    unproved = {claim.job for claim in claims.values() if claim.standing is Standing.UNPROVED}
    for one in reported:
        host = one.standing.host_id
        mine = (held for held in one.standing.jobs if held.spec.job in unproved and own_running(host, held))
        if shown := sorted(mine, key=lambda held: held.spec.job):
            told["", host] = _unproved(host, shown), -1
    for incident in _open_of(round_, NOT_ADOPTED):
        message = told.pop((incident.job, incident.host_id), ("", -1))[0]
        about = claims.get(incident.job)
        if not message and not (about is not None and about.is_open and about.running(round_)):
            round_.advance(incident, IncidentEvent.CLEARED)
        elif message and message != incident.message:
            round_.advance(incident, None, message=message)
    for (job, host), (message, generation) in sorted(told.items()):
        facts = {"job": job, "host_id": host, "cause": NOT_ADOPTED, "generation": generation}
        _hold(round_, message, "say_what_cannot_be_adopted", **facts)
    if any(claim.is_open for claim in claims.values()):
        round_.wake(round_.now + GATHER_S)


def _open_of(round_: Round, cause: str) -> list[Incident]:
    return [i for i in round_.incidents.values() if i.cause == cause and not i.state.closed]


def _hold(round_: Round, message: str, rule: str, **facts: Any) -> None:  # noqa: ANN401 - the fields of Incident
    incident = round_.open_incident(message=message, observed_at=round_.now, **facts)
    round_.decide_incident(incident, DecisionKind.HOLD, rule, message)


def _why_held(round_: Round, claim: JobClaim) -> str:
    hosts = listed(claim.running(round_) or sorted(host for host, _ in claim.parts))
    about = listed(claim.hosts)
    begins = f"Job {claim.job} runs unsupervised on {hosts}"
    by_hand = f"`flyball adopt {claim.job}` to supervise it as it runs"
    match claim.standing:
        case Standing.FOREIGN:
            return (
                f"{begins}: this supervisor is for job {round_.settings.adopt_only} alone. Next step: {by_hand}; or "
                f"end its workers on {hosts}: SIGINT ends a daemon with them."
            )
        case Standing.INCOMPLETE:
            return (
                f"{begins}: no host reports where {claim.why} are. Next step: bring its other hosts back; or end its "
                f"workers on {hosts} (SIGINT ends a daemon with them), start the daemons again, and submit the job: it "
                "continues from its newest recovery point."
            )
        case Standing.DISPUTED:
            return (
                f"{begins}, but {about} had ranks of it and got the command to end it. Next step: {by_hand}; or, if it "
                f"was to end, end its workers on {hosts}: SIGINT ends a daemon with them."
            )
        case Standing.UNHEARD:
            return (
                f"{begins}, and {about} had ranks of it, reports, and does not say what it obeyed: it may know that "
                f"the job ended. Next step: start the daemon of {about} again; or {by_hand}."
            )
    return (
        f"{begins}, without a seal of this cluster, and {about} does not hold the same, although it is placed in it or "
        f"tells of a job of that name. Next step: end the workers on {hosts}, and submit the job."
    )


def _unproved(host: str, held: list[HeldJob]) -> str:
    """Say what a host holds without a proof, and the commands that adopt it."""
    jobs = []
    for one in held[:MAX_SHOWN]:
        runs = shortened(" ".join(one.spec.argv), 100)
        jobs.append(f"{one.spec.job} (generation {one.placement.generation}, {one.placement.world_size} ranks, {runs})")
    commands = ", ".join(f"`flyball adopt {one.spec.job}`" for one in held[:MAX_SHOWN])
    more = f" and {len(held) - MAX_SHOWN} more" if len(held) > MAX_SHOWN else ""
    return (
        f"{host} runs {'; '.join(jobs)}{more}, which this database does not know, and no seal proves that this cluster "
        "started it: an older daemon, or another secret. It is not supervised, and the host gets no other work. Next "
        f"step: if you know it, {commands} on the supervisor's machine; otherwise find out who started it."
    )


def end_orders(round_: Round, claims: Mapping[str, JobClaim]) -> None:
    """An order to adopt a job is over with the job's adoption, or refused when it cannot be."""
    for order in [order for order in round_.orders.values() if order.kind is OrderKind.ADOPT]:
        claim = claims.get(order.target)
        if claim is None or not claim.is_open:
            round_.settle_order(order, OrderState.OVER)
        elif claim.standing in HELD:
            round_.settle_order(order, OrderState.REFUSED, _why_held(round_, claim))
