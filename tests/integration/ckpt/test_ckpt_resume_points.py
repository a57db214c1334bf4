"""What `flyball run` finds to resume from, in real slots and files."""

from __future__ import annotations

import errno
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.stores.checkpoint_site import FROM_SCRATCH, JOB, CheckpointSite

from ckpt_engine.format.verified_read import FileSource
from flyball.cli.run.ending import held_in_memory
from flyball.cli.run.resume import Submission, prepare_locally
from flyball.cli.run.resume_points import JobCheckpoints
from flyball.cli.run.run_folders import RunFolder, claim_folder
from flyball.cli.signals import EndSignals, Interrupted
from flyball.contracts.checkpoints import Tier
from flyball.contracts.cluster import Again, JobSpec
from flyball.contracts.errors import NothingVerifies, Unreachable
from flyball.launch.launcher import RunRequest
from services.store.decisions.job_store import SqlJobStore
from services.store.sql.database import Database
from services.store.sql.schema_upgrade import migrate

RUN = "20270101-120000-000"
SHARD_BYTES = 200_000  # at least


@pytest.fixture
def site(tmp_path: Path) -> CheckpointSite:
    """One host, as with `flyball run` on a single machine."""
    site = CheckpointSite(tmp_path, hosts=("host",))
    site.run_id = RUN
    return site


@pytest.fixture
def home(site: CheckpointSite) -> Iterator[RunFolder]:
    folder = claim_folder(JOB, site.environment, state_dir=str(site.state))
    yield folder
    folder.close()


def left(site: CheckpointSite, home: RunFolder) -> JobCheckpoints:
    return JobCheckpoints(home, site.spec, host_id="host", run=RUN, lineage=FROM_SCRATCH, environ=site.environment)


def spoil(folder: Path) -> None:
    """Flip one byte of every shard in the folder."""
    for file in (file for file in folder.rglob("*") if file.stat().st_size > SHARD_BYTES):
        with file.open("r+b") as opened:
            opened.seek(SHARD_BYTES // 2)
            byte = opened.read(1)[0]
            opened.seek(-1, os.SEEK_CUR)
            opened.write(bytes([byte ^ 1]))


def test_a_bad_copy_is_passed_over_for_the_next_copy_of_the_same_step(site: CheckpointSite, home: RunFolder) -> None:
    site.put_disk(3)
    site.put_disk(7)
    site.put_memory(7)
    near = left(site, home).verified()
    assert near is not None
    assert (near.step, near.tier, near.verified) == (7, Tier.MEMORY, True)

    spoil(site.shm)
    further = left(site, home).verified()
    assert further is not None
    assert (further.step, further.tier, further.verified) == (7, Tier.DISK, True)

    (folder,) = Path(site.spec.disk_dir).rglob("step7")
    spoil(folder)
    older = left(site, home).verified()
    assert older is not None
    assert (older.step, older.verified) == (3, True)


def test_a_signal_ends_the_verification_between_two_reads(site: CheckpointSite, home: RunFolder) -> None:
    site.put_disk(7)
    asked = 0

    def check() -> None:
        nonlocal asked
        asked += 1
        if asked == 2:
            raise Interrupted(130)

    with pytest.raises(Interrupted):
        left(site, home).verified(check=check)
    assert asked == 2


@pytest.mark.parametrize(("name", "code"), [("SIGINT", 130), ("SIGTERM", 143)])
def test_ctrl_c_while_a_command_looks_what_was_left_changes_nothing(
    site: CheckpointSite, home: RunFolder, name: str, code: int
) -> None:
    site.put_disk(7)
    spec = JobSpec(JOB, ("train.py",), "/", 1, 1, checkpoint=site.spec)
    with EndSignals([name]) as signals:
        os.kill(os.getpid(), signal.Signals[name])
        with pytest.raises(Interrupted) as caught:
            prepare_locally(
                RunRequest(("train.py",), fresh=True),
                spec,
                home,
                host_id="host",
                environ=site.environment,
                check=signals.check,
            )
    assert caught.value.exit_code == code
    still = left(site, home).verified()
    assert still is not None
    assert still.step == 7


# --- every copy is damaged ---


def prepared(site: CheckpointSite, home: RunFolder, *, fresh: bool = False) -> Submission:
    """What the same command does, before it starts anything."""
    spec = JobSpec(JOB, ("train.py",), "/", 1, 1, checkpoint=site.spec)
    request = RunRequest(("train.py",), fresh=fresh)
    return prepare_locally(request, spec, home, host_id="host", environ=site.environment, check=lambda: None)


def contents(*folders: Path) -> dict[Path, bytes]:
    return {file: file.read_bytes() for folder in folders for file in folder.rglob("*") if file.is_file()}


def flip_a_byte(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1000])


DAMAGES = [
    ("rank0.safetensors", flip_a_byte),
    ("rank0.safetensors", cut),
    ("rank0.safetensors", Path.unlink),
    ("rank0.manifest", flip_a_byte),
]


