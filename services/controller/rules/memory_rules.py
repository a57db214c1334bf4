"""Rules for workers that the kernel killed because their host, or its cgroup, had no memory left.

One such kill may be an accident, and the next attempt may need as much. So the ranks get one more attempt: on a host
with more memory if one is free, and otherwise where they are.
"""

from __future__ import annotations

import msgspec

from flyball.contracts.error_classes import ErrorClass
from services.controller.round import guardrails
from services.controller.round.diagnosis import WORKER_KILLED
from services.controller.round.round import Case
from services.controller.round.verdict import Verdict
from services.controller.round.view import HostView
from services.controller.rules import recovery_rules

_RETRIED = 1


def fail_on_repeated_lack_of_memory(case: Case) -> Verdict | None:
    """Fail the job if the kernel killed its workers for lack of host memory twice without progress in between: one may
    be an accident, but the next attempt would need as much."""
    incident, generation = case.this_incident, case.this_generation
    if not _lacks_memory(case):
        return None
    used = guardrails.budget_after(generation, incident, case.settings, case.job.failures).used
    times = guardrails.kills_for_lack_of_memory(incident.generation, used, case.job.failures)
    if times <= _RETRIED:
        return None
    return recovery_rules.fail(
        case,
        f"{incident.message} This ended {times} generations without progress in between: give the job's hosts more "
        "memory, or let the job use less (data loader workers, batches, caches).",
        {"times": times},
    )


def retry_on_a_larger_host(case: Case) -> Verdict | None:
    """Move the ranks of a host that ran out of memory to a free one that has more, if there is one."""
    short = _short_host(case)
    if short is None:
        return None
    smaller = {host.host_id for host in case.well_hosts if host.memory_bytes <= short.memory_bytes}
    moved = recovery_rules.move(case, (short.host_id,), avoid=smaller)
    if moved is None or moved.plan is None or moved.plan.next is None:
        return None
    ranks = next(part.ranks for part in case.this_generation.hosts if part.host_id == short.host_id)
    taker = next(part.host_id for part in moved.plan.next.hosts if part.ranks == ranks)
    larger = case.round.hosts[taker]
    reason = (
        f"{moved.reason} {short.host_id} has {_size(short)} of memory, and {taker} {_size(larger)}: the ranks are "
        "tried once more, with more memory."
    )
    evidence = {**moved.evidence, "memory_bytes": short.memory_bytes, "larger_memory_bytes": larger.memory_bytes}
    return msgspec.structs.replace(moved, reason=reason, evidence=evidence)


def retry_with_as_much_memory(case: Case) -> Verdict | None:
    """If no host with more memory is free, try once more in place."""
    if not _lacks_memory(case) or recovery_rules.lost_and_leaving(case)[0]:
        return None
    short, following = _short_host(case), case.this_generation.generation + 1
    known = "" if short is None else f" than {short.host_id} ({_size(short)})"
    return recovery_rules.restart(
        case, f"No free host is known to have more memory{known}: generation {following} starts in place, once more."
    )


# --- parts of the rules ----------------------------------------------------------------------------------------------


def _lacks_memory(case: Case) -> bool:
    incident = case.this_incident
    own = [f for f in case.job.failures if (f.generation, f.cause) == (incident.generation, WORKER_KILLED)]
    lacks = bool(own) and own[-1].error_kind == ErrorClass.HOST_OUT_OF_MEMORY
    return lacks and incident.cause == WORKER_KILLED


def _short_host(case: Case) -> HostView | None:
    """The host that ran out of memory, if it is known how much it has, and the ranks are still there."""
    host = case.round.hosts.get(case.this_incident.host_id)
    if host is None or not host.memory_bytes or not _lacks_memory(case):
        return None
    is_current = case.this_incident.generation == case.this_generation.generation
    is_there = any(part.host_id == host.host_id for part in case.this_generation.hosts)
    return host if is_current and is_there else None


def _size(host: HostView) -> str:
    return f"{host.memory_bytes / (1 << 30):.3g} GiB"
