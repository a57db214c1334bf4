"""Which ranks stopped moving, from their beacons, and what their processes do meanwhile, as the daemons report them.
Pure, and without a clock: a beacon's age is measured on the host that it lies on. What the ranks of a job do together
says how long they are waited for (`stances`), and what is normal is learnt per job (`job_pace`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import inf

from flyball.contracts.cluster import Activity, Phase, RankStatus
from flyball.contracts.reports.rank_columns import CompletedSteps, Workers, statuses_in
from flyball.contracts.reports.signals import FalseAlarm, RankStalled, Report, SignalBody
from services.sensor.detector.job_pace import Alarm, JobPace
from services.sensor.detector.patience import StallSettings
from services.sensor.detector.rank_states import LearnedJob, Rank, RanksInSteps, WatchedJob
from services.sensor.detector.stances import Stance, seen_in

_APART_FROM_STEPS = (Phase.EVAL, Phase.OTHER, Phase.PARKED)  # the time between two steps does not tell of a step


class StallWatch:
    """Progress per job; only its newest generation counts."""

    def __init__(self, settings: StallSettings) -> None:
        self._settings = settings
        self._never_overdue_s = settings.frozen.floor_s  # whatever a rank in its steps does
        self._hang_timeouts: Mapping[str, float] = {}  # s, of jobs that say one
        self._news: list[SignalBody] = []
        self._jobs: dict[str, WatchedJob] = {}  # in the order in which they were last heard of
        self._on_host: dict[str, tuple[Workers, ...]] = {}  # of the newest generations of their jobs
        self._in_steps: dict[str, RanksInSteps] = {}  # by host
        self._recalled: dict[str, LearnedJob] = {}  # of jobs that were not heard of here

    def observe(self, report: Report, now_s: float) -> list[SignalBody]:
        """RankStalled for every generation that this report shows to have stopped, once per episode. `now_s` only
        places what this report says beside what others said."""
        for steps in report.completed:
            job = self._jobs.get(steps.job)
            if job is not None and steps.generation == job.generation:
                self._time_steps(job, steps)
        lagged_s = report.lagged_s if report.lagged_s >= self._settings.lagged_daemon_s else 0.0
        if lagged_s or not self._all_go_on(report, now_s):
            self._look_at_each(report, now_s, lagged_s)
        if not self._news:
            return []
        news, self._news = self._news, []
        return news

    def set_hang_timeouts(self, known: Mapping[str, float]) -> None:
        """job -> after how many seconds without a move a rank is hung, of jobs that say so themselves."""
        if known == self._hang_timeouts:
            return
        self._hang_timeouts = known
        for name, job in self._jobs.items():
            job.pace.limit_by(known.get(name, 0.0))
            job.changes += 1  # ranks in their steps are to be looked at anew
        self._never_overdue_s = (
            min(self._settings.frozen.floor_s, *known.values()) if known else (self._settings.frozen.floor_s)
        )

    def learned(self) -> dict[str, LearnedJob]:
        """What a sensor that comes after this one need not learn anew, of jobs that have made steps."""
        known = ((name, job.learned) for name, job in self._jobs.items())
        return {name: learned for name, learned in known if learned.pace.steps_seen}

    def recall(self, known: Mapping[str, LearnedJob]) -> None:
        """What an earlier sensor learned of jobs; of those that this one knows better nothing is taken."""
        self._recalled.update((name, learned) for name, learned in known.items() if name not in self._jobs)
        for name in known.keys() & self._jobs.keys():
            self._jobs[name].recall(known[name])

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
            or progress.activities
            or max(progress.beacon_ages_s) > self._never_overdue_s
        ):
            return False
        if steps != known.steps and max(steps) > job.newest_step:
            for step, age_s in zip(steps, progress.beacon_ages_s, strict=True):
                job.advance(step, now_s - age_s)
            if job.pace.disproved is not None:
                self._disprove(workers.job, job)
        known.follow(progress, now_s)
        self._jobs[workers.job] = self._jobs.pop(workers.job)
        return True

    def _note_in_steps(self, report: Report, job: WatchedJob | None) -> None:
        """Remember the ranks of a host if the next report may go the short way."""
        if job is None or len(report.workers) != 1:
            return
        (workers,) = report.workers
        ranks = [job.ranks[number] for number in workers.ranks]
        if (
            not job.stalled
            and job.overdue.isdisjoint(workers.ranks)
            and all(
                rank.phase is Phase.STEP
                and rank.has_stepped
                and not rank.forgiven_s
                and rank.activity is Activity.UNKNOWN
                for rank in ranks
            )
        ):
            self._in_steps[report.facts.host_id] = RanksInSteps(job, workers, ranks)

    def _settle(self, host_id: str) -> None:
        """The ranks of a host are about to be looked at one by one."""
        known = self._in_steps.pop(host_id, None)
        if known is not None:
            known.settle()

    # --- each rank ----------------------------------------------------------------------------------------------------

    def _look_at_each(self, report: Report, now_s: float, lagged_s: float) -> None:
        host_id = report.facts.host_id
        self._settle(host_id)
        job = None
        for of, at in zip(report.workers, report.progress, strict=True):
            job = self._job(of.job, of.generation)
            if job is None:
                continue
            mine = []
            for status in statuses_in((of,), (at,)):
                rank = self._update(job, host_id, status, now_s=now_s, lagged_s=lagged_s)
                if not rank.has_stepped:
                    rank.has_stepped = any(
                        status.rank in steps.ranks and steps.generation == of.generation and steps.job == of.job
                        for steps in report.completed
                    )
                mine.append(rank)
            if job.pace.disproved is not None:
                self._disprove(of.job, job)
            job.look(now_s)
            for rank in mine:
                self._judge(job, rank, now_s)
            self._stall(of.job, job)
        self._note_present(report)
        self._note_in_steps(report, job)

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

    def _job(self, name: str, generation: int) -> WatchedJob | None:
        job = self._jobs.pop(name, None)
        if job is None:
            job = WatchedJob(JobPace(self._settings))
            job.pace.limit_by(self._hang_timeouts.get(name, 0.0))
            if len(self._jobs) >= self._settings.max_jobs:
                del self._jobs[next(iter(self._jobs))]
        self._jobs[name] = job
        if generation > job.generation:
            job.begin(generation)
            if (learned := self._recalled.pop(name, None)) is not None:
                job.recall(learned)
        return job if generation == job.generation else None

    def _update(self, job: WatchedJob, host_id: str, status: RankStatus, *, now_s: float, lagged_s: float) -> Rank:
        idle_s, step, phase, pace = status.beacon_age_s, status.step, status.phase, job.pace
        moved_s = now_s - idle_s
        rank = job.ranks.get(status.rank)
        if rank is None:
            rank = job.ranks[status.rank] = Rank(host_id, status, moved_s)
            job.see(rank)
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
            pace.stepped_first(step, took_s)
        if step != rank.step or phase is not was or idle_s < rank.idle_s:
            rank.forgiven_s = 0.0
            rank.moved_s = moved_s
            job.moved(status.rank)
        elif moved_s < rank.moved_s:
            rank.moved_s = moved_s
        rank.forgiven_s += lagged_s
        rank.phase, rank.step = phase, step
        rank.idle_s = idle_s
        rank.seen_s = now_s
        rank.activity_s = status.activity_s
        job.note(rank, status.activity, status.place, can_stall=phase in self._settings.phases)
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

    def _judge(self, job: WatchedJob, rank: Rank, now_s: float) -> None:
        number, stance, pace = rank.number, job.stance, job.pace
        if number not in job.waiting or number not in job.standing:
            job.overdue.discard(number)
            return
        age_s = rank.idle_s - rank.forgiven_s
        if age_s <= self._never_overdue_s:
            job.overdue.discard(number)
            return
        if stance is Stance.WORKING or (pace.has_attached and pace.hang_timeout_s and stance is not Stance.FROZEN):
            stood_s = age_s  # whatever it did, it made no step
        elif (
            stance is Stance.FROZEN
        ):  # its daemon looks at it from a quarter of the time on, others tell of theirs later
            stood_s = min(age_s, 2.0 * rank.activity_s, 2.0 * job.stance_s(now_s))
        else:
            stood_s = min(age_s, rank.activity_s)
        job.stood(stood_s, now_s)
        if stood_s > pace.deadline_s(stance, rank.phase, has_stepped=rank.has_stepped):
            job.overdue.add(number)
        else:
            job.overdue.discard(number)

    # --- what is said -------------------------------------------------------------------------------------------------

    def _stall(self, name: str, job: WatchedJob) -> None:
        """Say that the job stalled, or one rank alone that is far behind the others; once, until it goes on."""
        named = self._stalled(job)
        if not named or job.stalled:
            return
        first, pace, stance = job.ranks[named[0]], job.pace, job.stance
        bounds = pace.bounds(stance, first.phase, has_stepped=first.has_stepped)
        deadline_s, why = max(bounds)
        job.stalled = frozenset(named)
        job.alarm = Alarm(job.generation, named, first.step, first.idle_s, stance)
        self._news.append(
            RankStalled(
                job=name,
                generation=job.generation,
                ranks=named,
                phase=first.phase,
                step=first.step,
                silent_s=first.idle_s,
                deadline_s=deadline_s,
                stance=stance.value,
                seen=seen_in(stance, first.place, job.places()),
                limit=why,
            )
        )

    def _stalled(self, job: WatchedJob) -> tuple[int, ...]:
        """The ranks that are to be called stalled, if any: those that the others wait for, or all where that cannot be
        told."""
        overdue = job.overdue
        if not overdue:
            return ()
        if job.stance is Stance.FROZEN:
            return tuple(sorted(job.standing))
        if job.stance is Stance.STANDS:
            return tuple(sorted(job.standing)) if job.standing <= overdue else ()
        if len(overdue) == len(job.waiting):
            return self._furthest_behind(job)
        lone = [n for n in overdue if job.newest_step - job.ranks[n].step >= self._settings.behind_steps]
        return (min(lone, key=lambda number: (job.ranks[number].step, number)),) if lone else ()

    def _furthest_behind(self, job: WatchedJob) -> tuple[int, ...]:
        """The lowest step; of one step the few that work or wait for a disk, while the others are idle. Those that
        cannot be told apart are all named."""
        for known in self._in_steps.values():
            if known.job is job:
                known.settle()
        lowest = min(job.ranks[number].step for number in job.waiting)
        last = {number for number in job.waiting if job.ranks[number].step == lowest}
        if last == job.waiting:
            busy = last - job.doing(Activity.IDLE)
            last = busy if 0 < 2 * len(busy) < len(last) else last
        return tuple(sorted(last))

    def _disprove(self, name: str, job: WatchedJob) -> None:
        pause, job.pace.disproved = job.pace.disproved, None
        if pause is None:
            return
        self._news.append(
            FalseAlarm(
                job=name,
                generation=job.generation,
                stalled_generation=pause.alarm.generation,
                ranks=pause.alarm.ranks,
                step=pause.alarm.step,
                paused_s=pause.paused_s,
                patience=job.pace.patience,
            )
        )
