"""Which user may be the workers', and what a spawner that was taken over cannot do."""

from __future__ import annotations

import os
import tempfile
import threading
from pathlib import Path

import pytest

from ckpt_engine.slots import segment_owner
from flyball import worker_user
from flyball.contracts.errors import ConfigurationError
from flyball.worker_user import WorkerUser, find_worker_user

NOBODY = WorkerUser("nobody", 65534, 65534, (65534,), "/nonexistent")


def test_nobody_asked_for_another_user() -> None:
    assert find_worker_user("") is None


@pytest.mark.parametrize(("name", "why"), [("root", "not be root"), ("0", "not be root"), ("no-such", "no user")])
def test_a_user_that_protects_nothing_is_refused(monkeypatch: pytest.MonkeyPatch, name: str, why: str) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    with pytest.raises(ConfigurationError, match=why):
        find_worker_user(name)


def test_a_user_with_the_group_of_root_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(worker_user.os, "getgrouplist", lambda name, gid: [gid, 0])
    with pytest.raises(ConfigurationError, match="is in the group"):
        find_worker_user("nobody")


def test_only_root_can_become_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(ConfigurationError, match="runs as root"):
        find_worker_user("nobody")


def test_the_engine_gives_ranks_their_segments_and_keeps_replicas(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[int] = []
    monkeypatch.setattr(os, "fchown", lambda descriptor, uid, gid: given.append(uid))
    descriptor = os.open(tmp_path / "x", os.O_RDWR | os.O_CREAT)
    segment_owner.give_file(descriptor, "/dev/shm/flyball-0.job.r0.ctl")
    assert given == []
    segment_owner.serve_workers_of(NOBODY)
    try:
        for name in ("job.r0.ctl", "job.r12.s3", "a.p1.r0.s0", "x.p1.ctl.r0.ctl"):
            segment_owner.give_file(descriptor, f"/dev/shm/flyball-0.{name}")
        assert given == [NOBODY.uid] * 4
        for name in ("job.p0.ctl", "job.p12.s3", "a.r1.p4294967295.s0"):
            segment_owner.give_file(descriptor, f"/dev/shm/flyball-0.{name}")
        assert len(given) == 4
        assert segment_owner.is_ours(NOBODY.uid) and segment_owner.is_ours(os.geteuid())
        assert not segment_owner.is_ours(12345)
    finally:
        segment_owner.serve_workers_of(None)
        os.close(descriptor)
    assert not segment_owner.is_ours(NOBODY.uid)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_who_acts_as_the_user_has_its_groups_and_no_other_thread_does(tmp_path: Path) -> None:
    user = WorkerUser("nobody", 65534, 65534, (65534, 4242), "/nonexistent")
    before, seen = os.getgroups(), list[list[int]]()
    tmp_path.chmod(0o755)
    for parent in tmp_path.parents:
        if parent == Path(tempfile.gettempdir()):
            break
        parent.chmod(0o755)
    for_root, for_user = tmp_path / "for a group of root", tmp_path / "for a group of the user"
    for file, group in ((for_root, 4343), (for_user, 4242)):
        file.write_text("x")
        os.chown(file, 0, group)
        file.chmod(0o040)

    def act() -> None:
        worker_user._set_groups([0, 4343])  # root's, of this thread
        with user.acting():
            seen.append(sorted(os.getgroups()))
            assert for_user.read_text() == "x"
            with pytest.raises(PermissionError):
                for_root.read_text()
        seen.append(os.getgroups())
        assert for_root.read_text() == "x"

    thread = threading.Thread(target=act)
    thread.start()
    thread.join(60.0)
    assert seen == [[4242, 65534], [0, 4343]]
    assert os.getgroups() == before


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_who_cannot_have_the_groups_does_not_act_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_user, "_SETGROUPS", {})
    with pytest.raises(OSError, match="groups"), NOBODY.acting():
        pytest.fail("it acted")
