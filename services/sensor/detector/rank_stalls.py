"""Detects jobs whose ranks have stopped moving, from the reports that a sensor receives. Pure.

A beacon's age is measured on its own host. `watched_job` judges the ranks of a job, `job_pace` learns what is normal
for it, and `stances` tells from what its processes do how long to wait.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from math import inf

from flyball.contracts.reports.signals import Report, SignalBody
from services.sensor.detector.patience import StallSettings
from services.sensor.detector.shared_stands import JobStand, columns_of
from services.sensor.detector.watched_job import LearnedJob, WatchedJob

MAX_JOBS = 1_000
_LAGGED_DAEMON_S = 0.5  # a daemon that ran this late may have been frozen together with its workers
_NONE: list[WatchedJob] = []


class StallWatch:
    """The newest generation of each job; reports of older ones do not count."""

    def __init__(self, settings: StallSettings) -> None:
        self._settings = settings
        self._hang_timeouts: Mapping[str, float] = {}
        self._jobs: dict[str, WatchedJob] = {}
        self._on_host: dict[str, list[WatchedJob]] = {}  # of every host that reports here
        self._placed: Mapping[tuple[str, int], Mapping[str, Collection[int]]] = {}
        self._recalled: dict[str, LearnedJob] = {}  # jobs of which this sensor has received no report yet

    def observe(self, report: Report, now_s: float) -> list[SignalBody]:
        """RankStalled for a job that this report shows to have stalled, once per episode; FalseAlarm for one that went
        on by itself. `now_s` only places this report beside others."""
        host_id = report.facts.host_id
        news: list[SignalBody] = []
        lagged_s = report.lagged_s if report.lagged_s >= _LAGGED_DAEMON_S else 0.0
        if host_id not in self._on_host:
            self._on_host[host_id] = _NONE
            for known in self._jobs.values():
                known.see(host_id)
        for steps in report.completed:
            job = self._jobs.get(steps.job)
            if job is not None and steps.generation == job.generation:
                job.pace.time_steps(steps, job.homes)
        here: list[WatchedJob] = []
        for place, workers in enumerate(report.workers):
            job = self._jobs.get(workers.job)
            if job is None or workers.generation != job.generation:
                job = self._newest(workers.job, workers.generation)
                if job is None:
                    continue
            progress = report.progress[place]
            news += job.observe(host_id, workers.ranks, progress, report.completed, now_s, lagged_s)
            here.append(job)
        before = self._on_host.get(host_id, _NONE)
        if here != before:
            for job in before:
                if job not in here:
                    job.drop(host_id)
            self._on_host[host_id] = here
        return news

    def set_hang_timeouts(self, known: Mapping[str, float]) -> None:
        """job -> after how many seconds without progress a rank counts as hung, for jobs that set this themselves."""
        if known != self._hang_timeouts:
            self._hang_timeouts = known
            for name, job in self._jobs.items():
                job.pace.limit_by(known.get(name, 0.0))

    def set_placed(self, known: Mapping[tuple[str, int], Mapping[str, Collection[int]]]) -> None:
        """(job, generation) -> host -> its ranks. A job is judged with patience while some of its hosts report to other
        sensors, or to none: their ranks may work. Of an unknown generation all hosts are taken to report here."""
        if known is not self._placed:
            self._placed = known
            for job in self._jobs.values():
                job.miss(self._elsewhere(job))

    def learned(self) -> dict[str, LearnedJob]:
        """Return what this sensor learned about jobs that have completed steps, for the next sensor."""
        known = ((name, job.learned) for name, job in self._jobs.items())
        return {name: learned for name, learned in known if learned.pace.steps_seen}

    def recall(self, known: Mapping[str, LearnedJob]) -> None:
        """Use what an earlier sensor learned, for jobs of which this one knows less."""
        self._recalled.update((name, learned) for name, learned in known.items() if name not in self._jobs)
        for name in known.keys() & self._jobs.keys():
            self._jobs[name].recall(known[name])

    def stands(self) -> tuple[JobStand, ...]:
        """What to tell the other sensors: of jobs that have ranks elsewhere, too, and of which none here works."""
        return tuple(stand for job in self._jobs.values() if (stand := job.stand()) is not None)

    @property
    def has_ranks_elsewhere(self) -> bool:
        """Whether some job has hosts that report to other sensors."""
        return any(job.has_unseen for job in self._jobs.values())

    def hear(self, told: Mapping[str, Iterable[JobStand]], now_s: float) -> list[SignalBody]:
        """Take in what all other sensors tell now, by sensor."""
        news: list[SignalBody] = []
        named = {stand.job for stands in told.values() for stand in stands}
        for job in self._jobs.values():
            if job.name not in named and not job.has_told:  # a healthy job's hosts are not looked at
                continue
            placed = self._placed_in(job)
            unseen = self._elsewhere(job)
            wanted = {rank for host_id in unseen for rank in placed[host_id]}
            found = {}
            for sensor, stands in told.items():
                for stand in stands:
                    if (stand.job, stand.generation) == (job.name, job.generation):
                        ranks = columns_of(stand, wanted)
                        if ranks is not None:
                            found[f"sensor {sensor}"] = ranks  # no host has a name with a space
                            wanted.difference_update(ranks.numbers)
            numbers = {number for ranks in found.values() for number in ranks.numbers}
            news += job.hear(found, {host_id for host_id in unseen if numbers.issuperset(placed[host_id])}, now_s)
        return news

    def forget(self, host_id: str) -> None:
        """Drop the ranks of a host that reports no more."""
        for job in self._on_host.pop(host_id, ()):
            job.drop(host_id)
        for job in self._jobs.values():
            if self._placed_in(job).get(host_id):
                job.miss_too(host_id)

    def stepped_s(self, host_id: str) -> float:
        """When a job with ranks on this host last completed a step on any host; -inf: never. Ranks that train together
        cannot go on without one of them."""
        return max((job.pace.advanced_s for job in self._jobs_on(host_id)), default=-inf)

    def advances(self, host_id: str, now_s: float) -> bool:
        """Whether such a job has completed a step within the time that it usually takes."""
        return any(job.pace.advances(now_s) for job in self._jobs_on(host_id))

    def __len__(self) -> int:
        return sum(len(job.homes) for job in self._jobs.values())

    def _jobs_on(self, host_id: str) -> Iterator[WatchedJob]:
        for job in self._on_host.get(host_id, ()):
            if host_id in job.hosts and self._jobs.get(job.name) is job:
                yield job

    def _placed_in(self, job: WatchedJob) -> Mapping[str, Collection[int]]:
        return self._placed.get((job.name, job.generation), {})

    def _elsewhere(self, job: WatchedJob) -> set[str]:
        """The hosts with ranks of the job that do not report here."""
        return {host for host, ranks in self._placed_in(job).items() if ranks and host not in self._on_host}

    def _newest(self, name: str, generation: int) -> WatchedJob | None:
        """The job, if this is its newest generation."""
        job = self._jobs.get(name)
        if job is None:
            if len(self._jobs) >= MAX_JOBS:
                del self._jobs[min(self._jobs, key=lambda other: self._jobs[other].seen_s)]
            job = self._jobs[name] = WatchedJob(name, self._settings)
            job.pace.limit_by(self._hang_timeouts.get(name, 0.0))
        if generation > job.generation:
            job.begin(generation)
            job.miss(self._elsewhere(job))
            if (learned := self._recalled.pop(name, None)) is not None:
                job.recall(learned)
        return job if generation == job.generation else None
