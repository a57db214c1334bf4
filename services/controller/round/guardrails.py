"""Keeps recoveries from becoming a loop that burns GPU hours.

The restart budget (`max_restarts`) counts restarts without progress in between. Every restart after a failure of the
workers themselves counts: a signal, an exception, a lost connection or a hang. Restarts caused by machines do not
count: a silent host, a preemption, a copy that could not be restored. Nor do repeated starts (`start_rules`, or an
unknown cause). The incident's limit on decisions and the patience with starts bound those. A generation that gets
further than all earlier ones refills the budget, and each day that one runs gives a restart back.

The incident's limit counts decisions about one fault without such progress. While lost steps are redone, a large job
meets faults that have nothing to do with the first one: each has a limit of its own, and all together have one, too.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Sequence

import msgspec

from flyball import backoff
from flyball.contracts.cluster import Phase
from flyball.contracts.decisions import Harm, Incident
from flyball.contracts.error_classes import ErrorClass, error_class_of
from services.controller.round import given_up
from services.controller.round.diagnosis import EXIT_CODE, FALSE_ALARM, HARMS, Failure, newest_common_step
from services.controller.round.view import GenerationView, JobView, PastFailure, PolicySettings, RankView

WORKER_CAUSES = frozenset({"worker_killed", "worker_exception", "rank_stalled", "connection_lost"})
_FAULTS_AT_ONCE = 4  # so many faults may use up their decisions without a new step in between
_HARM_REFILLS = 10  # a restart from before a harm is not charged, so more progress has to show that it helped
_FIRST_BACK_OFF_S = 0.5
_LONGEST_BACK_OFF_S = 10.0
_ADDRESS = re.compile(r"0x[0-9a-f]+", re.IGNORECASE)


class Budget(msgspec.Struct, frozen=True):
    """The restart budget that a generation leaves to the next one."""

    restart_count: int  # all restarts of workers that failed, over the job's life
    used: int  # of max_restarts: those since the last progress
    furthest_step: int  # that progress is counted from
    refilled_by: str = ""  # the progress that refilled a partly used budget; '' if none did

    @classmethod
    def of(cls, generation: GenerationView) -> Budget:
        """Return the budget with which the generation was granted."""
        return cls(generation.restart_count, generation.used_restarts, generation.furthest_step)


def budget_after(
    generation: GenerationView, incident: Incident, settings: PolicySettings, failures: Iterable[PastFailure] = ()
) -> Budget:
    """Return the budget of the next generation.

    A generation that never started used nothing. One in which the incident found no fault is not charged for its
    predecessor's. If this generation proved a stall to be a false alarm (in `failures`), that restart is given back.
    """
    granted = Budget.of(generation)
    given_back = sum(1 for f in failures if (f.generation, f.cause) == (generation.generation, FALSE_ALARM))
    granted = msgspec.structs.replace(granted, used=max(0, granted.used - given_back))
    if generation.started_at == 0.0:
        return granted
    days = (_ended_at(generation.ranks) - generation.started_at) / settings.restart_decay_s if generation.ranks else 0.0
    granted = msgspec.structs.replace(granted, used=max(0, granted.used - max(0, int(days))))
    failed = incident.generation == generation.generation and incident.cause in WORKER_CAUSES
    progress = progress_of(generation, settings)
    if not (failed or progress):
        return granted  # progress still counts from the same step: a planned move in between costs none of it
    return Budget(
        restart_count=granted.restart_count + (1 if failed else 0),
        used=(0 if progress else granted.used) + (1 if failed else 0),
        furthest_step=_furthest_step(generation),
        refilled_by=progress if granted.used else "",
    )


def progress_of(generation: GenerationView, settings: PolicySettings) -> str:
    """Describe a generation's progress if it is enough to refill the budget; otherwise return ''.

    Only steps count that all ranks completed and no earlier generation had reached. For a script that shows no steps,
    the time that it ran counts.
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
    """Return the furthest step of any rank: redoing it is no progress."""
    steps = [max(rank.step, rank.exited.last_step if rank.exited else -1) for rank in generation.ranks]
    return max([_counted_from(generation), *steps])


def _ended_at(ranks: Iterable[RankView]) -> float:
    """Return when the first worker ended; if all run (a hang), the time of the newest report."""
    ranks = tuple(ranks)
    exits = [rank.exited_at for rank in ranks if rank.exited is not None]
    return min(exits) if exits else max(rank.reported_at for rank in ranks)


def _shows_no_steps(rank: RankView) -> bool:
    last_phase = rank.exited.last_phase if rank.exited else None
    last_step = rank.exited.last_step if rank.exited else -1
    return max(rank.step, last_step) < 0 and rank.phase is Phase.STARTING and last_phase in (None, Phase.STARTING)


