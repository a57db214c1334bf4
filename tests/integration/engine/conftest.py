"""Engines on this machine and their placements, for each test."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest
from support.hosts.engine_cluster import EngineCluster
from support.jobs.resharded import Make, Ranks, ReshardedJob
from support.stores.stored_replicas import CountedStore

from flyball.contracts.checkpoints import (
    CheckpointSpec,
)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[CountedStore]:
    """An object store that counts the bytes that are read from it."""
    server = CountedStore()
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    yield server
    server.end()


@pytest.fixture
def cluster() -> Iterator[EngineCluster]:
    root = Path(tempfile.mkdtemp(prefix="flyball-engine-"))  # short: a Unix socket's path is limited
    cluster = EngineCluster(root)
    try:
        yield cluster
    finally:
        cluster.end()
        shutil.rmtree(root, ignore_errors=True)


@pytest.fixture
def made_job(cluster: EngineCluster) -> Callable[..., ReshardedJob]:
    """Makes a job on these hosts, which has saved nothing."""

    def make(hosts: Iterable[str], *, disk: bool = False, store: str = "", replicas: int = 1) -> ReshardedJob:
        for host_id in hosts:
            cluster.host(host_id)
        spec = CheckpointSpec(
            disk_dir=str(cluster.root / "disk") if disk else "",
            disk_every_steps=1,
            persistent_dir=store,
            persistent_every_steps=1,
            replicas=replicas,
            restore_timeout_s=90.0,
        )
        return ReshardedJob(cluster, spec)

    return make


@pytest.fixture
def job_of(made_job: Callable[..., ReshardedJob]) -> Make:
    """Makes a job on the hosts of these ranks, which have saved its step."""

    def make(ranks: Ranks, *, disk: bool = False, store: str = "", replicas: int = 1) -> ReshardedJob:
        job = made_job(ranks, disk=disk, store=store, replicas=replicas)
        job.save(ranks)
        return job

    return make
