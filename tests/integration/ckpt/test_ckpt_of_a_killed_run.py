"""What `flyball ckpt` finds of a real run, during the run and after all its processes were killed."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import psutil
import pytest
from ckpt_sites import Site
from safetensors import safe_open
from support.commands.own_processes import is_of

SCRIPT = """
import time
import flyball, torch
job = flyball.attach()
state = {"weight": torch.zeros(50_000), "step": torch.zeros(1)}
start = job.restore(state)
for step in range(start, 1_000_000):
    state["weight"].fill_(step)
    state["step"].fill_(step)
    job.step(step)
    job.save(step, state)
    time.sleep(0.1)  # the test reads what is in memory
"""
DEADLINE_S = 300.0


class Run:
    """`flyball run` with two ranks, in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.site = Site(folder / "site", hosts=())
        (folder / "train.py").write_text(SCRIPT)
        flags = ["--job", "tiny", "--nproc-per-node", "2", "--local-ckpt-dir", "disk", "--local-ckpt-interval", "5"]
        with (folder / "run.log").open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "flyball.cli.main", "run", *flags, str(folder / "train.py")],
                cwd=self.site.root,
                env=self.site.environment,
                stdout=log,
                stderr=log,
            )

    def until(self, condition: Callable[[], object], what: str) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not condition():
            log = (self.folder / "run.log").read_text()
            assert self.process.poll() is None, log
            assert time.monotonic() < deadline, f"{what} did not happen: {log}"
            time.sleep(0.05)

    def kill(self) -> None:
        """SIGKILL every process of the run, by its id, until none is left: a process may have started another since
        they were listed."""
        deadline = time.monotonic() + DEADLINE_S
        while mine := [p for p in psutil.process_iter() if p.pid != os.getpid() and self._is_mine(p)]:
            assert time.monotonic() < deadline, mine
            for process in (mine := [*mine, *(child for p in mine for child in _children(p))]):
                try:
                    process.kill()
                except psutil.NoSuchProcess:
                    continue
            psutil.wait_procs([p for p in mine if p.pid != self.process.pid], timeout=DEADLINE_S)
        self.process.wait(DEADLINE_S)

    def _is_mine(self, process: psutil.Process) -> bool:
        return is_of(process, self.folder)


def _children(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.children(recursive=True)
    except psutil.Error:
        return []


@pytest.fixture
def run() -> Iterator[Run]:
    with tempfile.TemporaryDirectory(prefix="fb-") as name:  # short: it contains sockets
        started = Run(Path(name))
        try:
            yield started
        finally:
            started.kill()


def test_a_run_is_seen_alive_and_after_it_was_killed(run: Run) -> None:
    site = run.site

    def listed() -> dict[str, object]:
        code, out, _ = site.call("ls", "-o", "json")
        return msgspec.json.decode(out, type=dict[str, object]) if code == 0 else {}

    def tiers() -> set[str]:
        return {t["tier"] for s in listed().get("steps", []) if s["complete"] for t in s["tiers"]}  # type: ignore[attr-defined]

    run.until(lambda: {"memory", "disk"} <= tiers(), "a step in memory and on disk")
    refused, _, err = site.call("rm", "--memory", "--yes", "--force")
    assert (refused, "in use" in err) == (16, True)
    (supervisor,) = site.state.glob("jobs/tiny/supervisor")
    url = msgspec.json.decode((supervisor / "supervisor.json").read_bytes())["url"]

    def origins() -> list[str]:
        """What the supervisor knows. Slots may have been overwritten while they were listed: then they have no common
        step for once, and the newest one is on disk."""
        code, out, _ = site.call("plan", "latest", "--supervisor", url, "-o", "json")
        planned = msgspec.json.decode(out) if code == 0 else {"shards": []}
        return [shard["sources"][0]["origin"] for shard in planned["shards"]]

    run.until(lambda: origins() == ["local_slot", "local_slot"], "a plan that takes both ranks from their slots")

    run.kill()
    found = site.json("ls")
    assert all(0.0 <= step["age_s"] < 600.0 for step in found["steps"])
    point = found["recovery_point"]
    verified = site.json("verify", "--all")
    assert (verified["bad"], verified["gone"]) == (0, 0)
    restored = site.json("restore", "latest", "--to", "out")
    assert [s["source"]["tier"] for s in restored["shards"]] == ["memory", "memory"]
    for shard in restored["shards"]:
        with safe_open(shard["path"], "np") as file:
            assert set(file.get_tensor("weight").tolist()) == set(file.get_tensor("step").tolist()) == {float(point)}
    site.json("rm", "--memory", "--yes", "--force")
    assert [path for path in site.shm.iterdir() if not path.name.endswith((".beacon", ".seen", ".stacks"))] == []
    rest = site.json("ls")
    assert {t["tier"] for s in rest["steps"] for t in s["tiers"]} == {"disk"}
    assert rest["recovery_point"] % 5 == 0
