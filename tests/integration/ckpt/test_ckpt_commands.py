"""`flyball ckpt` on checkpoints in real shared memory, folders and a store."""

from __future__ import annotations

import json
import os
import shutil
import stat
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from support.stores.checkpoint_site import CHUNK_BYTES, JOB, CheckpointSite, shard

from ckpt_engine.format.manifest import entries_of
from ckpt_engine.format.shard_format import read_header
from ckpt_engine.host.state_dir import TransportsFile
from ckpt_engine.inspect.copy_places import SlotPlace
from ckpt_engine.inspect.inventory import CopyInventory
from ckpt_engine.slots.rank_segments import RankSegments
from flyball.contracts import wire
from flyball.contracts.checkpoints import LineageEntry, PeerTransport, ShardCopy, Tier
from flyball.contracts.on_host.segments import CONTROL_SUFFIX, rank_segment


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 0xFF]))


def put_in(site: CheckpointSite, tier: str, step: int) -> None:
    {"memory": site.put_memory, "peer": site.put_replicas, "disk": site.put_disk, "persistent": site.put_store}[tier](
        step
    )


def states(listed: dict[str, object]) -> list[tuple[int, bool, bool]]:
    return [(s["step"], s["complete"], s["recovery_point"]) for s in listed["steps"]]  # type: ignore[attr-defined]


def test_ls_lists_every_tier_and_marks_the_recovery_point(site: CheckpointSite) -> None:
    site.put_memory(10)
    site.put_memory(11)
    site.put_replicas(11)
    site.put_disk(8)
    site.put_disk(12, ranks=[1])
    site.put_store(4)
    site.put_store(9, seal=False)
    listed = site.json("ls")
    assert (listed["job"], listed["recovery_point"], listed["recovery_generation"]) == (JOB, 11, 1)
    assert states(listed) == [
        (12, False, False),
        (11, True, True),
        (10, True, False),
        (9, False, False),  # no world manifest
        (8, True, False),
        (4, True, False),
    ]
    tiers = {s["step"]: [(t["tier"], t["ranks"], t["hosts"], t["counts"]) for t in s["tiers"]] for s in listed["steps"]}
    assert tiers[11] == [("memory", [0, 1], ["host-a", "host-b"], True), ("peer", [0, 1], ["host-a", "host-b"], True)]
    assert tiers[12] == [("disk", [1], ["host-b"], True)]
    assert tiers[9] == [("persistent", [0, 1], [], False)]
    assert listed["steps"][0]["missing_ranks"] == [0]
    assert listed["steps"][1]["size_bytes"] == sum(len(shard(11, rank)[2]) for rank in (0, 1))
    assert {p["tier"] for p in listed["places"]} == {"memory", "peer", "disk", "persistent"}
    assert listed["transports"] == []
    table = site.run("ls", COLUMNS="80").stdout
    assert "Shards between hosts" not in table
    assert "recovery point" in table
    assert "lacks rank 0" in table
    assert "2/2 unsealed" in table
    assert max(map(len, table.splitlines())) <= 80


def test_ls_shows_what_carries_shards_between_the_hosts(site: CheckpointSite) -> None:
    site.put_memory(10)
    shown = PeerTransport("host-b", "tcp", "host-b: There is no RDMA device")
    TransportsFile(site.state / "host-a").store((shown,))
    (listed,) = site.json("ls")["transports"]
    assert listed == {"host_id": "host-a", "peer": "host-b", "transport": "tcp", "reason": shown.reason}
    assert "host-b: There is no RDMA device" in site.run("ls", COLUMNS="100").stdout


def test_a_folder_alone_is_enough(site: CheckpointSite) -> None:
    site.put_disk(8)
    site.put_store(4)
    by_folder = {
        "disk": (8, "disk"),
        "store": (4, "persistent"),
        "disk/host-a": (None, "disk"),
        f"store/{JOB}": (4, "persistent"),
    }
    for folder, (point, tier) in by_folder.items():
        listed = site.json("ls", "--dir", folder)
        assert (listed["recovery_point"], listed["steps"][0]["tiers"][0]["tier"]) == (point, tier)
    both = site.json("ls", "--dir", "disk", "--dir", "store")
    assert [s["step"] for s in both["steps"]] == [8, 4]
    (site.root / "empty").mkdir()
    assert "of any job in empty" in site.call("verify", "--dir", "empty")[2]
    assert f"empty holds no checkpoints of {JOB}" in site.call("verify", "--dir", "disk", "--dir", "empty")[2]


