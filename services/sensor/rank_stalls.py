"""Which ranks stopped moving, from their beacons as the daemons report them. Pure, and without a clock: a beacon's
age is measured on the host that it lies on. What is normal is learnt per job (`job_pace`).
"""

from __future__ import annotations

from collections.abc import Iterator
from math import inf

from flyball.contracts.cluster import Phase, RankStatus
from flyball.contracts.rank_columns import CompletedSteps, Workers, statuses_in
from flyball.contracts.signals import RankStalled, Report, SignalBody
from services.sensor.job_pace import JobPace
from services.sensor.patience import StallSettings
from services.sensor.rank_states import Rank, RanksInSteps, WatchedJob

_APART_FROM_STEPS = (Phase.EVAL, Phase.OTHER, Phase.PARKED)  # the time between two steps does not tell of a step


class StallWatch:
    """Progress per job; only its newest generation counts."""

    def __init__(self, settings: StallSettings) -> None:
        self._settings = settings
        steps = settings.phases.get(Phase.STEP)
        self._never_overdue_s = min(steps.floor_s, steps.unknown_s) if steps is not None else inf  # within its steps
        self._jobs: dict[str, WatchedJob] = {}  # in the order in which they were last heard of
        self._on_host: dict[str, tuple[Workers, ...]] = {}  # of the newest generations of their jobs
        self._in_steps: dict[str, RanksInSteps] = {}  # by host

    def observe(self, report: Report, now_s: float) -> list[SignalBody]:
        """RankStalled for every generation that this report shows to have stopped, once per episode. `now_s` only
        places what this report says beside what others said."""
        for steps in report.completed:
            job = self._jobs.get(steps.job)
            if job is not None and steps.generation == job.generation:
                self._time_steps(job, steps)
        lagged_s = report.lagged_s if report.lagged_s >= self._settings.lagged_daemon_s else 0.0
        if not lagged_s and self._all_go_on(report, now_s):
            return []
        return self._look_at_each(report, now_s, lagged_s)

    def forget(self, host_id: str) -> None:
        """Drop the ranks of a host that will not speak for them any more."""
        self._in_steps.pop(host_id, None)
        for of in self._on_host.pop(host_id, ()):
            if (job := self._jobs.get(of.job)) is not None:
                for number in of.ranks:
                    job.drop(number, host_id)

    def stepped_s(self, host_id: str) -> float:
        """When a job with ranks on this host last made a step, as told by any of its ranks; -inf: never. Ranks that
        train together cannot go on without one of them."""
        return max((job.pace.advanced_s for job in self._jobs_on(host_id)), default=-inf)

    def advances(self, host_id: str, now_s: float) -> bool:
        """Whether such a job has made a step within the time in which it usually does."""
        return any(job.pace.advances(now_s) for job in self._jobs_on(host_id))

    def __len__(self) -> int:
        return sum(len(job.ranks) for job in self._jobs.values())

    def _jobs_on(self, host_id: str) -> Iterator[WatchedJob]:
        for of in self._on_host.get(host_id, ()):
            job = self._jobs.get(of.job)
            if job is not None and job.is_on(host_id, of.ranks):
                yield job

    # --- all ranks of a host at once, as nearly always ----------------------------------------------------------------

    def _all_go_on(self, report: Report, now_s: float) -> bool:
        """Follow the ranks of a host if all are in their steps as they were, and none can be overdue. False if they
        are to be looked at, each."""
        known = self._in_steps.get(report.facts.host_id)
        if known is None or len(report.workers) != 1:
            return False
        workers, progress, job = report.workers[0], report.progress[0], known.job
        steps, phases = progress.steps, progress.phases
        if (
            (workers is not known.workers and workers != known.workers)
            or known.changes != job.changes
            or self._jobs.get(workers.job) is not job
            or phases.count(Phase.STEP) != len(phases)
            or max(progress.beacon_ages_s) > self._never_overdue_s
        ):
            return False
        if steps != known.steps and max(steps) > job.newest_step:
            for step, age_s in zip(steps, progress.beacon_ages_s, strict=True):
                job.advance(step, now_s - age_s)
        known.follow(progress, now_s)
        self._jobs[workers.job] = self._jobs.pop(workers.job)
        return True

    def _note_in_steps(self, report: Report, job: WatchedJob | None) -> None:
        """Remember the ranks of a host if the next report may go the short way."""
        if job is None or len(report.workers) != 1:
            return
        (workers,) = report.workers
        ranks = [job.ranks[number] for number in workers.ranks]
        if job.overdue.isdisjoint(workers.ranks) and all(
            rank.phase is Phase.STEP and rank.has_stepped and not rank.forgiven_s for rank in ranks
        ):
            self._in_steps[report.facts.host_id] = RanksInSteps(job, workers, ranks)

    def _settle(self, host_id: str) -> None:
        """The ranks of a host are about to be looked at one by one."""
        known = self._in_steps.pop(host_id, None)
        if known is not None:
            known.settle()

    # --- each rank ----------------------------------------------------------------------------------------------------

    def _look_at_each(self, report: Report, now_s: float, lagged_s: float) -> list[SignalBody]:
        host_id = report.facts.host_id
        self._settle(host_id)
        signals: list[SignalBody] = []
        job, name, generation = None, "", -1
        for status in statuses_in(report.workers, report.progress):
            if job is None or status.generation != generation or status.job != name:
                job, name, generation = self._job(status), status.job, status.generation
                if job is None:
                    continue
            rank = self._update(job, host_id, status, now_s=now_s, lagged_s=lagged_s)
            if not rank.has_stepped:
                rank.has_stepped = any(
                    status.rank in steps.ranks and steps.generation == generation and steps.job == name
                    for steps in report.completed
                )
            self._judge(job, rank)
            if status.rank in job.overdue:
                found = self._stall(name, job, rank)
                if found is not None:
                    signals.append(found)
        self._note_present(report)
        self._note_in_steps(report, job)
        return signals

    def _note_present(self, report: Report) -> None:
        """Drop the ranks that a host spoke for, and does not any more."""
        host_id = report.facts.host_id
        present = tuple(
            of
            for of in report.workers
            if (job := self._jobs.get(of.job)) is not None and job.generation == of.generation
        )
        before = self._on_host.get(host_id, ())
        if present == before:
            return
        there = {(of.job, number) for of in present for number in of.ranks}
        for of in before:
            if (job := self._jobs.get(of.job)) is not None:
                for number in of.ranks:
                    if (of.job, number) not in there:
                        job.drop(number, host_id)
        if present:
            self._on_host[host_id] = present
        else:
            del self._on_host[host_id]

    def _job(self, status: RankStatus) -> WatchedJob | None:
        job = self._jobs.pop(status.job, None)
        if job is None:
            job = WatchedJob(JobPace(self._settings))
            if len(self._jobs) >= self._settings.max_jobs:
                del self._jobs[next(iter(self._jobs))]
        self._jobs[status.job] = job
        if status.generation > job.generation:
            job.begin(status.generation)
        return job if status.generation == job.generation else None

    def _update(self, job: WatchedJob, host_id: str, status: RankStatus, *, now_s: float, lagged_s: float) -> Rank:
        idle_s, step, phase, pace = status.beacon_age_s, status.step, status.phase, job.pace
        moved_s = now_s - idle_s
        rank = job.ranks.get(status.rank)
        if rank is None:
            rank = job.ranks[status.rank] = Rank(host_id, status, moved_s)
        elif rank.host_id != host_id:
            self._settle(rank.host_id)
            rank.host_id = host_id
            job.changes += 1
        was = rank.phase
        if phase is not was:
            pace.stayed(was, max(0.0, moved_s - rank.entered_s))
            rank.entered_s = moved_s
        if not rank.has_stepped and step > rank.first_seen_step:
            rank.has_stepped = True
            if was in (Phase.STEP, Phase.STARTING):  # a script that never calls restore is seen to start until then
                took_s = max(moved_s - rank.moved_s, rank.idle_s)  # `now_s` leaves out the time that a sensor was late
            else:
                took_s = moved_s - rank.seen_s
            pace.stepped_first(took_s)
        if step != rank.step or phase is not was or idle_s < rank.idle_s:
            rank.forgiven_s = 0.0
            rank.moved_s = moved_s
        elif moved_s < rank.moved_s:
            rank.moved_s = moved_s
        rank.forgiven_s += lagged_s
        rank.phase, rank.step = phase, step
        rank.idle_s = idle_s
        rank.seen_s = now_s
        if lagged_s or phase in _APART_FROM_STEPS:
            pace.pauses += 1
        job.advance(step, moved_s)
        if phase is not Phase.STARTING:
            pace.attach()
        return rank

    def _time_steps(self, job: WatchedJob, steps: CompletedSteps) -> None:
        """Learn from a few ranks how long steps take: all ranks of a job tell the same."""
        sampled, pace = job.pace.sampled, job.pace
        has_room = len(sampled) < self._settings.sampled_ranks
        if not has_room and sampled.isdisjoint(steps.ranks):
            return  # as nearly always
        for place, number in enumerate(steps.ranks):
            rank = job.ranks.get(number)
            if rank is None or (number not in sampled and len(sampled) >= self._settings.sampled_ranks):
                continue
            sampled.add(number)
            times = [row[place] for row in steps.completed_at]
            if rank.done_step == steps.first_step - 1 and rank.done_at and rank.pauses == pace.pauses:
                times.insert(0, rank.done_at)
            pace.stepped(times)
            rank.done_step, rank.done_at, rank.pauses = steps.last_step, times[-1], pace.pauses

    def _judge(self, job: WatchedJob, rank: Rank) -> None:
        number = rank.number
        deadline_s = job.pace.deadline_s(rank.phase, has_stepped=rank.has_stepped)
        if deadline_s is None:
            job.waiting.discard(number)
        else:
            job.waiting.add(number)
            if rank.idle_s - rank.forgiven_s > deadline_s:
                job.overdue.add(number)
                return
        if number in job.overdue:
            job.is_stalled = False
            job.overdue.discard(number)

    def _stall(self, name: str, job: WatchedJob, rank: Rank) -> RankStalled | None:
        """A stall that shows in this rank: of the whole job, or of the rank alone, far behind the others."""
        if job.is_stalled:
            return None
        if len(job.overdue) == len(job.waiting):
            named = self._furthest_behind(job)
        elif job.newest_step - rank.step >= self._settings.behind_steps:
            named = (rank.number,)
        else:
            return None
        job.is_stalled = True
        first = job.ranks[named[0]]
        return RankStalled(
            job=name,
            generation=job.generation,
            ranks=named,
            phase=first.phase,
            step=first.step,
            silent_s=first.idle_s,
            deadline_s=job.pace.deadline_s(first.phase, has_stepped=first.has_stepped) or 0.0,
        )

    def _furthest_behind(self, job: WatchedJob) -> tuple[int, ...]:
        """The lowest step, then the oldest beacon; those that cannot be told apart are all named."""
        for known in self._in_steps.values():
            if known.job is job:
                known.settle()
        lowest = min(job.ranks[number].step for number in job.waiting)
        last = [number for number in job.waiting if job.ranks[number].step == lowest]
        oldest_s = min(job.ranks[number].moved_s for number in last)
        indistinct_s = max(0.05, 0.5 * job.pace.usual_step_s())
        return tuple(sorted(n for n in last if job.ranks[n].moved_s - oldest_s <= indistinct_s))
