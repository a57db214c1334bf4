"""A host daemon as a real process before a supervisor that the test plays, and jobs for it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.hosts.daemons import LoneDaemon
from support.jobs.commanded import CommandedJob
from support.servers.played_supervisor import PlayedSupervisor

from flyball.contracts.decisions import WarmUp


@pytest.fixture
def supervisor() -> Iterator[PlayedSupervisor]:
    server = PlayedSupervisor()
    yield server
    server.close()


@pytest.fixture
def daemon(tmp_path: Path, supervisor: PlayedSupervisor) -> Iterator[LoneDaemon]:
    daemon = LoneDaemon(tmp_path, supervisor)
    yield daemon
    daemon.clean_up()


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoneDaemon]:
    """A daemon for tests that only use it. Its warm standby is kept between tests."""
    server = PlayedSupervisor()
    daemon = LoneDaemon(tmp_path_factory.mktemp("shared"), server)
    daemon.start()
    keeper = CommandedJob(daemon, "", name="keeper")
    keeper.send(WarmUp(keeper.spec), generation=1)
    yield daemon
    daemon.clean_up()
    server.close()


@pytest.fixture
def make_job(daemon: LoneDaemon) -> Callable[..., CommandedJob]:
    def make(script: str, **settings: object) -> CommandedJob:
        return CommandedJob(daemon, script, **settings)  # type: ignore[arg-type]  # passed through as given

    return make


@pytest.fixture
def make_shared_job(shared: LoneDaemon, request: pytest.FixtureRequest) -> Iterator[Callable[..., CommandedJob]]:
    """Jobs with unique names on the shared daemon, ended with the test."""
    made: list[CommandedJob] = []

    def make(script: str, **settings: object) -> CommandedJob:
        digest = hashlib.blake2b(request.node.name.encode(), digest_size=4).hexdigest()
        made.append(CommandedJob(shared, script, name=f"job-{digest}-{len(made)}", **settings))  # type: ignore[arg-type]  # as given
        return made[-1]

    yield make
    for job in made:
        job.end(1_000)
