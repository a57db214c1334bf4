"""A rank restores the same step more than once: at once, after its engine has tidied up, or with another engine."""

from __future__ import annotations

from typing import Any

import torch
from support.clocks.waits import until
from support.hosts.engine_cluster import EngineCluster
from support.jobs.resharded import STEP, Make, Ranks, truth

FOUR: Ranks = {"a": (0, 1), "b": (2, 3)}


def test_a_resharded_restore_can_be_made_again(job_of: Make) -> None:
    job = job_of(FOUR)
    placement = job.begin({"a": (0, 1), "b": (2,)})
    with job.attach(placement, 0) as first:
        for _ in range(6):  # at once, while rank 1 keeps the folder: more often than attempts are allowed
            job.restore(placement, 0, job=first)
        with job.attach(placement, 1) as other:
            for attached, rank in ((other, 1), (first, 0), (other, 1)):
                job.restore(placement, rank, job=attached)
        job.restore(placement, 2)
        job.await_tidy()
        job.restore(placement, 0, job=first)
        job.restore(placement, 1)  # by a new process, as it were
        job.await_tidy()


def test_an_engine_that_was_killed_in_between_is_followed_by_the_next(job_of: Make, cluster: EngineCluster) -> None:
    job = job_of({"a": (0, 1)}, replicas=0)
    placement = job.begin({"a": (0,)})
    with job.attach(placement, 0) as attached:
        job.restore(placement, 0, job=attached)
        cluster.hosts["a"].kill()
        cluster.hosts["a"].start()
        job.restore(placement, 0, job=attached)
        job.await_tidy()


def test_a_second_restore_may_be_in_another_layout_than_the_first(job_of: Make) -> None:
    job = job_of({"a": (0,), "b": (1,)}, replicas=0)
    placement = job.begin({"a": (0,), "b": (1,)})
    with job.attach(placement, 0) as attached:
        job.restore(placement, 0, job=attached)  # as it was saved
        until(lambda: not job.folders())
        for _ in range(2):
            state: dict[str, Any] = {name: torch.zeros_like(value) for name, value in truth().items()}
            assert attached.restore(state) == STEP + 1
            assert all(torch.equal(state[name], value) for name, value in truth().items())
        job.restore(placement, 0, job=attached)
        job.await_tidy()
