"""What the standings of hosts amount to for each job: whose word counts, and for what. Pure; decides nothing.

A host's word is bound to what it was given (docs/decisions/0044). Its seal shows that this cluster gave it this part of
a generation. It does not show that the job still lives: for that the other placed hosts are asked.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Set
from enum import Enum

import msgspec

from flyball.contracts.checkpoints import RestorePlan, ShardSource
from flyball.contracts.cluster import HostRanks, HostState, JobState, Placement
from flyball.contracts.orders import OrderKind
from flyball.contracts.reports.standings import HeldJob, decision_number
from services.controller.round.round import Round
from services.controller.round.view import GenerationView, JobView, ReportedStanding
from services.rules.grant_seals import whole_digest

GATHER_S = 2.0  # from the first standing: others follow within moments
HEARD_WITHIN_S = 10.0  # a placed host that nobody has heard by then is lost
WHOLE_WITHIN_S = 20.0  # how long to wait for the other hosts of an incomplete job
WORD_WITHIN_S = 30.0  # how long to wait for the word of a placed host that is heard
MAX_EPOCH_JUMP = 1_000_000  # leaders change some times a day
MAX_NUMBER_JUMP = 100_000_000  # years of decisions

Part = tuple[str, HeldJob]  # a host, and what it holds
Placing = tuple[str, int]  # a run and a generation; runs are named after their time


class Standing(Enum):
    """What becomes of a job that hosts hold."""

    KNOWN = "known"  # the database knows it as well
    ENDED = "ended"  # its hosts ended it, and none of its ranks runs
    WAITS = "waits"
    ADOPTED = "adopted"
    UNPROVED = "unproved"  # held for an operator: no seal of this cluster
    FOREIGN = "foreign"  # likewise: this supervisor is for another job alone
    INCOMPLETE = "incomplete"  # nobody says where some ranks are
    DISPUTED = "disputed"  # a host that was placed in it says that it ended, others run it
    UNHEARD = "unheard"  # a placed host reports, but does not say what it obeyed
    CONTRADICTED = "contradicted"  # hosts without seals that do not agree


class JobClaim(msgspec.Struct):
    """A job as its hosts hold it, in the newest generation that counts."""

    job: str
    generation: int
    parts: list[Part]
    is_sealed: bool
    began: float
    holders: frozenset[str]  # the hosts of the parts
    rivals: tuple[str, ...] = ()  # hosts that run something else under its name, without a seal either
    standing: Standing = Standing.WAITS
    until: float = 0.0  # of a wait
    why: str = ""
    hosts: tuple[str, ...] = ()  # those that the standing is about, sorted
    asked: tuple[str, ...] = ()  # placed hosts whose word is wanted

    @property
    def placing(self) -> Placing:
        return _placing_of(self.parts[0][1])

    @property
    def is_open(self) -> bool:
        """Whether what hosts say of it is still needed."""
        return self.standing not in (Standing.KNOWN, Standing.ENDED, Standing.ADOPTED)

    def running(self, round_: Round) -> list[str]:
        """The hosts on which ranks of it may run. What a lost host reported before is no reason to wait for it."""
        return [host for host, held in self.parts if own_running(host, held) and not _is_lost(round_, host)]


def is_implausible(round_: Round, one: ReportedStanding) -> str:
    """Why what a host says it obeyed cannot be; '' if it can."""
    obeyed = one.standing.obeyed
    proved = max((held.fence.epoch for held in one.standing.jobs if held.spec.job in one.sealed), default=0)
    if obeyed.epoch > max(round_.view.epoch, proved) + MAX_EPOCH_JUMP:
        return f"epoch {obeyed.epoch}, where {round_.view.epoch} is the present one"
    number = decision_number(obeyed.command_id)
    if number > round_.view.next_decision + MAX_NUMBER_JUMP:
        return f"decision {number}, where {round_.view.next_decision} is the next one"
    return ""


def own_running(host_id: str, held: HeldJob) -> tuple[int, ...]:
    """The host's own ranks that it says it runs."""
    part = held.placement.host(host_id)
    return tuple(rank for rank in held.ranks if part is not None and rank in part.ranks)


