"""Remembers up to which step the replicas of a job were equal, once they differ: later steps are suspect. Likewise for
replays that show a bad device. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from flyball.contracts.reports.rank_columns import Workers
from flyball.contracts.reports.signals import ReplicasDiffer, Signal
from flyball.contracts.reports.training_health import ReplayDiffers

MAX_JOBS = 10_000


class SuspectReplicas:
    """The newest generation of each job."""

    def __init__(self) -> None:
        self._harmed: dict[str, tuple[int, int]] = {}  # job -> generation, newest step at which they were equal

    def observe(self, signals: Iterable[Signal], workers: Sequence[Workers]) -> None:
        """Take in a host's signals about the generations that it runs. Replicas that were never equal are no harm."""
        for body in (signal.body for signal in signals):
            if not isinstance(body, ReplicasDiffer | ReplayDiffers) or body.equal_step < 0:
                continue
            if isinstance(body, ReplayDiffers) and not body.is_bad_device:
                continue
            if not any((of.job, of.generation) == (body.job, body.generation) for of in workers):
                continue
            generation, step = self._harmed.get(body.job, (-1, -1))
            if body.generation > generation and (body.job in self._harmed or len(self._harmed) < MAX_JOBS):
                self._harmed[body.job] = (body.generation, body.equal_step)
            elif body.generation == generation:
                self._harmed[body.job] = (generation, min(step, body.equal_step))

    def clean_steps(self, workers: Sequence[Workers], known: Mapping[str, int]) -> Mapping[str, int]:
        """Add to the clean steps that are `known` otherwise those of jobs whose replicas differ; the older one counts.
        A harm is over with its generation."""
        found = known
        for of in workers if self._harmed else ():
            generation, step = self._harmed.get(of.job, (-1, -1))
            if of.generation > generation >= 0:
                del self._harmed[of.job]
            elif of.generation == generation:
                found = {**found, of.job: min(step, known.get(of.job, step))}
        return found

    def keep(self, jobs: Collection[str]) -> None:
        """Forget all other jobs: they have ended."""
        self._harmed = {job: harm for job, harm in self._harmed.items() if job in jobs}
