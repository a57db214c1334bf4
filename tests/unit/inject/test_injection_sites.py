"""What a fault may touch: the GPU, shard, host and service that were meant, and no other."""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flyball.cli.inject.faults import services_folder
from flyball.cli.reach.client import ApiClient
from flyball.contracts.clock import SystemClock
from flyball.contracts.errors import NotFound, UsageError
from host_daemon.store.database import HostDatabase
from simulator.inject import faults, processes
from simulator.inject.faults import files_of
from simulator.inject.host_files import HostFiles
from simulator.inject.kinds import checkpoints, gpus, services
from simulator.inject.kinds.catalog import KINDS
from simulator.inject.kinds.kind import FaultSite
from simulator.inject.processes import LiveProcess


class Api:
    """A supervisor that knows one host."""

    def get(self, path: str, **_: str | int | None) -> Any:  # noqa: ANN401 - JSON
        assert path == "/v1/hosts/host-a"
        return {"host_id": "host-a", "daemon_pid": 4711, "job": "gpt"}

    def post(self, path: str, body: object = None) -> None:
        raise AssertionError(f"{path}: {body}")


def site(injection_id: str = "a1", **fields: Any) -> FaultSite:  # noqa: ANN401 - of a FaultSite
    return FaultSite(Api(), SystemClock(), injection_id, **fields)


def host_folder(folder: Path) -> Path:
    folder.mkdir()
    (folder / "VERSION").write_text("1\n")
    HostDatabase(folder / "daemon.sqlite").close()
    return folder


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_overlapping_faults_of_gpus_take_back_their_own_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, order: tuple[int, ...]
) -> None:
    monkeypatch.setattr(gpus, "probe_root", lambda _site: tmp_path)
    readings = tmp_path / "nvml.json"
    before = {"gpus": [{"pci": "00000000:3b:00.0", "uncorrected": 0, "celsius": 40}]}
    readings.write_text(json.dumps(before))
    made = []
    for number, (name, options) in enumerate([("ecc", {"uncorrected": "2"}), ("gpu-lost", {}), ("ecc", {})]):
        kind = KINDS[name]
        made.append((kind, kind.plan(site(f"a{number}", values=kind.values(options)))))
        kind.inject(made[-1][1])
    (gpu,) = json.loads(readings.read_text())["gpus"]
    assert (gpu["uncorrected"], gpu["lost"]) == (3, True)
    with pytest.raises(NotFound, match="lost already"):
        KINDS["gpu-lost"].plan(site(values=KINDS["gpu-lost"].values({})))
    gpu["celsius"] = 90  # somebody else writes meanwhile
    readings.write_text(json.dumps({"gpus": [gpu]}))
    for number in order:
        kind, plan = made[number]
        kind.undo(plan)
        kind.undo(plan)
    assert json.loads(readings.read_text()) == {"gpus": [before["gpus"][0] | {"celsius": 90}]}


def test_a_shard_of_the_job_and_run_is_damaged_whatever_the_base_is_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "gpt"  # as the job is
    shards = {}
    for number, place in enumerate(["gpt/run-2", "gpt/run-1", "other/run-3"]):
        shard = root / place / "g1/step5/rank0.safetensors"
        shard.parent.mkdir(parents=True)
        shard.write_bytes(b"x" * 30)
        os.utime(shard, (number, number))
        shards[place] = shard
    host = HostFiles(host_folder(tmp_path / "host-a"))
    kind = KINDS["corrupt-shard"]
    asked = site(
        host_id="host-a",
        files=host,
        job="gpt",
        rank=0,
        spec={"checkpoint": {"persistent_dir": str(root)}},
        values=kind.values({"tier": "persistent"}),
    )
    assert kind.plan(asked)["bytes"][0]["path"] == str(shards["gpt/run-1"]), "the newest of the job"
    worker = LiveProcess(1, 1, 1, ())
    monkeypatch.setattr(checkpoints, "running_worker", lambda *_: (None, worker))
    monkeypatch.setattr(checkpoints, "environment_of", lambda _: {"FLYBALL_RUN": "run-2"})
    assert kind.plan(asked)["bytes"][0]["path"] == str(shards["gpt/run-2"]), "that of its run"


@pytest.mark.parametrize(("tier", "damaged"), [("memory", ["r1.s0", "r1.s1"]), ("peer", ["p0.s0", "p2.s1"])])
def test_in_memory_the_ranks_own_slots_are_damaged_or_the_replicas_beside_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tier: str, damaged: list[str]
) -> None:
    """A host holds replicas of other hosts' ranks, never of its own."""
    monkeypatch.setattr(HostFiles, "segment_prefix", lambda _: tmp_path / "fb-1")
    names = ["r1.s0", "r1.s1", "r1.ctl", "r11.s0", "p0.s0", "p2.s1", "p2.ctl"]
    slots = [tmp_path / f"fb-1.gpt.{name}" for name in names]
    others = [tmp_path / "fb-1.gpt.2.p0.s0", tmp_path / "fb-1.gpt.2.r1.s0", tmp_path / "fb-12.gpt.p0.s0"]
    for path in (*slots, *others):
        path.write_bytes(bytes(30))
    kind = KINDS["corrupt-shard"]
    host = HostFiles(host_folder(tmp_path / "host-a"))
    plan = kind.plan(site(host_id="host-a", files=host, job="gpt", rank=1, values=kind.values({"tier": tier})))
    kind.inject(plan)
    changed = [path.name.removeprefix("fb-1.gpt.") for path in slots if path.read_bytes() != bytes(30)]
    assert changed == damaged
    assert all(path.read_bytes() == bytes(30) for path in others)