def claims_of(round_: Round, reported: Iterable[ReportedStanding]) -> dict[str, JobClaim]:
    """Return job -> what hosts hold of it. Parts without a seal count if nobody has a better one; beside sealed ones
    they complete the same grant, if an operator, who was shown nothing else, ordered the job's adoption. A host without
    a part of its own says nothing."""
    sealed: defaultdict[str, list[tuple[ReportedStanding, HeldJob]]] = defaultdict(list)
    unsealed: defaultdict[str, list[tuple[ReportedStanding, HeldJob]]] = defaultdict(list)
    for one in reported:
        for held in one.standing.jobs:
            own = held.placement.host(one.standing.host_id)
            if own is not None and own.ranks:
                (sealed if held.spec.job in one.sealed else unsealed)[held.spec.job].append((one, held))
    found = {}
    for job in sorted({*sealed, *unsealed}):
        every = sealed[job] or unsealed[job]
        placing = max(_placing_of(held) for _, held in every)
        newest = [(one, held) for one, held in every if _placing_of(held) == placing]
        # One generation that was granted twice, by two copies of the database: what was obeyed last counts.
        _, last = max(newest, key=lambda pair: pair[1].fence.epoch)
        newest = [(one, held) for one, held in newest if held.seal.whole in (last.seal.whole, "")]
        if sealed[job] and is_ordered(round_, job):
            newest += [(one, held) for one, held in unsealed[job] if _is_same_grant(held, last)]
        found[job] = JobClaim(
            job,
            last.placement.generation,
            [(one.standing.host_id, held) for one, held in newest],
            all(job in one.sealed for one, _ in newest),
            min(one.first_told_at for one, _ in newest),
            frozenset(one.standing.host_id for one, _ in newest),
        )
        if not sealed[job]:
            found[job].rivals = _rivals(found[job], unsealed[job])
    return found


def _placing_of(held: HeldJob) -> Placing:
    return held.placement.run, held.placement.generation


def _is_same_grant(held: HeldJob, sealed: HeldJob) -> bool:
    """Whether a part without a seal may belong to the grant of a sealed one."""
    return _placing_of(held) == _placing_of(sealed) and held.spec == sealed.spec


def _rivals(claim: JobClaim, told: Iterable[tuple[ReportedStanding, HeldJob]]) -> tuple[str, ...]:
    spec = claim.parts[0][1].spec
    found = {
        one.standing.host_id
        for one, held in told
        if own_running(one.standing.host_id, held)
        and (held.placement.generation != claim.generation or held.spec != spec)
    }
    return tuple(sorted(found))


def is_ordered(round_: Round, job: str) -> bool:
    """Whether an operator ordered that the job is adopted."""
    return (OrderKind.ADOPT, job) in round_.orders


def judge(  # noqa: PLR0912 - one for each standing
    round_: Round, claim: JobClaim, told: Set[str], ends: Mapping[str, Placing]
) -> None:
    """Set what becomes of a claim. `told`: the hosts that have spoken. `ends`: host -> where in this job it was
    placed, and what it says has ended."""
    claim.standing, claim.until, claim.why, claim.asked = Standing.WAITS, 0.0, "", ()
    ordered = is_ordered(round_, claim.job)
    placed = _placed(round_, claim)
    running = claim.running(round_)
    against = tuple(sorted(host for host, ended in ends.items() if ended >= claim.placing))
    unheard = tuple(host for host in sorted(placed) if host not in told and _is_heard(round_, host))
    unknown = tuple(host for host in sorted(placed) if host not in told and host not in round_.hosts)
    contradicted = () if claim.is_sealed else tuple(sorted({*_contradicting(round_, claim), *claim.rivals}))
    missing = _missing(claim, placed)
    if not _is_news(round_, claim):
        claim.standing = Standing.KNOWN
    elif round_.settings.adopt_only not in ("", claim.job) and not ordered:
        claim.standing = Standing.FOREIGN if running else Standing.KNOWN
    elif against and not ordered and not [host for host in running if host not in against]:
        claim.standing = Standing.ENDED
    elif not claim.is_sealed and not ordered:
        claim.standing = Standing.UNPROVED if running or claim.rivals else Standing.KNOWN
        claim.hosts = tuple(sorted({*running, *claim.rivals}))
    elif round_.now < claim.began + GATHER_S:
        _wait(claim, GATHER_S, "Other hosts may be about to report")
    elif against and not ordered:
        claim.standing, claim.hosts = Standing.DISPUTED, against
    elif unheard and round_.now < claim.began + WORD_WITHIN_S:
        claim.asked = unheard
        _wait(claim, WORD_WITHIN_S, f"The word of {_some(unheard)} about job {claim.job} is awaited")
    elif missing and round_.now < claim.began + WHOLE_WITHIN_S:
        _wait(claim, WHOLE_WITHIN_S, f"The hosts of {missing} of job {claim.job} have not reported yet")
    elif unknown and round_.now < claim.began + HEARD_WITHIN_S:
        _wait(claim, HEARD_WITHIN_S, f"{_some(unknown)} of job {claim.job} may be about to report")
    elif missing:
        claim.standing, claim.why = (Standing.INCOMPLETE, missing) if running else (Standing.KNOWN, "")
    elif unheard and not ordered:
        claim.standing, claim.hosts, claim.asked = Standing.UNHEARD, unheard, unheard
    elif contradicted:
        claim.standing, claim.hosts = Standing.CONTRADICTED, contradicted
    else:
        claim.standing = Standing.ADOPTED


