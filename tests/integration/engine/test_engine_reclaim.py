"""An engine reclaims the memory of jobs that it does not know, and of no others."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.clocks.waits import until
from support.commands.warm_python import WarmPython
from support.hosts.engine_cluster import EngineCluster
from support.hosts.engines import EngineHost, Trainer

from ckpt_engine.path_saves.path_memory import memory_root
from ckpt_engine.slots.rank_segments import RankSegments
from ckpt_engine.trainer.path_saves.load_path import load_path
from flyball.contracts import fault_points
from flyball.contracts.on_host.segments import rank_segment


@contextmanager
def stopped(host: EngineHost) -> Iterator[None]:
    """A sweep that lists segments while they are being made logs another size than it removes."""
    assert host.process is not None
    pid = host.process.pid

    def stands_still() -> bool:
        try:
            stats = [(task / "stat").read_text() for task in Path(f"/proc/{pid}/task").iterdir()]
        except (FileNotFoundError, ProcessLookupError):
            return False  # a thread ended meanwhile
        return all(stat.rpartition(")")[2].split()[0] == "T" for stat in stats)

    os.kill(pid, signal.SIGSTOP)
    try:
        until(stands_still)
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def leave(prefix: str) -> None:
    """Segments of a job whose processes are dead."""
    dead = RankSegments.open(rank_segment(prefix, "dead", 0), create=True)
    dead.begin_write(0, 1, 0, 5000)
    dead.close()


def test_an_engine_reclaims_the_segments_of_dead_jobs_and_of_no_others(cluster: EngineCluster) -> None:
    host = cluster.host("a", SEGMENT_TTL_S="0.1")
    cluster.configure(cluster.placement({"a": (0,)}))
    worker = Trainer(host, 0)
    worker.save(0)
    until(lambda: worker.world_step == 0)
    worker.segments.close()  # the worker is dead, but its next generation restores from here
    with stopped(host):
        leave(host.prefix)
        leave(host.prefix + "0")  # another state folder's
    until(lambda: host.logged("segments_reclaimed"))
    assert [(entry["job"], entry["size_bytes"]) for entry in host.logged("segments_reclaimed")] == [("dead", 5000)]
    names = {path.name.removeprefix("flyball-") for path in host.shm_dir.iterdir()}
    key = host.prefix.rpartition("-")[2]
    assert {f"{key}.job.r0.ctl", f"{key}.job.r0.s0", f"{key}0.dead.r0.ctl", f"{key}0.dead.r0.s0"} == names
    host.kill()
    leave(host.prefix)
    host.start()  # the job is known again before the first sweep
    until(lambda: len(host.logged("segments_reclaimed")) == 2)
    assert RankSegments.open(rank_segment(host.prefix, "job", 0)).find(1, 0) is not None


def test_an_engine_writes_what_a_killed_worker_saved_to_a_path(
    cluster: EngineCluster,
    warm_python: WarmPython,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    host = cluster.host("a", SEGMENT_TTL_S="0.1")
    monkeypatch.setenv("FLYBALL_SHM_DIR", str(host.shm_dir))
    path = tmp_path / "ckpt.pt"
    script = "import sys, torch, flyball; flyball.save({'x': torch.ones(1000)}, sys.argv[1]).wait()"
    environment = {**os.environ, fault_points.VARIABLE: "slot.before_manifest"}
    assert warm_python.run(script, str(path), environment=environment).returncode == -signal.SIGKILL
    until(lambda: path.stat().st_size > 4096 and not list(memory_root(os.environ).iterdir()))
    assert {entry["state"] for entry in host.logged("path_save")} <= {"written", "freed"}
    assert load_path(path, None)["x"].sum() == 1000