@pytest.mark.parametrize(
    ("host_id", "pids", "is_its"),
    [("host-a", {4711}, True), ("host-a", {99, 4711}, True), ("host-b", {4711}, False), ("host-a", {99}, False)],
)
def test_a_state_folder_has_to_be_of_the_host_whose_mark_is_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host_id: str, pids: set[int], is_its: bool
) -> None:
    folder = host_folder(tmp_path / "folder")
    daemon = LiveProcess(99, 1, 99, ("python", "host_daemon", "--state-dir", str(folder), "--host-id", host_id))
    monkeypatch.setattr(HostFiles, "daemon", lambda _: daemon)
    monkeypatch.setattr(faults, "pids_of", lambda _: pids)
    if is_its:
        assert files_of(Api(), "host-a", folder).root == folder.resolve()
    else:
        with pytest.raises(NotFound, match="is not the folder of host host-a"):
            files_of(Api(), "host-a", folder)


def test_a_state_folder_without_a_daemon_has_no_other_jobs_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = host_folder(tmp_path / "folder")
    assert files_of(Api(), "host-a", folder)
    own = processes.look_at(os.getpid())
    assert own is not None
    worker = faults.RecordedWorker("secret", 1, 0, own.pid, own.start_ticks)
    monkeypatch.setattr(HostFiles, "workers", lambda _: [worker])
    monkeypatch.setattr(HostFiles, "process_of", lambda *_: own)
    with pytest.raises(NotFound, match="ranks of secret run in it"):
        files_of(Api(), "host-a", folder)


def test_services_are_those_of_the_supervisor_that_is_asked(tmp_path: Path) -> None:
    own, foreign = tmp_path / "own", tmp_path / "foreign"
    for folder, token in ((own, "t1"), (foreign, "t2")):
        folder.mkdir()
        (folder / "token").write_text(f"{token}\n")
    with ApiClient("http://127.0.0.1:1", "t1") as client:
        assert services_folder(client, own, {}) == own
        with pytest.raises(UsageError, match="neither the address nor the token"):
            services_folder(client, foreign, {})
        assert services_folder(client, None, {"FLYBALL_STATE_DIR": str(own)}) == own
        assert services_folder(client, None, {"FLYBALL_STATE_DIR": str(foreign)}) is None
        (foreign / "supervisor.json").write_text(json.dumps({"url": client.url, "pid": os.getpid()}))
        assert services_folder(client, foreign, {}) == foreign


def test_a_lock_that_outlived_its_owner_names_no_process(tmp_path: Path) -> None:
    lock = tmp_path / "controller.lock"
    lock.write_text(f"{os.getpid()}\n")  # the pid is another process's by now: this one's
    asked = site(supervisor_dir=tmp_path, values={"service": "controller"})
    with pytest.raises(NotFound, match="The service controller does not run"):
        services.service_process(asked)
    with lock.open():
        assert services.service_process(asked).pid == os.getpid()


@pytest.mark.parametrize("uid", [os.geteuid, lambda: os.getuid() + 1])
def test_a_server_of_another_user_is_left_alone(monkeypatch: pytest.MonkeyPatch, uid: Callable[[], int]) -> None:
    own = processes.look_at(os.getpid())
    assert own is not None
    monkeypatch.setitem(services.SERVERS, "redis", (6379, (Path(own.argv[0]).name,)))
    with socket.create_server(("127.0.0.1", 0)) as server:
        asked = site(values={"server": "redis", "port": server.getsockname()[1]})
        if uid is os.geteuid:
            assert services.server_process(asked).pid == own.pid
        else:
            monkeypatch.setattr(processes.os, "geteuid", uid)
            with pytest.raises(NotFound, match="redis server does not run"):
                services.server_process(asked)


def test_a_server_whose_title_hides_its_command_line_is_not_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Redis writes its address over its arguments: it could not be started again."""
    asked = site(values={"server": "redis", "port": 1})
    for argv, lacks in ((("redis-server 127.0.0.1:1",), "--set-proc-title no"), ((sys.executable, "--port", "1"), "")):
        monkeypatch.setattr(services, "server_process", lambda _site, argv=argv: LiveProcess(1, 1, 1, argv))
        assert (lacks in KINDS["server-kill"].lacks(asked)) and (bool(lacks) == bool(KINDS["server-kill"].lacks(asked)))
