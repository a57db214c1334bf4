"""Errors at the start or end of a command never free memory, and an unreadable place does not count as empty."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from flyball.cli.main import run_cli
from flyball.cli.reach.places import SupervisorConnection
from flyball.cli.run.ending import Ending, announce_kept_step, settle_memory
from flyball.cli.run.host_process import HostProcess
from flyball.cli.run.resume import prepare_locally, record_of
from flyball.cli.run.resume_points import open_jobs
from flyball.cli.run.run_folders import RECORD, RunFolder, claim_folder
from flyball.cli.run.session import start_daemon
from flyball.cli.signals import EndSignals
from flyball.contracts.checkpoints import CheckpointSpec
from flyball.contracts.cluster import Again, JobSpec, JobState
from flyball.contracts.errors import Unreachable
from flyball.contracts.on_host.segments import shm_prefix
from flyball.launch.launcher import RunRequest
from services.store.decisions.job_store import SqlJobStore
from services.store.sql.database import Database
from services.store.sql.schema_upgrade import migrate

JOB = "train"
ARGV = ("train.py",)


@pytest.fixture
def home(tmp_path: Path) -> Iterator[RunFolder]:
    folder = claim_folder(JOB, {"FLYBALL_STATE_DIR": str(tmp_path / "s")})
    yield folder
    folder.close()


@pytest.fixture
def spec(tmp_path: Path) -> JobSpec:
    checkpoint = CheckpointSpec(persistent_dir=str(tmp_path / "store"), persistent_every_steps=5)
    return JobSpec(JOB, ("train.py",), "/", 1, 1, checkpoint=checkpoint)


def daemon_of(home: RunFolder) -> HostProcess:
    return HostProcess(host_id="here", state_dir=home.host, supervisor_url="http://127.0.0.1:1", token_file=home.path)


@pytest.mark.parametrize(
    ("hosts", "told"),
    [
        (["here", "b"], f"step 452 of job {JOB} is in"),
        (["c", "b"], f"the newest step of job {JOB}, 737, is on the disks of b, c, where its ranks were"),
    ],
)
def test_a_host_whose_ranks_have_moved_names_the_jobs_newest_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], hosts: list[str], told: str
) -> None:
    spec = JobSpec(JOB, ARGV, "/", 2, 1, checkpoint=CheckpointSpec(disk_dir=str(tmp_path), disk_every_s=600.0))
    before = tmp_path / "here" / JOB / "run" / "g1" / "step452"
    before.mkdir(parents=True)
    (before / "rank0.manifest").touch()
    job = {"state": "stopped", "newest_step": 737, "ranks": [{"host_id": host} for host in hosts]}
    announce_kept_step(spec, job, "here", None, command="flyball run")
    assert told in capsys.readouterr().err


def test_memory_is_kept_if_the_daemon_cannot_start(
    home: RunFolder, spec: JobSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLYBALL_SHM_DIR", str(tmp_path))
    segment = Path(shm_prefix(str(home.host.resolve()), str(tmp_path)) + f".{JOB}.r0.s0")
    segment.write_bytes(b"the newest step")
    (home.path / "host.daemon.out").mkdir()
    connection = SupervisorConnection("http://127.0.0.1:1", "token", home.path)
    with pytest.raises(IsADirectoryError), ExitStack() as stack:
        start_daemon(RunRequest(ARGV), spec, connection, home.host, stack)
    assert segment.exists()


def test_a_failed_write_of_the_record_does_not_prevent_the_rest_of_the_end(
    home: RunFolder, spec: JobSpec, capsys: pytest.CaptureFixture[str]
) -> None:
    daemon = daemon_of(home)
    (home.path / RECORD).mkdir()
    record = record_of(RunRequest(ARGV), spec, ("train.py",), host_id="here")
    with EndSignals(()) as signals:
        Ending(home, spec, record, daemon, signals, environ={}).run()
    assert "cannot record the job's end" in capsys.readouterr().err
    assert not daemon.keeps_segments, "there is nothing to keep"


@pytest.mark.parametrize("fresh", [False, True])
def test_an_unreadable_store_prevents_a_start_from_scratch(
    home: RunFolder, spec: JobSpec, tmp_path: Path, fresh: bool
) -> None:
    (home.path / "supervisor").mkdir()
    database = Database(f"sqlite:///{home.path / 'supervisor' / 'flyball.sqlite'}")
    migrate(database)
    SqlJobStore(database).submit(spec, 1_800_000_000.0)
    database.close()
    with open_jobs(home.path) as jobs:
        assert jobs is not None
        past = jobs.past(JOB)
    assert past is not None
    place = tmp_path / "store" / JOB / past.run
    place.parent.mkdir(parents=True)
    place.symlink_to(place.name)  # like a stuck mount: listing it fails
    request = RunRequest(ARGV, fresh=fresh)
    if fresh:
        assert prepare_locally(request, spec, home, host_id="here", environ={}, check=lambda: None).again is Again.FRESH
        return
    with pytest.raises(Unreachable, match="cannot be read") as caught:
        prepare_locally(request, spec, home, host_id="here", environ={}, check=lambda: None)
    assert str(place) in caught.value.message


def test_the_printed_command_for_freeing_memory_works(
    home: RunFolder,
    spec: JobSpec,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("flyball.cli.run.ending.holds_memory", lambda _prefix: True)
    settle_memory(daemon_of(home), spec, {"state": JobState.FAILED}, has_left=False, command="flyball run train.py")
    printed = re.search(r"free them with: flyball (.+)", capsys.readouterr().err)
    assert printed
    code = run_cli([*printed[1].split(), "--state-dir", str(tmp_path / "s")])
    assert code == 8 and f"There are no checkpoints of job {JOB}" in capsys.readouterr().err, "it names the job"
