"""Condition files that are links: an operator's are followed, those that a worker may have made are not."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from flyball.worker_user import WorkerUser
from host_daemon.probes.condition_files import ConditionFiles
from host_daemon.probes.findings import Reading

WORKERS = WorkerUser("nobody", 65534, 65534, (65534,), "/nonexistent")


def mount(folder: Path, version: str, message: str) -> None:
    """As Kubernetes mounts a ConfigMap, and changes it: by a link to a folder."""
    (folder / version).mkdir()
    said = {"kind": "ecc", "severity": "warning", "message": message}
    (folder / version / "node.json").write_text(json.dumps(said))
    (folder / "new").symlink_to(version)
    (folder / "new").rename(folder / "..data")
    if not (folder / "node.json").is_symlink():
        (folder / "node.json").symlink_to("..data/node.json")


def messages(files: ConditionFiles) -> list[str]:
    return [found.message for found in files.read().states]


def test_links_of_an_operator_are_followed(tmp_path: Path) -> None:
    files = ConditionFiles(tmp_path, WORKERS)
    for version in ("..1", "..2"):
        mount(tmp_path, version, f"As of {version}.")
        assert messages(files) == [f"As of {version}."]
    (tmp_path / "..data").unlink()
    assert files.read() == Reading(), "it leads nowhere"


@pytest.mark.parametrize("case", ["the same user", "folder", "target", "fifo", "device", "folder behind"])
def test_links_that_workers_may_have_made_are_not(
    tmp_path: Path, case: str, capsys: pytest.CaptureFixture[str]
) -> None:
    mount(tmp_path, "..1", "It is fine.")
    target = tmp_path / "..1/node.json"
    match case:
        case "folder":
            tmp_path.chmod(0o777)
        case "target":
            target.chmod(0o666)
        case "fifo":
            target.unlink()
            os.mkfifo(target)
        case "device":
            target.unlink()
            target.symlink_to("/dev/zero")
        case "folder behind":
            target.unlink()
            target.mkdir()
    files = ConditionFiles(tmp_path, None if case == "the same user" else WORKERS)
    assert files.read() == files.read() == Reading()
    assert capsys.readouterr().out.count("condition_file_ignored") == 1


def test_a_mount_that_nobody_can_write_to_is_an_operators(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mount(tmp_path, "..1", "It is fine.")
    mounted = os.statvfs(tmp_path)
    read_only = os.statvfs_result((*mounted[:8], mounted.f_flag | os.ST_RDONLY, *mounted[9:]))
    monkeypatch.setattr(os, "fstatvfs", lambda descriptor: read_only)
    assert messages(ConditionFiles(tmp_path)) == ["It is fine."]