@pytest.mark.parametrize(
    ("tier", "name", "damage"),
    [
        *((tier, name, damage) for tier in (Tier.DISK, Tier.PERSISTENT) for name, damage in DAMAGES),
        (Tier.PERSISTENT, "rank0.manifest", Path.unlink),
        (Tier.PERSISTENT, "world.manifest", flip_a_byte),
    ],
)
def test_the_same_command_is_refused_if_all_that_is_there_is_damaged(
    site: CheckpointSite, home: RunFolder, tier: Tier, name: str, damage: Callable[[Path], None]
) -> None:
    put, root = (site.put_disk, site.spec.disk_dir) if tier is Tier.DISK else (site.put_store, site.spec.persistent_dir)
    for step in (3, 7):
        put(step)
    for file in Path(root).rglob(name):
        damage(file)
    before = contents(Path(root))

    with pytest.raises(NothingVerifies, match=r"2 steps found, none verifies: step 7: .*; step 3: ") as caught:
        prepared(site, home)
    assert (caught.value.exit_code, "--fresh" in caught.value.hint) == (25, True)
    assert contents(Path(root)) == before
    listed = site.json("ls", "--state-dir", str(site.state / "host"))
    assert listed["recovery_point"] is None
    assert prepared(site, home, fresh=True) == Submission(Again.FRESH)

    put(9)  # another good one
    assert prepared(site, home).again is Again.RESUME


@pytest.fixture
def killed_run(site: CheckpointSite) -> None:
    """The database of a run all of whose processes were killed."""
    folder = site.state / "supervisor"
    folder.mkdir(parents=True)
    database = Database(f"sqlite:///{folder / 'flyball.sqlite'}")
    migrate(database)
    SqlJobStore(database).submit(JobSpec(JOB, ("train.py",), "/", 1, 1), 1.0, run=RUN)
    database.close()


@pytest.mark.usefixtures("killed_run")
def test_damaged_slots_are_passed_over_or_refused_as_files_are(
    site: CheckpointSite, home: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    site.put_disk(2)
    site.put_memory(3)
    site.put_memory(4)
    spoil(site.shm)
    assert prepared(site, home).point == f"{RUN}:1:2:1"  # so that nobody tries steps 3 and 4 again
    said = capsys.readouterr().err
    assert "newer checkpoints do not verify and are not used: step 4: rank 0 in" in said
    assert "resuming from step 2 (disk, verified)" in said
    shutil.rmtree(site.spec.disk_dir)
    with pytest.raises(NothingVerifies, match="2 steps found"):
        prepared(site, home)


def test_a_store_that_cannot_be_read_at_the_moment_is_another_error(
    site: CheckpointSite, home: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.put_store(7)

    def fail(_source: FileSource, _target: memoryview, _offset: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(FileSource, "read_into", fail)
        with pytest.raises(Unreachable, match="cannot be read"):
            prepared(site, home)
    assert prepared(site, home).again is Again.RESUME


def test_a_step_that_was_never_whole_is_no_reason_to_refuse(site: CheckpointSite, home: RunFolder) -> None:
    """As after a kill during the very first save."""
    site.put_store(0, seal=False)
    assert prepared(site, home).again is Again.NO


def test_what_is_known_to_be_bad_is_forgotten_once_it_verifies(site: CheckpointSite) -> None:
    site.put_store(3)
    site.put_store(7)
    where = ("--dir", site.spec.persistent_dir)
    (file,) = Path(site.spec.persistent_dir).rglob("step7/rank0.safetensors")
    assert site.json("ls", *where)["recovery_point"] == 7
    flip_a_byte(file)
    assert site.json("ls", *where)["recovery_point"] == 7  # nobody has read it
    site.json("verify", "--all", *where, code=21)
    listed = site.json("ls", *where)
    assert listed["recovery_point"] == 3
    assert [(step["step"], step["tiers"][0]["bad_ranks"]) for step in listed["steps"]] == [(7, [0]), (3, [])]
    assert "does not verify: rank 0" in site.call("ls", *where)[1]
    flip_a_byte(file)
    site.json("verify", "--all", *where)
    assert site.json("ls", *where)["recovery_point"] == 7


# --- what one of several hosts says at the end ---


def test_a_host_says_whether_its_memory_alone_is_enough_to_resume(tmp_path: Path) -> None:
    site = CheckpointSite(tmp_path)
    assert held_in_memory(site.prefix("host-a"), JOB, "host-a") == "slots without a complete shard"
    site.put_memory(7)
    part = "the shard of rank 0, of 2, of step 7 (useless without those of the other hosts)"
    assert held_in_memory(site.prefix("host-a"), JOB, "host-a") == part
    site.put_replicas(7)
    assert held_in_memory(site.prefix("host-a"), JOB, "host-a") == "step 7 (all 2 ranks)"
    site.put_memory(8)
    assert held_in_memory(site.prefix("host-a"), JOB, "host-a") == "step 7 (all 2 ranks)"
