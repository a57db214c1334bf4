"""A `StatusStore` in memory, and the users' requests: jobs submitted and stopped."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from flyball.contracts.checkpoints import Tier
from flyball.contracts.cluster import HostState, JobSpec, JobState
from flyball.contracts.errors import Conflict, NotFound
from flyball.contracts.events import Event, EventKind
from flyball.contracts.reports.signals import Report, Sender
from services.record import report_events
from services.record.report_events import Before, RankRow
from services.rules.job_differences import differences
from services.sensor.detector.watched_job import LearnedJob
from services.sensor.rules.step_log import StepSummary
from simulator.ports.memory import HostRow, JobRow, Memory


class MemoryStatusStore:
    """Any number of sensors may share the memory."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._rosters: dict[str, Sequence[str]] = {}

    def record_reports(self, reports: Sequence[tuple[Report, float]], steps: Sequence[StepSummary] = ()) -> None:
        """Store (report, received_at) pairs; a repeated report changes nothing."""
        memory = self._memory
        if not reports and not steps:
            return
        with memory.transaction():
            named = {report.facts.host_id for report, _ in reports}
            known = {
                name: Before(row.incarnation, row.sent_at, row.last_report_at, has_left=row.left_at > 0.0)
                for name in named & set(memory.hosts)
                for row in (memory.hosts[name],)
            }
            fresh, current = report_events.sift(reports, known)
            news: list[Event] = []
            for host_id in sorted(current):
                news += self._store_host(*current[host_id])
            for report, received_at in fresh:
                is_current = current.get(report.facts.host_id, (None,))[0] is report
                keys = {key for key in report_events.ranks_of(report) if key[:2] in memory.generations}
                rows = {key: memory.ranks[key[:2]].get(key[2]) or RankRow() for key in sorted(keys)}
                news += report_events.merge(
                    rows, report, received_at, granted=memory.generations.keys(), is_current=is_current
                )
                if is_current:
                    self._mark_gone(report, known.get(report.facts.host_id, Before()).incarnation)
                for (job, generation, rank), row in rows.items():
                    memory.ranks[job, generation][rank] = row
                    memory.raise_newest_step(job, row.step)
                for copy in report.copies:
                    if copy.tier is Tier.PERSISTENT and (copy.job, copy.generation) in memory.generations:
                        memory.persistent_copies[copy.job, copy.generation, copy.step, copy.rank] = copy
            news += [
                report_events.event_of_steps(part)
                for part in steps
                if (part.job, part.generation) in memory.generations
            ]
            memory.changed(news)

    def vouch(self, *, sensor: str, at: float, ages_ms: Sequence[int], hosts: Sequence[str] | None) -> None:
        """Store how long before `at` a sensor received a report of each host; `hosts` None: the same hosts as last
        time."""
        if hosts is not None:
            self._rosters[sensor] = hosts
        with self._memory.transaction():
            for host_id, age_ms in zip(self._rosters.get(sensor, ()), ages_ms, strict=False):
                if (row := self._memory.hosts.get(host_id)) is not None:
                    row.last_report_at = max(row.last_report_at, at - age_ms / 1000.0)
            self._memory.changed()

    def learn(self, known: Mapping[str, LearnedJob]) -> None:
        """Store what a sensor has learned about jobs."""
        with self._memory.transaction():
            self._memory.learned.update(known)

    def learned(self) -> dict[str, LearnedJob]:
        """Return what any sensor has learned about jobs."""
        with self._memory.transaction():
            return dict(self._memory.learned)

    def committed(self, senders: Iterable[Sender]) -> dict[Sender, int]:
        """For each known sender: every signal up to this seq is committed."""
        with self._memory.transaction():
            marks = self._memory.watermarks
            return {sender: marks[sender] for sender in senders if sender in marks}

    def expected_hosts(self) -> dict[str, float]:
        """Hosts that should report -> when any sensor last received a report of each: those with ranks of running jobs,
        and the others that did not leave and are not known to be gone."""
        memory = self._memory
        with memory.transaction():
            gone = (HostState.SILENT, HostState.IN_REPAIR)
            free = {name for name, host in memory.hosts.items() if host.state not in gone and not host.left_at}
            named = sorted(
                free
                | {
                    part.host_id
                    for name, job in memory.jobs.items()
                    if job.state is JobState.RUNNING and (name, job.generation) in memory.generations
                    for part in memory.generations[name, job.generation].plan.hosts
                }
            )
            return {name: memory.hosts[name].last_report_at if name in memory.hosts else 0.0 for name in named}

    def _mark_gone(self, report: Report, before: str) -> None:
        of_host = {
            (job, generation, number): row
            for (job, generation), rows in self._memory.ranks.items()
            for number, row in rows.items()
            if row.host_id == report.facts.host_id
        }
        report_events.mark_gone(of_host, report, before)

    def _store_host(self, report: Report, received_at: float) -> list[Event]:
        facts, known = report.facts, self._memory.hosts.get(report.facts.host_id)
        self._memory.hosts[facts.host_id] = HostRow(
            host_id=facts.host_id,
            state=known.state if known else HostState.HEALTHY,
            since=known.since if known else received_at,
            reason=known.reason if known else "it reported for the first time",
            address=facts.address,
            failure_domain=facts.failure_domain,
            engine_address=facts.engine_address,
            free_port=facts.free_port,
            incarnation=report.incarnation,
            sent_at=report.sent_at,
            last_report_at=received_at,
            workers=report_events.workers_of(report),
            copies=tuple(copy for copy in report.copies if copy.tier is not Tier.PERSISTENT),
            preempt_deadline_at=known.preempt_deadline_at if known else 0.0,
            left_at=received_at if report.leaves else 0.0,
            fabric=facts.fabric,
            memory_bytes=facts.memory_bytes,
        )
        return [] if known else [Event(at=received_at, kind=EventKind.HOST_JOINED, host_id=facts.host_id)]


class MemoryJobStore:
    def __init__(self, memory: Memory) -> None:
        self._memory = memory

    def submit(self, spec: JobSpec, now: float) -> bool:
        """Store a job; False if the identical one exists. Raises Conflict if another job has its name."""
        memory = self._memory
        with memory.transaction():
            known = memory.jobs.get(spec.job)
            if known is not None and (differs := differences(known.spec, spec)):
                hint = "choose another name"
                raise Conflict(f"A job {spec.job!r} with another specification exists: {differs}.", hint=hint)
            if known is not None:
                return False
            memory.jobs[spec.job] = JobRow(spec, now)
            data = {"world_size": spec.world_size}
            memory.changed([Event(at=now, kind=EventKind.JOB_SUBMITTED, job=spec.job, data=data)])
            return True

    def request_stop(self, job: str, now: float) -> None:
        """Have the controller stop a job. Raises NotFound."""
        with self._memory.transaction():
            row = self._memory.jobs.get(job)
            if row is None:
                raise NotFound(f"There is no job {job!r}.", hint="submit it first")
            if not row.stop_requested:
                row.stop_requested = True
                self._memory.changed()
