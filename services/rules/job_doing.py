"""Says in one sentence what a job does now, from what its hosts saw last. Pure.

Command line, pages, API and metrics show these words, and no others: a job that makes no step is never said to train.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import StrEnum

import msgspec

from flyball.contracts.cluster import JobState, Phase
from flyball.contracts.decisions import IncidentState
from flyball.contracts.orders import AWAITS_APPROVAL
from flyball.contracts.reports.rank_stands import RankStand
from services.rules import hang_findings
from services.rules.wording import counted, in_words, ranks_of

STANDS_AFTER_S, STANDS_AFTER_STEPS = 1.0, 20.0  # without a step, outside of a phase that is known to take long
UNHEARD_AFTER_S = 20.0  # without a report; of thousands of steady hosts they are stored every 10 s
HEARD_IN_TROUBLE_S = 3.0  # what is older may be of before an incident
UNATTACHED_AFTER_S = 60.0  # of a start: its script may report no steps at all
_APART = {
    Phase.EVAL: ("evaluates", "evaluate"),
    Phase.CHECKPOINT: ("saves", "save"),
    Phase.OTHER: ("is in a phase of its own", "are in a phase of their own"),
    Phase.PARKED: ("has saved and is parked", "have saved and are parked"),
}


class Doing(StrEnum):
    """What a job does."""

    WAITING = "waiting"  # for hosts
    STARTING = "starting"
    RESTORING = "restoring"
    TRAINING = "training"
    EVALUATING = "evaluating"  # or in another phase that its script declared
    STANDING = "standing"  # it makes no step
    RECOVERING = "recovering"
    HELD = "held"  # until a person approves
    UNHEARD = "unheard"  # nothing is heard of its hosts
    ENDING = "ending"
    ENDED = "ended"
    INTERRUPTED = "interrupted"  # its supervisor ended before it


class SeenRank(msgspec.Struct, frozen=True):
    """One rank, as its host reported it last."""

    rank: int
    phase: Phase
    reported_at: float
    moved_at: float  # when its beacon last moved
    stand: RankStand | None = None

    @property
    def still_s(self) -> float:
        """For how long it had not moved when it was reported."""
        return self.reported_at - self.moved_at if self.moved_at else 0.0


class OpenIncident(msgspec.Struct, frozen=True):
    """What is out of order with a job."""

    incident_id: str
    cause: str
    state: IncidentState
    message: str
    fault_at: float
    holding_for: str = ""


class ObservedJob(msgspec.Struct, frozen=True):
    """All that is known of a job. Moments are wall clock; 0.0: not known."""

    state: JobState
    message: str = ""
    since: float = 0.0  # that it is in this state
    newest_step: int = -1
    last_step_at: float = 0.0
    step_s: float = 0.0
    steps_per_s: float = 0.0  # over the last seconds in which it made steps
    ranks: Sequence[SeenRank] = ()  # some are enough to see that it trains
    incidents: Sequence[OpenIncident] = ()


class JobDoing(msgspec.Struct, frozen=True):
    """The one word, and the sentence. `since`: 0.0 if that is not known."""

    kind: Doing
    since: float
    steps_per_s: float
    text: str


def doing_of(job: ObservedJob, now: float) -> JobDoing:
    """What a job does at `now`."""
    if job.state.ended or job.state.ending:
        kind = Doing.ENDED if job.state.ended else Doing.ENDING
        return JobDoing(kind, job.since, 0.0, job.message or in_words(job.state.value))
    if trains(job.ranks, job.step_s, now, fault_at=max((one.fault_at for one in job.incidents), default=0.0)):
        about = f"training at {job.steps_per_s:.3g} steps/s" if job.steps_per_s else "training"
        beside = "".join(f"; {one.incident_id}: {one.message}" for one in job.incidents[-1:])
        return JobDoing(Doing.TRAINING, job.since, job.steps_per_s, f"{about}{beside}")
    if job.incidents:
        return _in_trouble(job, now)
    return _without_steps(job, now)


def trains(ranks: Sequence[SeenRank], step_s: float, now: float, *, fault_at: float = 0.0) -> bool:
    """Whether steps are made: some rank is heard, and moved within the time that steps take. `fault_at`: of the newest
    open incident. Who moved so long after it that it outlived it is heard as in good times."""
    limit_s = max(STANDS_AFTER_S, STANDS_AFTER_STEPS * step_s)
    return any(
        rank.phase in (Phase.STEP, Phase.DATA)
        and rank.moved_at > 0.0
        and rank.still_s <= limit_s
        and now - rank.reported_at
        <= (UNHEARD_AFTER_S if not fault_at or rank.moved_at - fault_at > limit_s else HEARD_IN_TROUBLE_S)
        for rank in ranks
    )


def _in_trouble(job: ObservedJob, now: float) -> JobDoing:
    newest = job.incidents[-1]
    awaited = next((one for one in reversed(job.incidents) if one.holding_for.startswith(AWAITS_APPROVAL)), None)
    if awaited is not None:
        text = f"held for you: flyball approve {awaited.incident_id}. {awaited.message}"
        return JobDoing(Doing.HELD, awaited.fault_at, 0.0, text)
    lasts = _lasted(now - newest.fault_at)
    if newest.holding_for:
        text = f"standing for {lasts}: waits for {newest.holding_for} ({newest.incident_id}). {newest.message}"
        return JobDoing(Doing.STANDING, newest.fault_at, 0.0, text)
    what = f"{in_words(newest.cause)}, {newest.state.value}"
    text = f"recovering for {lasts}: {what} ({newest.incident_id}). {newest.message}"
    return JobDoing(Doing.RECOVERING, newest.fault_at, 0.0, text)


def _without_steps(job: ObservedJob, now: float) -> JobDoing:
    """Of a job without an incident that makes no step."""
    if not job.ranks:
        return JobDoing(Doing.WAITING, job.since, 0.0, job.message or "waiting for hosts")
    heard_at, moved_at = (max(getattr(rank, name) for rank in job.ranks) for name in ("reported_at", "moved_at"))
    if now - heard_at > UNHEARD_AFTER_S:
        text = f"nothing is heard of its hosts for {_lasted(now - heard_at)}"
        return JobDoing(Doing.UNHEARD, heard_at, 0.0, text)
    for phase, kind in ((Phase.STARTING, Doing.STARTING), (Phase.RESTORING, Doing.RESTORING)):
        if in_it := [rank.rank for rank in job.ranks if rank.phase is phase]:
            text = f"{kind.value} for {_lasted(now - moved_at)}: {len(in_it)} of {counted(len(job.ranks), 'rank')}"
            if phase is Phase.STARTING and now - moved_at > UNATTACHED_AFTER_S:
                text += " has not called flyball.attach(), so steps are not seen"
            return JobDoing(kind, moved_at, 0.0, text)
    stood_s = now - (job.last_step_at or moved_at)
    for phase, (one, many) in _APART.items():
        if in_it := [rank.rank for rank in job.ranks if rank.phase is phase]:
            does = one if len(in_it) == 1 else many
            text = f"{ranks_of(in_it)} {does}; {_lasted(stood_s)} since step {job.newest_step}"
            return JobDoing(Doing.EVALUATING, job.last_step_at or moved_at, 0.0, text)
    after = f" after step {job.newest_step}" if job.newest_step >= 0 else ""
    return JobDoing(
        Doing.STANDING, job.last_step_at or moved_at, 0.0, f"standing for {_lasted(stood_s)}{after}{_why(job.ranks)}"
    )


def _why(ranks: Iterable[SeenRank]) -> str:
    """Who waits for whom, as far as it is known: first who is to blame."""
    stands = [rank.stand for rank in ranks if rank.stand is not None]
    found = hang_findings.find(stands)
    if found is None:
        return ""
    blamed = hang_findings.find(one for one in stands if one.rank in found.culprits)
    others = hang_findings.find(one for one in stands if one.rank not in found.culprits)
    if blamed is None or others is None:
        return f". {found.sentence}{_proof(stands)}"
    return f". {blamed.sentence}{_proof(stands)} {others.sentence}"


def _proof(stands: Iterable[RankStand]) -> str:
    return next((f" Nothing can end that: {one.proof}." for one in stands if one.proof), "")


def _lasted(seconds: float) -> str:
    """Return "0.4 s", "31 s", "4 min" or "3 h"."""
    seconds = max(0.0, seconds)
    if seconds < 10.0:
        return f"{seconds:.1f} s"
    if seconds < 120.0:
        return f"{seconds:.0f} s"
    return f"{seconds / 60.0:.0f} min" if seconds < 7200.0 else f"{seconds / 3600.0:.0f} h"
