"""What `flyball run` finds to resume from, in real slots and files."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.stores.checkpoint_site import FROM_SCRATCH, JOB, CheckpointSite

from flyball.cli.run.resume import prepare_locally
from flyball.cli.run.resume_points import JobCheckpoints
from flyball.cli.run.run_folders import RunFolder, claim_folder
from flyball.cli.signals import EndSignals, Interrupted
from flyball.contracts.checkpoints import Tier
from flyball.contracts.cluster import JobSpec
from flyball.launch.launcher import RunRequest

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