def merged_of(round_: Round, claim: JobClaim) -> Placement:
    """The placement of a claim whose hosts are all known."""
    whole = merged([held.placement for _, held in claim.parts])
    placed = _placed(round_, claim)
    return msgspec.structs.replace(whole, hosts=tuple(sorted(placed.values(), key=lambda host: host.ranks)))


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


def newest_of(view: JobView) -> int:
    """The newest generation of a job that the database knows; -1: none."""
    present: GenerationView | None = view.generation or view.before
    return present.generation if present is not None else -1


def _wait(claim: JobClaim, for_s: float, why: str) -> None:
    claim.until, claim.why = claim.began + for_s, why


def _some(hosts: tuple[str, ...]) -> str:
    return hosts[0] if len(hosts) == 1 else f"{hosts[0]} and {len(hosts) - 1} more"


def _is_lost(round_: Round, host_id: str) -> bool:
    host = round_.hosts.get(host_id)
    return host is not None and host.state is HostState.SILENT


def _is_heard(round_: Round, host_id: str) -> bool:
    return host_id in round_.hosts and not _is_lost(round_, host_id)


def _placed(round_: Round, claim: JobClaim) -> dict[str, HostRanks]:
    """Return all hosts of a claim. Rank 0's host knows all of them. Without a seal, each host that is heard speaks for
    itself only."""
    found = {host.host_id: host for _, held in claim.parts for host in held.placement.hosts}
    for host_id, held in claim.parts:
        own = held.placement.host(host_id)
        if own is not None:
            found[host_id] = own
    return found


def _contradicting(round_: Round, claim: JobClaim) -> set[str]:
    """The hosts that are heard, placed in a claim without a seal, and do not hold it themselves."""
    return {host for host in _placed(round_, claim) if host not in claim.holders and _is_heard(round_, host)}


def _missing(claim: JobClaim, placed: Mapping[str, HostRanks]) -> str:
    """Describe the ranks whose hosts are unknown; '' if there are none."""
    placement = claim.parts[0][1].placement
    ranks = [rank for host in placed.values() for rank in host.ranks]
    known = {rank for rank in ranks if rank < placement.world_size}
    of = f"{placement.world_size} ranks of generation {claim.generation}"
    if len(known) < placement.world_size:
        return f"{placement.world_size - len(known)} of {of}"
    if len(known) < len(ranks):
        return f"some of {of}, which two hosts claim,"
    if claim.is_sealed:
        whole = merged([held.placement for _, held in claim.parts])
        if whole_digest(whole) != claim.parts[0][1].seal.whole:
            return f"some of {of}, which do not fit together,"
    return ""


def _is_news(round_: Round, claim: JobClaim) -> bool:
    """Whether hosts know a newer run or generation than the database, or a different one with the same number."""
    view = round_.jobs.get(claim.job)
    present = None if view is None else view.generation or view.before
    if view is None or present is None:
        return True
    run, generation = claim.placing
    if run and present.run and run != present.run:
        return run > present.run
    if present.generation != generation:
        return present.generation < generation
    if view.state is not JobState.RUNNING:
        return False  # it ended here, or was submitted again: its workers are strays
    mine = {host.host_id: host.ranks for host in present.hosts}
    return present.started_at == 0.0 or any(mine.get(host) != _ranks_of(host, held) for host, held in claim.parts)


def _ranks_of(host_id: str, held: HeldJob) -> tuple[int, ...]:
    part = held.placement.host(host_id)
    return part.ranks if part is not None else ()
