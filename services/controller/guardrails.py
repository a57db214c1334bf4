"""What keeps a recovery from becoming a loop that burns GPU hours.

The restart budget (`max_restarts`) is counted as torchrun's users expect: every restart of workers that failed by
themselves burns one, whether a signal, an exception, a lost connection or a hang ended them. A restart that the
machines caused (host silent, preemption, a copy that could not be restored) burns none, nor does one more attempt at a
start in which no worker failed; the decision limit of the incident bounds those.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from flyball.contracts.decisions import Incident
from services.controller.view import GenerationView, PastFailure

WORKER_CAUSES = frozenset(
    {"worker_killed", "worker_exception", "worker_start_failed", "rank_stalled", "connection_lost"}
)
_FIRST_BACK_OFF_S = 0.5
_LONGEST_BACK_OFF_S = 10.0
_ADDRESS = re.compile(r"0x[0-9a-f]+", re.IGNORECASE)


def next_restart_count(generation: GenerationView, incident: Incident) -> int:
    """The restart count of the generation after this one. One that never started has not used what it was granted, and
    one that the incident has found no fault in is not charged with its predecessor's."""
    failed = incident.generation == generation.generation and incident.cause in WORKER_CAUSES
    burns = failed and generation.started_at > 0.0
    return generation.restart_count + (1 if burns else 0)


def is_identical(one: PastFailure, other: PastFailure) -> bool:
    """Whether two failures are the same exception at the same step; memory addresses in the message do not count."""
    return (
        one.cause == other.cause
        and one.error_kind == other.error_kind
        and one.step == other.step
        and _ADDRESS.sub("0x", one.error_message) == _ADDRESS.sub("0x", other.error_message)
    )


def times_seen(failure: PastFailure, failures: Iterable[PastFailure]) -> int:
    """In how many generations, its own included, this failure happened."""
    return len({failure.generation} | {past.generation for past in failures if is_identical(past, failure)})


def back_off_s(decisions_made: int) -> float:
    """How long to wait after a failed action before the next decision: nothing the first time, then doubling."""
    if decisions_made <= 1:
        return 0.0
    return min(_FIRST_BACK_OFF_S * 2.0 ** (decisions_made - 2), _LONGEST_BACK_OFF_S)
