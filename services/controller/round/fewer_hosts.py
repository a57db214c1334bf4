"""With how few hosts a job may go on, and on which. Pure.

A world is whole hosts: every host keeps its number of ranks, and the ranks are numbered anew, without gaps.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from flyball.contracts.cluster import HostRanks
from flyball.contracts.error_classes import ErrorClass, error_class_of
from services.controller.round import guardrails
from services.controller.round.choices import spare_choice, spare_ranking
from services.controller.round.diagnosis import DEPARTURES
from services.controller.round.round import Case
from services.controller.round.view import GenerationView, HostView

_LACKS_OF_MEMORY = frozenset({ErrorClass.GPU_OUT_OF_MEMORY, ErrorClass.HOST_OUT_OF_MEMORY, ErrorClass.SHARED_MEMORY})


def fewest(case: Case, generation: GenerationView) -> int:
    """With how few hosts the job may go on: as few as the user allows, and more than were seen to be too few."""
    return max(case.job.spec.fewest_nnodes, too_few(case, generation) + 1)


def too_few(case: Case, generation: GenerationView) -> int:
    """With how many hosts the job was seen to run out of memory; 0 if it was not."""
    return max(generation.too_few_hosts, len(generation.hosts) if _ran_out_of_memory(case, generation) else 0)


def due_at(case: Case) -> float:
    """When the wait for a host is over."""
    incident = case.incident
    if incident is None:
        return case.now
    since = incident.opened_at if incident.cause in DEPARTURES else incident.since
    return since + case.settings.shrink_after_s


def in_words(case: Case, lost: Collection[str]) -> str:
    """When the job goes on with how many hosts, for the reason of a hold; '' if it may not."""
    generation, wait_s = case.job.generation, due_at(case) - case.now
    hosts = without(case, generation, lost) if generation is not None else None
    if hosts is None or wait_s <= 0.0:
        return ""
    return f" In {wait_s:.1f} s it goes on with {len(hosts)} of {case.job.spec.asked_nnodes}."


def without(
    case: Case, generation: GenerationView, lost: Collection[str], free: Sequence[HostView] = ()
) -> tuple[HostRanks, ...] | None:
    """Place the ranks on the hosts that are left, and on `free` ones as far as they replace lost ones. None if that
    makes too few, or as many as before."""
    kept = [part for part in generation.hosts if part.host_id not in lost]
    joining = free[: len(generation.hosts) - len(kept)]
    if not fewest(case, generation) <= len(kept) + len(joining) < len(generation.hosts):
        return None
    return spare_choice.renumbered(kept, joining, case.round.hosts, case.job.spec.nproc_per_node)


def joining(case: Case, *, well_for_s: float = 0.0) -> list[HostView]:
    """The free hosts that the job may grow onto: well, and no other job's."""
    spec = case.job.spec
    others = {host_id for host_id, job in case.round.spare_of.items() if job != spec.job} | case.round.kept_for.keys()
    others |= case.round.claimed_by_others(spec.job)
    free = [host for host in case.round.well_hosts(spec) if host.host_id not in others]
    free = [host for host in free if host.since <= case.now - well_for_s]
    if (generation := case.job.generation) is not None:
        around = spare_ranking.surroundings_among(generation.hosts, case.round.hosts)
        free.sort(key=lambda host: spare_ranking.same_fabric(host, around))
    return free[: spec.asked_nnodes - spec.nnodes]


def with_more(case: Case, generation: GenerationView, more: Sequence[HostView]) -> tuple[HostRanks, ...]:
    """Place further ranks on the hosts that join; the others keep theirs."""
    return spare_choice.renumbered(generation.hosts, more, case.round.hosts, case.job.spec.nproc_per_node)


def _ran_out_of_memory(case: Case, generation: GenerationView) -> bool:
    """Whether a smaller world than the job asked for ended for lack of memory before it made progress: each of its
    ranks holds a larger share of what is sharded."""
    incident, spec = case.incident, case.job.spec
    if incident is None or incident.generation != generation.generation or spec.nnodes >= spec.asked_nnodes:
        return False
    own = [f for f in case.job.failures if f.generation == generation.generation and f.cause == incident.cause]
    if not own or guardrails.progress_of(generation, case.settings):
        return False
    return own[-1].error_kind == ErrorClass.HOST_OUT_OF_MEMORY or error_class_of(own[-1].error_message) in (
        _LACKS_OF_MEMORY
    )
