"""Keeps recoveries from becoming a loop that burns GPU hours.

The restart budget (`max_restarts`) counts restarts without progress in between. Every restart after a failure of the
workers themselves counts: a signal, an exception, a lost connection or a hang. Restarts that machines caused (a silent
host, a preemption, a copy that could not be restored) do not count, nor do repeated starts (`start_rules`, or an
unknown cause). The incident's limit of decisions and the patience with starts bound those. A generation that gets
further than all before it refills the budget.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import msgspec

from flyball import backoff
from flyball.contracts.cluster import Phase
from flyball.contracts.decisions import Incident
from services.controller.round.diagnosis import FALSE_ALARM, newest_common_step
from services.controller.round.view import GenerationView, PastFailure, PolicySettings, RankView

WORKER_CAUSES = frozenset({"worker_killed", "worker_exception", "rank_stalled", "connection_lost"})
_FIRST_BACK_OFF_S = 0.5
_LONGEST_BACK_OFF_S = 10.0
_ADDRESS = re.compile(r"0x[0-9a-f]+", re.IGNORECASE)


class Budget(msgspec.Struct, frozen=True):
    """The restart budget that a generation leaves to the next one."""

    restart_count: int  # all restarts of workers that failed, over the job's life
    used: int  # of max_restarts: those since the last progress
    furthest_step: int  # that progress is counted from
    refilled_by: str = ""  # the progress that refilled a budget of which something was used; '' if none did

    @classmethod
    def of(cls, generation: GenerationView) -> Budget:
        """The budget with which the generation was granted."""
        return cls(generation.restart_count, generation.used_restarts, generation.furthest_step)


def budget_after(
    generation: GenerationView, incident: Incident, settings: PolicySettings, failures: Iterable[PastFailure] = ()
) -> Budget:
    """The budget of the generation after this one. One that never started has not used what it was granted, and one
    that the incident has found no fault in is not charged with its predecessor's. A restart for a stall that this
    generation showed to be none (on the job's record, `failures`) is given back."""
    granted = Budget.of(generation)
    given_back = sum(1 for f in failures if (f.generation, f.cause) == (generation.generation, FALSE_ALARM))
    granted = msgspec.structs.replace(granted, used=max(0, granted.used - given_back))
    if generation.started_at == 0.0:
        return granted
    failed = incident.generation == generation.generation and incident.cause in WORKER_CAUSES
    progress = progress_of(generation, settings)
    if not (failed or progress):
        return granted  # progress is counted on from the same step: a planned move in between costs none of it
    return Budget(
        restart_count=granted.restart_count + (1 if failed else 0),
        used=(0 if progress else granted.used) + (1 if failed else 0),
        furthest_step=_furthest_step(generation),
        refilled_by=progress if granted.used else "",
    )


def progress_of(generation: GenerationView, settings: PolicySettings) -> str:
    """The progress of a generation, in words, if it is enough to refill the budget; '' if it is not.

    Only steps that all ranks completed, and that no generation before had reached, count. A script that shows no
    steps proves itself by the time that it ran.
    """
    if generation.started_at == 0.0 or not generation.ranks:
        return ""
    ran_s = _ended_at(generation.ranks) - generation.started_at
    if all(map(_shows_no_steps, generation.ranks)) and generation.restore_step is None:
        return f"{ran_s:.0f} s without a failure" if ran_s >= settings.refill_unwatched_s else ""
    new = newest_common_step(generation) - _counted_from(generation)
    if new >= settings.refill_steps:
        return f"{new} new steps"
    if new >= 1 and ran_s >= settings.refill_slow_steps_s:
        return f"{new} new step{'' if new == 1 else 's'} in {ran_s:.0f} s"
    return ""


def _counted_from(generation: GenerationView) -> int:
    restored = -1 if generation.restore_step is None else generation.restore_step
    return max(generation.furthest_step, restored)


def _furthest_step(generation: GenerationView) -> int:
    """The furthest step of any rank: to redo it is no progress."""
    steps = [max(rank.step, rank.exited.last_step if rank.exited else -1) for rank in generation.ranks]
    return max([_counted_from(generation), *steps])


def _ended_at(ranks: Iterable[RankView]) -> float:
    """When the first worker ended; if all run (a hang), when they last reported."""
    ranks = tuple(ranks)
    exits = [rank.exited_at for rank in ranks if rank.exited is not None]
    return min(exits) if exits else max(rank.reported_at for rank in ranks)


def _shows_no_steps(rank: RankView) -> bool:
    last_phase = rank.exited.last_phase if rank.exited else None
    last_step = rank.exited.last_step if rank.exited else -1
    return max(rank.step, last_step) < 0 and rank.phase is Phase.STARTING and last_phase in (None, Phase.STARTING)


def is_identical(one: PastFailure, other: PastFailure) -> bool:
    """Whether two failures are the same exception at the same step; memory addresses in the message do not count."""
    return (
        one.cause == other.cause
        and one.error_kind == other.error_kind
        and one.step == other.step
        and _ADDRESS.sub("0x", one.error_message) == _ADDRESS.sub("0x", other.error_message)
    )


def times_seen(failure: PastFailure, failures: Iterable[PastFailure]) -> int:
    """How many generations, including its own, had this failure."""
    return len({failure.generation} | {past.generation for past in failures if is_identical(past, failure)})


def back_off_s(decisions_made: int) -> float:
    """How long to wait after a failed action before the next decision: nothing the first time, then doubling."""
    if decisions_made <= 1:
        return 0.0
    return backoff.pause_s(decisions_made - 1, first_s=_FIRST_BACK_OFF_S, longest_s=_LONGEST_BACK_OFF_S)
