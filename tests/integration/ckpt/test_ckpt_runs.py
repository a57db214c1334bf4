"""`flyball ckpt` on the tiers of a job that was submitted twice, with equal generation numbers."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from support.stores.checkpoint_site import JOB, CheckpointSite, shard

FIRST, SECOND = "20251119-080000-000", "20251120-080000-000"


@pytest.fixture
def twice(site: CheckpointSite) -> CheckpointSite:
    """The first run got further, on disks and in the store. The hosts know the second run. Both were in the hosts'
    memory."""
    site.run_id = FIRST
    site.put_disk(5)
    site.put_disk(9)
    site.put_store(5)
    site.put_memory(10)  # left in a slot
    site.run_id = SECOND
    site.configure()
    site.put_memory(7)
    site.put_disk(5)
    site.put_store(4)
    return site


def steps_and_tiers(listed: dict[str, object]) -> dict[int, set[str]]:
    return {s["step"]: {t["tier"] for t in s["tiers"]} for s in listed["steps"]}  # type: ignore[attr-defined]


def test_the_newest_run_is_shown_with_a_note_about_the_other(twice: CheckpointSite) -> None:
    listed = twice.json("ls")
    assert (listed["run"], listed["runs"], listed["recovery_point"]) == (SECOND, [FIRST, SECOND], 7)
    assert steps_and_tiers(listed) == {7: {"memory"}, 5: {"disk"}, 4: {"persistent"}}
    code, table, error = twice.call("ls")
    assert code == 0
    assert f"run {SECOND}" in table
    assert f"--job {JOB}/{FIRST}" in error


def test_another_run_is_named_behind_the_job(twice: CheckpointSite, tmp_path: Path) -> None:
    listed = twice.json("ls", "--job", f"{JOB}/{FIRST}")
    assert (listed["run"], listed["recovery_point"]) == (FIRST, 9)  # its host's memory belongs to the newer run
    assert steps_and_tiers(listed) == {9: {"disk"}, 5: {"disk", "persistent"}}
    assert twice.json("verify", "--all", "--job", f"{JOB}/{FIRST}")["job"] == JOB
    for run in (FIRST, SECOND):
        twice.json("restore", "5", "--to", str(tmp_path / run), "--job", f"{JOB}/{run}")
        for rank in (0, 1):
            assert (tmp_path / run / f"rank{rank}.safetensors").read_bytes() == shard(5, rank, run=run)[2]
    assert twice.json("ls", "--dir", str(tmp_path / FIRST))["run"] == FIRST


def test_a_run_that_is_not_known_is_refused_with_those_that_are(twice: CheckpointSite) -> None:
    code, _, error = twice.call("ls", "--job", f"{JOB}/20200101-000000-000")
    assert code != 0
    assert FIRST in error
    assert SECOND in error


@pytest.mark.parametrize("folder", ["disk", "disk/host-a", f"disk/host-a/{JOB}", "store", f"store/{JOB}"])
def test_folders_alone_tell_the_runs_apart(twice: CheckpointSite, folder: str) -> None:
    listed = twice.json("ls", "--dir", str(twice.root / folder))
    assert (listed["run"], listed["runs"]) == (SECOND, [FIRST, SECOND])
    assert set(steps_and_tiers(listed)) == ({5} if folder.startswith("disk") else {4})
    older = twice.json("ls", "--dir", str(twice.root / folder), "--job", f"{JOB}/{FIRST}")
    assert set(steps_and_tiers(older)) == ({9, 5} if folder.startswith("disk") else {5})


@pytest.mark.parametrize("tier", ["disk/host-a", "store"])
def test_the_folder_of_one_run_can_be_named(twice: CheckpointSite, tier: str) -> None:
    listed = twice.json("ls", "--dir", str(twice.root / tier / JOB / FIRST))
    assert (listed["job"], listed["run"], listed["runs"]) == (JOB, FIRST, [FIRST])
    assert {place["tier"] for place in listed["places"]} == {"disk" if tier != "store" else "persistent"}


def test_an_object_store_has_its_runs_apart(tmp_path: Path, s3: str) -> None:
    site = CheckpointSite(tmp_path, store=s3)
    for run, step in ((FIRST, 8), (SECOND, 3)):
        site.run_id = run
        site.put_store(step)
    for place, wanted, expected in (
        (s3, JOB, (SECOND, [FIRST, SECOND], 3)),
        (s3, f"{JOB}/{FIRST}", (FIRST, [FIRST, SECOND], 8)),
        (f"{s3}/{JOB}", JOB, (SECOND, [FIRST, SECOND], 3)),
        (f"{s3}/{JOB}/{FIRST}", JOB, (FIRST, [FIRST], 8)),
    ):
        listed = site.json("ls", "--dir", place, "--job", wanted)
        assert (listed["run"], listed["runs"], listed["recovery_point"]) == expected


@pytest.mark.parametrize("tier", ["disk/host-a", "store"])
def test_the_folder_of_a_run_that_was_moved_to_another_does_not_count(twice: CheckpointSite, tier: str) -> None:
    job = twice.root / tier / JOB
    shutil.rmtree(job / SECOND)
    (job / FIRST).rename(job / SECOND)
    listed = twice.json("ls", "--dir", str(job))
    assert (listed["run"], listed["steps"]) == (SECOND, [])
    assert listed["ignored"]
    assert all(FIRST in ignored["reason"] for ignored in listed["ignored"])


def test_a_supervisor_is_not_asked_for_another_run(twice: CheckpointSite) -> None:
    code, _, error = twice.call("plan", "5", "--supervisor", "http://127.0.0.1:9", "--job", f"{JOB}/{FIRST}")
    assert code == 2
    assert "name the job alone" in error