def test_steps_that_a_restart_gave_up_are_shown_on_demand(site: CheckpointSite) -> None:
    site.put_disk(5)
    site.put_disk(9)
    site.put_disk(6, generation=2)
    site.configure((LineageEntry(1, 5), LineageEntry(2)))
    assert states(site.json("ls")) == [(6, True, True), (5, True, False)]
    everything = site.json("ls", "--all")
    assert [(s["step"], s["alive"]) for s in everything["steps"]] == [(6, True), (5, True), (9, False)]
    assert everything["lineage"] == [
        {"generation": 1, "upto_step": 5, "after_step": None, "world_size": 0},
        {"generation": 2, "upto_step": None, "after_step": None, "world_size": 0},
    ]
    inferred = site.json("ls", "--dir", "disk", "--all")  # not recorded here
    assert [(s["step"], s["alive"]) for s in inferred["steps"]] == [(6, True), (5, True), (9, False)]


def test_show_describes_the_manifests_and_the_tensors(site: CheckpointSite) -> None:
    site.put_memory(10)
    site.put_disk(10)
    shown = site.json("show", "latest", "--tensors")
    assert [(s["rank"], s["tier"], s["host_id"]) for s in shown["shards"]] == [
        (0, "memory", "host-a"),
        (0, "disk", "host-a"),
        (1, "memory", "host-b"),
        (1, "disk", "host-b"),
    ]
    first = shown["shards"][1]
    _, _, payload = shard(10, 0)
    assert first["path"] == str(site.root / "disk" / "host-a" / JOB / "g1" / "step10" / "rank0.safetensors")
    assert Path(first["path"]).read_bytes() == payload
    assert (first["size_bytes"], first["manifest"]["chunks"]) == (len(payload), -(-len(payload) // CHUNK_BYTES))
    assert {t["fqn"]: t["global_shape"] for t in first["manifest"]["tensors"]} == {
        "model.weight": [200, 300],
        "step": [1],
    }
    assert first["manifest"]["tensors"] == json.loads(wire.encode(entries_of(read_header(memoryview(payload)))))
    table = site.run("show", "10", "--tensors", "--rank", "1", COLUMNS="80").stdout
    assert "model.weight" in table
    assert "200x300" in table
    assert "host-a" not in table


@pytest.mark.parametrize("tier", ["memory", "peer", "disk", "persistent"])
def test_a_flipped_byte_is_found_in_every_tier_and_passed_over(site: CheckpointSite, tier: str) -> None:
    site.put_store(10)
    if tier != "persistent":
        put_in(site, tier, 10)
    good = site.json("verify")
    assert (good["bad"], good["gone"], good["good"]) == (0, 0, len(good["copies"]))
    assert [(s["step"], s["missing_ranks"], s["problems"]) for s in good["steps"]] == [(10, [], [])]
    wrong = next(c for c in good["copies"] if (c["copy"]["tier"], c["copy"]["rank"]) == (tier, 1))
    flip(Path(wrong["path"]), 2 * CHUNK_BYTES + 5)
    found = site.json("verify", "--all", code=21)
    assert [(c["path"], c["verdict"], c["bad_chunks"]) for c in found["copies"] if c["verdict"] != "good"] == [
        (wrong["path"], "bad", [2])
    ]
    result = site.run("verify", COLUMNS="120")
    assert result.returncode == 21
    assert wrong["path"] in result.stderr
    assert "chunk 2 of 4" in result.stdout
    if tier == "persistent":  # that was the only copy
        assert "another copy of this rank" in " ".join(result.stdout.split())
        code, _, err = site.call("restore", "10", "--to", "out")
        assert code == 23
        assert "rank 1: " in err
        assert "does not match its checksum" in err
        return
    restored = site.json("restore", "10", "--to", "out")
    assert [s["source"]["tier"] for s in restored["shards"]] == [tier, "persistent"]
    assert [p["path"] for p in restored["shards"][1]["passed_over"]] == [wrong["path"]]
    assert (site.root / "out" / "rank1.safetensors").read_bytes() == shard(10, 1)[2]


def test_truncated_shards_and_broken_manifests_are_named(site: CheckpointSite) -> None:
    site.put_disk(4)
    site.put_disk(8)
    folder = site.root / "disk" / "host-b" / JOB / "g1"
    os.truncate(folder / "step8" / "rank1.safetensors", 1000)
    flip(folder / "step4" / "rank1.manifest", 20)
    listed = site.json("ls")
    assert states(listed) == [(8, False, False), (4, False, False)]
    assert sorted(i["where"] for i in listed["ignored"]) == [
        str(folder / f"step{s}" / "rank1.manifest") for s in (4, 8)
    ]
    assert any("1000 bytes" in i["reason"] for i in listed["ignored"])
    assert site.json("verify", "--all", code=21)["good"] == 2
    assert site.json("verify", "8", code=21)["ignored"][0]["where"].endswith("step8/rank1.manifest")
    site.json("rm", "8", "--yes")  # the rest is useless
    assert not (folder / "step8").exists()


def test_an_ended_runs_checkpoints_are_found_in_its_state_folder(site: CheckpointSite) -> None:
    site.put_disk(8)
    for host in site.hosts:  # as an engine does when a job ends
        (site.state / host / "engine-jobs" / f"{JOB}.json").unlink()
    run = site.state / "jobs" / "ended"
    run.mkdir(parents=True)
    (site.root / "disk").rename(run / "checkpoints")
    for where in ((), ("--job", JOB), ("--state-dir", str(run))):
        assert [step["step"] for step in site.json("ls", *where)["steps"]] == [8]
    assert site.call("ls", "--job", "other")[0] == 8


def test_restore_writes_what_safetensors_reads(site: CheckpointSite) -> None:
    site.put_disk(10)
    restored = site.json("restore", "latest", "--to", "deep/out")
    out = site.root / "deep" / "out"
    assert sorted(p.name for p in out.iterdir()) == sorted(
        f"rank{rank}{suffix}" for rank in (0, 1) for suffix in (".safetensors", ".manifest")
    )
    for rank, entry in enumerate(restored["shards"]):
        assert entry["source_path"] == str(site.root / f"disk/host-{'ab'[rank]}/{JOB}/g1/step10/rank{rank}.safetensors")
        with safe_open(entry["path"] if Path(entry["path"]).is_absolute() else site.root / entry["path"], "np") as file:
            values = np.random.default_rng([1, 10, rank]).random((200, 300), dtype=np.float32)
            assert np.array_equal(file.get_tensor("model.weight"), values)
        data = (out / f"rank{rank}.manifest").read_bytes()
        assert data.startswith(shard(10, rank)[1])
    assert {stat.S_IMODE(p.stat().st_mode) for p in out.iterdir()} == {0o600}

    code, _, err = site.call("restore", "10", "--to", "deep/out")
    assert (code, "already has rank0.manifest" in err) == (16, True)
    (out / "rank0.safetensors").write_bytes(b"old")
    site.json("restore", "10", "--to", "deep/out", "--force")
    assert (out / "rank0.safetensors").read_bytes() == shard(10, 0)[2]


def test_what_was_restored_is_a_place_as_well(site: CheckpointSite) -> None:
    site.put_disk(10)
    site.json("restore", "latest", "--to", "out")
    (site.root / "out" / "more").mkdir()
    (site.root / "out" / "more" / "rank0.manifest").write_bytes(b"not of it")
    for folder in ("out", f"disk/host-a/{JOB}/g1/step10"):
        assert site.json("ls", "--dir", folder)["steps"][0]["step"] == 10
    verified = site.json("verify", "--dir", "out", "--all")
    assert (verified["good"], verified["steps"][0]["missing_ranks"]) == (2, [])
    assert verified["copies"][0]["path"] == str(site.root / "out" / "rank0.safetensors")
    flip(site.root / "out" / "rank1.safetensors", 70_000)
    assert site.json("verify", "--dir", "out", code=21)["bad"] == 1
    shutil.copy(site.root / "out" / "rank0.manifest", site.root / "out" / "rank1.manifest")
    assert site.json("ls", "--dir", "out")["ignored"][0]["where"].endswith("rank1.manifest")


def test_an_incomplete_step_is_refused_with_the_reason_per_rank(site: CheckpointSite) -> None:
    site.put_disk(10, ranks=[0])
    code, _, err = site.call("restore", "10", "--to", "out")
    assert (code, "rank 1: no copy" in err) == (23, True)
    assert not (site.root / "out").exists()
    code, _, err = site.call("restore", "latest", "--to", "out")
    assert (code, "No step of job has a copy of every rank" in err) == (8, True)
    assert site.call("verify", "10")[0] == 23


def test_rm_keeps_what_is_needed_and_what_is_pinned(site: CheckpointSite) -> None:
    for step in (2, 4, 8):
        site.put_disk(step)
    site.put_store(4)
    site.put_memory(10)
    site.json("pin", "2")
    assert [s["step"] for s in site.json("ls")["steps"] if s["pinned"]] == [2]
    for step, why in ((2, "pinned"), (8, "does not depend on the hosts' memory")):
        code, _, err = site.call("rm", str(step), "--yes")
        assert (code, why in err) == (16, True)
    asked = site.run("rm", "4")
    assert (asked.returncode, "--yes" in asked.stderr) == (2, True)
    removed = site.json("rm", "4", "--tier", "disk", "--yes")
    assert [(r["step"], r["rank"], r["tier"]) for r in removed["removed"]] == [(4, 0, "disk"), (4, 1, "disk")]
    rest = site.json("rm", "--all", "--yes")
    assert [(s["step"], s["why"]) for s in rest["stays"]] == [(2, "pinned"), (8, "durable_point")]
    assert [s["step"] for s in site.json("ls")["steps"]] == [10, 8, 2]
    assert not (site.root / "store" / JOB / "g1").exists()
    site.json("unpin", "2")
    site.json("rm", "2", "8", "--force", "--yes")
    assert [s["step"] for s in site.json("ls")["steps"]] == [10]
    assert site.call("rm", "10", "--yes")[0] == 8  # memory can only be freed as a whole


def test_memory_is_freed_only_when_nobody_uses_it(site: CheckpointSite) -> None:
    site.put_disk(8)
    site.put_memory(8)
    base = rank_segment(site.prefix("host-b"), JOB, 1)
    user = RankSegments.open(base)
    try:
        refused = site.run("rm", "--memory", "--yes")
        assert (refused.returncode, "in use" in refused.stderr) == (16, True)
        assert Path(base + CONTROL_SUFFIX).exists()
    finally:
        user.close()
    site.put_memory(9)
    code, _, err = site.call("rm", "--memory", "--yes")
    assert (code, "Step 9 of job is in memory" in err) == (16, True)
    freed = site.json("rm", "--memory", "--yes", "--force")
    assert [m["host_id"] for m in freed["removed_memory"]] == ["host-a", "host-b"]
    assert list(site.shm.iterdir()) == []
    assert site.json("ls")["recovery_point"] == 8


def test_plan_names_sources_and_what_a_lost_host_costs(site: CheckpointSite) -> None:
    site.put_memory(11)
    site.put_replicas(11)
    site.put_disk(8)
    plan = site.json("plan", "latest", "--lost", "host-b")
    assert (plan["step"], plan["restorable"]) == (11, True)
    first, second = plan["shards"]
    assert [(s["origin"], s["copy"]["host_id"]) for s in first["sources"]] == [("local_slot", "host-a")]
    assert [(s["origin"], s["copy"]["host_id"]) for s in second["sources"]] == [("remote_memory", "host-a")]
    assert [(u["copy"]["host_id"], u["reason"]) for u in second["unusable"]] == [("host-b", "lost_host")]
    assert second["host_id"] == ""
    assert 0 < plan["seconds"] < 1

    lost = site.json("plan", "8", "--lost", "host-a", code=23)
    assert (lost["restorable"], lost["shards"][0]["reason"]) == (False, "lost_host")
    result = site.run("plan", "8", "--lost", "host-a", COLUMNS="80")
    assert "on a lost host" in result.stdout
    assert "no usable copy of ranks 0" in result.stderr
    code, _, err = site.call("plan", "8", "--lost", "host-x")
    assert (code, "host-a, host-b" in err) == (8, True)


def test_hostile_folders_are_no_danger(site: CheckpointSite) -> None:
    site.put_disk(8)
    site.put_memory(8)
    folder = site.root / "disk" / "host-a" / JOB
    (folder / "g1" / "step9").mkdir()
    (folder / "g1" / "step9" / "rank0.manifest").mkdir()
    (folder / "g1" / "step9" / "rank1.manifest").write_bytes(os.urandom(4096))
    (folder / "g1" / ("step" + "9" * 60)).mkdir()
    (folder / "g1" / ("step" + "9" * 60) / "rank0.manifest").write_bytes(b"{}")
    (folder / "g1" / "step7").mkdir()
    os.mkfifo(folder / "g1" / "step7" / "rank0.manifest")
    (folder / "g1" / "step6").symlink_to("/")
    (folder / "loop").symlink_to(folder)
    huge = folder / "g1" / "step5" / "rank0.manifest"
    huge.parent.mkdir()
    with huge.open("wb") as file:
        file.truncate(1 << 40)  # a hole
    (site.state / "host-a" / "engine-jobs" / "other.json").write_bytes(b"\xff" * 1000)
    prefix = Path(site.prefix("host-a"))
    (site.shm / f"{prefix.name}.{JOB}.r7{CONTROL_SUFFIX}").write_bytes(b"nonsense")
    (site.shm / f"{prefix.name}.{JOB}.r8{CONTROL_SUFFIX}").mkdir()
    listed = site.json("ls", "--all")
    assert [(s["step"], s["complete"]) for s in listed["steps"]] == [(8, True)]
    named = " ".join(i["where"] for i in listed["ignored"])
    for part in ("step9/rank1.manifest", "step5/rank0.manifest", "other.json", f"{JOB}.r7", f"{JOB}.r8"):
        assert part in named
    site.json("verify")
    site.json("verify", "--all", code=21)
    site.json("restore", "latest", "--to", "out")


def test_an_empty_result_is_explained_with_the_next_step(site: CheckpointSite, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for arguments in (["--state-dir", "empty"], ["--dir", "empty"], ["--dir", "missing"], ["--job", "other"]):
        code, out, err = site.call("ls", *arguments)
        assert (code, out) == (8, "")
        assert "Next step: " in err
    listed = site.json("ls")  # a job without a checkpoint
    assert (listed["recovery_point"], listed["steps"]) == (None, [])
    assert site.call("ls")[1].startswith("Checkpoints of job")
    assert [site.call("show", step)[0] for step in ("4", "x", "9" * 40, "-1")] == [8, 2, 2, 2]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_users_checkpoints_are_refused_by_name(site: CheckpointSite) -> None:
    site.put_disk(8)
    for path in (site.root, *site.root.parents):
        if path == Path("/tmp"):
            break
        path.chmod(0o755)
    site.json("ls", "--dir", "disk")  # to import all modules now: another user may be unable to read them
    (site.root / "disk").chmod(0o700)
    os.seteuid(65534)
    try:
        code, out, err = site.call("ls", "--dir", "disk")
    finally:
        os.seteuid(0)
    assert (code, out) == (3, "")
    assert f"{site.root / 'disk'} cannot be read: Permission denied" in err


def test_several_jobs_and_several_runs(site: CheckpointSite) -> None:
    site.put_disk(8)
    other = site.root / "disk" / "host-a" / "other" / "g1" / "step3"
    other.mkdir(parents=True)
    code, _, err = site.call("ls", "--dir", "disk")
    assert (code, "job, other" in err) == (2, True)
    assert site.json("ls", "--dir", "disk", "--job", JOB)["recovery_point"] == 8

    runs = site.state / "jobs"
    for name, mtime in (("old", 1_000), ("new", 2_000)):
        shutil.copytree(site.state / "host-a", runs / name / "host")
        os.utime(runs / name / "host" / "engine-jobs", (mtime, mtime))
    code, _, err = site.call("ls", "--state-dir", str(runs))
    assert (code, str(runs / "new" / "host") in err) == (0, True)
    assert site.call("ls", "--state-dir", str(runs / "old"))[2] == ""


def test_an_object_store_is_a_place_like_any_other(tmp_path: Path, s3: str) -> None:
    site = CheckpointSite(tmp_path, store=s3)
    site.put_store(4)
    site.put_store(8)
    for folder in (s3, f"{s3}/", f"{s3}/{JOB}"):
        assert states(site.json("ls", "--dir", folder)) == [(8, True, True), (4, True, False)]
    assert site.json("ls")["recovery_point"] == 8
    assert site.json("verify", "--all", "--dir", s3)["good"] == 4
    restored = site.json("restore", "4", "--dir", s3, "--to", "out")
    assert restored["shards"][0]["source_path"] == f"{s3}/{JOB}/g1/step4/rank0.safetensors"
    assert (tmp_path / "out" / "rank1.safetensors").read_bytes() == shard(4, 1)[2]
    site.json("pin", "4", "--dir", s3)
    assert site.json("rm", "--all", "--dir", s3, "--yes")["removed"] == []
    site.json("rm", "4", "--dir", s3, "--force", "--yes")
    assert states(site.json("ls", "--dir", s3)) == [(8, True, True)]


def test_forcing_leaves_nothing_of_another_world(site: CheckpointSite) -> None:
    site.put_disk(8)
    (site.root / "out").mkdir()
    (site.root / "out" / "rank7.safetensors").write_bytes(b"of a larger world")
    (site.root / "out" / "notes.txt").write_text("mine")
    code, _, err = site.call("restore", "8", "--to", "out")
    assert (code, "already has rank7.safetensors" in err) == (16, True)
    site.json("restore", "8", "--to", "out", "--force")
    names = {path.name for path in (site.root / "out").iterdir()}
    assert names == {"notes.txt", *(f"rank{rank}{end}" for rank in (0, 1) for end in (".safetensors", ".manifest"))}


def test_a_step_that_turns_out_bad_leaves_no_half_of_it(site: CheckpointSite) -> None:
    site.put_disk(8)
    flip(site.root / "disk" / "host-b" / JOB / "g1" / "step8" / "rank1.safetensors", 100_000)
    code, _, err = site.call("restore", "8", "--to", "out")
    assert (code, "rank 1: " in err) == (23, True)
    assert list((site.root / "out").iterdir()) == []


def test_where_only_one_host_is_seen_its_disk_is_not_taken_for_needless(site: CheckpointSite) -> None:
    for step in (2, 4, 8):
        site.put_disk(step)
    site.put_store(4)
    view = ("--state-dir", str(site.state / "host-a"))
    code, _, err = site.call("rm", "8", "--yes", *view)
    assert (code, "disks of other hosts" in err) == (16, True)
    rest = site.json("rm", "--all", "--yes", *view)
    assert [(s["step"], s["why"]) for s in rest["stays"]] == [(4, "recovery_point"), (8, "partial_view")]
    assert {(r["step"], r["rank"]) for r in rest["removed"]} == {(2, 0)}
    site.put_memory(9)
    code, _, err = site.call("rm", "--memory", "--yes", *view)
    assert (code, "Step 9 of job is in memory" in err) == (16, True)


def test_a_step_is_not_restored_over_its_own_copies(site: CheckpointSite) -> None:
    site.put_disk(8)
    site.json("restore", "8", "--to", "out")
    for folder in (site.root / "out", site.root / "disk" / "host-a" / JOB / "g1" / "step8"):
        before = {path.name: path.read_bytes() for path in folder.iterdir()}
        places = ["--dir", "out"] if folder.name == "out" else []
        code, _, err = site.call("restore", "latest", "--to", str(folder), "--force", *places)
        assert (code, "step 8 of job is stored" in err) == (16, True)
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_a_step_that_is_overwritten_while_it_is_listed_is_no_recovery_point(site: CheckpointSite) -> None:
    site.put_memory(10)
    site.put_memory(11)

    class OverwrittenAtOnce(SlotPlace):
        def copies(self) -> list[ShardCopy]:
            found = super().copies()
            site.put_memory(13)
            return found

    places = [SlotPlace(Tier.MEMORY, site.prefix("host-a"), JOB, "host-a")]
    places.append(OverwrittenAtOnce(Tier.MEMORY, site.prefix("host-b"), JOB, "host-b"))
    inventory = CopyInventory(JOB, places)
    assert [(step.step, step.world_size, step.recovery_point) for step in inventory.steps] == [(10, 2, True)]


def test_folders_whose_names_no_host_can_have_are_passed_over(site: CheckpointSite) -> None:
    site.put_disk(8)
    disk = site.root / "disk"
    for name in (b"\xff", b"\x1b[2J", b"Not a host"):
        shutil.copytree(disk / "host-a", disk / os.fsdecode(name))
    listed = site.json("ls", "--dir", str(disk))
    assert [place["host_id"] for place in listed["places"]] == ["host-a", "host-b"]
    assert states(listed) == [(8, True, True)]
