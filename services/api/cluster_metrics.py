"""Metrics of jobs and hosts for alerts and dashboards, read from the database when somebody scrapes them.

Every process that serves the API shows the same values. Jobs that have ended are left out. While the database is away
there are none of these metrics, rather than old ones.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable

from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from flyball.contracts.clock import Clock
from flyball.contracts.cluster import JobState
from flyball.contracts.errors import NotFound
from services.api.goodput import MAX_JOBS
from services.api.ports import GoodputAccounts, Json, ReadModels
from services.rules.job_doing import Doing
from services.runtime.list_filters import JobFilter
from services.runtime.outages import OUTAGES
from services.runtime.paging import Page

FRESH_S = 5.0  # /metrics is public: scrapes in quick succession must not load the database
FRESH_SHARE = 10.0  # nor may a reading that takes long: it is reused for this multiple of the time that it took
_JOB = "training_job"  # `job` is the scrape's own label
_JOB_GAUGES = {
    "running": "1 while the job runs; 0 while it waits for hosts, or is stopping",
    "training": "1 while the job makes steps; 0 while it stands, restores, recovers, or is held",
    "steps_per_second": "Steps per second; 0 unless it trains",
    "newest_step": "Newest step that a rank completed; -1 before the first",
    "step_seconds": "Recent median duration of a step",
    "last_step_timestamp_seconds": "When the last step was completed; before the first, when the job was started",
    "world_size": "Ranks of the job",
    "restarts": "Restarts in the life of the job",
    "restarts_used": "Restarts without progress in between",
    "restarts_allowed": "Restarts without progress in between after which the job fails",
    "goodput_ratio": "Useful training time over elapsed time, from the start of the job",
}
_TIER_GAUGES = {
    "recovery_point_step": "Newest step that this tier alone could restore; -1 if there is none",
    "recovery_point_age_seconds": "Training since that step: the steps behind the newest one, times the median step",
}


class ClusterMetrics(Collector):
    """Shows the last reading of the database; `refresh` reads it anew. Thread-safe."""

    def __init__(
        self, *, reads: ReadModels, goodput: GoodputAccounts, clock: Clock, registry: CollectorRegistry
    ) -> None:
        self._reads = reads
        self._goodput = goodput
        self._clock = clock
        self._reading = threading.Lock()
        self._fresh_until_s = 0.0
        self._families: list[Metric] = _families([], {})
        registry.register(self)

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterable[Metric]:
        return self._families

    def refresh(self) -> None:
        """Read the database, unless the last reading is fresh, or another thread reads now."""
        if not self._reading.acquire(blocking=False):
            return
        try:
            began_s = self._clock.monotonic_s()
            if began_s < self._fresh_until_s:
                return
            try:
                ratios = self._goodput.ratios()
                jobs = [
                    job | {"tiers": self._tiers(str(job["job"])), "goodput": ratios.get(job["job"])}
                    for job in self._reads.jobs(Page(MAX_JOBS), open_only=True, wanted=JobFilter())
                ]
                self._families = _families(jobs, self._reads.host_states())
            except OUTAGES:
                self._families = _families([], {})
            done_s = self._clock.monotonic_s()
            self._fresh_until_s = done_s + max(FRESH_S, FRESH_SHARE * (done_s - began_s))
        finally:
            self._reading.release()

    def _tiers(self, job: str) -> Json:
        try:
            tiers: Json = self._reads.checkpoints(job)["tiers"]
        except NotFound:  # it was removed a moment ago
            return {}
        return tiers


def _families(jobs: Iterable[Json], host_states: dict[str, int]) -> list[Metric]:
    hosts = GaugeMetricFamily("flyball_hosts", "Hosts that have not left, by state", labels=["state"])
    for state, count in sorted(host_states.items()):
        hosts.add_metric([state], count)
    by_job = {name: GaugeMetricFamily(f"flyball_job_{name}", text, labels=[_JOB]) for name, text in _JOB_GAUGES.items()}
    by_tier = {
        name: GaugeMetricFamily(f"flyball_job_{name}", text, labels=[_JOB, "tier"])
        for name, text in _TIER_GAUGES.items()
    }
    for job in jobs:
        for name, value in _values(job).items():
            if value is not None:
                by_job[name].add_metric([job["job"]], value)
        for tier, found in job["tiers"].items():
            step = int(found["newest_complete_step"])
            by_tier["recovery_point_step"].add_metric([job["job"], tier], step)
            if step >= 0 and job["step_s"] is not None:
                behind = max(0, (job["newest_step"] or 0) - step)
                by_tier["recovery_point_age_seconds"].add_metric([job["job"], tier], behind * job["step_s"])
    return [hosts, *by_job.values(), *by_tier.values()]


def _values(job: Json) -> dict[str, float | None]:
    return {
        "running": float(job["state"] == JobState.RUNNING),
        "newest_step": -1 if job["newest_step"] is None else job["newest_step"],
        "training": float(job["doing"]["kind"] == Doing.TRAINING),
        "steps_per_second": job["doing"]["steps_per_s"],
        "step_seconds": job["step_s"],
        "last_step_timestamp_seconds": job["last_step_at"] or job["started_at"] or job["submitted_at"],
        "world_size": job["world_size"],
        "restarts": job["restart_count"],
        "restarts_used": job["restarts_used"],
        "restarts_allowed": job["spec"]["max_restarts"],
        "goodput_ratio": job["goodput"],
    }