def is_identical(one: PastFailure, other: PastFailure) -> bool:
    """Whether two failures are the same error at the same step, except for memory addresses in the message. Of a lack
    of GPU memory, the figures in the message may differ, too."""
    if (one.cause, one.error_kind, one.step) != (other.cause, other.error_kind, other.step):
        return False
    if _ADDRESS.sub("0x", one.error_message) == _ADDRESS.sub("0x", other.error_message):
        return True
    return all(error_class_of(f.error_message) is ErrorClass.GPU_OUT_OF_MEMORY for f in (one, other))


def is_early(failure: Failure, generation: GenerationView, settings: PolicySettings) -> bool:
    """Whether an exception of a script that reported no step counts as one before the first step. It does not if the
    script ran long enough to have trained; a bare exit code does not say what failed."""
    return not failure.error_kind.startswith(EXIT_CODE) and not progress_of(generation, settings)


def kills_for_lack_of_memory(generation: int, used: int, failures: Iterable[PastFailure]) -> int:
    """Count the failures up to this generation in which the kernel killed a worker for lack of host memory, among the
    last `used` failures of workers: those without progress in between."""
    of_workers = [f for f in failures if f.cause in WORKER_CAUSES and f.generation <= generation]
    return sum(1 for f in of_workers[-used:] if used and f.error_kind == ErrorClass.HOST_OUT_OF_MEMORY)


def times_seen(failure: PastFailure, failures: Iterable[PastFailure]) -> int:
    """Count the generations with this failure, including its own."""
    return len({failure.generation} | {past.generation for past in failures if is_identical(past, failure)})


def returns(harm: Harm, incident: Incident, job: JobView) -> bool:
    """Whether a harm comes back: an earlier generation was harmed too, and this one was not seen to be well beyond the
    step at which that showed."""
    earlier = (f for f in job.failures if f.cause in HARMS and f.generation < incident.generation)
    return any(harm.clean_step < failure.step for failure in earlier)


def times_harmed(job: JobView, settings: PolicySettings) -> int:
    """Count the newest harmed generations that are close together: without `_HARM_REFILLS` times the progress that
    refills the restart budget between two of them."""
    steps = {failure.generation: failure.step for failure in job.failures if failure.cause in HARMS}
    newest_first = [steps[generation] for generation in sorted(steps, reverse=True)]
    far = _HARM_REFILLS * settings.refill_steps
    apart = (at for at, (newer, older) in enumerate(itertools.pairwise(newest_first), 1) if newer - older >= far)
    return next(apart, len(newest_first))


def hosts_alike(failure: PastFailure, failures: Iterable[PastFailure], now: Iterable[PastFailure]) -> set[str]:
    """Return the hosts on which this failure came; '' for an unknown one. `now`: the failures of all ranks of its
    generation, of which only one is on the record."""
    return {past.host_id for past in (failure, *failures, *now) if is_identical(past, failure)}


def failures_within(incident: Incident, job: JobView) -> list[PastFailure]:
    """Return the failures that the incident's decisions were about, since the job's last progress: each decision grants
    one generation at most. A note that a host was given up is none."""
    newest = job.generation.generation if job.generation is not None else incident.generation
    first = newest - incident.decisions_made - incident.decisions_before
    return [f for f in job.failures if f.generation >= first and not given_up.is_note(f)]


def is_another_fault(failure: PastFailure, earlier: Sequence[PastFailure]) -> bool:
    """Whether a failure has nothing to do with earlier ones: it is on another host than each of them, and came by
    another cause, or at another step. Where a host is not known, it may have."""
    return bool(failure.host_id and earlier) and all(
        past.host_id not in ("", failure.host_id) and (past.cause, past.step) != (failure.cause, failure.step)
        for past in earlier
    )


def decisions_left(incident: Incident, settings: PolicySettings) -> int:
    """Return how many more decisions may be made about the incident. The limit is that of one fault; of independent
    faults it takes in that of a few."""
    limit = settings.max_decisions_per_incident
    in_all = incident.decisions_made + incident.decisions_before
    return min(limit - incident.decisions_made, _FAULTS_AT_ONCE * limit - in_all)


def back_off_s(decisions_made: int) -> float:
    """Return the pause before the next decision after a failed action: none the first time, then doubling."""
    if decisions_made <= 1:
        return 0.0
    return backoff.pause_s(decisions_made - 1, first_s=_FIRST_BACK_OFF_S, longest_s=_LONGEST_BACK_OFF_S)
